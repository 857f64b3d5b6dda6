"""What a host's keeper asks for, when, and what it says."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from common.units import GiB, MiB
from hosts import keeper
from hosts.keeper import LOOK_EVERY_S, MENDED_AT_ONCE, Keeper
from hosts.volumes.disks import DisksConfig, LogLook
from hosts.volumes.errors import DaemonFailed
from hosts.volumes.objects import StoreConfig
from hosts.volumes.pacing import NO_LIMITS, STOP, Limits, limits_for
from tests.hosts.machine import wait_for

CONFIG = DisksConfig(
    run_dir=Path("/nowhere"),
    state_dir=Path("/nowhere"),
    store=StoreConfig("http://nowhere", "bucket", "id", "secret"),
    cache_budget_bytes=GiB,
    log_budget_bytes=2 * GiB,
)
VOLUME = uuid4()
IDLE = LogLook(
    volume_id=VOLUME,
    root_key="root 0",
    is_served=True,
    log_bytes=0,
    written_at_ns=0,
    frozen=0,
    layer_is_large=False,
)


class Bench:
    """A keeper, the disks that it sees, and a clock that only moves when told."""

    def __init__(self) -> None:
        self.config = CONFIG
        self.disk: LogLook | None = IDLE
        self.uploading = False
        self.silent = False
        self.now = 100.0
        self.due: list[float] = []
        self.limits: list[tuple[Limits, bool]] = []
        self.told: list[str] = []
        self.renewed = 0
        self.mended = 0
        self.start_export: Callable[[], bool] = lambda: True
        self._next_write_ns = 1
        self.keeper = Keeper(
            self,
            due=lambda _: self.due.append(round(self.now - 100, 3)),
            on_health=lambda _, text: self.told.append(text),
            clock=lambda: self.now,
        )

    def look(self) -> list[LogLook]:
        return [self.disk] if self.disk is not None else []

    def is_uploading(self, volume_id: UUID) -> bool:
        return self.uploading

    def limit_writes(self, volume_id: UUID, limits: Limits, *, release: bool = False) -> None:
        if self.silent:
            raise DaemonFailed("no answer")
        self.limits.append((limits, release))

    def renew_layer(self, volume_id: UUID) -> None:
        self.renewed += 1

    def mend(self, volume_id: UUID) -> bool:
        self.mended += 1
        return self.start_export()

    def look_until_mended(self, times: int) -> None:
        def is_so() -> bool:
            self.keeper.look()
            return self.mended >= times

        assert wait_for(is_so, timeout_s=30)

    def write(self, log_bytes: int) -> None:
        assert self.disk is not None
        self.disk = replace(self.disk, log_bytes=log_bytes, written_at_ns=self._next_write_ns)
        self._next_write_ns += 1

    def stored(self, root_key: str, log_bytes: int = 0) -> None:
        assert self.disk is not None
        written = self._next_write_ns if log_bytes else 0
        self.disk = replace(
            self.disk, root_key=root_key, log_bytes=log_bytes, written_at_ns=written
        )

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / LOOK_EVERY_S)):
            self.keeper.look()
            each()
            self.now += LOOK_EVERY_S


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_idle_disk_is_never_due_and_hears_of_the_limits_once(bench: Bench) -> None:
    bench.run(3600)
    assert bench.due == []
    assert bench.limits == [(NO_LIMITS, True)]
    assert bench.told == []


def test_a_write_is_due_after_ten_seconds_and_after_each_commit_anew(bench: Bench) -> None:
    bench.write(MiB)
    bench.run(10.5)
    assert bench.due == [10.0]
    bench.stored("root 1")
    bench.run(20)
    assert bench.due == [10.0]
    bench.write(MiB)
    bench.run(11)
    assert bench.due == [10.0, 40.5]


def test_a_log_with_a_share_of_its_budget_does_not_wait(bench: Bench) -> None:
    bench.write(300 * MiB)
    bench.run(1)
    assert bench.due == [0.0]


def test_a_disk_that_is_being_stored_is_not_due(bench: Bench) -> None:
    bench.write(MiB)
    bench.uploading = True
    bench.run(60)
    assert bench.due == []
    bench.uploading = False
    bench.run(1)
    assert bench.due == [60.0]


def test_commits_that_come_to_nothing_are_asked_for_less_often_and_told_of(
    bench: Bench,
) -> None:
    bench.write(MiB)
    bench.run(300)
    assert bench.due[:5] == [10.0, 20.0, 30.0, 50.0, 90.0]
    assert len(bench.due) == 10
    assert bench.keeper.health(VOLUME) == (
        "Object storage does not answer: 1.0 MiB of changes wait to be stored."
    )
    bench.stored("root 1")
    bench.run(1)
    assert bench.keeper.health(VOLUME) == ""
    assert bench.told[-1] == ""
    assert len(bench.told) == 2


def test_a_writer_is_slowed_before_its_log_is_full_and_let_go_after(bench: Bench) -> None:
    bench.run(1)
    bench.limits.clear()
    bench.write(1500 * MiB)
    bench.keeper.look()
    assert bench.limits == [(limits_for(1500 * MiB, 2 * GiB), False)]
    assert "writes are slowed to 29 MiB/s" in bench.keeper.health(VOLUME)

    bench.stored("root 1", 100 * MiB)
    bench.keeper.look()
    assert bench.limits[-1] == (NO_LIMITS, True)
    assert bench.keeper.health(VOLUME) == ""


def test_limits_that_are_used_up_are_set_anew_while_the_guest_writes(bench: Bench) -> None:
    bench.write(1000 * MiB)
    bench.run(1)
    before = len(bench.limits)
    bench.run(5)
    assert len(bench.limits) == before
    bench.run(5, each=lambda: bench.write(1000 * MiB))
    assert len(bench.limits) >= before + 9


def test_a_write_that_was_told_to_wait_long_is_let_go_when_it_would_wait_little(
    bench: Bench,
) -> None:
    bench.run(1)
    bench.limits.clear()
    for log_bytes in (1700, 1750, 1740, 1720, 1690, 1640, 1600):
        bench.write(log_bytes * MiB)
        bench.run(0.5)
    # 4.2 MiB/s at the least; let go at 10 MiB/s, although no step was that large.
    assert [release for _, release in bench.limits] == [False] * 4 + [True, False, False]

    bench.now += 10
    bench.write(1600 * MiB)
    bench.run(0.5)
    assert bench.limits[-1][1], "limits that nobody set for long may have run out"


def test_at_the_end_of_the_budget_limits_are_not_set_anew(bench: Bench) -> None:
    bench.write(2 * GiB)
    bench.run(1)
    bench.run(60, each=lambda: bench.write(2 * GiB))
    assert bench.limits == [(STOP, False)]
    assert bench.keeper.health(VOLUME).endswith("writes wait until there is room.")


def test_a_daemon_that_does_not_answer_is_told_again(bench: Bench) -> None:
    bench.silent = True
    bench.write(1000 * MiB)
    bench.run(4)
    bench.silent = False
    bench.run(0.5)
    assert bench.limits == []
    bench.run(1)
    assert bench.limits == [(limits_for(1000 * MiB, 2 * GiB), True)]
    assert bench.due, "it is to be stored whether it is paced or not"


def test_numbers_that_change_are_told_now_and_then(bench: Bench) -> None:
    sizes = iter(range(1500, 2000))
    bench.run(20, each=lambda: bench.write(next(sizes) * MiB))
    assert 3 <= len(bench.told) <= 6


def test_a_layer_that_is_too_large_is_renewed(bench: Bench) -> None:
    bench.disk = replace(IDLE, layer_is_large=True)
    bench.keeper.look()
    assert bench.renewed == 1


def test_a_writer_that_was_let_pass_for_a_while_is_held_back_again(bench: Bench) -> None:
    bench.write(1000 * MiB)
    bench.run(1)
    limits = limits_for(1000 * MiB, 2 * GiB)
    bench.limits.clear()

    assert bench.disk is not None
    bench.disk = replace(bench.disk, eased_until_ns=time.time_ns() + 60 * 10**9)
    bench.run(5)
    assert bench.limits == []
    bench.disk = replace(bench.disk, eased_until_ns=time.time_ns())
    bench.run(5)
    assert bench.limits == [(limits, True)]


def test_a_disk_that_is_gone_is_forgotten(bench: Bench) -> None:
    bench.write(2 * GiB)
    bench.run(1)
    assert bench.keeper.health(VOLUME)
    bench.disk = None
    bench.run(1)
    assert bench.keeper.health(VOLUME) == ""


def test_what_is_not_served_to_a_guest_is_left_alone(bench: Bench) -> None:
    bench.disk = replace(IDLE, is_served=False)
    bench.write(2 * GiB)
    bench.run(60)
    assert (bench.due, bench.limits) == ([], [])


def test_an_export_that_died_is_started_again_once_whoever_waits_for_it(bench: Bench) -> None:
    may_start = threading.Event()
    bench.start_export = lambda: may_start.wait(30)
    bench.disk = replace(IDLE, lacks_export=True)
    bench.run(60)
    assert bench.mended == 1, "the second look is not to begin another start"
    assert bench.limits == [(NO_LIMITS, True)], "the others waited for it"
    may_start.set()
    bench.look_until_mended(2)


def test_the_export_of_a_disk_that_is_shown_as_a_file_is_started_again_too(
    bench: Bench,
) -> None:
    bench.disk = replace(IDLE, is_served=False, lacks_export=True)
    bench.keeper.look()
    assert wait_for(lambda: bench.mended == 1, timeout_s=30)


def test_an_export_that_does_not_start_is_left_alone_for_a_moment_and_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "MEND_AGAIN_S", 0.3)

    def fail() -> bool:
        raise DaemonFailed("nbdkit did not start.")

    bench.start_export = fail
    bench.disk = replace(IDLE, lacks_export=True)
    bench.keeper.look()
    assert wait_for(lambda: bench.mended == 1, timeout_s=30)
    bench.run(5)
    assert bench.mended == 1
    bench.start_export = lambda: True
    bench.look_until_mended(2)


def test_only_some_exports_are_started_at_once(bench: Bench) -> None:
    may_start = threading.Event()
    bench.start_export = lambda: may_start.wait(30)
    volumes = [replace(IDLE, volume_id=uuid4(), lacks_export=True) for _ in range(20)]
    bench.look = lambda: volumes  # type: ignore[method-assign]
    bench.run(5)
    assert bench.mended == MENDED_AT_ONCE
    may_start.set()
    bench.look_until_mended(20)


def test_no_cut_is_asked_for_while_reads_wait_for_the_store(bench: Bench) -> None:
    bench.write(MiB)
    assert bench.disk is not None
    bench.disk = replace(bench.disk, reads_wait_s=3.0)
    bench.run(60)
    assert (bench.due, bench.told) == ([], [])

    bench.disk = replace(bench.disk, reads_wait_s=6.0)
    bench.run(1)
    assert bench.told == [
        "Object storage does not answer: reads of what is not on its host wait, 1.0 MiB of "
        "changes wait to be stored."
    ]

    bench.disk = replace(bench.disk, reads_wait_s=0.0)
    bench.run(1)
    assert len(bench.due) == 1
    assert bench.told[-1] == ""
