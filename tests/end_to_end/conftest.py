"""A whole platform, seen from outside: `bin/test` starts it and says where it is."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from sandbox0 import APIError, Client, Sandbox
from sandbox0.apispec.models.sandbox_config import SandboxConfig

# Software emulation, two cores, and other tests beside this one.
PATIENCE_S = 240.0


@dataclass(frozen=True)
class Platform:
    """Where the platform under test is, and a key to it."""

    url: str
    key: str
    state_dir: Path
    run_dir: Path
    pid_dir: Path
    guest_network: str

    def client(self) -> Client:
        return Client(token=self.key, base_url=self.url, timeout=PATIENCE_S)

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def pid(self, program: str) -> int:
        return int((self.pid_dir / f"{program}.pid").read_text().split()[0])

    def kill(self, program: str) -> None:
        """End a program of the platform and its children as a crash would: at once."""
        pid = self.pid(program)
        for victim in (pid, *children_of(pid)):
            os.kill(victim, signal.SIGKILL)

    def empty_cache(self) -> None:
        """Forget every block that the host has fetched or uploaded."""
        for path in (self.state_dir / "cache" / "packs").rglob("*"):
            if path.is_file():
                path.unlink()


def children_of(pid: int) -> list[int]:
    """Return the processes below one, deepest last."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children_of(child)]
    return found


@pytest.fixture(scope="session")
def platform() -> Platform:
    if "PLATFORM_URL" not in os.environ:
        pytest.fail("These tests need a running platform: use bin/test.")
    return Platform(
        url=os.environ["PLATFORM_URL"],
        key=os.environ["PLATFORM_API_KEY"],
        state_dir=Path(os.environ["PLATFORM_STATE_DIR"]),
        run_dir=Path(os.environ["PLATFORM_RUN_DIR"]),
        pid_dir=Path(os.environ["PLATFORM_PID_DIR"]),
        guest_network=os.environ["PLATFORM_GUEST_NETWORK"],
    )


@pytest.fixture
def client(platform: Platform) -> Iterator[Client]:
    client = platform.client()
    yield client
    client.close()


@pytest.fixture
def http(platform: Platform) -> Iterator[httpx.Client]:
    with platform.http() as client:
        yield client


@pytest.fixture
def claim(client: Client) -> Iterator[Callable[..., Sandbox]]:
    """Claim sandboxes that are deleted when the test ends."""
    claimed: list[str] = []

    def claim_one(**config: object) -> Sandbox:
        wanted = SandboxConfig.from_dict(config) if config else None
        sandbox = client.sandboxes.claim("default", config=wanted)
        claimed.append(sandbox.id)
        return sandbox

    yield claim_one
    for sandbox_id in claimed:
        try:
            client.sandboxes.delete(sandbox_id)
        except APIError as error:
            if error.status_code != 404:  # its time was up
                raise


@pytest.fixture
def sandbox(claim: Callable[..., Sandbox]) -> Sandbox:
    """A sandbox that has run a command, so that it surely runs."""
    sandbox = claim()
    assert sandbox.cmd("true").exit_code == 0
    return sandbox


def pause(client: Client, sandbox: Sandbox) -> None:
    client.sandboxes.pause_and_wait(sandbox.id, timeout_sec=PATIENCE_S)


def resume(client: Client, sandbox: Sandbox) -> None:
    client.sandboxes.resume_and_wait(sandbox.id, timeout_sec=PATIENCE_S)


def details(http: httpx.Client, sandbox: Sandbox) -> dict[str, object]:
    answer = http.get(f"/api/v1/sandboxes/{sandbox.id}")
    answer.raise_for_status()
    found: dict[str, object] = answer.json()["data"]
    return found


def eventually(
    check: Callable[[], bool], what: str, *, within_s: float = PATIENCE_S, every_s: float = 0.5
) -> None:
    """Wait until the check holds; fail the test if it never does."""
    give_up_at = time.monotonic() + within_s
    while not check():
        if time.monotonic() > give_up_at:
            pytest.fail(f"{what} did not happen within {within_s:.0f} s")
        time.sleep(every_s)
