"""Snapshots, the history, forks, restores, and templates made from a sandbox."""

from dataclasses import dataclass
from datetime import timedelta

from asgiref.sync import async_to_sync
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from accounts.permissions import may
from accounts.web.access import TeamRequest, doer, permission_required
from hosts.models import Generation
from hosts.volumes.blocks import BLOCK_BYTES
from sandboxes import snapshots
from sandboxes.errors import TemplateNotFound
from sandboxes.history import history_of
from sandboxes.models import Sandbox, Snapshot, Template
from sandboxes.templatetags.console import size
from sandboxes.web.answers import is_partial, leave_to, sandbox_or_404, shows_refusals, toast
from sandboxes.web.forms import MomentForm, SnapshotForm, TemplateForm
from sandboxes.web.views import head_context

MOMENTS_SHOWN = 1000
RUNS_SHOWN = 200
SNAPSHOTS_SHOWN = 200


@dataclass(frozen=True)
class TemplateRights:
    """What the reader may do with templates."""

    create: bool
    delete: bool

    @classmethod
    def of(cls, request: TeamRequest) -> "TemplateRights":
        role = [request.membership.role]
        return cls(create=may(role, "template:create"), delete=may(role, "template:delete"))


# -- history ------------------------------------------------------------------------------


@require_GET
@permission_required("sandbox:read")
def sandbox_history(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Show the moments that the sandbox can go back to, and when it ran."""
    sandbox = sandbox_or_404(request, sandbox_id)
    moments, _ = history_of(sandbox, limit=MOMENTS_SHOWN)
    own = [one for one in moments if one.generation.volume_id == sandbox.volume_id]
    names = dict(Snapshot.objects.present().filter(sandbox=sandbox).values_list("pk", "name"))
    context = head_context(request, sandbox) | {
        "tab": "history",
        "moments": own,
        "timeline": [
            _point(
                one.generation, one.is_current, [names.get(i) or i for i in one.snapshot_ids]
            )
            for one in reversed(own)
        ],
        "runs": sandbox.runs.select_related("host")[:RUNS_SHOWN],
    }
    return render(request, "sandboxes/history.html", context)


def _point(
    generation: Generation, is_current: bool, snapshot_names: list[str]
) -> dict[str, object]:
    """Return what the page's script shows of a moment."""
    changed_bytes = generation.blocks_changed * BLOCK_BYTES
    return {
        "number": generation.number,
        "kind": generation.get_kind_display(),
        "at": generation.created_at.isoformat(),
        "changed_bytes": changed_bytes,
        "changed": size(changed_bytes),
        "uploaded": size(generation.uploaded_bytes),
        "kept": size(generation.stored_bytes),
        "is_current": is_current,
        "snapshots": snapshot_names,
    }


@require_POST
@permission_required("sandbox:write")
@shows_refusals
def sandbox_restore(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Put a paused sandbox's disk back to a snapshot, or to a moment of its history."""
    sandbox = sandbox_or_404(request, sandbox_id)
    form = MomentForm(request.POST)
    if not form.is_valid() or not form.names_one:
        return _not_a_moment()
    async_to_sync(snapshots.restore)(
        sandbox=sandbox,
        by=doer(request),
        generation=form.cleaned_data["generation"],
        snapshot_id=form.cleaned_data["snapshot_id"] or None,
    )
    if not is_partial(request):
        return redirect("sandbox-history", sandbox.id)
    said = f"{sandbox.id} is as it was then. What came after stays in its history for a day."
    return toast(HttpResponse(status=204), said)


def _not_a_moment() -> HttpResponse:
    return HttpResponse("Choose a moment first.", status=400, content_type="text/plain")


@require_POST
@permission_required("sandbox:create")
@shows_refusals
def sandbox_fork(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Make a paused sandbox that begins as this one is, or was, and show it."""
    sandbox = sandbox_or_404(request, sandbox_id)
    form = MomentForm(request.POST)
    if not form.is_valid():
        return _not_a_moment()
    child = async_to_sync(snapshots.fork)(
        sandbox=sandbox, by=doer(request), generation=form.cleaned_data["generation"]
    )
    return leave_to(request, "sandbox-detail", child.id)


# -- snapshots ----------------------------------------------------------------------------


@require_GET
@permission_required("sandbox:read")
def sandbox_snapshots(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Show the sandbox's snapshots, and ways to make more."""
    return _snapshots(request, sandbox_or_404(request, sandbox_id))


def _snapshots(
    request: TeamRequest,
    sandbox: Sandbox,
    *,
    form: SnapshotForm | None = None,
    template: TemplateForm | None = None,
) -> HttpResponse:
    mine = Snapshot.objects.present().filter(sandbox=sandbox).select_related("generation")
    sent = form or template
    context = head_context(request, sandbox) | {
        "tab": "snapshots",
        "snapshots": mine.order_by("-created_at")[:SNAPSHOTS_SHOWN],
        "form": form or SnapshotForm(),
        "template_form": template or TemplateForm(),
        "templates_may": TemplateRights.of(request),
    }
    status = 422 if sent is not None and sent.errors else 200
    return render(request, "sandboxes/snapshots.html", context, status=status)


@require_POST
@permission_required("sandbox:write")
@shows_refusals
def snapshot_create(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Keep the sandbox's disk as it is now; answered when it is stored."""
    sandbox = sandbox_or_404(request, sandbox_id)
    form = SnapshotForm(request.POST)
    if not form.is_valid():
        return _snapshots(request, sandbox, form=form)
    kept_s = form.cleaned_data["kept_s"]
    snapshot = async_to_sync(snapshots.take_snapshot)(
        sandbox=sandbox,
        by=doer(request),
        name=form.cleaned_data["name"],
        description=form.cleaned_data["description"],
        expires_at=timezone.now() + timedelta(seconds=kept_s) if kept_s else None,
    )
    if not is_partial(request):
        return redirect("sandbox-snapshots", sandbox.id)
    return toast(_snapshots(request, sandbox), f"Snapshot {snapshot} is stored.")


@require_POST
@permission_required("sandbox:write")
@shows_refusals
def snapshot_delete(request: TeamRequest, snapshot_id: str) -> HttpResponse:
    """Delete a snapshot; its row on the page goes with it."""
    snapshot = snapshots.find_snapshot(snapshot_id, request.team)
    snapshots.delete_snapshot(snapshot=snapshot, by=doer(request))
    if not is_partial(request):
        return redirect("template-list")
    return toast(HttpResponse(), f"Snapshot {snapshot} is deleted.")


# -- templates ----------------------------------------------------------------------------


@require_POST
@permission_required("template:create")
@shows_refusals
def template_create(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Make a template that begins with this sandbox's disk, and show how far it is."""
    sandbox = sandbox_or_404(request, sandbox_id)
    form = TemplateForm(request.POST)
    if not form.is_valid():
        return _snapshots(request, sandbox, template=form)
    overrides = {
        "displayName": form.cleaned_data["display_name"] or form.cleaned_data["template_id"],
        "description": form.cleaned_data["description"],
    }
    snapshots.create_template_from_sandbox(
        sandbox=sandbox,
        template_id=form.cleaned_data["template_id"],
        by=doer(request),
        overrides={name: value for name, value in overrides.items() if value},
    )
    return leave_to(request, "template-list")


@require_POST
@permission_required("template:delete")
@shows_refusals
def template_delete(request: TeamRequest, template_id: str) -> HttpResponse:
    """Delete a template of the team; its row on the page goes with it."""
    found = Template.objects.filter(team=request.team, template_id=template_id).first()
    if found is None:
        raise TemplateNotFound(template_id)
    snapshots.delete_template(template=found, by=doer(request))
    if not is_partial(request):
        return redirect("template-list")
    return toast(HttpResponse(), f"Template {template_id} is deleted.")


@require_GET
@permission_required("template:read")
def template_list(request: TeamRequest) -> HttpResponse:
    """Show what sandboxes can start from: templates, and the team's snapshots."""
    templates = Template.objects.visible_to(request.team).select_related("generation")
    role = [request.membership.role]
    found = list(templates.order_by("template_id", "team_id"))
    mine = Snapshot.objects.of(request.team).present().select_related("generation", "sandbox")
    may_read = may(role, "sandbox:read")
    context = {
        "templates": found,
        "is_waiting": any(one.creation == Template.Creation.CREATING for one in found),
        "snapshots": mine.order_by("-created_at")[:SNAPSHOTS_SHOWN] if may_read else [],
        "may_read": may_read,
        "may": {act: may(role, f"sandbox:{act}") for act in ("create", "write", "delete")},
        "templates_may": TemplateRights.of(request),
    }
    return render(request, "sandboxes/templates.html", context)
