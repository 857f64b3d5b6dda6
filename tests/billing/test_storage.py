"""Stored data on the bill: what was stored, for as long as it was, at its price."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest

from accounts.models import Team
from billing.costs import cost_of, cost_of_team, storage_by_day, usage_by_day
from billing.models import MeterInterval
from billing.services import set_quantity

STORAGE = MeterInterval.Meter.STORAGE
NOON = datetime(2026, 11, 10, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
GIB = 1024**3


def store(team: Team, quantity: int, at: datetime) -> None:
    set_quantity(team=team, subject_id="storage:1", meter=STORAGE, quantity=quantity, at=at)


def test_twenty_gib_for_a_month_cost_forty_cents(alices_team: Team) -> None:
    store(alices_team, 20 * GIB, NOON)
    store(alices_team, 0, NOON + 730 * HOUR)

    cost = cost_of_team(alices_team, since=NOON, until=NOON + 1000 * HOUR)

    assert cost == Decimal("0.40")


def test_each_quantity_is_billed_for_its_own_time(alices_team: Team) -> None:
    store(alices_team, 10 * GIB, NOON)
    store(alices_team, 10 * GIB, NOON + HOUR)
    store(alices_team, 30 * GIB, NOON + 2 * HOUR)
    store(alices_team, 0, NOON + 3 * HOUR)

    (day,) = storage_by_day(alices_team, since=NOON - HOUR, until=NOON + 10 * HOUR)

    assert day.byte_milliseconds == (2 * 10 + 30) * GIB * 3_600_000
    assert MeterInterval.objects.count() == 2


def test_a_clock_that_goes_back_bills_no_moment_twice(alices_team: Team) -> None:
    store(alices_team, 10 * GIB, NOON)
    store(alices_team, 20 * GIB, NOON + 2 * HOUR)
    store(alices_team, 10 * GIB, NOON + HOUR)
    store(alices_team, 0, NOON + 3 * HOUR)

    (day,) = storage_by_day(alices_team, since=NOON - HOUR, until=NOON + 10 * HOUR)

    assert day.byte_milliseconds <= 3 * 10 * GIB * 3_600_000


def test_a_night_is_split_at_midnight(alices_team: Team) -> None:
    store(alices_team, GIB, NOON + 10 * HOUR)
    store(alices_team, 0, NOON + 15 * HOUR)

    days = storage_by_day(alices_team, since=NOON, until=NOON + 48 * HOUR)

    assert [(d.day, d.byte_milliseconds // 3_600_000 // GIB) for d in days] == [
        (date(2026, 11, 10), 2),
        (date(2026, 11, 11), 3),
    ]


def test_stored_data_is_no_sandboxs_memory(alices_team: Team) -> None:
    store(alices_team, GIB, NOON)
    store(alices_team, 0, NOON + HOUR)

    assert cost_of(["storage:1"]) == {"storage:1": Decimal(0)}
    assert usage_by_day(alices_team, since=NOON, until=NOON + HOUR) == []


def test_another_teams_data_is_not_on_the_bill(alices_team: Team, mallorys_team: Team) -> None:
    store(mallorys_team, GIB, NOON)

    assert cost_of_team(alices_team, since=NOON, until=NOON + HOUR) == 0


@pytest.mark.parametrize("quantity", [0, 5])
def test_the_same_quantity_again_changes_nothing(alices_team: Team, quantity: int) -> None:
    store(alices_team, quantity, NOON)
    before = list(MeterInterval.objects.values())
    store(alices_team, quantity, NOON + HOUR)

    assert list(MeterInterval.objects.values()) == before
