"""What a host's worker puts right by looking, and what the scheduler does each second."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import time_machine
from django.utils import timezone

from billing.models import MeterInterval
from hosts.models import Host, Volume
from sandboxes import operations, services
from sandboxes import watch as watching
from sandboxes.models import Sandbox
from sandboxes.sweep import close_orphaned_intervals, end_expired, pause_expired
from sandboxes.watch import Watcher
from tests.fakes.host import FakeHost, fake_hypervisor

State = Sandbox.State


def kill_guest(sandbox: Sandbox) -> None:
    with fake_hypervisor() as hypervisor:
        hypervisor.destroy(sandbox.uuid)


def test_looking_is_a_heartbeat(machine: FakeHost, host: Host) -> None:
    Host.objects.update(seen_at=None)

    Watcher().look()

    host.refresh_from_db()
    assert host.is_alive
    assert host.used_bytes > 0


def test_a_guest_that_died_is_started_again(machine: FakeHost, running: Sandbox) -> None:
    kill_guest(running)

    follow_ups = Watcher().look()
    running.refresh_from_db()
    assert follow_ups == [("boot_sandbox", running.id)]
    assert running.state == State.RESUMING
    assert running.runtime_generation == 2
    assert not MeterInterval.objects.filter(period__upper_inf=True).exists()

    operations.boot(running.id)

    running.refresh_from_db()
    assert running.state == State.RUNNING


def test_a_disk_that_died_restarts_its_guest_with_what_was_written(
    machine: FakeHost, running: Sandbox
) -> None:
    machine.disks.disks[running.volume_id].writes = 5
    machine.disks.dead.add(running.volume_id)

    Watcher().look()
    operations.boot(running.id)

    running.refresh_from_db()
    assert running.state == State.RUNNING
    assert machine.disks.disks[running.volume_id].writes == 5


def test_a_guest_is_spared_when_only_its_disks_export_died(
    machine: FakeHost, running: Sandbox
) -> None:
    machine.disks.dead.add(running.volume_id)
    machine.disks.unexported.add(running.volume_id)

    assert Watcher().look() == []

    running.refresh_from_db()
    assert (running.state, running.runtime_generation) == (State.RUNNING, 1)
    assert running.volume_id not in machine.disks.dead


def test_a_mute_agent_is_given_time(
    machine: FakeHost, running: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "PING_EVERY_S", 0)
    machine.silent.add(running.uuid)
    watcher = Watcher()

    assert watcher.look() == []

    monkeypatch.setattr(watching, "SILENT_AGENT_S", 0)
    assert watcher.look() == [("boot_sandbox", running.id)]


def test_nothing_is_recovered_that_somebody_pauses(machine: FakeHost, running: Sandbox) -> None:
    services.pause_sandbox(sandbox=running)
    kill_guest(running)

    assert Watcher().look() == []
    running.refresh_from_db()
    assert running.state == State.PAUSING


def test_a_stray_guest_is_destroyed_at_the_second_look(
    machine: FakeHost, running: Sandbox
) -> None:
    Sandbox.objects.update(state=State.DELETED)
    watcher = Watcher()

    watcher.look()
    with fake_hypervisor() as hypervisor:
        assert hypervisor.guests() == [running.uuid]
    watcher.look()
    with fake_hypervisor() as hypervisor:
        assert hypervisor.guests() == []


def test_a_left_over_disk_is_dropped_once_its_volume_is_let_go(
    machine: FakeHost, running: Sandbox
) -> None:
    Watcher().look()
    assert running.volume_id in machine.disks.disks

    Volume.objects.update(attached_host=None, attached_for="")
    Watcher().look()

    assert running.volume_id not in machine.disks.disks


def test_written_files_are_committed_after_a_short_quiet(
    machine: FakeHost, paused: Sandbox
) -> None:
    services.request_files(sandbox=paused)
    operations.open_files(paused.id)
    machine.disks.disks[paused.volume_id].writes = 1

    assert Watcher().look() == [("commit_files", paused.id)]


def test_files_that_were_asked_for_and_not_opened_are_opened(
    machine: FakeHost, paused: Sandbox
) -> None:
    services.request_files(sandbox=paused)

    assert Watcher().look() == [("open_files", paused.id)]


# -- the scheduler ------------------------------------------------------------------------


@pytest.fixture
def claim_for(
    machine: FakeHost, claim: Callable[..., Sandbox]
) -> Callable[[int, int], Sandbox]:
    def run(ttl_s: int, hard_ttl_s: int) -> Sandbox:
        sandbox = claim(ttl_s=ttl_s, hard_ttl_s=hard_ttl_s)
        operations.boot(sandbox.id)
        return sandbox

    return run


def test_the_soft_limit_pauses(claim_for: Callable[[int, int], Sandbox]) -> None:
    sandbox = claim_for(60, 0)
    pause_expired()
    sandbox.refresh_from_db()
    assert sandbox.state == State.RUNNING

    with time_machine.travel(timezone.now() + timedelta(seconds=61), tick=False):
        pause_expired()

    sandbox.refresh_from_db()
    assert sandbox.state == State.PAUSING
    assert sandbox.pause_reason == "ttl"


def test_a_refresh_in_the_last_moment_wins(
    claim_for: Callable[[int, int], Sandbox],
) -> None:
    sandbox = claim_for(60, 0)
    with time_machine.travel(timezone.now() + timedelta(seconds=61), tick=False):
        services.refresh_sandbox(sandbox=sandbox)
        services.pause_if_expired(sandbox=sandbox)

    sandbox.refresh_from_db()
    assert sandbox.state == State.RUNNING


def test_the_hard_limit_deletes_also_what_sleeps(
    machine: FakeHost, claim_for: Callable[[int, int], Sandbox]
) -> None:
    sandbox = claim_for(0, 60)
    services.pause_sandbox(sandbox=sandbox)
    operations.pause(sandbox.id)

    with time_machine.travel(timezone.now() + timedelta(seconds=61), tick=False):
        end_expired()

    sandbox.refresh_from_db()
    assert sandbox.state == State.DELETED


def test_the_meter_of_a_silent_host_stops_when_it_was_last_heard(
    running: Sandbox, host: Host
) -> None:
    heard = timezone.now() + timedelta(seconds=5)
    Host.objects.update(seen_at=heard)
    with time_machine.travel(heard + timedelta(minutes=10), tick=False):
        close_orphaned_intervals()

    interval = MeterInterval.objects.get()
    assert interval.period.upper == heard


def test_a_meter_without_a_guest_is_closed(running: Sandbox) -> None:
    Sandbox.objects.update(state=State.PAUSED)

    close_orphaned_intervals()

    assert not MeterInterval.objects.filter(period__upper_inf=True).exists()


def test_a_running_sandbox_is_billed_again_once_its_host_is_back(
    machine: FakeHost, running: Sandbox
) -> None:
    MeterInterval.objects.all().delete()

    Watcher().look()

    assert MeterInterval.objects.filter(period__upper_inf=True).count() == 1
