"""What the rest of the code may ask of a host.

`hosts.libvirt_driver.LibvirtHypervisor` does it for real,
`tests.fakes.hypervisor.FakeHypervisor` in memory;
`tests/hosts/test_hypervisor_contract.py` holds both to this protocol.
"""

import enum
import math
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self
from uuid import UUID

from common.units import GiB

Accelerator = Literal["kvm", "tcg"]

BYTES_PER_CORE = 4 * GiB
LEAST_CORES = 0.15


class GuestState(enum.Enum):
    RUNNING = "running"
    HALTED = "halted"
    """The guest is there and its CPUs stand still: its disk did not answer. See `start`."""
    MISSING = "missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class GuestSpec:
    """A guest to run.

    `uuid` is the guest's identity on the host, chosen by us: starting the same spec twice
    means the same guest, which is what makes a retried boot harmless.

    Attributes:
        name: what people call it; shown to operators, means nothing to the host.
        cpu_cores: the cores it pays for (`cores_for`), which the driver turns into a bound
            on the host (`host_cores`); None leaves it all of its `vcpus`, as while it boots.
        disk_socket: unix socket of an NBD server with an export `disk`, connectable by the
            user that QEMU runs as.
        config: what the guest reads as the fw_cfg file `opt/org.sandkeep/config`. Holds
            keys: never logged.
        mac: `hosts.network.mac_of(address)`; the network carries no other.
        serial_log: file that its serial console is appended to, bounded by virtlogd.
        channel: unix socket of the agent's second door, at most 100 bytes long. It and
            the config lie in this guest's own directory, which the driver makes.
    """

    uuid: UUID
    name: str
    vcpus: int
    cpu_cores: float | None
    memory_bytes: int
    disk_socket: Path
    config: bytes = field(repr=False)
    address: IPv4Address
    mac: str
    serial_log: Path
    channel: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class GuestUsage:
    """What a guest uses of its host right now.

    `available_bytes` is what the guest itself says it could still use; None until its
    balloon driver has reported. The guest may lie.
    """

    resident_bytes: int
    available_bytes: int | None
    cpu_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    memory_bytes: int
    cpus: int
    hypervisor_version: str
    driver_version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HypervisorConfig:
    """How one platform uses one host.

    Attributes:
        images_dir: holds `vmlinux`, `initrd.img` and `toolkit.squashfs`.
        network: libvirt network of the guests; also the prefix of their names, which
            parts this platform's guests from another's on the same libvirt.
        qemu_user: the user that QEMU runs as; None where libvirt drives no real QEMU.
        call_timeout_s: longest wait for any answer but that of a start.
    """

    uri: str
    images_dir: Path
    network: str
    accelerator: Accelerator
    qemu_user: str | None = "libvirt-qemu"
    call_timeout_s: float = 30.0
    start_timeout_s: float = 120.0


class Hypervisor(Protocol):
    """An open connection to one host; close it by leaving its `with` block.

    May be shared by threads. Every method raises HostUnreachable when the host gives no
    answer in time: the outcome is then unknown, and the call can be repeated.
    """

    def start(self, spec: GuestSpec) -> None:
        """Make the guest run. Does nothing if it already does; lets a halted one go on.

        Raises:
            GuestNotStarted: it does not run, and nothing of it is left.
        """

    def destroy(self, uuid: UUID) -> None:
        """Stop the guest at once and forget it. Does nothing if it is missing."""

    def state(self, uuid: UUID) -> GuestState: ...

    def guests(self) -> list[UUID]:
        """Return the guests of this platform that are there, running or halted."""

    def set_cpu_cores(self, uuid: UUID, cores: float | None) -> None:
        """Bound what the guest may use of the host's cores; None takes the bound away.

        A host without the means (no cpu cgroup) logs it and goes on.

        Raises:
            GuestMissing: there is no such guest.
        """

    def usage(self, uuid: UUID) -> GuestUsage:
        """Tell what the guest uses.

        Raises:
            GuestMissing: there is no such guest.
        """

    def facts(self) -> HostFacts: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def cores_for(memory_bytes: int) -> float:
    """Return the cores that go with this much memory: one for 4 GiB, at least 0.15."""
    return max(LEAST_CORES, memory_bytes / BYTES_PER_CORE)


def vcpus_for(memory_bytes: int) -> int:
    """Return how many CPUs a guest of this memory sees: its cores, rounded up."""
    return math.ceil(cores_for(memory_bytes))


def host_cores(
    cores: float, *, vcpus: int, accelerator: Accelerator, emulation_factor: float = 8.0
) -> float:
    """Return the cores of the host that give a guest the work of `cores`.

    An emulated core does about a tenth of a real one's work: held to its share of a real
    core, a small guest would take a minute to boot. So under emulation it gets
    `emulation_factor` times as much, never more than one host core for each of its CPUs.
    """
    wanted = cores * emulation_factor if accelerator == "tcg" else cores
    return min(wanted, float(vcpus))
