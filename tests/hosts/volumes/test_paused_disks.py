"""Files of a sleeping sandbox on a real disk: cut while they are open, over a real store."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from common.units import MiB
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
