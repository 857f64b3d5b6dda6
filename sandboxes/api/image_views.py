"""Disks as files: exports of sandboxes and snapshots."""

from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from accounts.api.views import AsyncTeamView
from common.api.database import run_db
from sandboxes import images, snapshots
from sandboxes.access import find_sandbox
from sandboxes.api import schema
from sandboxes.api.serializers import ExportQuery

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
        return sent(await images.export_sandbox(sandbox, by=self.doer, **query.validated_data))


class SnapshotExport(AsyncTeamView):
    """`/sandbox-rootfs-snapshots/<id>/export.qcow2`."""

    required_permission = {"GET": "sandbox:read"}  # noqa: RUF012

    @extend_schema(
        summary="Download the disk that a snapshot keeps as one qcow2 file",
        responses=IMAGE | schema.refusals(403, 404, 503),
    )
    async def get(self, request: Request, snapshot_id: str) -> HttpResponseBase:
        snapshot = await run_db(snapshots.find_snapshot, snapshot_id, self.team)
        return sent(await images.export_snapshot(snapshot, by=self.doer))


def sent(download: images.ImageDownload) -> HttpResponseBase:
    """Return the answer that carries an image; its length tells when it was cut short."""
    response = StreamingHttpResponse(download.pieces, content_type="application/octet-stream")
    response["Content-Length"] = str(download.size_bytes)
    response["Content-Disposition"] = f'attachment; filename="{download.name}"'
    response["Cache-Control"] = "private, no-store"
    return response
