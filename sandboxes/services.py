"""What a request may ask of a sandbox. Each function records it and queues the work."""

from datetime import timedelta
from functools import partial

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone

from accounts.models import ApiKey, Team, User
from accounts.services import Doer, record_event
from hosts.errors import NoCapacity
from hosts.models import Host, Volume
from hosts.services import attach_volume, new_volume, place
from sandboxes import actors, lifecycle
from sandboxes.errors import (
    BadLimit,
    IdempotencyConflict,
    SnapshotNotFound,
    TemplateNotFound,
    TemplateNotReady,
    WrongState,
)
from sandboxes.events import announce
from sandboxes.lifecycle import deadline
from sandboxes.models import (
    SNAPSHOT_ID,
    ClaimRecord,
    Sandbox,
    Snapshot,
    Template,
    new_sandbox_id,
)

State = Sandbox.State

# Five random letters can collide; four tries in a row will not.
ID_TRIES = 4


def claim_sandbox(
    *,
    team: Team,
    template_id: str,
    snapshot_id: str | None = None,
    user: User | None = None,
    api_key: ApiKey | None = None,
    memory_bytes: int | None = None,
    ttl_s: int = 0,
    hard_ttl_s: int = 0,
    auto_resume: bool = True,
    env_vars: dict[str, str] | None = None,
    idempotency_key: str | None = None,
    body_digest: str = "",
    source_ip: str | None = None,
) -> Sandbox:
    """Record a new sandbox of the team, with a place on a host, and queue its boot.

    With an idempotency key, the same body again returns the sandbox of the first call. With
    a snapshot its disk is that one's; the template decides all else.

    Raises:
        TemplateNotFound, TemplateNotReady, SnapshotNotFound, BadLimit, QuotaExceeded,
            NoCapacity: nothing was recorded.
        IdempotencyConflict: the key came with another body before.
    """
    check_limits(ttl_s, hard_ttl_s)
    with transaction.atomic():
        team = lifecycle.lock_team(team)
        if idempotency_key is not None:
            earlier = earlier_request(team, idempotency_key, body_digest)
            if earlier is not None and earlier.sandbox is not None:
                return earlier.sandbox
        template = _ready_template(team, template_id)
        snapshot = None if snapshot_id is None else held_snapshot(team, snapshot_id)
        lifecycle.check_running_quota(team)
        lifecycle.check_paused_quota(team)
        now = timezone.now()
        sandbox = Sandbox(
            team=team,
            created_by=user or (api_key.created_by if api_key else None),
            api_key=api_key,
            template=template,
            template_name=template.template_id,
            snapshot=snapshot,
            memory_bytes=memory_bytes or template.memory_bytes,
            env_vars=template.spec.get("envVars", {}) | (env_vars or {}),
            ttl_s=ttl_s,
            hard_ttl_s=hard_ttl_s,
            expires_at=deadline(now, ttl_s),
            hard_expires_at=deadline(now, hard_ttl_s),
            auto_resume=auto_resume,
            claimed_at=now,
        )
        placement = place(guest_uuid=sandbox.uuid, memory_bytes=sandbox.memory_bytes)
        sandbox.host = placement.host
        sandbox.address = placement.address
        # The head is another disk's: nothing is copied.
        head = snapshot.generation if snapshot else template.generation
        sandbox.volume = new_volume(owner=str(team.pk), head=head)
        insert(sandbox)
        if idempotency_key is not None:
            ClaimRecord.objects.create(
                team=team, key=idempotency_key, body_digest=body_digest, sandbox=sandbox
            )
        by = Doer(user=sandbox.created_by, api_key=api_key, source_ip=source_ip)
        record(sandbox, "claim", by, template=sandbox.template_name)
        announce(sandbox)
        send_to_host(actors.boot_sandbox, sandbox, placement.host)
    return sandbox


def check_limits(ttl_s: int, hard_ttl_s: int) -> None:
    """Refuse a sandbox that would be deleted before it is paused.

    Raises:
        BadLimit: it would.
    """
    if ttl_s and hard_ttl_s and ttl_s > hard_ttl_s:
        raise BadLimit("ttl", "must not be longer than hard_ttl")


def earlier_request(team: Team, key: str, body_digest: str) -> ClaimRecord | None:
    """Return what an earlier request with this Idempotency-Key made.

    Raises:
        IdempotencyConflict: it was another request.
    """
    found = ClaimRecord.objects.filter(team=team, key=key)
    record = found.select_related("sandbox__team", "template").first()
    if record is not None and record.body_digest != body_digest:
        raise IdempotencyConflict
    return record


def _ready_template(team: Team, template_id: str) -> Template:
    """Return the team's template of this id, or else the public one."""
    found = Template.objects.visible_to(team).filter(template_id=template_id.lower())
    template = found.order_by(F("team_id").asc(nulls_last=True)).first()
    if template is None:
        raise TemplateNotFound(template_id)
    if not template.is_ready:
        raise TemplateNotReady(template_id)
    return template


def held_snapshot(team: Team, snapshot_id: str) -> Snapshot:
    """Return the team's snapshot, which stays until the transaction ends.

    Raises:
        SnapshotNotFound: it has none of this id (any more).
    """
    found = None
    if SNAPSHOT_ID.fullmatch(snapshot_id):
        snapshots = Snapshot.objects.of(team).present().select_for_update(of=("self",))
        found = snapshots.select_related("generation").filter(pk=snapshot_id).first()
    if found is None:
        raise SnapshotNotFound
    return found


def insert(sandbox: Sandbox) -> None:
    """Store a new sandbox under an id that nobody has."""
    for attempt in range(ID_TRIES):
        sandbox.id = new_sandbox_id(settings.CLUSTER_KEY, sandbox.template_name)
        try:
            with transaction.atomic():
                sandbox.save(force_insert=True)
        except IntegrityError:
            if attempt == ID_TRIES - 1:
                raise
        else:
            return


def pause_sandbox(
    *,
    sandbox: Sandbox,
    reason: Sandbox.PauseReason = Sandbox.PauseReason.REQUEST,
    by: Doer | None = None,
) -> Sandbox:
    """Stop billing the sandbox and queue its pause; pausing a paused one changes nothing.

    Raises:
        WrongState: it neither runs nor sleeps.
    """
    with transaction.atomic():
        sandbox = locked(sandbox)
        if sandbox.state in (State.PAUSED, State.PAUSING):
            if sandbox.resume_when_paused:
                sandbox.resume_when_paused = False
                sandbox.save(update_fields=["resume_when_paused"])
            return sandbox
        if sandbox.state != State.RUNNING:
            raise WrongState(sandbox.wire_status, State.PAUSED)
        lifecycle.begin_pause(sandbox, reason)
        record(sandbox, "pause", by, reason=str(reason))
        send_to_host(actors.pause_sandbox, sandbox, sandbox.host)
    return sandbox


def resume_sandbox(*, sandbox: Sandbox, by: Doer | None = None) -> Sandbox:
    """Queue a paused sandbox's start; resuming one that runs or starts changes nothing.

    One that is on its way to sleep is woken as soon as it is there.

    Raises:
        QuotaExceeded, NoCapacity: it sleeps on.
        WrongState: it failed or is being deleted.
    """
    with transaction.atomic():
        sandbox = locked(sandbox)
        if sandbox.state in (State.RUNNING, State.STARTING, State.RESUMING):
            return sandbox
        if sandbox.state == State.PAUSING:
            if not sandbox.resume_when_paused:
                sandbox.resume_when_paused = True
                sandbox.save(update_fields=["resume_when_paused"])
                # It may wait for the object store: then it can start again at once.
                send_to_host(actors.pause_sandbox, sandbox, sandbox.host)
            return sandbox
        if sandbox.state != State.PAUSED:
            raise WrongState(sandbox.wire_status, State.RUNNING)
        lifecycle.begin_resume(sandbox)
        record(sandbox, "resume", by)
        send_to_host(actors.boot_sandbox, sandbox, sandbox.host)
    return sandbox


def delete_sandbox(*, sandbox: Sandbox, by: Doer | None = None) -> None:
    """Stop billing the sandbox and queue its end; nothing of it can be had back."""
    with transaction.atomic():
        sandbox = locked(sandbox)
        if sandbox.state == State.DELETED:
            return
        host = sandbox.host or sandbox.volume.attached_host
        if sandbox.state != State.TERMINATING:
            lifecycle.begin_termination(sandbox)
            record(sandbox, "delete", by)
        if host is None:
            # Asleep, on no host: there is nothing to take down.
            lifecycle.end_termination(sandbox)
            return
        send_to_host(actors.destroy_sandbox, sandbox, host)


def update_lifetime(
    *,
    sandbox: Sandbox,
    ttl_s: int | None = None,
    hard_ttl_s: int | None = None,
    auto_resume: bool | None = None,
    by: Doer | None = None,
) -> Sandbox:
    """Change how long the sandbox may run and live; what is None stays as it is.

    Limits count from now. A paused sandbox's `ttl` starts to count when it resumes.

    Raises:
        BadLimit: the ttl would outlast the hard ttl.
        WrongState: it is being deleted.
    """
    with transaction.atomic():
        sandbox = locked(sandbox)
        refuse_if_ending(sandbox)
        check_limits(
            sandbox.ttl_s if ttl_s is None else ttl_s,
            sandbox.hard_ttl_s if hard_ttl_s is None else hard_ttl_s,
        )
        now = timezone.now()
        if ttl_s is not None:
            sandbox.ttl_s = ttl_s
            if sandbox.state not in (State.PAUSED, State.PAUSING):
                sandbox.expires_at = deadline(now, ttl_s)
        if hard_ttl_s is not None:
            sandbox.hard_ttl_s = hard_ttl_s
            sandbox.hard_expires_at = deadline(now, hard_ttl_s)
        if auto_resume is not None:
            sandbox.auto_resume = auto_resume
        sandbox.save(
            update_fields=[
                "ttl_s",
                "hard_ttl_s",
                "expires_at",
                "hard_expires_at",
                "auto_resume",
                "updated_at",
            ]
        )
        record(
            sandbox,
            "update",
            by,
            ttl_s=sandbox.ttl_s,
            hard_ttl_s=sandbox.hard_ttl_s,
            auto_resume=sandbox.auto_resume,
        )
        announce(sandbox)
    return sandbox


def refresh_sandbox(*, sandbox: Sandbox, duration_s: int | None = None) -> Sandbox:
    """Push both deadlines out from now; `duration_s` replaces the span of the soft one.

    Raises:
        BadLimit: the duration would outlast the hard limit.
        WrongState: it is being deleted.
    """
    with transaction.atomic():
        sandbox = locked(sandbox)
        refuse_if_ending(sandbox)
        now = timezone.now()
        span_s = sandbox.ttl_s if duration_s is None else duration_s
        check_limits(span_s, sandbox.hard_ttl_s)
        if sandbox.state not in (State.PAUSED, State.PAUSING):
            sandbox.expires_at = deadline(now, span_s)
        sandbox.hard_expires_at = deadline(now, sandbox.hard_ttl_s)
        sandbox.save(update_fields=["expires_at", "hard_expires_at", "updated_at"])
        announce(sandbox)
    return sandbox


def update_memory(*, sandbox: Sandbox, memory_bytes: int, by: Doer | None = None) -> Sandbox:
    """Give the sandbox another size of memory. A running one restarts on its files.

    Raises:
        WrongState: it is neither running nor paused; ask again when it is.
    """
    with transaction.atomic():
        sandbox = locked(sandbox)
        refuse_if_ending(sandbox)
        if sandbox.memory_bytes == memory_bytes:
            return sandbox
        if sandbox.state not in (State.RUNNING, State.PAUSED):
            raise WrongState(sandbox.wire_status, what="be given another size of memory")
        sandbox.memory_bytes = memory_bytes
        sandbox.save(update_fields=["memory_bytes", "updated_at"])
        record(sandbox, "update", by, memory_bytes=memory_bytes)
        if sandbox.state == State.RUNNING:
            lifecycle.begin_pause(sandbox, Sandbox.PauseReason.MEMORY, then_resume=True)
            send_to_host(actors.pause_sandbox, sandbox, sandbox.host)
        announce(sandbox)
    return sandbox


def checkpoint_sandbox(*, sandbox: Sandbox) -> None:
    """Queue a commit of a running sandbox's disk.

    Raises:
        WrongState: it does not run.
    """
    if sandbox.state != State.RUNNING:
        raise WrongState(sandbox.wire_status, what="be checkpointed")
    with transaction.atomic():
        send_to_host(actors.checkpoint_sandbox, sandbox, sandbox.host)


def request_files(*, sandbox: Sandbox) -> Volume | None:
    """Ask a host to serve a paused sandbox's files; does nothing while one does.

    They are served once `volume.files_ready_at` is set.

    Returns: the volume, and with it its host, where that was given it only now: nothing of
        it is open there. None where a host has it, which may be opening it or closing it.

    Raises:
        NoCapacity: no host lives.
        WrongState: it does not sleep (any more).
    """
    with transaction.atomic():
        sandbox = locked(sandbox)
        if sandbox.state != State.PAUSED:
            raise WrongState(sandbox.wire_status, what="have the files of its sleep opened")
        volume = sandbox.volume
        if volume.files_ready_at is not None:
            return None
        is_new = volume.attached_host is None
        if is_new:
            volume.attached_host = host_for_files()
            attach_volume(volume.pk, host=volume.attached_host, purpose=Volume.Purpose.FILES)
        send_to_host(actors.open_files, sandbox, volume.attached_host)
    return volume if is_new else None


def host_for_files() -> Host:
    """Return the living host with the least promised; files need next to no memory."""
    host = Host.objects.alive().filter(is_open=True).order_by("promised_bytes", "pk").first()
    if host is None:
        raise NoCapacity(0)
    return host


def locked(sandbox: Sandbox) -> Sandbox:
    """Read the sandbox again, its row locked until the transaction ends."""
    return (
        Sandbox.objects.select_for_update(of=("self",))
        .select_related("team", "host", "volume__attached_host", "volume__head")
        .get(pk=sandbox.pk)
    )


def record(sandbox: Sandbox, act: str, by: Doer | None, **attributes: object) -> None:
    """Write the team's audit trail; what nobody asked for, the platform did by itself."""
    by = by or Doer()
    record_event(
        team=sandbox.team,
        action=f"sandbox.{act}",
        resource_type="sandbox",
        resource_id=sandbox.id,
        user=by.user,
        api_key=by.api_key,
        attributes=attributes,
        source_ip=by.source_ip,
    )


def refuse_if_ending(sandbox: Sandbox) -> None:
    """Raise WrongState where the sandbox is being deleted."""
    if sandbox.state in (State.TERMINATING, State.DELETED):
        raise WrongState(sandbox.wire_status, what="be changed")


def send_to_host(actor: actors.HostActor, subject: Sandbox | str, host: Host | None) -> None:
    """Queue work for a host's worker, once the transaction has committed.

    Args:
        subject: a sandbox, or the id of what the actor works on.
    """
    assert host is not None
    subject_id = subject.id if isinstance(subject, Sandbox) else subject
    transaction.on_commit(partial(actors.send, actor, host.queue, subject_id))


def forget_old_claims() -> None:
    """Drop idempotency keys that nobody will repeat any more."""
    horizon = timezone.now() - timedelta(days=ClaimRecord.KEPT_DAYS)
    ClaimRecord.objects.filter(created_at__lt=horizon).delete()


def end_if_expired(*, sandbox: Sandbox) -> None:
    """Delete the sandbox if its hard limit has passed; looked at again under its lock."""
    with transaction.atomic():
        sandbox = locked(sandbox)
        if sandbox.hard_expires_at and sandbox.hard_expires_at <= timezone.now():
            delete_sandbox(sandbox=sandbox)


def pause_if_expired(*, sandbox: Sandbox) -> None:
    """Pause the sandbox if its soft limit has passed; looked at again under its lock."""
    with transaction.atomic():
        sandbox = locked(sandbox)
        if (
            sandbox.state == State.RUNNING
            and sandbox.expires_at
            and sandbox.expires_at <= timezone.now()
        ):
            pause_sandbox(sandbox=sandbox, reason=Sandbox.PauseReason.TTL)
