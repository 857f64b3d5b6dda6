"""Who this guest is: what the platform says by fw_cfg, made true before anyone looks.

All of it can be done again at any time, since the agent may be started anew.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import sys
import time

from hosts.guest import protocol, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hosts.guest.loop import Loop

CONFIG = "/sys/firmware/qemu_fw_cfg/by_name/opt/org.sandkeep/config/raw"
SSH_FOLDER = "/run/sandkeep/ssh"
RESOLV_CONF = "/run/sandkeep/resolv.conf"

_MACHINE_ID = "/etc/machine-id"
_SSH_KEYGEN = "/usr/bin/ssh-keygen"
_TOOLKIT = "/run/sandkeep/toolkit"
_MAX_CONFIG_BYTES = 1024 * 1024
_MAX_CLOCK_ERROR_S = 3.0
_LOOK_EVERY_S = 2.0
_MARK = "# this machine's name, kept by the platform"

_DEVICES = (
    ("/dev/fuse", 0o666, 10, 229),
    ("/dev/net/tun", 0o600, 10, 200),
    ("/dev/loop-control", 0o660, 10, 237),
)
_DEVICE_LINKS = (
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
)

_SIOCADDRT = 0x890B
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_SIOCSIFADDR = 0x8916
_SIOCSIFNETMASK = 0x891C
_IFF_UP = 0x1
_RTF_UP_GATEWAY = 0x3
_EEXIST = 17


def read_config(path: str = CONFIG) -> dict[str, Any]:
    """What the platform says of this guest; empty where it says nothing."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            return protocol.parse_document(file.read(_MAX_CONFIG_BYTES))
    except (OSError, protocol.ProtocolError) as error:
        sys.stderr.write(f"sandkeep: no configuration: {error}\n")
        return {}


def apply(config: dict[str, Any]) -> None:
    """Set clock, name, network and keys; one that fails is reported and keeps none back."""
    for step in (
        _make_devices,
        _set_clock,
        _set_name,
        _set_machine_id,
        _set_network,
        _set_resolver,
        _set_keys,
        _set_users,
    ):
        try:
            step(config)
        except (OSError, KeyError, ValueError) as error:
            sys.stderr.write(f"sandkeep: {step.__name__.strip('_')}: {error!r}\n")


def environment(config: dict[str, Any]) -> dict[bytes, bytes]:
    """What every command finds in its environment."""
    env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "LANG": "C.UTF-8",
        "SHELL": "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh",  # noqa: PTH110
    }
    env.update(config.get("env") or {})
    return {
        name.encode("utf-8", "surrogateescape"): value.encode("utf-8", "surrogateescape")
        for name, value in env.items()
        if "\0" not in name + value
    }


class SshServer:
    """Keeps the toolkit's sshd running, also across a restart of the agent."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._wanted = True
        self._child: int | None = None
        self._look()

    def is_ready(self) -> bool:
        """Whether it listens: it writes its process id once it does."""
        return self._pid() is not None

    def pause(self) -> None:
        """Do not start it again when it ends."""
        self._wanted = False

    def resume(self) -> None:
        self._wanted = True
        self._start()

    def _look(self) -> None:
        self._start()
        self._loop.later(_LOOK_EVERY_S, self._look)

    def _start(self) -> None:
        # It may be ours and still starting, or run since an agent before this one.
        if not self._wanted or self._child or self._pid():
            return
        _remove(f"{SSH_FOLDER}/sshd.pid")
        program = f"{_TOOLKIT}/bin/sshd"
        self._child = spawn.start_quietly([program, "-D", "-f", f"{_TOOLKIT}/lib/sshd_config"])
        self._loop.await_child(self._child, self._ended)

    def _ended(self, status: int) -> None:
        self._child = None
        if self._wanted:
            sys.stderr.write(f"sandkeep: sshd ended with {spawn.exit_code(status)}\n")

    def _pid(self) -> int | None:
        try:
            with open(f"{SSH_FOLDER}/sshd.pid") as file:  # noqa: PTH123
                pid = int(file.read())
            with open(f"/proc/{pid}/comm") as file:  # noqa: PTH123
                return pid if file.read().strip() == "sshd" else None
        except (OSError, ValueError):
            return None


def _make_devices(_config: dict[str, Any]) -> None:
    """Make what programs expect, and udev would make; opening a device loads its module."""
    for folder in ("/dev/net", "/run/lock"):
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - pathlib is slow to import
    for path, mode, major, minor in _DEVICES:
        if not os.path.lexists(path):
            os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
            os.chmod(path, mode)  # noqa: PTH101
    for path, target in _DEVICE_LINKS:
        if not os.path.lexists(path):
            os.symlink(target, path)  # noqa: PTH211


def _set_clock(config: dict[str, Any]) -> None:
    """Correct a clock that is plainly wrong; the host sets the fraction of a second."""
    started_unix_s = config.get("boot_unix_s")
    if started_unix_s:
        now_unix_s = started_unix_s + time.clock_gettime(time.CLOCK_BOOTTIME)
        if abs(now_unix_s - time.time()) > _MAX_CLOCK_ERROR_S:
            time.clock_settime(time.CLOCK_REALTIME, now_unix_s)


def _set_name(config: dict[str, Any]) -> None:
    name = config["hostname"]
    socket.sethostname(name)
    _write_if_other("/etc/hostname", f"{name}\n")
    kept = [line for line in _lines("/etc/hosts") if not line.endswith(_MARK)]
    if not any(line.split()[:1] == ["127.0.0.1"] for line in kept):
        kept.insert(0, "127.0.0.1 localhost")
    kept.append(f"127.0.1.1 {name} {_MARK}")
    _write_if_other("/etc/hosts", "".join(f"{line}\n" for line in kept))


def _set_machine_id(config: dict[str, Any]) -> None:
    """Give the machine an id that no other has, and renew what came with another's disk."""
    machine_id = config["machine_id"]
    before = _lines(_MACHINE_ID)
    _write_if_other(_MACHINE_ID, f"{machine_id}\n", 0o444)
    copy = "/var/lib/dbus/machine-id"
    if os.path.isfile(copy) and not os.path.islink(copy):  # noqa: PTH113, PTH114
        _write_if_other(copy, f"{machine_id}\n")
    if before[:1] not in ([], [""], [machine_id]):
        _renew_ssh_keys()


def _renew_ssh_keys() -> None:
    """Replace the keys of an SSH server that is installed on the disk, if there is one.

    The platform's own server has its key from the platform.
    """
    try:
        names = os.listdir("/etc/ssh")  # noqa: PTH208
    except FileNotFoundError:
        return
    keys = [name for name in names if name.startswith("ssh_host_") and "_key" in name]
    for name in keys:
        _remove(f"/etc/ssh/{name}")
    if keys and os.path.exists(_SSH_KEYGEN):  # noqa: PTH110
        spawn.start_quietly([_SSH_KEYGEN, "-A"])


def _set_network(config: dict[str, Any]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _raise_link(control, "lo")
        if not config.get("address"):
            return
        address, _, prefix = config["address"].partition("/")
        mask = (0xFFFFFFFF << (32 - int(prefix or 32))) & 0xFFFFFFFF
        name = b"eth0".ljust(16, b"\0")
        fcntl.ioctl(control, _SIOCSIFADDR, name + _address(socket.inet_aton(address)))
        fcntl.ioctl(control, _SIOCSIFNETMASK, name + _address(mask.to_bytes(4, "big")))
        _raise_link(control, "eth0")
        if config.get("gateway"):
            # struct rtentry of <linux/route.h>
            route = struct.pack(
                "L16s16s16sHhLLhPLLH", 0, _address(bytes(4)),
                _address(socket.inet_aton(config["gateway"])), _address(bytes(4)),
                _RTF_UP_GATEWAY, 0, 0, 0, 0, 0, 0, 0, 0,
            )  # fmt: skip
            try:
                fcntl.ioctl(control, _SIOCADDRT, route)
            except OSError as error:
                if error.errno != _EEXIST:
                    raise


def _raise_link(control: socket.socket, name: str) -> None:
    request = struct.pack("16sH14x", name.encode(), 0)
    flags = struct.unpack("16sH14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), flags | _IFF_UP))


def _address(ipv4: bytes) -> bytes:
    """Make a struct sockaddr_in."""
    return struct.pack("HH4s8x", socket.AF_INET, 0, ipv4)


def _set_resolver(config: dict[str, Any]) -> None:
    servers = "".join(f"nameserver {server}\n" for server in config.get("dns") or ())
    _write(RESOLV_CONF, servers, 0o644)
    path = "/etc/resolv.conf"
    # The addresses belong to the host of this run, so the disk only has a link to them.
    if not os.path.islink(path) or os.readlink(path) not in (RESOLV_CONF, f"..{RESOLV_CONF}"):  # noqa: PTH114, PTH115
        _remove(path)
        os.symlink(f"..{RESOLV_CONF}", path)  # noqa: PTH211


def _set_keys(config: dict[str, Any]) -> None:
    os.makedirs(SSH_FOLDER, mode=0o700, exist_ok=True)  # noqa: PTH103
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # noqa: PTH103
    key = config["ssh_host_key"]
    _write(f"{SSH_FOLDER}/host_key", key if key.endswith("\n") else f"{key}\n", 0o600)
    keys = "".join(f"{key}\n" for key in config.get("authorized_keys") or ())
    _write(f"{SSH_FOLDER}/authorized_keys", keys, 0o600)


def _set_users(_config: dict[str, Any]) -> None:
    """See that root may log in by key, and that sshd finds the user it drops to."""
    users = _lines("/etc/passwd")
    names = {line.split(":")[0] for line in users}
    if "root" not in names:
        users.append("root:x:0:0:root:/root:/bin/sh")
    if "sshd" not in names:
        taken = {part for line in users for part in line.split(":")[2:3]}
        uid = next(uid for uid in range(101, 65000) if str(uid) not in taken)
        users.append(f"sshd:x:{uid}:65534::/run/sshd:/usr/sbin/nologin")
    _write_if_other("/etc/passwd", "".join(f"{line}\n" for line in users))
    # To sshd a password that begins with "!" is an account that is locked to keys too.
    shadow = _lines("/etc/shadow")
    opened = ["root:*" + line[6:] if line.startswith("root:!") else line for line in shadow]
    if opened != shadow:
        _write_if_other("/etc/shadow", "".join(f"{line}\n" for line in opened), 0o640)


def _lines(path: str) -> list[str]:
    try:
        with open(path, errors="surrogateescape") as file:  # noqa: PTH123
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def _write_if_other(path: str, content: str, mode: int = 0o644) -> None:
    """Write a file of the disk only when it changes: what is written is uploaded."""
    try:
        with open(path, errors="surrogateescape") as file:  # noqa: PTH123
            if file.read() == content:
                return
            mode = os.fstat(file.fileno()).st_mode & 0o7777
    except FileNotFoundError:
        pass
    _write(path, content, mode)


def _write(path: str, content: str, mode: int) -> None:
    part = f"{path}.sandkeep-part"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with open(fd, "w", errors="surrogateescape") as file:  # noqa: PTH123
        os.fchmod(fd, mode)
        file.write(content)
    os.rename(part, path)  # noqa: PTH104


def _remove(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return
