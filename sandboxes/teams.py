"""The end of a team: all that it has is deleted, and can never be read again."""

from accounts.models import Team
from accounts.services import Doer, delete_api_key, record_event
from hosts import keys
from sandboxes.models import Sandbox, Snapshot, Template
from sandboxes.services import delete_sandbox
from sandboxes.snapshots import delete_snapshot, delete_template


def end_team(team: Team) -> None:
    """Delete everything of a team, and destroy the key that its disks are encrypted with.

    Its row stays, for the bills. Safe to repeat: what was left is deleted then.
    """
    by = Doer()
    for key in team.api_keys.all():
        delete_api_key(key=key)
    team.memberships.all().delete()
    for sandbox in Sandbox.objects.filter(team=team).exclude(state=Sandbox.State.DELETED):
        delete_sandbox(sandbox=sandbox, by=by)
    for snapshot in Snapshot.objects.of(team).present():
        delete_snapshot(snapshot=snapshot, by=by)
    for template in Template.objects.filter(team=team):
        delete_template(template=template, by=by)
    keys.destroy(str(team.pk))
    record_event(
        team=team, action="team.delete", resource_type="team", resource_id=str(team.pk)
    )
