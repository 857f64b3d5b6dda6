"""How full a sandbox's disk was, and how large it had grown, over its life.

Measured when something was stored, so an idle guest is not asked: the worker calls `record`
after a commit and at a pause. A sandbox has a bounded number of samples; when there are too
many, every other one of the older half is dropped, so that what is kept gets coarser with
its age and the picture always reaches from the claim to now.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from common.units import TiB
from hosts import local
from hosts.guest.channel import AgentChannel, AgentFailed, AgentSilent
from hosts.models import Generation
from sandboxes.models import DiskSample, Sandbox

log = logging.getLogger(__name__)

MAX_SAMPLES = 240
MIN_GAP = timedelta(minutes=1)
ASK_TIMEOUT_S = 2.0
MAX_DISK_BYTES = 64 * TiB

WIDTH, HEIGHT = 640, 150


@dataclass(frozen=True)
class Figures:
    """What a guest says of its disk, checked."""

    used_bytes: int
    size_bytes: int
    ceiling_bytes: int


def record(sandbox: Sandbox, *, must: bool = False) -> DiskSample | None:
    """Measure the disk, unless that was done a moment ago; by the sandbox's host alone.

    Never fails for the sake of the guest: one that does not answer keeps its last figures.

    Args:
        must: measure even so, as at a pause, after which nobody can be asked.
    """
    last = latest(sandbox)
    now = timezone.now()
    if last is not None and not must and now - last.measured_at < MIN_GAP:
        return None
    figures = _ask(sandbox) or _from(last)
    if figures is None:
        return None
    sample = DiskSample.objects.create(
        sandbox=sandbox,
        measured_at=now,
        used_bytes=figures.used_bytes,
        size_bytes=figures.size_bytes,
        ceiling_bytes=figures.ceiling_bytes,
        stored_bytes=_stored_bytes(sandbox),
    )
    _thin(sandbox)
    return sample


def latest(sandbox: Sandbox) -> DiskSample | None:
    """Return what was measured last."""
    return sandbox.disk_samples.first()


def _ask(sandbox: Sandbox) -> Figures | None:
    if sandbox.state not in (Sandbox.State.RUNNING, Sandbox.State.PAUSING):
        return None
    channel = AgentChannel(local.channel_path(sandbox.uuid), timeout_s=ASK_TIMEOUT_S)
    try:
        return figures_in(channel.stats())
    except (AgentSilent, AgentFailed) as error:
        log.info("the disk of sandbox %s is not measured: %s", sandbox.id, error)
        return None


def figures_in(stats: dict[str, Any]) -> Figures | None:
    """Return the figures in an agent's answer; None where it makes no sense.

    A guest's own programs can answer in its agent's place: no more comes of it than a
    picture of its owner's that is wrong.
    """
    total_bytes, free_bytes = stats.get("disk_bytes"), stats.get("disk_free_bytes")
    size_bytes = stats.get("span_bytes", total_bytes)
    ceiling_bytes = stats.get("ceiling_bytes", stats.get("device_bytes"))
    found = (total_bytes, free_bytes, size_bytes, ceiling_bytes)
    if not all(type(one) is int and 0 <= one <= MAX_DISK_BYTES for one in found):
        return None
    assert isinstance(total_bytes, int)
    assert isinstance(free_bytes, int)
    assert isinstance(size_bytes, int)
    assert isinstance(ceiling_bytes, int)
    used_bytes = min(max(total_bytes - free_bytes, 0), size_bytes)
    return Figures(used_bytes, size_bytes, max(ceiling_bytes, size_bytes))


def _from(last: DiskSample | None) -> Figures | None:
    if last is None:
        return None
    return Figures(last.used_bytes, last.size_bytes, last.ceiling_bytes)


def _stored_bytes(sandbox: Sandbox) -> int:
    """Return what the sandbox's own objects hold; nothing while it is still its template."""
    head = Generation.objects.filter(heads__pk=sandbox.volume_id).first()
    return head.stored_bytes if head and head.volume_id == sandbox.volume_id else 0


def _thin(sandbox: Sandbox) -> None:
    with transaction.atomic():
        kept = list(sandbox.disk_samples.values_list("pk", flat=True)[: MAX_SAMPLES + 1])
        if len(kept) > MAX_SAMPLES:
            oldest_first = kept[::-1]
            # The very first stays: it is where the picture begins.
            dropped = oldest_first[1 : MAX_SAMPLES // 2 : 2]
            sandbox.disk_samples.filter(pk__in=dropped).delete()


# -- the picture --------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A drawing of the growth, in the units of its view box."""

    used: str
    """An area, as an SVG polygon's points."""
    size: str
    """A line above it, as a polyline's points."""
    top_bytes: int
    begins_at: datetime
    ends_at: datetime


def picture(samples: Sequence[DiskSample]) -> Picture | None:
    """Draw samples, the oldest first; None where there are too few for a line."""
    if len(samples) < 2:  # noqa: PLR2004
        return None
    begins_at, ends_at = samples[0].measured_at, samples[-1].measured_at
    span_s = max((ends_at - begins_at).total_seconds(), 1.0)
    top_bytes = max(1, *(one.size_bytes for one in samples))

    def x(one: DiskSample) -> str:
        return f"{(one.measured_at - begins_at).total_seconds() / span_s * WIDTH:.1f}"

    def y(count: int) -> str:
        return f"{HEIGHT - count / top_bytes * (HEIGHT - 4):.1f}"

    used = [f"{x(one)},{y(one.used_bytes)}" for one in samples]
    steps: list[str] = []
    for before, one in zip([samples[0], *samples], samples, strict=False):
        # It grows in steps, between two measurements.
        steps += [f"{x(one)},{y(before.size_bytes)}", f"{x(one)},{y(one.size_bytes)}"]
    return Picture(
        used=" ".join([f"0,{HEIGHT}", *used, f"{WIDTH},{HEIGHT}"]),
        size=" ".join(steps),
        top_bytes=top_bytes,
        begins_at=begins_at,
        ends_at=ends_at,
    )
