"""Reads a large directory from the image itself, with what is known of each file in it.

fuse2fs finds a name by reading its directory from the start, so that to describe the files of
a large one through it takes hours. Here the directory and the inodes are read one after the
other, as they lie on the disk, once fuse2fs has written out what it holds.

The image is hostile: each number is checked against what it points into, every walk ends with
the size that a directory may have, and what makes no sense is a `Senseless`, after which the
caller does without.

Source: the kernel's Documentation/filesystems/ext4/.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAX_DIRECTORY_BYTES = 1 << 28
MAX_DEPTH = 5

_SUPERBLOCK_AT = 1024
_MAGIC = 0xEF53
_ROOT_INODE = 2
_EXTENT_MAGIC = 0xF30A
_64BIT = 0x80
_UNREAD = 0x8000 | 0x10000 | 0x20000 | 0x10
"""Incompatible features that change what is read here: inline data, encryption, folded
names, meta block groups."""
_EXTENTS_FLAG = 0x80000
_INLINE_FLAG = 0x10000000
_IS_DIRECTORY = 0x4000
_KIND_MASK = 0xF000
_UNINITIALISED = 1 << 15
_CHUNK_BYTES = 64 * 1024
_BATCH = 20_000


class Senseless(Exception):
    """What the image says cannot be."""


@dataclass(frozen=True)
class Entry:
    """A name in a directory, and what its inode says."""

    name: bytes
    mode: int
    uid: int
    gid: int
    size_bytes: int
    atime: int
    mtime: int
    links: int


class Image:
    """An ext4 file system, read without its mount."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._image_bytes = os.lseek(fd, 0, os.SEEK_END)
        self._chunk_at, self._chunk = -1, b""
        self._group, self._table = -1, 0
        block = self._read(_SUPERBLOCK_AT, 1024)
        if _u16(block, 0x38) != _MAGIC or _u32(block, 0x60) & _UNREAD:
            raise Senseless("the superblock")
        scale = _u32(block, 0x18)
        self._block_bytes = 1024 << scale if scale <= 6 else 0  # noqa: PLR2004
        self._inode_count = _u32(block, 0x0)
        self._inodes_per_group = _u32(block, 0x28)
        self._inode_bytes = _u16(block, 0x58)
        is_64bit = bool(_u32(block, 0x60) & _64BIT)
        self._descriptor_bytes = _u16(block, 0xFE) if is_64bit else 32
        self._descriptors_at = (_u32(block, 0x14) + 1) * self._block_bytes
        if not (
            self._block_bytes
            and self._inodes_per_group
            and 128 <= self._inode_bytes <= 4096  # noqa: PLR2004
            and 32 <= self._descriptor_bytes <= 1024  # noqa: PLR2004
        ):
            raise Senseless("the superblock")

    def number_of(self, path: bytes) -> int:
        """Return the number of the inode of a path without symbolic links.

        Raises:
            Senseless: it is not there, or leads through what is not understood here.
        """
        number = _ROOT_INODE
        for part in filter(None, path.split(b"/")):
            children = (child for child, name in self._children(number) if name == part)
            number = next(children, 0)
            if not number:
                raise Senseless("the path")
        return number

    def entries(self, number: int) -> Iterator[Entry]:
        """Yield what is in the directory whose inode has this number, in no order.

        Raises:
            Senseless: it is no directory, or not one that is understood here.
        """
        names = self._children(number)
        while batch := list(itertools.islice(names, _BATCH)):
            # A directory is in the order of its names' hashes; inodes are read as they lie.
            batch.sort()
            for child, name in batch:
                yield self._entry(name, self._inode(child))

    def _children(self, number: int) -> Iterator[tuple[int, bytes]]:
        inode = self._inode(number)
        flags = _u32(inode, 0x20)
        size_bytes = self._size(inode)
        if (
            _u16(inode, 0) & _KIND_MASK != _IS_DIRECTORY
            or not flags & _EXTENTS_FLAG
            or flags & _INLINE_FLAG
            or size_bytes > min(MAX_DIRECTORY_BYTES, self._image_bytes)
        ):
            raise Senseless("the directory")
        return self._names(inode, size_bytes // self._block_bytes)

    def _names(self, inode: bytes, left: int) -> Iterator[tuple[int, bytes]]:
        for first, count in self._extents(inode[0x28:0x64], MAX_DEPTH):
            for block in range(first, first + min(count, left)):
                yield from self._in_block(self._block(block))
            left -= count
            if left <= 0:
                return

    def _in_block(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        at = 0
        while at + 8 <= len(block):
            number, length, name_bytes = struct.unpack_from("<IHB", block, at)
            if length < 8 or length % 4 or at + length > len(block):  # noqa: PLR2004
                raise Senseless("an entry")
            name = block[at + 8 : at + 8 + name_bytes]
            # Blocks of the index and of checksums look like entries without a file.
            if number and name_bytes and name not in (b".", b".."):
                if name_bytes > length - 8 or b"/" in name or b"\0" in name:
                    raise Senseless("a name")
                yield number, name
            at += length

    def _entry(self, name: bytes, inode: bytes) -> Entry:
        return Entry(
            name=name,
            mode=_u16(inode, 0x0),
            uid=_u16(inode, 0x2) | _u16(inode, 0x78) << 16,
            gid=_u16(inode, 0x18) | _u16(inode, 0x7A) << 16,
            size_bytes=self._size(inode),
            atime=struct.unpack_from("<i", inode, 0x8)[0],
            mtime=struct.unpack_from("<i", inode, 0x10)[0],
            links=_u16(inode, 0x1A),
        )

    @staticmethod
    def _size(inode: bytes) -> int:
        return _u32(inode, 0x4) | _u32(inode, 0x6C) << 32

    def _extents(self, node: bytes, depth: int) -> Iterator[tuple[int, int]]:
        """Yield (first block, count) of what a node of the extent tree leads to."""
        magic, count, _, below = struct.unpack_from("<HHHH", node)
        if magic != _EXTENT_MAGIC or below >= depth or 12 * (count + 1) > len(node):
            raise Senseless("an extent")
        for number in range(count):
            at = 12 * (number + 1)
            if below:
                low, high = struct.unpack_from("<IH", node, at + 4)
                yield from self._extents(self._block(high << 32 | low), below)
            else:
                length, high, low = struct.unpack_from("<HHI", node, at + 4)
                if length > _UNINITIALISED:
                    raise Senseless("an extent")
                yield high << 32 | low, length

    def _inode(self, number: int) -> bytes:
        if not 0 < number <= self._inode_count:
            raise Senseless("an inode's number")
        group, place = divmod(number - 1, self._inodes_per_group)
        if group != self._group:
            at = self._descriptors_at + group * self._descriptor_bytes
            descriptor = self._read(at, self._descriptor_bytes)
            self._group, self._table = group, _u32(descriptor, 0x8)
            if self._descriptor_bytes >= 64:  # noqa: PLR2004
                self._table |= _u32(descriptor, 0x28) << 32
        return self._read(self._table * self._block_bytes + place * self._inode_bytes, 128)

    def _block(self, number: int) -> bytes:
        return self._read(number * self._block_bytes, self._block_bytes)

    def _read(self, at: int, count: int) -> bytes:
        """Read from the chunk that was read last, or from another: neighbours come together."""
        begin = at - self._chunk_at
        if self._chunk_at < 0 or begin < 0 or begin + count > len(self._chunk):
            if at + count > self._image_bytes:
                raise Senseless("a place beyond the image")
            chunk_at = at - at % 4096
            self._chunk = os.pread(self._fd, _CHUNK_BYTES + count, chunk_at)
            self._chunk_at, begin = chunk_at, at - chunk_at
        found = self._chunk[begin : begin + count]
        if len(found) != count:
            raise Senseless("a place beyond the image")
        return found


def _u16(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "little")


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
