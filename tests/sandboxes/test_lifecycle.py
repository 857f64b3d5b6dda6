"""What a sandbox goes through, from claim to end, on a host in memory."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from accounts.models import Team
from billing.costs import cost_of
from billing.models import MeterInterval
from common.units import GiB
from hosts.errors import GuestBusy, NoCapacity
from hosts.guest.channel import AgentSilent
from hosts.hypervisor import GuestState
from hosts.models import Host, Placement, Volume
from hosts.volumes.errors import StoreUnavailable
from sandboxes import operations, services
from sandboxes.errors import BadLimit, IdempotencyConflict, QuotaExceeded, WrongState
from sandboxes.models import Sandbox
from tests.fakes.host import FakeHost, fake_hypervisor
from tests.fakes.hypervisor import FakeHypervisor

State = Sandbox.State
Claim = Callable[..., Sandbox]


def guest_state(sandbox: Sandbox) -> GuestState:
    with fake_hypervisor() as hypervisor:
        return hypervisor.state(sandbox.uuid)


def open_meters(sandbox: Sandbox) -> int:
    mine = MeterInterval.objects.filter(subject_id=sandbox.id)
    return mine.filter(period__upper_inf=True).count()


def write(machine: FakeHost, sandbox: Sandbox, blocks: int = 3) -> None:
    """Have the guest write to its disk."""
    machine.disks.disks[sandbox.volume_id].writes += blocks


# -- claim --------------------------------------------------------------------------------


def test_a_claim_records_a_place_and_copies_nothing(claim: Claim, host: Host) -> None:
    sandbox = claim()

    assert sandbox.state == State.STARTING
    assert sandbox.host == host
    assert sandbox.volume.head == sandbox.template.generation  # type: ignore[union-attr]
    host.refresh_from_db()
    assert host.promised_bytes == sandbox.memory_bytes
    assert open_meters(sandbox) == 0


def test_ids_are_dns_labels_that_say_the_template(claim: Claim) -> None:
    assert claim().id.startswith("rs-c1-default-")


def test_the_same_key_and_body_find_the_same_sandbox(claim: Claim) -> None:
    first = claim(idempotency_key="k", body_digest="d")
    second = claim(idempotency_key="k", body_digest="d")

    assert first.id == second.id
    assert Sandbox.objects.count() == 1


def test_the_same_key_with_another_body_is_refused(claim: Claim) -> None:
    claim(idempotency_key="k", body_digest="d")

    with pytest.raises(IdempotencyConflict):
        claim(idempotency_key="k", body_digest="other")


def test_two_teams_may_use_the_same_key(claim: Claim, mallorys_team: Team) -> None:
    mine = claim(idempotency_key="k", body_digest="d")
    theirs = claim(team=mallorys_team, idempotency_key="k", body_digest="d")

    assert mine.id != theirs.id


def test_a_full_team_claims_no_more(claim: Claim, alices_team: Team) -> None:
    Team.objects.update(running_limit=1)
    claim()

    with pytest.raises(QuotaExceeded):
        claim()
    assert Sandbox.objects.count() == 1


def test_a_full_host_takes_no_more(claim: Claim, host: Host) -> None:
    claim(memory_bytes=8 * GiB)

    with pytest.raises(NoCapacity):
        claim()
    host.refresh_from_db()
    assert host.promised_bytes == 8 * GiB
    assert Sandbox.objects.count() == 1


def test_a_silent_host_takes_none(claim: Claim, host: Host) -> None:
    Host.objects.update(seen_at=timezone.now() - timedelta(minutes=1))

    with pytest.raises(NoCapacity):
        claim()


def test_a_soft_limit_beyond_the_hard_one_is_refused(claim: Claim) -> None:
    with pytest.raises(BadLimit):
        claim(ttl_s=60, hard_ttl_s=30)


# -- start --------------------------------------------------------------------------------


def test_it_is_billed_from_the_moment_it_is_ready(running: Sandbox) -> None:
    assert running.state == State.RUNNING
    assert guest_state(running) is GuestState.RUNNING
    assert open_meters(running) == 1
    assert running.runs.get().fetched_bytes == 4096


def test_a_boot_that_arrives_twice_boots_once(running: Sandbox) -> None:
    operations.boot(running.id)

    running.refresh_from_db()
    assert running.runtime_generation == 1
    assert open_meters(running) == 1


def test_deleted_while_it_boots_leaves_no_guest(
    machine: FakeHost, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = claim()
    start = FakeHypervisor.start

    def delete_then_start(self: FakeHypervisor, spec: object) -> None:
        services.delete_sandbox(sandbox=sandbox)
        start(self, spec)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeHypervisor, "start", delete_then_start)
    with pytest.raises(WrongState):
        operations.boot(sandbox.id)

    assert guest_state(sandbox) is GuestState.MISSING
    assert MeterInterval.objects.count() == 0


def test_one_thing_at_a_time_is_done_to_a_guest(machine: FakeHost, claim: Claim) -> None:
    sandbox = claim()

    with machine.lock(sandbox.uuid), pytest.raises(GuestBusy):
        operations.boot(sandbox.id)


def test_a_start_that_never_works_ends_as_failed(
    machine: FakeHost, claim: Claim, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = claim()
    machine.silent.add(sandbox.uuid)
    monkeypatch.setattr(operations, "READY_TIMEOUT_S", 0)
    with pytest.raises(operations.GuestNotReady):
        operations.boot(sandbox.id)
    Sandbox.objects.update(state_changed_at=timezone.now() - operations.GIVE_UP_AFTER)

    operations.boot(sandbox.id)

    sandbox.refresh_from_db()
    host.refresh_from_db()
    assert sandbox.state == State.FAILED
    assert "not ready" in sandbox.last_error
    assert host.promised_bytes == 0
    assert machine.disks.disks == {}


# -- pause --------------------------------------------------------------------------------


def test_the_bill_stops_when_the_pause_is_accepted(running: Sandbox) -> None:
    services.pause_sandbox(sandbox=running)

    running.refresh_from_db()
    assert running.state == State.PAUSING
    assert running.wire_status == "running"
    assert open_meters(running) == 0


def test_it_is_paused_once_the_head_has_moved(
    machine: FakeHost, running: Sandbox, host: Host
) -> None:
    write(machine, running)
    services.pause_sandbox(sandbox=running)
    operations.pause(running.id)

    running.refresh_from_db()
    host.refresh_from_db()
    head = running.volume.head
    assert running.state == State.PAUSED
    assert head is not None
    assert (head.number, head.uploaded_bytes) == (1, 3)
    assert guest_state(running) is GuestState.MISSING
    assert host.promised_bytes == 0
    assert Volume.objects.get(pk=running.volume_id).attached_host is None
    assert machine.disks.disks == {}


def test_pausing_twice_is_pausing_once(machine: FakeHost, running: Sandbox) -> None:
    services.pause_sandbox(sandbox=running)
    services.pause_sandbox(sandbox=running)
    operations.pause(running.id)
    operations.pause(running.id)
    services.pause_sandbox(sandbox=running)

    running.refresh_from_db()
    assert running.state == State.PAUSED


def test_a_pause_waits_while_the_store_is_away(machine: FakeHost, running: Sandbox) -> None:
    write(machine, running)
    services.pause_sandbox(sandbox=running)
    machine.disks.store_is_up = False
    with pytest.raises(StoreUnavailable):
        operations.pause(running.id)

    running.refresh_from_db()
    assert running.state == State.PAUSING
    assert "object store" in running.health
    assert machine.disks.disks[running.volume_id].writes == 3

    machine.disks.store_is_up = True
    operations.pause(running.id)

    running.refresh_from_db()
    assert running.state == State.PAUSED
    assert running.health == ""


def test_a_pause_that_waits_can_be_turned_round(
    machine: FakeHost, running: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(machine, running)
    services.pause_sandbox(sandbox=running)
    machine.disks.store_is_up = False
    with pytest.raises(StoreUnavailable):
        operations.pause(running.id)
    services.resume_sandbox(sandbox=running)

    # Another try could take minutes: none is made.
    with monkeypatch.context() as patch:
        patch.setattr(machine.disks, "commit", lambda *_, **__: pytest.fail("it was tried"))
        queue_name = operations.pause(running.id)
    operations.boot(running.id)

    running.refresh_from_db()
    assert queue_name == "host.local"
    assert running.state == State.RUNNING
    assert running.runtime_generation == 2
    assert machine.disks.disks[running.volume_id].writes == 3


def test_a_guest_that_cannot_be_asked_runs_on_and_is_billed(
    machine: FakeHost, running: Sandbox
) -> None:
    services.pause_sandbox(sandbox=running)
    machine.silent.add(running.uuid)

    operations.pause(running.id)

    running.refresh_from_db()
    assert running.state == State.RUNNING
    assert "pause failed" in running.last_error
    assert guest_state(running) is GuestState.RUNNING
    assert open_meters(running) == 1


def test_a_resume_during_a_pause_wakes_it_afterwards(
    machine: FakeHost, running: Sandbox
) -> None:
    services.pause_sandbox(sandbox=running)
    services.resume_sandbox(sandbox=running)

    queue_name = operations.pause(running.id)

    running.refresh_from_db()
    assert queue_name == "host.local"
    assert running.state == State.RESUMING


# -- resume -------------------------------------------------------------------------------


def test_a_resume_raises_the_generation_and_the_epoch(
    machine: FakeHost, paused: Sandbox
) -> None:
    epoch = paused.volume.epoch
    services.resume_sandbox(sandbox=paused)
    operations.boot(paused.id)

    paused.refresh_from_db()
    assert paused.state == State.RUNNING
    assert paused.runtime_generation == 2
    assert Volume.objects.get(pk=paused.volume_id).epoch == epoch + 1


def test_resuming_twice_is_resuming_once(machine: FakeHost, paused: Sandbox) -> None:
    services.resume_sandbox(sandbox=paused)
    services.resume_sandbox(sandbox=paused)

    paused.refresh_from_db()
    assert paused.runtime_generation == 2
    assert Placement.objects.count() == 1


def test_a_resume_counts_against_the_quota(machine: FakeHost, paused: Sandbox) -> None:
    Team.objects.update(running_limit=0)

    with pytest.raises(QuotaExceeded):
        services.resume_sandbox(sandbox=paused)
    paused.refresh_from_db()
    assert paused.state == State.PAUSED


def test_a_resume_that_fails_sleeps_on_with_what_it_had(
    machine: FakeHost, paused: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = paused.volume.head
    services.resume_sandbox(sandbox=paused)
    machine.silent.add(paused.uuid)
    monkeypatch.setattr(operations, "READY_TIMEOUT_S", 0)
    Sandbox.objects.update(state_changed_at=timezone.now() - operations.GIVE_UP_AFTER)

    operations.boot(paused.id)

    paused.refresh_from_db()
    assert paused.state == State.PAUSED
    assert "not ready" in paused.last_error
    assert paused.volume.head == head
    assert Placement.objects.count() == 0


def test_more_memory_restarts_it_on_its_files(machine: FakeHost, running: Sandbox) -> None:
    services.update_memory(sandbox=running, memory_bytes=2 * GiB)
    operations.pause(running.id)
    operations.boot(running.id)

    running.refresh_from_db()
    assert running.state == State.RUNNING
    assert running.runtime_generation == 2
    assert Placement.objects.get().memory_bytes == 2 * GiB
    intervals = MeterInterval.objects.order_by("period")
    assert [i.quantity for i in intervals] == [512, 2048]


# -- end ----------------------------------------------------------------------------------


def test_a_deleted_sandbox_leaves_nothing(
    machine: FakeHost, running: Sandbox, host: Host
) -> None:
    services.delete_sandbox(sandbox=running)
    assert open_meters(running) == 0
    operations.destroy(running.id)

    running.refresh_from_db()
    host.refresh_from_db()
    assert running.state == State.DELETED
    assert guest_state(running) is GuestState.MISSING
    assert host.promised_bytes == 0
    assert machine.disks.disks == {}
    assert running.volume.deleted_at is not None


def test_a_sleeping_sandbox_is_deleted_at_once(machine: FakeHost, paused: Sandbox) -> None:
    services.delete_sandbox(sandbox=paused)

    paused.refresh_from_db()
    assert paused.state == State.DELETED


def test_deleting_twice_is_deleting_once(machine: FakeHost, paused: Sandbox) -> None:
    services.delete_sandbox(sandbox=paused)
    services.delete_sandbox(sandbox=paused)

    paused.refresh_from_db()
    assert paused.state == State.DELETED


def test_a_pause_never_brings_a_deleted_sandbox_back(
    machine: FakeHost, running: Sandbox
) -> None:
    services.pause_sandbox(sandbox=running)
    services.delete_sandbox(sandbox=running)
    operations.pause(running.id)
    operations.destroy(running.id)

    running.refresh_from_db()
    assert running.state == State.DELETED


# -- files while paused -------------------------------------------------------------------


def test_files_of_a_sleeping_sandbox_are_served_without_a_guest(
    machine: FakeHost, paused: Sandbox
) -> None:
    services.request_files(sandbox=paused)
    operations.open_files(paused.id)

    volume = Volume.objects.get(pk=paused.volume_id)
    assert volume.files_ready_at is not None
    assert machine.files.is_open(volume.pk)
    assert guest_state(paused) is GuestState.MISSING
    assert cost_of([paused.id])[paused.id] >= 0
    assert open_meters(paused) == 0


def test_who_asks_first_is_told_where_the_files_will_be_and_nobody_else(
    machine: FakeHost, paused: Sandbox
) -> None:
    first = services.request_files(sandbox=paused)
    again = services.request_files(sandbox=paused)
    operations.open_files(paused.id)
    opened = services.request_files(sandbox=paused)

    assert first is not None
    assert first.pk == paused.volume_id
    assert first.attached_host is not None
    # It may be closing by now, with its socket there until the last moment.
    assert (again, opened) == (None, None)


def test_written_files_become_a_generation(machine: FakeHost, paused: Sandbox) -> None:
    services.request_files(sandbox=paused)
    operations.open_files(paused.id)
    write(machine, paused, 2)

    operations.close_files(paused.id)

    volume = Volume.objects.get(pk=paused.volume_id)
    assert volume.head is not None
    assert volume.head.kind == "files"
    assert volume.attached_host is None
    assert machine.disks.disks == {}


def test_a_resume_commits_the_files_that_were_written_first(
    machine: FakeHost, paused: Sandbox
) -> None:
    services.request_files(sandbox=paused)
    operations.open_files(paused.id)
    write(machine, paused, 2)
    services.resume_sandbox(sandbox=paused)

    operations.boot(paused.id)

    paused.refresh_from_db()
    volume = Volume.objects.get(pk=paused.volume_id)
    assert paused.state == State.RUNNING
    assert volume.head is not None
    assert volume.head.kind == "files"
    assert machine.disks.disks[volume.pk].root_key == volume.head.root_key
    assert volume.attached_for == Volume.Purpose.RUN


def test_deleting_a_sandbox_whose_files_are_open_takes_them_down(
    machine: FakeHost, paused: Sandbox
) -> None:
    services.request_files(sandbox=paused)
    operations.open_files(paused.id)
    services.delete_sandbox(sandbox=paused)
    operations.destroy(paused.id)

    paused.refresh_from_db()
    assert paused.state == State.DELETED
    assert machine.disks.disks == {}
    assert not machine.files.is_open(paused.volume_id)


def test_a_checkpoint_thaws_the_guest_also_when_it_fails(
    machine: FakeHost, running: Sandbox
) -> None:
    write(machine, running)
    machine.disks.store_is_up = False
    with pytest.raises(StoreUnavailable):
        operations.checkpoint(running.id)

    assert [op for op, _ in machine.asked][-2:] == ["freeze", "thaw"]


def test_a_checkpoint_of_a_mute_guest_fails_and_commits_nothing(
    machine: FakeHost, running: Sandbox
) -> None:
    write(machine, running)
    machine.silent.add(running.uuid)

    with pytest.raises(AgentSilent):
        operations.checkpoint(running.id)
    assert running.volume.head is not None
    assert running.volume.head.number == 0
