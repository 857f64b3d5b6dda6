"""Files held still for a cut: nothing is written to their image, and what is, is found out.

The kernel tells fuse2fs of the end of a file, and does not wait for what that writes. Here
fuse2fs is stopped at the worst moments, so that it writes as late as it can.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hosts import fuse_limits, paused_settle
from hosts.paused_files import FilesUnavailable, PausedFiles
from hosts.paused_settle import SUPERBLOCK_AT, SUPERBLOCK_BYTES, Settler, held_still, says_clean
from tests.hosts.machine import needs_root
from tests.hosts.test_paused_files import (
    folder,
    image,
    paused,
    processes_below,
    run,
    sftp,
    volume_id,
    write,
)

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterator

__all__ = ["folder", "image", "paused", "volume_id"]

pytestmark = needs_root

WRITING_S = 0.5
"""By then fuse2fs has written what it was still to write."""


def superblock_of(image: Path) -> bytes:
    with image.open("rb") as file:
        file.seek(SUPERBLOCK_AT)
        return file.read(SUPERBLOCK_BYTES)


def fuse2fs_of(socket: Path) -> int:
    """Return the pid of the fuse2fs that serves by a socket."""
    init = int(socket.with_suffix(".pid").read_text().split()[0])
    for pid in processes_below(init):
        if b"/image/disk" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no fuse2fs")


@pytest.fixture
def mounted(folder: Path, image: Path) -> Iterator[tuple[int, Path]]:
    """Mount the image by a fuse2fs of our own; its pid, and where."""
    top = folder / "mnt"
    top.mkdir()
    with subprocess.Popen(["/usr/bin/fuse2fs", image, top, "-f", "-s"]) as fuse:
        while not os.path.ismount(top):
            time.sleep(0.005)
        try:
            yield fuse.pid, top
        finally:
            os.kill(fuse.pid, signal.SIGCONT)
            run("umount", top)


def test_the_end_of_the_file_it_was_flushed_by_is_not_written_into_a_cut(
    mounted: tuple[int, Path], image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse, top = mounted
    monkeypatch.setattr(paused_settle, "_regular_files", lambda _: [bytes(top / "etc/passwd")])
    fsync = os.fsync

    def fsync_and_stop(fd: int) -> None:
        fsync(fd)
        os.kill(fuse, signal.SIGSTOP)

    disk = os.open(image, os.O_RDWR)
    try:
        with Settler(disk).flushed():
            pass  # the kernel asks once what a close should wait for: nothing
        monkeypatch.setattr(os, "fsync", fsync_and_stop)
        with Settler(disk).settled():
            time.sleep(1.1)  # what fuse2fs writes has the time in it, in seconds
            os.kill(fuse, signal.SIGCONT)
            time.sleep(WRITING_S)
            assert says_clean(superblock_of(image))
    finally:
        os.close(disk)


async def test_what_was_closed_before_a_cut_is_not_written_into_it(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    fuse = fuse2fs_of(paused.open(volume_id, image))
    settling = paused.socket(volume_id).with_suffix(".settle")

    def cut() -> tuple[int, int]:
        go_on = threading.Timer(WRITING_S, os.kill, (fuse, signal.SIGCONT))
        go_on.start()
        with held_still(settling):
            os.kill(fuse, signal.SIGSTOP)
            before_ns = image.stat().st_mtime_ns
            os.kill(fuse, signal.SIGCONT)
            time.sleep(WRITING_S)
            return before_ns, image.stat().st_mtime_ns

    async with sftp(paused, volume_id) as client:
        await write(client, "/home/some", b"some")
        # Removed while they are open, so that their ends are what removes them.
        for number in range(400):
            file = await client.open(f"/home/{number}", "wb")
            await file.write(b"much" * 1_000)
            await client.remove(f"/home/{number}")
        os.kill(fuse, signal.SIGSTOP)
    await asyncio.sleep(WRITING_S)
    before_ns, after_ns = await asyncio.to_thread(cut)

    assert before_ns == after_ns
    assert paused.close(volume_id)
    assert run("/usr/sbin/e2fsck", "-fn", image, check=False).returncode == 0


async def test_files_open_where_the_limit_cannot_be_raised(
    paused: PausedFiles,
    volume_id: uuid.UUID,
    image: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fuse_limits, "let_wait", refuse)

    paused.open(volume_id, image)

    assert paused.is_open(volume_id)
    assert "may be overtaken" in caplog.text


def test_the_limit_is_raised_for_one_whose_worker_died_before_it_was(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[int] = []

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    def raise_it(pid: int, mountpoint: str, count: int) -> None:
        raised.append(pid)

    monkeypatch.setattr(fuse_limits, "let_wait", die)
    with pytest.raises(KeyboardInterrupt):
        paused.open(volume_id, image)
    assert paused.is_open(volume_id)

    monkeypatch.setattr(fuse_limits, "let_wait", raise_it)
    socket = paused.open(volume_id, image)

    assert raised == [int(socket.with_suffix(".pid").read_text().split()[0])]


async def test_a_cut_that_something_was_written_into_is_not_taken(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        await write(client, "/home/some", b"some")

        with pytest.raises(FilesUnavailable, match="did not stay still"):
            _cut_and_write(paused, volume_id, image)
        with paused.settled(volume_id):
            pass

        assert paused.close(volume_id)


def _cut_and_write(paused: PausedFiles, volume_id: uuid.UUID, image: Path) -> None:
    with paused.settled(volume_id), image.open("r+b") as file:
        file.seek(SUPERBLOCK_AT + 0x30)  # when it was last written
        file.write(b"1234")
