"""Reading a qcow2 overlay's own clusters, by its L1 and L2 tables alone.

`qemu-img map` and NBD's block status visit the whole virtual size (minutes at 64 TiB); the
tables list only what was written. An overlay of ours refers to nothing outside itself: its
backing is given to the storage daemon when it starts, never written into the file.

Source: QEMU, docs/interop/qcow2.txt.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.units import MiB
from hosts.volumes.blocks import BLOCK_BYTES, ZERO_BLOCK, Block
from hosts.volumes.errors import Corrupt

HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")
MAGIC = b"QFI\xfb"
VERSION = 3
_DIRTY = 1
"""The one incompatible feature that we read through: only refcounts are affected."""

CLUSTER_BITS = 16
_L2_ENTRIES = BLOCK_BYTES // 8
_L2 = struct.Struct(f">{_L2_ENTRIES}Q")
L2_SPAN_BLOCKS = _L2_ENTRIES
"""Clusters that one L2 table maps: 512 MiB of the device."""

_MAX_L1_BYTES = 2 * MiB
"""Twice what the largest device needs, 64 TiB: nothing longer is read into memory."""

_OFFSET_MASK = 0x00FF_FFFF_FFFF_FE00
_COMPRESSED = 1 << 62
_ZERO = 1

Cluster = int | None
"""Where a cluster's data is in the file, in bytes; None reads as zeros."""


@dataclass(frozen=True)
class Overlay:
    """An open overlay: its size and where its L2 tables are."""

    fd: int
    size_bytes: int
    tables: dict[int, int]
    """L1 index → offset of an L2 table, for those that exist."""

    def clusters(self, table: int) -> dict[int, Cluster]:
        """List the clusters that one L2 table maps, by number in the device.

        A number that is missing is unallocated: whatever lies below shows through. One
        that is None was zeroed or discarded: what lies below does not.

        Raises:
            Corrupt: the table is outside the file or holds what no overlay of ours does.
        """
        at = self.tables.get(table)
        if at is None:
            return {}
        raw = os.pread(self.fd, BLOCK_BYTES, at)
        if len(raw) != BLOCK_BYTES:
            raise Corrupt("An overlay's L2 table lies outside the file.")
        first = table * L2_SPAN_BLOCKS
        return {
            first + place: _cluster(entry)
            for place, entry in enumerate(_L2.unpack(raw))
            if entry
        }

    def read(self, cluster: Cluster) -> Block:
        """Read a cluster's data; beyond the end of the file it is zeros, as QEMU reads it."""
        return ZERO_BLOCK if cluster is None else self.read_run(cluster, 1)[0]

    def read_run(self, at: int, count: int) -> list[bytearray]:
        """Read clusters that follow one another in the file, as `read` does."""
        blocks = [bytearray(BLOCK_BYTES) for _ in range(count)]
        done_bytes = os.preadv(self.fd, blocks, at)
        end = min(at + count * BLOCK_BYTES, os.fstat(self.fd).st_size)
        if at + done_bytes < end:
            raise OSError("An overlay gave less than it holds.")
        return blocks

    def is_empty(self) -> bool:
        return not any(self.clusters(table) for table in self.tables)


def _cluster(entry: int) -> Cluster:
    if entry & _COMPRESSED:
        raise Corrupt("An overlay has a compressed cluster, which ours never do.")
    if entry & _ZERO:
        return None
    offset = entry & _OFFSET_MASK
    if not offset or offset % BLOCK_BYTES:
        raise Corrupt("An overlay has a cluster at an impossible offset.")
    return offset


@contextmanager
def open_overlay(path: Path) -> Iterator[Overlay]:
    """Open an overlay for reading. Nobody may be writing to it.

    Raises:
        Corrupt: it is no qcow2 as we make them: version 3, clusters of 64 KiB, no backing
            or data file, no encryption, no internal snapshots, tables inside the file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes, l1_at, l1_entries = _read_header(fd)
        raw = os.pread(fd, 8 * l1_entries, l1_at)
        if len(raw) != 8 * l1_entries:
            raise Corrupt("An overlay's L1 table lies outside the file.")
        tables = {}
        for number, (entry,) in enumerate(struct.iter_unpack(">Q", raw)):
            offset = entry & _OFFSET_MASK
            if offset % BLOCK_BYTES:
                raise Corrupt("An overlay has an L2 table at an impossible offset.")
            if offset and number * L2_SPAN_BLOCKS * BLOCK_BYTES < size_bytes:
                tables[number] = offset
        yield Overlay(fd, size_bytes, tables)
    finally:
        os.close(fd)


def _read_header(fd: int) -> tuple[int, int, int]:
    raw = os.pread(fd, HEADER.size, 0)
    if len(raw) != HEADER.size or raw[:4] != MAGIC:
        raise Corrupt("Not a qcow2 file.")
    (
        _, version, backing_at, _, cluster_bits, size_bytes, encryption, l1_entries, l1_at,
        _, _, snapshots, _, incompatible, _, _, _, _,
    ) = HEADER.unpack(raw)  # fmt: skip
    if version != VERSION or cluster_bits != CLUSTER_BITS:
        raise Corrupt("An overlay has another version or cluster size than ours.")
    if backing_at or encryption or snapshots or incompatible & ~_DIRTY:
        raise Corrupt("An overlay uses features that ours never do.")
    if l1_at % BLOCK_BYTES or l1_at > _OFFSET_MASK:
        raise Corrupt("An overlay has its L1 table at an impossible offset.")
    needed = -(-size_bytes // (L2_SPAN_BLOCKS * BLOCK_BYTES))
    if not needed <= l1_entries <= _MAX_L1_BYTES // 8 or size_bytes % BLOCK_BYTES:
        raise Corrupt("An overlay's size and tables do not agree.")
    return size_bytes, l1_at, l1_entries
