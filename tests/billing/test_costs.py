"""`billing.costs`: the one query behind console, API and bill."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
import time_machine

from accounts.models import Team
from billing.costs import cost_of, cost_of_team, usage_by_day
from billing.models import MeterInterval
from billing.services import close_interval, open_interval

MEMORY = MeterInterval.Meter.MEMORY
MIDNIGHT = datetime(2026, 11, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)


def run(team: Team, subject: str, mib: int, start: datetime, end: datetime | None) -> None:
    open_interval(team=team, subject_id=subject, meter=MEMORY, quantity=mib, at=start)
    if end is not None:
        close_interval(subject_id=subject, meter=MEMORY, at=end)


def test_a_hundred_hours_of_four_gib_cost_six_dollars(alices_team: Team) -> None:
    run(alices_team, "rs-1", 4096, MIDNIGHT, MIDNIGHT + 100 * HOUR)

    assert cost_of(["rs-1"]) == {"rs-1": Decimal("6.00")}


def test_what_never_ran_costs_nothing(alices_team: Team) -> None:
    assert cost_of(["rs-1"]) == {"rs-1": Decimal(0)}


def test_an_open_interval_counts_up_to_now(alices_team: Team) -> None:
    run(alices_team, "rs-1", 1024, MIDNIGHT, None)

    with time_machine.travel(MIDNIGHT + 2 * HOUR, tick=False):
        assert cost_of(["rs-1"]) == {"rs-1": Decimal("0.030")}


def test_a_window_cuts_what_reaches_over_its_ends(alices_team: Team) -> None:
    run(alices_team, "rs-1", 1024, MIDNIGHT - HOUR, MIDNIGHT + 5 * HOUR)

    cost = cost_of_team(alices_team, since=MIDNIGHT, until=MIDNIGHT + HOUR)

    assert cost == Decimal("0.015")


def test_a_night_is_split_at_midnight(alices_team: Team) -> None:
    run(alices_team, "rs-1", 1024, MIDNIGHT - HOUR, MIDNIGHT + 2 * HOUR)

    days = usage_by_day(alices_team, since=MIDNIGHT - 24 * HOUR, until=MIDNIGHT + 24 * HOUR)

    assert [(d.day, d.subject_id, d.cost) for d in days] == [
        (date(2026, 11, 9), "rs-1", Decimal("0.015")),
        (date(2026, 11, 10), "rs-1", Decimal("0.030")),
    ]


def test_another_teams_use_is_not_counted(alices_team: Team, mallorys_team: Team) -> None:
    run(mallorys_team, "rs-9", 1024, MIDNIGHT, MIDNIGHT + HOUR)

    assert cost_of_team(alices_team, since=MIDNIGHT, until=MIDNIGHT + HOUR) == 0
    assert usage_by_day(alices_team, since=MIDNIGHT, until=MIDNIGHT + HOUR) == []


@pytest.mark.parametrize("parts", [1, 7, 60])
def test_the_days_add_up_to_the_whole(alices_team: Team, parts: int) -> None:
    step = timedelta(hours=70) / parts
    for part in range(parts):
        run(alices_team, "rs-1", 768, MIDNIGHT + part * step, MIDNIGHT + (part + 1) * step)

    since, until = MIDNIGHT, MIDNIGHT + 100 * HOUR
    days = usage_by_day(alices_team, since=since, until=until)
    whole = cost_of_team(alices_team, since=since, until=until)

    assert abs(sum(day.cost for day in days) - whole) < Decimal("0.000001")
