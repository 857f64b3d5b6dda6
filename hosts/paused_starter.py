"""The process that has `hosts.paused_mount` loaded, and a confinement that waits.

    python -m hosts.paused_starter <socket> <root_dir> <first_id>
                                     started as root by `hosts.paused_files`

Loading Python and the SFTP server takes most of the time that the files of a paused sandbox
take to open, and making a confinement most of what is left: one is made ahead, the next a
while after it was given away. It is a help and no more: without it `hosts.paused_files`
starts a new Python, and what is forked here does not depend on it once it serves.

There is one for each state of our code (the socket's name says which), shared by all workers
of the host. It ends when nobody has asked to keep it for a while.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import asyncssh

from hosts import (
    paused_clean,
    paused_directory,
    paused_mount,
    paused_settle,
    paused_syscalls,
    sftp_server,
)
from hosts.paused_mount import Confinement, Given

MAX_ORDER_BYTES = 16
KEPT_S = 300
"""After this long without `keep`, it ends."""

PAUSE_S = 0.5
"""How long after one was given away the next confinement is made: not beside its work."""

PAUSE_AFTER_FAILURE_S = 60.0

_LOOK_EVERY_S = 5.0
_ANSWER_TIMEOUT_S = 2.0
_FDS = len(Given._fields)
_HERE, _READY, _GO = b"here", b"ready", b"go"
_MEND, _REPAIR = b"mend", b"repair"


def code_version() -> str:
    """Name the code that a starter has loaded: one of another release is not asked."""
    digest = hashlib.sha256(f"{sys.executable} {asyncssh.__version__}".encode())
    modules = (
        paused_clean,
        paused_directory,
        paused_mount,
        paused_settle,
        paused_syscalls,
        sftp_server,
    )
    for name in (__file__, *(str(module.__file__) for module in modules)):
        found = Path(name).stat()
        digest.update(f"{name} {found.st_mtime_ns} {found.st_size}".encode())
    return digest.hexdigest()[:12]


def main(path: str, root_dir: str, first_id: str) -> None:
    """Give away what is asked for, until nobody wants this process any more."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another is there already
    os.ftruncate(lock, 0)  # it names the one before
    os.umask(0o077)
    with _listen(path) as listener:
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        # What is loaded by now stays shared with the forks: the collector would write to it.
        gc.collect()
        gc.freeze()
        starter = Starter(root_dir, int(first_id), listener, lock)
        try:
            while _is_kept(path):
                starter.go_on()
                _reap()
        finally:
            Path(path).unlink(missing_ok=True)


def _listen(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(128)
    listener.settimeout(_ANSWER_TIMEOUT_S)
    return listener


def _is_kept(path: str) -> bool:
    """Tell whether somebody has touched the socket lately, see `keep`."""
    try:
        return time.time() - Path(path).stat().st_mtime < KEPT_S
    except FileNotFoundError:
        return False


class Starter:
    """Forks confinements: one that waits, and another where two are wanted at once."""

    def __init__(
        self, root_dir: str, first_id: int, listener: socket.socket, lock: int
    ) -> None:
        self._root_dir = root_dir
        self._first_id = first_id
        self._listener = listener
        self._lock = lock
        self._spare: socket.socket | None = None
        self._is_ready = False
        self._next_at = time.monotonic()

    def go_on(self) -> None:
        """Wait for something to do, for a while, and do it."""
        wait_s = _LOOK_EVERY_S
        heard: list[socket.socket] = [self._listener]
        if self._spare is not None:
            heard.append(self._spare)
        else:
            wait_s = min(wait_s, max(0.0, self._next_at - time.monotonic()))
        found = select.select(heard, [], [], wait_s)[0]
        if self._spare is not None and self._spare in found:
            self._hear_spare(self._spare)
        if self._listener in found:
            self._answer()
        elif self._spare is None and time.monotonic() >= self._next_at:
            self._make_spare()

    def _make_spare(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if os.fork() == 0:
                self._let_go()
                ours.close()
                _end_after(lambda: self._wait(theirs))
        self._spare, self._is_ready = ours, False

    def _hear_spare(self, spare: socket.socket) -> None:
        """Take its word that it is ready, or note its end."""
        self._is_ready = bool(spare.recv(1))
        if not self._is_ready:
            self._lose_spare(PAUSE_AFTER_FAILURE_S)

    def _lose_spare(self, pause_s: float) -> None:
        if self._spare is not None:
            self._spare.close()
        self._spare, self._is_ready = None, False
        self._next_at = time.monotonic() + pause_s

    def _answer(self) -> None:
        """Take one request: the order, and its descriptors, see `ask`."""
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        with connection:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            fds: list[int] = []
            try:
                connection.send(_HERE)
                order, fds, _, _ = socket.recv_fds(connection, MAX_ORDER_BYTES, _FDS)
                if len(fds) == _FDS and not self._give_spare(connection, order, fds):
                    self._fork(connection, order, fds)
            except OSError:
                return  # whoever connected said nothing, or is gone
            finally:
                for fd in fds:
                    os.close(fd)

    def _give_spare(self, connection: socket.socket, order: bytes, fds: list[int]) -> bool:
        if self._spare is None or not self._is_ready:
            return False
        try:
            socket.send_fds(self._spare, [order], [connection.fileno(), *fds])
        except OSError:  # it has ended
            return False
        finally:
            self._lose_spare(PAUSE_S)
        return True

    def _fork(self, connection: socket.socket, order: bytes, fds: list[int]) -> None:
        if os.fork() == 0:
            self._let_go()
            _end_after(lambda: self._become(connection, order, fds))

    def _let_go(self) -> None:
        """In what was forked: leave what is the starter's, or another's."""
        os.close(self._lock)
        self._listener.close()
        if self._spare is not None:
            self._spare.close()
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _wait(self, starter: socket.socket) -> None:
        """Be the spare: end with the starter, or serve what it hands over."""
        confinement = paused_mount.confine(self._root_dir, self._first_id)
        starter.send(b"r")
        if not confinement.waits_for(starter):
            return
        order, fds, _, _ = socket.recv_fds(starter, MAX_ORDER_BYTES, 1 + _FDS)
        if not fds:
            return
        with socket.socket(fileno=fds[0]) as connection:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            if _is_wanted(connection):
                _serve(confinement, order, fds[1:])

    def _become(self, connection: socket.socket, order: bytes, fds: list[int]) -> None:
        with connection:
            is_wanted = _is_wanted(connection)
        if is_wanted:
            confinement = paused_mount.confine(self._root_dir, self._first_id)
            _serve(confinement, order, fds)


def _is_wanted(connection: socket.socket) -> bool:
    """Make sure that who asked hears of us before anything is done.

    It may have given up and started another, and two would write to one image.
    """
    connection.send(_READY)
    return connection.recv(len(_GO)) == _GO


def _serve(confinement: Confinement, order: bytes, fds: list[int]) -> None:
    given = Given(*fds)
    os.dup2(given.log, 2)
    confinement.serve(given, repair=order == _REPAIR)


def _end_after(body: Callable[[], None]) -> NoReturn:
    """Run in a forked child and end it there, whatever happens."""
    status = 1
    try:
        body()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def keep(path: Path) -> bool:
    """Ask a starter to stay; False where there is none."""
    try:
        with Path(f"{path}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(FileNotFoundError):  # it is just being started
            os.utime(path)
        return True
    except FileNotFoundError:
        return False
    return False


def ask(path: Path, given: Given, *, repair: bool) -> bool:
    """Have a confinement serve; False where no starter does that now, nor later.

    Nothing is given to one that does not answer: it would keep it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(path))
            if connection.recv(len(_HERE)) != _HERE:
                return False
            socket.send_fds(connection, [_REPAIR if repair else _MEND], given)
            if connection.recv(len(_READY)) != _READY:
                return False
            connection.send(_GO)
        except OSError:
            return False
    return True


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(*sys.argv[1:])
