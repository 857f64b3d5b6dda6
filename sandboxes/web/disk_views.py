"""How full a sandbox's disk is, and the picture of how it grew."""

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from accounts.web.access import TeamRequest, permission_required
from sandboxes import disk_samples
from sandboxes.web.answers import sandbox_or_404


@require_GET
@permission_required("sandbox:read")
def sandbox_disk(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Show the part of a page that is about the disk."""
    sandbox = sandbox_or_404(request, sandbox_id)
    samples = list(sandbox.disk_samples.all()[: disk_samples.MAX_SAMPLES])[::-1]
    last = samples[-1] if samples else None
    context = {
        "sandbox": sandbox,
        "sample": last,
        "percent": _percent(last.used_bytes, last.size_bytes) if last else 0,
        "picture": disk_samples.picture(samples),
        "width": disk_samples.WIDTH,
        "height": disk_samples.HEIGHT,
    }
    return render(request, "sandboxes/disk.html", context)


def _percent(part: int, whole: int) -> int:
    return min(100, 100 * part // max(whole, 1))
