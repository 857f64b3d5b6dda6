"""Choose how guests are run, by running one.

`/dev/kvm` may be there, open, and still run no ordinary guest, so looking for the file is
not enough: the kernel that every guest boots is booted once with each accelerator.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from pathlib import Path
from typing import ClassVar, Literal

from common.errors import Unavailable
from hosts.guest.images import INITRAMFS, KERNEL, KERNEL_COMMAND_LINE

Accelerator = Literal["kvm", "tcg"]

ACCELERATOR_FILE = "accelerator.json"

_SIGN_OF_LIFE = b"sandkeep: the probe runs"
_DEADLINES_S: dict[Accelerator, float] = {"kvm": 20.0, "tcg": 120.0}
_MAX_SAID_BYTES = 1024 * 1024

log = logging.getLogger(__name__)


class NoAccelerator(Unavailable):
    """No guest boots on this machine in any way."""

    code: ClassVar[str] = "no_accelerator"

    def __str__(self) -> str:
        return "No guest boots on this machine, neither with KVM nor under emulation."


def probe_accelerator(images: Path) -> Accelerator:
    """Boot a tiny guest with KVM, then under emulation; keep the first that works.

    The answer is also written to `accelerator.json` in `images`, with how long it took.

    Raises:
        NoAccelerator: neither worked within its deadline.
    """
    for accelerator in ("kvm", "tcg"):
        if accelerator == "kvm" and not Path("/dev/kvm").exists():
            continue
        started_s = time.monotonic()
        if boots(images, accelerator, deadline_s=_DEADLINES_S[accelerator]):
            _keep(images, accelerator, took_s=time.monotonic() - started_s)
            return accelerator
        log.warning("no guest boots with %s on this machine", accelerator)
    raise NoAccelerator


def known_accelerator(images: Path) -> Accelerator | None:
    """What an earlier probe chose; None where there was none."""
    try:
        kept = json.loads((images / ACCELERATOR_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return "kvm" if kept.get("accelerator") == "kvm" else "tcg"


def boots(images: Path, accelerator: Accelerator, *, deadline_s: float) -> bool:
    """Whether a guest without disks reaches its initramfs before the deadline."""
    command = [
        *("qemu-system-x86_64", "-machine", f"q35,accel={accelerator}", "-cpu", "max"),
        *("-m", "128", "-smp", "1", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-serial", "stdio", "-kernel", str(images / KERNEL)),
        *("-initrd", str(images / INITRAMFS)),
        *("-append", f"{KERNEL_COMMAND_LINE} sandkeep.probe"),
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as guest:
        assert guest.stdout is not None
        os.set_blocking(guest.stdout.fileno(), False)
        try:
            return _says(guest, _SIGN_OF_LIFE, deadline_s=time.monotonic() + deadline_s)
        finally:
            guest.kill()


def _says(guest: subprocess.Popen[bytes], expected: bytes, *, deadline_s: float) -> bool:
    assert guest.stdout is not None
    said = b""
    while time.monotonic() < deadline_s and len(said) < _MAX_SAID_BYTES:
        ended = guest.poll() is not None
        said += guest.stdout.read() or b""
        if expected in said:
            return True
        if ended:
            return False
        time.sleep(0.05)
    return False


def _keep(images: Path, accelerator: Accelerator, *, took_s: float) -> None:
    part = images / f".{ACCELERATOR_FILE}.{os.getpid()}"
    part.write_text(json.dumps({"accelerator": accelerator, "boot_s": round(took_s, 2)}))
    part.replace(images / ACCELERATOR_FILE)
