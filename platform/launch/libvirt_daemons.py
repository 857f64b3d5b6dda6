"""libvirtd and virtlogd, which one machine has once, however many checkouts run on it.

With systemd they are its units. Without it (containers, CI) we start them, and the last
platform that leaves stops them, unless somebody else had started them.
"""

import fcntl
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hosts.fuse_setup import allow_other, open_device
from hosts.libvirt_setup import configure
from launch import processes
from launch.config import Config
from launch.processes import PidFiles, Program
from launch.progress import LaunchFailed, say, step

SYSTEMD = Path("/run/systemd/system")
SOCKET = Path("/run/libvirt/libvirt-sock")
# Shared by all checkouts: our daemons' pidfiles, and one file a platform that uses them.
SHARED = Path("/run/sandkeep-libvirt")
DAEMONS = ("virtlogd", "libvirtd")
READY_TIMEOUT_S = 40.0


def ensure_running(config: Config) -> None:
    """Start what libvirt needs where it does not run, and set it up for our guests.

    Raises:
        LaunchFailed: it does not answer.
    """
    with step("libvirt"), _locked():
        (SHARED / "users").mkdir(exist_ok=True)
        (SHARED / "users" / config.env["GUEST_NETWORK"]).touch()
        # Before it starts: libvirtd reads its configuration once.
        is_changed = configure()
        open_device()
        allow_other()
        if _answers() and not is_changed:
            return
        if SYSTEMD.exists():
            # Guests live through a restart of both.
            _run(["systemctl", "restart", "virtlogd.service", "libvirtd.service"])
        elif is_changed:
            _restart_ours(config)
        else:
            _start_all(config)
        _wait()


def leave(config: Config) -> None:
    """Stop the daemons that we started, if no other platform and no guest needs them."""
    if not SHARED.exists():
        return
    with _locked():
        users = SHARED / "users"
        (users / config.env["GUEST_NETWORK"]).unlink(missing_ok=True)
        pid_files = PidFiles(SHARED)
        if any(users.iterdir()) or not pid_files.names() or _guests():
            return
        for name in reversed(DAEMONS):
            process = pid_files.read(name)
            if process is not None:
                processes.stop(process, timeout_s=20.0)
            pid_files.forget(name)


def _start_all(config: Config) -> None:
    for name in DAEMONS:
        _start(name, config.log_dir / f"{name}.log")


def _restart_ours(config: Config) -> None:
    """Have new settings read by daemons that we started; guests live through it."""
    pid_files = PidFiles(SHARED)
    for name in reversed(DAEMONS):
        process = pid_files.read(name)
        if process is not None:
            processes.stop(process, timeout_s=20.0)
    if _answers():
        say("  libvirtd was started by somebody else: restart it to have it read new settings")
    _start_all(config)


@contextmanager
def _locked() -> Iterator[None]:
    SHARED.mkdir(exist_ok=True)
    with (SHARED / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start(name: str, log: Path) -> None:
    program = shutil.which(name, path="/usr/sbin:/usr/bin")
    if program is None:
        raise LaunchFailed(f"{name} is not installed: run bin/bootstrap.")
    if _runs(name):
        return
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    popen = processes.start(Program(name, [program], environment), log=log)
    process = processes.running(popen.pid)
    if process is not None:
        PidFiles(SHARED).write(name, process)


def _runs(name: str) -> bool:
    return (
        subprocess.run(
            ["pgrep", "-x", name], capture_output=True, timeout=10, check=False
        ).returncode
        == 0
    )


def _answers() -> bool:
    if not SOCKET.exists():
        return False
    # -c: the caller's LIBVIRT_DEFAULT_URI may name another machine.
    command = ["virsh", "-c", "qemu:///system", "version"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=15, check=False)
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0


def _wait() -> None:
    until = time.monotonic() + READY_TIMEOUT_S
    while not _answers():
        if time.monotonic() > until:
            raise LaunchFailed("libvirtd does not answer: see var/log/libvirtd.log.")
        time.sleep(0.2)


def _guests() -> bool:
    command = ["virsh", "-c", "qemu:///system", "list", "--name"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return bool(answer.stdout.strip())


def _run(command: list[str]) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode:
        raise LaunchFailed(f"{' '.join(command)} failed: {answer.stderr.strip()}")
