"""Opening and closing the intervals that usage is billed by."""

from datetime import datetime

from django.db import connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from accounts.models import Team
from billing.models import MeterInterval


def open_interval(
    *, team: Team, subject_id: str, meter: MeterInterval.Meter, quantity: int, at: datetime
) -> None:
    """Begin to bill a quantity from a moment on; does nothing while an interval is open.

    The start is moved up to the end of the latest interval where clocks of two machines
    disagree, so that no moment is billed twice.
    """
    with transaction.atomic():
        _take_turns(subject_id, meter)
        mine = MeterInterval.objects.filter(subject_id=subject_id, meter=meter)
        if mine.filter(period__upper_inf=True).exists():
            return
        latest = mine.order_by("-period__endswith").values_list("period", flat=True).first()
        start = max(at, latest.upper) if latest and latest.upper else at
        MeterInterval.objects.create(
            team=team,
            subject_id=subject_id,
            meter=meter,
            quantity=quantity,
            period=DateTimeTZRange(start, None, "[)"),
        )


def close_interval(*, subject_id: str, meter: MeterInterval.Meter, at: datetime) -> None:
    """Stop billing at a moment; does nothing where no interval is open.

    An interval that would end before it starts (two clocks) is dropped: it was nothing.
    """
    with transaction.atomic():
        _take_turns(subject_id, meter)
        interval = MeterInterval.objects.filter(
            subject_id=subject_id, meter=meter, period__upper_inf=True
        ).first()
        if interval is None:
            return
        start = interval.period.lower
        if start is None or at <= start:
            interval.delete()
            return
        interval.period = DateTimeTZRange(start, at, "[)")
        interval.save(update_fields=["period"])


def set_quantity(
    *, team: Team, subject_id: str, meter: MeterInterval.Meter, quantity: int, at: datetime
) -> None:
    """Bill another quantity from a moment on; none at all for 0. The same changes nothing."""
    with transaction.atomic():
        _take_turns(subject_id, meter)
        is_open = MeterInterval.objects.filter(
            subject_id=subject_id, meter=meter, period__upper_inf=True
        )
        if is_open.filter(team=team, quantity=quantity).exists():
            return
        close_interval(subject_id=subject_id, meter=meter, at=at)
        if quantity:
            open_interval(
                team=team, subject_id=subject_id, meter=meter, quantity=quantity, at=at
            )


def _take_turns(subject_id: str, meter: MeterInterval.Meter) -> None:
    """Let one transaction at a time change the intervals of a subject's meter.

    The exclusion constraint alone would keep them right, but two that insert at once check
    it against each other's row, and PostgreSQL ends one of them for the deadlock.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))",
            [f"meter {meter.value} {subject_id}"],
        )
