"""Holding a served file system still, whole and clean, while its disk is cut for a commit.

    worker ─ <volume>.settle ─▶ server     "settled": all is in the image, nothing changes
           ─ cuts the disk ─
           ─ closes the socket ─▶          the requests go on

So what was written to the files of a paused sandbox is committed while they stay open.
fuse2fs writes in place and journals nothing, but after an fsync the image is consistent; it
only says that it is mounted. That is put right for the length of the cut: a generation
says that its file system is clean, and is not checked whole when it is next used.

The server's loop waits meanwhile, for some milliseconds, and never longer than
`SETTLE_TIMEOUT_S`, whatever becomes of the worker.

Source: the kernel's Documentation/filesystems/ext4/super.rst, for the fields.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SETTLE_TIMEOUT_S = 20.0
MAX_LOOKED_AT = 4_000
"""Of this many names one should be a regular file, or the files are closed instead."""

SUPERBLOCK_AT = 1024
SUPERBLOCK_BYTES = 1024
_STATE_AT = 0x3A
_IS_CLEAN = 1
_RO_COMPAT_AT = 0x64
_METADATA_CSUM = 0x400
_CHECKSUM_AT = 0x3FC
_SETTLED = b"settled"
_MAX_ANSWER_BYTES = 200


def answers(image: int) -> bool:
    """Tell whether what shows the image still serves it, by a question no cache answers.

    A disk whose storage daemon ended never answers by this descriptor again. fuse2fs takes
    its errors for data: what was read since is not to be trusted.
    """
    try:
        os.statvfs(image)
    except OSError as error:
        return error.errno == errno.ENOSYS  # it knows no such question, and said so
    return True


class Unsettled(Exception):
    """The file system could not be held still; nothing was changed."""


class Settler:
    """The server's side: flushes the file system that is its root."""

    def __init__(self, image: int) -> None:
        self.image = image
        self._handle: bytes | None = None

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Have everything in the image, which says meanwhile that it is clean.

        Raises:
            OSError: it cannot be flushed.
        """
        with self.flushed():
            mounted = os.pread(self.image, SUPERBLOCK_BYTES, SUPERBLOCK_AT)
            os.pwrite(self.image, as_clean(mounted), SUPERBLOCK_AT)
            try:
                os.fsync(self.image)
                yield
            finally:
                os.pwrite(self.image, mounted, SUPERBLOCK_AT)

    @contextmanager
    def flushed(self) -> Iterator[None]:
        """Fsync a file that is open for writing: fuse2fs then flushes all there is.

        None is made for that, since it would be in the generation. It is closed afterwards
        only: the kernel does not wait for what fuse2fs does then, which is to write the
        superblock again. All that was closed before is done before the fsync is, see
        `hosts.fuse_limits`.

        Raises:
            OSError: there is no file to do it by, or it fails.
        """
        fd = self._open_one()
        try:
            os.fsync(fd)
            yield
        finally:
            os.close(fd)

    def _open_one(self) -> int:
        if self._handle is not None:
            with suppress(OSError):
                return _open_regular(self._handle)
        for path in _regular_files(b"/"):
            with suppress(OSError):
                fd = _open_regular(path)
                self._handle = path
                return fd
        raise OSError(errno.ENOENT, "no regular file to flush by")


def _open_regular(path: bytes) -> int:
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file")


def _regular_files(top: bytes) -> Iterator[bytes]:
    """Yield regular files, those near the top first."""
    pending, looked_at = [top], 0
    while pending and looked_at < MAX_LOOKED_AT:
        folder = pending.pop(0)
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                looked_at += 1
                if looked_at > MAX_LOOKED_AT:
                    return
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry.path


def says_clean(superblock: bytes) -> bool:
    """Tell whether this is a whole superblock, of a file system that was unmounted properly."""
    return len(superblock) == SUPERBLOCK_BYTES and superblock == as_clean(superblock)


def as_clean(superblock: bytes) -> bytes:
    """Return the superblock of a file system that was unmounted properly."""
    changed = bytearray(superblock)
    state = int.from_bytes(changed[_STATE_AT : _STATE_AT + 2], "little") | _IS_CLEAN
    changed[_STATE_AT : _STATE_AT + 2] = state.to_bytes(2, "little")
    features = int.from_bytes(changed[_RO_COMPAT_AT : _RO_COMPAT_AT + 4], "little")
    if features & _METADATA_CSUM:
        changed[_CHECKSUM_AT:] = crc32c(bytes(changed[:_CHECKSUM_AT])).to_bytes(4, "little")
    return bytes(changed)


def _table() -> list[int]:
    table = []
    for number in range(256):
        value = number
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC32C = _table()


def crc32c(data: bytes) -> int:
    """Return the checksum that ext4 uses: CRC-32C from all ones, not inverted at the end."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _CRC32C[(value ^ byte) & 0xFF]
    return value


def serve_one(stream: socket.socket, settler: Settler) -> None:
    """Serve one worker, from the server's loop, which waits for the end of it."""
    with stream:
        stream.settimeout(SETTLE_TIMEOUT_S)
        with suppress(OSError):  # the worker went away: there is nobody to tell
            try:
                with settler.settled():
                    stream.sendall(_SETTLED)
                    stream.recv(1)
            except OSError as error:
                stream.sendall(f"not settled: {error.strerror}".encode()[:_MAX_ANSWER_BYTES])


@contextmanager
def held_still(path: Path) -> Iterator[None]:
    """Hold the file system whose server listens there still: the worker's side.

    Raises:
        Unsettled: it cannot be; or it went on before the block ended.
    """
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(SETTLE_TIMEOUT_S)
        try:
            stream.connect(str(path))
            answer = stream.recv(_MAX_ANSWER_BYTES)
        except OSError as error:
            raise Unsettled(f"its server does not answer: {error}") from error
        if answer != _SETTLED:
            raise Unsettled(answer.decode(errors="replace") or "its server ended")
        yield
        # Its end would have been told by an end of the stream.
        stream.setblocking(False)
        try:
            stream.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            raise Unsettled(f"its server ended: {error}") from error
        raise Unsettled("it was held for too long")
