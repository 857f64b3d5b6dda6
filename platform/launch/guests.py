"""Ending the guests of a platform that stops.

Their disks stay: what a guest wrote and synced is in its overlay, which the next start finds
and uses again, as after a power cut.
"""

import subprocess
from pathlib import Path

from launch import processes
from launch.config import Config
from launch.progress import say

VIRSH = ("virsh", "-c", "qemu:///system")
VIRSH_TIMEOUT_S = 60.0


def leave_no_guest(config: Config) -> None:
    """Flush and end this platform's guests, the daemons of their disks, and their network."""
    if not _libvirt_answers():
        return
    names = [name for name in _virsh("list", "--name").split() if _is_ours(config, name)]
    for name in names:
        _virsh("destroy", name)
    if names:
        say(f"  ended {len(names)} running sandboxes")
    _end_disk_daemons(config)
    if config.env["GUEST_NETWORK"] in _virsh("net-list", "--name").split():
        _virsh("net-destroy", config.env["GUEST_NETWORK"])


def _is_ours(config: Config, name: str) -> bool:
    return name.startswith(config.env["GUEST_NETWORK"] + "-")


def _end_disk_daemons(config: Config) -> None:
    """End the storage daemons first: they flush their overlays into nothing but files."""
    for pattern in ("daemon.pid", "*.pid"):
        for path in sorted((config.run_dir / "disks").glob(f"*/{pattern}")):
            _end(path)


def _end(path: Path) -> None:
    try:
        process = processes.running(int(path.read_text().split()[0]))
    except (FileNotFoundError, ValueError, IndexError):
        return
    if process is not None:
        processes.stop(process, timeout_s=10.0)
    path.unlink(missing_ok=True)


def _libvirt_answers() -> bool:
    try:
        return _run("version").returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def _virsh(*arguments: str) -> str:
    return _run(*arguments).stdout


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*VIRSH, *arguments],
        capture_output=True,
        text=True,
        timeout=VIRSH_TIMEOUT_S,
        check=False,
    )
