"""Opening and closing the intervals that usage is billed by."""

import logging
from datetime import datetime

from django.db import IntegrityError, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from accounts.models import Team
from billing.models import MeterInterval

log = logging.getLogger(__name__)


def open_interval(
    *, team: Team, subject_id: str, meter: MeterInterval.Meter, quantity: int, at: datetime
) -> None:
    """Begin to bill a quantity from a moment on; does nothing while an interval is open.

    The start is moved up to the end of the latest interval where clocks of two machines
    disagree, so that no moment is billed twice.
    """
    mine = MeterInterval.objects.filter(subject_id=subject_id, meter=meter)
    if mine.filter(period__upper_inf=True).exists():
        return
    latest = mine.order_by("-period__endswith").values_list("period", flat=True).first()
    start = max(at, latest.upper) if latest and latest.upper else at
    try:
        with transaction.atomic():
            MeterInterval.objects.create(
                team=team,
                subject_id=subject_id,
                meter=meter,
                quantity=quantity,
                period=DateTimeTZRange(start, None, "[)"),
            )
    except IntegrityError:
        # Another process opened it between our look and our write; theirs stands.
        log.info("an interval of %s for %s is already open", meter, subject_id)


def close_interval(*, subject_id: str, meter: MeterInterval.Meter, at: datetime) -> None:
    """Stop billing at a moment; does nothing where no interval is open.

    An interval that would end before it starts (two clocks) is dropped: it was nothing.
    """
    with transaction.atomic():
        interval = (
            MeterInterval.objects.select_for_update()
            .filter(subject_id=subject_id, meter=meter, period__upper_inf=True)
            .first()
        )
        if interval is None:
            return
        start = interval.period.lower
        if start is None or at <= start:
            interval.delete()
            return
        interval.period = DateTimeTZRange(start, at, "[)")
        interval.save(update_fields=["period"])
