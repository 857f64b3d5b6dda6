"""`bin/up`: start everything in order, check that it is healthy, and keep it so.

The process that runs this is the supervisor: a Ctrl-C or a TERM to it stops all that it
started. With `--detach` it goes on in the background and its caller returns when it is ready.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch import processes
from launch.config import CHECKOUT, configure, load, prepare_folders
from launch.processes import PidFiles
from launch.progress import LaunchFailed, say
from launch.stack import Stack, stop_leftovers
from launch.stopping import StopRequest

SUPERVISOR = "supervisor"
# The first start builds a kernel, a toolkit and a base image, on two slow cores.
FIRST_START_TIMEOUT_S = 3600.0
HELP = """\
Settings are read from the environment, and kept in var/env:
  WEB_PORT GATE_PORT POSTGRES_PORT REDIS_PORT S3_PORT   ports on 127.0.0.1
  PORT_BASE                                             the first of a row of free ports
  DATABASE_URL, REDIS_URL, S3_ENDPOINT_URL + S3_BUCKET  use these servers, start none
  GUEST_SUBNET                                          the sandboxes' network, a /20
  SANDKEEP_USER                                         who runs what needs no privilege
"""
# Kept by --fresh: they hold nothing of the platform's and are slow to make.
KEPT_BY_FRESH = {"venv", "images", "log", "prepare.lock", "up.lock", "test"}


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="bin/up",
        description="Start Sandkeep on this machine.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--detach", action="store_true", help="return once all is healthy")
    parser.add_argument("--fresh", action="store_true", help="forget all data first")
    parser.add_argument(
        "--services-only", action="store_true", help="start the servers and nothing of ours"
    )
    parser.add_argument("--ready-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.detach:
            return _detach(arguments)
        return _run(options)
    except LaunchFailed as error:
        say(f"\n{error}")
        return 1


def _state_dir() -> Path:
    return Path(os.environ.get("STATE_DIR") or CHECKOUT / "var").resolve()


@contextmanager
def _only_one(state_dir: Path) -> Iterator[bool]:
    """Hold the right to run here; yields False when another supervisor has it."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "up.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _run(options: argparse.Namespace) -> int:
    state_dir = _state_dir()
    with _only_one(state_dir) as mine:
        if not mine:
            return _already_running(state_dir)
        if options.fresh:
            _forget_all(state_dir)
        config = configure(os.environ)
        stop = StopRequest()
        stack = Stack(config, prepare_folders(config), interrupted=stop.is_set)
        own = processes.running(os.getpid())
        assert own is not None
        PidFiles(config.pid_dir).write(SUPERVISOR, own)
        try:
            _start(stack, services_only=options.services_only)
            if options.ready_file is not None:
                options.ready_file.touch()
            # Short waits: a signal's handler runs between two of them.
            while not stop.wait(0.5):
                pass
            say("\nStopping …")
        finally:
            stack.stop()
            PidFiles(config.pid_dir).forget(SUPERVISOR)
    return 0


def _start(stack: Stack, *, services_only: bool) -> None:
    if services_only:
        stack.start_services()
        say(f"The servers run; their addresses are in {stack.config.state_dir / 'env'}.")
    else:
        stack.start()
        stack.greet()


def _already_running(state_dir: Path) -> int:
    supervisor = PidFiles(state_dir / "pids").read(SUPERVISOR)
    what = "is starting" if supervisor is None else f"already runs (pid {supervisor.pid})"
    say(f"Sandkeep {what}. Stop it with: bin/down")
    return 0


def _detach(arguments: list[str]) -> int:
    """Start the supervisor in the background and follow it until it is ready."""
    state_dir = _state_dir()
    with _only_one(state_dir) as mine:
        if not mine:
            return _already_running(state_dir)
    log = state_dir / "log/up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    ready = state_dir / "up.ready"
    ready.unlink(missing_ok=True)
    passed_on = [argument for argument in arguments if argument != "--detach"]
    command = [sys.executable, "-m", "launch.up", *passed_on, "--ready-file", str(ready)]
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )
    return _follow(supervisor, log, ready)


def _follow(supervisor: "subprocess.Popen[bytes]", log: Path, ready: Path) -> int:
    until = time.monotonic() + FIRST_START_TIMEOUT_S
    with log.open() as lines:
        try:
            while time.monotonic() < until:
                code = supervisor.poll()
                done = code is not None or ready.exists()
                sys.stdout.write(lines.read())
                sys.stdout.flush()
                if done:
                    return code or 0
                time.sleep(0.1)
        except KeyboardInterrupt:
            say("\nStopping …")
    supervisor.terminate()
    supervisor.wait(timeout=120)
    sys.stdout.write(log.read_text()[-2000:])
    return 1


def _forget_all(state_dir: Path) -> None:
    if (state_dir / "env").exists():
        config = load({"STATE_DIR": str(state_dir)})
        stop_leftovers(config)
        shutil.rmtree(config.run_dir, ignore_errors=True)
    say(f"Forgetting all data in {state_dir}")
    for entry in state_dir.iterdir():
        if entry.name in KEPT_BY_FRESH:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
