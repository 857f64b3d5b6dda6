"""The limits of a writer hold its log within the budget, whoever looks or does not."""

from itertools import pairwise

import pytest

from common.units import GiB, KiB, MiB
from hosts.volumes.pacing import (
    FREE_SHARE,
    NO_LIMITS,
    STOP,
    TRICKLE,
    WRITE_COST_BYTES,
    Limits,
    describe_bytes,
    limits_for,
)

BUDGET = 2 * GiB
PERCENT = BUDGET // 100


def most_bytes(limits: Limits, seconds: float) -> float:
    """Compute the most that a log can grow under limits that are never set again."""
    written = limits.burst_bytes_per_s * limits.burst_s + limits.bytes_per_s * seconds
    writes = limits.burst_writes + limits.writes_per_s * seconds
    return written + writes * WRITE_COST_BYTES


def test_a_short_log_limits_nothing() -> None:
    assert limits_for(0, BUDGET) == NO_LIMITS
    assert limits_for(int(FREE_SHARE * BUDGET) - 1, BUDGET) == NO_LIMITS
    assert set(NO_LIMITS.as_qemu().values()) == {0, 1}


@pytest.mark.parametrize("percent", range(26, 88))
def test_the_budget_holds_for_ten_minutes_after_the_last_look(percent: int) -> None:
    used = percent * PERCENT
    limits = limits_for(used, BUDGET)
    assert limits != NO_LIMITS
    assert used + most_bytes(limits, 600) <= BUDGET


def test_limits_fall_smoothly_and_never_to_nothing() -> None:
    rates = [
        limits_for(percent * PERCENT, BUDGET).rate_bytes_per_s for percent in range(26, 105)
    ]
    assert None not in rates
    falling = [rate for rate in rates if rate is not None]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > 100 * MiB
    assert min(falling) >= 1
    steps = [after / before for before, after in pairwise(falling[:50])]
    assert min(steps) > 0.9


def test_a_writer_that_never_rests_stays_below_the_budget_for_an_hour() -> None:
    log_bytes = 0.0
    for _ in range(2 * 3600):
        limits = limits_for(int(log_bytes), BUDGET)
        rate = limits.rate_bytes_per_s
        log_bytes += 0.5 * (rate if rate is not None else 500 * MiB)
    assert log_bytes < BUDGET


def test_a_full_log_lets_a_trickle_through_and_then_next_to_nothing() -> None:
    assert limits_for(int(0.875 * BUDGET), BUDGET) == TRICKLE
    assert limits_for(BUDGET, BUDGET) == STOP
    assert limits_for(3 * BUDGET, BUDGET) == STOP


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 KiB"),
        (64 * KiB, "64 KiB"),
        (3 * MiB, "3.0 MiB"),
        (300 * MiB, "300 MiB"),
        (1288490189, "1.2 GiB"),
    ],
)
def test_an_amount_is_written_as_people_read_it(count: int, text: str) -> None:
    assert describe_bytes(count) == text
