"""Files of a sleeping sandbox on a real disk: cut while they are open, over a real store."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID, uuid4

import asyncssh
import pytest
from django.conf import LazySettings

from common.units import MiB
from hosts import local
from hosts.link import LinkDown
from hosts.paused_files import PausedFiles, PausedFilesConfig
from hosts.volumes.commit import Commit, import_image
from hosts.volumes.keys import Keyring
from tests.hosts.test_paused_files import content_of, fsck, read, sftp, write
from tests.hosts.volumes.conftest import DEVICE_BYTES, Host
from tests.hosts.volumes.given_keys import KeyForEach


@pytest.fixture
def files(host: Host) -> Iterator[PausedFiles]:
    """The paused files of a host whose volume has an ext4 file system."""
    image = host.folder / "ext4"
    (host.folder / "source/etc").mkdir(parents=True)
    (host.folder / "source/etc/hostname").write_text("box\n")
    with image.open("wb") as file:
        file.truncate(256 * MiB)
    subprocess.run(
        ["mke2fs", "-q", "-t", "ext4", "-d", str(host.folder / "source"), str(image)],
        check=True,
    )
    base = import_image(
        image,
        volume_id=uuid4(),
        store=host.store,
        size_bytes=DEVICE_BYTES,
        keyring=Keyring(KeyForEach()),
    )
    host.publish(base)
    paused = PausedFiles(PausedFilesConfig(host.folder / "files", host.folder / "files.log"))
    open_files(host, paused, host.volume_id)
    yield paused
    paused.close(host.volume_id)


def open_files(host: Host, paused: PausedFiles, volume_id: UUID) -> Path:
    host.disks.attach(volume_id, root_key=host.head, epoch=1)
    device = host.folder / f"device-{volume_id.hex}"
    device.touch()
    host.disks.export_fuse(volume_id, device)
    paused.open(volume_id, device)
    return device


@contextmanager
def shown(host: Host) -> Iterator[Path]:
    """Show the head's generation as a file, over an overlay that is thrown away."""
    volume_id, device = uuid4(), host.folder / "shown"
    device.touch()
    host.disks.attach(volume_id, root_key=host.head, epoch=1)
    host.disks.export_fuse(volume_id, device)
    try:
        yield device
    finally:
        host.disks.drop_fuse(volume_id)
        host.disks.detach(volume_id, discard=True)


async def test_generations_are_cut_while_the_files_stay_open_and_each_is_clean(
    host: Host, files: PausedFiles
) -> None:
    commits: list[Commit] = []

    def publish(commit: Commit) -> None:
        host.publish(commit)
        commits.append(commit)

    @contextmanager
    def held_still() -> Iterator[None]:
        with files.settled(host.volume_id):
            yield

    def commit() -> None:
        found = host.disks.checkpoint(host.volume_id, publish, around_cut=held_still)
        assert found is not None

    async with sftp(files, host.volume_id) as client:
        for number in range(3):
            await write(client, f"/etc/file-{number}", bytes([number]) * (number * MiB + 1))
            await client.mkdir(f"/etc/folder-{number}")
            commit()
            with shown(host) as image:
                assert fsck(image) == 0
                state = subprocess.run(
                    ["dumpe2fs", "-h", str(image)], check=True, capture_output=True
                ).stdout
                assert b"state:         clean" in state
                assert len(content_of(image, f"/etc/file-{number}")) == number * MiB + 1
        await write(client, "/etc/file-3", b"after the last cut")
        assert await read(client, "/etc/file-2") == b"\x02" * (2 * MiB + 1)

    assert len({one.root_key for one in commits}) == 3
    assert files.close(host.volume_id)
    host.disks.drop_fuse(host.volume_id)
    host.disks.commit(host.volume_id, publish)
    with shown(host) as image:
        assert fsck(image) == 0
        assert content_of(image, "/etc/file-3") == b"after the last cut"
        assert content_of(image, "/etc/file-1") == b"\x01" * (MiB + 1)


def kill_storage_daemon(host: Host) -> None:
    pidfile = host.folder / f"run/disks/{host.volume_id.hex}/daemon.pid"
    os.kill(int(pidfile.read_text()), signal.SIGKILL)


def content(number: int) -> bytes:
    return bytes([number]) * 70_000


async def write_files(files: PausedFiles, host: Host) -> None:
    """Write some files, each acknowledged as durable."""
    async with sftp(files, host.volume_id) as client:
        for number in range(8):
            async with client.open(f"/etc/file-{number}", "wb") as file:
                await file.write(content(number))
                await file.fsync()


async def test_once_its_disk_died_a_server_gives_no_wrong_answer_and_ends(
    host: Host, files: PausedFiles
) -> None:
    await write_files(files, host)
    assert files.close(host.volume_id)
    host.disks.drop_fuse(host.volume_id)
    open_files(host, files, host.volume_id)
    answers = 0

    async def read_on(client: asyncssh.SFTPClient, first: int) -> None:
        nonlocal answers
        for turn in range(100_000):
            number = (first + turn) % 8
            assert await read(client, f"/etc/file-{number}") == content(number)
            found = await client.lstat(f"/etc/file-{number}")
            assert found.size == 70_000
            assert set(await client.listdir("/etc")) >= {"hostname", "file-7"}
            answers += 1

    async with sftp(files, host.volume_id) as client:
        reading = [asyncio.create_task(read_on(client, first)) for first in range(3)]
        await asyncio.sleep(0.3)
        kill_storage_daemon(host)
        ended = await asyncio.gather(*reading, return_exceptions=True)

    assert all(isinstance(one, asyncssh.SFTPError) for one in ended), ended
    assert answers
    until = time.monotonic() + 10
    while files.is_open(host.volume_id):
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    assert not files.close(host.volume_id)
    host.disks.detach(host.volume_id, discard=True)


@pytest.mark.parametrize("is_asked", [True, False])
async def test_what_was_acknowledged_before_the_disk_died_is_there_after_reopening(
    host: Host, files: PausedFiles, is_asked: bool
) -> None:
    await write_files(files, host)
    kill_storage_daemon(host)
    if is_asked:
        with pytest.raises((LinkDown, asyncssh.SFTPError)):
            async with sftp(files, host.volume_id) as client:
                await read(client, "/etc/hostname")
    device = host.folder / f"device-{host.volume_id.hex}"

    def show() -> None:
        host.disks.attach(host.volume_id, root_key=host.head, epoch=1)
        host.disks.export_fuse(host.volume_id, device)

    files.open(host.volume_id, device, show=show)

    async with sftp(files, host.volume_id) as client:
        for number in range(8):
            assert await read(client, f"/etc/file-{number}") == content(number)
        await write(client, "/etc/after", b"after")
    assert files.close(host.volume_id)
    host.disks.drop_fuse(host.volume_id)
    host.disks.commit(host.volume_id, host.publish)
    with shown(host) as image:
        assert fsck(image) == 0
        assert content_of(image, "/etc/file-7") == content(7)
        assert content_of(image, "/etc/after") == b"after"


async def test_files_whose_disk_died_are_closed_and_taken_away(
    host: Host, files: PausedFiles
) -> None:
    await write_files(files, host)
    kill_storage_daemon(host)

    assert not files.close(host.volume_id)
    host.disks.detach(host.volume_id, discard=True)

    assert not files.is_open(host.volume_id)
    assert str(host.folder) not in Path("/proc/self/mounts").read_text()


def test_the_place_of_a_device_whose_daemon_died_can_be_used_again(
    host: Host, files: PausedFiles, settings: LazySettings
) -> None:
    settings.RUN_DIR, settings.DISK_USER = host.folder, ""
    assert files.close(host.volume_id)
    device = local.device_file(host.volume_id)
    host.disks.export_fuse(host.volume_id, device)
    assert local.device_file(host.volume_id).stat().st_size == DEVICE_BYTES
    kill_storage_daemon(host)
    until = time.monotonic() + 10
    while _answers(device):
        assert time.monotonic() < until
        time.sleep(0.01)

    assert local.device_file(host.volume_id) == device
    host.disks.attach(host.volume_id, root_key=host.head, epoch=1)
    host.disks.export_fuse(host.volume_id, device)

    assert device.stat().st_size == DEVICE_BYTES
    host.disks.detach(host.volume_id, discard=True)


def _answers(path: Path) -> bool:
    try:
        os.statvfs(path)
    except OSError:
        return False
    return True
