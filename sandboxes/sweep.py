"""What the scheduler does each second: time limits, and hints that were lost.

It decides nothing by itself: it asks the rows what is due, and each service checks again
under the row's lock.
"""

import logging
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from django.db.models import Q
from django.utils import timezone

from billing.models import MeterInterval
from billing.services import close_interval
from common.errors import DomainError
from common.queue import send_to
from hosts.models import Host
from sandboxes import actors, cuts, moments, services, snapshots, storage, templates
from sandboxes.history import Thinner
from sandboxes.host_loss import HostWatch, leave_host
from sandboxes.models import Sandbox

log = logging.getLogger(__name__)

State = Sandbox.State

# A message that a worker has not begun to act on after this long was lost, or its worker
# was. A second one does no harm.
HINT_AFTER = timedelta(seconds=20)
WATCH_EVERY_S = 2
FORGET_EVERY_S = 3_600
METER_EVERY_S = 60
# What is deleted stops being billed when the collector finds it dead.
COLLECT_EVERY_S = 300
ORPHANS_EVERY_S = 24 * 3_600
# A host that is silent for this long is billed for to no one.
HOST_LOST_AFTER = timedelta(seconds=60)
# One sweep looks at this many rows of a kind; the next second there is another sweep.
BATCH = 200

HINTS = {
    State.STARTING: actors.boot_sandbox,
    State.RESUMING: actors.boot_sandbox,
    State.PAUSING: actors.pause_sandbox,
    State.TERMINATING: actors.destroy_sandbox,
}


class Sweeper:
    """The scheduler's memory between two sweeps: what it did when."""

    def __init__(self) -> None:
        self._hinted_at: dict[tuple[str, str], datetime] = {}
        self._done_at: dict[Callable[[], None], float] = {}
        self._host_watch = HostWatch()
        self._thinner = Thinner()

    def sweep(self) -> None:
        """Do what is due now. One part that fails does not keep the others from it."""
        for step, every_s in (
            (end_expired, 0.0),
            (pause_expired, 0.0),
            (self.repeat_hints, 5.0),
            (watch_hosts, WATCH_EVERY_S),
            (close_orphaned_intervals, 5.0),
            (self.leave_lost_hosts, 5.0),
            (repeat_cut_requests, 5.0),
            (cuts.fail_late_cuts, 5.0),
            (cuts.forget_cuts, 60.0),
            (snapshots.delete_expired_snapshots, 1.0),
            (moments.forget_lost_views, 30.0),
            (templates.fail_stuck_imports, 60.0),
            (self._thinner.step, 5.0),
            (services.forget_old_claims, FORGET_EVERY_S),
            (storage.meter_storage, METER_EVERY_S),
            (collect_store, COLLECT_EVERY_S),
            (sweep_orphans, ORPHANS_EVERY_S),
        ):
            now = time.monotonic()
            if now - self._done_at.get(step, -ORPHANS_EVERY_S) < every_s:
                continue
            self._done_at[step] = now
            step()

    def repeat_hints(self) -> None:
        """Send the message of a move again that has not ended in time."""
        now = timezone.now()
        stuck = Sandbox.objects.filter(
            state__in=HINTS, state_changed_at__lt=now - HINT_AFTER
        ).select_related("host", "volume__attached_host")
        for sandbox in stuck.order_by("state_changed_at")[:BATCH]:
            key = (sandbox.id, sandbox.state)
            if now - self._hinted_at.get(key, datetime.min.replace(tzinfo=now.tzinfo)) < (
                HINT_AFTER
            ):
                continue
            self._hinted_at[key] = now
            host = sandbox.host or sandbox.volume.attached_host
            if host is not None:
                actors.send(HINTS[State(sandbox.state)], host.queue, sandbox.id)
        horizon = now - 3 * HINT_AFTER
        self._hinted_at = {k: at for k, at in self._hinted_at.items() if at > horizon}

    def leave_lost_hosts(self) -> None:
        """Let sandboxes go on elsewhere whose host has been silent for too long."""
        for host in self._host_watch.lost():
            leave_host(host)


def repeat_cut_requests() -> None:
    """Ask hosts again for cuts that are wanted for a while."""
    snapshots.repeat_cut_requests(timezone.now() - HINT_AFTER)


def end_expired() -> None:
    """Delete the sandboxes whose hard limit has passed, asleep or not."""
    due = Sandbox.objects.filter(hard_expires_at__lte=timezone.now()).exclude(
        state__in=(State.TERMINATING, State.DELETED)
    )
    for sandbox in due.order_by("hard_expires_at")[:BATCH]:
        _try(services.end_if_expired, sandbox)


def pause_expired() -> None:
    """Pause the sandboxes whose soft limit has passed."""
    due = Sandbox.objects.filter(expires_at__lte=timezone.now(), state=State.RUNNING)
    for sandbox in due.order_by("expires_at")[:BATCH]:
        _try(services.pause_if_expired, sandbox)


def _try(service: Callable[..., None], sandbox: Sandbox) -> None:
    try:
        service(sandbox=sandbox)
    except DomainError as error:
        # Somebody was faster, or it is between two states: it is looked at again.
        log.info("sandbox %s: %s", sandbox.id, error)


def watch_hosts() -> None:
    """Ask each host's worker to look around, which is also its heartbeat."""
    for host in Host.objects.all():
        send_to(host.queue, actors.watch_host)


def collect_store() -> None:
    """Ask a host to collect what no generation needs."""
    _ask_any_host(actors.collect_store)


def sweep_orphans() -> None:
    """Ask a host to look for objects that no row knows."""
    _ask_any_host(actors.sweep_orphans)


def _ask_any_host(actor: actors.HostActor) -> None:
    """Send to a living host, another each time: one that hangs must not be asked for ever."""
    host = Host.objects.alive().order_by("?").first()
    if host is not None:
        send_to(host.queue, actor)


def close_orphaned_intervals() -> None:
    """Stop the meters of what has no guest: never bill for a process that crashed."""
    open_now = MeterInterval.objects.filter(
        meter=MeterInterval.Meter.MEMORY, period__upper_inf=True
    )
    subjects = set(open_now.values_list("subject_id", flat=True))
    lost = timezone.now() - HOST_LOST_AFTER
    running = Q(state=State.RUNNING, host__seen_at__gt=lost)
    wrong = Sandbox.objects.filter(pk__in=subjects).exclude(running).select_related("host")
    for sandbox in wrong:
        at = sandbox.state_changed_at
        if sandbox.state == State.RUNNING and sandbox.host and sandbox.host.seen_at:
            at = sandbox.host.seen_at
        close_interval(subject_id=sandbox.id, meter=MeterInterval.Meter.MEMORY, at=at)
