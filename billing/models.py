"""What was used, when: the intervals that every bill is made of."""

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import DateTimeRangeField, RangeOperators
from django.db import models
from django.db.models import F, Func, Q

from accounts.models import Team


class MeterInterval(models.Model):
    """A quantity of one meter that was held for a period; open while it has no end.

    The subject is a name that a higher app chooses: a sandbox's id, a team's store. No two
    intervals of a subject and a meter can overlap, whatever raced or crashed: the database
    refuses it.
    """

    class Meter(models.TextChoices):
        MEMORY = "memory", "configured memory, in MiB"
        STORAGE = "storage", "stored data, in bytes"

    team = models.ForeignKey(Team, models.PROTECT, related_name="meter_intervals")
    subject_id = models.CharField(max_length=80)
    meter = models.CharField(max_length=10, choices=Meter)
    quantity = models.PositiveBigIntegerField()
    period = DateTimeRangeField()

    class Meta:
        constraints = (
            ExclusionConstraint(
                name="meter_intervals_of_a_subject_never_overlap",
                expressions=[
                    ("subject_id", RangeOperators.EQUAL),
                    ("meter", RangeOperators.EQUAL),
                    ("period", RangeOperators.OVERLAPS),
                ],
            ),
            models.CheckConstraint(
                name="meter_interval_has_a_start", condition=Q(period__startswith__isnull=False)
            ),
        )
        indexes = (
            models.Index(fields=["team", "subject_id"], name="meter_interval_by_team"),
            models.Index(
                F("subject_id"),
                name="meter_interval_open",
                condition=Q(period__upper_inf=True),
            ),
        )

    def __str__(self) -> str:
        return f"{self.quantity} of {self.meter} by {self.subject_id}"


class UpperBound(Func):
    """The end of a range; NULL while it is open."""

    function = "upper"
    output_field = models.DateTimeField()
