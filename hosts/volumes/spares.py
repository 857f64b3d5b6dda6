"""One export and one storage daemon of a host that wait, all loaded, for the next disk.

Starting an export is mostly Python importing, and starting a storage daemon mostly loading:
a disk that takes the spares does not wait for that. A spare export serves nothing until it
is told whose it is, at the first connection; a spare storage daemon has no nodes until the
disk that takes it gives it some.

    RUN_DIR/spares/                       root's
    RUN_DIR/spares/<code>-e<random>/      the daemons' own, as those of disks are
        export.{sock,pid}                 moved to the disk that takes it
        export.json                       a link to that disk's, made then
    RUN_DIR/spares/<code>-d<random>/      the daemons' own
        {disk.sock,qmp.sock,daemon.pid}   moved to the disk that takes it

`<code>` stands for the engine's files and the programs: after an update, a spare of the
earlier release is not used. The disk's pidfile says which process it is, and `export.spare`
or `daemon.spare` beside it under which name it was started (see `daemons`). A worker may die
at any moment. The pidfile is moved last, once the spare does all that the disk's own would:
one of which only the socket was moved is nobody's, and ended by whoever makes the next, or
by whoever starts the disk again.
"""

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import zstandard

from hosts.volumes import export_daemon, storage_daemon
from hosts.volumes.daemons import (
    SPARES_DIR,
    daemon_pid,
    end_daemon,
    is_spare_name,
    plain_environment,
    spare_mark,
    spare_name,
)
from hosts.volumes.errors import DaemonFailed
from hosts.volumes.export_daemon import CONFIG_NAME, start_export
from hosts.volumes.failpoints import reach
from hosts.volumes.storage_daemon import start_empty

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 0.1
"""A disk that waits longer for the spare starts an export of its own."""

LOCK_POLL_S = 0.002

READY_TIMEOUT_S = 30

PAUSE_S = 1.0
"""Before the next is made: the disk that took the last one is still being attached."""

_HERE = Path(__file__).resolve()

CODE = (_HERE.parent, _HERE.parents[2] / "platform" / "common")
"""Where the code of an export lies."""

PROGRAMS = ("nbdkit", "qemu-storage-daemon")

_CODE_DIGITS = 12


@dataclass(frozen=True)
class Kind:
    """What a spare is one of."""

    name: str
    sign: str
    """A hexadecimal digit that its folders' random part begins with."""
    socket_names: tuple[str, ...]
    start: Callable[[Path, str | None], None]
    """Starts one in a folder, as a user."""
    link_name: str | None = None
    """A file that is linked to the disk's own of that name when it is given away."""

    @property
    def pid_name(self) -> str:
        return f"{self.name}.pid"


class Spares:
    """The spares of a host, of one kind. Safe from many threads and processes at once."""

    def __init__(
        self,
        run_dir: Path,
        *,
        user: str | None,
        own_dir: Callable[[Path, int], None],
        kind: Kind | None = None,
    ) -> None:
        """Look after spares, of exports if nothing else is said."""
        self._run_dir = run_dir
        self._kind = kind or EXPORTS
        self._folder = run_dir / SPARES_DIR
        self._lock = self._folder / f".lock-{self._kind.name}"
        self._making = self._folder / f".making-{self._kind.name}"
        self._user = user
        self._own_dir = own_dir
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def warm(self, *, pause_s: float = 0.0) -> None:
        """See to it that there is a spare; does not wait for that."""
        with self._guard:
            if self._thread is not None and self._thread.is_alive():
                return
            if not pause_s and self._is_warm():
                return
            self._is_over.clear()
            self._thread = threading.Thread(
                target=self._warm, args=(pause_s,), name="spare", daemon=True
            )
            self._thread.start()

    def _is_warm(self) -> bool:
        try:
            return bool(self.usable())
        except OSError:  # files of ours change just now
            return False

    def _warm(self, pause_s: float) -> None:
        if self._is_over.wait(pause_s):
            return
        try:
            self.make()
        except (DaemonFailed, OSError) as error:
            log.warning("no %s could be started ahead: %s", self._kind.name, error)

    def make(self) -> None:
        """Throw away what is of no use, and start a spare unless there is one.

        Raises:
            DaemonFailed: it did not start.
        """
        self._folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._folder.chmod(0o711)
        with _locked(self._making, timeout_s=0) as is_mine:
            if not is_mine:
                return  # somebody else makes one now
            usable = self.usable()
            self._end_all_but(usable[:1])
            if not usable:
                self._start()

    def cool(self) -> None:
        """End the spares. What disks have taken stays."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(READY_TIMEOUT_S)
        if self._folder.is_dir():
            with _locked(self._making, timeout_s=READY_TIMEOUT_S):
                self._end_all_but([])

    def usable(self) -> list[Path]:
        """List the folders of spares that run and are of this code."""
        code = code_stamp(self._user)
        return [
            folder
            for folder in self._spares()
            if folder.name.startswith(f"{code}-")
            and all((folder / name).is_socket() for name in self._kind.socket_names)
            and daemon_pid(folder / self._kind.pid_name) is not None
        ]

    def take(self, disk_dir: Path, set_up: Callable[[], None] = lambda: None) -> bool:
        """Make a spare the daemon of a disk whose configuration is written already.

        Its pidfile comes last: before that, the disk has no such daemon that runs.

        Args:
            set_up: called when the spare is reached under the disk's socket, to make it what
                the disk needs; where that fails, the spare is ended.

        Returns: False when there is none to be had at once.
        """
        if not self._folder.is_dir():
            return False
        try:
            with _locked(self._lock, timeout_s=LOCK_TIMEOUT_S) as is_mine:
                is_taken = is_mine and self._give_one(disk_dir, set_up)
        except (OSError, DaemonFailed) as error:
            log.warning("a spare %s cannot be used: %s", self._kind.name, error)
            return False
        if is_taken:
            self.warm(pause_s=PAUSE_S)
        return is_taken

    def _give_one(self, disk_dir: Path, set_up: Callable[[], None]) -> bool:
        for folder in self.usable():
            try:
                self._give(folder, disk_dir, set_up)
            except (OSError, DaemonFailed) as error:
                log.warning("a spare %s is thrown away: %s", self._kind.name, error)
                self._discard(folder)
            else:
                return True
        return False

    def _give(self, folder: Path, disk_dir: Path, set_up: Callable[[], None]) -> None:
        kind = self._kind
        mark = spare_mark(disk_dir / kind.pid_name)
        mark.unlink(missing_ok=True)
        fd = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(folder.name)
        if kind.link_name is not None:
            (folder / kind.link_name).unlink(missing_ok=True)
            (folder / kind.link_name).symlink_to(disk_dir / kind.link_name)
        for name in kind.socket_names:
            (folder / name).rename(disk_dir / name)
        reach(f"spare.{kind.name}-moved")
        set_up()
        reach(f"spare.{kind.name}-set-up")
        (folder / kind.pid_name).rename(disk_dir / kind.pid_name)

    def _start(self) -> None:
        mine = f"{self._kind.sign}{secrets.token_hex(8)[1:]}"
        folder = self._folder / f"{code_stamp(self._user)}-{mine}"
        self._own_dir(folder, 0o700)
        self._kind.start(folder, self._user)

    def _end_all_but(self, kept: list[Path]) -> None:
        """End all spares but these, and delete the folders that no disk's daemon needs."""
        with _locked(self._lock, timeout_s=READY_TIMEOUT_S) as is_mine:
            if not is_mine:
                return
            disks = self._run_dir / "disks"
            taken = {spare_name(pidfile) for pidfile in disks.glob(f"*/{self._kind.pid_name}")}
            for folder in self._spares():
                if folder in kept:
                    continue
                # The pidfile is moved last: where it is, no disk has the process.
                is_here = os.path.lexists(folder / self._kind.pid_name)
                if is_here or folder.name not in taken:
                    self._discard(folder)

    def _discard(self, folder: Path) -> None:
        """End a spare; without its folder, an export that is still starting ends of itself."""
        end_daemon(folder / self._kind.pid_name, grace_s=0)
        shutil.rmtree(folder, ignore_errors=True)

    def _spares(self) -> Iterator[Path]:
        with suppress(FileNotFoundError):
            for folder in sorted(self._folder.iterdir()):
                mine = folder.name.partition("-")[2]
                if is_spare_name(folder.name) and mine.startswith(self._kind.sign):
                    yield folder


def end_spares(run_dir: Path) -> None:
    """End the spares of a platform that stops, after all else of its."""
    for folder in (run_dir / SPARES_DIR).glob("*-*"):
        if is_spare_name(folder.name):
            for kind in (EXPORTS, DAEMONS):
                end_daemon(folder / kind.pid_name, grace_s=0)
            shutil.rmtree(folder, ignore_errors=True)


def code_stamp(user: str | None, folders: Sequence[Path] = CODE) -> str:
    """Name the code and the programs that a spare started now would run, and its user."""
    packages = Path(zstandard.__file__).resolve().parents[1]
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    digest = hashlib.sha256(f"{user}\n{packages}\n".encode())
    programs = [path for name in PROGRAMS if (path := _program(name)) is not None]
    for path in (packages, *files, *programs):
        found = path.stat()
        digest.update(f"{path} {found.st_mtime_ns} {found.st_size}\n".encode())
    return digest.hexdigest()[:_CODE_DIGITS]


def _program(name: str) -> Path | None:
    found = shutil.which(name, path=plain_environment()["PATH"])
    return Path(found) if found is not None else None


def _start_export(folder: Path, user: str | None) -> None:
    config = f"spare={folder / CONFIG_NAME}"
    socket = folder / export_daemon.SOCKET_NAME
    start_export(folder / export_daemon.PID_NAME, socket, config, user=user)


def _start_daemon(folder: Path, user: str | None) -> None:
    start_empty(folder, user=user)


EXPORTS = Kind("export", "e", (export_daemon.SOCKET_NAME,), _start_export, CONFIG_NAME)
DAEMONS = Kind(
    "daemon", "d", (storage_daemon.SOCKET_NAME, storage_daemon.MONITOR_NAME), _start_daemon
)


@contextmanager
def _locked(path: Path, *, timeout_s: float) -> Iterator[bool]:
    """Hold a lock for the block; give whether it could be had in time."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield _lock(fd, timeout_s)
    finally:
        os.close(fd)


def _lock(fd: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_POLL_S)
        else:
            return True
