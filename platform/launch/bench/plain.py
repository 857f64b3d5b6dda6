"""The same guest without us: QEMU alone boots the same images until its sshd answers.

The same kernel, command line, initramfs, toolkit and base image, the same accelerator and
memory. What is left out is what we add: placing, disk over object storage, network, libvirt.
"""

import json
import select
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from hosts.domain_xml import CMDLINE, CMDLINE_EMULATED, CONFIG_NAME, TRANSLATION_CACHE_MIB
from hosts.guest.images import INITRAMFS, KERNEL, TOOLKIT
from hosts.guest.probe import known_accelerator
from launch.progress import LaunchFailed

BOOT_S = 600.0
KNOCK_EVERY_S = 1.0
# Each one costs an emulated guest half a second of CPU: more of them, and a guest that has
# little would be busy with answering none in time.
MOST_TRIED = 2
GIVE_UP_S = 30.0
BANNER = b"SSH-"
READY = b"agent ready"


@dataclass(frozen=True)
class PlainMachine:
    """What plain QEMU boots."""

    images_dir: Path
    memory_mib: int
    base: str = "base-default.ext4"

    def boot_s(self) -> float:
        """Boot it once on a throw-away disk; return the seconds until sshd said its name.

        Raises:
            LaunchFailed: it never did.
        """
        with tempfile.TemporaryDirectory(prefix="sandkeep-bench-") as name:
            folder = Path(name)
            self._make_disk(folder)
            port = _free_port()
            (folder / "config.json").write_text(json.dumps(_identity()))
            command = self._command(folder, port)
            started = time.monotonic()
            with subprocess.Popen(command, stdin=subprocess.DEVNULL) as machine:
                try:
                    _await_agent(machine, folder / "serial.log", until=started + BOOT_S)
                    await_banner(machine, port, until=started + BOOT_S)
                    return time.monotonic() - started
                finally:
                    machine.kill()

    def _make_disk(self, folder: Path) -> None:
        base = str(self.images_dir / self.base)
        create = ("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", base)
        subprocess.run([*create, str(folder / "disk.qcow2")], check=True, timeout=60)

    def _command(self, folder: Path, port: int) -> list[str]:
        images = self.images_dir
        if known_accelerator(images) == "kvm":
            accelerator, cpu, command_line = "kvm", "host", CMDLINE
        else:
            accelerator = f"tcg,tb-size={TRANSLATION_CACHE_MIB}"
            cpu, command_line = "max,la57=off", CMDLINE_EMULATED
        return [
            *("qemu-system-x86_64", "-machine", "q35,hpet=off"),
            *("-accel", accelerator, "-cpu", cpu),
            *("-m", str(self.memory_mib), "-smp", "1", "-nodefaults", "-no-user-config"),
            *("-no-reboot", "-display", "none", "-serial", f"file:{folder}/serial.log"),
            *("-kernel", str(images / KERNEL), "-initrd", str(images / INITRAMFS)),
            *("-append", command_line),
            *("-drive", f"file={folder}/disk.qcow2,if=none,id=root,format=qcow2"),
            *("-device", "virtio-blk-pci,drive=root"),
            *("-drive", f"file={images / TOOLKIT},if=none,id=kit,format=raw,readonly=on"),
            *("-device", "virtio-blk-pci,drive=kit"),
            *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{port}-:22"),
            *("-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-rng-pci"),
            *("-fw_cfg", f"name={CONFIG_NAME},file={folder}/config.json"),
        ]


def _identity() -> dict[str, object]:
    """Return what the guest needs to be told for its sshd to start."""
    return {
        "hostname": "plain",
        "address": "10.0.2.15/24",
        "gateway": "10.0.2.2",
        "ssh_host_key": asyncssh.generate_private_key("ssh-ed25519")
        .export_private_key()
        .decode(),
        "authorized_keys": [],
        "boot_unix_s": time.time(),
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _await_agent(machine: "subprocess.Popen[bytes]", log: Path, *, until: float) -> None:
    """Wait until the guest says that it has started sshd; before, there is none to ask."""
    while time.monotonic() < until and machine.poll() is None:
        if log.exists() and READY in log.read_bytes():
            return
        time.sleep(0.05)


def await_banner(machine: "subprocess.Popen[bytes]", port: int, *, until: float) -> None:
    """Wait until a server on this port of the machine says that it speaks SSH.

    Raises:
        LaunchFailed: the machine ended, or it is later than `until` (monotonic).
    """
    tried: list[socket.socket] = []
    knocked_at = time.monotonic()
    try:
        while time.monotonic() < until:
            if machine.poll() is not None:
                raise LaunchFailed(f"Plain QEMU ended with {machine.returncode}.")
            # QEMU itself takes each connection at once. What it does with one that came
            # before the guest listened varies, so there is a fresh one as well.
            if len(tried) < MOST_TRIED:
                tried += _knock(port)
                knocked_at = time.monotonic()
            knock_at = time.monotonic() + KNOCK_EVERY_S
            while (left_s := knock_at - time.monotonic()) > 0:
                if _speaks_ssh(tried, within_s=left_s):
                    return
            if len(tried) == MOST_TRIED and time.monotonic() > knocked_at + GIVE_UP_S:
                tried.pop(0).close()
    finally:
        for connection in tried:
            connection.close()
    raise LaunchFailed(f"Plain QEMU did not get to sshd within {BOOT_S:.0f} s.")


def _knock(port: int) -> list[socket.socket]:
    """Return a new connection; none while QEMU itself has not started."""
    try:
        return [socket.create_connection(("127.0.0.1", port), timeout=KNOCK_EVERY_S)]
    except OSError:
        return []


def _speaks_ssh(tried: list[socket.socket], *, within_s: float) -> bool:
    """Wait until one of them says so, or anything else; drop those that were closed."""
    for connection in select.select(tried, (), (), within_s)[0]:
        try:
            if connection.recv(64).startswith(BANNER):
                return True
        except OSError:
            pass  # reset, as good as closed
        tried.remove(connection)
        connection.close()
    return False
