"""Ending the guests of a platform that stops.

Their disks stay: what a guest wrote and synced is in its overlay, which the next start finds
and uses again, as after a power cut.
"""

import subprocess

from common.errors import Unavailable
from hosts.guest.channel import AgentChannel
from hosts.paused_files import PausedFiles, PausedFilesConfig
from hosts.volumes.daemons import end_daemon
from hosts.volumes.spares import end_spares
from launch.config import Config
from launch.progress import say

VIRSH = ("virsh", "-c", "qemu:///system")
VIRSH_TIMEOUT_S = 60.0
DAEMON_GRACE_S = 10.0


def leave_no_guest(config: Config) -> None:
    """Flush and end this platform's guests, the daemons of their disks, and their network."""
    if _libvirt_answers():
        _end_guests(config)
    _end_disk_daemons(config)
    if config.env["GUEST_NETWORK"] in _virsh("net-list", "--name").split():
        _virsh("net-destroy", config.env["GUEST_NETWORK"])


def _end_guests(config: Config) -> None:
    names = [name for name in _virsh("list", "--name").split() if _is_ours(config, name)]
    for name in names:
        _flush(config, name)
        _virsh("destroy", name)
    if names:
        say(f"  ended {len(names)} running sandboxes, their disks flushed")


def _is_ours(config: Config, name: str) -> bool:
    return name.startswith(config.env["GUEST_NETWORK"] + "-")


def _flush(config: Config, name: str) -> None:
    """Have a guest write what it still holds in memory; without it, it is a power cut."""
    sandbox = name.removeprefix(config.env["GUEST_NETWORK"] + "-")
    channel = AgentChannel(config.run_dir / "guests" / sandbox / "agent.sock")
    try:
        channel.sync()
    except Unavailable as error:
        say(f"  {name} could not be flushed: {error}")


def _end_disk_daemons(config: Config) -> None:
    """End them from the top: who serves files, the disk below, the export below that."""
    files = PausedFiles(PausedFilesConfig(files_dir=config.run_dir / "files"))
    for volume_id in files.opened():
        files.close(volume_id)
    files.cool()
    disks = config.run_dir / "disks"
    for name in ("daemon.pid", "export.pid"):
        for pid_file in disks.glob(f"*/{name}"):
            end_daemon(pid_file, grace_s=DAEMON_GRACE_S)
    end_spares(config.run_dir)


def _libvirt_answers() -> bool:
    try:
        return _run("version").returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def _virsh(*arguments: str) -> str:
    try:
        return _run(*arguments).stdout
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*VIRSH, *arguments],
        capture_output=True,
        text=True,
        timeout=VIRSH_TIMEOUT_S,
        check=False,
    )
