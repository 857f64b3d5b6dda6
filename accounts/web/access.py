"""Who may open a page of the console."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, cast

from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from accounts.models import Membership, Team, User
from accounts.permissions import may
from accounts.services import Doer

P = ParamSpec("P")


class TeamRequest(HttpRequest):
    """A request by a member of a team, which `team_required` has made sure of."""

    user: User
    team: Team
    membership: Membership


TeamPage = Callable[Concatenate[TeamRequest, P], HttpResponseBase]
Page = Callable[Concatenate[HttpRequest, P], HttpResponseBase]


def team_required(view: TeamPage[P]) -> Page[P]:
    """Let in who is signed in and in a team; send others to sign in."""

    @login_required
    @wraps(view)
    def checked(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if not getattr(request, "team", None):
            raise PermissionDenied("You are in no team. Ask an admin of one to add you.")
        return view(cast("TeamRequest", request), *args, **kwargs)

    return cast("Page[P]", checked)


def permission_required(permission: str) -> Callable[[TeamPage[P]], Page[P]]:
    """Let in members whose role holds the permission; others get 403 that says so."""
    may([], permission)  # a misspelled name fails at import

    def decorate(view: TeamPage[P]) -> Page[P]:
        @wraps(view)
        def checked(
            request: TeamRequest, *args: P.args, **kwargs: P.kwargs
        ) -> HttpResponseBase:
            if not may([request.membership.role], permission):
                raise PermissionDenied(
                    f"This needs the permission {permission}, which your role in "
                    f"{request.team} ({request.membership.role}) lacks."
                )
            return view(request, *args, **kwargs)

        return team_required(cast("TeamPage[P]", checked))

    return decorate


def doer(request: TeamRequest) -> Doer:
    """Return the person as the one who does what the request asks for."""
    return Doer(user=request.membership.user, source_ip=request.META.get("REMOTE_ADDR"))
