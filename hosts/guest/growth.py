"""Enlarges the root file system before it is full, as fast as it is being filled.

The device is as large as the sandbox may ever become, and mostly holes; the file system
starts small in it. It is mounted and in use while the kernel enlarges it, which takes some
tenths of a second whatever the size, and what was interrupted is a file system of some size
in between: the next look goes on.

    free ≥ headroom    what a program can write until growth that starts at the next look
                       is done: from the speed seen lately, and from what it can dump into
                       memory at once before it has to wait for the disk

Looks are seldom while nothing is written, and up to 20 a second under a fast writer.
"""

from __future__ import annotations

import os
import sys
import time

from hosts.guest import protocol, spawn
from hosts.guest.contexts import Rejected

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from hosts.guest.doors import Reply
    from hosts.guest.loop import Loop

    class Disk(Protocol):
        """The root file system."""

        def span_bytes(self) -> int: ...
        def device_bytes(self) -> int: ...
        def free_bytes(self) -> int: ...
        def grow(self, size_bytes: int) -> None: ...


GIB = 1024**3
MIB = 1024**2

MIN_HEADROOM_BYTES = 1 * GIB
MAX_SHARE_BYTES = 16 * GIB
"""A fifth of the file system is kept free, up to this."""
MAX_STEP_BYTES = 64 * GIB
"""It doubles at each step, up to this."""
MAX_BURST_BYTES = 8 * GIB

_SAFETY = 3
_STEP_S = 20
"""A step lasts so long at the speed seen lately."""
_IDLE_BYTES_PER_S = 1 * MIB
_HALF_LIFE_S = 5.0
_ACTIVE_PAUSE_S = (0.05, 0.5)
_IDLE_PAUSE_S = (0.5, 2.0)
_FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_UNIT_BYTES = MIB


class Growth:
    """The watcher of the root file system; `held` while that is frozen."""

    def __init__(
        self, loop: Loop, disk: Disk, *, memory_bytes: int, limit_bytes: int = 0
    ) -> None:
        self.held = False
        self._loop = loop
        self._disk = disk
        # A program gets ahead of the disk by about a fifth of the memory (vm.dirty_ratio).
        self._burst_bytes = min(memory_bytes // 4, MAX_BURST_BYTES)
        self._limit_bytes = limit_bytes
        self._growing = False
        self._free_bytes = disk.free_bytes()
        self._looked_at_s = time.monotonic()
        self._bytes_per_s = 0.0
        self._takes_s = 1.0
        self._retry_s = _FIRST_RETRY_S
        self._not_before_s = 0.0
        loop.later(0.0, self._watch)

    def ceiling_bytes(self) -> int:
        """How large it may become: its device, or what the team may have."""
        device_bytes = self._disk.device_bytes()
        return min(device_bytes, self._limit_bytes) if self._limit_bytes else device_bytes

    def grow(self, params: dict[str, Any], reply: Reply) -> None:
        """Enlarge the root file system, to `size_bytes` or to twice what it is."""
        now_bytes = self._disk.span_bytes()
        ceiling_bytes = self.ceiling_bytes()
        wanted = params.get("size_bytes")
        if wanted is None:
            wanted = max(now_bytes, min(2 * now_bytes, ceiling_bytes))
        elif type(wanted) is not int or not 0 <= wanted < 2**63:
            raise Rejected(protocol.INVALID_REQUEST, "size_bytes must be a size")
        elif wanted > ceiling_bytes:
            raise Rejected(protocol.INVALID_REQUEST, "size_bytes is beyond the device")
        elif wanted < now_bytes:
            raise Rejected(protocol.INVALID_REQUEST, "a file system cannot become smaller")
        if self._growing:
            raise Rejected(protocol.INVALID_REQUEST, "the file system is growing already")
        if self.held:
            raise Rejected(protocol.INVALID_REQUEST, "the file system is frozen")
        self._grow_to(wanted, reply)

    def headroom_bytes(self) -> int:
        """What must be free for a program not to find the disk full."""
        share_bytes = min(self._disk.span_bytes() // 5, MAX_SHARE_BYTES)
        until_grown_s = _ACTIVE_PAUSE_S[1] + self._takes_s
        ahead_bytes = int(_SAFETY * self._bytes_per_s * until_grown_s)
        return max(MIN_HEADROOM_BYTES, share_bytes, self._burst_bytes + ahead_bytes)

    def _watch(self) -> None:
        free_bytes = self._measure()
        headroom_bytes = self.headroom_bytes()
        self._loop.later(self._pause_s(free_bytes - headroom_bytes), self._watch)
        if free_bytes < headroom_bytes and not self._growing and not self.held:
            self._step(headroom_bytes)

    def _measure(self) -> int:
        """Return what is free, and learn how fast that becomes less."""
        now_s, free_bytes = time.monotonic(), self._disk.free_bytes()
        passed_s = max(now_s - self._looked_at_s, 0.001)
        seen = max(0.0, (self._free_bytes - free_bytes) / passed_s)
        faded: float = self._bytes_per_s * 0.5 ** (passed_s / _HALF_LIFE_S)
        self._bytes_per_s = max(seen, faded)
        self._free_bytes, self._looked_at_s = free_bytes, now_s
        return free_bytes

    def _pause_s(self, room_bytes: int) -> float:
        if self._bytes_per_s < _IDLE_BYTES_PER_S:
            # Whoever begins to write now is unlikely to manage more than this.
            least_s, most_s, wait_s = *_IDLE_PAUSE_S, room_bytes / (2 * GIB)
        else:
            least_s, most_s = _ACTIVE_PAUSE_S
            wait_s = room_bytes / (4 * self._bytes_per_s)
        return min(max(wait_s, least_s), most_s)

    def _step(self, headroom_bytes: int) -> None:
        now_bytes = self._disk.span_bytes()
        step_bytes = max(
            min(now_bytes, MAX_STEP_BYTES), 2 * headroom_bytes, int(self._bytes_per_s * _STEP_S)
        )
        wanted_bytes = min(now_bytes + step_bytes, self.ceiling_bytes())
        # Less than the least group of blocks is not worth a try.
        is_worth_it = wanted_bytes > now_bytes + _UNIT_BYTES
        if is_worth_it and time.monotonic() >= self._not_before_s:
            self._grow_to(wanted_bytes, _report)

    def _grow_to(self, wanted_bytes: int, reply: Reply) -> None:
        began_s = time.monotonic()

        def grown(status: int) -> None:
            self._growing = False
            if status:
                self._not_before_s = time.monotonic() + self._retry_s
                self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
                reply(_failure(status))
                return
            self._retry_s = _FIRST_RETRY_S
            self._takes_s = max(time.monotonic() - began_s, self._takes_s / 2)
            reply({"ok": True, "size_bytes": self._disk.span_bytes()})

        self._growing = True
        pid = spawn.fork_call(lambda: self._disk.grow(wanted_bytes))
        self._loop.await_child(pid, grown)


def _failure(status: int) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    reason = os.strerror(code) if 0 < code < spawn.NO_ERRNO else f"it ended with {code}"
    message = f"the file system was not enlarged: {reason}"
    return {"ok": False, "error": {"code": "failed", "message": message}}


def _report(answer: dict[str, Any]) -> None:
    if answer["ok"]:
        said = f"the file system now has {answer['size_bytes']} bytes"
    else:
        said = answer["error"]["message"]
    sys.stderr.write(f"sandkeep: {said}\n")
