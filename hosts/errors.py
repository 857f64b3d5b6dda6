"""What can go wrong on the fleet."""

from ipaddress import IPv4Network
from uuid import UUID

from common.errors import Refused, Unavailable


class NoCapacity(Unavailable):
    code = "no_capacity"

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(memory_bytes)
        self.memory_bytes = memory_bytes

    def __str__(self) -> str:
        if not self.memory_bytes:
            return "No host is available right now."
        return f"No host can promise {self.memory_bytes} bytes of memory right now."


class HostUnreachable(Unavailable):
    code = "host_unreachable"

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(host, reason)
        self.host = host
        self.reason = reason

    def __str__(self) -> str:
        return f"Host {self.host} does not answer: {self.reason}"


class GuestMissing(Refused):
    code = "guest_missing"

    def __init__(self, uuid: UUID) -> None:
        super().__init__(uuid)
        self.uuid = uuid

    def __str__(self) -> str:
        return f"No guest {self.uuid} on this host."


class GuestNotStarted(Unavailable):
    """QEMU or libvirt turned the guest down: its disk does not answer, memory is short.

    `reason` is for the log: it may hold paths of the host.
    """

    code = "guest_not_started"

    def __init__(self, uuid: UUID, reason: str) -> None:
        super().__init__(uuid, reason)
        self.uuid = uuid
        self.reason = reason

    def __str__(self) -> str:
        return f"Guest {self.uuid} did not start."


class NetworkInUse(Refused):
    """The guest network exists with another bridge or subnet, and guests are on it."""

    code = "network_in_use"

    def __init__(self, network: str) -> None:
        super().__init__(network)
        self.network = network

    def __str__(self) -> str:
        return f"Network {self.network} cannot be changed while guests use it."


class NetworkNotReady(Unavailable):
    """The host would not set up the guest network or its firewall."""

    code = "network_not_ready"

    def __init__(self, network: str, reason: str) -> None:
        super().__init__(network, reason)
        self.network = network
        self.reason = reason

    def __str__(self) -> str:
        return f"Network {self.network} is not ready: {self.reason}"


class NoFreeSubnet(Refused):
    code = "no_free_subnet"

    def __init__(self, candidates: tuple[IPv4Network, ...]) -> None:
        super().__init__(candidates)
        self.candidates = candidates

    def __str__(self) -> str:
        return f"None of {len(self.candidates)} subnets is free on this host."


class VolumeBusy(Unavailable):
    """Someone else writes to the volume at this moment; the same call may work later."""

    code = "volume_busy"

    def __init__(self, volume_id: UUID, host_id: int) -> None:
        super().__init__(volume_id, host_id)
        self.volume_id = volume_id
        self.host_id = host_id

    def __str__(self) -> str:
        return f"Volume {self.volume_id} is in use."


class StaleEpoch(Refused):
    """The volume was given to another host: what this one has may not be published."""

    code = "stale_epoch"

    def __init__(self, volume_id: UUID, epoch: int) -> None:
        super().__init__(volume_id, epoch)
        self.volume_id = volume_id
        self.epoch = epoch

    def __str__(self) -> str:
        return f"Volume {self.volume_id} has moved on from epoch {self.epoch}."


class GuestBusy(Unavailable):
    """Another worker thread acts on the guest at this moment."""

    code = "guest_busy"

    def __init__(self, uuid: UUID) -> None:
        super().__init__(uuid)
        self.uuid = uuid

    def __str__(self) -> str:
        return f"Guest {self.uuid} is being acted on."


class ObjectsCollected(Unavailable):
    """A commit names objects that have been given up; it has to be made anew."""

    code = "objects_collected"

    def __init__(self, volume_id: UUID) -> None:
        super().__init__(f"A commit of volume {volume_id} names objects that are collected.")
        self.volume_id = volume_id


class GenerationGone(Refused):
    """The state of a disk that was asked for has just been given up."""

    code = "generation_gone"

    def __init__(self) -> None:
        super().__init__("That state of the disk is no longer kept.")
