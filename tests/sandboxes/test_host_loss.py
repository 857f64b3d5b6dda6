"""A host that is lost: its sandboxes go on elsewhere, and it cannot harm them any more."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from itertools import count
from uuid import UUID

import pytest
import time_machine
from django.conf import settings
from django.core.management import CommandError, call_command
from django.utils import timezone

from accounts.models import AuditEvent
from billing.models import MeterInterval
from common.units import GiB
from hosts.errors import StaleEpoch
from hosts.models import Generation, Host, Placement, Volume
from hosts.services import attach_volume, publish_generation
from sandboxes import actors, operations, services
from sandboxes.host_loss import HostWatch, leave_host
from sandboxes.models import Sandbox
from sandboxes.sweep import Sweeper
from sandboxes.watch import Watcher
from tests.fakes.host import FakeHost, fake_hypervisor
from tests.fakes.hypervisor import FakeHypervisor
from tests.hosts.machine import wait_for
from tests.killed import Processes, processes

__all__ = ["processes"]

State = Sandbox.State


@pytest.fixture
def other_host(db: None) -> Host:
    return Host.objects.create(
        name="other",
        gate_host="127.0.0.1",
        gate_port=8023,
        gate_public_key="ssh-ed25519 BBBB",
        subnet="10.89.0.0/24",
        memory_bytes=8 * GiB,
        seen_at=None,
    )


def lose(host: Host, other: Host) -> None:
    """Let the host be silent from now on, and the other one be heard."""
    Host.objects.filter(pk=host.pk).update(seen_at=timezone.now() - timedelta(minutes=5))
    Host.objects.filter(pk=other.pk).update(seen_at=timezone.now())
    host.refresh_from_db()
    other.refresh_from_db()


def publish(volume: Volume, *, epoch: int, number: int) -> Generation:
    return publish_generation(
        volume.pk,
        epoch=epoch,
        kind=Generation.Kind.BACKGROUND,
        root_key=f"roots/{volume.pk.hex}/{epoch:08x}/{number:032x}",
        size_bytes=1 << 40,
    )


def test_a_running_sandbox_goes_on_elsewhere_from_its_last_commit(
    running: Sandbox,
    host: Host,
    other_host: Host,
    machine: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = publish(running.volume, epoch=1, number=7)
    lose(host, other_host)

    assert leave_host(host) == 1

    running.refresh_from_db()
    assert running.state == State.RESUMING
    assert running.host == other_host
    assert "host was lost" in running.last_error
    assert Placement.objects.get().host == other_host
    host.refresh_from_db()
    assert host.promised_bytes == 0

    monkeypatch.setattr(settings, "HOST_NAME", other_host.name)
    machine.disks.disks.clear()  # another machine
    operations.boot(running.id)
    running.refresh_from_db()
    assert running.state == State.RUNNING
    assert machine.disks.disks[running.volume_id].root_key == head.root_key


def test_what_the_lost_host_still_stores_is_never_published(
    running: Sandbox, host: Host, other_host: Host
) -> None:
    epoch = Volume.objects.get(sandbox=running).epoch
    lose(host, other_host)
    leave_host(host)

    with pytest.raises(StaleEpoch):
        publish(running.volume, epoch=epoch, number=8)
    attached = attach_volume(running.volume_id, host=other_host, purpose=Volume.Purpose.RUN)
    assert attached.epoch == epoch + 2


def test_nobody_pays_for_the_time_after_a_lost_host_was_heard_last(
    running: Sandbox, host: Host, other_host: Host
) -> None:
    with time_machine.travel(timezone.now() + timedelta(minutes=10)):
        lose(host, other_host)
        leave_host(host)

    billed = MeterInterval.objects.get(meter=MeterInterval.Meter.MEMORY)
    host.refresh_from_db()
    assert billed.period.upper == host.seen_at


def test_without_room_elsewhere_a_sandbox_stays(
    running: Sandbox, host: Host, other_host: Host
) -> None:
    lose(host, other_host)
    Host.objects.filter(pk=other_host.pk).update(memory_bytes=1)

    assert leave_host(host) == 0

    running.refresh_from_db()
    volume = Volume.objects.get(sandbox=running)
    assert (running.state, running.host) == (State.RUNNING, host)
    assert (volume.attached_host, volume.epoch) == (host, 1)


def test_one_that_needs_no_room_does_not_wait_behind_those_that_do(
    running: Sandbox,
    claim: Callable[..., Sandbox],
    host: Host,
    other_host: Host,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sandboxes.host_loss.MAX_IN_VAIN", 1)
    claim()
    ending = claim()
    services.delete_sandbox(sandbox=ending)
    lose(host, other_host)
    Host.objects.filter(pk=other_host.pk).update(memory_bytes=1)

    assert leave_host(host) == 1

    ending.refresh_from_db()
    assert ending.state == State.DELETED


def test_a_pause_on_a_lost_host_ends_with_what_was_stored(
    running: Sandbox, host: Host, other_host: Host
) -> None:
    services.pause_sandbox(sandbox=running)
    lose(host, other_host)

    leave_host(host)

    running.refresh_from_db()
    assert running.state == State.PAUSED
    assert "host was lost" in running.last_error
    assert not Placement.objects.exists()
    assert Volume.objects.get(sandbox=running).attached_host is None


def test_a_deletion_on_a_lost_host_ends(running: Sandbox, host: Host, other_host: Host) -> None:
    services.delete_sandbox(sandbox=running)
    lose(host, other_host)

    leave_host(host)

    running.refresh_from_db()
    assert running.state == State.DELETED


def test_a_sandbox_that_starts_on_a_lost_host_starts_elsewhere(
    claim: Callable[..., Sandbox], host: Host, other_host: Host
) -> None:
    sandbox = claim()
    lose(host, other_host)

    leave_host(host)

    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.host) == (State.STARTING, other_host)


def test_leaving_a_host_is_in_the_audit_trail(
    running: Sandbox, host: Host, other_host: Host
) -> None:
    lose(host, other_host)
    leave_host(host)
    assert AuditEvent.objects.filter(
        action="sandbox.host_lost", resource_id=running.id
    ).exists()


def test_a_host_is_lost_only_after_a_long_silence_while_others_are_heard(
    host: Host, other_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("sandboxes.host_loss.time.monotonic", lambda: now[0])
    watch = HostWatch()
    lose(host, other_host)

    assert watch.lost() == []  # this process has only begun to listen
    now[0] += settings.HOST_LOST_AFTER_S - 1
    assert watch.lost() == []
    Host.objects.update(seen_at=timezone.now() - timedelta(minutes=5))
    assert watch.lost() == []  # no host is heard: the queue may be away
    lose(host, other_host)
    now[0] += 2
    assert watch.lost() == []
    now[0] += settings.HOST_LOST_AFTER_S
    assert watch.lost() == [host]


def test_zero_leaves_it_to_an_operator(
    host: Host, other_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "HOST_LOST_AFTER_S", 0)
    lose(host, other_host)
    watch = HostWatch()
    watch.lost()
    assert watch.lost() == []


def test_a_host_that_comes_back_drops_what_is_no_longer_its_own(
    running: Sandbox, host: Host, other_host: Host, machine: FakeHost
) -> None:
    machine.disks.disks[running.volume_id].writes = 3
    lose(host, other_host)
    leave_host(host)

    watcher = Watcher()
    watcher.look()
    watcher.look()

    with fake_hypervisor() as hypervisor:
        assert running.uuid not in set(hypervisor.guests())
    assert running.volume_id not in machine.disks.disks


def test_a_guest_of_an_earlier_epoch_is_ended_before_its_disk_is_replaced(
    running: Sandbox,
    host: Host,
    other_host: Host,
    machine: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose(host, other_host)
    leave_host(host)
    lose(other_host, host)  # and back again, before the first host looked around
    leave_host(other_host)
    ended = []
    destroy = FakeHypervisor.destroy

    def noting(self: FakeHypervisor, uuid: UUID) -> None:
        ended.append(uuid)
        destroy(self, uuid)

    monkeypatch.setattr(FakeHypervisor, "destroy", noting)
    operations.boot(running.id)

    assert ended == [running.uuid]
    running.refresh_from_db()
    assert running.state == State.RUNNING


def test_an_operator_can_say_that_a_host_is_lost(
    running: Sandbox, host: Host, other_host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CommandError, match="is heard of"):
        call_command("leave_host", host.name)
    with pytest.raises(CommandError, match="no host nowhere"):
        call_command("leave_host", "nowhere")
    lose(host, other_host)

    call_command("leave_host", host.name)

    assert "1 sandboxes left local; 0 found no room" in capsys.readouterr().out


def leave_and_die(host_name: str, module: str, function: str, nth: int) -> None:
    """Be `manage.py leave_host`, killed as it calls a function for the nth time."""
    where = import_module(module)
    calls = count(1)
    go_on = getattr(where, function)

    def die_at_last(*args: object, **kwargs: object) -> object:
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return go_on(*args, **kwargs)

    setattr(where, function, die_at_last)
    call_command("leave_host", host_name)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("module", "function", "left"),
    [
        # In the second's transaction, which is rolled back; and before its message is sent.
        pytest.param("sandboxes.host_loss", "record_event", 1, id="before the commit"),
        pytest.param("sandboxes.actors", "send", 2, id="before the message"),
    ],
)
def test_leaving_a_host_that_was_cut_short_is_done_again_to_the_end(
    claim: Callable[..., Sandbox],
    machine: FakeHost,
    *,
    host: Host,
    other_host: Host,
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    function: str,
    left: int,
) -> None:
    sandboxes = [claim() for _ in range(3)]
    for sandbox in sandboxes:
        operations.boot(sandbox.id)
    epochs = set(Volume.objects.filter(sandbox__in=sandboxes).values_list("epoch", flat=True))
    lose(host, other_host)

    status = processes.run(leave_and_die, host.name, module, function, 2)
    assert status == -signal.SIGKILL
    assert wait_for(lambda: other_host.sandboxes.count() == left, timeout_s=10)
    call_command("leave_host", host.name)
    call_command("leave_host", host.name)

    for sandbox in sandboxes:
        sandbox.refresh_from_db()
        assert (sandbox.state, sandbox.host) == (State.RESUMING, other_host)
        assert Placement.objects.get(guest_uuid=sandbox.uuid).host == other_host
        volume = Volume.objects.get(sandbox=sandbox)
        assert volume.attached_host is None
        assert {volume.epoch - 1} == epochs, "seized once"
        assert (
            AuditEvent.objects.filter(
                action="sandbox.host_lost", resource_id=sandbox.id
            ).count()
            == 1
        )
    assert not MeterInterval.objects.filter(period__upper_inf=True).exists()
    host.refresh_from_db()
    assert host.promised_bytes == 0

    # The message that was never sent is, in the end.
    sent: list[object] = []
    monkeypatch.setattr(actors, "send", lambda actor, queue, *args: sent.extend(args))
    with time_machine.travel(timezone.now() + timedelta(minutes=1)):
        Sweeper().repeat_hints()
    assert set(sent) == {sandbox.id for sandbox in sandboxes}
