"""Cuts: a committed state of a sandbox's disk, wanted by a request, found by its host.

    paused, files not open    its head, at once
    paused, files open        its head, once what was edited is committed
    running                   sync, freeze, rotate, thaw; then upload and publish
    on its way                what it comes to

A snapshot, a fork and a template are each made of the generation of one, so none of them
costs more than what changed since the last commit. Cuts that are wanted at the same time
share one.
"""

import asyncio
from collections.abc import Collection
from datetime import timedelta
from typing import ClassVar
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from common.api.database import run_db
from common.errors import Unavailable
from hosts.models import Generation, Volume
from hosts.services import keep_generation
from sandboxes import templates
from sandboxes.errors import WrongState
from sandboxes.events import announce, watching
from sandboxes.models import Cut, Sandbox

State = Sandbox.State

# The generation of a cut is kept this long for whoever waited for it.
KEPT = timedelta(hours=1)
# A host that has not done it by then will not; nobody waits for longer.
GIVE_UP_AFTER = timedelta(minutes=10)
LOOK_AGAIN_S = 1.0

NEVER = frozenset({State.FAILED, State.TERMINATING, State.DELETED})
"""States from which no cut can come any more."""

NO_ANSWER = (
    "The guest did not answer, so its file system could not be brought to rest. Try again, "
    'or ask for "consistency": "crash": the disk as a power failure would leave it.'
)


class CutFailed(Unavailable):
    """There is no cut; the sandbox is as it was."""

    code: ClassVar[str] = "unavailable"
    retry_after_s = 1

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def want_cut(
    sandbox: Sandbox, consistency: Cut.Consistency = Cut.Consistency.FILESYSTEM
) -> Cut:
    """Record that a cut is wanted of a sandbox, whose row is locked.

    It is done at once where the head is all there is. Otherwise the sandbox's host has to be
    asked.

    Raises:
        WrongState: there will be none.
    """
    if sandbox.state in NEVER:
        raise WrongState(sandbox.wire_status, what="be kept as a snapshot")
    cut = Cut(sandbox=sandbox, consistency=consistency)
    if sandbox.state == State.PAUSED and sandbox.volume.attached_for == Volume.Purpose.NONE:
        now = timezone.now()
        cut.state = Cut.State.DONE
        cut.generation = sandbox.volume.head
        cut.ended_at = now
        cut.keep_until = now + KEPT
    cut.save(force_insert=True)
    return cut


def wanted_cuts(sandbox: Sandbox) -> list[Cut]:
    """Return the sandbox's cuts that are yet to be made, in the order of their requests."""
    wanted = Cut.objects.filter(sandbox=sandbox, state=Cut.State.WANTED)
    return list(wanted.order_by("requested_at"))


def end_cuts(sandbox: Sandbox, cuts: Collection[Cut], generation: Generation) -> None:
    """Note that a published generation has what these cuts wanted."""
    now = timezone.now()
    with transaction.atomic():
        keep_generation(generation)
        done = _still_wanted(cuts)
        Cut.objects.filter(pk__in=done).update(
            state=Cut.State.DONE, generation=generation, ended_at=now, keep_until=now + KEPT
        )
        templates.finish_captured(done, generation, at=now)
        announce(sandbox)


def fail_cuts(sandbox: Sandbox, cuts: Collection[Cut], reason: str) -> None:
    """Note that these cuts could not be made, and why."""
    now = timezone.now()
    with transaction.atomic():
        failed = _still_wanted(cuts)
        Cut.objects.filter(pk__in=failed).update(
            state=Cut.State.FAILED, error=reason[:300], ended_at=now
        )
        templates.fail_captured(failed, reason, at=now)
        announce(sandbox)


def _still_wanted(cuts: Collection[Cut]) -> list[UUID]:
    wanted = Cut.objects.select_for_update().filter(
        pk__in=[cut.pk for cut in cuts], state=Cut.State.WANTED
    )
    return [cut.pk for cut in wanted.order_by("pk")]


async def finished(cut: Cut) -> Cut:
    """Wait until the cut is done; it then has its generation, which is published.

    Raises:
        CutFailed: it could not be made, or not in time; it never will be.
    """
    if cut.state == Cut.State.WANTED:
        cut = await _wait(cut)
    if cut.state != Cut.State.DONE:
        raise CutFailed(cut.error or "The sandbox's disk could not be stored.")
    return cut


async def _wait(cut: Cut) -> Cut:
    loop = asyncio.get_running_loop()
    until = loop.time() + settings.CUT_TIMEOUT_S
    async with watching(cut.sandbox_id) as changes:
        while True:
            found = await run_db(_read, cut.pk)
            if found.state != Cut.State.WANTED:
                return found
            left_s = until - loop.time()
            if left_s <= 0:
                return await run_db(_give_up, cut)
            await changes.wait(min(left_s, LOOK_AGAIN_S))


def _read(cut_id: UUID) -> Cut:
    return Cut.objects.select_related("generation").get(pk=cut_id)


def _give_up(cut: Cut) -> Cut:
    """Take back what was wanted, unless it has just been done."""
    fail_cuts(cut.sandbox, [cut], "The sandbox's disk was not stored in time. Try again.")
    return _read(cut.pk)


def fail_late_cuts() -> None:
    """Give up on cuts that no host has made for long, so that nothing waits for ever."""
    late = Cut.objects.filter(
        state=Cut.State.WANTED, requested_at__lt=timezone.now() - GIVE_UP_AFTER
    )
    for cut in late.select_related("sandbox")[:200]:
        fail_cuts(cut.sandbox, [cut], "The sandbox's disk was not stored in time.")


def forget_cuts() -> None:
    """Let go of generations that nobody can wait for any more."""
    now = timezone.now()
    Cut.objects.filter(state=Cut.State.DONE, keep_until__lt=now).delete()
    Cut.objects.filter(state=Cut.State.FAILED, ended_at__lt=now - KEPT).delete()
