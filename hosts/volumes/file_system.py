"""Telling whether an ext4 file system that somebody sent can be mounted by a guest.

It is what the kernel looks at before it mounts: the superblock with its checksum, whether
the file system fits its device, where each group's bitmaps and inodes are, and that there is
a root directory. Each is read at a place that was checked, in a bounded length. What lies
deeper is not looked at: the guest's own e2fsck sees to that.

Source: the kernel's Documentation/filesystems/ext4/ and fs/ext4/super.c.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from common.units import KiB, MiB

SUPERBLOCK_AT = SUPERBLOCK_BYTES = KiB
MAGIC_AT = SUPERBLOCK_AT + 0x38
MAGIC = b"\x53\xef"

MAX_TABLE_BYTES = 8 * MiB
"""Of descriptors: those of a disk of 1 TiB in the smallest blocks."""

MAX_BLOCK_BYTES = 4 * KiB
"""A guest mounts no larger ones: its pages have as many."""

MIN_INODE_BYTES = 128
WIDE = 64
"""Bytes that a descriptor with places of 64 bits has at least."""

_CHECKED_GROUPS = 8192
"""Of 1 TiB in usual blocks: checksums of so many take a moment."""

_CHECKSUM_AT, _DESCRIPTOR_CHECKSUM_AT = 0x3FC, 0x1E
_CRC32C = 1
_ALL_ONES = 0xFFFFFFFF
_DIRECTORY = 0x4000

_META_BG, _64BIT, _CSUM_SEED = 0x10, 0x80, 0x2000
_METADATA_CSUM, _BIGALLOC = 0x400, 0x200
_INCOMPAT = 0x3E7D6
"""What a kernel mounts: no compression, no journal's own device, no data in directories."""
_RO_COMPAT = 0x1A77F
"""What a kernel also writes to: no snapshots, no replicas, nothing shared."""

Read = Callable[[int, int], bytes]
"""Reads (at, length) of the file system; shorter beyond its end."""


class BadFileSystem(Exception):
    """It cannot be mounted; the text is for whoever sent it."""


def check_file_system(read: Read, length_bytes: int) -> None:
    """Look at a file system with this much room.

    Raises:
        BadFileSystem: a guest could not mount it.
    """
    raw = read(SUPERBLOCK_AT, SUPERBLOCK_BYTES)
    if len(raw) != SUPERBLOCK_BYTES or raw[0x38:0x3A] != MAGIC:
        raise _damaged("it has no superblock")
    _check_features(raw)
    if _u32(raw, 0x64) & _METADATA_CSUM and (
        raw[0x175] != _CRC32C
        or crc32c(_ALL_ONES, raw[:_CHECKSUM_AT]) != _u32(raw, _CHECKSUM_AT)
    ):
        raise _damaged("the checksum of its superblock is wrong")
    shape = _Shape.of(raw)
    if shape.blocks * shape.block_bytes > length_bytes:
        raise BadFileSystem(
            f"The image's file system has {shape.blocks * shape.block_bytes} bytes, and there "
            f"are {length_bytes}: it was cut short."
        )
    if not shape.is_meta:
        _check_groups(read, shape)


def _damaged(what: str) -> BadFileSystem:
    return BadFileSystem(f"The image's file system is damaged: {what}. Repair it: e2fsck -f.")


def _check_features(raw: bytes) -> None:
    if _u32(raw, 0x4C) > 1:
        raise _damaged("its revision is unknown")
    unknown = _u32(raw, 0x60) & ~_INCOMPAT, _u32(raw, 0x64) & ~_RO_COMPAT
    if any(unknown):
        raise BadFileSystem(
            "The image's file system is damaged, or uses features of ext4 that guests do not "
            f"have (incompatible {unknown[0]:#x}, read-only {unknown[1]:#x})."
        )


@dataclass(frozen=True)
class _Shape:
    """How a file system is divided."""

    block_bytes: int
    blocks: int
    groups: int
    inode_bytes: int
    descriptor_bytes: int
    seed: int | None
    """Of the descriptors' checksums, if they have any."""
    is_meta: bool
    """Whether the descriptors are spread over the groups."""

    @classmethod
    def of(cls, raw: bytes) -> "_Shape":
        """Read it from a superblock.

        Raises:
            BadFileSystem: it makes no sense.
        """
        incompat, ro_compat = _u32(raw, 0x60), _u32(raw, 0x64)
        scale = _u32(raw, 0x18)
        # As large a shift as anybody has; what is larger than a page is told below.
        if scale > 6:  # noqa: PLR2004
            raise _damaged("its blocks have an impossible size")
        block_bytes = KiB << scale
        if block_bytes > MAX_BLOCK_BYTES:
            raise BadFileSystem(
                f"The image's file system has blocks of {block_bytes} bytes; at most "
                f"{MAX_BLOCK_BYTES} are taken."
            )
        is_wide = bool(incompat & _64BIT)
        blocks = _u32(raw, 0x4) | (_u32(raw, 0x150) << 32 if is_wide else 0)
        groups = _groups(raw, blocks, block_bytes, has_clusters=bool(ro_compat & _BIGALLOC))
        descriptor_bytes = _u16(raw, 0xFE) if is_wide else 32
        inode_bytes = _u16(raw, 0x58) if _u32(raw, 0x4C) else MIN_INODE_BYTES
        if not _is_power(inode_bytes) or not MIN_INODE_BYTES <= inode_bytes <= block_bytes:
            raise _damaged("its inodes have an impossible size")
        if is_wide and (not _is_power(descriptor_bytes) or not WIDE <= descriptor_bytes <= KiB):
            raise _damaged("its descriptors have an impossible size")
        seed = None
        if ro_compat & _METADATA_CSUM:
            is_given = incompat & _CSUM_SEED
            seed = _u32(raw, 0x270) if is_given else crc32c(_ALL_ONES, raw[0x68:0x78])
        is_meta = bool(incompat & _META_BG)
        return cls(block_bytes, blocks, groups, inode_bytes, descriptor_bytes, seed, is_meta)


def _groups(raw: bytes, blocks: int, block_bytes: int, *, has_clusters: bool) -> int:
    first, per_group, inodes_per_group = _u32(raw, 0x14), _u32(raw, 0x20), _u32(raw, 0x28)
    clusters_per_group = _u32(raw, 0x24) if has_clusters else per_group
    bits = 8 * block_bytes
    if not per_group or not 0 < clusters_per_group <= bits or not 0 < inodes_per_group <= bits:
        raise _damaged("its groups have an impossible size")
    is_first = first == (1 if block_bytes == KiB else 0) or (has_clusters and first == 0)
    if not is_first or blocks <= first:
        raise _damaged("its blocks begin at an impossible place")
    groups = -(-(blocks - first) // per_group)
    if groups * inodes_per_group != _u32(raw, 0x0):
        raise _damaged("its groups do not have as many inodes as it says")
    return groups


def _check_groups(read: Read, shape: _Shape) -> None:
    table_bytes = shape.groups * shape.descriptor_bytes
    if table_bytes > MAX_TABLE_BYTES:
        raise _damaged("it has too many groups")
    place = SUPERBLOCK_AT // shape.block_bytes + 1
    table = read(place * shape.block_bytes, table_bytes)
    if len(table) != table_bytes:
        raise _damaged("its groups are not described")
    is_checked = shape.seed is not None and shape.groups <= _CHECKED_GROUPS
    for number in range(shape.groups):
        at = number * shape.descriptor_bytes
        one = table[at : at + shape.descriptor_bytes]
        if any(not 0 < place < shape.blocks for place in _places(one)):
            raise _damaged(f"group {number} is at an impossible place")
        if is_checked and not _is_whole(one, number, shape.seed or 0):
            raise _damaged(f"the checksum of group {number} is wrong")
    # The root directory is inode 2, the second of them.
    inodes = _places(table[: shape.descriptor_bytes])[2]
    mode = read(inodes * shape.block_bytes + shape.inode_bytes, 2)
    if int.from_bytes(mode, "little") & 0xF000 != _DIRECTORY:
        raise _damaged("it has no root directory")


def _places(descriptor: bytes) -> list[int]:
    """Return the blocks of a group's bitmaps and of its first inodes."""
    low = struct.unpack_from("<III", descriptor)
    is_wide = len(descriptor) >= WIDE
    high = struct.unpack_from("<III", descriptor, 0x20) if is_wide else (0, 0, 0)
    return [above << 32 | below for above, below in zip(high, low, strict=True)]


def _is_whole(descriptor: bytes, number: int, seed: int) -> bool:
    at = _DESCRIPTOR_CHECKSUM_AT
    blank = struct.pack("<I", number) + descriptor[:at] + bytes(2) + descriptor[at + 2 :]
    return crc32c(seed, blank) & 0xFFFF == _u16(descriptor, at)


def crc32c(value: int, data: bytes) -> int:
    """Go on with a checksum as ext4 computes it: the polynomial of Castagnoli, not inverted."""
    table = _crc_table()
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901
        table.append(value)
    return tuple(table)


def _is_power(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _u16(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "little")


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
