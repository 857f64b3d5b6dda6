"""Writing a generation as one qcow2 file, from front to back, without going back.

    header │ L1 │ refcount table │ refcount blocks │ L2, its data │ L2, its data │ …

All places are known before the first byte is written, from how many blocks each L2 table
maps; so the length of the file is known too, and nothing is kept but one table. What the
device has no data for is in no table: it reads as zeros. The file stands alone: it names no
backing file.

Source: QEMU, docs/interop/qcow2.txt.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.qcow2 import CLUSTER_BITS, HEADER, L2_SPAN_BLOCKS, MAGIC, VERSION

_COPIED = 1 << 63
"""Of an entry whose cluster has exactly one user."""

_REFCOUNT_ORDER = 4
_REFCOUNTS = BLOCK_BYTES // 2
"""Clusters that one refcount block counts, at 16 bits each."""


@dataclass(frozen=True)
class ImagePlan:
    """Where everything will be in the file."""

    size_bytes: int
    """Of the device."""
    counts: Mapping[int, int]
    """L2 table → blocks that it maps; in ascending order, none is zero."""

    @cached_property
    def l1_entries(self) -> int:
        return -(-self.size_bytes // (L2_SPAN_BLOCKS * BLOCK_BYTES))

    @cached_property
    def _l1_clusters(self) -> int:
        return -(-8 * self.l1_entries // BLOCK_BYTES)

    @cached_property
    def _refcounts(self) -> tuple[int, int]:
        """Return how many clusters refcount table and refcount blocks take."""
        others = 1 + self._l1_clusters + len(self.counts) + sum(self.counts.values())
        table, blocks = 1, 1
        while True:
            needed = -(-(others + table + blocks) // _REFCOUNTS)
            needed_table = -(-8 * needed // BLOCK_BYTES)
            if (needed_table, needed) == (table, blocks):
                return table, blocks
            table, blocks = needed_table, needed

    @cached_property
    def _body_cluster(self) -> int:
        return 1 + self._l1_clusters + sum(self._refcounts)

    @cached_property
    def clusters(self) -> int:
        return self._body_cluster + len(self.counts) + sum(self.counts.values())

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self.clusters * BLOCK_BYTES

    def head(self) -> Iterator[bytes]:
        """Give all that comes before the first L2 table, a cluster or so at a time."""
        yield _padded(self._header())
        yield _padded(self._l1())
        table, blocks = self._refcounts
        first = 1 + self._l1_clusters + table
        places = ((first + number) * BLOCK_BYTES for number in range(blocks))
        yield _padded(struct.pack(f">{blocks}Q", *places))
        for number in range(blocks):
            used = min(_REFCOUNTS, self.clusters - number * _REFCOUNTS)
            yield _padded(b"\0\1" * used)

    def _header(self) -> bytes:
        table, _ = self._refcounts
        return HEADER.pack(
            MAGIC,
            VERSION,
            0,
            0,
            CLUSTER_BITS,
            self.size_bytes,
            0,
            self.l1_entries,
            BLOCK_BYTES,
            (1 + self._l1_clusters) * BLOCK_BYTES,
            table,
            0,
            0,
            0,
            0,
            0,
            _REFCOUNT_ORDER,
            HEADER.size,
        )

    def _l1(self) -> bytes:
        entries = [0] * self.l1_entries
        at = self._body_cluster
        for table, count in self.counts.items():
            entries[table] = at * BLOCK_BYTES | _COPIED
            at += 1 + count
        return struct.pack(f">{self.l1_entries}Q", *entries)

    def tables(self) -> Iterator[tuple[int, int]]:
        """List the L2 tables, with the cluster of the file in which each lies."""
        at = self._body_cluster
        for table, count in self.counts.items():
            yield table, at
            at += 1 + count


def write_empty(path: Path, size_bytes: int) -> None:
    """Make an image of a device that nobody has written to, as `qemu-img create` would.

    That takes 25 ms to start and do what is a few hundred bytes; whoever opens a disk waits
    for two of them.

    Raises:
        FileExistsError: there is something in its place.
    """
    plan = ImagePlan(size_bytes, {})
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        for part in plan.head():
            os.pwrite(fd, part.rstrip(b"\0"), at)
            at += len(part)
        os.ftruncate(fd, plan.file_bytes)
    finally:
        os.close(fd)


def l2_table(blocks: Iterable[int], *, at_cluster: int) -> bytes:
    """Return an L2 table for these blocks of its span, whose data follows it in order."""
    entries = [0] * L2_SPAN_BLOCKS
    for place, number in enumerate(blocks, start=1):
        entries[number % L2_SPAN_BLOCKS] = (at_cluster + place) * BLOCK_BYTES | _COPIED
    return struct.pack(f">{L2_SPAN_BLOCKS}Q", *entries)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK_BYTES)
