"""What was used and what it costs: the one query behind console, API and bill.

A period that is still open counts up to now.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from django.db import connection
from django.utils import timezone

from accounts.models import Team
from billing.models import MeterInterval
from billing.pricing import memory_cost, storage_cost_of

Meter = MeterInterval.Meter

BEGINNING = datetime(2020, 1, 1, tzinfo=UTC)

# Whole milliseconds of each interval that lie in the window, times its quantity.
_USED = """
    SELECT subject_id,
           sum(quantity * floor(extract(epoch FROM
               least(coalesce(upper(period), %(now)s), %(until)s)
               - greatest(lower(period), %(since)s)) * 1000)) AS quantity_milliseconds
    FROM billing_meterinterval
    WHERE meter = %(meter)s
      AND period && tstzrange(%(since)s, %(until)s)
      AND lower(period) < least(%(now)s, %(until)s)
      AND {scope}
    GROUP BY subject_id
"""

_USED_BY_DAY = """
    SELECT day::date, subject_id,
           sum(quantity * floor(extract(epoch FROM
               least(coalesce(upper(period), %(now)s), %(until)s, day + interval '1 day')
               - greatest(lower(period), %(since)s, day)) * 1000)) AS quantity_milliseconds
    FROM billing_meterinterval
    CROSS JOIN LATERAL generate_series(
        date_trunc('day', greatest(lower(period), %(since)s), 'UTC'),
        least(coalesce(upper(period), %(now)s), %(until)s) - interval '1 microsecond',
        interval '1 day') AS day
    WHERE meter = %(meter)s
      AND team_id = %(team)s
      AND period && tstzrange(%(since)s, %(until)s)
      AND lower(period) < least(%(now)s, %(until)s)
    GROUP BY 1, 2
    ORDER BY 1, 2
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DayStorage:
    """What a team stored on one day (UTC)."""

    day: date
    byte_milliseconds: int
    cost: Decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class DayUsage:
    """How much memory one subject held on one day (UTC)."""

    day: date
    subject_id: str
    mib_milliseconds: int
    cost: Decimal


def cost_of(
    subject_ids: Iterable[str], *, since: datetime | None = None, until: datetime | None = None
) -> dict[str, Decimal]:
    """Return what each subject's memory cost, in dollars, zero included."""
    ids = list(subject_ids)
    if not ids:
        return {}
    rows = _rows(
        _USED.format(scope="subject_id = ANY(%(ids)s)"),
        since=since,
        until=until,
        meter=Meter.MEMORY,
        ids=ids,
    )
    used = {subject_id: int(amount) for subject_id, amount in rows}
    return {subject_id: memory_cost(used.get(subject_id, 0)) for subject_id in ids}


def cost_of_team(team: Team, *, since: datetime, until: datetime) -> Decimal:
    """Return what the team's running time and stored data in the window cost, in dollars."""
    memory, storage = (
        sum(
            int(amount)
            for _, amount in _rows(
                _USED.format(scope="team_id = %(team)s"),
                since=since,
                until=until,
                meter=meter,
                team=team.pk,
            )
        )
        for meter in (Meter.MEMORY, Meter.STORAGE)
    )
    return memory_cost(memory) + storage_cost_of(storage)


def storage_by_day(team: Team, *, since: datetime, until: datetime) -> list[DayStorage]:
    """Return what the team stored by day, in order; days without are left out."""
    rows = _rows(_USED_BY_DAY, since=since, until=until, meter=Meter.STORAGE, team=team.pk)
    amounts: dict[date, int] = {}
    for day, _, amount in rows:
        amounts[day] = amounts.get(day, 0) + int(amount)
    return [
        DayStorage(day=day, byte_milliseconds=amount, cost=storage_cost_of(amount))
        for day, amount in amounts.items()
    ]


def usage_by_day(team: Team, *, since: datetime, until: datetime) -> list[DayUsage]:
    """Return the team's memory by day and subject, in that order; unused days are left out."""
    rows = _rows(_USED_BY_DAY, since=since, until=until, meter=Meter.MEMORY, team=team.pk)
    return [
        DayUsage(
            day=day,
            subject_id=subject_id,
            mib_milliseconds=int(amount),
            cost=memory_cost(int(amount)),
        )
        for day, subject_id, amount in rows
    ]


def _rows(
    sql: str,
    *,
    since: datetime | None,
    until: datetime | None,
    meter: MeterInterval.Meter,
    **params: Any,
) -> list[tuple[Any, ...]]:
    now = timezone.now()
    params |= {
        "now": now,
        "since": since or BEGINNING,
        "until": until or now,
        "meter": meter.value,
    }
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        return list(cursor.fetchall())
