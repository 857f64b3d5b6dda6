"""Snapshots, restores, forks and templates of sandboxes, on a host in memory."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from django.conf import settings
from django.db import connection, connections
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries
from pytest_django.fixtures import Settings

from accounts.models import AuditEvent, Team
from accounts.services import Doer
from hosts.models import Generation, Volume
from sandboxes import cuts, history, operations, services, snapshots
from sandboxes.errors import (
    BadLimit,
    IdempotencyConflict,
    MomentNotFound,
    QuotaExceeded,
    SnapshotNotFound,
    TemplateExists,
    TemplateNotReady,
    WakingUp,
    WrongState,
)
from sandboxes.models import SNAPSHOT_ID, Cut, Sandbox, Snapshot, Template
from sandboxes.snapshots import Repeatable
from tests.fakes.host import FakeHost

pytestmark = pytest.mark.django_db(transaction=True)

T = TypeVar("T")
State = Sandbox.State
BY = Doer()
CRASH = Cut.Consistency.CRASH


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def take(sandbox: Sandbox, **fields: Any) -> Snapshot:
    return run(snapshots.take_snapshot(sandbox=sandbox, by=BY, **fields))


def fork(sandbox: Sandbox, **fields: Any) -> Sandbox:
    return run(snapshots.fork(sandbox=sandbox, by=BY, **fields))


def restore(sandbox: Sandbox, **fields: Any) -> Sandbox:
    return run(snapshots.restore(sandbox=sandbox, by=BY, **fields))


def write(machine: FakeHost, sandbox: Sandbox) -> None:
    """Have the guest write something."""
    machine.disks.disks[sandbox.volume_id].writes += 1


def head_of(sandbox: Sandbox) -> Generation:
    head = Volume.objects.select_related("head").get(pk=sandbox.volume_id).head
    assert head is not None
    return head


# -- snapshots ----------------------------------------------------------------------------


def test_a_snapshot_of_a_running_sandbox_is_stored_and_it_runs_on(
    at_once: FakeHost, running: Sandbox
) -> None:
    write(at_once, running)

    snapshot = take(running, name="first", description="before the upgrade")

    assert SNAPSHOT_ID.fullmatch(snapshot.id)
    assert snapshot.generation == head_of(running)
    assert head_of(running).kind == Generation.Kind.CHECKPOINT
    assert at_once.disks.disks[running.volume_id].writes == 0
    running.refresh_from_db()
    assert running.state == State.RUNNING
    event = AuditEvent.objects.get(action="sandbox.snapshot")
    assert event.attributes["snapshot_id"] == snapshot.id


def test_one_of_a_sandbox_that_wrote_nothing_names_what_is_there(
    at_once: FakeHost, running: Sandbox, template: Template
) -> None:
    snapshot = take(running)

    assert snapshot.generation == template.generation
    assert not Volume.objects.get(pk=running.volume_id).generations.exists()


def test_one_of_a_paused_sandbox_is_its_head(at_once: FakeHost, paused: Sandbox) -> None:
    assert take(paused).generation == head_of(paused)


def test_files_edited_while_paused_are_in_it(at_once: FakeHost, paused: Sandbox) -> None:
    services.request_files(sandbox=paused)
    write(at_once, paused)

    snapshot = take(paused)

    assert snapshot.generation is not None
    assert snapshot.generation.kind == Generation.Kind.FILES
    assert snapshot.generation == head_of(paused)


def test_files_that_are_only_read_stay_open(at_once: FakeHost, paused: Sandbox) -> None:
    services.request_files(sandbox=paused)

    take(paused)

    paused.volume.refresh_from_db()
    assert paused.volume.attached_for == Volume.Purpose.FILES


def test_a_guest_that_does_not_answer_gives_none_and_says_so(
    at_once: FakeHost, running: Sandbox
) -> None:
    at_once.silent.add(running.uuid)
    write(at_once, running)

    with pytest.raises(cuts.CutFailed, match="did not answer"):
        take(running)

    assert not Snapshot.objects.exists()
    assert at_once.disks.disks[running.volume_id].writes == 1


def test_it_gives_one_as_after_a_power_failure_where_that_is_asked_for(
    at_once: FakeHost, running: Sandbox
) -> None:
    at_once.silent.add(running.uuid)
    write(at_once, running)

    snapshot = take(running, consistency=CRASH)

    assert snapshot.generation == head_of(running)
    assert at_once.disks.disks[running.volume_id].writes == 0


def test_what_is_wanted_at_once_shares_one_cut(at_once: FakeHost, running: Sandbox) -> None:
    write(at_once, running)
    asked = [cuts.want_cut(running) for _ in range(10)]

    operations.cut(running.id)

    generations = {Cut.objects.get(pk=cut.pk).generation_id for cut in asked}
    assert generations == {head_of(running).pk}
    assert Volume.objects.get(pk=running.volume_id).generations.count() == 1


def test_a_wait_that_is_too_long_takes_the_wish_back(
    machine: FakeHost, running: Sandbox, settings: Settings
) -> None:
    settings.CUT_TIMEOUT_S = 0

    with pytest.raises(cuts.CutFailed, match="in time"):
        take(running)

    operations.cut(running.id)
    assert not Snapshot.objects.exists()
    assert Cut.objects.get().state == Cut.State.FAILED


def test_a_cut_that_waits_is_done_by_a_pause_that_comes_first(
    machine: FakeHost, running: Sandbox
) -> None:
    write(machine, running)
    cut = snapshots.request_cut(sandbox=running)
    services.pause_sandbox(sandbox=running)
    with pytest.raises(operations.CutTooSoon):
        operations.cut(running.id)
    operations.pause(running.id)

    operations.cut(running.id)

    cut.refresh_from_db()
    assert cut.generation == head_of(running)
    assert head_of(running).kind == Generation.Kind.PAUSE


def test_a_cut_whose_message_is_lost_is_asked_for_again(
    machine: FakeHost, running: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = snapshots.request_cut(sandbox=running)
    services.pause_sandbox(sandbox=running)
    operations.pause(running.id)

    snapshots.repeat_cut_requests(timezone.now())

    cut.refresh_from_db()
    assert cut.state == Cut.State.DONE


def test_a_cut_of_a_sandbox_that_is_deleted_fails(machine: FakeHost, running: Sandbox) -> None:
    cut = snapshots.request_cut(sandbox=running)
    services.delete_sandbox(sandbox=running)

    operations.cut(running.id)

    cut.refresh_from_db()
    assert cut.state == Cut.State.FAILED


def test_a_failed_or_ending_sandbox_gives_none(at_once: FakeHost, paused: Sandbox) -> None:
    Sandbox.objects.filter(pk=paused.pk).update(state=State.TERMINATING)

    with pytest.raises(WrongState):
        take(paused)


def test_an_end_that_has_passed_is_refused(at_once: FakeHost, paused: Sandbox) -> None:
    with pytest.raises(BadLimit, match="future"):
        take(paused, expires_at=timezone.now())

    assert not Cut.objects.exists()


def test_an_expired_one_is_gone_and_is_let_go(at_once: FakeHost, paused: Sandbox) -> None:
    snapshot = take(paused, expires_at=timezone.now() + timedelta(hours=1))
    Snapshot.objects.update(expires_at=timezone.now() - timedelta(seconds=1))

    assert not Snapshot.objects.present().exists()
    with pytest.raises(SnapshotNotFound):
        snapshots.find_snapshot(snapshot.id, paused.team)
    snapshots.delete_expired_snapshots()

    snapshot.refresh_from_db()
    assert snapshot.generation is None
    assert snapshot.deleted_at is not None


def test_one_survives_its_sandbox_and_can_be_claimed(
    at_once: FakeHost, running: Sandbox, claim: Callable[..., Sandbox]
) -> None:
    write(at_once, running)
    snapshot = take(running)
    services.delete_sandbox(sandbox=running)
    history.Thinner().step()

    sandbox = claim(snapshot_id=snapshot.id)

    assert head_of(sandbox) == snapshot.generation
    assert sandbox.snapshot == snapshot
    sandbox.refresh_from_db()
    assert sandbox.state == State.RUNNING


def test_a_claim_of_anothers_or_a_deleted_one_is_not_found(
    at_once: FakeHost, paused: Sandbox, claim: Callable[..., Sandbox], mallorys_team: Team
) -> None:
    snapshot = take(paused)

    with pytest.raises(SnapshotNotFound):
        claim(mallorys_team, snapshot_id=snapshot.id)
    snapshots.delete_snapshot(snapshot=snapshot, by=BY)
    with pytest.raises(SnapshotNotFound):
        claim(snapshot_id=snapshot.id)
    with pytest.raises(SnapshotNotFound):
        snapshots.delete_snapshot(snapshot=snapshot, by=BY)


# -- restore ------------------------------------------------------------------------------


def test_a_restore_moves_the_head_and_leaves_the_sandbox_asleep(
    at_once: FakeHost, running: Sandbox
) -> None:
    write(at_once, running)
    snapshot = take(running)
    write(at_once, running)
    services.pause_sandbox(sandbox=running)
    later = head_of(running)
    assert later != snapshot.generation

    restored = restore(running, snapshot_id=snapshot.id)

    assert snapshot.generation is not None
    assert restored.state == State.PAUSED
    head = head_of(running)
    assert head.kind == Generation.Kind.RESTORE
    assert head.root_key == snapshot.generation.root_key
    assert head.number == later.number + 1
    services.resume_sandbox(sandbox=restored)
    disk = at_once.disks.disks[running.volume_id]
    assert disk.root_key == snapshot.generation.root_key


def test_what_a_restore_left_can_be_had_back(at_once: FakeHost, running: Sandbox) -> None:
    snapshot = take(running)
    write(at_once, running)
    services.pause_sandbox(sandbox=running)
    later = head_of(running)
    restore(running, snapshot_id=snapshot.id)

    restore(running, generation=later.number)

    assert head_of(running).root_key == later.root_key


def test_files_edited_just_before_are_committed_first(
    at_once: FakeHost, paused: Sandbox
) -> None:
    snapshot = take(paused)
    services.request_files(sandbox=paused)
    write(at_once, paused)

    restore(paused, snapshot_id=snapshot.id)

    kinds = [one.generation.kind for one in history.history_of(reread(paused))[0]]
    assert kinds == ["restore", "files"]
    assert not at_once.files.is_open(paused.volume_id)
    paused.volume.refresh_from_db()
    assert paused.volume.attached_host is None


def reread(sandbox: Sandbox) -> Sandbox:
    return Sandbox.objects.select_related("volume__head", "team").get(pk=sandbox.pk)


def test_files_whose_host_does_not_close_them_keep_it_waiting(
    machine: FakeHost, paused: Sandbox, settings: Settings
) -> None:
    settings.CUT_TIMEOUT_S = 0
    services.request_files(sandbox=paused)
    before = head_of(paused)

    with pytest.raises(WakingUp):
        restore(paused, generation=before.number)

    assert head_of(paused) == before


def test_only_a_paused_sandbox_is_restored(at_once: FakeHost, running: Sandbox) -> None:
    snapshot = take(running)

    with pytest.raises(WrongState):
        restore(running, snapshot_id=snapshot.id)


def test_what_is_not_there_is_not_found_whatever_the_sandbox_does(
    at_once: FakeHost, running: Sandbox
) -> None:
    with pytest.raises(SnapshotNotFound):
        restore(running, snapshot_id="snap-nowhere")
    with pytest.raises(MomentNotFound):
        restore(running, generation=99)


def test_a_moment_that_the_history_lacks_is_not_found(
    at_once: FakeHost, paused: Sandbox
) -> None:
    with pytest.raises(MomentNotFound):
        restore(paused, generation=99)
    with pytest.raises(MomentNotFound):
        fork(paused, generation=99)


def test_another_teams_snapshot_is_not_restored(
    at_once: FakeHost, paused: Sandbox, claim: Callable[..., Sandbox], mallorys_team: Team
) -> None:
    theirs = claim(mallorys_team)
    snapshot = take(theirs)
    before = head_of(paused)

    with pytest.raises(SnapshotNotFound):
        restore(paused, snapshot_id=snapshot.id)

    assert head_of(paused) == before


# -- forks --------------------------------------------------------------------------------


def test_a_fork_is_a_paused_sandbox_of_its_own(at_once: FakeHost, running: Sandbox) -> None:
    write(at_once, running)
    Sandbox.objects.update(ttl_s=60, hard_ttl_s=3600, env_vars={"A": "1"}, auto_resume=False)

    child = fork(running, ttl_s=0)

    assert child.id != running.id
    assert child.uuid != running.uuid
    assert child.state == State.PAUSED
    assert child.parent == running
    assert child.host is None
    assert head_of(child) == head_of(running)
    assert child.volume_id != running.volume_id
    assert (child.ttl_s, child.hard_ttl_s) == (0, 3600)
    assert child.hard_expires_at is not None
    assert (child.env_vars, child.auto_resume) == ({"A": "1"}, False)
    assert (child.template, child.memory_bytes) == (running.template, running.memory_bytes)
    running.refresh_from_db()
    assert running.state == State.RUNNING


def test_it_starts_and_writes_to_its_own_disk_alone(
    at_once: FakeHost, running: Sandbox
) -> None:
    write(at_once, running)
    child = fork(running)
    parents = head_of(running)

    services.resume_sandbox(sandbox=child)
    write(at_once, child)
    services.pause_sandbox(sandbox=child)

    child.refresh_from_db()
    assert child.state == State.PAUSED
    assert child.runtime_generation == 1
    assert head_of(child).volume_id == child.volume_id
    assert head_of(child).number == parents.number + 1
    assert head_of(running) == parents


def test_forks_of_forks_survive_all_above_them(at_once: FakeHost, running: Sandbox) -> None:
    write(at_once, running)
    child = fork(running)
    grandchild = fork(child)
    wanted = head_of(grandchild)
    for sandbox in (running, child):
        services.delete_sandbox(sandbox=sandbox)
    make_old(days=2)
    Cut.objects.all().delete()
    history.Thinner().step()

    services.resume_sandbox(sandbox=grandchild)

    assert head_of(grandchild) == wanted
    assert at_once.disks.disks[grandchild.volume_id].root_key == wanted.root_key


def make_old(**age: float) -> None:
    Generation.objects.update(created_at=timezone.now() - timedelta(**age))


def test_ten_at_once_are_ten_sandboxes(at_once: FakeHost, running: Sandbox) -> None:
    write(at_once, running)

    def one(_: int) -> str:
        try:
            return fork(running).id
        finally:
            connections.close_all()

    with ThreadPoolExecutor(10) as pool:
        ids = set(pool.map(one, range(10)))

    assert len(ids) == 10
    assert running.forks.count() == 10


def test_the_same_key_gives_the_same_fork(at_once: FakeHost, running: Sandbox) -> None:
    first = fork(running, repeatable=Repeatable(key="k", body_digest="1"))
    again = fork(running, repeatable=Repeatable(key="k", body_digest="1"))

    assert again == first
    with pytest.raises(IdempotencyConflict):
        fork(running, repeatable=Repeatable(key="k", body_digest="2"))
    assert running.forks.count() == 1


def test_a_team_that_keeps_all_it_may_forks_no_more(
    at_once: FakeHost, running: Sandbox
) -> None:
    Team.objects.update(paused_limit=0)

    with pytest.raises(QuotaExceeded):
        fork(running)

    assert not Cut.objects.exists()


def test_limits_that_do_not_go_together_are_refused(
    at_once: FakeHost, running: Sandbox
) -> None:
    with pytest.raises(BadLimit):
        fork(running, ttl_s=100, hard_ttl_s=10)


def test_a_moment_before_can_be_forked(at_once: FakeHost, running: Sandbox) -> None:
    write(at_once, running)
    first = take(running).generation
    write(at_once, running)
    take(running)
    assert first is not None

    child = fork(running, generation=first.number)

    assert head_of(child) == first


# -- templates ----------------------------------------------------------------------------


def create_template(sandbox: Sandbox, name: str = "mine", **fields: Any) -> Template:
    return snapshots.create_template_from_sandbox(
        sandbox=sandbox, template_id=name, by=BY, **fields
    )


def test_a_template_is_ready_once_its_host_has_cut(
    machine: FakeHost, running: Sandbox, claim: Callable[..., Sandbox]
) -> None:
    write(machine, running)

    template = create_template(running, overrides={"displayName": "Mine", "tags": ["a"]})

    assert template.creation == "creating"
    with pytest.raises(TemplateNotReady):
        services.claim_sandbox(team=running.team, template_id="mine")
    operations.cut(running.id)

    template.refresh_from_db()
    assert template.creation == "ready"
    assert template.generation == head_of(running)
    assert template.spec["displayName"] == "Mine"
    assert re.fullmatch(
        r"sandkeep/mine@sha256:[0-9a-f]{64}", template.spec["mainContainer"]["image"]
    )
    sandbox = services.claim_sandbox(team=running.team, template_id="mine")
    assert head_of(sandbox) == template.generation


def test_one_of_a_paused_sandbox_is_ready_at_once(at_once: FakeHost, paused: Sandbox) -> None:
    template = create_template(paused)

    assert template.creation == "ready"
    assert template.generation == head_of(paused)


def test_one_whose_cut_fails_says_so(machine: FakeHost, running: Sandbox) -> None:
    machine.silent.add(running.uuid)
    template = create_template(running)

    operations.cut(running.id)

    template.refresh_from_db()
    assert template.creation == "failed"
    assert "did not answer" in template.creation_error


def test_an_id_is_used_once(at_once: FakeHost, paused: Sandbox) -> None:
    create_template(paused)

    with pytest.raises(TemplateExists):
        create_template(paused)

    assert Template.objects.filter(template_id="mine").count() == 1


def test_the_same_key_gives_the_same_template(at_once: FakeHost, paused: Sandbox) -> None:
    repeatable = Repeatable(key="k", body_digest="1")

    assert create_template(paused, repeatable=repeatable) == create_template(
        paused, repeatable=repeatable
    )


def test_it_survives_its_source_and_its_sandboxes_survive_it(
    at_once: FakeHost, running: Sandbox
) -> None:
    write(at_once, running)
    template = create_template(running)
    services.delete_sandbox(sandbox=running)
    Cut.objects.all().delete()
    make_old(days=2)
    history.Thinner().step()
    template.refresh_from_db()
    generation = template.generation

    sandbox = services.claim_sandbox(team=running.team, template_id="mine")
    snapshots.delete_template(template=template, by=BY)
    history.Thinner().step()

    sandbox.refresh_from_db()
    assert sandbox.template is None
    assert head_of(sandbox) == generation
    assert not Template.objects.filter(template_id="mine").exists()


def test_a_template_can_be_deleted_while_it_is_made(
    machine: FakeHost, running: Sandbox
) -> None:
    template = create_template(running)
    snapshots.delete_template(template=template, by=BY)

    operations.cut(running.id)

    assert Cut.objects.get().state == Cut.State.DONE


# -- cost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("generations", [1, 40])
def test_a_fork_costs_as_many_queries_however_much_there_is(
    at_once: FakeHost,
    paused: Sandbox,
    generations: int,
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    for number in range(100, 100 + generations):
        Generation.objects.create(
            volume=paused.volume,
            number=number,
            epoch=1,
            kind="background",
            root_key="r",
            size_bytes=1,
        )
    cut = snapshots.request_cut(sandbox=paused)

    with django_assert_max_num_queries(22, connection=connection):
        snapshots.fork_of(
            sandbox=paused, by=BY, cut=cut, generation=None, ttl_s=None, hard_ttl_s=None
        )


def test_cuts_are_forgotten_and_let_their_generations_go(
    at_once: FakeHost, paused: Sandbox
) -> None:
    assert cuts.KEPT.total_seconds() > settings.CUT_TIMEOUT_S
    snapshots.request_cut(sandbox=paused)
    cuts.forget_cuts()
    assert Cut.objects.exists()

    Cut.objects.update(keep_until=timezone.now() - timedelta(seconds=1))
    cuts.forget_cuts()

    assert not Cut.objects.exists()
