"""What becomes of sandboxes whose host is lost.

A host that is silent may be dead, cut off, or only slow: nothing here depends on which. Each
sandbox is taken from it in one transaction that raises its volume's epoch, so that whatever
the old host still uploads can never be published; then it goes on elsewhere from the last
commit that was. What is lost is what was not stored by then.

A host that comes back finds guests and disks that are no longer its own, and drops them.
"""

import logging
import time
from functools import partial

from django.conf import settings
from django.db import transaction
from django.db.models import BooleanField, ExpressionWrapper, Q

from accounts.services import record_event
from common.errors import DomainError
from hosts.models import Host, Volume
from hosts.services import seize_volume
from sandboxes import actors, lifecycle
from sandboxes.models import Sandbox

log = logging.getLogger(__name__)

State = Sandbox.State

# One look takes so many sandboxes from a host, or tries so many in vain; the next goes on.
BATCH = 100
MAX_IN_VAIN = 500


class HostWatch:
    """Tells which hosts are lost: silent for long, while others were heard.

    If no host is heard, it is the queue, the database or the scheduler that is away, and
    no host is to blame; nor is one for the time before this process began to listen.
    """

    def __init__(self) -> None:
        self._silent_since: dict[int, float] = {}

    def lost(self) -> list[Host]:
        """Look at all hosts; returns those that are lost."""
        hosts = list(Host.objects.all())
        now = time.monotonic()
        if not any(host.is_alive for host in hosts):
            self._silent_since = {}
            return []
        silent = [host for host in hosts if not host.is_alive]
        self._silent_since = {host.pk: self._silent_since.get(host.pk, now) for host in silent}
        limit_s = settings.HOST_LOST_AFTER_S
        return [h for h in silent if limit_s and now - self._silent_since[h.pk] >= limit_s]


def leave_host(host: Host) -> int:
    """Let the sandboxes of a lost host go on elsewhere; returns how many did.

    Those for which there is no room stay where they are, and are tried again.
    """
    moved = in_vain = 0
    there = Sandbox.objects.filter(Q(host=host) | Q(volume__attached_host=host))
    # Those that need no room elsewhere first: they must not wait behind those that do.
    needs_room = Q(state__in=[State.STARTING, State.RUNNING, State.RESUMING])
    left = (
        there.exclude(state=State.DELETED)
        .alias(needs_room=ExpressionWrapper(needs_room, BooleanField()))
        .order_by("needs_room", "?")
    )
    for sandbox in left[: BATCH + MAX_IN_VAIN]:
        if moved >= BATCH or in_vain >= MAX_IN_VAIN:
            break
        try:
            moved += _leave(sandbox, host)
        except DomainError as error:
            in_vain += 1
            log.warning("sandbox %s stays on lost host %s: %s", sandbox.id, host.name, error)
    return moved


def _leave(sandbox: Sandbox, host: Host) -> bool:
    with transaction.atomic():
        sandbox = (
            Sandbox.objects.select_for_update(of=("self",))
            .select_related("team", "host", "volume__attached_host")
            .get(pk=sandbox.pk)
        )
        volume = sandbox.volume
        if volume.attached_host_id == host.pk:
            sandbox.volume = volume = seize_volume(volume.pk, host=host)
        elif sandbox.host_id != host.pk:
            return False
        _go_on(sandbox, volume, host)
        record_event(
            team=sandbox.team,
            action="sandbox.host_lost",
            resource_type="sandbox",
            resource_id=sandbox.id,
            attributes={"host": host.name, "state": sandbox.state},
        )
    log.warning("sandbox %s has left lost host %s: %s", sandbox.id, host.name, sandbox.state)
    return True


def _go_on(sandbox: Sandbox, volume: Volume, host: Host) -> None:
    if sandbox.state in (State.STARTING, State.RUNNING, State.RESUMING):
        lifecycle.relocate(sandbox, lost_host=host)
        assert sandbox.host is not None
        queue_name = sandbox.host.queue
        transaction.on_commit(partial(actors.send, actors.boot_sandbox, queue_name, sandbox.id))
    elif sandbox.state == State.PAUSING:
        lifecycle.end_pause(sandbox, epoch=volume.epoch, error=lifecycle.HOST_LOST)
    elif sandbox.state == State.TERMINATING:
        lifecycle.end_termination(sandbox)
