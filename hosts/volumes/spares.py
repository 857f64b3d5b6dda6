"""One export process of a host that waits, everything imported, for the next disk.

Starting an export is mostly Python importing: a disk that takes the spare does not wait for
that. The spare serves nothing until it is told whose it is, at the first connection.

    RUN_DIR/spares/                      root's
    RUN_DIR/spares/<code>-<random>/      the daemons' own, as those of disks are
        export.{sock,pid}                moved to the disk that takes it
        export.json                      a link to that disk's, made then

`<code>` stands for the engine's files: after an update, a spare of the earlier release is
not used. The disk's pidfile says which process it is, and `export.spare` beside it under
which name it was started (see `daemons`). A worker may die at any moment: a spare of which
only the socket was moved is nobody's, and ended by whoever makes the next.
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
from pathlib import Path

import zstandard

from hosts.volumes.daemons import (
    daemon_pid,
    end_daemon,
    is_spare_name,
    spare_mark,
    spare_name,
)
from hosts.volumes.errors import DaemonFailed
from hosts.volumes.export_daemon import CONFIG_NAME, PID_NAME, SOCKET_NAME, start_export

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

_CODE_DIGITS = 12


class Spares:
    """The spare exports of a host. Safe from many threads and processes at once."""

    def __init__(
        self, run_dir: Path, *, user: str | None, own_dir: Callable[[Path, int], None]
    ) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "spares"
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
            log.warning("no export could be started ahead: %s", error)

    def make(self) -> None:
        """Throw away what is of no use, and start a spare unless there is one.

        Raises:
            DaemonFailed: it did not start.
        """
        self._folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._folder.chmod(0o711)
        with _locked(self._folder / ".making", timeout_s=0) as is_mine:
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
            with _locked(self._folder / ".making", timeout_s=READY_TIMEOUT_S):
                self._end_all_but([])

    def usable(self) -> list[Path]:
        """List the folders of spares that run and are of this code."""
        code = code_stamp(self._user)
        return [
            folder
            for folder in self._spares()
            if folder.name.startswith(f"{code}-")
            and (folder / SOCKET_NAME).is_socket()
            and daemon_pid(folder / PID_NAME) is not None
        ]

    def take(self, disk_dir: Path) -> bool:
        """Make a spare the export of a disk whose configuration is written already.

        Its pidfile comes last: before that, the disk has no export that runs.

        Returns: False when there is none to be had at once.
        """
        if not self._folder.is_dir():
            return False
        try:
            with _locked(self._folder / ".lock", timeout_s=LOCK_TIMEOUT_S) as is_mine:
                is_taken = is_mine and self._give_one(disk_dir)
        except (OSError, DaemonFailed) as error:
            log.warning("a spare export cannot be used: %s", error)
            return False
        if is_taken:
            self.warm(pause_s=PAUSE_S)
        return is_taken

    def _give_one(self, disk_dir: Path) -> bool:
        for folder in self.usable():
            try:
                self._give(folder, disk_dir)
            except OSError as error:
                log.warning("a spare export is thrown away: %s", error)
                _discard(folder)
            else:
                return True
        return False

    def _give(self, folder: Path, disk_dir: Path) -> None:
        mark, link = spare_mark(disk_dir / PID_NAME), folder / CONFIG_NAME
        for path in (mark, link):
            path.unlink(missing_ok=True)
        fd = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(folder.name)
        link.symlink_to(disk_dir / CONFIG_NAME)
        for name in (SOCKET_NAME, PID_NAME):
            (folder / name).rename(disk_dir / name)

    def _start(self) -> None:
        folder = self._folder / f"{code_stamp(self._user)}-{secrets.token_hex(8)}"
        pidfile = folder / PID_NAME
        self._own_dir(folder, 0o700)
        config = f"spare={folder / CONFIG_NAME}"
        start_export(pidfile, folder / SOCKET_NAME, config, user=self._user)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while daemon_pid(pidfile) is None:
            if time.monotonic() > deadline:
                raise DaemonFailed("A spare export does not say which process it is.")
            time.sleep(LOCK_POLL_S)

    def _end_all_but(self, kept: list[Path]) -> None:
        """End all spares but these, and delete the folders that no disk's export needs."""
        with _locked(self._folder / ".lock", timeout_s=READY_TIMEOUT_S) as is_mine:
            if not is_mine:
                return
            disks = self._run_dir / "disks"
            taken = {spare_name(pidfile) for pidfile in disks.glob(f"*/{PID_NAME}")}
            for folder in self._spares():
                if folder in kept:
                    continue
                # The pidfile is moved last: where it is, no disk has the process.
                if os.path.lexists(folder / PID_NAME) or folder.name not in taken:
                    _discard(folder)

    def _spares(self) -> Iterator[Path]:
        with suppress(FileNotFoundError):
            for folder in sorted(self._folder.iterdir()):
                if is_spare_name(folder.name):
                    yield folder


def end_spares(run_dir: Path) -> None:
    """End the spares of a platform that stops, after all else of its."""
    for folder in (run_dir / "spares").glob("*-*"):
        if is_spare_name(folder.name):
            _discard(folder)


def code_stamp(user: str | None, folders: Sequence[Path] = CODE) -> str:
    """Name the code that an export started now would run, and its user."""
    packages = Path(zstandard.__file__).resolve().parents[1]
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    digest = hashlib.sha256(f"{user}\n{packages}\n".encode())
    for path in (packages, *files):
        found = path.stat()
        digest.update(f"{path} {found.st_mtime_ns} {found.st_size}\n".encode())
    return digest.hexdigest()[:_CODE_DIGITS]


def _discard(folder: Path) -> None:
    """End a spare; without its folder, one that is still starting ends of itself."""
    end_daemon(folder / PID_NAME, grace_s=0)
    shutil.rmtree(folder, ignore_errors=True)


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
