"""What becomes of the disks that a host's keeper finds due, and of what it says of them."""

import threading
from uuid import UUID, uuid4

import pytest

from hosts.models import Generation, Host, Volume
from sandboxes import operations, services
from sandboxes.background import BackgroundCommits, commit_in_background, tell_health
from sandboxes.models import Sandbox
from tests.fakes.host import FakeHost


def write(machine: FakeHost, sandbox: Sandbox) -> None:
    machine.disks.disks[sandbox.volume_id].writes += 1


def test_what_a_running_sandbox_wrote_becomes_its_head(
    machine: FakeHost, running: Sandbox
) -> None:
    write(machine, running)

    assert commit_in_background(running.volume_id)

    head = Volume.objects.get(pk=running.volume_id).head
    assert head is not None
    assert (head.kind, head.volume_id) == (Generation.Kind.BACKGROUND, running.volume_id)
    assert not any(op == "freeze" for op, _ in machine.asked)


def test_a_disk_is_measured_when_it_is_stored_and_before_it_sleeps(
    machine: FakeHost, running: Sandbox
) -> None:
    write(machine, running)
    commit_in_background(running.volume_id)
    assert running.disk_samples.count() == 1

    services.pause_sandbox(sandbox=running)
    operations.pause(running.id)

    sample = running.disk_samples.first()
    assert running.disk_samples.count() == 2
    assert sample is not None
    assert (sample.used_bytes, sample.ceiling_bytes) == (1 << 30, 1 << 40)


def test_nothing_is_committed_when_nothing_was_written(
    machine: FakeHost, running: Sandbox
) -> None:
    assert not commit_in_background(running.volume_id)
    assert not Generation.objects.filter(volume=running.volume_id).exists()


def test_a_disk_that_is_being_paused_is_left_to_its_pause(
    machine: FakeHost, running: Sandbox
) -> None:
    write(machine, running)
    services.pause_sandbox(sandbox=running)

    assert not commit_in_background(running.volume_id)
    assert machine.disks.disks[running.volume_id].writes == 1


def test_a_host_does_not_publish_for_a_sandbox_that_left_it(
    machine: FakeHost, running: Sandbox, host: Host
) -> None:
    write(machine, running)
    other = Host.objects.create(
        name="other",
        gate_host="127.0.0.1",
        gate_port=1,
        gate_public_key="k",
        subnet="10.89.0.0/24",
        memory_bytes=1,
    )
    Sandbox.objects.filter(pk=running.pk).update(host=other)
    assert not commit_in_background(running.volume_id)


def test_a_store_that_is_away_loses_nothing(machine: FakeHost, running: Sandbox) -> None:
    write(machine, running)
    machine.disks.store_is_up = False

    assert not commit_in_background(running.volume_id)

    machine.disks.store_is_up = True
    assert commit_in_background(running.volume_id)


def test_the_health_of_a_disk_is_told_and_taken_back(running: Sandbox) -> None:
    tell_health(running.volume_id, "Object storage is slow.")
    running.refresh_from_db()
    assert running.health == "Object storage is slow."

    tell_health(running.volume_id, "")
    running.refresh_from_db()
    assert running.health == ""


def test_the_health_of_a_disk_that_nobody_runs_is_nobodys(running: Sandbox) -> None:
    services.pause_sandbox(sandbox=running)
    tell_health(running.volume_id, "Object storage is slow.")
    running.refresh_from_db()
    assert running.health == ""


@pytest.mark.django_db
def test_a_volume_is_committed_by_one_thread_at_a_time() -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    seen: list[UUID] = []

    def commit(volume_id: UUID) -> None:
        seen.append(volume_id)
        begun.release()
        assert go_on.wait(10)

    pool = BackgroundCommits(commit)
    one, two = uuid4(), uuid4()
    for volume_id in (one, one, two, one):
        pool.due(volume_id)
    assert begun.acquire(timeout=10)
    assert begun.acquire(timeout=10)
    go_on.set()
    pool.stop()
    assert sorted(seen) == sorted([one, two])


@pytest.mark.django_db
def test_a_commit_that_fails_does_not_keep_the_next_one_away() -> None:
    tried = threading.Semaphore(0)

    def commit(volume_id: UUID) -> None:
        tried.release()
        raise RuntimeError("as it happens")

    pool = BackgroundCommits(commit)
    volume_id = uuid4()
    pool.due(volume_id)
    assert tried.acquire(timeout=10)
    for _ in range(1000):
        pool.due(volume_id)
        if tried.acquire(timeout=0.01):
            break
    else:
        pytest.fail("it was never tried again")
    pool.stop()
