"""A deleted team: nothing of it can be reached, read or billed any more."""

from collections.abc import Callable
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from accounts.models import ApiKey, Membership, Team
from hosts.keys import DatabaseKeys
from hosts.volumes.errors import KeyDestroyed
from sandboxes.models import Sandbox

State = Sandbox.State


def delete_team(team: Team, name: str | None = None) -> str:
    out = StringIO()
    call_command("delete_team", str(team.pk), name=name or team.name, stdout=out)
    return out.getvalue()


def test_a_deleted_teams_sandboxes_go_and_its_key_is_destroyed(
    paused: Sandbox, alices_team: Team, mallorys_team: Team, claim: Callable[..., Sandbox]
) -> None:
    other = claim(team=mallorys_team)
    DatabaseKeys().keys_of([paused.volume_id])

    assert "destroyed" in delete_team(alices_team)
    delete_team(alices_team)

    paused.refresh_from_db()
    assert paused.state in (State.TERMINATING, State.DELETED)
    assert not Membership.objects.filter(team=alices_team).exists()
    assert not ApiKey.objects.filter(team=alices_team).exists()
    with pytest.raises(KeyDestroyed):
        DatabaseKeys().keys_of([paused.volume_id])
    assert DatabaseKeys().keys_of([other.volume_id])
    other.refresh_from_db()
    assert other.state not in (State.TERMINATING, State.DELETED)


def test_nothing_new_can_be_stored_for_a_deleted_team(
    alices_team: Team, claim: Callable[..., Sandbox]
) -> None:
    delete_team(alices_team)

    with pytest.raises(KeyDestroyed):
        claim()


def test_a_team_is_only_deleted_by_its_name(paused: Sandbox, alices_team: Team) -> None:
    with pytest.raises(CommandError):
        delete_team(alices_team, name="another")

    paused.refresh_from_db()
    assert paused.state == State.PAUSED
