"""The process that has `hosts.paused_mount` loaded, and forks it for each volume.

    python -m hosts.paused_starter <socket>      started as root by `hosts.paused_files`

Loading Python and the SFTP server takes most of the time that the files of a paused sandbox
take to open; a fork of what is loaded already takes a few milliseconds. It is a help and no
more: without it `hosts.paused_files` starts a new Python, and what is forked here does not
depend on it once it runs.

There is one for each state of our code (the socket's name says which), shared by all workers
of the host. It ends when nobody has asked to keep it for a while.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import asyncssh

from hosts import (
    paused_clean,
    paused_directory,
    paused_mount,
    paused_settle,
    paused_syscalls,
    sftp_server,
)

MAX_SPEC_BYTES = 16 * 1024
KEPT_S = 300
"""After this long without `keep`, it ends."""

_LOOK_EVERY_S = 5.0
_ANSWER_TIMEOUT_S = 2.0
_FDS = 4


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


def main(path: str) -> None:
    """Fork what is asked for, until nobody wants this process any more."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another is there already
    os.umask(0o077)
    listener = _listen(path)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # What is loaded by now stays shared with the forks: the collector would write to it.
    gc.collect()
    gc.freeze()
    try:
        while _is_kept(path):
            if select.select([listener], [], [], _LOOK_EVERY_S)[0]:
                _answer(listener, lock)
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


def _answer(listener: socket.socket, lock: int) -> None:
    """Take one request: the specification, and its descriptors, see `ask`."""
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return
    with connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        fds: list[int] = []
        try:
            spec, fds, _, _ = socket.recv_fds(connection, MAX_SPEC_BYTES, _FDS)
            if len(fds) == _FDS and os.fork() == 0:
                for fd in (lock, listener.fileno()):
                    os.close(fd)
                _become(connection, spec, *fds)
        except TimeoutError:
            return  # whoever connected said nothing
        finally:
            for fd in fds:
                os.close(fd)


def _become(  # noqa: PLR0917 -- as they came
    connection: socket.socket, spec: bytes, state: int, image: int, log: int, answer: int
) -> None:
    """Be the process that `hosts.paused_files` would have started; never returns.

    Nothing is done before whoever asked has heard of us: it may have given up and started
    another, and two would write to one image.
    """
    status = 1
    try:
        connection.send(b"ready")
        if connection.recv(16) != b"go":
            os._exit(0)
        connection.close()
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(answer, 1)
        os.dup2(log, 2)
        for fd in (answer, log):
            os.close(fd)
        values = json.loads(spec) | {"state_fd": state, "image_fd": image}
        paused_mount.main(json.dumps(values))
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


def ask(path: Path, spec: str, *, state: int, image: int, log: int, answer: int) -> bool:
    """Have a mount forked; False where no starter does that now, nor later."""
    body = spec.encode()
    if len(body) > MAX_SPEC_BYTES:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(path))
            socket.send_fds(connection, [body], [state, image, log, answer])
            if connection.recv(16) != b"ready":
                return False
            connection.send(b"go")
        except OSError:
            return False
    return True


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(sys.argv[1])
