"""Snapshots, restore, fork, history, and templates made from sandboxes."""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.views import AsyncTeamView, TeamView
from billing.costs import cost_of
from common.api.database import run_db
from common.api.envelope import ok
from sandboxes import history, snapshots
from sandboxes.access import find_sandbox
from sandboxes.api import schema
from sandboxes.api.bodies import moment_body, sandbox_body, snapshot_body, template_body
from sandboxes.api.sandbox_views import digest_of, idempotency_key_of
from sandboxes.api.serializers import (
    Fork,
    HistoryPage,
    NewSnapshot,
    Page,
    Rebase,
    Restore,
    TemplateFromSandbox,
)
from sandboxes.errors import NotInThisVersion
from sandboxes.models import Sandbox, Snapshot
from sandboxes.snapshots import Repeatable


class SandboxSnapshots(AsyncTeamView):
    """`/sandboxes/<id>/snapshots`."""

    required_permission = {"GET": "sandbox:read", "POST": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="List a sandbox's snapshots",
        description="Newest first; all of them where no limit is given.",
        parameters=[Page],
        responses={200: schema.enveloped("SnapshotList", schema.SnapshotList())}
        | schema.refusals(400, 403, 404),
    )
    async def get(self, request: Request, sandbox_id: str) -> Response:
        sandbox = await run_db(find_sandbox, sandbox_id, self.team)
        query = Page(data=request.query_params)
        query.is_valid(raise_exception=True)
        return ok(await run_db(_listed, sandbox, **query.validated_data))

    @extend_schema(
        summary="Keep a sandbox's disk as it is now",
        description=(
            "A running sandbox runs on: its file system is held for milliseconds. Answered "
            "when the snapshot is stored."
        ),
        request=NewSnapshot,
        responses={201: schema.enveloped("Snapshot", schema.SnapshotAnswer())}
        | schema.refusals(400, 403, 404, 409, 503),
    )
    async def post(self, request: Request, sandbox_id: str) -> Response:
        sandbox = await run_db(find_sandbox, sandbox_id, self.team)
        body = NewSnapshot(data=request.data)
        body.is_valid(raise_exception=True)
        snapshot = await snapshots.take_snapshot(
            sandbox=sandbox, by=self.doer, **body.validated_data
        )
        return ok(snapshot_body(snapshot), 201)


def _listed(
    sandbox: Sandbox, *, limit: int | None = None, cursor: str | None = None
) -> dict[str, Any]:
    mine = Snapshot.objects.present().filter(sandbox=sandbox)
    count = mine.count()
    found = mine.select_related("generation").order_by("-created_at", "-pk")
    if cursor is not None:
        last = Snapshot.objects.filter(sandbox=sandbox, pk=cursor).first()
        if last is None:
            raise serializers.ValidationError({"cursor": ["It is not from this list."]})
        found = found.filter(created_at__lte=last.created_at).exclude(
            created_at=last.created_at, pk__gte=last.pk
        )
    limit = limit or snapshots.MAX_SNAPSHOTS
    page = list(found[: limit + 1])
    body: dict[str, Any] = {
        "snapshots": [snapshot_body(one) for one in page[:limit]],
        "count": count,
    }
    if len(page) > limit:
        body["next_cursor"] = page[limit - 1].id
    return body


class SnapshotDetail(TeamView):
    """`/sandbox-rootfs-snapshots/<id>`."""

    required_permission = {"GET": "sandbox:read", "DELETE": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Show a snapshot",
        responses={200: schema.enveloped("SnapshotShown", schema.SnapshotAnswer())}
        | schema.refusals(403, 404),
    )
    def get(self, request: Request, snapshot_id: str) -> Response:
        return ok(snapshot_body(snapshots.find_snapshot(snapshot_id, self.team)))

    @extend_schema(
        summary="Delete a snapshot",
        description="What was made of it stays as it is.",
        responses={200: schema.done("deleted")} | schema.refusals(403, 404),
    )
    def delete(self, request: Request, snapshot_id: str) -> Response:
        snapshot = snapshots.find_snapshot(snapshot_id, self.team)
        snapshots.delete_snapshot(snapshot=snapshot, by=self.doer)
        return ok({"deleted": True})


class SandboxRestore(AsyncTeamView):
    """`/sandboxes/<id>/rootfs/restore`."""

    required_permission = {"POST": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Put a paused sandbox's disk back to a snapshot, or to a moment before",
        description="It stays paused. What was written since stays in its history for a while.",
        request=Restore,
        responses={200: schema.enveloped("Restore", schema.RestoreAnswer())}
        | schema.refusals(400, 403, 404, 409, 503),
    )
    async def post(self, request: Request, sandbox_id: str) -> Response:
        sandbox = await run_db(find_sandbox, sandbox_id, self.team)
        body = Restore(data=request.data)
        body.is_valid(raise_exception=True)
        sandbox = await snapshots.restore(sandbox=sandbox, by=self.doer, **body.validated_data)
        assert sandbox.volume.head is not None
        answer = {
            "sandbox_id": sandbox.id,
            "status": sandbox.wire_status,
            "generation": sandbox.volume.head.number,
        }
        if "snapshot_id" in body.validated_data:
            answer["snapshot_id"] = body.validated_data["snapshot_id"]
        return ok(answer)


class SandboxRebase(TeamView):
    """`/sandboxes/<id>/rootfs/rebase`: there are no attested base images to move to."""

    required_permission = {"PUT": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Move a sandbox onto another base image (not available)",
        request=Rebase,
        responses=schema.refusals(400, 403, 404, 409),
    )
    def put(self, request: Request, sandbox_id: str) -> Response:
        find_sandbox(sandbox_id, self.team)
        Rebase(data=request.data).is_valid(raise_exception=True)
        raise NotInThisVersion("Moving a sandbox onto another base image")


class SandboxFork(AsyncTeamView):
    """`/sandboxes/<id>/fork`."""

    required_permission = {"POST": "sandbox:create"}  # noqa: RUF012

    @extend_schema(
        summary="Make a paused sandbox that begins with this one's disk",
        description="Also from a running one, which runs on, or from a moment before.",
        request=Fork,
        parameters=[schema.IDEMPOTENCY_KEY],
        responses={201: schema.enveloped("Fork", schema.ForkAnswer())}
        | schema.refusals(400, 403, 404, 409, 429, 503),
    )
    async def post(self, request: Request, sandbox_id: str) -> Response:
        source = await run_db(find_sandbox, sandbox_id, self.team)
        body = Fork(data=request.data)
        body.is_valid(raise_exception=True)
        wanted = body.validated_data
        config = wanted.get("config") or {}
        child = await snapshots.fork(
            sandbox=source,
            by=self.doer,
            ttl_s=config.get("ttl"),
            hard_ttl_s=config.get("hard_ttl"),
            generation=wanted.get("generation"),
            consistency=wanted["consistency"],
            repeatable=_repeatable(request, f"fork {source.id}"),
        )
        answer = {
            "source_sandbox_id": source.id,
            "sandbox": await run_db(_in_full, child),
        }
        return ok(answer, 201)


def _in_full(sandbox: Sandbox) -> dict[str, Any]:
    return sandbox_body(sandbox, cost_of([sandbox.id])[sandbox.id])


def _repeatable(request: Request, what: str) -> Repeatable | None:
    key = idempotency_key_of(request)
    if key is None:
        return None
    return Repeatable(key=key, body_digest=digest_of([what, request.data]))


class SandboxHistory(TeamView):
    """`/sandboxes/<id>/history`."""

    required_permission = {"GET": "sandbox:read"}  # noqa: RUF012

    @extend_schema(
        summary="List the moments that a sandbox can go back to",
        description=(
            "Newest first. Each can be restored, forked, or read: see `generation` there. The "
            "older the fewer: all for 1 h, one a minute for 6 h, one each 10 minutes for 24 h."
        ),
        parameters=[HistoryPage],
        responses={200: schema.enveloped("History", schema.HistoryAnswer())}
        | schema.refusals(400, 403, 404),
    )
    def get(self, request: Request, sandbox_id: str) -> Response:
        sandbox = find_sandbox(sandbox_id, self.team)
        query = HistoryPage(data=request.query_params)
        query.is_valid(raise_exception=True)
        moments, following = history.history_of(
            sandbox,
            before=query.validated_data.get("cursor"),
            limit=query.validated_data["limit"],
        )
        answer: dict[str, Any] = {
            "sandbox_id": sandbox.id,
            "generations": [moment_body(one) for one in moments],
        }
        return ok(answer | ({} if following is None else {"next_cursor": following}))


class TemplateFromSandboxView(TeamView):
    """`/templates/from-sandbox`."""

    required_permission = {"POST": "template:create"}  # noqa: RUF012

    @extend_schema(
        summary="Make a template that begins with a sandbox's disk",
        description="It can be claimed once its `status.creation.state` is ready.",
        request=TemplateFromSandbox,
        parameters=[schema.IDEMPOTENCY_KEY],
        responses={202: schema.enveloped("TemplateAccepted", schema.TemplateAnswer())}
        | schema.refusals(400, 403, 404, 409, 503),
    )
    def post(self, request: Request) -> Response:
        if not self.holder.may("sandbox:read"):
            raise PermissionDenied("This needs the permission sandbox:read as well.")
        body = TemplateFromSandbox(data=request.data)
        body.is_valid(raise_exception=True)
        wanted = body.validated_data
        template = snapshots.create_template_from_sandbox(
            sandbox=find_sandbox(wanted["sandbox_id"], self.team),
            template_id=wanted["template_id"],
            overrides=wanted.get("spec_overrides"),
            by=self.doer,
            repeatable=_repeatable(request, "template from sandbox"),
        )
        return ok(template_body(template), 202)
