"""What tests of the host need of the machine that they run on."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

LIBVIRT_SOCKET = Path("/run/libvirt/libvirt-sock")

# Namespaces and other users are root's to make. `bin/test` and CI run as root, so none of
# these is skipped there (and CI fails what is); it spares who calls pytest by hand.
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root, as in bin/test, can")


def need(*, met: bool, what: str) -> None:
    """Skip the test where something is missing, and fail it in CI."""
    if met:
        return
    if os.environ.get("CI"):
        pytest.fail(f"CI lacks {what}.")
    pytest.skip(f"needs {what}")


def need_fuse() -> None:
    """Need to show a disk as a file."""
    need(met=os.access("/dev/fuse", os.R_OK | os.W_OK), what="/dev/fuse")


def need_libvirt() -> None:
    """Need root and a libvirtd, as a host's worker has."""
    need(met=os.geteuid() == 0, what="root")
    need(met=LIBVIRT_SOCKET.exists(), what="a running libvirtd")


def wait_for(what: Callable[[], bool], *, timeout_s: float, step_s: float = 0.1) -> bool:
    """Ask until it is so, or the time is over; return what was said last."""
    until = time.monotonic() + timeout_s
    while not (answer := what()) and time.monotonic() < until:
        time.sleep(step_s)
    return answer
