"""A guest run by plain QEMU, without libvirt: the images alone, with a throw-away disk."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh

from common.units import MiB, TiB
from hosts.guest.channel import AgentChannel
from hosts.guest.images import INITRAMFS, KERNEL, KERNEL_COMMAND_LINE, TOOLKIT
from hosts.guest.probe import known_accelerator

IMAGES = Path(os.environ.get("IMAGES_DIR", Path(__file__).parents[3] / "var/images"))
BASE = IMAGES / "base-default.ext4"
BOOT_S = 180.0


@dataclass
class Guest:
    """A guest that was made, and may be run many times on the same disk."""

    folder: Path
    port: int
    key: asyncssh.SSHKey
    host_key: asyncssh.SSHKey
    more_config: dict[str, object] = field(default_factory=dict)

    @property
    def disk(self) -> Path:
        return self.folder / "disk.qcow2"

    @property
    def channel(self) -> AgentChannel:
        return AgentChannel(self.folder / "agent.sock", timeout_s=60)

    def serial(self) -> str:
        return (self.folder / "serial.log").read_text(errors="replace")

    @contextmanager
    def running(self, *, memory_mib: int = 512) -> Iterator[subprocess.Popen[bytes]]:
        """Boot it, wait until it is ready, and pull the plug in the end."""
        (self.folder / "config.json").write_text(json.dumps(self._config()))
        with subprocess.Popen(self._command(memory_mib), stdin=subprocess.DEVNULL) as process:
            try:
                self.channel.await_ready(timeout_s=BOOT_S)
                yield process
            finally:
                process.kill()

    async def connect(self) -> asyncssh.SSHClientConnection:
        public = asyncssh.import_public_key(self.host_key.export_public_key())
        return await asyncssh.connect(
            "127.0.0.1",
            self.port,
            username="root",
            client_keys=[self.key],
            known_hosts=([public], [], []),
            config=None,
            agent_path=None,
            login_timeout=60,
        )

    def _config(self) -> dict[str, object]:
        return {
            "sandbox_id": "sb-test",
            "hostname": "sb-test",
            "machine_id": "5b" * 16,
            "address": "10.0.2.15/24",
            "gateway": "10.0.2.2",
            "dns": ["10.0.2.3"],
            "ssh_host_key": self.host_key.export_private_key().decode(),
            "authorized_keys": [self.key.export_public_key().decode().strip()],
            "env": {"FROM_PLATFORM": "é\nx"},
            "generation": 1,
            "boot_unix_s": time.time(),
            **self.more_config,
        }

    def _command(self, memory_mib: int) -> list[str]:
        accelerator = known_accelerator(IMAGES) or "tcg"
        toolkit = IMAGES / TOOLKIT
        folder = self.folder
        return [
            *(
                "qemu-system-x86_64",
                "-machine",
                f"q35,accel={accelerator}",
                "-cpu",
                "max,la57=off",
            ),
            *("-m", str(memory_mib), "-nodefaults", "-no-user-config", "-no-reboot"),
            *("-display", "none", "-serial", f"file:{folder}/serial.log"),
            *("-kernel", str(IMAGES / KERNEL), "-initrd", str(IMAGES / INITRAMFS)),
            *("-append", f"{KERNEL_COMMAND_LINE} mitigations=off tsc=reliable"),
            *("-drive", f"file={self.disk},if=none,id=root,format=qcow2,discard=unmap"),
            *("-device", "virtio-blk-pci,drive=root"),
            *("-drive", f"file={toolkit},if=none,id=toolkit,format=raw,readonly=on"),
            *("-device", "virtio-blk-pci,drive=toolkit"),
            *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self.port}-:22"),
            *("-device", "virtio-net-pci,netdev=net", "-device", "virtio-rng-pci"),
            *("-device", "virtio-balloon-pci", "-device", "virtio-serial-pci"),
            *("-chardev", f"socket,id=agent,path={folder}/agent.sock,server=on,wait=off"),
            *("-device", "virtserialport,chardev=agent,name=org.sandkeep.agent"),
            *("-fw_cfg", f"name=opt/org.sandkeep/config,file={folder}/config.json"),
        ]


def new_guest(folder: Path, *, size_bytes: int = 1 * TiB) -> Guest:
    """Make a guest whose disk is an empty layer over the default base image."""
    create = ("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(BASE))
    subprocess.run([*create, str(folder / "disk.qcow2"), str(size_bytes)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    key, host_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    return Guest(folder, port, key, host_key)


@dataclass(frozen=True)
class Small:
    """A root file system that is nearly full."""

    size_bytes: int


def make_small(folder: Path, guest: Guest, *, spare_bytes: int = 10 * MiB) -> Small:
    """Put a guest on a copy of its base that has hardly any room."""
    image, device_bytes = folder / "small.ext4", _device_bytes(guest)
    subprocess.run(["cp", "--sparse=always", str(BASE), str(image)], check=True)
    image.chmod(0o600)
    for command in (["e2fsck", "-fy"], ["resize2fs", "-M"]):
        subprocess.run(
            [*command, str(image)], check=command[0] != "e2fsck", capture_output=True
        )
    shrunk_bytes = _span_bytes(image) + spare_bytes
    subprocess.run(["resize2fs", str(image), f"{shrunk_bytes // 1024}K"], check=True)
    os.truncate(image, device_bytes)
    guest.disk.unlink()
    create = ("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(image))
    subprocess.run([*create, str(guest.disk), str(device_bytes)], check=True)
    return Small(_span_bytes(image))


def _span_bytes(image: Path) -> int:
    found = subprocess.run(
        ["dumpe2fs", "-h", str(image)], check=True, capture_output=True, text=True
    ).stdout
    fields = dict(line.split(":", 1) for line in found.splitlines() if ":" in line)
    return int(fields["Block count"]) * int(fields["Block size"])


def _device_bytes(guest: Guest) -> int:
    found = subprocess.run(
        ["qemu-img", "info", "--output=json", str(guest.disk)], check=True, capture_output=True
    ).stdout
    size_bytes: int = json.loads(found)["virtual-size"]
    return size_bytes


def file_system_check(guest: Guest) -> subprocess.CompletedProcess[str]:
    """Run `e2fsck -fn` on the disk of a guest that is off."""
    raw = guest.folder / "disk.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", str(guest.disk), str(raw)], check=True)
    try:
        return subprocess.run(
            ["e2fsck", "-fn", str(raw)], check=False, capture_output=True, text=True
        )
    finally:
        raw.unlink()
