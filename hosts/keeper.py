"""The thread of a host's worker that keeps the logs of its running disks short.

Twice a second it looks at the overlays of all disks by their files alone: an idle disk costs a
few calls of `stat`, no request and no word with its storage daemon. It says which disks are
due for a commit in the background, slows the writers whose log fills up (see `volumes.pacing`),
knows in words what is the matter, and starts an export again that died: all of a disk waits
for it, a cut that is under way included.

    Keeper(disks, due=lambda volume_id: …send a message…, on_health=…).start()

It knows no database: what is to be done about a volume, `due` and `on_health` know.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from common.errors import Unavailable
from hosts.volumes.disks import WAITS_LONG_S, DisksConfig, LogLook
from hosts.volumes.errors import NotAttached
from hosts.volumes.pacing import (
    NO_LIMITS,
    STOP,
    TRICKLE,
    Limits,
    describe_bytes,
    limits_for,
)

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5

COMMIT_EVERY_S = 10.0

ASK_AGAIN_S = (10.0, 10.0, 20.0, 40.0)
"""How long after each fruitless try for a commit the next is asked for."""

SOON_ASK_AGAIN_S = (2.0, 5.0)
"""The same, while the log is long: its writer may be waiting."""

LATE_S = 4.0
"""Limits that are set anew later than this may have run out."""

TOUCH_AGAIN_S = 5.0
"""How long a disk whose storage daemon does not answer is left alone."""

MENDED_AT_ONCE = 4
"""Exports that are started again at one time; the machine may be short of something."""

MEND_AGAIN_S = 2.0
"""How long after one did not start it is tried again."""

SILENT_TRIES = 2
"""So many commits must come to nothing before a user is told."""

WAITS_TOLD_S = 5.0
"""Reads must wait so long before a user is told."""

SLOW_SHARE = 0.5
"""Below this share of the budget nobody notices that writes are limited."""

TELL_EVERY_S = 5.0
"""Numbers change all the time; who is told of them has a database to write to."""


class KeptDisks(Protocol):
    """What the keeper asks of a host's disks: `Disks`, or a fake."""

    @property
    def config(self) -> DisksConfig: ...
    def look(self) -> list[LogLook]: ...
    def is_uploading(self, volume_id: UUID) -> bool: ...
    def limit_writes(
        self, volume_id: UUID, limits: Limits, *, release: bool = False
    ) -> None: ...
    def renew_layer(self, volume_id: UUID) -> None: ...
    def mend(self, volume_id: UUID) -> bool: ...


@dataclass
class _Kept:
    """What the keeper remembers of a disk."""

    root_key: str
    since: float | None = None
    """When something to store was first seen; None while there is nothing."""
    asked: int = 0
    """How many commits were asked for since the last that moved the root."""
    ask_at: float = 0.0
    """Not to be asked for before."""
    limits: Limits | None = None
    """What the storage daemon was told last; None: not known."""
    held_rate: float = math.inf
    """The lowest rate since waiting writes were last let go."""
    eased_until_ns: int = 0
    limited_at: float = 0.0
    limited_at_ns: int = 0
    touch_at: float = 0.0
    """Its daemon did not answer: not to be tried before."""
    """Up to which change of the overlays the limits have counted."""
    health: str = ""
    told: str = ""
    told_at: float = 0.0


class Keeper:
    """Looks after a host's running disks. One for each host."""

    def __init__(
        self,
        disks: KeptDisks,
        *,
        due: Callable[[UUID], None],
        on_health: Callable[[UUID, str], None] | None = None,
        mend: Callable[[UUID], bool] | None = None,
        commit_every_s: float = COMMIT_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look after these disks, once `start` is called.

        Args:
            due: called in the keeper's thread when a volume is to be committed in the
                background (`Disks.checkpoint(..., background=True)`). It returns at once.
                While a disk is being stored it is not called for it.
            on_health: told when what `health` says has changed, in the keeper's thread, a
                few times a minute at most for each volume.
            mend: what starts an export again, instead of the disks themselves. It is called
                in a thread of its own.
            commit_every_s: how old a write becomes before a commit is due.
        """
        self._disks = disks
        self._due = due
        self._on_health = on_health
        self._start_export = mend or disks.mend
        self._commit_every_s = commit_every_s
        self._clock = clock
        self._kept: dict[UUID, _Kept] = {}
        self._mending: dict[UUID, threading.Thread] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; limits stay as they are, and hold by themselves."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def health(self, volume_id: UUID) -> str:
        """Say in words what is the matter with a disk's log; empty when nothing is."""
        kept = self._kept.get(volume_id)
        return kept.health if kept is not None else ""

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception:
                # The next look may go better, and without any the guests would be stuck.
                log.exception("the keeper could not look at the disks")

    def look(self) -> None:
        """Look at all disks once, and do what is to be done."""
        found = self._disks.look()
        self._see_to_exports(found)
        looks = {one.volume_id: one for one in found if one.is_served}
        for volume_id in self._kept.keys() - looks.keys():
            del self._kept[volume_id]
        for volume_id, one in looks.items():
            kept = self._kept.setdefault(volume_id, _Kept(one.root_key))
            if self._clock() >= kept.touch_at:
                self._touch(one, kept)
            self._ask(one, kept)
            self._tell(one, kept)

    def _touch(self, one: LogLook, kept: _Kept) -> None:
        """Tell the disk's storage daemon what it must know."""
        try:
            self._pace(one, kept)
            if one.layer_is_large:
                self._disks.renew_layer(one.volume_id)
        except (Unavailable, NotAttached) as error:
            # It holds still for a read that waits for the store, say. Others are waiting.
            log.info("volume %s is not paced: %s", one.volume_id, error)
            kept.limits = None
            kept.touch_at = self._clock() + TOUCH_AGAIN_S

    # -- exports --------------------------------------------------------------------------

    def _see_to_exports(self, found: Sequence[LogLook]) -> None:
        """Start exports again that died, in threads of their own: that may take a while."""
        self._mending = {v: thread for v, thread in self._mending.items() if thread.is_alive()}
        for one in found:
            if len(self._mending) == MENDED_AT_ONCE:
                return
            if one.lacks_export and one.volume_id not in self._mending:
                thread = threading.Thread(
                    target=self._mend, args=(one.volume_id,), name="mend", daemon=True
                )
                self._mending[one.volume_id] = thread
                thread.start()

    def _mend(self, volume_id: UUID) -> None:
        try:
            if self._start_export(volume_id):
                log.warning("the export of volume %s had died and was started again", volume_id)
        except Exception as error:
            log.warning(
                "the export of volume %s is not back yet: %s",
                volume_id,
                error,
                exc_info=not isinstance(error, Unavailable),
            )
            self._stop.wait(MEND_AGAIN_S)

    # -- commits --------------------------------------------------------------------------

    def _ask(self, one: LogLook, kept: _Kept) -> None:
        now = self._clock()
        if one.root_key != kept.root_key:
            kept.root_key = one.root_key
            # What was written since is at most as old as this look.
            kept.asked, kept.since, kept.ask_at = 0, None, 0.0
        if not one.written_at_ns:
            kept.asked, kept.since, kept.ask_at = 0, None, 0.0
            return
        if kept.since is None:
            kept.since = now
        soon = one.log_bytes >= self._disks.config.soon_bytes
        is_old = now - kept.since >= self._commit_every_s
        if not (is_old or soon) or now < kept.ask_at:
            return
        if one.reads_wait_s >= WAITS_LONG_S or self._disks.is_uploading(one.volume_id):
            return
        self._due(one.volume_id)
        pauses_s = SOON_ASK_AGAIN_S if soon else ASK_AGAIN_S
        kept.ask_at = now + pauses_s[min(kept.asked, len(pauses_s) - 1)]
        kept.asked += 1

    # -- pace -----------------------------------------------------------------------------

    def _pace(self, one: LogLook, kept: _Kept) -> None:
        """Set the limits that the log calls for, and anew what was used up of them."""
        if one.eased_until_ns != kept.eased_until_ns:
            kept.eased_until_ns, kept.limits = one.eased_until_ns, None
        if one.eased_until_ns > time.time_ns():
            return
        limits = limits_for(one.log_bytes, self._disks.config.log_budget_bytes)
        if limits == kept.limits and not self._is_used(one, kept):
            return
        now = self._clock()
        release = limits not in (TRICKLE, STOP) and self._is_relief(limits, kept, now)
        self._disks.limit_writes(one.volume_id, limits, release=release)
        rate = limits.rate_bytes_per_s or math.inf
        kept.held_rate = rate if release else min(rate, kept.held_rate)
        kept.limits = limits
        kept.limited_at = now
        kept.limited_at_ns = one.written_at_ns

    def _is_relief(self, limits: Limits, kept: _Kept, now: float) -> bool:
        """Tell whether a write that was told to wait would now be told to wait much less."""
        if kept.limits is None:  # a worker before us may have set any
            return True
        if kept.limits.burst_bytes_per_s and now - kept.limited_at >= LATE_S:
            return True  # the burst may be over, and only the trickle left
        return (limits.rate_bytes_per_s or math.inf) >= 2 * kept.held_rate

    def _is_used(self, one: LogLook, kept: _Kept) -> bool:
        # At the end of the budget they are not renewed: that would let a write through.
        if kept.limits in (NO_LIMITS, TRICKLE, STOP):
            return False
        return one.written_at_ns != kept.limited_at_ns

    # -- health ---------------------------------------------------------------------------

    def _tell(self, one: LogLook, kept: _Kept) -> None:
        kept.health = self._describe(one, kept)
        now = self._clock()
        if kept.health == kept.told or self._on_health is None:
            return
        # Numbers alone may wait; good news and bad may not.
        if kept.health and kept.told and now - kept.told_at < TELL_EVERY_S:
            return
        kept.told, kept.told_at = kept.health, now
        self._on_health(one.volume_id, kept.health)

    def _describe(self, one: LogLook, kept: _Kept) -> str:
        budget = self._disks.config.log_budget_bytes
        waiting = f"{describe_bytes(one.log_bytes)} of changes wait to be stored"
        if one.reads_wait_s >= WAITS_TOLD_S:
            waiting = f"reads of what is not on its host wait, {waiting}"
        limits = kept.limits or NO_LIMITS
        rate = limits.rate_bytes_per_s
        is_slowed = rate is not None and one.log_bytes >= SLOW_SHARE * budget
        is_silent = kept.asked > SILENT_TRIES or one.reads_wait_s >= WAITS_TOLD_S
        if not (is_slowed or is_silent):
            return ""
        what = "Object storage does not answer" if is_silent else "Object storage is slow"
        if not is_slowed:
            return f"{what}: {waiting}."
        if limits in (TRICKLE, STOP):
            return f"{what}: {waiting}; writes wait until there is room."
        assert rate is not None
        return f"{what}: {waiting}; writes are slowed to {describe_bytes(rate)}/s."
