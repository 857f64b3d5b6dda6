"""Start a program as a shell would: own session, exact bytes, its exit codes and messages."""

from __future__ import annotations

import _posixsubprocess
import errno
import fcntl
import os
import resource
import signal
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

NOT_FOUND = 127
NOT_EXECUTABLE = 126

_USUAL_FILES = 1024
"""How many files a program may open at first; the agent itself may open more."""


_QUIET_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "OPENSSL_CONF": "/dev/null",  # the guest's own may name modules for another libcrypto
}


class Process:
    """A program that was started, and our ends of its pipes; None where it has none."""

    __slots__ = ("error_fd", "input_fd", "output_fd", "pid", "pty_fd")

    def __init__(
        self,
        pid: int,
        *,
        input_fd: int | None = None,
        output_fd: int | None = None,
        error_fd: int | None = None,
        pty_fd: int | None = None,
    ) -> None:
        self.pid = pid
        self.input_fd = input_fd
        self.output_fd = output_fd
        self.error_fd = error_fd
        self.pty_fd = pty_fd


def start_with_pipes(
    argv: list[bytes], *, cwd: bytes, env: dict[bytes, bytes], open_input: bool
) -> Process:
    """Start a program on pipes; its input is empty unless `open_input`.

    That there is no such program is told by the program's own stderr and exit code.

    Raises:
        OSError: the machine has no room for another process.
    """
    ours: list[int] = []
    theirs: list[int] = []
    try:
        if open_input:
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
            ours.append(write_fd)
            theirs.append(read_fd)
        else:
            theirs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for _ in ("stdout", "stderr"):
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
            ours.append(read_fd)
            theirs.append(write_fd)
        pid = _spawn(argv, cwd, env, theirs)
    except BaseException:
        _close(ours)
        raise
    finally:
        _close(theirs)
    for fd in ours:
        os.set_blocking(fd, False)
    return Process(
        pid, input_fd=ours[0] if open_input else None, output_fd=ours[-2], error_fd=ours[-1]
    )


def start_on_terminal(
    argv: list[bytes], *, cwd: bytes, env: dict[bytes, bytes], rows: int, columns: int
) -> Process:
    """Start a program on a new pseudo-terminal that controls its session.

    Raises:
        OSError: the machine has no room for another process or terminal.
    """
    ours, theirs = os.openpty()
    try:
        resize(ours, rows, columns)
        attributes = termios.tcgetattr(theirs)
        attributes[0] |= 0o40000  # IUTF8: erasing takes away a character, not a byte
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        pid = os.fork()
        if pid == 0:
            _become(argv, cwd, env, [theirs, theirs, theirs], terminal=True)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    os.set_blocking(ours, False)
    return Process(pid, pty_fd=ours)


def start_quietly(argv: list[str]) -> int:
    """Start a program of the toolkit that talks to the console; returns its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            _restore_signals()
            os.execve(argv[0], argv, _QUIET_ENV)  # noqa: S606
        finally:
            os._exit(NOT_FOUND)
    return pid


NO_ERRNO = 255
"""What a child of `fork_call` exits with when what it raised has no number."""


def fork_call(act: Callable[[], None]) -> int:
    """Run a function that may block in a child of its own.

    It exits with 0, or if it raised, with the system's number of the error or `NO_ERRNO`.
    """
    pid = os.fork()
    if pid == 0:
        code = NO_ERRNO
        try:
            _restore_signals()
            act()
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    return pid


def resize(pty_fd: int, rows: int, columns: int) -> None:
    """Set a terminal's size; the program in front hears of it by SIGWINCH."""
    size = b"".join(part.to_bytes(2, "little") for part in (rows, columns, 0, 0))
    fcntl.ioctl(pty_fd, termios.TIOCSWINSZ, size)


def exit_code(status: int) -> int:
    """What a shell would show as `$?` for a wait status."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _spawn(argv: list[bytes], cwd: bytes, env: dict[bytes, bytes], fds: list[int]) -> int:
    """Start a program without copying this process, which emulation makes dear.

    What Python's own `vfork` leaves to the parent is set here for a moment and inherited.
    A program that cannot be started is tried again by a fork, which can say why.
    """
    error_read_fd, error_write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        with _UsualLimits():
            pid: int = _posixsubprocess.fork_exec(
                argv, _candidates(argv[0], env), False, (), os.fsdecode(cwd),
                [name + b"=" + value for name, value in env.items()],
                fds[0], -1, -1, fds[1], -1, fds[2], error_read_fd, error_write_fd,
                True, True, -1, None, None, None, 0o022, None, True,  # type: ignore[arg-type]
            )  # fmt: skip
        os.close(error_write_fd)
        error_write_fd = -1
        failed = os.read(error_read_fd, 1)
    finally:
        os.close(error_read_fd)
        if error_write_fd >= 0:
            os.close(error_write_fd)
    if failed:
        os.waitpid(pid, 0)
        pid = os.fork()
        if pid == 0:
            _become(argv, cwd, env, fds, terminal=False)
    return pid


class _UsualLimits:
    """While it lasts, what is started has an ordinary program's limits, and so have we."""

    _files: int
    _score: bytes

    def __enter__(self) -> None:
        self._files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._score = _swap_oom_score(b"0")
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_USUAL_FILES, hard), hard))

    def __exit__(self, *_raised: object) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._files, hard))
        if self._score not in (b"", b"0"):
            _swap_oom_score(self._score)


def _swap_oom_score(score: bytes) -> bytes:
    """Set how readily the kernel ends this process, and return what it was."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return b""  # outside a guest, in a test
    try:
        before = os.read(fd, 16).strip()
        if before != score:
            os.pwrite(fd, score, 0)
    except OSError:
        return b""
    finally:
        os.close(fd)
    return before


def _become(
    argv: list[bytes],
    cwd: bytes,
    env: dict[bytes, bytes],
    fds: list[int],
    *,
    terminal: bool,
) -> NoReturn:
    """Turn a forked child into the program; never returns."""
    try:
        os.setsid()
        if terminal:
            fcntl.ioctl(fds[0], termios.TIOCSCTTY, 0)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        _restore_signals()
        os.umask(0o022)
        os.chdir(cwd)
        _exec(argv, env)
    except OSError as error:
        code, text = _as_a_shell_says(argv[0], error)
        os.write(2, text)
        os._exit(code)
    finally:
        os._exit(NOT_EXECUTABLE)


def _restore_signals() -> None:
    """Undo what Python and the agent set for themselves and a program would inherit."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_USUAL_FILES, hard), hard))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - pathlib is slow
            file.write("0")
    except OSError:
        return  # outside a guest, in a test


def _candidates(program: bytes, env: dict[bytes, bytes]) -> list[bytes]:
    """Where a program may lie, as execvp(3) searches for it."""
    if b"/" in program:
        return [program]
    folders = env.get(b"PATH", b"/usr/local/bin:/usr/bin:/bin").split(b":")
    return [(folder or b".") + b"/" + program for folder in folders]


def _exec(argv: list[bytes], env: dict[bytes, bytes]) -> None:
    """Replace this process by the first candidate that is a program."""
    denied: OSError | None = None
    for path in _candidates(argv[0], env):
        try:
            os.execve(path, argv, env)  # noqa: S606
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                os.execve(b"/bin/sh", [b"sh", path, *argv[1:]], env)  # noqa: S606
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                denied = denied or error
    raise denied or FileNotFoundError(errno.ENOENT, "not found")


def _as_a_shell_says(program: bytes, error: OSError) -> tuple[int, bytes]:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        said = b"No such file or directory" if b"/" in program else b"command not found"
        return NOT_FOUND, program + b": " + said + b"\n"
    reason = os.strerror(error.errno or 0).encode()
    return NOT_EXECUTABLE, program + b": " + reason + b"\n"


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
