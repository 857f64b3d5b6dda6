"""The pages of sandboxes and templates. Each reads, or calls one service, and renders."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from accounts.permissions import may
from accounts.web.access import TeamRequest, doer, permission_required
from common.errors import DomainError
from sandboxes import services
from sandboxes.models import Sandbox
from sandboxes.progress import steps_of
from sandboxes.web.answers import (
    SandboxDeleted,
    is_partial,
    leave_to,
    sandbox_or_404,
    shows_refusals,
    toast,
)
from sandboxes.web.forms import SPANS, ClaimForm, LifetimeForm, MemoryForm, templates_for
from sandboxes.web.rows import (
    SEARCH_CHARS,
    Filters,
    page_of,
    price_of,
    quota_of,
    rows_of,
    run_cost,
    stored_bytes,
)
from sandboxes.web.snippets import first_steps, snippets_for

State = Sandbox.State

# Those that a reader picks from; a deleted sandbox is in no list.
SHOWN_STATES = [state for state in State.values if state != State.DELETED]


@require_GET
def home(request: HttpRequest) -> HttpResponse:
    """Lead to the list, which leads a stranger to the sign-in page."""
    return redirect("sandbox-list")


@require_GET
@permission_required("sandbox:read")
def sandbox_list(request: TeamRequest) -> HttpResponse:
    """Show the team's sandboxes; the same address answers a change of its filters."""
    asked = request.GET
    filters = Filters(
        search=asked.get("q", "").strip()[:SEARCH_CHARS],
        state=asked["state"] if asked.get("state") in SHOWN_STATES else "",
        template=asked.get("template", "")[:255],
    )
    after = asked.get("after", "")
    page = page_of(request.team, filters, after=after)
    is_first_visit = not (page.rows or filters.are_set or after)
    context = {
        "page": page,
        "filters": filters,
        "after": after,
        "states": SHOWN_STATES,
        "templates": templates_for(request.team),
        "may": _rights(request),
        "is_first_visit": is_first_visit,
        "ways": first_steps(request.team) if is_first_visit else None,
    }
    return render(request, "sandboxes/list.html", context)


@require_GET
@permission_required("sandbox:read")
def sandbox_row(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Show one row of the list anew."""
    return _row(request, sandbox_or_404(request, sandbox_id))


def _row(request: TeamRequest, sandbox: Sandbox) -> HttpResponse:
    [row] = rows_of([sandbox])
    context = {"row": row, "may": _rights(request)}
    return render(request, "sandboxes/row.html", context)


@require_http_methods(["GET", "POST"])
@permission_required("sandbox:create")
def sandbox_claim(request: TeamRequest) -> HttpResponse:
    """Show the claim form, in a dialog or as a page; a good one starts a sandbox."""
    if request.method != "POST":
        given = {"template_id": "template", "snapshot_id": "snapshot"}
        asked = {
            field: request.GET[name] for field, name in given.items() if name in request.GET
        }
        return _claim_form(request, ClaimForm(team=request.team, initial=asked))
    form = ClaimForm(request.POST, team=request.team)
    if not form.is_valid():
        return _claim_form(request, form)
    try:
        sandbox = services.claim_sandbox(
            team=request.team,
            user=request.membership.user,
            source_ip=doer(request).source_ip,
            **form.cleaned_data,
        )
    except DomainError as error:
        form.add_error(None, str(error))
        return _claim_form(request, form)
    return leave_to(request, "sandbox-terminal", sandbox.id)


def _claim_form(request: TeamRequest, form: ClaimForm) -> HttpResponse:
    name = "sandboxes/claim_form.html" if is_partial(request) else "sandboxes/claim.html"
    context = {"form": form, "quota": quota_of(request.team), "spans": SPANS}
    return render(request, name, context, status=422 if form.errors else 200)


@require_GET
@permission_required("sandbox:read")
def sandbox_detail(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Lead to the tab that is of use now: a paused sandbox's files, another's terminal."""
    sandbox = sandbox_or_404(request, sandbox_id)
    if sandbox.is_paused or not _rights(request)["write"]:
        return redirect("sandbox-files", sandbox.id)
    return redirect("sandbox-terminal", sandbox.id)


@require_GET
@permission_required("sandbox:read")
def sandbox_head(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Show the head of a sandbox's page anew."""
    try:
        sandbox = sandbox_or_404(request, sandbox_id)
    except SandboxDeleted:
        return leave_to(request, "sandbox-list")
    return render(request, "sandboxes/head.html", head_context(request, sandbox))


@require_GET
@permission_required("sandbox:write")
def sandbox_terminal(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Show the sandbox's terminal."""
    sandbox = sandbox_or_404(request, sandbox_id)
    context = head_context(request, sandbox) | {"tab": "terminal"}
    return render(request, "sandboxes/terminal.html", context)


@require_http_methods(["GET", "POST"])
@permission_required("sandbox:write")
def sandbox_settings(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Show how long the sandbox lives and its memory; a POST changes the former."""
    sandbox = sandbox_or_404(request, sandbox_id)
    if request.method != "POST":
        return _settings(request, sandbox)
    form = LifetimeForm(request.POST)
    if form.is_valid():
        try:
            services.update_lifetime(sandbox=sandbox, by=doer(request), **form.cleaned_data)
        except DomainError as error:
            form.add_error(None, str(error))
    return _settings(request, sandbox, lifetime=form)


@require_POST
@permission_required("sandbox:write")
def sandbox_memory(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Give the sandbox another size of memory."""
    sandbox = sandbox_or_404(request, sandbox_id)
    form = MemoryForm(request.POST, sandbox=sandbox)
    if form.is_valid():
        try:
            services.update_memory(
                sandbox=sandbox,
                memory_bytes=form.cleaned_data["memory_bytes"],
                by=doer(request),
            )
        except DomainError as error:
            form.add_error(None, str(error))
    return _settings(request, sandbox, memory=form)


def _settings(
    request: TeamRequest,
    sandbox: Sandbox,
    *,
    lifetime: LifetimeForm | None = None,
    memory: MemoryForm | None = None,
) -> HttpResponse:
    sent = lifetime or memory
    if sent is not None and sent.is_valid():
        response = leave_to(request, "sandbox-settings", sandbox.id)
        return toast(response, "Saved.")
    present = {
        "ttl_s": sandbox.ttl_s,
        "hard_ttl_s": sandbox.hard_ttl_s,
        "auto_resume": sandbox.auto_resume,
    }
    context = head_context(request, sandbox) | {
        "tab": "settings",
        "lifetime": lifetime or LifetimeForm(initial=present),
        "memory": memory or MemoryForm(sandbox=sandbox),
        "spans": SPANS,
    }
    status = 200 if sent is None else 422
    return render(request, "sandboxes/settings.html", context, status=status)


@require_POST
@permission_required("sandbox:write")
@shows_refusals
def sandbox_pause(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Put the sandbox to sleep."""
    sandbox = services.pause_sandbox(
        sandbox=sandbox_or_404(request, sandbox_id), by=doer(request)
    )
    return _acted(request, sandbox, f"{sandbox.id} is being paused; its bill has stopped.")


@require_POST
@permission_required("sandbox:write")
@shows_refusals
def sandbox_resume(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Wake the sandbox."""
    sandbox = services.resume_sandbox(
        sandbox=sandbox_or_404(request, sandbox_id), by=doer(request)
    )
    return _acted(request, sandbox, f"{sandbox.id} is waking up.")


@require_POST
@permission_required("sandbox:write")
@shows_refusals
def sandbox_checkpoint(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Save the disk of a running sandbox; its saved state shows once it is there."""
    sandbox = sandbox_or_404(request, sandbox_id)
    services.checkpoint_sandbox(sandbox=sandbox)
    if not is_partial(request):
        return redirect("sandbox-history", sandbox.id)
    said = "Saving its disk. The new state shows here; without changes there is none."
    return toast(HttpResponse(status=204), said)


@require_POST
@permission_required("sandbox:delete")
@shows_refusals
def sandbox_delete(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Delete the sandbox and its files."""
    sandbox = sandbox_or_404(request, sandbox_id)
    services.delete_sandbox(sandbox=sandbox, by=doer(request))
    sandbox.refresh_from_db(fields=["state", "state_changed_at"])
    if not is_partial(request):
        # Its own page is gone in a moment.
        return redirect("sandbox-list")
    if sandbox.state == State.DELETED:
        if request.GET.get("from") == "row":
            return toast(HttpResponse(), f"{sandbox.id} is deleted.")
        return leave_to(request, "sandbox-list")
    return _acted(request, sandbox, f"{sandbox.id} is being deleted.")


def _acted(request: TeamRequest, sandbox: Sandbox, said: str) -> HttpResponse:
    """Show the part of the page that the button was in, and say what happens."""
    if not is_partial(request):
        return redirect("sandbox-detail", sandbox.id)
    fresh = sandbox_or_404(request, sandbox.id)
    if request.GET.get("from") == "row":
        return toast(_row(request, fresh), said)
    return toast(render(request, "sandboxes/head.html", head_context(request, fresh)), said)


def head_context(request: TeamRequest, sandbox: Sandbox) -> dict[str, object]:
    """Return what the head of every page of one sandbox shows."""
    now = timezone.now()
    return {
        "sandbox": sandbox,
        "may": _rights(request),
        "run_cost": run_cost(sandbox),
        "now": now,
        "price": price_of(sandbox),
        "stored_bytes": stored_bytes(sandbox),
        "steps": steps_of(sandbox),
        "snippets": snippets_for(sandbox),
    }


def _rights(request: TeamRequest) -> dict[str, bool]:
    role = [request.membership.role]
    return {act: may(role, f"sandbox:{act}") for act in ("create", "write", "delete")}
