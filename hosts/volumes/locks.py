"""Locks that hold across threads and processes, and end with whoever has them."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(fd, timeout_s)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise DiskBusy("Another worker has the disk.") from error
            time.sleep(LOCK_POLL_S)
        else:
            return
