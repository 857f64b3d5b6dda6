"""Disks as files, from a real store through a gate, as clients download them."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from accounts.models import AuditEvent
from common.units import MiB
from hosts import image_exports, local
from hosts.image_exports import ExportsConfig, ImageExports, TooManyExports
from hosts.models import Generation, Host, Volume
from hosts.services import publish_commit
from hosts.volumes.commit import import_image
from hosts.volumes.objects import StoreConfig
from hosts.volumes.store import S3ObjectStore
from sandboxes import images
from sandboxes.models import Cut, Sandbox, Snapshot
from tests.fakes.guest_link import LocalGuest
from tests.fakes.host import FakeHost
from tests.hosts.volumes.test_image_stream import raw_image
from tests.s3 import s3, s3_server

__all__ = ["s3", "s3_server"]

pytestmark = pytest.mark.django_db(transaction=True)

SIZE_BYTES = 64 * MiB


@pytest.fixture
def gated(at_once: FakeHost, guest: LocalGuest, host: Host) -> LocalGuest:
    """The host in memory, with a real gate before it."""
    Host.objects.update(gate_port=guest.gate_port, gate_public_key=guest.gate_public_key)
    return guest


@pytest.fixture
def exports(
    gated: LocalGuest, s3: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ImageExports]:
    """What sends files of the host and takes them in."""
    exports = ImageExports(ExportsConfig(gated.images_dir, tmp_path / "intake", s3))
    store = S3ObjectStore(s3)
    monkeypatch.setattr(local, "image_exports", lambda: exports)
    monkeypatch.setattr(local, "object_store", lambda: store)
    yield exports
    for process in exports._running.values():
        process.kill()
        process.wait()


@pytest.fixture
def raw(exports: ImageExports, paused: Sandbox, tmp_path: Path) -> Path:
    """What the paused sandbox's disk holds, as a raw file."""
    image = raw_image(tmp_path / "raw", SIZE_BYTES, [0, 3, 4, 900])
    volume = Volume.objects.get(pk=paused.volume_id)
    Volume.objects.filter(pk=volume.pk).update(head=None)
    commit = import_image(
        image,
        volume_id=volume.pk,
        store=local.object_store(),
        size_bytes=SIZE_BYTES,
        keyring=local.keyring(),
    )
    publish_commit(volume.pk, epoch=volume.epoch, kind=Generation.Kind.PAUSE, commit=commit)
    return image


def download(http: httpx.Client, path: str, to: Path, **query: Any) -> Path:
    with http.stream("GET", path, params=query) as answer, to.open("wb") as file:
        assert answer.status_code == 200, answer.read()
        for piece in answer.iter_raw():
            file.write(piece)
    assert to.stat().st_size == int(answer.headers["Content-Length"])
    assert answer.headers["Content-Disposition"].startswith("attachment; filename=")
    return to


def check(image: Path, raw: Path) -> None:
    commands: list[list[str | Path]] = [
        ["qemu-img", "check", "-f", "qcow2", image],
        ["qemu-img", "compare", "-f", "raw", "-F", "qcow2", raw, image],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_sandboxs_disk_is_one_file(
    http: httpx.Client, raw: Path, paused: Sandbox, tmp_path: Path
) -> None:
    image = download(http, f"/sandboxes/{paused.id}/export.qcow2", tmp_path / "image")

    check(image, raw)
    assert AuditEvent.objects.filter(action="sandbox.export").exists()


def test_so_is_a_snapshots_when_its_sandbox_is_gone(
    http: httpx.Client, raw: Path, paused: Sandbox, tmp_path: Path
) -> None:
    http.post(f"/sandboxes/{paused.id}/snapshots", json={})
    http.delete(f"/sandboxes/{paused.id}")
    snapshot = Snapshot.objects.get()

    path = f"/sandbox-rootfs-snapshots/{snapshot.id}/export.qcow2"
    check(download(http, path, tmp_path / "image"), raw)

    assert Cut.objects.filter(generation=snapshot.generation).exists()


def test_so_is_a_moment_of_the_history(
    http: httpx.Client, raw: Path, paused: Sandbox, tmp_path: Path
) -> None:
    number = Volume.objects.select_related("head").get(pk=paused.volume_id).head
    assert number is not None

    path = f"/sandboxes/{paused.id}/export.qcow2"
    check(download(http, path, tmp_path / "image", generation=number.number), raw)

    assert http.get(path, params={"generation": 4711}).status_code == 404
    assert http.get(path, params={"generation": "x"}).status_code == 400


def test_a_host_that_does_not_send_it_is_said_in_time(
    http: httpx.Client,
    raw: Path,
    paused: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(local.image_exports(), "start", lambda *_, **__: None)

    answer = http.get(f"/sandboxes/{paused.id}/export.qcow2")

    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "5"


class BrokenStream:
    """A stream that ends early."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.is_closed = False

    async def read(self, count: int) -> bytes:
        piece, self.content = self.content[:count], self.content[count:]
        return piece

    def close(self) -> None:
        self.is_closed = True


async def test_a_file_that_is_cut_short_breaks_off() -> None:
    stream: Any = BrokenStream(b"x" * 1000)
    pieces = aiter(images._pieces(stream, stream, Cut(), 1001))

    assert await anext(pieces) == b"x" * 1000
    with pytest.raises(ConnectionError):
        await anext(pieces)

    assert stream.is_closed


def test_a_host_sends_only_so_many_at_once(
    exports: ImageExports, raw: Path, paused: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_exports, "MAX_EXPORTS", 1)
    first, second = (
        Cut.objects.create(sandbox=paused, state="done", generation=_head(paused))
        for _ in range(2)
    )
    exports.start(first.pk, root_key="x", keys={})
    exports.start(first.pk, root_key="x", keys={})

    with pytest.raises(TooManyExports):
        exports.start(second.pk, root_key="x", keys={})


def _head(sandbox: Sandbox) -> Generation:
    head = Volume.objects.select_related("head").get(pk=sandbox.volume_id).head
    assert head is not None
    return head
