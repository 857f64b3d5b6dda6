"""Disks as files in the console: exports of sandboxes and snapshots."""

from collections.abc import Awaitable

from asgiref.sync import async_to_sync
from django.http.response import HttpResponseBase
from django.views.decorators.http import require_GET

from accounts.web.access import TeamRequest, doer, permission_required
from sandboxes import images, snapshots
from sandboxes.web.answers import sandbox_or_404, shows_refusals


@require_GET
@permission_required("sandbox:read")
@shows_refusals
def sandbox_export(request: TeamRequest, sandbox_id: str) -> HttpResponseBase:
    """Send the sandbox's disk as it is now."""
    sandbox = sandbox_or_404(request, sandbox_id)
    return _sent(images.export_sandbox(sandbox, by=doer(request)))


@require_GET
@permission_required("sandbox:read")
@shows_refusals
def snapshot_export(request: TeamRequest, snapshot_id: str) -> HttpResponseBase:
    """Send the disk that a snapshot keeps."""
    snapshot = snapshots.find_snapshot(snapshot_id, request.team)
    return _sent(images.export_snapshot(snapshot, by=doer(request)))


def _sent(opening: Awaitable[images.ImageDownload]) -> HttpResponseBase:
    async def opened() -> images.ImageDownload:
        return await opening

    # On the server's loop, where the connections to hosts live.
    return images.sent(async_to_sync(opened)())
