"""Which of their teams a signed-in user acts for."""

from collections.abc import Callable

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.functional import SimpleLazyObject

from accounts.models import Membership, Team

TEAM_IN_SESSION = "team_id"


class CurrentTeamMiddleware:
    """Sets `request.membership` and `request.team`: None for who is in no team.

    Both are looked up when first used, at every request: who is removed from a team is out
    of it at once.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        found: list[Membership | None] = []

        def membership() -> Membership | None:
            if not found:
                found.append(current_membership(request))
            return found[0]

        def team() -> Team | None:
            return current.team if (current := membership()) else None

        request.membership = SimpleLazyObject(membership)  # type: ignore[attr-defined]
        request.team = SimpleLazyObject(team)  # type: ignore[attr-defined]
        return self.get_response(request)


def current_membership(request: HttpRequest) -> Membership | None:
    """Return the user's place in the team that they chose, or else in their first."""
    # DRF's own pages set None, for nobody.
    if not request.user or not request.user.is_authenticated:
        return None
    memberships = list(request.user.memberships.select_related("team").order_by("joined_at"))
    chosen = request.session.get(TEAM_IN_SESSION)
    for membership in memberships:
        if str(membership.team_id) == chosen:
            return membership
    return memberships[0] if memberships else None
