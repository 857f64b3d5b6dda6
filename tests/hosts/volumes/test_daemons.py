"""Starting the processes of a disk: known as soon as they are started."""

import os
import signal
import sys
from pathlib import Path

import pytest

from hosts.volumes import daemons
from hosts.volumes.daemons import daemon_pid, plain_environment, start_daemon
from hosts.volumes.errors import DaemonFailed

# As nbdkit does: in the background first, with nothing more to say, and then the pidfile.
LATE = """
import os, sys, time
if os.fork():
    os._exit(0)
os.dup2(os.open(os.devnull, os.O_RDWR), 2)
time.sleep(float(sys.argv[2]))
if sys.argv[3] == "dies":
    os._exit(1)
open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
time.sleep(60)
"""


def start(pidfile: Path, ending: str) -> None:
    command = [sys.executable, "-c", LATE, str(pidfile), "0.4", ending]
    start_daemon(command, pidfile=pidfile, user=None, environment=plain_environment())


def test_a_daemon_that_writes_its_pidfile_late_is_known_when_it_is_started(
    tmp_path: Path,
) -> None:
    pidfile = tmp_path / "export.pid"
    pidfile.write_text("1\n")  # of one before it

    start(pidfile, "lives")

    pid = daemon_pid(pidfile)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_one_that_ends_as_soon_as_it_is_in_the_background_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons, "PIDFILE_TIMEOUT_S", 1.0)

    with pytest.raises(DaemonFailed, match="ended as soon as"):
        start(tmp_path / "export.pid", "dies")
