"""Starting and ending the processes of a disk: they outlive the worker that starts them.

A daemon is known by its pidfile, whose path is on its command line and in no other
process's: so a number that was given to another process since is never taken for it, even
when its start was never recorded because the worker died. One that was started ahead (see
`spares`) has another path there, of which a file beside the pidfile says a part.
"""

import os
import pwd
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hosts.volumes.errors import DaemonFailed

START_TIMEOUT_S = 60
ENDED_TIMEOUT_S = 10
PIDFILE_TIMEOUT_S, PIDFILE_POLL_S = 30.0, 0.002
SPARES_DIR = "spares"
"""Where those lie that were started ahead, below a host's run directory."""

_ERROR_TAIL = 2000
_NAME_BYTES = 29


def start_daemon(
    command: Sequence[str], *, pidfile: Path, user: str | None, environment: Mapping[str, str]
) -> None:
    """Run a command that puts itself into the background once it is ready.

    nbdkit writes its pidfile a little after that, by which time nobody must take it for one
    that does not run: it would be started twice.

    Args:
        pidfile: which the command names, and the daemon writes.

    Raises:
        DaemonFailed: it did not become ready.
    """
    account = pwd.getpwnam(user) if user is not None and os.geteuid() == 0 else None
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            umask=0o077,
            start_new_session=True,
            timeout=START_TIMEOUT_S,
            check=False,
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=_groups(account),
        )
    except subprocess.TimeoutExpired as error:
        raise DaemonFailed(f"{command[0]} did not become ready.") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-_ERROR_TAIL:].strip()
        raise DaemonFailed(f"{command[0]} did not start: {said}")
    until = time.monotonic() + PIDFILE_TIMEOUT_S
    while daemon_pid(pidfile) is None:
        if time.monotonic() > until:
            raise DaemonFailed(f"{command[0]} ended as soon as it was ready.")
        time.sleep(PIDFILE_POLL_S)


def plain_environment() -> dict[str, str]:
    """Give the environment of a daemon: nothing of ours, secrets least of all."""
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def _groups(account: pwd.struct_passwd | None) -> list[int] | None:
    return os.getgrouplist(account.pw_name, account.pw_gid) if account else None


def daemon_pid(pidfile: Path) -> int | None:
    """Give the process id of a daemon that runs, None when it does not."""
    try:
        pid = int(pidfile.read_text())
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    # Empty for a zombie: it has ended.
    if os.fsencode(pidfile) in arguments:
        return pid
    first = spare_pidfile(pidfile)
    return pid if first is not None and os.fsencode(first) in arguments else None


def spare_pidfile(pidfile: Path) -> Path | None:
    """Say where the pidfile of a disk's daemon was first; None if it was no spare."""
    name = spare_name(pidfile)
    if name is None:
        return None
    return pidfile.parents[2] / SPARES_DIR / name / pidfile.name


def spare_mark(pidfile: Path) -> Path:
    """Say which file names the spare that a disk's daemon was."""
    return pidfile.with_suffix(".spare")


def spare_name(pidfile: Path) -> str | None:
    """Say under which name a disk's daemon was started ahead; None if it was not.

    The folder is the daemons' own, so the name is not trusted: whatever it is, no process
    but a spare of this host has it on its command line.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(spare_mark(pidfile), flags), "rb") as file:
            name = (file.read(_NAME_BYTES + 1) or b"").decode(errors="replace")
    except OSError:
        return None
    return name if is_spare_name(name) else None


def is_spare_name(name: str) -> bool:
    """Tell whether a spare's folder may have this name."""
    return re.fullmatch(r"[0-9a-f]{12}-[0-9a-f]{16}", name) is not None


def end_daemon(pidfile: Path, *, grace_s: float) -> None:
    """End a daemon, by force when it takes longer than the grace; no error if it is gone.

    Raises:
        DaemonFailed: it does not even go by force (it hangs in the kernel).
    """
    pid = daemon_pid(pidfile)
    if pid is not None:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                # Looked at again through the descriptor's eyes: the number is now held.
                if daemon_pid(pidfile) == pid:
                    _end(descriptor, grace_s)
            finally:
                os.close(descriptor)
    else:
        _await_death(pidfile)
    pidfile.unlink(missing_ok=True)


def _await_death(pidfile: Path) -> None:
    """Wait for a daemon that is dying: it loses its command line before its files.

    Until then it still holds their locks, and writes to them may be under way.
    """
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):
        pid = int(pidfile.read_text())
        if Path(f"/proc/{pid}/cmdline").read_bytes():
            return  # another process that was given the number
        descriptor = os.pidfd_open(pid)
        try:
            await_end(descriptor, ENDED_TIMEOUT_S)
        finally:
            os.close(descriptor)


def _end(descriptor: int, grace_s: float) -> None:
    if grace_s:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if await_end(descriptor, grace_s):
            return
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    if not await_end(descriptor, ENDED_TIMEOUT_S):
        raise DaemonFailed("A daemon does not end.")


def await_end(descriptor: int, timeout_s: float) -> bool:
    """Wait for the process behind a pidfd to end; tell whether it did."""
    return bool(select.select([descriptor], [], [], timeout_s)[0])
