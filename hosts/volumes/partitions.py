"""Finding the one Linux root partition of a disk image that somebody sent: GPT or MBR.

A table is hostile until proven otherwise. It is read once, at places that are fixed or
checked, in a bounded length; it decides nothing but which range of the image is taken, and
that lies inside the image. Logical partitions (a chain inside an extended one) are not
followed.

Source: UEFI Specification 2.10, chapter 5; type GUIDs: the UAPI group's Discoverable
Partitions Specification.
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from common.units import KiB, MiB

SECTOR_BYTES = 512
MAX_PARTITIONS = 256
MAX_TABLE_BYTES = 64 * KiB
MIN_BYTES = MiB
"""A root file system is larger."""

EXT_MAGIC_AT = 1024 + 56
EXT_MAGIC = b"\x53\xef"

_MBR_ENTRY = struct.Struct("<B3xB3xII")
_MBR_AT, _MBR_ENTRIES = 446, 4
_MBR_SIGNATURE = b"\x55\xaa"
_PROTECTIVE = 0xEE

_GPT_HEADER = struct.Struct("<8s4sII4xQQQQ16sQIII")
_GPT_SIGNATURE = b"EFI PART"
_GPT_CRC_AT = 16
_GPT_ENTRY = struct.Struct("<16s16sQQ")
_GPT_ENTRY_BYTES = 128

ROOTS = frozenset(
    UUID(text).bytes_le
    for text in (
        "4f68bce3-e8cd-4db1-96e7-fbcaf984b709",  # x86-64
        "b921b045-1df0-41c3-af44-4c6f280d3fae",  # 64-bit ARM
    )
)
BOOT = UUID("bc13c2ff-59e6-4262-a352-b275fd6f7172").bytes_le
"""Kernels, which are not started here."""

Read = Callable[[int, int], bytes]
"""Reads (at, length) of the image's device; shorter beyond its end."""


class BadTable(Exception):
    """There is no partition to be taken; the text is for whoever sent the image."""


@dataclass(frozen=True)
class Partition:
    """A range of the device, in bytes. `kind` is a GPT type; empty in an MBR."""

    start: int
    length: int
    kind: bytes = b""

    @property
    def end(self) -> int:
        return self.start + self.length


def root_partition(read: Read, device_bytes: int) -> Partition | None:
    """Return the partition with the root file system; None if there is no table at all.

    Raises:
        BadTable: the table makes no sense, or names none, or several.
    """
    first = read(0, SECTOR_BYTES)
    if len(first) != SECTOR_BYTES or not first.endswith(_MBR_SIGNATURE):
        return None
    found = _mbr(first)
    if found is None:
        found = _gpt(read, device_bytes)
    if not found:
        return None
    for one in found:
        if one.start < SECTOR_BYTES or one.length <= 0:
            raise BadTable(
                "The image's partition table has a partition at an impossible place."
            )
        if one.end > device_bytes:
            raise BadTable(
                "The image's partition table has a partition beyond the image's end: it was "
                "cut short."
            )
    return _chosen([one for one in found if _is_ext(read, one)])


def _is_ext(read: Read, partition: Partition) -> bool:
    if partition.length < MIN_BYTES:
        return False
    return read(partition.start + EXT_MAGIC_AT, len(EXT_MAGIC)) == EXT_MAGIC


def _chosen(candidates: list[Partition]) -> Partition:
    """Choose what says that it is a root, or what is left without those for kernels."""
    roots = [one for one in candidates if one.kind in ROOTS]
    others = [one for one in candidates if one.kind != BOOT]
    for chosen in (roots, others, candidates):
        if len(chosen) == 1:
            return chosen[0]
    if not candidates:
        raise BadTable("None of the image's partitions has an ext4 file system.")
    raise BadTable(
        f"{len(candidates)} of the image's partitions have an ext4 file system, and none of "
        "them says that it is the root. Send that one alone."
    )


def _mbr(sector: bytes) -> list[Partition] | None:
    """List the primary partitions; None where the table says that a GPT follows."""
    found = []
    for number in range(_MBR_ENTRIES):
        at = _MBR_AT + number * _MBR_ENTRY.size
        _, kind, start, count = _MBR_ENTRY.unpack_from(sector, at)
        if kind == _PROTECTIVE:
            return None
        if kind and count:
            found.append(Partition(start * SECTOR_BYTES, count * SECTOR_BYTES))
    return found


def _gpt(read: Read, device_bytes: int) -> list[Partition]:
    raw = read(SECTOR_BYTES, SECTOR_BYTES).ljust(SECTOR_BYTES, b"\0")
    (
        signature, _, header_bytes, crc, own, _, _, _, _, table, count, entry_bytes, table_crc,
    ) = _GPT_HEADER.unpack_from(raw)  # fmt: skip
    if signature != _GPT_SIGNATURE or own != 1:
        raise BadTable("The image's GPT is not where it should be; sectors have 512 bytes.")
    if not _GPT_HEADER.size <= header_bytes <= SECTOR_BYTES:
        raise BadTable("The image's GPT has a header of an impossible size.")
    blank = raw[:_GPT_CRC_AT] + bytes(4) + raw[_GPT_CRC_AT + 4 : header_bytes]
    if zlib.crc32(blank) != crc:
        raise BadTable("The image's GPT is damaged.")
    table_bytes = count * entry_bytes
    if (
        entry_bytes < _GPT_ENTRY_BYTES
        or count > MAX_PARTITIONS
        or table_bytes > MAX_TABLE_BYTES
        or table * SECTOR_BYTES + table_bytes > device_bytes
    ):
        raise BadTable("The image's GPT has a table of an impossible size or place.")
    entries = read(table * SECTOR_BYTES, table_bytes)
    if zlib.crc32(entries) != table_crc:
        raise BadTable("The image's GPT is damaged.")
    found = []
    for at in range(0, table_bytes, entry_bytes):
        kind, _, start, last = _GPT_ENTRY.unpack_from(entries, at)
        if any(kind):
            length = (last - start + 1) * SECTOR_BYTES
            found.append(Partition(start * SECTOR_BYTES, length, kind))
    return found
