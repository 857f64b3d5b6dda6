import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import processes
from launch.config import Config
from launch.processes import Program, Running
from launch.supervisor import Supervisor

WAIT_S = 10.0


def eventually(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def sleeper(name: str, script: str = "sleep 1000") -> Program:
    return Program(name, ["sh", "-c", script], dict(os.environ), stop_timeout_s=1.0)


def test_a_program_that_is_killed_is_started_again(supervisor: Supervisor) -> None:
    supervisor.start(sleeper("one"))
    first = supervisor.pid("one")

    os.kill(first, signal.SIGKILL)

    assert eventually(lambda: supervisor.pid("one") != first)
    assert supervisor.pid_files.read("one") is not None


def test_a_program_that_keeps_ending_is_started_ever_more_slowly(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor.start(sleeper("one", "exit 3"))

    assert eventually(lambda: "ended with 3; again in 1.0 s" in capsys.readouterr().out)


def test_stopping_leaves_no_process_and_no_pidfile(supervisor: Supervisor) -> None:
    supervisor.start(sleeper("one"))
    supervisor.start(sleeper("two"))
    pids = [supervisor.pid("one"), supervisor.pid("two")]

    supervisor.stop()

    assert [processes.running(pid) for pid in pids] == [None, None]
    assert supervisor.pid_files.names() == []


def test_a_program_that_ignores_the_request_is_killed(supervisor: Supervisor) -> None:
    supervisor.start(sleeper("deaf", "trap '' TERM; while :; do sleep 0.1; done"))
    time.sleep(0.3)  # until its trap is set
    pid = supervisor.pid("deaf")

    supervisor.stop()

    assert processes.running(pid) is None


def test_another_process_with_an_old_number_is_left_alone(config: Config) -> None:
    me = processes.running(os.getpid())
    assert me is not None

    assert processes.stop(Running(me.pid, me.started_ticks - 1), timeout_s=1.0)


def test_what_a_killed_program_left_of_itself_goes_too(supervisor: Supervisor) -> None:
    # Forks a copy of itself, as Dramatiq does; the copy outlives its parent.
    script = "import os, time; os.fork(); time.sleep(1000)"
    program = Program("pair", [sys.executable, "-c", script], dict(os.environ))
    supervisor.start(program)
    parent = supervisor.pid("pair")
    children = Path(f"/proc/{parent}/task/{parent}/children")
    assert eventually(lambda: children.read_text() != "")
    child = processes.running(int(children.read_text()))
    assert child is not None

    os.kill(parent, signal.SIGKILL)

    assert eventually(lambda: not child.is_alive())


def test_the_log_of_a_program_holds_what_it_printed(supervisor: Supervisor) -> None:
    supervisor.start(sleeper("chatty", "echo out; echo err >&2; sleep 1000"))

    log = supervisor.log("chatty")
    assert eventually(lambda: processes.last_lines(log) == "out\nerr")
