"""Hostile file systems: whatever is in the image, there are files or an error, in time.

Each case spoils one kind of structure of a small ext4 image, with seeds, and opens it by the
way that a worker does. `SPOILED_IMAGES` sets how many cases of each kind are tried.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import stat
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from common.units import KiB, MiB
from hosts.paused_files import (
    FilesUnavailable,
    FileSystemDamaged,
    PausedFiles,
    PausedFilesConfig,
)
from tests.hosts.machine import needs_root
from tests.hosts.test_paused_files import is_alive, processes_below, sftp

pytestmark = needs_root

CASES = int(os.environ.get("SPOILED_IMAGES", "2"))
FIRST_ID = 1 << 30
BLOCK = 1024
CASE_S = 100
"""For all of one case: e2fsck alone may take 60 s before it is ended."""
MAX_LOOKED_AT = 500

Spoil = Callable[[random.Random, bytearray, "Places"], None]


class Places:
    """Where the structures of the image lie, in bytes."""

    def __init__(self, image: Path) -> None:
        text = subprocess.run(
            ["dumpe2fs", str(image)], check=True, capture_output=True, text=True
        ).stdout
        self.inode_tables = [
            int(line.split("Inode table at ")[1].split("-")[0].split()[0]) * BLOCK
            for line in text.splitlines()
            if "Inode table at " in line
        ]
        self.bitmaps = [
            int(line.split("bitmap at ")[1].split()[0]) * BLOCK
            for line in text.splitlines()
            if "bitmap at " in line
        ]
        self.directories = [
            int(block) * BLOCK
            for path in ("/", "/etc", "/deep", "/many")
            for block in subprocess.run(
                ["debugfs", "-R", f"blocks {path}", str(image)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
        ]


def flip(draw: random.Random, image: bytearray, begin: int, end: int, count: int) -> None:
    for _ in range(count):
        image[draw.randrange(begin, end)] = draw.randrange(256)


def superblock(draw: random.Random, image: bytearray, _: Places) -> None:
    flip(draw, image, 1024, 1024 + 0x3FC, draw.randint(1, 4))


def group_descriptors(draw: random.Random, image: bytearray, _: Places) -> None:
    flip(draw, image, 2048, 2048 + 256, draw.randint(1, 8))


def bitmaps(draw: random.Random, image: bytearray, places: Places) -> None:
    begin = draw.choice(places.bitmaps)
    flip(draw, image, begin, begin + BLOCK, 20)


def inodes(draw: random.Random, image: bytearray, places: Places) -> None:
    begin = places.inode_tables[0]
    flip(draw, image, begin, begin + 40 * 256, draw.randint(1, 60))


def directories(draw: random.Random, image: bytearray, places: Places) -> None:
    for begin in places.directories:
        flip(draw, image, begin, begin + BLOCK, draw.randint(0, 12))


def cut_off(draw: random.Random, image: bytearray, _: Places) -> None:
    del image[draw.randrange(0, len(image)) :]


def anywhere(draw: random.Random, image: bytearray, _: Places) -> None:
    flip(draw, image, 0, 2 * MiB, 4000)


@pytest.fixture(scope="module")
def sound() -> Iterator[Path]:
    """A small image with all kinds of files, and checksums of metadata."""
    folder = Path(tempfile.mkdtemp(prefix="fz-"))
    source = folder / "source"
    (source / "deep/er/still").mkdir(parents=True)
    (source / "etc").mkdir()
    (source / "many").mkdir()
    for number in range(60):
        (source / f"many/{number:03}-{'n' * number}").write_bytes(b"x" * number * 100)
    (source / "etc/link").symlink_to("../deep/er")
    (source / "etc/long").symlink_to("x" * 200)
    (source / "deep/sparse").write_bytes(b"x")
    os.truncate(source / "deep/sparse", MiB)
    os.mkfifo(source / "etc/fifo")
    image = folder / "image"
    command = ("mke2fs", "-q", "-t", "ext4", "-b", str(BLOCK), "-O", "metadata_csum", "-d")
    subprocess.run([*command, str(source), str(image), "16M"], check=True)
    yield image
    shutil.rmtree(folder)


@pytest.mark.timeout(CASES * CASE_S + 60)
@pytest.mark.parametrize("checks", [True, False], ids=["checksums", "no-checksums"])
@pytest.mark.parametrize(
    "spoil",
    [superblock, group_descriptors, bitmaps, inodes, directories, cut_off, anywhere],
    ids=lambda one: one.__name__,
)
async def test_a_spoiled_file_system_is_an_error_or_has_files_and_does_nothing_else(
    sound: Path, *, spoil: Spoil, checks: bool
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fz-"))
    canary = folder / "canary"
    canary.write_text("the host's")
    paused = PausedFiles(PausedFilesConfig(folder / "files", folder / "log", FIRST_ID))
    image = folder / "image"
    shutil.copy(sound, image)
    if not checks:
        # So that what is spoiled is believed, and not found out by its checksum.
        subprocess.run(
            ["tune2fs", "-O", "^metadata_csum", str(image)], check=True, capture_output=True
        )
    content, places = image.read_bytes(), Places(image)
    paused.warm()
    try:
        for seed in range(CASES):
            draw = random.Random(f"{spoil.__name__} {checks} {seed}")
            spoiled = bytearray(content)
            spoil(draw, spoiled, places)
            image.write_bytes(spoiled)
            began = time.monotonic()
            left = await _try(paused, image)
            assert time.monotonic() - began < CASE_S, seed
            assert not [pid for pid in left if is_alive(pid)], seed
            assert canary.read_text() == "the host's"
    finally:
        paused.cool()
        shutil.rmtree(folder)


async def _try(paused: PausedFiles, image: Path) -> set[int]:
    """Open the image, use it, and close it; returns the processes that there were."""
    volume_id = uuid.uuid4()
    processes: set[int] = set()
    try:
        path = await asyncio.to_thread(paused.open, volume_id, image)
        processes = processes_below(int(path.with_suffix(".pid").read_text().split()[0]))
        async with sftp(paused, volume_id) as client, asyncio.timeout(20):
            await _use(client)
    except (FileSystemDamaged, FilesUnavailable, asyncssh.Error, OSError):
        pass  # which TimeoutError is, too: the close below ends what hangs
    await asyncio.to_thread(paused.close, volume_id)
    assert not paused.is_open(volume_id)
    return processes


async def _use(client: asyncssh.SFTPClient) -> None:
    """Look at everything, read a little of it, and write."""
    pending, looked_at = [b"/"], 0
    while pending and looked_at < MAX_LOOKED_AT:
        folder = pending.pop()
        try:
            async for entry in client.scandir(folder):
                name = entry.filename
                assert isinstance(name, bytes)
                looked_at += 1
                if name in {b".", b".."} or looked_at > MAX_LOOKED_AT:
                    continue
                path = folder.rstrip(b"/") + b"/" + name
                mode = entry.attrs.permissions or 0
                if stat.S_ISDIR(mode):
                    pending.append(path)
                elif stat.S_ISREG(mode):
                    await _read_some(client, path)
        except asyncssh.SFTPError:
            continue
    for path in (b"/written", b"/many/written", b"/deep/er/written"):
        try:
            async with client.open(path, "wb") as file:
                await file.write(b"w" * 100_000)
            await client.remove(path)
        except asyncssh.SFTPError:
            continue


async def _read_some(client: asyncssh.SFTPClient, path: bytes) -> None:
    try:
        async with client.open(path, "rb") as file:
            await file.read(64 * KiB, 0)
            await file.read(64 * KiB, 1 << 40)
    except asyncssh.SFTPError:
        return
