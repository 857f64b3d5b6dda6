"""The history of a sandbox's disk: its generations, the older the fewer.

Every commit is a moment that can be restored, forked or opened for its files. The scheduler
thins them out; what anything else names (a head, a snapshot, a template, a cut, an open
view) stays however old it is.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils import timezone

from hosts.models import Generation, Volume
from sandboxes.models import Sandbox, Snapshot

log = logging.getLogger(__name__)

# Volumes that one step of the thinning looks at.
BATCH = 200

UNNAMED = Q(
    heads__isnull=True,
    templates__isnull=True,
    snapshots__isnull=True,
    cuts__isnull=True,
    file_view__isnull=True,
)
"""Generations that nothing names but the history itself."""


@dataclass(frozen=True)
class Moment:
    """A generation of a sandbox's disk, and what keeps it."""

    generation: Generation
    is_current: bool
    snapshot_ids: list[str] = field(default_factory=list)


def history_of(
    sandbox: Sandbox, *, before: int | None = None, limit: int = 100
) -> tuple[list[Moment], int | None]:
    """Return the newest moments older than number `before`, and what to continue with.

    A disk that was never written to has the one moment that it began with, which is another
    disk's.
    """
    volume = sandbox.volume
    found = volume.generations.order_by("-number")
    if before is not None:
        found = found.filter(number__lt=before)
    generations = list(found[: limit + 1])
    head = volume.head
    if head is not None and head.volume_id != volume.pk and before is None:
        generations.insert(0, head)
    page = generations[:limit]
    names = _snapshots_of(sandbox, page)
    moments = [
        Moment(one, is_current=one.pk == volume.head_id, snapshot_ids=names.get(one.pk, []))
        for one in page
    ]
    return moments, page[-1].number if len(generations) > limit else None


def _snapshots_of(sandbox: Sandbox, page: Iterable[Generation]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    snapshots = Snapshot.objects.of(sandbox.team).present().filter(generation__in=list(page))
    for generation_id, snapshot_id in snapshots.values_list("generation_id", "pk"):
        assert generation_id is not None
        names.setdefault(generation_id, []).append(snapshot_id)
    return names


# -- thinning -----------------------------------------------------------------------------


class Tier(NamedTuple):
    """Up to this age, one moment in each span is kept; all, where the span is zero."""

    age: timedelta
    span: timedelta


def tiers() -> tuple[Tier, ...]:
    """Return how long which moments are kept, as the settings say."""
    return (
        Tier(timedelta(seconds=settings.HISTORY_ALL_S), timedelta(0)),
        Tier(timedelta(seconds=settings.HISTORY_MINUTES_S), timedelta(minutes=1)),
        Tier(timedelta(seconds=settings.HISTORY_TEN_MINUTES_S), timedelta(minutes=10)),
    )


def superfluous(
    moments: Iterable[tuple[int, datetime]], *, now: datetime, kept: tuple[Tier, ...]
) -> Iterator[int]:
    """Tell which moments (id, time) of one disk to drop, given the oldest first.

    Of those in one span the last is kept. Spans are counted from a fixed hour, so that the
    choice stays the same while moments grow older.
    """
    following: datetime | None = None
    for identity, at in reversed(list(moments)):
        tier = next((tier for tier in kept if now - at <= tier.age), None)
        if tier is None or (following is not None and _same_span(at, following, tier.span)):
            yield identity
        following = at


def _same_span(first: datetime, second: datetime, span: timedelta) -> bool:
    if not span:
        return False
    return first.timestamp() // span.total_seconds() == (
        second.timestamp() // span.total_seconds()
    )


class Thinner:
    """Goes round the disks, a batch at each step, and drops what the history keeps no more."""

    def __init__(self) -> None:
        self._after = UUID(int=0)

    def step(self) -> None:
        """Look at the next disks; begin again after the last."""
        volumes = list(
            Volume.objects.filter(pk__gt=self._after)
            .exclude(head=None)
            .exclude(owner="", deleted_at=None)
            .order_by("pk")
            .values_list("pk", "deleted_at")[:BATCH]
        )
        self._after = volumes[-1][0] if len(volumes) == BATCH else UUID(int=0)
        _forget([pk for pk, deleted_at in volumes if deleted_at is not None])
        _thin([pk for pk, deleted_at in volumes if deleted_at is None])


def _forget(deleted: list[UUID]) -> None:
    """Let the disks of deleted sandboxes go, but for what others were made of."""
    if not deleted:
        return
    Volume.objects.filter(pk__in=deleted).exclude(deleted_at=None).update(head=None)
    _drop(Generation.objects.filter(UNNAMED, volume__in=deleted).values_list("pk", flat=True))


def _thin(volume_ids: list[UUID]) -> None:
    now = timezone.now()
    kept = tiers()
    old = Generation.objects.filter(volume__in=volume_ids, created_at__lt=now - kept[0].age)
    rows = old.order_by("volume", "number").values_list("volume_id", "pk", "created_at")
    doomed: list[int] = []
    for _, moments in groupby(rows.iterator(), key=lambda row: row[0]):
        times = [(pk, created_at) for _, pk, created_at in moments]
        doomed += superfluous(times, now=now, kept=kept)
    _drop(doomed)


def _drop(ids: Iterable[int]) -> None:
    """Delete those of these generations that nothing names, each looked at under its lock."""
    wanted: Any = list(ids)
    for at in range(0, len(wanted), 500):
        batch = wanted[at : at + 500]
        try:
            with transaction.atomic():
                free = Generation.objects.filter(UNNAMED, pk__in=batch).values("pk")
                locked = Generation.objects.filter(pk__in=free).select_for_update(
                    skip_locked=True
                )
                Generation.objects.filter(pk__in=[one.pk for one in locked]).filter(
                    UNNAMED
                ).delete()
        except IntegrityError:
            # One was named in this very moment; the next round looks again.
            log.info("a generation was named while it was to be dropped")
