"""Growth of the root file system, in a simulated time in which a writer and it race."""

import errno
import heapq
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from hosts.guest import spawn
from hosts.guest.contexts import Rejected
from hosts.guest.growth import GIB, MIB, Growth
from hosts.guest.loop import Timer

TIB = 1024 * GIB


class Simulation:
    """A disk of which a part is in use, and a loop whose time is what we say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.span = 4 * GIB
        self.used = 1 * GIB
        self.device = 1 * TIB
        self.bytes_per_s = 0.0
        self.takes_s = 0.3
        self.works = True
        self.status = 256
        self.full_at: list[float] = []
        self.grown_to: list[int] = []
        self.looks = 0
        self._events: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._wanted = 0
        monkeypatch.setattr("hosts.guest.growth.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("hosts.guest.growth.spawn.fork_call", self._fork)

    # What the watcher sees of the loop and the disk.

    def later(self, delay_s: float, act: Callable[[], None]) -> Timer:
        timer = Timer(self.now_s + delay_s, act)
        heapq.heappush(self._events, (timer.at_s, next(self._order), timer))
        return timer

    def await_child(self, pid: int, ended: Callable[[int], None]) -> None:
        def end() -> None:
            if self.works:
                self.span = self._wanted
                self.grown_to.append(self.span)
            ended(0 if self.works else self.status)

        self.later(self.takes_s, end)

    def span_bytes(self) -> int:
        return self.span

    def device_bytes(self) -> int:
        return self.device

    def free_bytes(self) -> int:
        self.looks += 1
        return max(0, self.span - self.used)

    def grow(self, size_bytes: int) -> None:
        self._wanted = size_bytes

    def _fork(self, act: Callable[[], None]) -> int:
        act()
        return 1

    # What happens.

    def begin(self, *, memory_bytes: int = 2 * GIB, limit_bytes: int = 0) -> Growth:
        found: Any = self
        return Growth(found, found, memory_bytes=memory_bytes, limit_bytes=limit_bytes)

    def burst(self, size_bytes: int) -> None:
        """Write at once, as into memory."""
        self._write(size_bytes)

    def pass_s(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._events and self._events[0][0] <= until_s:
            at_s, _, timer = heapq.heappop(self._events)
            self._go_to(at_s)
            if timer.act:
                timer.act()
        self._go_to(until_s)

    def _go_to(self, at_s: float) -> None:
        passed_s, self.now_s = at_s - self.now_s, at_s
        self._write(int(self.bytes_per_s * passed_s))

    def _write(self, size_bytes: int) -> None:
        self.used += size_bytes
        if self.used > self.span:
            self.full_at.append(self.now_s)
            self.used = self.span


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(monkeypatch)


@pytest.mark.parametrize("takes_s", [0.05, 1.0])
@pytest.mark.parametrize("mib_per_s", [5, 100, 500, 1000])
def test_a_writer_from_a_nearly_full_disk_to_20_times_its_size_never_finds_it_full(
    disk: Simulation, mib_per_s: int, takes_s: float
) -> None:
    disk.takes_s = takes_s
    disk.used = disk.span - 20 * MIB
    disk.begin()
    disk.pass_s(takes_s + 0.1)  # before any program of the sandbox is started

    disk.burst(500 * MIB)
    disk.bytes_per_s = mib_per_s * MIB
    while disk.used < 80 * GIB:
        disk.pass_s(1)

    assert disk.full_at == []
    assert len(disk.grown_to) < 20


@pytest.mark.parametrize("idle_s", [60.0, 61.3, 3600.7])
def test_a_writer_who_begins_after_long_idleness_does_not_find_it_full(
    disk: Simulation, idle_s: float
) -> None:
    watcher = disk.begin()
    # The worst there is: just more than what makes it grow.
    disk.used = disk.span - watcher.headroom_bytes() - MIB
    disk.pass_s(idle_s)

    disk.burst(400 * MIB)
    disk.bytes_per_s = 500 * MIB
    disk.pass_s(60)

    assert disk.full_at == []


def test_nobody_who_does_not_write_makes_it_grow_or_look_often(disk: Simulation) -> None:
    disk.begin()
    disk.pass_s(1000)

    assert disk.grown_to == []
    assert disk.looks <= 1100


def test_it_ends_at_its_device_and_says_nothing_more(disk: Simulation) -> None:
    disk.device = 10 * GIB
    disk.begin()
    disk.bytes_per_s = 100 * MIB
    disk.pass_s(300)

    assert disk.grown_to[-1] == disk.span == 10 * GIB
    assert len(disk.grown_to) <= 3


def test_a_team_s_limit_is_the_end_of_it(disk: Simulation) -> None:
    watcher = disk.begin(limit_bytes=6 * GIB)
    disk.bytes_per_s = 100 * MIB
    disk.pass_s(300)

    assert disk.span == watcher.ceiling_bytes() == 6 * GIB
    with pytest.raises(Rejected, match="beyond"):
        watcher.grow({"size_bytes": 7 * GIB}, lambda _: None)


def test_a_limit_below_what_it_is_changes_nothing(disk: Simulation) -> None:
    watcher = disk.begin(limit_bytes=2 * GIB)
    answers: list[dict[str, Any]] = []
    disk.used = disk.span
    disk.pass_s(100)
    watcher.grow({}, answers.append)
    disk.pass_s(1)

    assert disk.span == 4 * GIB
    assert answers[0]["ok"]


def test_growth_that_fails_is_tried_again_ever_more_seldom(
    disk: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.works = False
    disk.used = disk.span
    asked: list[int] = []
    monkeypatch.setattr(disk, "grow", asked.append)
    disk.begin()
    disk.pass_s(600)

    assert 8 <= len(asked) <= 16


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (errno.EBUSY << 8, "Device or resource busy"),
        (spawn.NO_ERRNO << 8, "it ended with 255"),
        (signal.SIGSEGV, "it ended with -11"),
    ],
)
def test_growth_that_fails_says_why(disk: Simulation, status: int, reason: str) -> None:
    disk.works, disk.status = False, status
    answers: list[dict[str, Any]] = []
    disk.begin().grow({"size_bytes": 8 * GIB}, answers.append)
    disk.pass_s(1)

    message = f"the file system was not enlarged: {reason}"
    assert answers == [{"ok": False, "error": {"code": "failed", "message": message}}]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (OSError(errno.EBUSY, "busy"), errno.EBUSY),
        (OSError("odd"), spawn.NO_ERRNO),
        (ValueError("odd"), spawn.NO_ERRNO),
    ],
)
def test_a_child_tells_the_number_of_the_error(error: Exception | None, code: int) -> None:
    def act() -> None:
        if error:
            raise error

    _, status = os.waitpid(spawn.fork_call(act), 0)

    assert os.waitstatus_to_exitcode(status) == code


def test_a_frozen_file_system_is_left_alone(disk: Simulation) -> None:
    watcher = disk.begin()
    watcher.held = True
    disk.used = disk.span - MIB
    disk.pass_s(30)
    with pytest.raises(Rejected, match="frozen"):
        watcher.grow({}, lambda _: None)
    held_at = disk.span
    watcher.held = False
    disk.pass_s(5)

    assert held_at == 4 * GIB
    assert disk.span > 4 * GIB


@pytest.mark.parametrize("size", [True, 1.5, "1", -1, 2**63, [], {}])
def test_a_size_that_is_none_is_refused(disk: Simulation, size: object) -> None:
    with pytest.raises(Rejected):
        disk.begin().grow({"size_bytes": size}, lambda _: None)
