"""Files of a paused volume: a real ext4 image, fuse2fs in its confinement, SFTP by the gate."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, cast

import asyncssh
import pytest

from common.units import MiB
from hosts import paused_mount
from hosts.gate import Gate, GateConfig
from hosts.link import GateEndpoint, Links
from hosts.paused_files import (
    FilesUnavailable,
    FileSystemDamaged,
    PausedFiles,
    PausedFilesConfig,
)
from sandboxes import files
from tests.hosts.machine import needs_root
from tests.hosts.ssh_guest import new_key, public_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = needs_root

FIRST_ID = 1 << 30
ODD_NAMES = [
    b"new\nline",
    "😀 emoji é".encode(),
    b"\xff\xfe not utf-8",
    b"n" * 255,
    b" space ",
    b"-rf",
    b"%2F..%2F#?&+;",
    "e\u0301".encode(),
]


def run(*command: str | Path, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, check=check, capture_output=True, timeout=60)


def is_alive(pid: int) -> bool:
    """Tell whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def read(client: asyncssh.SFTPClient, path: str | bytes) -> bytes:
    async with client.open(path, "rb") as file:
        # asyncssh's annotation knows text only.
        return cast("bytes", await file.read())


async def write(client: asyncssh.SFTPClient, path: str | bytes, content: bytes) -> None:
    async with client.open(path, "wb") as file:
        await file.write(content)


def fsck(image: Path) -> int:
    return run("/usr/sbin/e2fsck", "-fn", image, check=False).returncode


def checked(image: Path) -> str:
    """Return what e2fsck has to say."""
    return run("/usr/sbin/e2fsck", "-fn", image, check=False).stdout.decode()


def processes_below(pid: int) -> set[int]:
    """Return the pid and those of all its descendants."""
    found = {pid}
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in children.read_text().split():
        found |= processes_below(int(child))
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not `tmp_path`: with the test's name in it a socket's path would be too long.
    path = Path(tempfile.mkdtemp(prefix="pf-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def image(folder: Path) -> Path:
    source = folder / "source"
    (source / "home/dev").mkdir(parents=True)
    (source / "etc").mkdir()
    (source / "etc/passwd").write_text("guest:x:0:0::/:/bin/sh\n")
    (source / "home/dev/hello").write_text("hello\n")
    (source / "home/dev/absolute").symlink_to("/etc/passwd")
    (source / "home/dev/climbing").symlink_to("../../../../../../etc/passwd")
    (source / "home/dev/outside").symlink_to(folder)
    os.mkfifo(source / "home/dev/fifo")
    os.mknod(source / "home/dev/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.chown(source / "home/dev/hello", 1000, 1001)
    (source / "home/dev/hello").chmod(0o640)
    os.utime(source / "home/dev/hello", (1_500_000_000, 1_400_000_000))
    path = folder / "disk.raw"
    run("/usr/sbin/mke2fs", "-q", "-t", "ext4", "-d", source, path, "256M")
    return path


@pytest.fixture
def volume_id() -> uuid.UUID:
    return uuid.uuid4()


@pytest.fixture
def paused(folder: Path, volume_id: uuid.UUID) -> Iterator[PausedFiles]:
    files = PausedFiles(PausedFilesConfig(folder / "files", folder / "log", FIRST_ID))
    yield files
    files.close(volume_id)


@asynccontextmanager
async def sftp(paused: PausedFiles, volume_id: uuid.UUID) -> AsyncIterator[asyncssh.SFTPClient]:
    """Reach the volume as the web process does: through a gate."""
    folder = paused.socket(volume_id).parent
    gate_key, platform_key = new_key(), new_key()
    key_file = folder / "gate.key"
    key_file.write_bytes(gate_key.export_private_key())
    gate = Gate(
        GateConfig(
            host="127.0.0.1",
            port=0,
            key_file=key_file,
            platform_public_key=public_text(platform_key),
            guest_subnet=IPv4Network("10.88.0.0/20"),
            files_dir=folder,
        )
    )
    await gate.start()
    links = Links(platform_key)
    endpoint = GateEndpoint("127.0.0.1", gate.port, public_text(gate_key))
    try:
        yield await links.paused_sftp(endpoint, volume_id)
    finally:
        await links.close()
        await gate.close()


def content_of(image: Path, path: str) -> bytes:
    """Read a file with debugfs, which shares no code of ours."""
    return run("/usr/sbin/debugfs", "-R", f'cat "{path}"', image).stdout


async def test_files_are_read_listed_and_described(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.open(volume_id, image)

    async with sftp(paused, volume_id) as client:
        names = set(await client.listdir(b"/home/dev"))
        attrs = await client.lstat("/home/dev/hello")
        content = await read(client, "/home/dev/hello")
        space = await client.statvfs("/")

    assert content == b"hello\n"
    assert {b"hello", b"absolute", b"fifo"} < names
    assert (attrs.uid, attrs.gid, attrs.size) == (1000, 1001, 6)
    assert stat.S_IMODE(attrs.permissions or 0) == 0o640
    assert attrs.mtime == 1_400_000_000
    assert space.blocks is not None
    assert space.blocks > 0
    assert not paused.is_dirty(volume_id)


async def test_links_lead_into_the_image_and_never_out_of_it(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path, folder: Path
) -> None:
    (folder / "secret").write_text("the host's")
    paused.open(volume_id, image)

    async with sftp(paused, volume_id) as client:
        for link in ("absolute", "climbing"):
            assert await read(client, f"/home/dev/{link}") == b"guest:x:0:0::/:/bin/sh\n"
        assert await client.readlink("/home/dev/absolute") == "/etc/passwd"
        with pytest.raises(asyncssh.SFTPNoSuchFile):
            await client.stat("/home/dev/outside/secret")
        with pytest.raises(asyncssh.SFTPNoSuchFile):
            await client.stat(str(folder / "secret"))
        with pytest.raises(asyncssh.SFTPNoSuchFile):
            await client.stat(f"/../../../..{folder}/secret")
        assert set(await client.listdir("/../..")) == set(await client.listdir("/"))


@pytest.mark.parametrize("name", ["fifo", "null", "."])
async def test_what_is_no_regular_file_is_not_opened(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path, name: str
) -> None:
    paused.open(volume_id, image)

    async with sftp(paused, volume_id) as client, asyncio.timeout(10):
        for mode in ("rb", "r+b"):
            with pytest.raises(asyncssh.SFTPError):
                await client.open(f"/home/dev/{name}", mode)


async def test_changes_are_in_the_image_after_closing_and_it_is_clean(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        await write(client, "/home/dev/new", b"first")
        await write(client, "/home/dev/new", b"second, and longer")
        async with client.open("/home/dev/new", "ab") as file:
            await file.write(b"; appended")
        await client.mkdir("/home/dev/folder")
        await client.rename("/home/dev/hello", "/home/dev/folder/moved")
        await client.symlink("../new", "/home/dev/folder/link")
        await client.link("/home/dev/new", "/home/dev/hard")
        await client.chown("/home/dev/new", 1000, 300_000)
        await client.chmod("/home/dev/new", 0o4751)
        await client.utime("/home/dev/new", (1_600_000_000, 1_600_000_001))
        await client.remove("/home/dev/absolute")
        await client.posix_rename("/etc/passwd", "/home/dev/climbing")
        await client.truncate("/home/dev/folder/moved", 3)
        with pytest.raises(asyncssh.SFTPError):
            await client.rename("/home/dev/new", "/home/dev/folder/moved")

    assert paused.close(volume_id)

    assert fsck(image) == 0
    assert content_of(image, "/home/dev/hard") == b"second, and longer; appended"
    assert content_of(image, "/home/dev/folder/moved") == b"hel"
    assert content_of(image, "/home/dev/climbing") == b"guest:x:0:0::/:/bin/sh\n"
    listing = run("/usr/sbin/debugfs", "-R", "ls -l /home/dev", image).stdout.decode()
    line = next(line for line in listing.splitlines() if line.endswith(" new"))
    assert line.split()[1:6] == ["104751", "(1)", "1000", "300000", "28"]
    assert "13-Sep-2020 12:26" in line
    assert "absolute" not in listing
    link = run("/usr/sbin/debugfs", "-R", "stat /home/dev/folder/link", image).stdout
    assert b'Fast link dest: "../new"' in link


async def test_any_name_works_both_ways(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        for name in ODD_NAMES:
            await write(client, b"/home/" + name, name)
        assert set(ODD_NAMES) < set(await client.listdir(b"/home"))
    paused.close(volume_id)

    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        for name in ODD_NAMES:
            assert await read(client, b"/home/" + name) == name
            await client.rename(b"/home/" + name, b"/home/dev/" + name)
            await client.remove(b"/home/dev/" + name)
        assert set(await client.listdir(b"/home")) == {b".", b"..", b"dev"}
    paused.close(volume_id)
    assert fsck(image) == 0


async def test_fifty_megabytes_go_up_and_come_down(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    data = os.urandom(50 * MiB)
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        await write(client, "/big", data)
    paused.close(volume_id)

    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        received = await read(client, "/big")
    paused.close(volume_id)

    assert hashlib.sha256(received).digest() == hashlib.sha256(data).digest()
    assert fsck(image) == 0


async def test_a_large_directory_is_listed_whole(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    names = {f"file-{number:05}".encode() for number in range(500)}
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        await client.mkdir("/many")
        for name in names:
            await write(client, b"/many/" + name, b"")
        listed = set(await client.listdir(b"/many"))
    paused.close(volume_id)

    assert listed == names | {b".", b".."}
    assert fsck(image) == 0


async def test_a_directory_of_many_names_is_described_from_the_image(
    paused: PausedFiles, volume_id: uuid.UUID, folder: Path
) -> None:
    source = folder / "tree"
    (source / "many/below").mkdir(parents=True)
    for number in range(6_000):
        (source / f"many/{number:05}").touch()
    for name in ODD_NAMES:
        (source / "many" / os.fsdecode(name)).write_text("odd")
    (source / "many/00007").write_bytes(b"7" * 77_777)
    os.chown(source / "many/00007", 100_000, 70_000)
    (source / "many/00007").chmod(0o4750)
    os.utime(source / "many/00007", (1_500_000_000, 1_400_000_000))
    (source / "many/link").symlink_to("00007")
    (source / "to-many").symlink_to("many/below/..")
    image = folder / "many.raw"
    run("/usr/sbin/mke2fs", "-q", "-t", "ext4", "-N", "9000", "-d", source, image, "64M")
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        await write(client, "/many/new", b"not flushed yet")
        await client.remove("/many/00008")
        found = {entry.filename: entry.attrs async for entry in client.scandir(b"/many")}
        through_link = [entry.attrs async for entry in client.scandir(b"/to-many")]
        asked = await client.lstat("/many/00007")
        page, last = await files.list_page(
            client, b"/many", limit=10, after=files.Position(b"00005"), owner="x"
        )
    paused.close(volume_id)

    names = {f"{number:05}".encode() for number in range(6_000) if number != 8}
    assert set(found) == names | set(ODD_NAMES) | {b".", b"..", b"below", b"link", b"new"}
    for field in ("size", "uid", "gid", "permissions", "mtime", "nlink"):
        assert getattr(found[b"00007"], field) == getattr(asked, field), field
    assert len(through_link) == len(found)
    assert None not in {attrs.size for attrs in through_link}
    assert found[b"new"].size == 15
    assert stat.S_ISDIR(found[b"below"].permissions or 0)
    assert [one.name for one in page][:3] == [b"00006", b"00007", b"00009"]
    assert (page[1].size_bytes, last and last.name) == (77_777, b"00016")
    assert fsck(image) == 0


async def test_a_file_removed_while_it_is_open_leaves_nothing_behind(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        async with client.open("/doomed", "w+b") as file:
            await file.write(b"x" * MiB)
            await client.remove("/doomed")
            assert cast("bytes", await file.read(MiB, 0)) == b"x" * MiB
            await file.write(b"y" * 100, MiB)
        assert not await client.exists("/doomed")
    paused.close(volume_id)

    assert fsck(image) == 0


async def test_a_shrunk_and_regrown_file_has_zeros_in_between(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        await write(client, "/file", b"x" * 10_000)
        await client.truncate("/file", 5_001)
        await client.truncate("/file", 20_000)
        async with client.open("/file", "r+b") as file:
            await file.write(b"end", 100_000)
    paused.close(volume_id)

    content = content_of(image, "/file")
    assert content == b"x" * 5_001 + bytes(94_999) + b"end"
    assert fsck(image) == 0


async def test_a_full_disk_refuses_and_stays_whole(
    paused: PausedFiles, volume_id: uuid.UUID, folder: Path
) -> None:
    image = folder / "small.raw"
    run("/usr/sbin/mke2fs", "-q", "-t", "ext4", image, "8M")
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        await write(client, "/kept", b"kept")
        with pytest.raises(asyncssh.SFTPError):
            await write(client, "/too-big", b"x" * (16 * MiB))
        await client.remove("/too-big")
        await write(client, "/after", b"after")
    paused.close(volume_id)

    assert content_of(image, "/kept") == b"kept"
    assert content_of(image, "/after") == b"after"
    assert fsck(image) == 0


async def test_many_sessions_share_a_volume(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.open(volume_id, image)

    async def write_and_read(client: asyncssh.SFTPClient, number: int) -> bytes:
        await write(client, f"/{number}", bytes([number]) * 1000)
        return await read(client, f"/{number}")

    async with sftp(paused, volume_id) as client:
        contents = await asyncio.gather(*(write_and_read(client, n) for n in range(100)))

    assert contents == [bytes([number]) * 1000 for number in range(100)]


def test_a_journal_is_replayed(paused: PausedFiles, volume_id: uuid.UUID, image: Path) -> None:
    # What debugfs writes through the journal is in it alone, as after a guest's crash.
    commands = image.parent / "commands"
    (image.parent / "block").write_bytes(b"J" * 4096)
    commands.write_text("jo\njw -b 60000 {}\njc\n".format(image.parent / "block"))
    run("/usr/sbin/debugfs", "-w", "-f", commands, image)
    features = run("/usr/sbin/dumpe2fs", "-h", image).stdout
    assert b"needs_recovery" in features

    paused.open(volume_id, image)
    assert paused.close(volume_id)

    features = run("/usr/sbin/dumpe2fs", "-h", image).stdout
    assert b"needs_recovery" not in features
    block_bytes = 1024 if b"Block size:               1024" in features else 4096
    with image.open("rb") as file:
        file.seek(60000 * block_bytes)
        assert file.read(100) == b"J" * 100


async def test_a_disk_of_the_storage_daemon_is_written_through_its_fuse_export(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path, folder: Path
) -> None:
    exported, overlay = folder / "exported", folder / "overlay.qcow2"
    exported.touch()
    run("qemu-img", "create", "-q", "-f", "qcow2", "-b", image, "-F", "raw", overlay)
    daemon = subprocess.Popen(
        [
            "qemu-storage-daemon",
            f"--blockdev=driver=file,node-name=file,filename={overlay}",
            "--blockdev=driver=qcow2,node-name=disk,file=file,discard=unmap",
            "--export=type=fuse,id=fuse,node-name=disk,writable=on,allow-other=auto,"
            f"mountpoint={exported}",
        ]
    )
    try:
        while not exported.stat().st_size:
            await asyncio.sleep(0.01)
        before = image.read_bytes()
        paused.open(volume_id, exported)
        async with sftp(paused, volume_id) as client:
            await write(client, "/home/dev/hello", b"in the overlay")
        assert paused.close(volume_id)

        assert fsck(exported) == 0
        assert content_of(exported, "/home/dev/hello") == b"in the overlay"
        assert image.read_bytes() == before
    finally:
        daemon.terminate()
        daemon.wait(10)


@pytest.mark.parametrize("offset", [1024, 1080])
def test_a_spoiled_superblock_is_an_error_of_this_volume_only(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path, folder: Path, offset: int
) -> None:
    spoiled = folder / "spoiled.raw"
    shutil.copy(image, spoiled)
    with spoiled.open("r+b") as file:
        file.seek(offset)
        file.write(os.urandom(1024 * 1024))
    other_id = uuid.uuid4()

    with pytest.raises(FileSystemDamaged):
        paused.open(other_id, spoiled)
    paused.open(volume_id, image)

    assert not paused.is_open(other_id)
    assert not paused.socket(other_id).exists()
    assert paused.opened() == [volume_id]
    assert paused.close(other_id)


@pytest.mark.parametrize("seed", range(8))
async def test_flipped_bytes_end_in_an_error_or_in_files_but_in_time(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path, seed: int
) -> None:
    draw = hashlib.shake_128(str(seed).encode()).digest(4000)
    with image.open("r+b") as file:
        for place in range(0, len(draw), 5):
            # The first megabytes: group descriptors, bitmaps, inodes, directories.
            file.seek(2048 + int.from_bytes(draw[place : place + 4], "big") % (6 * MiB))
            file.write(draw[place + 4 : place + 5])
    began = time.monotonic()

    try:
        paused.open(volume_id, image)
        async with sftp(paused, volume_id) as client:
            await asyncio.wait_for(_walk(client, b"/"), 30)
    except (FileSystemDamaged, asyncssh.SFTPError):
        pass
    paused.close(volume_id)

    assert time.monotonic() - began < 60
    assert not paused.is_open(volume_id)


async def _walk(client: asyncssh.SFTPClient, path: bytes) -> None:
    async for entry in client.scandir(path):
        name = entry.filename
        assert isinstance(name, bytes)
        if name not in {b".", b".."} and stat.S_ISDIR(entry.attrs.permissions or 0):
            await _walk(client, path.rstrip(b"/") + b"/" + name)


def test_something_that_is_no_file_system_is_refused(
    paused: PausedFiles, volume_id: uuid.UUID, folder: Path
) -> None:
    empty = folder / "empty.raw"
    empty.touch()
    os.truncate(empty, 64 * MiB)

    with pytest.raises(FileSystemDamaged):
        paused.open(volume_id, empty)


def test_an_image_is_made_while_its_confinement_is(
    paused: PausedFiles, image: Path, volume_id: uuid.UUID
) -> None:
    hidden = image.rename(image.with_name("hidden"))
    pid_file = paused.socket(volume_id).with_suffix(".pid")

    def show() -> None:
        until = time.monotonic() + 20
        while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
            assert time.monotonic() < until
            time.sleep(0.01)
        hidden.rename(image)

    paused.open(volume_id, image, show=show)

    assert paused.is_open(volume_id)
    assert paused.close(volume_id)


def test_where_an_image_cannot_be_made_nothing_is_left_behind(
    paused: PausedFiles, image: Path, volume_id: uuid.UUID
) -> None:
    pid_file = paused.socket(volume_id).with_suffix(".pid")
    pids: list[int] = []

    def show() -> None:
        until = time.monotonic() + 20
        while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
            assert time.monotonic() < until
            time.sleep(0.01)
        pids.extend(processes_below(int(pid_file.read_text().split()[0])))
        raise FilesUnavailable("no disk")

    with pytest.raises(FilesUnavailable, match="no disk"):
        paused.open(volume_id, image, show=show)

    assert pids
    assert not [pid for pid in pids if is_alive(pid)]
    assert not paused.is_open(volume_id)
    paused.open(volume_id, image)
    assert paused.is_open(volume_id)


def test_an_image_that_is_missing_is_no_fault_of_the_file_system(
    paused: PausedFiles, volume_id: uuid.UUID, folder: Path
) -> None:
    with pytest.raises(FilesUnavailable):
        paused.open(volume_id, folder / "nothing.raw")


def test_closing_leaves_no_process_and_can_be_repeated(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    path = paused.open(volume_id, image)
    pid = int(path.with_suffix(".pid").read_text().split()[0])
    processes = processes_below(pid)

    assert paused.close(volume_id)
    assert paused.close(volume_id)

    assert len(processes) == 3
    assert not [one for one in processes if is_alive(one)]
    assert not path.exists()
    assert not paused.is_open(volume_id)
    assert paused.opened() == []


def test_opening_twice_is_opening_once(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    path = paused.open(volume_id, image)
    pid = path.with_suffix(".pid").read_text()

    assert paused.open(volume_id, image) == path
    assert path.with_suffix(".pid").read_text() == pid


async def test_a_warm_host_opens_at_once_and_as_well(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    began = time.monotonic()
    paused.open(volume_id, image)
    cold_s = time.monotonic() - began
    assert paused.close(volume_id)
    paused.warm()
    starter = next(iter(await _appeared(image.parent / "files", "starter-*.lock")))
    pid = int(starter.read_text())
    try:
        paused.warm()  # one is enough
        began = time.monotonic()
        path = paused.open(volume_id, image)
        took_s = time.monotonic() - began
        init = int(path.with_suffix(".pid").read_text().split()[0])
        async with sftp(paused, volume_id) as client:
            assert await read(client, "/home/dev/hello") == b"hello\n"
        assert paused.close(volume_id)
        assert not is_alive(init)
        assert is_alive(pid)
    finally:
        paused.cool()

    assert not is_alive(pid)
    assert took_s < cold_s


async def test_a_starter_that_does_not_answer_is_done_without(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.warm()
    starter = next(iter(await _appeared(image.parent / "files", "starter-*.lock")))
    pid = int(starter.read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):  # it is not given what it would keep
            path = await asyncio.to_thread(paused.open, volume_id, image)
        init = int(path.with_suffix(".pid").read_text().split()[0])
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.3)  # it finds that nobody waits for it any more

        assert int(path.with_suffix(".pid").read_text().split()[0]) == init
        async with sftp(paused, volume_id) as client:
            assert await read(client, "/home/dev/hello") == b"hello\n"
        assert paused.close(volume_id)
    finally:
        os.kill(pid, signal.SIGCONT)
        paused.cool()


async def _appeared(folder: Path, pattern: str) -> list[Path]:
    """Wait for files with something in them."""
    async with asyncio.timeout(20):
        while not (found := [p for p in folder.glob(pattern) if p.stat().st_size]):
            await asyncio.sleep(0.01)
    return found


async def test_another_process_finds_and_closes_what_a_killed_one_left(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path, folder: Path
) -> None:
    program = (
        "import os, signal, sys, uuid; from pathlib import Path\n"
        "from hosts.paused_files import PausedFiles, PausedFilesConfig\n"
        "PausedFiles(PausedFilesConfig(Path(sys.argv[1]))).open(uuid.UUID(sys.argv[2]),"
        " Path(sys.argv[3]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = run(
        sys.executable,
        "-c",
        program,
        folder / "files",
        str(volume_id),
        image,
        check=False,
    )

    assert ended.returncode == -signal.SIGKILL
    assert paused.opened() == [volume_id]
    async with sftp(paused, volume_id) as client:
        await write(client, "/left", b"left")
    assert paused.close(volume_id)
    assert content_of(image, "/left") == b"left"


@pytest.mark.parametrize("again", ["close", "open"])
async def test_a_mount_cut_short_is_mended(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path, again: str
) -> None:
    path = paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        for number in range(50):
            await write(client, f"/home/{number}", b"x" * 5000)
    pid = int(path.with_suffix(".pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    while is_alive(pid):
        time.sleep(0.01)
    assert not paused.is_open(volume_id)
    if again == "open":
        paused.open(volume_id, image)

    assert paused.close(volume_id)

    assert fsck(image) == 0
    assert content_of(image, "/home/dev/hello") == b"hello\n"
    assert paused.is_dirty(volume_id)


async def test_a_mount_cut_short_whose_image_is_gone_is_not_whole(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    path = paused.open(volume_id, image)
    pid = int(path.with_suffix(".pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    while is_alive(pid):
        time.sleep(0.01)
    image.unlink()

    assert not paused.close(volume_id)
    assert not paused.close(volume_id)


def test_a_worker_killed_while_it_opens_leaves_what_the_next_one_can_close(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path, folder: Path
) -> None:
    program = (
        "import sys, uuid; from pathlib import Path\n"
        "from hosts.paused_files import PausedFiles, PausedFilesConfig\n"
        "print(flush=True)\n"
        "PausedFiles(PausedFilesConfig(Path(sys.argv[1]))).open(uuid.UUID(sys.argv[2]),"
        " Path(sys.argv[3]))\n"
    )
    command = (sys.executable, "-c", program, folder / "files", str(volume_id), image)
    state = paused.socket(volume_id).with_suffix(".state")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        while not state.exists():
            time.sleep(0.001)
        time.sleep(0.05)  # it has started the other process, which is far from ready
        worker.kill()

    assert paused.close(volume_id)

    assert not paused.is_open(volume_id)
    assert paused.open(volume_id, image)
    assert paused.close(volume_id)
    assert fsck(image) == 0


def test_a_stale_pid_file_names_nobody(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    path = paused.open(volume_id, image)
    paused.close(volume_id)
    # Our own pid, as if it had been given to us after the other process ended.
    path.with_suffix(".pid").write_text(f"{os.getpid()} 1\n")

    assert not paused.is_open(volume_id)
    assert paused.close(volume_id)


async def test_use_and_change_are_recorded(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        await client.stat("/")
        used_at = paused.last_used_at(volume_id)
        clean = not paused.is_dirty(volume_id)
        await client.mkdir("/changed")
        dirty = paused.is_dirty(volume_id)
    with pytest.raises(FilesUnavailable):
        paused.clear_dirty(volume_id)
    paused.close(volume_id)
    still_dirty = paused.is_dirty(volume_id) and paused.changed() == [volume_id]
    paused.clear_dirty(volume_id)

    assert used_at is not None
    assert datetime.now(UTC) - used_at < timedelta(seconds=10)
    assert (clean, dirty, still_dirty) == (True, True, True)
    assert paused.changed() == []
    assert not paused.is_dirty(volume_id)


async def test_a_cut_while_the_files_are_open_is_whole_and_clean(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path, folder: Path
) -> None:
    cut = folder / "cut.raw"
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        for number in range(60):
            await write(client, f"/home/{number}", os.urandom(number * 1_000))
        await client.mkdir("/home/last")
        marks = await asyncio.to_thread(_cut, paused, volume_id, image, cut)
        assert paused.is_dirty(volume_id)
        paused.note_stored(volume_id, marks)
        stored = paused.is_unchanged(volume_id)
        await write(client, "/home/after", b"after")
        dirty_again = paused.is_dirty(volume_id)
    assert paused.close(volume_id)

    assert (stored, dirty_again) == (True, True)
    assert fsck(cut) == 0, checked(cut)
    features = run("/usr/sbin/dumpe2fs", "-h", cut).stdout
    assert b"state:         clean" in features
    assert len(content_of(cut, "/home/59")) == 59_000
    assert b"directory" in run("/usr/sbin/debugfs", "-R", "stat /home/last", cut).stdout
    assert content_of(cut, "/home/after") == b""
    assert fsck(image) == 0
    assert content_of(image, "/home/after") == b"after"


def _cut(paused: PausedFiles, volume_id: uuid.UUID, image: Path, copy: Path) -> int:
    with paused.settled(volume_id) as marks:
        run("cp", "--sparse=always", image, copy)
        return marks


async def test_requests_wait_for_a_cut_and_go_on_after_it(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        with paused.settled(volume_id):
            writing = asyncio.create_task(write(client, "/home/late", b"late"))
            await asyncio.sleep(0.3)
            waited = not writing.done()
        await asyncio.wait_for(writing, 5)
        again = await asyncio.to_thread(_enter, paused, volume_id)

    assert waited
    assert again > 0


def _enter(paused: PausedFiles, volume_id: uuid.UUID) -> int:
    with paused.settled(volume_id) as marks:
        return marks


def test_what_has_no_file_to_flush_by_is_not_cut(
    paused: PausedFiles, volume_id: uuid.UUID, folder: Path
) -> None:
    image = folder / "bare.raw"
    run("/usr/sbin/mke2fs", "-q", "-t", "ext4", image, "16M")
    paused.open(volume_id, image)

    with pytest.raises(FilesUnavailable, match="no regular file"), paused.settled(volume_id):
        pytest.fail("there is nothing that can be flushed")
    paused.close(volume_id)
    with pytest.raises(FilesUnavailable), paused.settled(volume_id):
        pytest.fail("the files are closed")


def test_a_volume_of_which_nothing_is_recorded_may_be_changed(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    assert not paused.is_unchanged(volume_id)
    paused.open(volume_id, image)
    assert paused.is_unchanged(volume_id)


def test_the_processes_are_confined(
    paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    path = paused.open(volume_id, image)
    pid = int(path.with_suffix(".pid").read_text().split()[0])
    fuse_pid, server_pid = sorted(processes_below(pid) - {pid})

    def field(of: int, name: str) -> str:
        text = Path(f"/proc/{of}/status").read_text()
        return next(line for line in text.splitlines() if line.startswith(name)).split()[1]

    for of in (pid, fuse_pid, server_pid):
        assert field(of, "Uid:") == str(FIRST_ID)
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts"):
            ours = Path(f"/proc/self/ns/{kind}").readlink()
            assert Path(f"/proc/{of}/ns/{kind}").readlink() != ours
        mounts = Path(f"/proc/{of}/mountinfo").read_text()
        assert str(path.parent.parent / "source") not in mounts
    for of in (fuse_pid, server_pid):
        assert field(of, "NoNewPrivs:") == "1"
        assert field(of, "Seccomp:") == "2"
    assert int(field(server_pid, "CapPrm:"), 16) == 0
    assert int(field(server_pid, "CapBnd:"), 16) == 0
    assert int(field(fuse_pid, "CapPrm:"), 16) == 1 << paused_mount.CAP_SYS_ADMIN
    mount = next(
        line
        for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        if " /mnt " in line
    )
    assert {"nosuid", "nodev", "noexec"} < set(mount.split()[5].split(","))
