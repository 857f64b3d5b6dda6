"""The state file of an attached disk: what should be, written before it is made so."""

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Self

MAX_PAST_ROOTS = 16
MAX_EARLIER_PENDING = 16


@dataclass
class DiskState:
    """What a disk should look like.

    overlays [3, 4, 5]     3 lies on the root, 5 takes the guest's writes
    base 2                 the root's node in the storage daemon is called base-2
    pending (root, 2)      overlays 3 and 4 are in that root, whose publication is
                           under way: whether the head has moved, its owner knows
    """

    volume: str
    epoch: int
    root_key: str
    size_bytes: int
    overlays: list[int] = field(default_factory=list)
    next_overlay: int = 0
    base: int = 0
    pending_root_key: str | None = None
    pending_overlays: int = 0
    mountpoint: str | None = None
    """Where the disk is shown by FUSE."""
    layer: int | None = None
    """The local layer under the overlays, which a running daemon reads through."""
    next_layer: int = 0
    folded: int = -1
    """The layer has all of the overlays up to this one."""
    is_put_away: bool = False
    """All overlays are being stored, the topmost too: nobody may write to it any more."""
    earlier_pending: dict[str, int] = field(default_factory=dict)
    """Roots, made from the same base as the pending one, that were about to be published before
    it, and how many of the lowest overlays are in each: one of them may have become the head,
    and nobody was told."""
    past_root_keys: list[str] = field(default_factory=list)
    """Roots that this disk has moved on from while it ran, the last ones. Who knows only one
    of them has looked at the head a moment too early."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a state file, also a later release's; None when there is none."""
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in known})

    def write(self, path: Path) -> None:
        """Write it so that the file is the old or the new one, power loss included."""
        new = path.with_suffix(".new")
        found = asdict(self)
        if not self.earlier_pending:
            del found["earlier_pending"]  # which the release before this one does not read
        with new.open("w") as file:
            json.dump(found, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    @property
    def active(self) -> int:
        """The overlay that takes writes."""
        return self.overlays[-1]

    def add_overlay(self) -> int:
        """Put a new overlay on top."""
        number = self.next_overlay
        self.overlays.append(number)
        self.next_overlay += 1
        return number

    def take_back_overlay(self) -> None:
        """Undo `add_overlay`: nobody has written to the new one."""
        self.overlays.pop()

    def begin_layer(self) -> int:
        """Read through a new, empty layer from now on."""
        self.layer = self.next_layer
        self.next_layer += 1
        self.folded = -1
        return self.layer

    def end_layer(self) -> None:
        """Read from the base itself from now on."""
        self.layer = None
        self.folded = -1

    def announce(self, root_key: str, overlays: int) -> None:
        """Note that a root with the lowest so many overlays is about to be published."""
        earlier = self._pending()
        earlier.pop(root_key, None)
        self.earlier_pending = dict(list(earlier.items())[-MAX_EARLIER_PENDING:])
        self.pending_root_key = root_key
        self.pending_overlays = overlays

    def _pending(self) -> dict[str, int]:
        """Map each root that may have become the head to its number of overlays."""
        if self.pending_root_key is None:
            return {}
        return {**self.earlier_pending, self.pending_root_key: self.pending_overlays}

    def is_active_pending(self) -> bool:
        """Tell whether what takes writes may be in a root that has become the head."""
        return any(count >= len(self.overlays) for count in self._pending().values())

    def is_pending(self, root_key: str) -> bool:
        """Tell whether a root was about to be published, and may have been."""
        return root_key in self._pending()

    def settle(self, root_key: str) -> None:
        """Take a pending root as the base: the head has moved to it."""
        overlays = self._pending()[root_key]
        self.past_root_keys = [*self.past_root_keys, self.root_key][-MAX_PAST_ROOTS:]
        self.root_key = root_key
        self.base += 1
        self.drop_lowest(overlays)

    def drop_lowest(self, count: int) -> None:
        """Forget overlays that the root has, or that say nothing that it does not."""
        self.overlays = self.overlays[count:]
        self.pending_root_key = None
        self.pending_overlays = 0
        self.earlier_pending = {}
