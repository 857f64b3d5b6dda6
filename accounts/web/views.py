"""Pages: keys, team, the record of what happened."""

from urllib.parse import urlsplit
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from accounts.models import ApiKey, AuditEvent, Membership, Role
from accounts.permissions import may
from accounts.services import (
    add_pending_uses,
    create_api_key,
    deactivate_api_key,
    delete_api_key,
    record_event,
)
from accounts.web.access import TeamRequest, permission_required, team_required
from accounts.web.forms import NewKey, TeamChoice
from accounts.web.middleware import TEAM_IN_SESSION

EVENTS_A_PAGE = 50


@require_http_methods(["GET", "POST"])
@never_cache
@team_required
def key_list(request: TeamRequest) -> HttpResponse:
    """List the team's keys, and make one; its secret shows in this one answer alone."""
    if not may([request.membership.role], "apikey:read"):
        return _ask_an_admin(request)
    form = NewKey(request.POST or None)
    if request.method == "POST" and form.is_valid():
        return _make_key(request, form)
    return _key_page(request, form=form, status=400 if request.method == "POST" else 200)


def _make_key(request: TeamRequest, form: NewKey) -> HttpResponse:
    key, secret = create_api_key(
        team=request.team,
        created_by=request.user,
        held_roles=[request.membership.role],
        name=form.cleaned_data["name"],
        roles=[form.cleaned_data["role"]],
        expires_in=form.cleaned_data["expires_in"],
        source_ip=request.META.get("REMOTE_ADDR"),
    )
    return _key_page(request, form=NewKey(), new_key=key, secret=secret)


def _key_page(
    request: TeamRequest,
    *,
    form: NewKey,
    new_key: ApiKey | None = None,
    secret: str = "",
    status: int = 200,
) -> HttpResponse:
    keys = ApiKey.objects.of(request.team).select_related("created_by").order_by("-created_at")
    context = {
        "keys": add_pending_uses(keys),
        "form": form,
        "new_key": new_key,
        "secret": secret,
        "now": timezone.now(),
    }
    return render(request, "accounts/keys.html", context, status=status)


def _ask_an_admin(request: TeamRequest) -> HttpResponse:
    admins = Membership.objects.filter(team=request.team, role=Role.ADMIN)
    context = {"admins": admins.select_related("user").order_by("joined_at")}
    return render(request, "accounts/keys_of_admins.html", context, status=403)


@require_POST
@permission_required("apikey:write")
def key_deactivate(request: TeamRequest, key_id: UUID) -> HttpResponseBase:
    """Close a key."""
    key = _key_of(request, key_id)
    deactivate_api_key(key=key, user=request.user, source_ip=request.META.get("REMOTE_ADDR"))
    messages.success(request, f"The key {key.name} is deactivated. It opens nothing any more.")
    return redirect("key-list")


@require_http_methods(["GET", "POST"])
@permission_required("apikey:delete")
def key_delete(request: TeamRequest, key_id: UUID) -> HttpResponseBase:
    """Ask whether to delete a key, then do it."""
    key = _key_of(request, key_id)
    if request.method == "GET":
        return render(request, "accounts/key_delete.html", {"key": key})
    delete_api_key(key=key, user=request.user, source_ip=request.META.get("REMOTE_ADDR"))
    messages.success(request, f"The key {key.name} is deleted.")
    return redirect("key-list")


def _key_of(request: TeamRequest, key_id: UUID) -> ApiKey:
    return get_object_or_404(ApiKey.objects.of(request.team).select_related("team"), pk=key_id)


@require_GET
@permission_required("team:read")
def team_detail(request: TeamRequest) -> HttpResponse:
    """Show who is in the team."""
    members = Membership.objects.filter(team=request.team).select_related("user")
    context = {"members": members.order_by("joined_at"), "roles": Role}
    return render(request, "accounts/team.html", context)


@require_GET
@permission_required("audit:read")
def audit_list(request: TeamRequest) -> HttpResponse:
    """Show who did what in the team, newest first."""
    events = AuditEvent.objects.filter(team=request.team).select_related("user", "api_key")
    page = Paginator(events.order_by("-at", "-id"), EVENTS_A_PAGE).get_page(
        request.GET.get("page")
    )
    return render(request, "accounts/audit.html", {"page": page})


@require_POST
@login_required
def team_switch(request: HttpRequest) -> HttpResponseBase:
    """Act from now on for the one of the user's teams whose id is posted as `team`."""
    assert request.user.is_authenticated
    form = TeamChoice(request.POST)
    if not form.is_valid():
        raise Http404
    membership = get_object_or_404(
        request.user.memberships.select_related("team"), team=form.cleaned_data["team"]
    )
    request.session[TEAM_IN_SESSION] = str(membership.team_id)
    record_event(
        team=membership.team,
        user=request.user,
        action="team.switch",
        resource_type="team",
        resource_id=str(membership.team_id),
        source_ip=request.META.get("REMOTE_ADDR"),
    )
    return redirect(_next(request))


def _next(request: HttpRequest) -> str:
    """Return where to go on: a page of ours that holds for any team, else the start."""
    wanted = request.POST.get("next", "")
    safe = url_has_allowed_host_and_scheme(wanted, {request.get_host()})
    # The page of one object is the old team's, and would not be found.
    is_overview = urlsplit(wanted).path.strip("/").count("/") == 0
    return wanted if wanted and safe and is_overview else "/"
