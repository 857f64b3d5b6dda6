"""Disks as files: exports of sandboxes and snapshots."""

from django.conf import settings
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.views import AsyncTeamView
from common.api.database import run_db
from common.api.envelope import ok
from sandboxes import images, imports, snapshots
from sandboxes.access import find_sandbox
from sandboxes.api import schema
from sandboxes.api.bodies import template_body
from sandboxes.api.file_views import body_of
from sandboxes.api.serializers import ExportQuery, ImportQuery
from sandboxes.errors import FileTooLarge

IMAGE = {(200, "application/octet-stream"): OpenApiTypes.BINARY}


class SandboxExport(AsyncTeamView):
    """`/sandboxes/<id>/export.qcow2`."""

    required_permission = {"GET": "sandbox:read"}  # noqa: RUF012

    @extend_schema(
        summary="Download a sandbox's disk as one qcow2 file",
        description=(
            "Sparse, and standing alone: it has no backing file. A running sandbox runs on. "
            "With `generation` it is the disk at a moment of the history."
        ),
        parameters=[ExportQuery],
        responses=IMAGE | schema.refusals(400, 403, 404, 409, 503),
    )
    async def get(self, request: Request, sandbox_id: str) -> HttpResponseBase:
        sandbox = await run_db(find_sandbox, sandbox_id, self.team)
        query = ExportQuery(data=request.query_params)
        query.is_valid(raise_exception=True)
        return images.sent(
            await images.export_sandbox(sandbox, by=self.doer, **query.validated_data)
        )


class SnapshotExport(AsyncTeamView):
    """`/sandbox-rootfs-snapshots/<id>/export.qcow2`."""

    required_permission = {"GET": "sandbox:read"}  # noqa: RUF012

    @extend_schema(
        summary="Download the disk that a snapshot keeps as one qcow2 file",
        responses=IMAGE | schema.refusals(403, 404, 503),
    )
    async def get(self, request: Request, snapshot_id: str) -> HttpResponseBase:
        snapshot = await run_db(snapshots.find_snapshot, snapshot_id, self.team)
        return images.sent(await images.export_snapshot(snapshot, by=self.doer))


class TemplateImport(AsyncTeamView):
    """`/templates/import`."""

    required_permission = {"POST": "template:create"}  # noqa: RUF012

    @extend_schema(
        summary="Make a template of an image",
        description=(
            "The raw body is a qcow2 or raw image of an ext4 file system, or of a disk (GPT or "
            "MBR) whose root partition has one: that partition alone is taken. "
            "It must stand alone: one that names a backing or data file is refused, as is an "
            "encrypted one. The template can be claimed once `status.creation.state` is ready."
        ),
        parameters=[ImportQuery],
        request={"application/octet-stream": OpenApiTypes.BINARY},
        responses={202: schema.enveloped("TemplateImported", schema.TemplateAnswer())}
        | schema.refusals(400, 403, 409, 413, 503),
    )
    async def post(self, request: Request) -> Response:
        query = ImportQuery(data=request.query_params)
        query.is_valid(raise_exception=True)
        wanted = query.validated_data
        template = await imports.import_template(
            team=self.team,
            by=self.doer,
            template_id=wanted.pop("template_id"),
            spec=wanted,
            body=body_of(request),
            size_bytes=_length_of(request),
        )
        return ok(template_body(template), 202)


def _length_of(request: Request) -> int:
    text = request.META.get("CONTENT_LENGTH") or ""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise serializers.ValidationError({"Content-Length": ["Say how long the image is."]})
    if int(text) > settings.IMPORT_MAX_BYTES:
        raise FileTooLarge(settings.IMPORT_MAX_BYTES)
    return int(text)
