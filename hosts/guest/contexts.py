"""Contexts: the commands that run in a guest, whoever is or is not listening to them.

    created ──► running ──► stopped    it ended by itself, whatever its exit code
                    ├─────► killed     it died of a signal that we were asked to send
                    └─────► crashed    it died of another signal

A context outlives the connection that made it. What it writes goes to its journal, which is
bounded, and to every reader that is attached, which gets all of it: a reader that is slower
than the program holds the program back, as a pipe would. Without readers nothing does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import termios
import time
from functools import partial

from hosts.guest import protocol, spawn
from hosts.guest.journal import Journal
from hosts.guest.loop import HANG_UP, READ, WRITE, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from hosts.guest.loop import Timer

    class Reader(Protocol):
        """Someone attached to a context."""

        def output(self, kind: bytes, data: bytes) -> None: ...
        def finished(self, context: Context) -> None: ...
        def is_full(self) -> bool: ...

    class Writer(Protocol):
        """Someone whose input may have to wait for room."""

        def input_drained(self) -> None: ...

    class Client(Reader, Writer, Protocol):
        """Both, as a connection is."""


MAX_CONTEXTS = 1000
MAX_INPUT_BYTES = 1024 * 1024
KILL_AFTER_S = 5.0

_LOOK_EVERY_S = 0.05
_READ_BYTES = 65536
_JOURNAL_BYTES = 1024 * 1024
_MAX_ARGUMENTS = 4096
_MAX_CELLS = 65535
_MAX_SIGNAL = 64
_MAX_SECONDS = 10 * 365 * 86400
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

_ENDING_SIGNALS = frozenset(
    int(number)
    for number in (
        signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT,
        signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGPIPE, signal.SIGABRT,
    )
)  # fmt: skip
_FOREGROUND_SIGNALS = frozenset(
    (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH, signal.SIGSTOP)
)


class Rejected(Exception):
    """A request that is not carried out; `code` is one of the protocol's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Context:
    """One command, from its start until it is forgotten."""

    def __init__(self, contexts: Contexts, order: Order) -> None:
        self._contexts = contexts
        self._loop = contexts.loop
        self.order = order
        self.id = order.id
        self.journal = Journal(contexts.journal_bytes)
        self.readers: list[Reader] = []
        self.writers: list[Writer] = []
        self.state = "created"
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.created_unix_s = time.time()
        self.finished_unix_s: float | None = None
        self.timed_out = False
        self.oom_killed = False
        self.paused = False
        self._started_s = time.monotonic()
        self._active_s = self._started_s
        self._we_killed = False
        self._kill_at_s: float | None = None
        self._timers: list[Timer] = []
        self._waiters: list[Callable[[], None]] = []
        self._outputs: dict[int, bytes] = {}
        self._held_back = False
        self._input = bytearray()
        self._input_ends = False
        self._input_fd: int | None = None
        self._pty_fd: int | None = None
        self._oom_kills = 0
        self._finished_ticks = 0
        self.pid: int | None = None

    @property
    def running(self) -> bool:
        return self.state == "running"

    def start(self) -> None:
        """Run the command.

        Raises:
            Rejected: the machine could not make a process or a terminal.
        """
        order = self.order
        env = self._contexts.environment(order)
        self._oom_kills = oom_kills()
        try:
            if order.pty:
                rows, columns = order.pty
                process = spawn.start_on_terminal(
                    order.argv, cwd=order.cwd, env=env, rows=rows, columns=columns
                )
            else:
                process = spawn.start_with_pipes(
                    order.argv, cwd=order.cwd, env=env, open_input=order.open_input
                )
        except OSError as error:
            code = protocol.PTY_UNAVAILABLE if order.pty else protocol.CREATE_FAILED
            raise Rejected(code, f"cannot start a process: {error.strerror}") from error
        self.pid = process.pid
        self.state = "running"
        self._pty_fd = process.pty_fd
        self._input_fd = process.input_fd
        self._loop.await_child(process.pid, self._exited)
        if process.pty_fd is not None:
            self._outputs[process.pty_fd] = protocol.PTY
            self._loop.watch(process.pty_fd, READ, self._pty_ready)
        if process.output_fd is not None and process.error_fd is not None:
            self._watch_output(process.output_fd, protocol.STDOUT)
            self._watch_output(process.error_fd, protocol.STDERR)
        if process.input_fd is not None:
            self._loop.watch(process.input_fd, 0, self._input_ready)
        self._arm_timeouts()

    def describe(self) -> dict[str, Any]:
        """The context as the protocol shows it."""
        order, totals = self.order, self.journal.totals
        return {
            "id": self.id,
            "type": "cmd",
            "argv": [text(part) for part in order.argv],
            "cwd": text(order.cwd),
            "env": {text(name): text(value) for name, value in order.env.items()},
            "pty": {"rows": order.pty[0], "cols": order.pty[1]} if order.pty else None,
            "state": self.state,
            "running": self.running,
            "paused": self.paused,
            "pid": self.pid,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "created_unix_s": self.created_unix_s,
            "finished_unix_s": self.finished_unix_s,
            "stdout_bytes": totals.get(protocol.STDOUT, 0) + totals.get(protocol.PTY, 0),
            "stderr_bytes": totals.get(protocol.STDERR, 0),
            "dropped_bytes": self.journal.dropped_bytes,
            "timed_out": self.timed_out,
            "oom_killed": self.oom_killed,
            "hidden": order.hidden,
        }

    def attach(self, client: Client) -> None:
        """Give a client all that is written from now on, and take its input."""
        self.readers.append(client)
        self.writers.append(client)

    def detach(self, client: Client) -> None:
        """Forget a client; the command no longer waits for it. Fine when it has gone."""
        if client in self.writers:
            self.writers.remove(client)
        if client in self.readers:
            self.readers.remove(client)
            self.reader_drained()

    def reader_drained(self) -> None:
        """Go on reading, if it was held back and no reader is full any more."""
        if self._held_back and not any(reader.is_full() for reader in self.readers):
            self._held_back = False
            self._set_events()

    @property
    def input_room_bytes(self) -> int:
        """How much more input is taken before some of it was read."""
        return MAX_INPUT_BYTES - len(self._input)

    def write(self, data: bytes) -> None:
        """Queue input for the command; what it never reads is lost with it.

        Raises:
            Rejected: it has ended, or it has no input, or no more of it fits.
        """
        self._must_run()
        if self._pty_fd is None and (self._input_fd is None or self._input_ends):
            raise Rejected(protocol.INVALID_REQUEST, "the input of this context is closed")
        if len(data) > self.input_room_bytes:
            raise Rejected(protocol.INPUT_BUFFER_FULL, "the command does not read its input")
        self._active_s = time.monotonic()
        self._input += data
        self._write_input()

    def close_input(self) -> None:
        """Let the command see the end of its input once it has read what is queued."""
        if self._pty_fd is not None:
            self.write(b"\x04")  # what a person types to end input
            return
        self._input_ends = True
        self._write_input()

    def resize(self, rows: int, columns: int) -> None:
        """Give its terminal another size.

        Raises:
            Rejected: it has no terminal, or it has ended.
        """
        if not self.order.pty:
            raise Rejected(protocol.PTY_UNAVAILABLE, "this context has no terminal")
        self._must_run()
        if self._pty_fd is None:
            raise Rejected(protocol.PTY_UNAVAILABLE, "the terminal of this context is closed")
        self.order.pty = (rows, columns)
        spawn.resize(self._pty_fd, rows, columns)

    def send_signal(self, number: int) -> None:
        """Send a signal as a terminal would, or to all of the context.

        Raises:
            Rejected: it has ended.
        """
        self._must_run()
        if number in _ENDING_SIGNALS:
            self._we_killed = True
        if number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGCONT):
            self.paused = number != signal.SIGCONT
        if self._pty_fd is not None and number in _FOREGROUND_SIGNALS:
            try:
                os.killpg(os.tcgetpgrp(self._pty_fd), number)
            except OSError:
                self._signal_session(number)
        else:
            self._signal_session(number)

    def kill(self, ended: Callable[[], None] | None = None) -> None:
        """End it: TERM, and KILL after five seconds; then `ended` is called."""
        if ended:
            self._waiters.append(ended)
        if self._kill_at_s is None:
            self._we_killed = True
            self._kill_at_s = time.monotonic() + KILL_AFTER_S
            self._signal_session(signal.SIGTERM)
            self._signal_session(signal.SIGCONT)
            self._await_end()

    def _await_end(self) -> None:
        """Look until nothing of the session is left, also what ran in the background."""
        assert self._kill_at_s is not None
        if self._session():
            if time.monotonic() >= self._kill_at_s:
                self._signal_session(signal.SIGKILL)
            self._loop.later(_LOOK_EVERY_S, self._await_end)
        elif self.running:
            self._loop.later(_LOOK_EVERY_S, self._await_end)  # about to be reaped
        else:
            self._call_waiters()

    def drop(self) -> None:
        """Let go of what it still holds; what its background processes write is discarded."""
        for fd in list(self._outputs):
            self._loop.forget(fd)
            self._loop.watch(fd, READ, partial(_discard, self._loop, fd))
        self._outputs.clear()
        self._close_input_fd()

    def _must_run(self) -> None:
        if self.state == "created":
            raise Rejected(protocol.PROCESS_NOT_RUNNING, "the process has not started")
        if not self.running:
            raise Rejected(protocol.PROCESS_FINISHED, "the process has finished")

    def _watch_output(self, fd: int, kind: bytes) -> None:
        self._outputs[fd] = kind
        self._loop.watch(fd, READ, partial(self._read, fd))

    def _pty_ready(self, events: int) -> None:
        assert self._pty_fd is not None
        fd = self._pty_fd
        if events & WRITE:
            self._write_input()
        if events & (READ | HANG_UP) and fd in self._outputs:
            if self._held_back:
                # A hang-up is reported though nobody asked: wait for the readers in peace.
                self._loop.forget(fd)
            else:
                self._read(fd)

    def _read(self, fd: int, _events: int = READ) -> None:
        if self._held_back:
            self._loop.forget(fd)
            return
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EIO:  # what a terminal says once nobody has it open
                raise
            data = b""
        if data:
            self._emit(self._outputs[fd], data)
        else:
            self._close_output(fd)

    def _emit(self, kind: bytes, data: bytes) -> None:
        self._active_s = time.monotonic()
        self.journal.append(kind, data)
        self._contexts.keep_to_budget()
        for reader in list(self.readers):
            reader.output(kind, data)
        if any(reader.is_full() for reader in self.readers) and not self._held_back:
            self._held_back = True
            self._set_events()

    def _set_events(self) -> None:
        """Watch what there is to do: output unless held back, a terminal's input if any."""
        for fd in self._outputs:
            events = 0 if self._held_back else READ
            if fd == self._pty_fd:
                if self._input:
                    events |= WRITE
                handler: Callable[[int], None] = self._pty_ready
            else:
                handler = partial(self._read, fd)
            self._loop.forget(fd)
            if events or not self._held_back:
                self._loop.watch(fd, events, handler)

    def _close_output(self, fd: int) -> None:
        self._loop.forget(fd)
        self._outputs.pop(fd, None)
        if fd == self._pty_fd:
            self._pty_fd = None
        os.close(fd)

    def _input_ready(self, events: int) -> None:
        if events & HANG_UP:
            self._close_input_fd()
        else:
            self._write_input()

    def _write_input(self) -> None:
        fd = self._pty_fd if self._pty_fd is not None else self._input_fd
        if fd is None:
            self._input.clear()
            return
        try:
            while self._input:
                written = os.write(fd, self._input[:_READ_BYTES])
                self._active_s = time.monotonic()
                del self._input[:written]
        except BlockingIOError:
            pass
        except OSError:
            self._close_input_fd()  # nobody reads it any more
            return
        if fd == self._pty_fd:
            self._set_events()
        elif self._input_ends and not self._input:
            self._close_input_fd()
        else:
            self._loop.change(fd, WRITE if self._input else 0)
        for writer in list(self.writers):
            writer.input_drained()

    def _close_input_fd(self) -> None:
        self._input.clear()
        if self._input_fd is not None:
            self._loop.forget(self._input_fd)
            os.close(self._input_fd)
            self._input_fd = None
        for writer in list(self.writers):
            writer.input_drained()

    def _arm_timeouts(self) -> None:
        if self.order.ttl_s:
            self._timers.append(self._loop.later(self.order.ttl_s, self._time_out))
        if self.order.idle_timeout_s:
            self._check_idle()

    def _check_idle(self) -> None:
        assert self.order.idle_timeout_s is not None
        left_s = self._active_s + self.order.idle_timeout_s - time.monotonic()
        if left_s <= 0:
            self._time_out()
        else:
            self._timers.append(self._loop.later(left_s, self._check_idle))

    def _time_out(self) -> None:
        if self.running:
            self.timed_out = True
            self.kill()

    def _exited(self, status: int) -> None:
        for fd in list(self._outputs):
            self._read_rest(fd)
        self.exit_code = spawn.exit_code(status)
        if os.WIFSIGNALED(status):
            self.signal = os.WTERMSIG(status)
            self.state = "killed" if self._we_killed else "crashed"
        else:
            self.state = "killed" if self.timed_out else "stopped"
        if self.exit_code == 128 + signal.SIGKILL:
            self.oom_killed = oom_kills() > self._oom_kills
        self.finished_unix_s = time.time()
        self._finished_ticks = _uptime_ticks()
        self.paused = False
        for timer in self._timers:
            timer.cancel()
        self._close_input_fd()
        # Readers are full no more: they have all there is, and background processes that
        # still hold the pipes must not wait for them.
        readers, self.readers = self.readers, []
        self.reader_drained()
        for reader in readers:
            reader.finished(self)
        for writer in list(self.writers):
            writer.input_drained()

    def _read_rest(self, fd: int) -> None:
        """Read what the process itself wrote before it ended, and no more than that.

        Its children may hold the pipe and write for ever, so reading until the end, or
        until the pipe is empty, might not end.
        """
        kind = self._outputs[fd]
        try:
            left_bytes = _READ_BYTES * 4 if kind == protocol.PTY else _queued_bytes(fd)
            while left_bytes > 0:
                data = os.read(fd, min(left_bytes, _READ_BYTES))
                if not data:
                    break
                left_bytes -= len(data)
                self._emit(kind, data)
        except OSError:
            return  # empty, or a terminal that hung up

    def _call_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def _signal_session(self, number: int) -> None:
        """Signal every process of the context's session, whatever group it moved to."""
        for pid in self._session():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _session(self) -> list[int]:
        """The living processes of its session.

        Once the command has ended, another one may be given its process id, and with it
        the session's: that one is told by having no process from before.
        """
        if self.pid is None:
            return []
        members = session_members(self.pid)
        if not self.running and not any(
            started_ticks <= self._finished_ticks for _, started_ticks in members
        ):
            return []
        return [pid for pid, _ in members]


class Contexts:
    """All contexts of a guest, at most `MAX_CONTEXTS`."""

    def __init__(
        self, loop: Loop, *, env: dict[bytes, bytes], memory_bytes: int, cwd: bytes = b"/root"
    ) -> None:
        self.loop = loop
        self.env = env
        self.cwd = cwd
        self.closed = False
        self._budget_bytes = max(8 * 1024 * 1024, memory_bytes // 16)
        self.journal_bytes = min(_JOURNAL_BYTES, self._budget_bytes // 8)
        self._all: dict[str, Context] = {}

    def create(self, params: dict[str, Any]) -> Context:
        """Start a command; the same id again is the same context.

        Raises:
            Rejected: the request makes no sense, or there is no room.
        """
        order = Order(params, self.cwd)
        known = self._all.get(order.id)
        if known:
            return known
        if self.closed:
            raise Rejected(protocol.CREATE_FAILED, "the machine is stopping")
        self._make_room()
        context = Context(self, order)
        context.start()
        self._all[order.id] = context
        return context

    def find(self, params: dict[str, Any]) -> Context:
        """The context that a request names.

        Raises:
            Rejected: there is none.
        """
        context = self._all.get(params.get("id") or "")
        if context is None:
            raise Rejected(protocol.CONTEXT_NOT_FOUND, "there is no such context")
        return context

    def listed(self) -> list[dict[str, Any]]:
        return [context.describe() for context in self._all.values()]

    def delete(self, context: Context, deleted: Callable[[], None]) -> None:
        """End a context and forget it, then call `deleted`."""

        def forget() -> None:
            self._forget(context)
            deleted()

        context.kill(forget)

    def environment(self, order: Order) -> dict[bytes, bytes]:
        """What a command finds in its environment: the later of these wins."""
        terminal = {b"TERM": b"xterm-256color"} if order.pty else {}
        return {**self.env, **terminal, **order.env}

    def keep_to_budget(self) -> None:
        """Drop the oldest finished journals, then shorten all, until memory is bounded."""
        if len(self._all) * self.journal_bytes * 2 <= self._budget_bytes:
            return
        total_bytes = sum(context.journal.cost_bytes for context in self._all.values())
        if total_bytes <= self._budget_bytes:
            return
        for context in self._all.values():
            if not context.running and not context.readers:
                total_bytes -= context.journal.cost_bytes
                context.journal.shrink(0)
                if total_bytes <= self._budget_bytes:
                    return
        for context in self._all.values():
            context.journal.shrink(self._budget_bytes // len(self._all) // 2)

    def _make_room(self) -> None:
        if len(self._all) < MAX_CONTEXTS:
            return
        for context in self._all.values():
            if not context.running:
                self._forget(context)
                return
        raise Rejected(protocol.CREATE_FAILED, f"{MAX_CONTEXTS} contexts are running already")

    def _forget(self, context: Context) -> None:
        if self._all.get(context.id) is context:
            del self._all[context.id]
            context.drop()


class Order:
    """What a client asked to run, checked.

    Raises:
        Rejected: naming the field that is wrong.
    """

    def __init__(self, params: dict[str, Any], default_cwd: bytes) -> None:
        self.id = params.get("id") or ""
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise _invalid("id", "must be 1 to 100 letters, digits, '-', '_' or '.'")
        argv = params.get("argv")
        if not isinstance(argv, list) or not 1 <= len(argv) <= _MAX_ARGUMENTS:
            raise _invalid("argv", f"must be a list of 1 to {_MAX_ARGUMENTS} strings")
        self.argv = [_bytes("argv", part) for part in argv]
        if not self.argv[0]:
            raise _invalid("argv", "must begin with a program")
        self.cwd = _bytes("cwd", params["cwd"]) if params.get("cwd") else default_cwd
        if not os.path.isdir(self.cwd):  # noqa: PTH112 - pathlib is slow to import
            if params.get("cwd"):
                raise _invalid("cwd", "is no directory of this machine")
            self.cwd = b"/"
        self.env = _environment(params.get("env") or {})
        self.pty = terminal_size(params["pty"]) if params.get("pty") else None
        if params.get("stdin", "closed") not in ("closed", "open"):
            raise _invalid("stdin", "must be 'closed' or 'open'")
        self.open_input = params.get("stdin") == "open"
        self.ttl_s = _seconds("ttl_s", params.get("ttl_s"))
        self.idle_timeout_s = _seconds("idle_timeout_s", params.get("idle_timeout_s"))
        self.hidden = bool(params.get("hidden"))


def terminal_size(params: Any) -> tuple[int, int]:
    """The rows and columns of a request.

    Raises:
        Rejected: they are no numbers from 1 to 65,535.
    """
    sizes = (params.get("rows"), params.get("cols")) if isinstance(params, dict) else (0, 0)
    rows, columns = sizes
    if not all(type(size) is int and 1 <= size <= _MAX_CELLS for size in sizes):
        raise _invalid("pty", "must have rows and cols from 1 to 65535")
    return rows, columns  # type: ignore[return-value]


def signal_number(value: Any) -> int:
    """The number of a signal given as 15, "15", "TERM" or "SIGTERM".

    Raises:
        Rejected: there is no such signal.
    """
    if isinstance(value, str):
        name = value.upper()
        named = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
        if isinstance(named, signal.Signals):
            return int(named)
        value = int(value) if re.fullmatch("[0-9]{1,2}", value) else None
    if type(value) is int and 1 <= value <= _MAX_SIGNAL:
        return value
    raise _invalid("signal", "is not known")


def session_members(session: int) -> list[tuple[int, int]]:
    """The living processes of a session: (pid, when it started, in ticks since boot)."""
    members = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is slow to import
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                # pid (a name with anything in it) state ppid pgrp session …
                fields = file.read(1024).rpartition(b")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) == session and fields[0] != b"Z":
            members.append((int(name), int(fields[19])))
    return members


def _uptime_ticks() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory."""
    try:
        with open("/proc/vmstat", "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            found = re.search(rb"^oom_kill (\d+)", file.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def text(value: bytes) -> str:
    """Bytes as JSON can carry them: those that are no UTF-8 become lone surrogates."""
    return value.decode("utf-8", "surrogateescape")


def _queued_bytes(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), "little")


def _discard(loop: Loop, fd: int, _events: int) -> None:
    try:
        if os.read(fd, _READ_BYTES):
            return
    except BlockingIOError:
        return
    except OSError:
        pass
    loop.forget(fd)
    os.close(fd)


def _environment(env: Any) -> dict[bytes, bytes]:
    if not isinstance(env, dict):
        raise _invalid("env", "must map names to values")
    for name in env:
        if not name or "=" in name:
            raise _invalid("env", "has a name that is empty or has '=' in it")
    return {_bytes("env", name): _bytes("env", value) for name, value in env.items()}


def _seconds(field: str, value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= _MAX_SECONDS:
        raise _invalid(field, "must be a number of seconds")
    return float(value) or None


def _bytes(field: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise _invalid(field, "must be of strings")
    try:
        encoded = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _invalid(field, "has a character that is none") from error
    if b"\0" in encoded:
        raise _invalid(field, "has a NUL byte in it")
    return encoded


def _invalid(field: str, why: str) -> Rejected:
    return Rejected(protocol.INVALID_REQUEST, f"{field} {why}")
