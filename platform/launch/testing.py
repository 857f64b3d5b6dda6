"""`bin/test`: run the tests beside real servers and a whole platform, and leave nothing.

In two phases: the ordinary tests side by side, each worker with its own databases; then, one
after another, those that boot guests or drive a browser, on a platform that is up.

Two sets of names are made afresh for each run, under var/test (var/test-1 and so on for a run
that finds another one under way): one for the platform that the
end-to-end tests use from outside, one for what tests start themselves. They share the
servers, apart in database, Redis number and object prefix, and with var/ the guest images.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from launch.config import CHECKOUT, Config, configure, load, prepare_folders
from launch.guests import leave_no_guest
from launch.progress import LaunchFailed, say, step
from launch.stack import Stack, stop_leftovers
from launch.stopping import StopRequest

# Away from the usual ports, which a platform of this checkout may hold.
PORT_BASE = "23000"
NEEDS_PLATFORM = "guest or browser"
# pytest's exit codes for "interrupted" and for "no test was collected".
# Source: https://docs.pytest.org/en/stable/reference/exit-codes.html
INTERRUPTED, USAGE_ERROR, NO_TESTS = 2, 4, 5
COLLECT_TIMEOUT_S = 300.0
# So many runs at once in a checkout; their ports are this far apart.
RUNS_AT_ONCE = 8
PORTS_OF_A_RUN = 100
# How long pytest may take to end its fixtures when it is interrupted.
TEARDOWN_TIMEOUT_S = 90.0
# A few tests are done before workers and their databases are there.
WORTH_SHARING = 60
WORKERS = 2
# A cluster that is thrown away need not survive a power cut. A log that is soon full shows
# within a minute what becomes of a guest whose writes nobody stores.
CHEAP = {"POSTGRES_DURABLE": "off", "LOG_BUDGET_BYTES": str(128 * 1024**2)}


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for."""

    arguments: Sequence[str]
    """pytest's, but for the marks."""
    marks: str
    """pytest's `-m`; empty for all."""
    quick: bool

    def marked(self, also: str) -> list[str]:
        """Return pytest's arguments that narrow the choice of the caller's marks."""
        return ["-m", f"({self.marks}) and ({also})" if self.marks else also]


def main(arguments: list[str]) -> int:
    """Run the command; return pytest's exit code, or 1 if it could not be run."""
    wanted = parse(arguments)
    try:
        with _run_number() as number:
            platform, own = _configure(number)
            return _run(platform, own, wanted)
    except LaunchFailed as error:
        say(f"\n{error}")
        return 1


@contextmanager
def _run_number() -> Iterator[int]:
    """Take the lowest number that no other run of this checkout has."""
    for number in range(RUNS_AT_ONCE):
        with (CHECKOUT / f"var/test-{number}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield number
            return
    raise LaunchFailed(f"{RUNS_AT_ONCE} runs of bin/test are under way in this checkout.")


def parse(arguments: Sequence[str]) -> Wanted:
    """Take out of pytest's arguments what decides on the two phases."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-m", dest="marks", default="")
    known, others = parser.parse_known_args(arguments)
    return Wanted(others, known.marks, known.quick)


def worst(codes: Sequence[int]) -> int:
    """Return a failed phase's exit code; that of "no tests" only if no phase had any."""
    failed = [code for code in codes if code not in {0, NO_TESTS}]
    if failed:
        return failed[0]
    return 0 if 0 in codes else NO_TESTS


def _configure(number: int) -> tuple[Config, Config]:
    """Return the names of the platform and of the tests' own parts, both new."""
    folder = CHECKOUT / (f"var/test-{number}" if number else "var/test")
    _clear(folder)
    images = os.environ.get("IMAGES_DIR") or str(CHECKOUT / "var/images")
    given = {name: os.environ[name] for name in ("SANDKEEP_USER",) if name in os.environ}
    base = int(os.environ.get("PORT_BASE", PORT_BASE)) + number * PORTS_OF_A_RUN
    given |= {"PORT_BASE": str(base), "IMAGES_DIR": images}
    given |= CHEAP
    platform = configure(given, state_dir=folder / "platform")
    shared = ("DATABASE_URL", "S3_ENDPOINT_URL", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY")
    given |= {name: platform.env[name] for name in shared}
    # Number 0 is the platform's.
    given["REDIS_URL"] = urlsplit(platform.env["REDIS_URL"])._replace(path="/1").geturl()
    given["S3_PREFIX"] = "pytest/"
    given["GUEST_SUBNET"] = _neighbour(platform.env["GUEST_SUBNET"])
    given["PORT_BASE"] = str(platform.port("S3_PORT") + 20)
    return platform, configure(given, state_dir=folder / "pytest")


def _neighbour(subnet: str) -> str:
    """Return the half of the same /19 that a /20 leaves, so that both are told apart."""
    first, second, third, rest = subnet.split(".")
    return f"{first}.{second}.{int(third) ^ 16}.{rest}"


def _clear(folder: Path) -> None:
    """End and remove what a run that was killed left."""
    for name in ("platform", "pytest"):
        if (folder / name / "env").exists():
            stop_leftovers(load({"STATE_DIR": str(folder / name)}))
    if folder.exists():
        shutil.rmtree(folder)


def _run(platform: Config, own: Config, wanted: Wanted) -> int:
    stop = StopRequest()
    stack = Stack(platform, prepare_folders(platform), interrupted=stop.is_set)
    prepare_folders(own)
    environment = own.environment() | {"DJANGO_SETTINGS_MODULE": "tests.settings"}
    try:
        stack.start_services()
        stack.start_libvirt()
        found = _collect(platform, environment, wanted)
        codes = [_ordinary(platform, environment, wanted, found["ordinary"], stop)]
        if found["platform"] and not wanted.quick and INTERRUPTED not in codes:
            stack.start_rest()
            environment |= _platform_variables(stack)
            say("\n── Tests on the running platform, with guests and a browser")
            arguments = [*wanted.arguments, *wanted.marked(NEEDS_PLATFORM)]
            codes.append(_pytest(platform, environment, arguments, stop))
        return worst(codes)
    finally:
        say()
        leave_no_guest(own)
        stack.stop()
        for config in (platform, own):
            shutil.rmtree(config.run_dir, ignore_errors=True)


def _collect(config: Config, environment: Mapping[str, str], wanted: Wanted) -> dict[str, int]:
    """Count the chosen tests of each phase, and so learn whether a platform is needed."""
    if not wanted.arguments and not wanted.marks:
        # All of them: collecting twice would tell nothing new.
        return {"ordinary": WORTH_SHARING, "platform": 1}
    counts = config.state_dir / "collected.json"
    command = [config.python, "-m", "pytest", "-p", "tests.counting", "--collect-only", "-q"]
    command += [*wanted.arguments, *(("-m", wanted.marks) if wanted.marks else ())]
    with step("Collecting tests"):
        collected = subprocess.run(
            command,
            env={**environment, "COUNTS_FILE": str(counts)},
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COLLECT_TIMEOUT_S,
            check=False,
        )
    if collected.returncode == USAGE_ERROR or not counts.exists():
        # pytest stumbled over something, such as a path that is not there; when it runs, it
        # says over what.
        return {"ordinary": 1, "platform": 0}
    found: dict[str, int] = json.loads(counts.read_text())
    say(f"  {found['ordinary']} ordinary, {found['platform']} on a platform")
    return found


def _ordinary(
    config: Config,
    environment: Mapping[str, str],
    wanted: Wanted,
    count: int,
    stop: StopRequest,
) -> int:
    """Run the tests that need no platform."""
    if not count:
        return NO_TESTS
    say("\n── Tests that need no platform")
    shared = ["-n", str(WORKERS), "--dist", "loadfile"] if count >= WORTH_SHARING else []
    arguments = [*shared, *wanted.arguments, *wanted.marked(f"not ({NEEDS_PLATFORM})")]
    return _pytest(config, environment, arguments, stop)


def _platform_variables(stack: Stack) -> dict[str, str]:
    """Return where the end-to-end tests find the running platform."""
    config = stack.config
    key = stack.manage("create_api_key", "--email", "e2e@example.com", "--team", "e2e")
    return {
        "PLATFORM_URL": config.env["PUBLIC_URL"],
        "PLATFORM_API_KEY": key.strip(),
        "PLATFORM_STATE_DIR": str(config.state_dir),
        "PLATFORM_RUN_DIR": str(config.run_dir),
        "PLATFORM_PID_DIR": str(config.pid_dir),
        "PLATFORM_ENV_FILE": str(config.state_dir / "env"),
        "PLATFORM_GUEST_NETWORK": config.env["GUEST_NETWORK"],
        "PLATFORM_MAIL_FILE": config.env["MAIL_FILE"],
    }


def _pytest(
    config: Config, environment: Mapping[str, str], arguments: Sequence[str], stop: StopRequest
) -> int:
    """Run pytest in this terminal; return its exit code."""
    command = [config.python, "-m", "pytest", "--durations=15", *arguments]
    # A short path: among the files of tests are sockets, whose names are bounded.
    with tempfile.TemporaryDirectory(prefix="sk-") as folder:
        command.append(f"--basetemp={folder}/t")
        return _await(subprocess.Popen(command, env=environment, cwd=CHECKOUT), stop)


def _await(child: "subprocess.Popen[bytes]", stop: StopRequest) -> int:
    """Wait until pytest ends; end it when we are asked to stop."""
    while not stop.is_set():
        try:
            return child.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
    # A Ctrl-C has reached pytest too; a TERM came to us alone.
    if stop.signal is not signal.SIGINT:
        child.send_signal(signal.SIGINT)
    try:
        child.wait(TEARDOWN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
