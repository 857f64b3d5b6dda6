"""The program inside a guest that owns its commands and does what the host asks of it.

It is started by `files/pid1` and again whenever it ends. It runs on the standard library
alone, and imports little of that, as every import delays a boot under software emulation.
"""

from __future__ import annotations

import os
import resource
import sys

from hosts.guest import identity, protocol
from hosts.guest.contexts import Contexts
from hosts.guest.doors import PortDoor, SocketDoor
from hosts.guest.loop import Loop
from hosts.guest.machine import Machine, Processes, RootDisk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hosts.guest.doors import MachineOps

_PORTS = "/sys/class/virtio-ports"
_OPEN_FILES = 65536


def main() -> None:
    """Be the agent of this machine; never returns."""
    os.environ.clear()
    _protect()
    config = identity.read_config()
    identity.apply(config)
    loop = Loop()
    server = identity.SshServer(loop)
    contexts = Contexts(
        loop, env=identity.environment(config), memory_bytes=os.sysconf("SC_PHYS_PAGES") * 4096
    )
    machine = Machine(
        loop, RootDisk(), server, contexts, Processes(), limit_bytes=_disk_limit_bytes(config)
    ).ops()
    serve(loop, contexts, machine, socket_path=protocol.AGENT_SOCKET, port_path=find_port())
    sys.stderr.write(f"sandkeep: agent ready after {_uptime()} s\n")
    loop.run()


def _disk_limit_bytes(config: dict[str, Any]) -> int:
    """How large the root file system may become, 0 for as large as its device."""
    limit = config.get("disk_limit_bytes")
    return limit if type(limit) is int and limit > 0 else 0


def serve(
    loop: Loop,
    contexts: Contexts,
    machine: MachineOps,
    *,
    socket_path: str,
    port_path: str | None,
) -> None:
    """Open the doors."""
    SocketDoor(loop, socket_path, contexts, machine)
    if port_path:
        PortDoor(loop, port_path, machine)


def find_port(ports: str = _PORTS) -> str | None:
    """The device of the host's virtio-serial port, by its name."""
    try:
        names = os.listdir(ports)  # noqa: PTH208 - pathlib is slow to import
    except OSError:
        return None
    for name in names:
        with open(f"{ports}/{name}/name") as file:  # noqa: PTH123
            if file.read().strip() == protocol.CHANNEL_NAME:
                return f"/dev/{name}"
    return None


def _protect() -> None:
    """Survive a lack of memory, which is for the guest's own programs to give up."""
    with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("-1000")
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))


def _uptime() -> str:
    with open("/proc/uptime") as file:  # noqa: PTH123
        return file.read().split()[0]
