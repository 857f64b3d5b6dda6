"""Reading disk images that other people made: raw, or qcow2 as any QEMU writes it.

The file is hostile until proven otherwise. Nothing outside it is ever opened: an image that
names a backing or data file is refused, and so is an encrypted one; internal snapshots are
left alone. Every place is checked against the file, each table is read once, and what is
read of clusters and what is written is bounded, however the file refers to itself.

What is taken is an ext4 file system: the whole device, or its one root partition, see
`partitions`. It is one that a guest can mount, see `file_system`.

Source: QEMU, docs/interop/qcow2.txt.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zstandard

from common.units import MiB
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.file_system import BadFileSystem, check_file_system
from hosts.volumes.index import MAX_DEVICE_BYTES
from hosts.volumes.partitions import (
    EXT_MAGIC,
    EXT_MAGIC_AT,
    BadTable,
    Partition,
    root_partition,
)

_HEADER_V2 = struct.Struct(">4sIQIIQIIQQIIQ")
_FEATURES = struct.Struct(">QQQII")
_MAGIC = b"QFI\xfb"

_DIRTY, _CORRUPT, _DATA_FILE, _COMPRESSION, _EXTENDED = (1 << bit for bit in range(5))
_ZLIB, _ZSTD = 0, 1

_VERSIONS = (2, 3)
_CLUSTER_BITS = range(9, 22)
_COMPRESSION_AT = 104

_OFFSET_MASK = 0x00FF_FFFF_FFFF_FE00
_COMPRESSED = 1 << 62
_ZERO = 1

MAX_L1_BYTES = 32 * MiB
"""QEMU's own limit."""

TOO_MUCH_DATA = "The image holds more data than is taken."

_OTHERS = {
    b"KDMV": "VMDK",
    b"vhdxfile": "VHDX",
    b"conectix": "VHD",
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
}


class BadImage(Exception):
    """The image cannot be taken; the text is for whoever sent it."""


@dataclass(frozen=True)
class Limits:
    """How large an image may be, in bytes."""

    device_bytes: int = MAX_DEVICE_BYTES
    data_bytes: int = MAX_DEVICE_BYTES


def unpack_image(source: Path, target: Path, limits: Limits) -> int:
    """Write the file system that an image holds to a new, sparse, raw file.

    Returns: the size of the device that the file is to be.

    Raises:
        BadImage: it is none that can be taken. The target may be there in part.
    """
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        image = _open(fd, limits)
        part = _file_system(image)
        _check(image, part)
        with _Target(target, part, limits) as raw:
            for at, data in image.pieces(part):
                raw.write(at, data)
    finally:
        os.close(fd)
    return _whole_blocks(part.length)


class _Image(Protocol):
    """A disk, as it is read from a file of some format."""

    size_bytes: int

    def read(self, at: int, length: int) -> bytes:
        """Read a few bytes of the device; fewer at its end."""

    def pieces(self, part: Partition) -> Iterator[tuple[int, bytes]]:
        """Give what is on a part of the device, each piece once and with its place.

        The first and the last may reach beyond it. Nothing else is read.
        """


def _open(fd: int, limits: Limits) -> _Image:
    start = os.pread(fd, 512, 0)
    if start.startswith(_MAGIC):
        return _Qcow2(fd, limits)
    _refuse_others(start)
    return _Raw(fd, limits)


def _file_system(image: _Image) -> Partition:
    """Find the ext4 file system on the device."""
    if image.read(EXT_MAGIC_AT, len(EXT_MAGIC)) == EXT_MAGIC:
        return Partition(0, image.size_bytes)
    try:
        found = root_partition(image.read, image.size_bytes)
    except BadTable as error:
        raise BadImage(str(error)) from error
    if found is None:
        raise BadImage("There is no ext4 file system on the image, nor a partition with one.")
    return found


def _check(image: _Image, part: Partition) -> None:
    """Refuse a file system that no guest could mount."""

    def read(at: int, length: int) -> bytes:
        return image.read(part.start + at, max(0, min(length, part.length - at)))

    try:
        check_file_system(read, part.length)
    except BadFileSystem as error:
        raise BadImage(str(error)) from error


def _refuse_others(start: bytes) -> None:
    for magic, name in _OTHERS.items():
        if start.startswith(magic):
            raise BadImage(f"This is a {name} file. Send raw or qcow2: qemu-img convert.")


def _check_size(size_bytes: int, limits: Limits) -> int:
    if size_bytes <= 0:
        raise BadImage("The image is empty.")
    if size_bytes > limits.device_bytes:
        raise BadImage(
            f"The image is a disk of {size_bytes} bytes; at most {limits.device_bytes} are "
            "taken."
        )
    return size_bytes


def _whole_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


class _Raw:
    """The device byte for byte."""

    def __init__(self, fd: int, limits: Limits) -> None:
        self._fd = fd
        self.size_bytes = _check_size(os.fstat(fd).st_size, limits)

    def read(self, at: int, length: int) -> bytes:
        return os.pread(self._fd, length, at)

    def pieces(self, part: Partition) -> Iterator[tuple[int, bytes]]:
        for at in range(part.start, part.end, BLOCK_BYTES):
            yield at, os.pread(self._fd, BLOCK_BYTES, at)


class _Target:
    """A sparse file with a range of the device, that takes no more than it may."""

    def __init__(self, path: Path, part: Partition, limits: Limits) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, _whole_blocks(part.length))
        self._part = part
        self._left_bytes = limits.data_bytes

    def __enter__(self) -> "_Target":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, at: int, data: bytes) -> None:
        data = data[max(0, self._part.start - at) : max(0, self._part.end - at)]
        if not data.strip(b"\0"):
            return
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise BadImage(TOO_MUCH_DATA)
        os.pwrite(self._fd, data, max(0, at - self._part.start))


@dataclass(frozen=True)
class _Header:
    size_bytes: int
    cluster_bits: int
    l1_at: int
    l1_entries: int
    compression: int

    @property
    def cluster_bytes(self) -> int:
        return 1 << self.cluster_bits

    @property
    def entries(self) -> int:
        """How many clusters an L2 table maps."""
        return self.cluster_bytes // 8


def _read_header(fd: int) -> _Header:
    raw = os.pread(fd, 112, 0).ljust(112, b"\0")
    (
        _, version, backing_at, _, cluster_bits, size_bytes, encryption, l1_entries, l1_at,
        _, _, _, _,
    ) = _HEADER_V2.unpack_from(raw)  # fmt: skip
    if version not in _VERSIONS:
        raise BadImage(f"This is qcow2 version {version}; 2 and 3 are taken.")
    if backing_at:
        raise BadImage(
            "The image names a backing file, and is not whole without it. Make one that "
            "stands alone: qemu-img convert."
        )
    if encryption:
        raise BadImage("The image is encrypted.")
    if cluster_bits not in _CLUSTER_BITS:
        raise BadImage("The image has clusters of an impossible size.")
    features, compression = 0, _ZLIB
    if version == max(_VERSIONS):
        features, _, _, _, header_bytes = _FEATURES.unpack_from(raw, _HEADER_V2.size)
        if header_bytes > _COMPRESSION_AT and features & _COMPRESSION:
            compression = raw[_COMPRESSION_AT]
    _check_features(features, compression)
    return _Header(size_bytes, cluster_bits, l1_at, l1_entries, compression)


def _check_features(features: int, compression: int) -> None:
    if features & _DATA_FILE:
        raise BadImage("The image keeps its data in another file.")
    if features & _CORRUPT:
        raise BadImage("The image is marked as corrupt. Repair it: qemu-img check -r all.")
    if features & ~(_DIRTY | _COMPRESSION) or compression not in {_ZLIB, _ZSTD}:
        raise BadImage("The image uses features of qcow2 that are not taken here.")


class _Qcow2:
    """A device whose clusters lie in the file as its tables say."""

    def __init__(self, fd: int, limits: Limits) -> None:
        self._fd = fd
        self._header = _read_header(fd)
        self.size_bytes = _check_size(self._header.size_bytes, limits)
        self._tables = _read_l1(fd, self._header)
        self._left_bytes = limits.data_bytes

    def read(self, at: int, length: int) -> bytes:
        end = min(at + length, self.size_bytes)
        parts = []
        while at < end:
            number, inside = divmod(at, self._header.cluster_bytes)
            part = self._cluster(number)[inside:][: end - at]
            # A cluster that is not there, or not in full, is zeros.
            part = part.ljust(min(end - at, self._header.cluster_bytes - inside), b"\0")
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def _cluster(self, number: int) -> bytes:
        table, place = divmod(number, self._header.entries)
        if table not in self._tables:
            return b""
        raw = _read(self._fd, self._tables[table] + 8 * place, 8)
        entry = int.from_bytes(raw, "big")
        return _read_cluster(self._fd, self._header, entry) if entry else b""

    def pieces(self, part: Partition) -> Iterator[tuple[int, bytes]]:
        for number, at in self._tables.items():
            first = number * self._header.entries
            for place, entry in _entries(self._fd, self._header, at):
                offset = (first + place) << self._header.cluster_bits
                if part.start < offset + self._header.cluster_bytes and offset < part.end:
                    yield offset, self._counted(_read_cluster(self._fd, self._header, entry))

    def _counted(self, cluster: bytes) -> bytes:
        """Count what was read, zeros too: many places may refer to one cluster of them."""
        self._left_bytes -= len(cluster)
        if self._left_bytes < 0:
            raise BadImage(TOO_MUCH_DATA)
        return cluster


def _read_l1(fd: int, header: _Header) -> dict[int, int]:
    """Map the places of the L2 tables that there are to their offsets."""
    span_bytes = header.entries << header.cluster_bits
    needed = -(-header.size_bytes // span_bytes)
    if header.l1_entries < needed or 8 * needed > MAX_L1_BYTES:
        raise BadImage("The image's size and its tables do not agree.")
    raw = _read(fd, header.l1_at, 8 * needed)
    found: dict[int, int] = {}
    for number, (entry,) in enumerate(struct.iter_unpack(">Q", raw)):
        offset = entry & _OFFSET_MASK
        if offset % header.cluster_bytes:
            raise BadImage("The image has a table at an impossible place.")
        if offset:
            found[number] = offset
    if len(set(found.values())) != len(found):
        raise BadImage("The image uses one table in two places.")
    return found


def _entries(fd: int, header: _Header, at: int) -> Iterator[tuple[int, int]]:
    raw = _read(fd, at, header.cluster_bytes)
    for place, (entry,) in enumerate(struct.iter_unpack(">Q", raw)):
        if entry:
            yield place, entry


def _read_cluster(fd: int, header: _Header, entry: int) -> bytes:
    if entry & _COMPRESSED:
        return _read_compressed(fd, header, entry & (_COMPRESSED - 1))
    if entry & _ZERO:
        return b""
    offset = entry & _OFFSET_MASK
    if offset % header.cluster_bytes or offset >= os.fstat(fd).st_size:
        raise BadImage("The image has data at an impossible place.")
    # Beyond the end of the file it is zeros, as QEMU reads it.
    return os.pread(fd, header.cluster_bytes, offset)


def _read_compressed(fd: int, header: _Header, entry: int) -> bytes:
    shift = 62 - (header.cluster_bits - 8)
    offset = entry & ((1 << shift) - 1)
    sectors = (entry >> shift) + 1
    length = sectors * 512 - offset % 512
    stored = os.pread(fd, min(length, 2 * header.cluster_bytes + 512), offset)
    try:
        if header.compression == _ZSTD:
            # A frame that claims more than a cluster would be given the memory for it.
            if zstandard.frame_content_size(stored) > header.cluster_bytes:
                raise BadImage("The image has compressed data that is longer than its place.")
            data: bytes = zstandard.ZstdDecompressor(max_window_size=1 << 24).decompress(
                stored, max_output_size=header.cluster_bytes
            )
        else:
            data = zlib.decompressobj(-15).decompress(stored, header.cluster_bytes)
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadImage("The image has compressed data that cannot be read.") from error
    if len(data) != header.cluster_bytes:
        raise BadImage("The image has compressed data that is cut short.")
    return data


def _read(fd: int, at: int, length: int) -> bytes:
    if at > os.fstat(fd).st_size:
        raise BadImage("The image has a table outside the file.")
    raw = os.pread(fd, length, at)
    if len(raw) != length:
        raise BadImage("The image has a table outside the file.")
    return raw
