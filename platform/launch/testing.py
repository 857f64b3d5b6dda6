"""`bin/test`: run the tests beside real servers and a whole platform, and leave nothing.

Two sets of names are made afresh for each run, under var/test: one for the platform that the
end-to-end tests use from outside, one for what tests start themselves. They share the
servers, apart in database, Redis number and object prefix, and with var/ the guest images.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from launch.config import CHECKOUT, Config, configure, load, prepare_folders
from launch.guests import leave_no_guest
from launch.progress import LaunchFailed, say, step
from launch.stack import Stack, stop_leftovers

# Away from the usual ports, which a platform of this checkout may hold.
PORT_BASE = "23000"
NEEDS_PLATFORM = "guest or browser"
# pytest's exit code for "no test was collected".
# Source: https://docs.pytest.org/en/stable/reference/exit-codes.html
NO_TESTS = 5
COLLECT_TIMEOUT_S = 300.0


def main(arguments: list[str]) -> int:
    """Run the command; return pytest's exit code, or 1 if it could not be run."""
    quick = "--quick" in arguments
    arguments = [argument for argument in arguments if argument != "--quick"]
    if quick:
        arguments += ["-m", f"not ({NEEDS_PLATFORM})"]
    folder = CHECKOUT / "var/test"
    try:
        platform, own = _configure(folder)
        return _run(platform, own, arguments, quick=quick)
    except LaunchFailed as error:
        say(f"\n{error}")
        return 1


def _configure(folder: Path) -> tuple[Config, Config]:
    """Return the names of the platform and of the tests' own parts, both new."""
    _clear(folder)
    images = os.environ.get("IMAGES_DIR") or str(CHECKOUT / "var/images")
    given = {name: os.environ[name] for name in ("SANDKEEP_USER",) if name in os.environ}
    given |= {"PORT_BASE": os.environ.get("PORT_BASE", PORT_BASE), "IMAGES_DIR": images}
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


def _run(platform: Config, own: Config, arguments: list[str], *, quick: bool) -> int:
    # A Ctrl-C reaches pytest as well, which ends by itself; then we clean up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stack = Stack(platform, prepare_folders(platform))
    prepare_folders(own)
    environment = own.environment() | {"DJANGO_SETTINGS_MODULE": "tests.settings"}
    try:
        stack.start_services()
        if not quick and _needs_platform(platform, environment, arguments):
            stack.start_rest()
            environment |= _platform_variables(stack)
        return _pytest(platform, environment, arguments)
    finally:
        say()
        leave_no_guest(own)
        stack.stop()
        for config in (platform, own):
            shutil.rmtree(config.run_dir, ignore_errors=True)


def _needs_platform(config: Config, environment: dict[str, str], arguments: list[str]) -> bool:
    """Tell whether any chosen test uses the platform: starting it takes a while."""
    with step("Collecting tests"):
        answer = subprocess.run(
            [
                *(config.python, "-m", "pytest", "--collect-only", "-q"),
                *(*arguments, "-m", NEEDS_PLATFORM),
            ],
            env=environment,
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COLLECT_TIMEOUT_S,
            check=False,
        )
    return answer.returncode != NO_TESTS


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


def _pytest(config: Config, environment: dict[str, str], arguments: list[str]) -> int:
    say()
    command = [config.python, "-m", "pytest", *arguments]
    return subprocess.run(command, env=environment, cwd=CHECKOUT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
