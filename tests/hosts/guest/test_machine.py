import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hosts.guest.contexts import Contexts, Rejected
from hosts.guest.loop import Loop
from hosts.guest.machine import Machine, Processes

GIB = 1024**3


class FakeDisk:
    """A disk whose freezing happens in a child, as the real one's, and whose thaws count."""

    def __init__(self) -> None:
        self.thaws = 0
        self.freeze_takes_s = 0.0
        self.fails = False

    def freeze(self) -> None:
        time.sleep(self.freeze_takes_s)
        if self.fails:
            raise OSError

    def thaw(self) -> None:
        self.thaws += 1

    def span_bytes(self) -> int:
        return 4 * GIB

    def grow(self, size_bytes: int) -> None:
        raise OSError

    def free_bytes(self) -> int:
        return 9 * GIB  # more than any headroom

    def device_bytes(self) -> int:
        return 10 * GIB


class FakeServer:
    def is_ready(self) -> bool:
        return True

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class FakeProcesses(Processes):
    """Processes that end by TERM, by KILL, or as one in uninterruptible sleep never."""

    def __init__(self, *, end_by: int | None = signal.SIGTERM) -> None:
        self.end_by = end_by
        self.signals: list[int] = []

    def others(self) -> list[int]:
        return [] if self.end_by in self.signals else [1234]

    def signal(self, number: int) -> None:
        self.signals.append(number)


class Asked:
    """A machine's loop, turned until an answer or a moment has come."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.disk = FakeDisk()
        self.processes = FakeProcesses()
        self.contexts = Contexts(self.loop, env={}, memory_bytes=GIB)
        self.ops = Machine(
            self.loop, self.disk, FakeServer(), self.contexts, self.processes
        ).ops()

    def ask(self, op: str, **params: Any) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        self.ops[op](params, answers.append)
        self.turn_until(lambda: bool(answers))
        return answers[0]

    def turn_until(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 30
        while not true():
            assert time.monotonic() < deadline_s
            self.loop.later(0.02, lambda: None)
            self.loop.turn()


@pytest.fixture
def machine() -> Iterator[Asked]:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD)
    made = Asked()
    yield made
    made.loop.close()
    signal.signal(signal.SIGCHLD, before)


def test_an_agent_that_starts_thaws_what_one_before_it_froze(machine: Asked) -> None:
    assert machine.disk.thaws == 1


def test_a_frozen_disk_thaws_by_itself_at_the_deadline(machine: Asked) -> None:
    assert machine.ask("freeze", deadline_s=0.5)["ok"]
    assert machine.disk.thaws == 1

    machine.turn_until(lambda: machine.disk.thaws == 2)


def test_a_freeze_that_fails_or_takes_too_long_ends_thawed(machine: Asked) -> None:
    machine.disk.fails = True
    assert not machine.ask("freeze", deadline_s=5)["ok"]
    assert machine.disk.thaws == 2

    machine.disk.fails = False
    machine.disk.freeze_takes_s = 1.0
    assert not machine.ask("freeze", deadline_s=0.2)["ok"]
    assert machine.disk.thaws == 4  # at the deadline, and once freezing came to its end


def test_a_thaw_calls_the_deadline_off(machine: Asked) -> None:
    machine.ask("freeze", deadline_s=0.3)
    assert machine.ask("thaw")["ok"]
    thaws = machine.disk.thaws

    over_at_s = time.monotonic() + 0.6
    machine.turn_until(lambda: time.monotonic() > over_at_s)
    assert machine.disk.thaws == thaws


def test_stopping_ends_all_and_freezes_and_may_be_asked_again(machine: Asked) -> None:
    for _ in range(2):
        assert machine.ask("prepare_stop", deadline_s=5)["ok"]
        assert machine.ask("stats")["frozen"]

    assert signal.SIGKILL not in machine.processes.signals
    assert machine.contexts.closed
    machine.ask("thaw")
    assert not machine.contexts.closed


def test_stopping_kills_what_ignores_term(machine: Asked) -> None:
    machine.processes.end_by = signal.SIGKILL

    assert machine.ask("prepare_stop", deadline_s=1)["ok"]

    assert machine.processes.signals[-1] == signal.SIGKILL


def test_stopping_leaves_behind_what_cannot_be_killed(machine: Asked) -> None:
    machine.processes.end_by = None
    started_s = time.monotonic()

    assert machine.ask("prepare_stop", deadline_s=1)["ok"]

    assert time.monotonic() - started_s >= 1
    assert machine.ask("stats")["frozen"]


@pytest.mark.parametrize("size_bytes", [3 * GIB, 11 * GIB, -1, "4", True])
def test_a_disk_grows_neither_smaller_nor_beyond_its_device(
    machine: Asked, size_bytes: object
) -> None:
    with pytest.raises(Rejected):
        machine.ask("grow", size_bytes=size_bytes)


@pytest.mark.parametrize("deadline_s", [None, "5", 0, 1e9, True])
def test_a_deadline_is_a_sensible_number(machine: Asked, deadline_s: object) -> None:
    with pytest.raises(Rejected):
        machine.ask("freeze", deadline_s=deadline_s)
