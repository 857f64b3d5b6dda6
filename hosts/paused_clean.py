"""Telling a file system that needs no e2fsck before it is mounted.

e2fsck takes most of the time of an open only to find that a sandbox ended in good order. It
is left out where nothing of what it would mend on its own can be there: the superblock says
that all is well, its checksum is right, no journal is to be replayed, no inode is orphaned,
and every group's descriptor has the right checksum. Bitmaps, inodes and directories have
checksums of their own, which fuse2fs looks at as it reads them.

Whatever is in doubt, or too large to be looked at in a moment, is left to e2fsck. The image
is hostile: nothing here leads anywhere but to an answer.

Source: the kernel's Documentation/filesystems/ext4/.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache

MAX_GROUPS = 1024
"""Of a file system of 128 GiB; their descriptors are checked in some milliseconds."""

MAX_CHUNKS_AHEAD = 64
"""Pieces of a disk that are read before they are asked for."""

_CHUNK_BYTES = 64 * 1024
"""A disk is read from its cache in such pieces, whatever is asked of one."""

_SUPERBLOCK_AT = 1024
_SUPERBLOCK_BYTES = 1024
_MAGIC = 0xEF53
_VALID = 1
_DYNAMIC = 1
_ALL_ONES = 0xFFFFFFFF
_CRC32C = 1
_CHECKSUM_AT = 0x3FC
_DESCRIPTOR_CHECKSUM_AT = 0x1E
_MIN_DESCRIPTOR, _MAX_DESCRIPTOR = 64, 1024

_METADATA_CSUM = 0x400
_RO_COMPAT = 0x1 | 0x2 | 0x8 | 0x20 | 0x40 | _METADATA_CSUM
"""Sparse backups, large and huge files, many links, large inodes: and no orphans."""
_64BIT = 0x80
_CSUM_SEED = 0x2000
_INCOMPAT = 0x2 | 0x40 | _64BIT | 0x200 | _CSUM_SEED
"""Types in directories, extents, 64 bits, flexible groups, a seed: and nothing to replay."""

Crc = Callable[[int, bytes], int]


def is_clean(image: int) -> bool:
    """Tell whether the ext4 image behind a descriptor can be mounted as it is."""
    try:
        return _is_clean(image, _crc32c())
    except (OSError, struct.error):
        return False


def _is_clean(image: int, crc: Crc) -> bool:
    block = os.pread(image, _SUPERBLOCK_BYTES, _SUPERBLOCK_AT)
    return (
        len(block) == _SUPERBLOCK_BYTES
        and _says_so(block)
        and crc(_ALL_ONES, block[:_CHECKSUM_AT]) == _u32(block, _CHECKSUM_AT)
        and _groups_are_whole(image, block, crc)
    )


def _says_so(block: bytes) -> bool:
    incompat, ro_compat = _u32(block, 0x60), _u32(block, 0x64)
    return (
        _u16(block, 0x38) == _MAGIC
        and _u16(block, 0x3A) == _VALID
        and _u32(block, 0x4C) == _DYNAMIC
        and not incompat & ~_INCOMPAT
        and bool(incompat & _64BIT)
        and bool(ro_compat & _METADATA_CSUM)
        and not ro_compat & ~_RO_COMPAT
        and block[0x175] == _CRC32C
        and _u32(block, 0xE8) == 0  # the list of orphans
        and _u32(block, 0x194) == 0  # errors that were seen
    )


def _groups_are_whole(image: int, block: bytes, crc: Crc) -> bool:
    scale, first, per_group = _u32(block, 0x18), _u32(block, 0x14), _u32(block, 0x20)
    size = _u16(block, 0xFE)
    blocks = _u32(block, 0x4) | _u32(block, 0x150) << 32
    if scale > 6 or not per_group or not _MIN_DESCRIPTOR <= size <= _MAX_DESCRIPTOR:  # noqa: PLR2004
        return False
    groups = -(-(blocks - first) // per_group)
    if not 0 < groups <= MAX_GROUPS:
        return False
    table = os.pread(image, groups * size, (first + 1) * (1024 << scale))
    if len(table) != groups * size:
        return False
    _read_ahead(image, table, size, 1024 << scale)
    is_seeded = _u32(block, 0x60) & _CSUM_SEED
    seed = _u32(block, 0x270) if is_seeded else crc(_ALL_ONES, block[0x68:0x78])
    return all(
        _is_whole(table[number * size : (number + 1) * size], number, seed, crc)
        for number in range(groups)
    )


def _read_ahead(image: int, table: bytes, size: int, block_bytes: int) -> None:
    """Have what a mount reads first read meanwhile: bitmaps, and the first inodes."""
    places = {_u32(table, 0x8) * block_bytes}
    for at in range(0, len(table), size):
        places |= {_u32(table, at + field) * block_bytes for field in (0x0, 0x4)}
    chunks = sorted({place // _CHUNK_BYTES for place in places})
    with suppress(OSError):  # no more than a hint
        for chunk in chunks[:MAX_CHUNKS_AHEAD]:
            os.posix_fadvise(image, chunk * _CHUNK_BYTES, _CHUNK_BYTES, os.POSIX_FADV_WILLNEED)


def _is_whole(descriptor: bytes, number: int, seed: int, crc: Crc) -> bool:
    at = _DESCRIPTOR_CHECKSUM_AT
    blank = struct.pack("<I", number) + descriptor[:at] + bytes(2) + descriptor[at + 2 :]
    return crc(seed, blank) & 0xFFFF == _u16(descriptor, at)


@cache
def _crc32c() -> Crc:
    """Return the checksum of the library that e2fsck itself uses.

    Raises:
        OSError: it is not there.
    """
    library = ctypes.CDLL("libext2fs.so.2")
    function = library.ext2fs_crc32c_le
    function.restype = ctypes.c_uint32
    function.argtypes = [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]
    return lambda value, data: int(function(value, data, len(data)))


def _u16(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "little")


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
