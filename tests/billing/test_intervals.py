"""Meter intervals: what opens and closes them, and that two can never overlap."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from django.db import IntegrityError, connection
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from accounts.models import Team
from billing.models import MeterInterval
from billing.services import close_interval, open_interval

MEMORY = MeterInterval.Meter.MEMORY
NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


def minutes(count: float) -> datetime:
    return NOON + timedelta(minutes=count)


def open_at(team: Team, at: datetime) -> None:
    open_interval(team=team, subject_id="rs-1", meter=MEMORY, quantity=512, at=at)


def close_at(at: datetime) -> None:
    close_interval(subject_id="rs-1", meter=MEMORY, at=at)


def periods() -> list[tuple[datetime | None, datetime | None]]:
    ordered = MeterInterval.objects.order_by("period")
    return [(i.period.lower, i.period.upper) for i in ordered]


def test_opening_twice_is_opening_once(alices_team: Team) -> None:
    open_at(alices_team, NOON)
    open_at(alices_team, minutes(1))

    assert periods() == [(NOON, None)]


def test_closing_what_is_not_open_changes_nothing(alices_team: Team) -> None:
    open_at(alices_team, NOON)
    close_at(minutes(5))
    close_at(minutes(9))

    assert periods() == [(NOON, minutes(5))]


def test_a_clock_that_is_behind_never_bills_a_moment_twice(alices_team: Team) -> None:
    open_at(alices_team, NOON)
    close_at(minutes(5))
    open_at(alices_team, minutes(3))

    assert periods() == [(NOON, minutes(5)), (minutes(5), None)]


def test_an_interval_that_ends_before_it_starts_was_nothing(alices_team: Team) -> None:
    open_at(alices_team, NOON)
    close_at(minutes(-1))

    assert periods() == []


def test_the_database_refuses_intervals_that_overlap(alices_team: Team) -> None:
    open_at(alices_team, NOON)

    with pytest.raises(IntegrityError):
        MeterInterval.objects.create(
            team=alices_team,
            subject_id="rs-1",
            meter=MEMORY,
            quantity=512,
            period=DateTimeTZRange(minutes(-10), minutes(10)),
        )


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("attempt", range(5))
def test_many_that_open_at_once_open_one(alices_team: Team, attempt: int) -> None:
    def race(_: int) -> None:
        try:
            open_at(alices_team, NOON)
            close_at(minutes(1))
            open_at(alices_team, minutes(1))
        finally:
            connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(race, range(8)))

    assert sum(upper is None for _, upper in periods()) == 1
    ends = periods()
    for (_, end), (start, _) in pairwise(ends):
        assert end is not None
        assert start is not None
        assert end <= start
