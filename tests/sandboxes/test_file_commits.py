"""What is written to the files of a sleeping sandbox is stored while they stay open."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import time_machine
from django.utils import timezone

from hosts.errors import GuestBusy
from hosts.models import Generation
from hosts.paused_files import FileSystemDamaged
from hosts.volumes.errors import StoreUnavailable
from sandboxes import file_commits, operations, services, snapshots
from sandboxes.models import Sandbox
from sandboxes.watch import Watcher
from tests.fakes.host import FakeHost


@pytest.fixture
def opened(machine: FakeHost, paused: Sandbox) -> Sandbox:
    services.request_files(sandbox=paused)
    operations.open_files(paused.id)
    paused.refresh_from_db()
    return paused


def head_of(sandbox: Sandbox) -> Generation:
    return Generation.objects.get(heads__pk=sandbox.volume_id)


def test_changes_become_a_generation_and_the_files_stay_open(
    machine: FakeHost, opened: Sandbox
) -> None:
    before = head_of(opened)
    machine.disks.disks[opened.volume_id].writes = 3

    file_commits.commit_files(opened.id)
    file_commits.commit_files(opened.id)  # there is nothing more

    head = head_of(opened)
    assert (head.kind, head.number) == ("files", before.number + 1)
    assert machine.files.is_open(opened.volume_id)
    assert machine.files.stored == {opened.volume_id: 3}
    assert not machine.files.is_dirty(opened.volume_id)


def test_files_that_were_only_read_are_closed_without_a_generation(
    machine: FakeHost, opened: Sandbox
) -> None:
    before = head_of(opened)

    operations.close_files(opened.id)

    assert head_of(opened) == before
    assert not machine.files.is_open(opened.volume_id)
    assert not machine.disks.disks


def test_what_no_record_is_left_of_is_stored_when_it_is_closed(
    machine: FakeHost, opened: Sandbox
) -> None:
    before = head_of(opened)
    machine.disks.disks[opened.volume_id].writes = 1
    machine.files.known.clear()  # the machine was started again

    operations.close_files(opened.id)

    assert head_of(opened).number == before.number + 1


def test_files_that_cannot_be_held_still_are_closed_and_stored(
    machine: FakeHost, opened: Sandbox
) -> None:
    before = head_of(opened)
    machine.disks.disks[opened.volume_id].writes = 1
    machine.files.can_settle = False

    file_commits.commit_files(opened.id)

    assert head_of(opened).number == before.number + 1
    assert not machine.files.is_open(opened.volume_id)


def test_a_store_that_is_away_is_tried_again_and_loses_nothing(
    machine: FakeHost, opened: Sandbox
) -> None:
    machine.disks.disks[opened.volume_id].writes = 1
    machine.disks.store_is_up = False

    with pytest.raises(StoreUnavailable):
        file_commits.commit_files(opened.id)

    assert machine.files.stored == {}
    assert machine.files.is_dirty(opened.volume_id)
    assert Watcher().look() == [("commit_files", opened.id)]


def test_a_resume_waits_for_a_commit(machine: FakeHost, opened: Sandbox) -> None:
    services.resume_sandbox(sandbox=opened)

    with machine.lock(opened.uuid), pytest.raises(GuestBusy):
        operations.boot(opened.id)


def test_a_sandbox_that_wakes_meanwhile_is_left_alone(
    machine: FakeHost, opened: Sandbox
) -> None:
    before = head_of(opened)
    machine.disks.disks[opened.volume_id].writes = 1
    services.resume_sandbox(sandbox=opened)

    file_commits.commit_files(opened.id)

    assert head_of(opened) == before


def test_files_in_use_are_stored_now_and_then_and_closed_when_idle(
    machine: FakeHost, opened: Sandbox
) -> None:
    volume_id = opened.volume_id
    now = timezone.now()
    machine.files.used_at[volume_id] = machine.files.known[volume_id] = now
    machine.disks.disks[volume_id].writes = 1
    busy = Watcher().look()
    with time_machine.travel(now + timedelta(seconds=16)):
        machine.files.used_at[volume_id] = timezone.now()
        kept_waiting = Watcher().look()
    machine.disks.disks[volume_id].writes = 0
    with time_machine.travel(now + timedelta(seconds=100)):
        idle = Watcher().look()

    assert busy == []
    assert kept_waiting == [("commit_files", opened.id)]
    assert idle == [("close_files", opened.id)]


def test_a_cut_has_what_was_written_and_leaves_the_files_open(
    machine: FakeHost, opened: Sandbox
) -> None:
    before = head_of(opened)
    machine.disks.disks[opened.volume_id].writes = 2
    cut = snapshots.request_cut(sandbox=opened)

    operations.cut(opened.id)

    cut.refresh_from_db()
    head = head_of(opened)
    assert (cut.state, cut.generation) == ("done", head)
    assert (head.kind, head.number) == ("files", before.number + 1)
    assert machine.files.is_open(opened.volume_id)
    assert machine.files.stored == {opened.volume_id: 2}


def test_a_cut_closes_files_that_cannot_be_held_still(
    machine: FakeHost, opened: Sandbox
) -> None:
    before = head_of(opened)
    machine.disks.disks[opened.volume_id].writes = 2
    machine.files.can_settle = False
    cut = snapshots.request_cut(sandbox=opened)

    operations.cut(opened.id)

    cut.refresh_from_db()
    assert (cut.state, cut.generation) == ("done", head_of(opened))
    assert head_of(opened).number == before.number + 1
    assert not machine.files.is_open(opened.volume_id)


@pytest.fixture
def cut_off(machine: FakeHost, opened: Sandbox) -> Sandbox:
    """Files with changes whose storage daemon was killed."""
    machine.disks.disks[opened.volume_id].writes = 2
    machine.disks.dead.add(opened.volume_id)
    return opened


def test_a_disk_that_died_under_open_files_is_noticed(
    machine: FakeHost, cut_off: Sandbox
) -> None:
    assert Watcher().look() == [("close_files", cut_off.id)]


def test_where_only_the_export_died_the_files_stay_open(
    machine: FakeHost, cut_off: Sandbox
) -> None:
    machine.disks.disks[cut_off.volume_id].writes = 0
    machine.files.used_at[cut_off.volume_id] = timezone.now()
    machine.disks.unexported.add(cut_off.volume_id)

    assert Watcher().look() == []


@pytest.mark.parametrize("operation", [file_commits.commit_files, operations.close_files])
def test_what_was_written_to_a_disk_that_died_is_stored(
    machine: FakeHost, cut_off: Sandbox, operation: Callable[[str], None]
) -> None:
    before = head_of(cut_off)

    operation(cut_off.id)

    assert head_of(cut_off).number == before.number + 1
    assert not machine.files.is_open(cut_off.volume_id)
    assert not machine.disks.disks


def test_a_cut_of_a_disk_that_died_has_what_was_written(
    machine: FakeHost, cut_off: Sandbox
) -> None:
    before = head_of(cut_off)
    cut = snapshots.request_cut(sandbox=cut_off)

    operations.cut(cut_off.id)

    cut.refresh_from_db()
    assert (cut.state, cut.generation) == ("done", head_of(cut_off))
    assert head_of(cut_off).number == before.number + 1


def test_a_file_system_that_cannot_be_mended_is_stored_as_it_is_and_resumed(
    machine: FakeHost, cut_off: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(volume_id: object) -> bool:
        machine.files.used_at.clear()
        raise FileSystemDamaged("The file system cannot be opened: e2fsck ended with 4.")

    monkeypatch.setattr(machine.files, "close", refuse)
    before = head_of(cut_off)
    services.resume_sandbox(sandbox=cut_off)

    operations.boot(cut_off.id)

    cut_off.refresh_from_db()
    assert cut_off.state == Sandbox.State.RUNNING
    assert "e2fsck ended with 4" in cut_off.last_error
    assert head_of(cut_off).number == before.number + 1
