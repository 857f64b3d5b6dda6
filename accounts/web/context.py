"""What every page of the console knows about who is looking at it."""

from typing import Any

from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from accounts.models import Membership, Team
from accounts.permissions import permissions_of


def teams(request: HttpRequest) -> dict[str, Any]:
    """Give templates what they show, and hide, for who looks at them.

    `team` and `membership` are those acted for, `teams` all that one can switch to, and
    `permissions` a set of names: `{% if "sandbox:create" in permissions %}`.
    """
    membership: Membership | None = getattr(request, "membership", None) or None
    return {
        "team": membership.team if membership else None,
        "membership": membership,
        "teams": SimpleLazyObject(lambda: _teams(request)),
        "permissions": permissions_of([membership.role]) if membership else frozenset(),
    }


def _teams(request: HttpRequest) -> list[Team]:
    if not request.user or not request.user.is_authenticated:
        return []
    return list(request.user.teams.order_by("name", "created_at"))
