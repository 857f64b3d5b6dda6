"""What paused files promise, of the real ones and of the fake that other tests use."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from hosts.paused_files import FilesUnavailable, PausedFiles, PausedFilesConfig
from tests.fakes.host import FakeDisks, FakePausedFiles
from tests.hosts.machine import need
from tests.hosts.test_paused_files import sftp, write


class Real:
    """A real file system, changed through its server."""

    def __init__(self, folder: Path) -> None:
        self.volume_id = uuid4()
        self.image = folder / "image"
        (folder / "source").mkdir()
        (folder / "source/file").write_text("x")
        command = ("mke2fs", "-q", "-t", "ext4", "-d", str(folder / "source"))
        subprocess.run([*command, str(self.image), "16M"], check=True)
        self.files: Any = PausedFiles(PausedFilesConfig(folder / "files"))

    async def change(self) -> None:
        async with sftp(self.files, self.volume_id) as client:
            await write(client, "/file", os.urandom(10))

    def store(self) -> None:
        with self.files.settled(self.volume_id) as marks:
            pass
        self.files.note_stored(self.volume_id, marks)


class Fake:
    """The fake, over its disks."""

    def __init__(self) -> None:
        self.volume_id = uuid4()
        self.image = Path("/nowhere/image")
        self.disks = FakeDisks()
        self.disks.attach(self.volume_id, root_key="roots/x", epoch=1)
        self.files: Any = FakePausedFiles(self.disks)

    async def change(self) -> None:
        self.disks.disks[self.volume_id].writes += 1

    def store(self) -> None:
        marks = 0

        @contextmanager
        def held_still() -> Iterator[None]:
            nonlocal marks
            with self.files.settled(self.volume_id) as marks:
                yield

        self.disks.checkpoint(self.volume_id, lambda _: None, around_cut=held_still)
        self.files.note_stored(self.volume_id, marks)


@pytest.fixture(params=["real", "fake"])
def one(request: pytest.FixtureRequest) -> Iterator[Real | Fake]:
    if request.param == "fake":
        yield Fake()
        return
    need(met=os.geteuid() == 0, what="root, to make namespaces")
    folder = Path(tempfile.mkdtemp(prefix="pc-"))
    made = Real(folder)
    yield made
    made.files.close(made.volume_id)
    shutil.rmtree(folder)


def test_files_are_open_from_the_opening_to_the_closing(one: Real | Fake) -> None:
    files, volume_id = one.files, one.volume_id
    files.warm()
    assert not files.is_open(volume_id)
    assert files.opened() == []

    path = files.open(volume_id, one.image)
    again = files.open(volume_id, one.image)

    assert path == again
    assert files.is_open(volume_id)
    assert files.opened() == [volume_id]
    assert files.close(volume_id)
    assert files.close(volume_id)
    assert not files.is_open(volume_id)
    if isinstance(one, Real):
        files.cool()
        with socket.socket(socket.AF_UNIX) as stream, pytest.raises(OSError, match="No such"):
            stream.connect(str(path))


async def test_a_change_is_known_until_it_is_stored(one: Real | Fake) -> None:
    files, volume_id = one.files, one.volume_id
    unknown = files.is_unchanged(volume_id)
    files.open(volume_id, one.image)
    fresh = (files.is_dirty(volume_id), files.is_unchanged(volume_id))

    await one.change()
    changed = (files.is_dirty(volume_id), files.is_unchanged(volume_id))
    one.store()
    stored = (files.is_dirty(volume_id), files.is_unchanged(volume_id))
    await one.change()
    again = (files.is_dirty(volume_id), files.is_unchanged(volume_id))
    files.close(volume_id)
    closed = (files.is_dirty(volume_id), files.is_unchanged(volume_id))

    assert unknown is False
    assert fresh == stored == (False, True)
    assert changed == again == closed == (True, False)
    assert files.marked_at(volume_id) is not None
    assert files.last_used_at(volume_id) is not None


def test_what_is_recorded_is_forgotten_only_once_closed(one: Real | Fake) -> None:
    files, volume_id = one.files, one.volume_id
    files.open(volume_id, one.image)
    with pytest.raises(FilesUnavailable):
        files.clear_dirty(volume_id)

    files.close(volume_id)
    files.clear_dirty(volume_id)

    assert files.last_used_at(volume_id) is None
    assert files.marked_at(volume_id) is None
    assert not files.is_unchanged(volume_id)


def test_files_that_are_not_open_cannot_be_held_still(one: Real | Fake) -> None:
    with pytest.raises(FilesUnavailable), one.files.settled(one.volume_id):
        pytest.fail("they are closed")
