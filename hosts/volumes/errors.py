"""What can go wrong with a volume, told apart by who can act on it."""

from uuid import UUID

from common.errors import Refused, Unavailable


class StoreUnavailable(Unavailable):
    """Object storage gave no good answer; nothing was lost, and the call may work later."""

    code = "store_unavailable"


class ObjectMissing(Refused):
    """An object that should be in the store is not there."""

    code = "object_missing"

    def __init__(self, key: str) -> None:
        super().__init__(f"The object {key} is not in the store.")
        self.key = key


class Corrupt(Refused):
    """Bytes that we read are not what their name or their format promises."""

    code = "volume_corrupt"


class KeyDestroyed(Refused):
    """The key of a volume was destroyed with its team: what it held is gone for ever."""

    code = "key_destroyed"

    def __init__(self, owner: str) -> None:
        super().__init__(f"The key of {owner or 'the platform'} was destroyed.")
        self.owner = owner


class KeyMissing(Refused):
    """Nobody here knows the key of a volume."""

    code = "key_missing"

    def __init__(self, volume_id: UUID) -> None:
        super().__init__(f"There is no key for volume {volume_id}.")
        self.volume_id = volume_id


class NotAttached(Refused):
    """The volume has no disk on this host."""

    code = "disk_not_attached"


class StaleEpoch(Refused):
    """The disk on this host belongs to a later epoch than the one asked for."""

    code = "stale_epoch"


class OverlayMismatch(Refused):
    """The overlay on this host was not written over the root that is asked for.

    Its writes are kept: they may be the only copy. Discard it explicitly to go on.
    """

    code = "overlay_mismatch"


class HeadMoved(Refused):
    """A commit was made from a generation that is no longer the volume's head."""

    code = "head_moved"

    def __init__(self, volume_id: UUID, root_key: str | None) -> None:
        super().__init__(f"Volume {volume_id} has moved on since this commit began.")
        self.volume_id = volume_id
        self.root_key = root_key
        """The head's; None when it has none."""


class Uncommitted(Refused):
    """The disk holds writes that no commit has, so it is not thrown away."""

    code = "disk_uncommitted"


class DiskBusy(Unavailable):
    """Another process of this host is working on the disk."""

    code = "disk_busy"


class DaemonFailed(Unavailable):
    """A disk's export or storage daemon did not start, answer or stop."""

    code = "disk_daemon_failed"
