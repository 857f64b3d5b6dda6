"""What teams store: metered for the bill, by the collector's own figure."""

from uuid import UUID

from django.utils import timezone

from accounts.models import Team
from billing.models import MeterInterval
from billing.services import set_quantity
from hosts.collection import stored_bytes_by_owner

Meter = MeterInterval.Meter


def subject_of(team: Team) -> str:
    """Return what a team's store is called on its bill."""
    return f"storage:{team.pk}"


def meter_storage() -> None:
    """Bring the meters of stored data to what is stored now.

    More is billed from when it has been seen, less from just before it was looked for: the
    bill is never above what was there.
    """
    before = timezone.now()
    stored = stored_bytes_by_owner()
    after = timezone.now()
    billed = dict(
        MeterInterval.objects.filter(meter=Meter.STORAGE, period__upper_inf=True).values_list(
            "team_id", "quantity"
        )
    )
    owners = {UUID(owner): amount for owner, amount in stored.items() if _is_team(owner)}
    changed = {
        team_id
        for team_id in owners.keys() | billed.keys()
        if owners.get(team_id, 0) != billed.get(team_id, 0)
    }
    for team in Team.objects.filter(pk__in=changed):
        quantity = owners.get(team.pk, 0)
        set_quantity(
            team=team,
            subject_id=subject_of(team),
            meter=Meter.STORAGE,
            quantity=quantity,
            at=after if quantity > billed.get(team.pk, 0) else before,
        )


def _is_team(owner: str) -> bool:
    try:
        UUID(owner)
    except ValueError:
        return False
    return True
