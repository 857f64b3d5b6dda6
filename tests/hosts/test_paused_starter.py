"""The confinement that waits for the next files to be opened, with real processes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hosts import paused_starter
from hosts.paused_files import PausedFiles
from hosts.paused_mount import Given
from tests.hosts.machine import needs_root, wait_for
from tests.hosts.test_paused_files import (
    folder,
    image,
    is_alive,
    paused,
    processes_below,
    read,
    sftp,
    volume_id,
)

__all__ = ["folder", "image", "paused", "volume_id"]  # fixtures

pytestmark = needs_root

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Two programs' forks, the first two processes of the confinement.
WAITING = 2


def eventually(holds: Callable[[], bool], what: str) -> None:
    assert wait_for(holds, timeout_s=20, step_s=0.01), what


def status(pid: int) -> list[str]:
    """Return the fields of a process's state, from the third on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def began_at_s(pid: int) -> float:
    """Say when a process began, by the clock of `time.monotonic`."""
    return int(status(pid)[19]) / TICKS_PER_S


class Warm:
    """A host whose starter has a confinement that waits."""

    def __init__(self, paused: PausedFiles, files: Path) -> None:
        self.paused = paused
        self.files = files
        paused.warm()
        eventually(lambda: bool(self.starters()), "a starter")
        (self.pid,) = self.starters()
        self.await_spare()

    def starters(self) -> list[int]:
        texts = [path.read_text() for path in self.files.glob("starter-*.lock")]
        return [int(text) for text in texts if text]

    def forked(self) -> list[int]:
        """List what the starter has forked and that has not served or ended yet."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [pid for pid in map(int, children.split()) if is_alive(pid)]

    def spare(self) -> set[int]:
        """List the processes of the confinement that waits."""
        sessions = {str(pid) for pid in self.forked()}
        found = set(self.forked())
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if status(int(entry.name))[3] in sessions:
                    found |= processes_below(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    def await_spare(self) -> None:
        # Who forked it, its init, and what becomes fuse2fs.
        eventually(lambda: len(self.spare()) == WAITING + 1, "a confinement that waits")

    def init_of(self, volume_id: uuid.UUID) -> int:
        path = self.paused.socket(volume_id).with_suffix(".pid")
        return int(path.read_text().split()[0])


@pytest.fixture
def warm(paused: PausedFiles, folder: Path) -> Iterator[Warm]:
    yield Warm(paused, folder / "files")
    paused.cool()


async def test_files_are_served_by_what_waited_and_another_is_made(
    warm: Warm, paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    waited = warm.spare()
    opened_at_s = time.monotonic()
    paused.open(volume_id, image)

    init = warm.init_of(volume_id)
    assert init in waited
    assert began_at_s(init) < opened_at_s
    async with sftp(paused, volume_id) as client:
        assert await read(client, "/home/dev/hello") == b"hello\n"
    await asyncio.to_thread(warm.await_spare)
    assert not warm.spare() & waited
    assert paused.close(volume_id)
    assert not any(is_alive(pid) for pid in waited)


def test_what_serves_has_nothing_of_the_starters_nor_of_the_hosts(
    warm: Warm, paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    paused.open(volume_id, image)
    init = warm.init_of(volume_id)
    inside = ("/dev/null", "/image/disk", "/dev/fuse", "socket:", "pipe:", "anon_inode:")
    given = tuple(f"{volume_id.hex}.{kind}" for kind in ("state", "used", "dirty"))
    for pid in processes_below(init):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            place = str(link.readlink())
            assert place.startswith(inside) or place.endswith((*given, "/log")), place


async def test_two_volumes_that_are_opened_at_once_are_both_served(
    warm: Warm, paused: PausedFiles, volume_id: uuid.UUID, image: Path, folder: Path
) -> None:
    other = uuid.uuid4()
    copy = folder / "other.raw"
    copy.write_bytes(image.read_bytes())
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(paused.open, (volume_id, other), (image, copy)))
        assert warm.init_of(volume_id) != warm.init_of(other)
        for opened in (volume_id, other):
            async with sftp(paused, opened) as client:
                assert await read(client, "/home/dev/hello") == b"hello\n"
    finally:
        assert paused.close(other)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_waits_ends_with_the_starter(warm: Warm, number: signal.Signals) -> None:
    waiting = warm.spare()
    os.kill(warm.pid, number)
    eventually(lambda: not any(map(is_alive, waiting)), "the end of what waited")


def test_a_starter_that_is_still_being_started_is_ended_too(
    paused: PausedFiles, folder: Path
) -> None:
    before = processes_below(os.getpid())
    paused.warm()
    paused.cool()
    assert processes_below(os.getpid()) <= before


@pytest.mark.parametrize("is_init", [False, True])
async def test_what_waited_and_was_killed_is_done_without(
    warm: Warm, paused: PausedFiles, volume_id: uuid.UUID, image: Path, is_init: bool
) -> None:
    (first,) = warm.forked()
    waiting = warm.spare()
    init = min(waiting - {first}, key=began_at_s)
    os.kill(init if is_init else first, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, waiting)), "the end of what waited")
    paused.open(volume_id, image)
    async with sftp(paused, volume_id) as client:
        assert await read(client, "/home/dev/hello") == b"hello\n"


def test_what_was_asked_for_by_a_worker_that_died_serves_nobody(
    warm: Warm, paused: PausedFiles, volume_id: uuid.UUID, image: Path
) -> None:
    waiting = warm.spare()
    (path,) = [path for path in warm.files.glob("starter-*") if path.is_socket()]
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, its, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(path))
        assert connection.recv(16) == b"here"
        given = Given(*[its.fileno()] * len(Given._fields))
        socket.send_fds(connection, [b"mend"], given)
        assert connection.recv(16) == b"ready"
        connection.close()  # it dies before it has said go
        its.close()
        eventually(lambda: not any(map(is_alive, waiting)), "the end of what waited")
        assert mine.recv(1) == b""  # nobody has it any more

    warm.await_spare()
    paused.open(volume_id, image)


def test_a_starter_is_given_nothing_before_it_answers(folder: Path) -> None:
    path = folder / "starter"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        reader, writer = os.pipe()
        given = Given(*[writer] * len(Given._fields))
        assert not paused_starter.ask(path, given, repair=False)
        os.close(writer)
        os.set_blocking(reader, False)
        assert os.read(reader, 1) == b""  # no other end is open
        os.close(reader)


def test_a_confinement_that_is_never_told_what_to_serve_ends(folder: Path) -> None:
    (folder / "root").mkdir()
    make = (
        "import sys; from hosts import paused_mount;"
        "print(paused_mount.confine(sys.argv[1], 1 << 30).init_pid)"
    )
    command = [sys.executable, "-c", make, str(folder / "root")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    init = int(done.stdout)
    eventually(lambda: not is_alive(init), "its end")
