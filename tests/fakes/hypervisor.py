"""A host in memory."""

from types import TracebackType
from typing import ClassVar, Self
from uuid import UUID

from common.units import GiB, MiB
from hosts.errors import GuestMissing, GuestNotStarted, HostUnreachable
from hosts.hypervisor import (
    GuestSpec,
    GuestState,
    GuestUsage,
    HostFacts,
    HypervisorConfig,
)


class FakeHypervisor:
    """Keeps the guests of each host and network.

    A URI in `down` does not answer. A guest in `broken` does not start. `halt` and `crash`
    do to a guest what a dead disk and a dead QEMU do.
    """

    hosts: ClassVar[dict[tuple[str, str], dict[UUID, GuestSpec]]] = {}
    halted: ClassVar[set[UUID]] = set()
    broken: ClassVar[set[UUID]] = set()
    cores: ClassVar[dict[UUID, float | None]] = {}
    down: ClassVar[set[str]] = set()

    def __init__(self, config: HypervisorConfig) -> None:
        self.config = config

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def start(self, spec: GuestSpec) -> None:
        guests = self._guests()
        if spec.uuid in self.broken:
            raise GuestNotStarted(spec.uuid, "it is broken")
        if spec.uuid not in guests:
            guests[spec.uuid] = spec
            self.cores[spec.uuid] = spec.cpu_cores
        self.halted.discard(spec.uuid)

    def destroy(self, uuid: UUID) -> None:
        self._guests().pop(uuid, None)
        self.halted.discard(uuid)

    def state(self, uuid: UUID) -> GuestState:
        if uuid not in self._guests():
            return GuestState.MISSING
        return GuestState.HALTED if uuid in self.halted else GuestState.RUNNING

    def guests(self) -> list[UUID]:
        return list(self._guests())

    def set_cpu_cores(self, uuid: UUID, cores: float | None) -> None:
        self._guest(uuid)
        self.cores[uuid] = cores

    def usage(self, uuid: UUID) -> GuestUsage:
        spec = self._guest(uuid)
        return GuestUsage(
            resident_bytes=64 * MiB,
            available_bytes=spec.memory_bytes - 64 * MiB,
            cpu_time_s=1.0,
        )

    def facts(self) -> HostFacts:
        self._guests()
        return HostFacts(
            memory_bytes=16 * GiB, cpus=4, hypervisor_version="7.2.0", driver_version="9.0.0"
        )

    def halt(self, uuid: UUID) -> None:
        self._guest(uuid)
        self.halted.add(uuid)

    def crash(self, uuid: UUID) -> None:
        self._guests().pop(uuid, None)

    def _guests(self) -> dict[UUID, GuestSpec]:
        if self.config.uri in self.down:
            raise HostUnreachable(self.config.uri, "it is down")
        return self.hosts.setdefault((self.config.uri, self.config.network), {})

    def _guest(self, uuid: UUID) -> GuestSpec:
        guests = self._guests()
        if uuid not in guests:
            raise GuestMissing(uuid)
        return guests[uuid]

    @classmethod
    def reset(cls) -> None:
        """Forget every host."""
        for kept in (cls.hosts, cls.halted, cls.broken, cls.cores, cls.down):
            kept.clear()
