"""Locks that hold across threads and processes, and end with whoever has them."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hosts.volumes.errors import DiskBusy

LOCK_TIMEOUT_S = 300
"""How long to wait for another worker that has the disk; an upload may be under way."""

LOCK_POLL_S = 0.005


@contextmanager
def locked(path: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold a file's lock for the block.

    Raises:
        DiskBusy: somebody else has it for longer than that.
    """
    fd = _take(path, time.monotonic() + timeout_s)
    try:
        yield
    finally:
        os.close(fd)


def forget(path: Path) -> None:
    """Remove a lock's file, unless somebody has it now. Who waits for it makes a new one."""
    with suppress(FileNotFoundError, BlockingIOError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, fd):
                path.unlink()
        finally:
            os.close(fd)


def _take(path: Path, until_s: float) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd, until_s)
            if _is_at(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        # It was forgotten meanwhile, and whoever comes now locks another file.
        os.close(fd)


def _lock(fd: int, until_s: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= until_s:
                raise DiskBusy("Another worker has the disk.") from error
            time.sleep(LOCK_POLL_S)
        else:
            return


def _is_at(path: Path, fd: int) -> bool:
    """Tell whether an open file is the one at a path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
