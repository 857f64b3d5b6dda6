"""Snapshots, restores, forks and templates of sandboxes, as requests ask for them.

Each names a generation that is in the store already, so all cost the same however large the
disk is. What has to be cut first is waited for in `made_from`, by the handlers, who hold no
thread meanwhile.
"""

import asyncio
import copy
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from accounts.models import Team
from accounts.services import Doer, record_event
from common.api.database import run_db
from common.units import MiB
from hosts.models import Generation, Volume
from hosts.services import keep_generation, new_volume, publish_generation
from sandboxes import actors, cuts, lifecycle, templates
from sandboxes.errors import (
    BadLimit,
    MomentNotFound,
    SnapshotNotFound,
    TemplateExists,
    TemplateIsPublic,
    TemplateNotFound,
    WakingUp,
    WrongState,
)
from sandboxes.events import announce, watching
from sandboxes.lifecycle import deadline
from sandboxes.models import (
    SNAPSHOT_ID,
    ClaimRecord,
    Cut,
    Sandbox,
    Snapshot,
    Template,
    new_snapshot_id,
)
from sandboxes.services import (
    check_limits,
    earlier_request,
    held_snapshot,
    insert,
    locked,
    record,
    refuse_if_ending,
    send_to_host,
)

State = Sandbox.State

# A list that grows without end would not be answered any more.
MAX_SNAPSHOTS = 1000
LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Repeatable:
    """An Idempotency-Key, and a digest of the request that it came with."""

    key: str
    body_digest: str


# -- cuts ---------------------------------------------------------------------------------


def request_cut(
    *, sandbox: Sandbox, consistency: Cut.Consistency = Cut.Consistency.FILESYSTEM
) -> Cut:
    """Record that a committed state of the sandbox's disk is wanted, and ask its host.

    Raises:
        WrongState: there will be none.
    """
    with transaction.atomic():
        sandbox = locked(sandbox)
        cut = cuts.want_cut(sandbox, consistency)
        if cut.state == Cut.State.WANTED:
            send_cut(sandbox)
    return cut


def send_cut(sandbox: Sandbox) -> None:
    """Ask the host that has the sandbox's disk for the cuts that are wanted of it."""
    host = sandbox.host or sandbox.volume.attached_host
    if host is not None:
        send_to_host(actors.cut_sandbox, sandbox, host)


def repeat_cut_requests(older_than: datetime) -> None:
    """Ask again for cuts whose message was lost, or whose sandbox has moved since."""
    late = Sandbox.objects.filter(
        cuts__state=Cut.State.WANTED, cuts__requested_at__lt=older_than
    ).distinct()
    for sandbox in late.select_related("host", "volume__attached_host")[:200]:
        if sandbox.host is None and sandbox.volume.attached_host is None:
            _settle(sandbox)
        else:
            send_cut(sandbox)


def _settle(sandbox: Sandbox) -> None:
    """End the cuts of a sandbox that is on no host (any more)."""
    with transaction.atomic():
        sandbox = locked(sandbox)
        wanted = cuts.wanted_cuts(sandbox)
        if sandbox.state in cuts.NEVER:
            cuts.fail_cuts(sandbox, wanted, f"The sandbox is {sandbox.wire_status}.")
        elif sandbox.state == State.PAUSED and sandbox.volume.attached_host is None:
            assert sandbox.volume.head is not None
            cuts.end_cuts(sandbox, wanted, sandbox.volume.head)


async def cut_of(sandbox: Sandbox, consistency: Cut.Consistency) -> Cut:
    """Return a finished cut of the sandbox as it is now.

    Raises:
        WrongState: there can be none.
        CutFailed: it could not be made, or not in time.
    """
    cut = await run_db(request_cut, sandbox=sandbox, consistency=consistency)
    return await cuts.finished(cut)


# -- snapshots ----------------------------------------------------------------------------


def check_expiry(expires_at: datetime | None) -> None:
    """Refuse an end that has passed.

    Raises:
        BadLimit: it has.
    """
    if expires_at is not None and expires_at <= timezone.now():
        raise BadLimit("expires_at", "must lie in the future")


async def take_snapshot(
    *,
    sandbox: Sandbox,
    by: Doer,
    name: str = "",
    description: str = "",
    expires_at: datetime | None = None,
    consistency: Cut.Consistency = Cut.Consistency.FILESYSTEM,
) -> Snapshot:
    """Keep the sandbox's disk as it is now; a running one runs on.

    Raises:
        BadLimit, WrongState: nothing was recorded.
        CutFailed: it could not be made, or not in time.
    """
    check_expiry(expires_at)
    await run_db(_check_room_for_snapshots, sandbox)
    cut = await cut_of(sandbox, consistency)
    return await run_db(
        keep_cut,
        cut=cut,
        by=by,
        name=name,
        description=description,
        expires_at=expires_at,
    )


def keep_cut(
    *, cut: Cut, by: Doer, name: str, description: str, expires_at: datetime | None
) -> Snapshot:
    """Make a snapshot of a finished cut.

    Raises:
        BadLimit, WrongState: nothing was recorded.
    """
    check_expiry(expires_at)
    with transaction.atomic():
        sandbox = locked(cut.sandbox)
        refuse_if_ending(sandbox)
        snapshot = Snapshot.objects.create(
            id=new_snapshot_id(),
            team=sandbox.team,
            sandbox=sandbox,
            created_by=_person(by),
            name=name,
            description=description,
            generation=cut.generation,
            expires_at=expires_at,
        )
        record(sandbox, "snapshot", by, snapshot_id=snapshot.id, name=name)
        announce(sandbox)
    return snapshot


def _check_room_for_snapshots(sandbox: Sandbox) -> None:
    if Snapshot.objects.present().filter(sandbox=sandbox).count() >= MAX_SNAPSHOTS:
        raise BadLimit("snapshots", f"a sandbox has at most {MAX_SNAPSHOTS}; delete some first")


def _person(by: Doer) -> Any:
    return by.user or (by.api_key.created_by if by.api_key else None)


def find_snapshot(snapshot_id: str, team: Team) -> Snapshot:
    """Return the team's snapshot.

    Raises:
        SnapshotNotFound: the id is malformed, unknown, deleted, or another team's.
    """
    if SNAPSHOT_ID.fullmatch(snapshot_id):
        found = Snapshot.objects.of(team).present().select_related("generation", "sandbox")
        snapshot = found.filter(pk=snapshot_id).first()
        if snapshot is not None:
            return snapshot
    raise SnapshotNotFound


def delete_snapshot(*, snapshot: Snapshot, by: Doer) -> None:
    """Let a snapshot go. What was made of it stays as it is."""
    with transaction.atomic():
        snapshot = held_snapshot(snapshot.team, snapshot.id)
        _let_go(snapshot)
        record_event(
            team=snapshot.team,
            action="snapshot.delete",
            resource_type="snapshot",
            resource_id=snapshot.id,
            user=by.user,
            api_key=by.api_key,
            attributes={"sandbox_id": snapshot.sandbox_id},
            source_ip=by.source_ip,
        )
        announce(snapshot.sandbox)


def delete_expired_snapshots() -> None:
    """Let the snapshots go whose time is up."""
    due = Snapshot.objects.filter(expires_at__lte=timezone.now(), deleted_at=None)
    with transaction.atomic():
        for snapshot in due.select_for_update(skip_locked=True, of=("self",))[:200]:
            _let_go(snapshot)


def _let_go(snapshot: Snapshot) -> None:
    snapshot.deleted_at = timezone.now()
    snapshot.generation = None
    snapshot.save(update_fields=["deleted_at", "generation"])


# -- moments of the past ------------------------------------------------------------------


def held_moment(sandbox: Sandbox, number: int) -> Generation:
    """Return a generation of the sandbox's history, which stays until the transaction ends.

    Raises:
        MomentNotFound: there is none of this number (any more).
    """
    volume = sandbox.volume
    head = volume.head
    found = volume.generations.filter(number=number).first()
    if found is None and head is not None and head.number == number:
        found = head
    if found is None:
        raise MomentNotFound(number)
    keep_generation(found)
    return found


# -- restore ------------------------------------------------------------------------------


async def restore(
    *, sandbox: Sandbox, by: Doer, snapshot_id: str | None = None, generation: int | None = None
) -> Sandbox:
    """Put a paused sandbox's disk back to a snapshot, or to a moment of its own history.

    What was written since stays in the history for as long as that is kept.

    Raises:
        SnapshotNotFound, MomentNotFound, WrongState: it is as it was.
        WakingUp: its files are open, and were not closed in time.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + settings.CUT_TIMEOUT_S
    async with watching(sandbox.id) as changes:
        while True:
            restored = await run_db(
                _restore_if_closed,
                sandbox=sandbox,
                by=by,
                snapshot_id=snapshot_id,
                generation=generation,
            )
            if restored is not None:
                return restored
            left_s = until - loop.time()
            if left_s <= 0:
                raise WakingUp
            await changes.wait(min(left_s, LOOK_AGAIN_S))


def _restore_if_closed(
    *, sandbox: Sandbox, by: Doer, snapshot_id: str | None, generation: int | None
) -> Sandbox | None:
    """Restore, or have the files closed first, which keeps what was edited, and return None."""
    with transaction.atomic():
        sandbox = locked(sandbox)
        snapshot = None if snapshot_id is None else held_snapshot(sandbox.team, snapshot_id)
        if snapshot is not None:
            wanted = snapshot.generation
        else:
            assert generation is not None
            wanted = held_moment(sandbox, generation)
        if sandbox.state != State.PAUSED:
            raise WrongState(sandbox.wire_status, what="be restored; pause it first")
        assert wanted is not None
        if sandbox.volume.attached_host is not None:
            send_to_host(actors.close_files, sandbox, sandbox.volume.attached_host)
            return None
        _move_head(sandbox.volume, wanted)
        sandbox.snapshot = snapshot or sandbox.snapshot
        sandbox.last_error = ""
        sandbox.save(update_fields=["snapshot", "last_error", "updated_at"])
        record(
            sandbox, "restore", by, **_present(snapshot_id=snapshot_id, generation=generation)
        )
        announce(sandbox)
    return sandbox


def _move_head(volume: Volume, wanted: Generation) -> None:
    """Publish a new generation of the volume with the content of an earlier or foreign one."""
    keep_generation(wanted)
    is_own = wanted.volume_id == volume.pk
    learned = wanted.start_blocks
    volume.head = publish_generation(
        volume.pk,
        epoch=volume.epoch,
        kind=Generation.Kind.RESTORE,
        root_key=wanted.root_key,
        size_bytes=wanted.size_bytes,
        stored_bytes=wanted.stored_bytes if is_own else 0,
        start_blocks=None if learned is None else bytes(learned),
    )


def _present(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


# -- fork ---------------------------------------------------------------------------------


async def fork(
    *,
    sandbox: Sandbox,
    by: Doer,
    ttl_s: int | None = None,
    hard_ttl_s: int | None = None,
    generation: int | None = None,
    consistency: Cut.Consistency = Cut.Consistency.FILESYSTEM,
    repeatable: Repeatable | None = None,
) -> Sandbox:
    """Make a paused sandbox of its own that begins with this one's disk.

    It inherits the source's settings, but for the limits given here (0 turns one off).

    Raises:
        BadLimit, QuotaExceeded, MomentNotFound, WrongState, IdempotencyConflict: nothing
            was recorded.
        CutFailed: the source's disk could not be stored, or not in time.
    """
    earlier = await run_db(_earlier_fork, sandbox, ttl_s, hard_ttl_s, repeatable)
    if earlier is not None:
        return earlier
    cut = None if generation is not None else await cut_of(sandbox, consistency)
    return await run_db(
        fork_of,
        sandbox=sandbox,
        by=by,
        cut=cut,
        generation=generation,
        ttl_s=ttl_s,
        hard_ttl_s=hard_ttl_s,
        repeatable=repeatable,
    )


def _earlier_fork(
    source: Sandbox,
    ttl_s: int | None,
    hard_ttl_s: int | None,
    repeatable: Repeatable | None,
) -> Sandbox | None:
    """Find out what can be refused, or answered, before the source's disk is cut for it."""
    if repeatable is not None:
        earlier = earlier_request(source.team, repeatable.key, repeatable.body_digest)
        if earlier is not None:
            return earlier.sandbox
    check_limits(_or(ttl_s, source.ttl_s), _or(hard_ttl_s, source.hard_ttl_s))
    lifecycle.check_paused_quota(source.team)
    return None


def _or(given: int | None, inherited: int) -> int:
    return inherited if given is None else given


def fork_of(
    *,
    sandbox: Sandbox,
    by: Doer,
    cut: Cut | None,
    generation: int | None,
    ttl_s: int | None,
    hard_ttl_s: int | None,
    repeatable: Repeatable | None = None,
) -> Sandbox:
    """Record the fork of a sandbox, from a finished cut or a moment of its history.

    Raises:
        BadLimit, QuotaExceeded, MomentNotFound, WrongState, IdempotencyConflict: nothing
            was recorded.
    """
    with transaction.atomic():
        # The sandbox before its team, as a resume locks them.
        source = locked(sandbox)
        team = lifecycle.lock_team(source.team)
        if repeatable is not None:
            earlier = earlier_request(team, repeatable.key, repeatable.body_digest)
            if earlier is not None and earlier.sandbox is not None:
                return earlier.sandbox
        refuse_if_ending(source)
        ttl_s, hard_ttl_s = _or(ttl_s, source.ttl_s), _or(hard_ttl_s, source.hard_ttl_s)
        check_limits(ttl_s, hard_ttl_s)
        lifecycle.check_paused_quota(team)
        if cut is not None:
            head = cut.generation
        else:
            assert generation is not None
            head = held_moment(source, generation)
        child = _child(source, by, ttl_s=ttl_s, hard_ttl_s=hard_ttl_s)
        child.volume = new_volume(owner=str(team.pk), head=head)
        insert(child)
        if repeatable is not None:
            ClaimRecord.objects.create(
                team=team,
                key=repeatable.key,
                body_digest=repeatable.body_digest,
                sandbox=child,
            )
        record(source, "fork", by, fork_id=child.id, **_present(generation=generation))
        announce(child)
    return child


def _child(source: Sandbox, by: Doer, *, ttl_s: int, hard_ttl_s: int) -> Sandbox:
    now = timezone.now()
    return Sandbox(
        team=source.team,
        created_by=_person(by),
        api_key=by.api_key,
        template=source.template,
        template_name=source.template_name,
        parent=source,
        state=State.PAUSED,
        # No guest of it has run: its first start is number 1, as anyone's.
        runtime_generation=0,
        memory_bytes=source.memory_bytes,
        env_vars=source.env_vars,
        ttl_s=ttl_s,
        hard_ttl_s=hard_ttl_s,
        hard_expires_at=deadline(now, hard_ttl_s),
        auto_resume=source.auto_resume,
        claimed_at=now,
        paused_at=now,
    )


# -- templates ----------------------------------------------------------------------------


def create_template_from_sandbox(
    *,
    sandbox: Sandbox,
    template_id: str,
    by: Doer,
    overrides: dict[str, Any] | None = None,
    repeatable: Repeatable | None = None,
) -> Template:
    """Record a template that will begin with the sandbox's disk as it is now.

    It can be claimed once its `creation` is ready, which the sandbox's host brings about.

    Raises:
        TemplateExists, WrongState, IdempotencyConflict: nothing was recorded.
    """
    with transaction.atomic():
        source = locked(sandbox)
        team = lifecycle.lock_team(source.team)
        if repeatable is not None:
            earlier = earlier_request(team, repeatable.key, repeatable.body_digest)
            if earlier is not None and earlier.template is not None:
                return earlier.template
        template = _new_template(source, template_id, overrides or {})
        template.cut = cut = request_cut(sandbox=source)
        insert_template(template)
        if cut.state == Cut.State.DONE:
            assert cut.generation is not None
            templates.make_ready(template, cut.generation, at=timezone.now())
        if repeatable is not None:
            ClaimRecord.objects.create(
                team=team,
                key=repeatable.key,
                body_digest=repeatable.body_digest,
                template=template,
            )
        record_template(template, "create", by, sandbox_id=source.id)
    return template


def _new_template(source: Sandbox, template_id: str, overrides: dict[str, Any]) -> Template:
    # Not the sandbox's own variables: they are where secrets are passed.
    origin = source.template
    spec: dict[str, Any] = copy.deepcopy(origin.spec) if origin else {"tags": []}
    spec["mainContainer"] = {
        **spec.get("mainContainer", {}),
        "image": f"sandkeep/{template_id}",
        "resources": {"memory": f"{source.memory_bytes // MiB}Mi"},
    }
    spec["displayName"] = template_id
    spec["description"] = f"Made from {source.id}."
    return Template(
        team=source.team,
        template_id=template_id,
        spec=spec | overrides,
        memory_bytes=source.memory_bytes,
        creation=Template.Creation.CREATING,
    )


def insert_template(template: Template) -> None:
    """Store a new template.

    Raises:
        TemplateExists: the team has one of this id.
    """
    try:
        with transaction.atomic():
            template.save(force_insert=True)
    except IntegrityError as error:
        raise TemplateExists(template.template_id) from error


def delete_template(*, template: Template, by: Doer) -> None:
    """Delete a team's template. Sandboxes that were made of it stay as they are.

    Raises:
        TemplateIsPublic: it is not the team's.
        TemplateNotFound: it is gone already.
    """
    if template.team is None:
        raise TemplateIsPublic
    with transaction.atomic():
        found = Template.objects.select_for_update(of=("self",)).filter(pk=template.pk).first()
        if found is None:
            raise TemplateNotFound(template.template_id)
        record_template(found, "delete", by)
        found.delete()


def record_template(template: Template, act: str, by: Doer, **attributes: object) -> None:
    """Write into the team's audit trail what was done to its template."""
    assert template.team is not None
    record_event(
        team=template.team,
        action=f"template.{act}",
        resource_type="template",
        resource_id=template.template_id,
        user=by.user,
        api_key=by.api_key,
        attributes=attributes,
        source_ip=by.source_ip,
    )
