"""A guest to start in tests."""

from ipaddress import IPv4Address
from pathlib import Path
from uuid import uuid4

from common.units import MiB
from hosts.hypervisor import GuestSpec
from hosts.network import mac_of

FIRST = IPv4Address("10.88.0.2")


def guest_spec(
    directory: Path,
    *,
    config: bytes = b"{}",
    memory_bytes: int = 192 * MiB,
    cpu_cores: float | None = None,
    vcpus: int = 1,
    address: IPv4Address = FIRST,
    name: str = "a guest",
) -> GuestSpec:
    """Describe a guest whose disk is at `disk.sock` in the directory."""
    uuid = uuid4()
    return GuestSpec(
        uuid=uuid,
        name=name,
        vcpus=vcpus,
        cpu_cores=cpu_cores,
        memory_bytes=memory_bytes,
        disk_socket=directory / "disk.sock",
        config=config,
        address=address,
        mac=mac_of(address),
        serial_log=directory / "log" / f"{uuid}.log",
        channel=directory / uuid.hex / "agent.sock",
    )
