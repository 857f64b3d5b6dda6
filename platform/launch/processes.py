"""Programs that we start: their pidfiles, logs and end."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.people import Person

# Logs are for a person who looks into yesterday's fault, not an archive.
LOG_KEPT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Program:
    """How one long-running process is started and ended."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    """The whole environment. It holds secrets: never logged."""
    runs_as: Person | None = None
    """None: root."""
    cwd: Path = Path("/")
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 20.0


@dataclass(frozen=True)
class Running:
    """A process, told from a later one with the same number by when it started."""

    pid: int
    started_ticks: int

    def is_alive(self) -> bool:
        """Tell whether it still runs; one that only waits for its parent does not."""
        return _started_ticks(self.pid) == self.started_ticks

    def ask(self, how: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, how)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; return whether it has."""
        until = time.monotonic() + timeout_s
        while self.is_alive():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True


def _started_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended.

    Source: proc(5), /proc/pid/stat, fields 3 (state) and 22 (starttime).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def running(pid: int) -> Running | None:
    """Return the process of this number, or None if there is none."""
    ticks = _started_ticks(pid)
    return None if ticks is None else Running(pid, ticks)


class PidFiles:
    """The folder of pidfiles, each `<pid> <start>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.pid"

    def write(self, name: str, process: Running) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path(name).write_text(f"{process.pid} {process.started_ticks}\n")

    def read(self, name: str) -> Running | None:
        """Return the process if it still runs."""
        try:
            pid, ticks = self.path(name).read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        process = Running(int(pid), int(ticks))
        return process if process.is_alive() else None

    def last_pid(self, name: str) -> int | None:
        """Return the number that was written last, whether or not that process still runs."""
        try:
            return int(self.path(name).read_text().split()[0])
        except (FileNotFoundError, ValueError, IndexError):
            return None

    def forget(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.pid"))


def start(program: Program, *, log: Path) -> "subprocess.Popen[bytes]":
    """Start a program with its output in `log`, in a session of its own.

    Its own session, because a Ctrl-C goes to the whole group of the terminal: Dramatiq's
    workers hang when parent and children are signalled together.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > LOG_KEPT_BYTES:
        log.replace(log.with_suffix(".log.1"))
    who = program.runs_as
    with log.open("ab") as output:
        return subprocess.Popen(
            list(program.argv),
            env=dict(program.env),
            cwd=program.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=None if who is None else who.uid,
            group=None if who is None else who.gid,
            extra_groups=None if who is None else who.groups,
            umask=0o022,
        )


def stop(process: Running, how: signal.Signals = signal.SIGTERM, *, timeout_s: float) -> bool:
    """End a process: ask, wait, then force. Return whether asking was enough.

    Only the process itself is signalled, never its group.
    """
    process.ask(how)
    if process.wait(timeout_s):
        return True
    process.ask(signal.SIGKILL)
    process.wait(5.0)
    return False


def end_orphans(leader_pid: int, argv: Sequence[str]) -> None:
    """Kill what a program that is gone left of itself.

    A Dramatiq parent that is killed leaves its worker running, which goes on to take
    messages. Only copies of the program in its own session are meant: what it started to
    outlive it, the daemons of disks, has another command line.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if session == leader_pid and command[:-1] == list(argv):
            process = running(int(folder.name))
            if process is not None:
                process.ask(signal.SIGKILL)
                process.wait(5.0)


def last_lines(log: Path, count: int = 25) -> str:
    """Return the end of a log, for an error message."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])
