"""The files of paused sandboxes, opened and closed by the host's worker.

    image (a path) ─▶ e2fsck ─▶ fuse2fs ─▶ SFTP on <files_dir>/<volume>.sock

What runs for a volume is `hosts.paused_mount`, confined and without ties to the worker that
started it: it outlives a killed worker, and the next one finds it by its pid file. It is
forked by `hosts.paused_starter`, which has everything loaded, or where that is not there it
is started anew, which takes some 0.4 s longer. Beside the socket lie, for each volume:

    .pid     its init, and when that began
    .state   whether it was unmounted properly; locked by what serves it, so that two never do
    .image   the path of its image
    .used    its time is that of the last request
    .dirty   a mark for the first change, and for the first one after each commit
    .stored  how many of these marks are committed
    .settle  the socket by which the files are held still for a cut
    .lock    held for the length of an `open` or a `close`
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO
from uuid import UUID

from common.errors import Refused, Unavailable
from hosts import fuse_limits, paused_mount, paused_settle, paused_starter
from hosts.paused_mount import Given, Spec

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent

# The check, the mount, and the start of a Python on a busy machine.
OPEN_TIMEOUT_S = paused_mount.CHECK_TIMEOUT_S + paused_mount.MOUNT_TIMEOUT_S + 30
CLOSE_TIMEOUT_S = paused_mount.SERVER_END_TIMEOUT_S + paused_mount.UNMOUNT_TIMEOUT_S + 10
KILL_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 4096
MAX_WAITING = 4 * paused_mount.SERVER_FILES
"""More requests of a mount than ever wait behind a caller that goes on: ends of files, reads
ahead."""
DEAD_MOUNT = (errno.ENOTCONN, errno.ECONNABORTED)
"""What a mount answers whose FUSE daemon ended."""


_Socket = socket.socket


class FileSystemDamaged(Refused):
    """The file system of this volume cannot be mounted; other volumes are not concerned."""

    code = "file_system_damaged"


class FilesUnavailable(Unavailable):
    """The files could not be opened or closed now; nothing was lost."""

    code = "files_unavailable"


@dataclass(frozen=True)
class PausedFilesConfig:
    """Where the sockets are, where complaints go, and which ids stand for a guest's.

    The ids from `first_id` on, 2^30 of them, must belong to nobody on this machine.
    """

    files_dir: Path
    log_file: Path | None = None
    first_id: int = 1 << 30


class PausedFiles:
    """The open volumes of this host. Any number of processes and threads may use it."""

    def __init__(self, config: PausedFilesConfig) -> None:
        self._config = config
        self._started: subprocess.Popen[bytes] | None = None

    def warm(self) -> None:
        """See to it that the next `open` is a fast one; does not wait for that."""
        path = self._starter()
        if not paused_starter.keep(path):
            self._started = self._run(
                paused_starter.__name__,
                str(path),
                str(self._root_dir()),
                str(self._config.first_id),
            )

    def cool(self) -> None:
        """End what `warm` has started. What is open stays open."""
        if paused_starter.keep(self._starter()):
            with suppress(FileNotFoundError, ValueError):  # it is just being started
                pid = int(Path(f"{self._starter()}.lock").read_text())
                _signal_and_wait(pid, signal.SIGTERM, KILL_TIMEOUT_S)
        if self._started is not None:
            self._started.terminate()
            _reap(self._started)
            self._started = None

    def open(
        self, volume_id: UUID, image: Path, *, show: Callable[[], object] = lambda: None
    ) -> Path:
        """Serve the volume's files from its raw image, unless that is done already.

        What is served from an image whose daemon died is ended, and served anew. The image's
        owner is changed to the confinement's. It must stay in place until `close`, and
        nothing else may write to it.

        Args:
            show: makes the image; called while the confinement is being made.

        Returns: the socket that speaks SFTP; the gate relays to it by the volume's id.

        Raises:
            FileSystemDamaged: e2fsck or fuse2fs would not have it.
            FilesUnavailable: it was not ready in time, or could not be started.
        """
        with self._locked(volume_id):
            if self._is_running(volume_id) and _has_died(image):
                self._stop(volume_id)
            if self._is_running(volume_id):
                show()
            else:
                self._path(volume_id, "image").write_text(str(image))
                self._start(volume_id, image, show)
            # Also of one whose worker died before it came to that.
            self._let_all_wait(volume_id)
            return self.socket(volume_id)

    def close(self, volume_id: UUID) -> bool:
        """Stop serving, write everything to the image, and end every process of it.

        Safe to repeat, and to call for what was never open. Where a process was killed or
        did not end in time, the image is mended before this returns, if it is still there.

        Returns: whether the image is whole: its last mount was ended properly.
        """
        with self._locked(volume_id):
            self._stop(volume_id)
            if self._was_cut_short(volume_id):
                self._mend(volume_id)
            return not self._was_cut_short(volume_id)

    def is_open(self, volume_id: UUID) -> bool:
        """Tell whether its files are being served."""
        return self._is_running(volume_id)

    def opened(self) -> list[UUID]:
        """Return the volumes that are being served, whoever opened them."""
        found = [UUID(path.stem) for path in self._config.files_dir.glob("*.pid")]
        return [volume_id for volume_id in found if self._is_running(volume_id)]

    def changed(self) -> list[UUID]:
        """Return the volumes with changes that are not committed, open or not."""
        found = [UUID(path.stem) for path in self._config.files_dir.glob("*.dirty")]
        return [volume_id for volume_id in found if self.is_dirty(volume_id)]

    def socket(self, volume_id: UUID) -> Path:
        """Where the volume's files are served while they are open."""
        return self._path(volume_id, "sock")

    def last_used_at(self, volume_id: UUID) -> datetime | None:
        """Return when the last request began; None if there never was one."""
        return _modified_at(self._path(volume_id, "used"))

    def is_dirty(self, volume_id: UUID) -> bool:
        """Tell whether there are changes, of this opening or before, that are not committed."""
        return self._marks(volume_id, "dirty") > self._stored_marks(volume_id)

    def marked_at(self, volume_id: UUID) -> datetime | None:
        """Return when the first change was made that may not be committed; None if none was."""
        return _modified_at(self._path(volume_id, "dirty"))

    def is_unchanged(self, volume_id: UUID) -> bool:
        """Tell whether it is known that all changes are committed.

        It is not where the records are gone, as after a restart of the machine.
        """
        return self._path(volume_id, "dirty").exists() and not self.is_dirty(volume_id)

    @contextmanager
    def settled(self, volume_id: UUID) -> Iterator[int]:
        """Hold the open files still, consistent in their image, while the disk is cut.

        Requests wait meanwhile. What is yielded stands for all changes until now: say it
        to `note_stored` once they are committed.

        Raises:
            FilesUnavailable: they cannot be held still, or were not until the end: what
                was cut may not be consistent, and must not be published.
        """
        try:
            with paused_settle.held_still(self._path(volume_id, "settle")):
                yield self._marks(volume_id, "dirty")
                if not self._is_still(volume_id):
                    raise FilesUnavailable("The files did not stay still.")
        except paused_settle.Unsettled as error:
            raise FilesUnavailable(f"The files cannot be held still: {error}.") from error

    def _is_still(self, volume_id: UUID) -> bool:
        """Tell whether nothing was written to the image since it was made to say: clean."""
        try:
            with Path(self._path(volume_id, "image").read_text()).open("rb") as image:
                image.seek(paused_settle.SUPERBLOCK_AT)
                return paused_settle.says_clean(image.read(paused_settle.SUPERBLOCK_BYTES))
        except OSError as error:
            raise FilesUnavailable(f"The image cannot be read: {error.strerror}.") from error

    def note_stored(self, volume_id: UUID, marks: int) -> None:
        """Record that the changes which `settled` yielded are committed."""
        path = self._path(volume_id, "stored")
        new = path.with_suffix(".stored-new")
        new.write_text(str(marks))
        new.replace(path)

    def _marks(self, volume_id: UUID, kind: str) -> int:
        try:
            return self._path(volume_id, kind).stat().st_size
        except FileNotFoundError:
            return 0

    def _stored_marks(self, volume_id: UUID) -> int:
        try:
            return int(self._path(volume_id, "stored").read_text())
        except FileNotFoundError:
            return 0

    def clear_dirty(self, volume_id: UUID) -> None:
        """Forget the changes, once they are committed or discarded; only while closed."""
        with self._locked(volume_id):
            if self._is_running(volume_id):
                raise FilesUnavailable("The volume's files are open.")
            for kind in ("dirty", "stored", "image", "state", "used"):
                self._path(volume_id, kind).unlink(missing_ok=True)

    def _path(self, volume_id: UUID, kind: str) -> Path:
        return self._config.files_dir / f"{volume_id.hex}.{kind}"

    @contextmanager
    def _locked(self, volume_id: UUID) -> Iterator[None]:
        self._config.files_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._path(volume_id, "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _stop(self, volume_id: UUID) -> None:
        pid = self._settled_pid(volume_id)
        if pid is not None:
            _end(pid)
        for kind in ("sock", "settle", "pid"):
            self._path(volume_id, kind).unlink(missing_ok=True)

    def _mend(self, volume_id: UUID) -> None:
        """Check, mount and unmount the image once more; a failure leaves it as it is."""
        try:
            image = Path(self._path(volume_id, "image").read_text())
            image.stat()
            self._start(volume_id, image, lambda: None)
        except (OSError, FileSystemDamaged, FilesUnavailable) as error:
            log.warning("the files of volume %s are not whole: %s", volume_id, error)
        self._stop(volume_id)

    def _start(self, volume_id: UUID, image: Path, show: Callable[[], object]) -> None:
        answer: dict[str, Any] = {}
        failure: BaseException | None = None
        with self._lock_state(volume_id) as state_fd:
            self._path(volume_id, "pid").unlink(missing_ok=True)
            try:
                answer = self._launch(volume_id, image, show, state_fd)
            except BaseException as error:
                failure = error
        if answer.get("ok") is True:
            return
        self._give_up(volume_id)  # it waits for the lock
        if failure is not None:
            raise failure
        detail = str(answer.get("detail", "the log says why"))
        if answer.get("code") == "damaged":
            raise FileSystemDamaged(f"The file system cannot be opened: {detail}.")
        raise FilesUnavailable(f"The files cannot be opened: {detail}.")

    def _let_all_wait(self, volume_id: UUID) -> None:
        """See to it that a flush never overtakes what was done before, see `paused_settle`."""
        pid = self._running_pid(volume_id)
        try:
            if pid is not None:
                fuse_limits.let_wait(pid, paused_mount.MOUNTPOINT, MAX_WAITING)
        except OSError as error:
            # What is overtaken is found out at the end of a cut, by the superblock.
            log.warning("requests of volume %s may be overtaken: %s", volume_id, error)

    def _launch(
        self, volume_id: UUID, image: Path, show: Callable[[], object], state_fd: int
    ) -> dict[str, Any]:
        """Start the mount's process, give it its image, and return the line that it says."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, _pipe() as (reader, writer), ThreadPoolExecutor(1) as beside:
            process = None
            try:
                with self._given(volume_id, state_fd, theirs, writer) as given:
                    started = beside.submit(self._begin, volume_id, given)
                    try:
                        show()
                    finally:
                        process = started.result()
                _give(image, ours, self._config.first_id)
                return _read_answer(reader.fileno())
            finally:
                if process is not None:
                    _reap(process)

    @contextmanager
    def _given(
        self, volume_id: UUID, state_fd: int, image: _Socket, status: BinaryIO
    ) -> Iterator[Given]:
        """Open what a confinement serves with; all of it is closed here in the end."""
        with ExitStack() as stack:

            def opened(kind: str, more: int = 0) -> int:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | more
                fd = os.open(self._path(volume_id, kind), flags, 0o600)
                stack.callback(os.close, fd)
                return fd

            log_fd = self._log()
            stack.callback(os.close, log_fd)
            stack.callback(status.close)
            stack.enter_context(image)
            yield Given(
                status=status.fileno(),
                image=image.fileno(),
                state=state_fd,
                listener=stack.enter_context(_listen(self.socket(volume_id))).fileno(),
                settling=stack.enter_context(_listen(self._path(volume_id, "settle"))).fileno(),
                used=opened("used"),
                dirty=opened("dirty"),
                log=log_fd,
                pid_file=opened("pid", os.O_TRUNC),
            )

    @contextmanager
    def _lock_state(self, volume_id: UUID) -> Iterator[int]:
        """Lock the state file, for the process that inherits the descriptor.

        So the lock is never free between our own end, however sudden, and that process's.
        """
        fd = os.open(self._path(volume_id, "state"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd
        except BlockingIOError:
            raise FilesUnavailable("The volume's files are still being opened.") from None
        finally:
            os.close(fd)

    def _begin(self, volume_id: UUID, given: Given) -> subprocess.Popen[bytes] | None:
        """Have a confinement serve, or make one.

        The starter does it, or where that does not, nor will, a new Python of ours, which is
        returned.
        """
        repair = self._was_cut_short(volume_id)
        if paused_starter.ask(self._starter(), given, repair=repair):
            return None
        spec = Spec(str(self._root_dir()), self._config.first_id, repair, given)
        return self._run(paused_mount.__name__, json.dumps(asdict(spec)), pass_fds=given)

    def _root_dir(self) -> Path:
        """Give the folder over which each confinement mounts a root of its own."""
        path = self._config.files_dir / "root"
        self._config.files_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(exist_ok=True)
        return path

    def _run(
        self, module: str, *arguments: str, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        complaints = self._log()
        try:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=paused_mount.ENVIRONMENT
                | {"PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "PYTHONUTF8": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        finally:
            os.close(complaints)

    def _starter(self) -> Path:
        return self._config.files_dir / f"starter-{paused_starter.code_version()}"

    def _log(self) -> int:
        path = self._config.log_file or Path(os.devnull)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _give_up(self, volume_id: UUID) -> None:
        pid = self._settled_pid(volume_id)
        if pid is not None:
            _kill(pid)
        for kind in ("sock", "settle", "pid"):
            self._path(volume_id, kind).unlink(missing_ok=True)

    def _was_cut_short(self, volume_id: UUID) -> bool:
        """Tell whether a mount here did not end by a proper unmount."""
        try:
            return self._path(volume_id, "state").read_bytes() == b"dirty\n"
        except FileNotFoundError:
            return False

    def _settled_pid(self, volume_id: UUID) -> int | None:
        """Return the pid of the volume's init, waiting for one that is just being made.

        A worker that was killed while it opened the volume leaves that behind.
        """
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while (pid := self._running_pid(volume_id)) is None and self._is_locked(volume_id):
            if time.monotonic() > deadline:
                raise FilesUnavailable("The volume's files are still being opened.")
            time.sleep(0.01)
        return pid

    def _is_locked(self, volume_id: UUID) -> bool:
        try:
            with self._path(volume_id, "state").open() as state:
                fcntl.flock(state, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _is_running(self, volume_id: UUID) -> bool:
        return self._running_pid(volume_id) is not None

    def _running_pid(self, volume_id: UUID) -> int | None:
        """Return the pid of the volume's init, if that is still the same process."""
        try:
            pid, started = self._path(volume_id, "pid").read_text().split()
        except (FileNotFoundError, ValueError):  # there is none, or it was never finished
            return None
        return int(pid) if _started(int(pid)) == started else None


def _has_died(image: Path) -> bool:
    """Tell whether what shows the image ended, and left its mount behind."""
    try:
        image.stat()
        os.statvfs(image)  # what `stat` says may be remembered
    except OSError as error:
        return error.errno in DEAD_MOUNT
    return False


def _modified_at(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except FileNotFoundError:
        return None


def _started(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks; None if it is no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started = fields[0], fields[19]
    return None if state in ("Z", "X") else started


def _listen(path: Path) -> socket.socket:
    """Make a socket in a folder that is ours alone."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _give(image: Path, confinement: socket.socket, owner: int) -> None:
    try:
        os.chown(image, owner, owner)
        paused_mount.send_image(confinement, str(image))
    except (BrokenPipeError, ConnectionResetError):
        return  # it has ended, and will not answer either
    except OSError as error:
        raise FilesUnavailable(f"The image cannot be opened: {error.strerror}.") from error


@contextmanager
def _pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0) as ours, os.fdopen(writer, "wb", 0) as theirs:
        yield ours, theirs


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process of ours that ends by itself."""
    try:
        process.wait(KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read_answer(reader: int) -> dict[str, Any]:
    """Read the one line, up to its end: by then the pid file is written, too.

    Nothing in time, or something else, is an empty answer.
    """
    line = b""
    until = time.monotonic() + OPEN_TIMEOUT_S
    while len(line) < MAX_ANSWER_BYTES:
        if not select.select([reader], [], [], max(0.0, until - time.monotonic()))[0]:
            break
        piece = os.read(reader, MAX_ANSWER_BYTES)
        if not piece:
            break
        line += piece
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _end(pid: int) -> None:
    """Ask the init of a confinement to end, and kill it with all of it if it does not."""
    if not _signal_and_wait(pid, signal.SIGTERM, CLOSE_TIMEOUT_S):
        _kill(pid)


def _kill(pid: int) -> None:
    if not _signal_and_wait(pid, signal.SIGKILL, KILL_TIMEOUT_S):
        raise FilesUnavailable(f"Process {pid} cannot be ended.")


def _signal_and_wait(pid: int, number: signal.Signals, timeout_s: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)
        ended, _, _ = select.select([handle], [], [], timeout_s)
    finally:
        os.close(handle)
    return bool(ended)
