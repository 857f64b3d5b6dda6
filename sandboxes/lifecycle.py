"""The moves of a sandbox that need more than its own row: quota, place, meter.

Each is one transaction; none does anything outside the database. `services` calls them for
requests, `operations` for what follows from work that ended.
"""

from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from accounts.models import Team
from billing.models import MeterInterval
from billing.services import close_interval, open_interval
from hosts.models import Host, Placement
from hosts.services import detach_volume, place, release_place
from sandboxes.errors import QuotaExceeded
from sandboxes.events import announce
from sandboxes.models import Run, Sandbox

MEMORY = MeterInterval.Meter.MEMORY
State = Sandbox.State

HOST_LOST = "Its host was lost; it goes on from what was stored last."


def lock_team(team: Team) -> Team:
    """Lock the team's row, so that two requests cannot both take its last place."""
    return Team.objects.select_for_update().get(pk=team.pk)


def check_running_quota(team: Team) -> None:
    """Refuse one more active sandbox where the team, locked, has all it may.

    Raises:
        QuotaExceeded: it has.
    """
    if Sandbox.objects.of(team).active().count() >= team.running_limit:
        raise QuotaExceeded("active_sandboxes", team.running_limit)


def check_paused_quota(team: Team) -> None:
    """Refuse one more sandbox where the team, locked, keeps as many asleep as it may.

    Raises:
        QuotaExceeded: it does.
    """
    if Sandbox.objects.of(team).asleep().count() >= team.paused_limit:
        raise QuotaExceeded("paused_sandboxes", team.paused_limit)


def begin_resume(sandbox: Sandbox) -> None:
    """Move a paused sandbox to `resuming`, with a place on a host and a new generation.

    Raises:
        QuotaExceeded, NoCapacity, WrongState: nothing has changed.
    """
    with transaction.atomic():
        check_running_quota(lock_team(sandbox.team))
        placement = _place(sandbox)
        now = timezone.now()
        sandbox.move_to(
            State.RESUMING,
            runtime_generation=sandbox.runtime_generation + 1,
            host=placement.host,
            address=placement.address,
            expires_at=deadline(now, sandbox.ttl_s),
            resume_when_paused=False,
            pause_reason="",
            last_error="",
        )
        announce(sandbox)


def _place(sandbox: Sandbox) -> Placement:
    return place(
        guest_uuid=sandbox.uuid,
        memory_bytes=sandbox.memory_bytes,
        prefer=sandbox.volume.attached_host,
    )


def begin_pause(
    sandbox: Sandbox, reason: Sandbox.PauseReason, *, then_resume: bool = False
) -> None:
    """Move a running sandbox to `pausing`. From this moment its memory is not billed.

    Raises:
        WrongState: it does not run.
    """
    now = timezone.now()
    with transaction.atomic():
        sandbox.move_to(
            State.PAUSING,
            pause_reason=reason,
            expires_at=None,
            resume_when_paused=then_resume,
            last_error="",
        )
        close_interval(subject_id=sandbox.id, meter=MEMORY, at=now)
        announce(sandbox)


def refuse_pause(sandbox: Sandbox, reason: str) -> None:
    """Let a sandbox run on whose pause could not be carried out, and say why."""
    now = timezone.now()
    with transaction.atomic():
        retry_at = None
        if sandbox.pause_reason == Sandbox.PauseReason.TTL:
            retry_at = now + timedelta(seconds=30)
        sandbox.move_to(
            State.RUNNING, last_error=reason, expires_at=retry_at, resume_when_paused=False
        )
        _bill(sandbox, now)
        announce(sandbox)


def end_pause(sandbox: Sandbox, *, epoch: int, error: str = "") -> None:
    """Note that everything is committed: the sandbox sleeps, its host is free of it.

    Args:
        error: why some of it is not, where the host that had it is lost.
    """
    now = timezone.now()
    with transaction.atomic():
        sandbox.move_to(
            State.PAUSED,
            paused_at=now,
            host=None,
            address=None,
            runtime_id="",
            health="",
            expires_at=None,
            last_error=error,
        )
        _leave_host(sandbox, epoch=epoch)
        end_run(sandbox, now, "paused")
        announce(sandbox)


def abandon_resume(sandbox: Sandbox, *, epoch: int | None, reason: str) -> None:
    """Put a sandbox that would not resume back to sleep, as it was, and say why."""
    with transaction.atomic():
        sandbox.move_to(
            State.PAUSED,
            host=None,
            address=None,
            runtime_id="",
            expires_at=None,
            last_error=reason,
        )
        _leave_host(sandbox, epoch=epoch)
        announce(sandbox)


def abandon_start(sandbox: Sandbox, *, epoch: int | None, reason: str) -> None:
    """Mark a sandbox failed that never ran."""
    with transaction.atomic():
        sandbox.move_to(State.FAILED, host=None, address=None, last_error=reason)
        _leave_host(sandbox, epoch=epoch)
        announce(sandbox)


def _leave_host(sandbox: Sandbox, *, epoch: int | None) -> None:
    release_place(sandbox.uuid)
    if epoch is not None:
        detach_volume(sandbox.volume_id, epoch=epoch)


def begin_running(sandbox: Sandbox, *, fetched_bytes: int) -> None:
    """Note that the guest is ready. From this moment its memory is billed.

    Raises:
        WrongState: it was deleted meanwhile; its guest must not stay.
    """
    now = timezone.now()
    assert sandbox.host is not None
    with transaction.atomic():
        requested_at = sandbox.state_changed_at
        sandbox.move_to(
            State.RUNNING,
            started_at=now,
            runtime_id=f"{sandbox.uuid.hex[:12]}-{sandbox.runtime_generation}",
            health="",
        )
        _bill(sandbox, now)
        Run.objects.update_or_create(
            sandbox=sandbox,
            runtime_generation=sandbox.runtime_generation,
            defaults={
                "host": sandbox.host,
                "memory_bytes": sandbox.memory_bytes,
                "requested_at": requested_at,
                "ready_at": now,
                "fetched_bytes": fetched_bytes,
            },
        )
        announce(sandbox)


def begin_recovery(sandbox: Sandbox, reason: str) -> None:
    """Start a sandbox anew whose guest died, on the disk that its host still has.

    Raises:
        WrongState: it no longer runs, by somebody's wish.
    """
    now = timezone.now()
    with transaction.atomic():
        end_run(sandbox, now, "died")
        sandbox.move_to(
            State.RESUMING,
            runtime_generation=sandbox.runtime_generation + 1,
            last_error=reason,
            health="",
        )
        close_interval(subject_id=sandbox.id, meter=MEMORY, at=now)
        announce(sandbox)


def relocate(sandbox: Sandbox, *, lost_host: Host) -> None:
    """Start a sandbox on another host, from its head, since its own is lost.

    Its volume was seized before. Billed until the host was last heard of.

    Raises:
        NoCapacity: no other host has room; nothing has changed.
        WrongState: it moved on meanwhile.
    """
    last_seen_at = lost_host.seen_at or timezone.now()
    with transaction.atomic():
        release_place(sandbox.uuid)
        placement = _place(sandbox)
        end_run(sandbox, last_seen_at, "host lost")
        is_new = sandbox.state == State.STARTING
        sandbox.move_to(
            State.STARTING if is_new else State.RESUMING,
            runtime_generation=sandbox.runtime_generation + 1,
            host=placement.host,
            address=placement.address,
            last_error=HOST_LOST,
            health="",
        )
        close_interval(subject_id=sandbox.id, meter=MEMORY, at=last_seen_at)
        announce(sandbox)


def resume_instead_of_pause(sandbox: Sandbox) -> None:
    """Start a sandbox again, where it is, whose pause waits for the object store."""
    now = timezone.now()
    with transaction.atomic():
        end_run(sandbox, now, "paused")
        sandbox.move_to(
            State.RESUMING,
            runtime_generation=sandbox.runtime_generation + 1,
            expires_at=deadline(now, sandbox.ttl_s),
            resume_when_paused=False,
            pause_reason="",
            health="",
        )
        announce(sandbox)


def begin_termination(sandbox: Sandbox) -> None:
    """Move a sandbox to its end. From this moment its memory is not billed."""
    now = timezone.now()
    with transaction.atomic():
        sandbox.move_to(
            State.TERMINATING, expires_at=None, hard_expires_at=None, resume_when_paused=False
        )
        close_interval(subject_id=sandbox.id, meter=MEMORY, at=now)
        end_run(sandbox, now, "deleted")
        announce(sandbox)


def end_termination(sandbox: Sandbox) -> None:
    """Note that nothing of the sandbox is left on any host."""
    now = timezone.now()
    with transaction.atomic():
        volume = sandbox.volume
        sandbox.move_to(State.DELETED, deleted_at=now, host=None, address=None, runtime_id="")
        _leave_host(sandbox, epoch=volume.epoch)
        type(volume).objects.filter(pk=volume.pk).update(deleted_at=now)
        announce(sandbox)


def end_run(sandbox: Sandbox, at: datetime, reason: str) -> None:
    """Close the record of the run that is under way, if there is one."""
    sandbox.runs.filter(ended_at=None).update(ended_at=at, end_reason=reason)


def resume_billing(sandbox: Sandbox) -> None:
    """Bill a running sandbox whose meter was stopped while its host was silent."""
    _bill(sandbox, timezone.now())


def _bill(sandbox: Sandbox, at: datetime) -> None:
    open_interval(
        team=sandbox.team,
        subject_id=sandbox.id,
        meter=MEMORY,
        quantity=sandbox.memory_mib,
        at=at,
    )


def deadline(now: datetime, span_s: int) -> datetime | None:
    """Return the moment that a time limit ends at; None where it is off (0)."""
    return now + timedelta(seconds=span_s) if span_s else None
