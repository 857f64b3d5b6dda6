"""Claim, list, show, change, pause, resume and delete sandboxes."""

import hashlib
import json
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.views import TeamView
from billing.costs import cost_of
from common.api.envelope import ok
from sandboxes import services
from sandboxes.access import find_sandbox
from sandboxes.api import schema
from sandboxes.api.bodies import (
    claim_body,
    deadlines,
    sandbox_body,
    status_body,
    summary_body,
)
from sandboxes.api.serializers import (
    Claim,
    ExecutionState,
    Refresh,
    SandboxFilter,
    Update,
)
from sandboxes.models import WIRE_STATUS, Sandbox

MAX_IDEMPOTENCY_KEY_BYTES = 255


class SandboxList(TeamView):
    """`/sandboxes`: those of the team."""

    required_permission = {"GET": "sandbox:read", "POST": "sandbox:create"}  # noqa: RUF012

    @extend_schema(
        summary="List sandboxes",
        parameters=[SandboxFilter],
        responses={200: schema.enveloped("SandboxList", schema.SandboxList())}
        | schema.refusals(400),
    )
    def get(self, request: Request) -> Response:
        query = SandboxFilter(data=request.query_params)
        query.is_valid(raise_exception=True)
        found = _filtered(Sandbox.objects.of(self.team).present(), query.validated_data)
        offset, limit = query.validated_data["offset"], query.validated_data["limit"]
        count = found.count()
        page = list(found.order_by("-created_at", "id")[offset : offset + limit])
        costs = cost_of([sandbox.id for sandbox in page])
        return ok(
            {
                "sandboxes": [summary_body(one, costs[one.id]) for one in page],
                "count": count,
                "has_more": offset + len(page) < count,
            }
        )

    @extend_schema(
        summary="Claim a sandbox",
        request=Claim,
        parameters=[schema.IDEMPOTENCY_KEY],
        responses={201: schema.enveloped("Claim", schema.ClaimAnswer())}
        | schema.refusals(400, 403, 404, 409, 429, 503),
    )
    def post(self, request: Request) -> Response:
        body = Claim(data=request.data)
        body.is_valid(raise_exception=True)
        config = body.validated_data.get("config") or {}
        sandbox = services.claim_sandbox(
            team=self.team,
            user=self.holder.user,
            api_key=self.key,
            template_id=body.validated_data["template"],
            snapshot_id=body.validated_data.get("snapshot_id"),
            memory_bytes=config.get("resources", {}).get("memory"),
            ttl_s=config.get("ttl", 0),
            hard_ttl_s=config.get("hard_ttl", 0),
            auto_resume=config.get("auto_resume", True),
            env_vars=config.get("env_vars"),
            idempotency_key=idempotency_key_of(request),
            body_digest=digest_of(request.data),
            source_ip=self.doer.source_ip,
        )
        return ok(claim_body(sandbox), 201)


class SandboxDetail(TeamView):
    """`/sandboxes/<id>`."""

    required_permission = {  # noqa: RUF012
        "GET": "sandbox:read",
        "PUT": "sandbox:write",
        "DELETE": "sandbox:delete",
    }

    @extend_schema(
        summary="Show a sandbox",
        responses={200: schema.enveloped("Sandbox", schema.SandboxAnswer())}
        | schema.refusals(403, 404),
    )
    def get(self, request: Request, sandbox_id: str) -> Response:
        return _in_full(find_sandbox(sandbox_id, self.team))

    @extend_schema(
        summary="Change a sandbox's lifetime, or its memory",
        description="A change of memory restarts a running sandbox on its files.",
        request=Update,
        responses={200: schema.enveloped("Sandbox", schema.SandboxAnswer())}
        | schema.refusals(400, 403, 404, 409, 503),
    )
    def put(self, request: Request, sandbox_id: str) -> Response:
        sandbox = find_sandbox(sandbox_id, self.team)
        body = Update(data=request.data)
        body.is_valid(raise_exception=True)
        config = body.validated_data.get("config") or {}
        memory_bytes = config.get("resources", {}).get("memory")
        if memory_bytes is not None:
            sandbox = services.update_memory(
                sandbox=sandbox, memory_bytes=memory_bytes, by=self.doer
            )
        elif config:
            sandbox = services.update_lifetime(
                sandbox=sandbox,
                ttl_s=config.get("ttl"),
                hard_ttl_s=config.get("hard_ttl"),
                auto_resume=config.get("auto_resume"),
                by=self.doer,
            )
        return _in_full(sandbox)

    @extend_schema(
        summary="Delete a sandbox",
        description="Cannot be undone: its files are deleted with it.",
        responses={202: schema.enveloped("Message", schema.MessageAnswer())}
        | schema.refusals(403, 404),
    )
    def delete(self, request: Request, sandbox_id: str) -> Response:
        services.delete_sandbox(sandbox=find_sandbox(sandbox_id, self.team), by=self.doer)
        return ok({"message": "The sandbox is being deleted."}, 202)


class SandboxStatus(TeamView):
    """`/sandboxes/<id>/status`."""

    required_permission = {"GET": "sandbox:read"}  # noqa: RUF012

    @extend_schema(
        summary="Show a sandbox's status",
        responses={200: schema.enveloped("Status", schema.StatusAnswer())}
        | schema.refusals(403, 404),
    )
    def get(self, request: Request, sandbox_id: str) -> Response:
        return ok(status_body(find_sandbox(sandbox_id, self.team)))


class SandboxPause(TeamView):
    """`/sandboxes/<id>/pause`."""

    required_permission = {"POST": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Pause a sandbox",
        description="200 when it is paused, 202 when that is accepted: poll until it is.",
        request=ExecutionState,
        responses={
            200: schema.enveloped("Pause", schema.PauseAnswer()),
            202: schema.enveloped("PauseAccepted", schema.PauseAnswer()),
        }
        | schema.refusals(400, 403, 404, 409, 503),
    )
    def post(self, request: Request, sandbox_id: str) -> Response:
        sandbox = find_sandbox(sandbox_id, self.team)
        ExecutionState(data=request.data).is_valid(raise_exception=True)
        sandbox = services.pause_sandbox(sandbox=sandbox, by=self.doer)
        body = {
            "sandbox_id": sandbox.id,
            "paused": sandbox.is_paused,
            "status": sandbox.wire_status,
        }
        return ok(body, 200 if sandbox.is_paused else 202)


class SandboxResume(TeamView):
    """`/sandboxes/<id>/resume`."""

    required_permission = {"POST": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Resume a sandbox",
        request=ExecutionState,
        responses={200: schema.enveloped("Resume", schema.ResumeAnswer())}
        | schema.refusals(400, 403, 404, 409, 429, 503),
    )
    def post(self, request: Request, sandbox_id: str) -> Response:
        sandbox = find_sandbox(sandbox_id, self.team)
        ExecutionState(data=request.data).is_valid(raise_exception=True)
        sandbox = services.resume_sandbox(sandbox=sandbox, by=self.doer)
        return ok(
            {
                "sandbox_id": sandbox.id,
                "resumed": sandbox.state == Sandbox.State.RUNNING,
                "status": sandbox.wire_status,
            }
        )


class SandboxRefresh(TeamView):
    """`/sandboxes/<id>/refresh`."""

    required_permission = {"POST": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Push a sandbox's deadlines out from now",
        request=Refresh,
        responses={200: schema.enveloped("Refresh", schema.RefreshAnswer())}
        | schema.refusals(400, 403, 404, 409),
    )
    def post(self, request: Request, sandbox_id: str) -> Response:
        sandbox = find_sandbox(sandbox_id, self.team)
        body = Refresh(data=request.data)
        body.is_valid(raise_exception=True)
        sandbox = services.refresh_sandbox(
            sandbox=sandbox, duration_s=body.validated_data.get("duration")
        )
        return ok({"sandbox_id": sandbox.id, **deadlines(sandbox)})


def _in_full(sandbox: Sandbox) -> Response:
    return ok(sandbox_body(sandbox, cost_of([sandbox.id])[sandbox.id]))


def _filtered(found: Any, query: dict[str, Any]) -> Any:
    if "status" in query:
        states = [state for state, name in WIRE_STATUS.items() if name == query["status"]]
        found = found.filter(state__in=states)
    if "template_id" in query:
        found = found.filter(template_name=query["template_id"].lower())
    if query["paused"] is True:
        found = found.asleep()
    elif query["paused"] is False:
        found = found.exclude(state=Sandbox.State.PAUSED)
    return found


def idempotency_key_of(request: Request) -> str | None:
    """Return the request's Idempotency-Key, if it has one."""
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return None
    # Header bytes arrive as latin-1: one character is one byte.
    if not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY_BYTES or "\0" in key:
        raise serializers.ValidationError(
            {"Idempotency-Key": [f"Must have 1 to {MAX_IDEMPOTENCY_KEY_BYTES} bytes."]}
        )
    return key


def digest_of(data: Any) -> str:
    """Return a digest that is the same for the same JSON, however it was written."""
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
