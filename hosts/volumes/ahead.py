"""Preparing a disk's next commit while the last one is on its way to the store.

    cut 1  read, encode ── put packs, index ── publish ── fold, drop
    cut 2                         read, encode ───────┤ put packs, index ── publish ──

The second is cut when so much is written that it would be stored at once anyway and the first
has but a few packs left to put, and is read and encoded from the first as it will be. (Cut
sooner, commits would be smaller and each write wait for one more of them.) Nothing of it is
put, and nothing is said of it in the state file but the cut, before the first is the head:
whatever ends this leaves what a cut beside an upload leaves, frozen overlays of which the
lowest may be stored.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hosts.volumes.commit import Prepared
from hosts.volumes.uploads import UPLOADS, Gate

log = logging.getLogger(__name__)

PACKS_LEFT = UPLOADS // 4
"""The next is cut once the last has no more packs to put: late, so that it has much in it,
and while there is room in memory for some of its own."""

FEW = 4
"""So many commits may follow one another without anybody asking whether another disk waits."""

_LOOK_EVERY_S = 0.05


@dataclass
class Stage:
    """Frozen overlays, and the commit that they come to."""

    overlays: list[int]
    prepared: Prepared | None
    """None when they say nothing that the base does not."""

    def packs_under_way(self) -> int:
        return 0 if self.prepared is None else self.prepared.packs_under_way()


class Ahead:
    """Prepares one stage in a thread of its own, once that is wanted."""

    def __init__(
        self,
        is_wanted: Callable[[], bool],
        prepare: Callable[[Gate], AbstractContextManager[Stage | None]],
    ) -> None:
        """Begin to look.

        Args:
            is_wanted: asked in the thread, twenty times a second, until it is.
            prepare: entered in the thread; what it gives is given up when it is left.
        """
        self._is_wanted = is_wanted
        self._prepare = prepare
        self._gate = Gate()
        self._too_late = threading.Event()
        self._stage: Stage | None = None
        self._stack = ExitStack()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_wanted():
                if self._too_late.wait(_LOOK_EVERY_S):
                    return
            self._stage = self._stack.enter_context(self._prepare(self._gate))
        except Exception as error:
            # What was cut is kept, and whoever stores it next meets the same error.
            log.info("the next commit is not prepared: %s", error)

    def open(self) -> None:
        """Let its packs be put: what it is based on is the head."""
        self._gate.open()

    def take(self) -> Stage | None:
        """Give what was prepared, or is about to be; None when nothing was begun."""
        self._too_late.set()
        self._thread.join()
        return self._stage

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._too_late.set()
        self._gate.shut()
        self._thread.join()
        self._stack.close()
