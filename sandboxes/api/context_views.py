"""Contexts: commands in a sandbox."""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.views import AsyncTeamView
from common.api.database import run_db
from common.api.envelope import ok
from sandboxes import contexts
from sandboxes.access import find_sandbox
from sandboxes.api import schema
from sandboxes.api.serializers import (
    ContextInput,
    ContextSignal,
    NewContext,
    PtySize,
)
from sandboxes.errors import InvalidContextRequest


class ContextView(AsyncTeamView):
    """What the views of contexts share: how their bodies are checked."""

    async def checked(
        self, sandbox_id: str, serializer: type[serializers.Serializer[Any]]
    ) -> dict[str, Any]:
        """Return the valid body of a request about a sandbox.

        Whoever acts on it finds the sandbox, or refuses; only where the body is refused, it
        is looked for here, since an id that is not the team's is 404 whatever the body says.
        """
        try:
            body = serializer(data=self.request.data)
            body.is_valid(raise_exception=True)
        except APIException:
            await run_db(find_sandbox, sandbox_id, self.team)
            raise
        valid: dict[str, Any] = body.validated_data
        return valid


class ContextList(ContextView):
    """`/sandboxes/<id>/contexts`."""

    required_permission = {"GET": "sandbox:read", "POST": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="List contexts",
        responses={200: schema.enveloped("ContextList", schema.ContextList())}
        | schema.refusals(403, 404, 503),
    )
    async def get(self, request: Request, sandbox_id: str) -> Response:
        listed = await contexts.list_contexts(sandbox_id, self.team)
        return ok({"contexts": listed})

    @extend_schema(
        summary="Run a command",
        description=(
            "With `wait_until_done` the answer comes when the command has ended, with its "
            "output; a client that leaves before does not end it. Without it standard input "
            "stays open, for `input` and the WebSocket; with it the command reads an end of "
            "file at once."
        ),
        request=NewContext,
        responses={201: schema.enveloped("Context", schema.ContextAnswer())}
        | schema.refusals(400, 403, 404, 429, 503),
    )
    async def post(self, request: Request, sandbox_id: str) -> Response:
        wanted = await self.checked(sandbox_id, NewContext)
        waits = wanted["wait_until_done"]
        command = _command(wanted)
        run = contexts.run_context if waits else contexts.start_context
        return ok(await run(sandbox_id, self.team, command), 201)


def _command(wanted: dict[str, Any]) -> contexts.Command:
    return contexts.Command(
        id=contexts.new_context_id(),
        argv=wanted["cmd"]["command"],
        cwd=wanted.get("cwd") or None,
        env=wanted.get("env_vars") or {},
        pty=wanted.get("pty_size"),
        stdin_is_open=not wanted["wait_until_done"],
        ttl_s=wanted.get("ttl_sec") or None,
        idle_timeout_s=wanted.get("idle_timeout_sec") or None,
    )


class ContextDetail(ContextView):
    """`/sandboxes/<id>/contexts/<ctx>`."""

    required_permission = {"GET": "sandbox:read", "DELETE": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Show a context and what is kept of its output",
        responses={200: schema.enveloped("Context", schema.ContextAnswer())}
        | schema.refusals(403, 404, 503),
    )
    async def get(self, request: Request, sandbox_id: str, context_id: str) -> Response:
        return ok(await contexts.show_context(sandbox_id, self.team, context_id))

    @extend_schema(
        summary="End a context and forget it",
        description="SIGTERM to its process group, SIGKILL after 5 seconds.",
        responses={200: schema.done("deleted")} | schema.refusals(403, 404, 503),
    )
    async def delete(self, request: Request, sandbox_id: str, context_id: str) -> Response:
        await contexts.delete_context(sandbox_id, self.team, context_id)
        return ok({"deleted": True})


class ContextInputView(ContextView):
    """`…/contexts/<ctx>/input`."""

    required_permission = {"POST": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Write to a context's input",
        request=ContextInput,
        responses={200: schema.done("written")} | schema.refusals(400, 403, 404, 409, 410, 503),
    )
    async def post(self, request: Request, sandbox_id: str, context_id: str) -> Response:
        wanted = await self.checked(sandbox_id, ContextInput)
        await contexts.write_to_context(
            sandbox_id, self.team, context_id, wanted["data"].encode()
        )
        return ok({"written": True})


class ContextResizeView(ContextView):
    """`…/contexts/<ctx>/resize`."""

    required_permission = {"POST": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Resize a context's terminal",
        request=PtySize,
        responses={200: schema.done("resized")} | schema.refusals(400, 403, 404, 410, 503),
    )
    async def post(self, request: Request, sandbox_id: str, context_id: str) -> Response:
        size = await self.checked(sandbox_id, PtySize)
        await contexts.resize_context(sandbox_id, self.team, context_id, **size)
        return ok({"resized": True})


class ContextSignalView(ContextView):
    """`…/contexts/<ctx>/signal`."""

    required_permission = {"POST": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Send a signal to a context's process group",
        request=ContextSignal,
        responses={200: schema.done("signaled")}
        | schema.refusals(400, 403, 404, 409, 410, 503),
    )
    async def post(self, request: Request, sandbox_id: str, context_id: str) -> Response:
        wanted = await self.checked(sandbox_id, ContextSignal)
        await contexts.signal_context(sandbox_id, self.team, context_id, wanted["signal"])
        return ok({"signaled": True})


class UnavailableContextView(ContextView):
    """`…/contexts/<ctx>/exec` and `/restart`: parts of what this version does not have."""

    required_permission = {"POST": "sandbox:write"}  # noqa: RUF012
    what = ""

    @extend_schema(exclude=True)
    async def post(self, request: Request, sandbox_id: str, context_id: str) -> Response:
        await run_db(find_sandbox, sandbox_id, self.team)
        raise InvalidContextRequest(
            f"{self.what} is not available in this version: contexts are of type cmd. "
            "Create a new context instead."
        )
