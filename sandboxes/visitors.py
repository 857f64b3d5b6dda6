"""Who sits at the other end of a console's WebSocket, looked up anew while it is open.

A page is checked at each request. A socket lives for hours, so what it was opened with (a
session, a place in a team, a role) is looked at again every few seconds, and at each change
of its sandbox.
"""

from dataclasses import dataclass
from importlib import import_module
from uuid import UUID

from django.conf import settings
from django.contrib.auth import HASH_SESSION_KEY, SESSION_KEY
from django.utils.crypto import constant_time_compare

from accounts.models import Membership
from accounts.permissions import may
from sandboxes.models import Sandbox

SessionStore = import_module(settings.SESSION_ENGINE).SessionStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A sandbox as it is now, and the member of its team who looks at it."""

    sandbox: Sandbox
    membership: Membership

    def may(self, permission: str) -> bool:
        """Say whether the member's role, as it is now, holds the permission."""
        return may([self.membership.role], permission)


def member_of(session_key: str | None, team_id: UUID) -> Membership | None:
    """Return the place in the team of whom the session belongs to, if both are still good."""
    if not session_key:
        return None
    session = SessionStore(session_key)
    user_id = session.get(SESSION_KEY)
    if user_id is None:
        return None
    membership = (
        Membership.objects.filter(team_id=team_id, user_id=user_id, user__is_active=True)
        .select_related("user", "team")
        .first()
    )
    if membership is None:
        return None
    # A change of the password ends every session that was opened with the old one.
    signed_in_with = session.get(HASH_SESSION_KEY, "")
    if not constant_time_compare(signed_in_with, membership.user.get_session_auth_hash()):
        return None
    return membership


def standing_of(session_key: str | None, sandbox_id: str) -> Standing | None:
    """Return how the session's owner stands to a sandbox; None where there is none for them."""
    sandbox = (
        Sandbox.objects.present()
        .select_related("team", "host", "volume")
        .filter(pk=sandbox_id)
        .first()
    )
    if sandbox is None:
        return None
    membership = member_of(session_key, sandbox.team_id)
    if membership is None:
        return None
    return Standing(sandbox=sandbox, membership=membership)
