"""Moments of a sandbox's history, opened for their files."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.utils import timezone
from dramatiq.brokers.stub import StubBroker

from hosts.models import Generation, Host, Volume
from hosts.paused_files import FileSystemDamaged
from hosts.services import publish_generation
from sandboxes import moments, operations, past_files, services
from sandboxes.errors import MomentNotFound
from sandboxes.history import Thinner
from sandboxes.models import FileView, Sandbox
from sandboxes.watch import Watcher
from tests.fakes.guest_link import LocalGuest
from tests.fakes.host import FakeHost

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def number(paused: Sandbox) -> int:
    """A moment of the sandbox's history that is not its head."""
    number = add(paused)
    add(paused)
    return number


def add(sandbox: Sandbox) -> int:
    volume = Volume.objects.get(pk=sandbox.volume_id)
    count = volume.generations.count()
    return publish_generation(
        volume.pk,
        epoch=volume.epoch,
        kind=Generation.Kind.CHECKPOINT,
        root_key=f"roots/{volume.pk.hex}/00000001/{count:032x}",
        size_bytes=1 << 40,
    ).number


def test_a_moment_is_served_from_a_disk_of_its_own(
    machine: FakeHost, paused: Sandbox, number: int
) -> None:
    view = moments.request_view(sandbox=paused, number=number)

    past_files.open_view(str(view.pk))

    volume = Volume.objects.get(pk=view.volume_id)
    assert volume.pk != paused.volume_id
    assert volume.files_ready_at is not None
    assert machine.files.is_open(volume.pk)
    assert machine.disks.disks[volume.pk].root_key == view.generation.root_key
    assert Volume.objects.get(pk=paused.volume_id).attached_host is None


def test_all_who_ask_share_it(machine: FakeHost, paused: Sandbox, number: int) -> None:
    first = moments.request_view(sandbox=paused, number=number)

    assert moments.request_view(sandbox=paused, number=number) == first
    assert FileView.objects.count() == 1


def test_it_is_closed_when_nobody_reads_and_nothing_of_it_stays(
    machine: FakeHost, paused: Sandbox, number: int
) -> None:
    view = moments.request_view(sandbox=paused, number=number)
    past_files.open_view(str(view.pk))
    machine.disks.disks[view.volume_id].writes = 5

    [follow_up] = Watcher().look()

    assert follow_up == ("close_view", str(view.pk))
    past_files.close_view(str(view.pk))
    assert not FileView.objects.exists()
    assert not machine.files.is_open(view.volume_id)
    assert view.volume_id not in machine.disks.disks
    volume = Volume.objects.get(pk=view.volume_id)
    assert (volume.attached_host, volume.head) == (None, None)
    assert not volume.generations.exists()
    past_files.close_view(str(view.pk))


def test_one_that_is_read_stays_open(machine: FakeHost, paused: Sandbox, number: int) -> None:
    view = moments.request_view(sandbox=paused, number=number)
    past_files.open_view(str(view.pk))
    machine.files.used_at[view.volume_id] = timezone.now()

    assert Watcher().look() == []


def test_one_whose_message_was_lost_is_opened_at_the_next_look(
    machine: FakeHost, paused: Sandbox, number: int
) -> None:
    view = moments.request_view(sandbox=paused, number=number)

    assert Watcher().look() == [("open_view", str(view.pk))]


def test_it_ends_with_its_sandbox(machine: FakeHost, paused: Sandbox, number: int) -> None:
    view = moments.request_view(sandbox=paused, number=number)
    past_files.open_view(str(view.pk))
    machine.files.used_at[view.volume_id] = timezone.now()

    services.delete_sandbox(sandbox=paused)

    assert Watcher().look() == [("close_view", str(view.pk))]


def test_a_damaged_file_system_is_said_and_not_tried_for_ever(
    machine: FakeHost, paused: Sandbox, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object, **__: object) -> Path:
        raise FileSystemDamaged("It cannot be mounted.")

    monkeypatch.setattr(machine.files, "open", damaged)
    view = moments.request_view(sandbox=paused, number=number)

    past_files.open_view(str(view.pk))

    view.refresh_from_db()
    assert view.error == "It cannot be mounted."
    assert Watcher().look() == [("close_view", str(view.pk))]


def test_a_view_on_a_host_that_is_lost_is_opened_elsewhere(
    machine: FakeHost, host: Host, paused: Sandbox, number: int
) -> None:
    view = moments.request_view(sandbox=paused, number=number)
    Host.objects.update(seen_at=timezone.now() - timedelta(minutes=5))
    Host.objects.create(
        name="other",
        gate_host="127.0.0.1",
        gate_port=1,
        gate_public_key="x",
        subnet="10.0.0.0/24",
        memory_bytes=1 << 33,
        seen_at=timezone.now(),
    )

    again = moments.request_view(sandbox=paused, number=number)

    assert again != view
    assert again.volume.attached_host is not None
    assert again.volume.attached_host.name == "other"
    old = Volume.objects.get(pk=view.volume_id)
    assert (old.attached_host, old.head) == (None, None)


def test_views_of_lost_hosts_are_forgotten(
    machine: FakeHost, paused: Sandbox, number: int
) -> None:
    moments.request_view(sandbox=paused, number=number)
    moments.forget_lost_views()
    assert FileView.objects.exists()
    Host.objects.update(seen_at=timezone.now() - timedelta(minutes=5))

    moments.forget_lost_views()

    assert not FileView.objects.exists()


def test_only_so_many_are_open_at_once(
    machine: FakeHost, paused: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [add(paused) for _ in range(moments.MAX_VIEWS + 1)]
    for number in numbers[:-1]:
        moments.request_view(sandbox=paused, number=number)

    with pytest.raises(moments.TooManyViews):
        moments.request_view(sandbox=paused, number=numbers[-1])


def test_a_moment_that_is_not_there_is_not_found(machine: FakeHost, paused: Sandbox) -> None:
    with pytest.raises(MomentNotFound):
        moments.request_view(sandbox=paused, number=4711)


def test_a_moment_that_is_open_is_not_thinned_out(
    machine: FakeHost, paused: Sandbox, number: int
) -> None:
    view = moments.request_view(sandbox=paused, number=number)
    Generation.objects.update(created_at=timezone.now() - timedelta(days=3))

    Thinner().step()

    assert Generation.objects.filter(pk=view.generation_id).exists()


def test_operations_of_the_sandbox_do_not_touch_it(
    machine: FakeHost, queue: StubBroker, paused: Sandbox, number: int
) -> None:
    view = moments.request_view(sandbox=paused, number=number)
    past_files.open_view(str(view.pk))

    services.resume_sandbox(sandbox=paused)
    operations.boot(paused.id)

    assert machine.files.is_open(view.volume_id)
    paused.refresh_from_db()
    assert paused.state == Sandbox.State.RUNNING


# -- over HTTP, with a file server behind a gate ------------------------------------------


@pytest.fixture
def past(
    at_once: FakeHost, guest: LocalGuest, host: Host, paused: Sandbox, number: int
) -> Iterator[Callable[[], None]]:
    """Let the host's gate lead to a file server for the view that is asked for."""
    Host.objects.update(gate_port=guest.gate_port, gate_public_key=guest.gate_public_key)

    served: list[str] = []

    def serve() -> None:
        view = moments.request_view(sandbox=paused, number=number)
        served.append(view.volume_id.hex)
        guest.serve_paused_files(view.volume_id.hex)

    yield serve
    for volume_hex in served:
        guest.drop_paused_files(volume_hex)


def test_its_files_are_read_over_the_api(
    http: httpx.Client,
    past: Callable[[], None],
    paused: Sandbox,
    number: int,
    folder: Path,
) -> None:
    past()
    (folder / "old").write_bytes(b"as it was")
    base = f"/sandboxes/{paused.id}/files"
    query: dict[str, Any] = {"generation": number}

    read = http.get(base, params=query | {"path": str(folder / "old")})
    stat = http.get(f"{base}/stat", params=query | {"path": str(folder / "old")})
    listed = http.get(f"{base}/list", params=query | {"path": str(folder)})

    assert read.content == b"as it was"
    assert stat.json()["data"]["size"] == 9
    assert [one["name"] for one in listed.json()["data"]["entries"]] == ["old"]


def test_the_past_cannot_be_changed(
    http: httpx.Client, at_once: FakeHost, paused: Sandbox
) -> None:
    query: dict[str, Any] = {"generation": 1, "path": "/x"}
    base = f"/sandboxes/{paused.id}/files"

    answers = [
        http.post(base, params=query, content=b"x"),
        http.post(base, params=query | {"mkdir": "true"}),
        http.delete(base, params=query),
    ]

    assert [answer.status_code for answer in answers] == [400] * 3


@pytest.mark.parametrize(("text", "status"), [("x", 400), ("-1", 400), ("4711", 404)])
def test_a_generation_that_is_none_is_refused(
    http: httpx.Client, at_once: FakeHost, paused: Sandbox, text: str, status: int
) -> None:
    started = time.monotonic()

    response = http.get(
        f"/sandboxes/{paused.id}/files", params={"generation": text, "path": "/etc"}
    )

    assert response.status_code == status
    assert time.monotonic() - started < 5


def test_one_whose_disk_died_is_closed_and_nothing_of_it_stays(
    machine: FakeHost, paused: Sandbox, number: int
) -> None:
    view = moments.request_view(sandbox=paused, number=number)
    past_files.open_view(str(view.pk))
    machine.files.used_at[view.volume_id] = timezone.now()
    machine.disks.dead.add(view.volume_id)

    assert Watcher().look() == [("close_view", str(view.pk))]
    past_files.close_view(str(view.pk))

    assert not FileView.objects.exists()
    assert view.volume_id not in machine.disks.disks
