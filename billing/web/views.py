"""The usage page: what a month costs, by day and by sandbox, and what is stored."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from django.db.models import Q, Sum
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from accounts.models import Team
from accounts.web.access import TeamRequest, permission_required
from billing.costs import (
    DayStorage,
    DayUsage,
    cost_of_team,
    storage_by_day,
    usage_by_day,
)
from billing.models import MeterInterval
from billing.pricing import BYTES_PER_GIB, HOURS_PER_MONTH, memory_price_per_hour
from billing.web.months import Month
from common.units import HOUR

SUBJECTS_SHOWN = 100
MIB_MS_PER_GIB_HOUR = 1024 * HOUR * 1000
BYTE_MS_PER_GIB_MONTH = BYTES_PER_GIB * HOURS_PER_MONTH * HOUR * 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectUsage:
    """What one sandbox used in the month."""

    subject_id: str
    gib_hours: Decimal
    cost: Decimal
    percent: int
    """Of the month's cost."""


@require_GET
@permission_required("usage:read")
def usage(request: TeamRequest) -> HttpResponse:
    """Show a month's cost by day and by sandbox."""
    this_month = Month.of(timezone.now())
    month = _asked_month(request, this_month)
    days = usage_by_day(request.team, since=month.begins_at, until=month.ends_at)
    stored = storage_by_day(request.team, since=month.begins_at, until=month.ends_at)
    storage = sum((day.cost for day in stored), Decimal(0))
    total = sum((day.cost for day in days), storage)
    subjects = by_subject(days, total)
    context = {
        "month": month,
        "next": month.next if month < this_month else None,
        "is_this_month": month == this_month,
        "total": total,
        "last": _cost(request.team, month.previous),
        "gib_hours": gib_hours(sum(day.mib_milliseconds for day in days)),
        "running_per_hour": _running_price(request.team),
        "storage": storage,
        "stored_gib_months": gib_months(sum(day.byte_milliseconds for day in stored)),
        "stored_now": _stored_now(request.team),
        "subjects": subjects[:SUBJECTS_SHOWN],
        "subject_count": len(subjects),
        "left_out": max(0, len(subjects) - SUBJECTS_SHOWN),
        "days": by_day(month, days, stored),
        "chart": chart(month, days, stored),
    }
    return render(request, "billing/usage.html", context)


@require_GET
@permission_required("usage:read")
def usage_csv(request: TeamRequest) -> HttpResponseBase:
    """Send a month's cost by day and sandbox, exact, as CSV."""
    month = _asked_month(request, Month.of(timezone.now()))
    days = usage_by_day(request.team, since=month.begins_at, until=month.ends_at)
    stored = storage_by_day(request.team, since=month.begins_at, until=month.ends_at)
    response = StreamingHttpResponse(
        _lines(days, stored), content_type="text/csv; charset=utf-8"
    )
    response["Content-Disposition"] = f'attachment; filename="usage-{month}.csv"'
    return response


def by_subject(days: Iterable[DayUsage], total: Decimal) -> list[SubjectUsage]:
    """Return what each sandbox used, the dearest first."""
    costs: dict[str, Decimal] = {}
    amounts: dict[str, int] = {}
    for day in days:
        costs[day.subject_id] = costs.get(day.subject_id, Decimal(0)) + day.cost
        amounts[day.subject_id] = amounts.get(day.subject_id, 0) + day.mib_milliseconds
    found = [
        SubjectUsage(
            subject_id=subject_id,
            gib_hours=gib_hours(amounts[subject_id]),
            cost=cost,
            percent=int(100 * cost / total) if total else 0,
        )
        for subject_id, cost in costs.items()
    ]
    return sorted(found, key=lambda one: (-one.cost, one.subject_id))


def by_day(
    month: Month, days: Iterable[DayUsage], stored: Iterable[DayStorage] = ()
) -> list[tuple[date, Decimal]]:
    """Return each day of the month on which something was used, with its cost."""
    costs = _cost_by_day(month, [*days, *stored])
    return [(day, cost) for day, cost in costs.items() if cost]


def chart(
    month: Month, days: Iterable[DayUsage], stored: Iterable[DayStorage] = ()
) -> dict[str, list[object]]:
    """Return what the page draws: each day of the month, and its cost in dollars."""
    costs = _cost_by_day(month, [*days, *stored])
    return {
        "days": [day.isoformat() for day in costs],
        "costs": [float(c) for c in costs.values()],
    }


def gib_hours(mib_milliseconds: int) -> Decimal:
    """Return an amount of memory held for a time in the unit that the price is for."""
    return Decimal(mib_milliseconds) / MIB_MS_PER_GIB_HOUR


def gib_months(byte_milliseconds: int) -> Decimal:
    """Return stored data held for a time in the unit that the price is for."""
    return Decimal(byte_milliseconds) / BYTE_MS_PER_GIB_MONTH


def _cost_by_day(month: Month, days: Iterable[DayUsage | DayStorage]) -> dict[date, Decimal]:
    costs = dict.fromkeys(month.days(), Decimal(0))
    for day in days:
        costs[day.day] += day.cost
    return costs


def _asked_month(request: TeamRequest, this_month: Month) -> Month:
    asked = Month.parse(request.GET.get("month", ""))
    return asked if asked is not None and asked <= this_month else this_month


def _cost(team: Team, month: Month) -> Decimal:
    return cost_of_team(team, since=month.begins_at, until=month.ends_at)


def _running_price(team: Team) -> Decimal:
    """Return what an hour of all that runs now costs, in dollars."""
    is_open = Q(team=team, meter=MeterInterval.Meter.MEMORY, period__upper_inf=True)
    found = MeterInterval.objects.filter(is_open).aggregate(mib=Sum("quantity"))
    return memory_price_per_hour(found["mib"] or 0)


def _stored_now(team: Team) -> int:
    """Return how many bytes the team is billed for at this moment."""
    is_open = Q(team=team, meter=MeterInterval.Meter.STORAGE, period__upper_inf=True)
    return MeterInterval.objects.filter(is_open).aggregate(bytes=Sum("quantity"))["bytes"] or 0


class _Echo:
    """Something to write to that gives back what is written, for `csv`."""

    def write(self, line: str) -> str:
        return line


def _lines(days: Iterable[DayUsage], stored: Iterable[DayStorage]) -> Iterator[str]:
    """Write memory by sandbox, then stored data, which is of the team as a whole."""
    writer = csv.writer(_Echo())
    yield writer.writerow(["day", "sandbox_id", "gib_hours", "cost_dollars", "meter"])
    for day in days:
        hours = f"{gib_hours(day.mib_milliseconds):.9f}"
        yield writer.writerow([day.day, day.subject_id, hours, f"{day.cost:.9f}", "memory"])
    for one in stored:
        hours = f"{gib_months(one.byte_milliseconds) * HOURS_PER_MONTH:.9f}"
        yield writer.writerow([one.day, "", hours, f"{one.cost:.9f}", "storage"])
