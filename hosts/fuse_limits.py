"""How many requests of a FUSE mount may wait behind a caller that has gone on.

The kernel holds back what is more than 12, such as the ends of files that were just closed,
and lets later requests overtake them. libfuse 2 has an option for that, libfuse 3 leaves it
to the program; here it is set from outside, for any mount of this machine.

Source: the kernel's Documentation/filesystems/fuse.rst, "Control filesystem"; fsopen(2).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC = 1
_CREATE = 6


def let_wait(pid: int, mountpoint: str, count: int) -> None:
    """Have so many requests wait of the FUSE mount that a process sees at a path.

    Raises:
        OSError: there is no such mount, or we may not.
    """
    directory = _connections()
    try:
        name = f"{_minor(pid, mountpoint)}/max_background"
        limit = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.write(limit, str(count).encode())
        finally:
            os.close(limit)
    finally:
        os.close(directory)


def _minor(pid: int, mountpoint: str) -> int:
    """Return the minor number of a mount's device; the last one at its path counts."""
    found = None
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        _, _, device, _, at, *_ = line.split()
        if at == mountpoint:
            found = device
    if found is None:
        raise FileNotFoundError(f"no mount at {mountpoint}")
    return int(found.partition(":")[2])


def _connections() -> int:
    """Open the kernel's list of FUSE connections, mounted nowhere: few machines have it."""
    context = _checked(_libc.syscall(_FSOPEN, b"fusectl", _CLOEXEC))
    try:
        _checked(_libc.syscall(_FSCONFIG, context, _CREATE, None, None, 0))
        return _checked(_libc.syscall(_FSMOUNT, context, _CLOEXEC, 0))
    finally:
        os.close(context)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"fusectl: {os.strerror(number)}")
    return result
