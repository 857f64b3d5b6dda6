"""The platform that is measured: seen through its API, and a little from behind.

From behind are read what no client is told: where a guest listens, and what its disk has
fetched so far. Both only as root on the host.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import psycopg
from sandbox0 import APIError, Client, CmdResult, Sandbox
from sandbox0.apispec.models.sandbox_config import SandboxConfig
from sandbox0.apispec.models.sandbox_resource_config import SandboxResourceConfig

from hosts.link import GateEndpoint, GuestEndpoint
from hosts.volumes.exports import FetchCounter
from launch.config import Config
from launch.progress import LaunchFailed

# Software emulation writes some 20 MB/s, and a busy machine less.
WAIT_S = 1800.0
POLL_S = 0.1
RESTART_S = 120.0
LONGEST_S = 4 * 3600

_ROW = "select address, host_public_key, runtime_generation, volume_id::text"


@dataclass(frozen=True)
class Row:
    """What the database says of a sandbox."""

    address: str
    host_public_key: str
    runtime_generation: int
    volume: str
    """The volume's id as 32 hexadecimal digits, as the host's folders are named."""


class Target:
    """One platform of this machine, and a key to it."""

    def __init__(self, config: Config, key: str, *, template: str, memory_mib: int) -> None:
        self.config = config
        self.memory_mib = memory_mib
        url = config.env["PUBLIC_URL"]
        self.client = Client(token=key, base_url=url, timeout=WAIT_S)
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S
        )
        self._template = template

    def claim(self) -> Sandbox:
        """Claim a sandbox; the caller deletes it."""
        # Without a limit it would outlive a bench that was killed.
        memory = SandboxResourceConfig(memory=f"{self.memory_mib}Mi")
        wanted = SandboxConfig(hard_ttl=LONGEST_S, resources=memory)
        return self.client.sandboxes.claim(self._template, config=wanted)

    @contextmanager
    def sandbox(self) -> Iterator[Sandbox]:
        """Claim a sandbox, wait for its first command, and delete it in the end."""
        sandbox = self.claim()
        try:
            run(sandbox, "true")
            yield sandbox
        finally:
            self.delete(sandbox)

    def delete(self, sandbox: Sandbox) -> None:
        """Delete it, also when web restarts at this moment."""
        until = time.monotonic() + RESTART_S
        while True:
            try:
                self.client.sandboxes.delete(sandbox.id)
            except httpx.TransportError:
                if time.monotonic() > until:
                    raise
                time.sleep(1.0)
            else:
                return

    def pause(self, sandbox: Sandbox) -> float:
        """Pause it; return how many seconds passed until its disk was committed."""
        started = time.monotonic()
        self.client.sandboxes.pause_and_wait(
            sandbox.id, timeout_sec=WAIT_S, poll_interval_sec=POLL_S
        )
        return time.monotonic() - started

    def resume(self, sandbox: Sandbox) -> float:
        """Wake it by a command; return how many seconds passed until that was done."""
        started = time.monotonic()
        run(sandbox, "true")
        return time.monotonic() - started

    def storage(self, sandbox: Sandbox) -> dict[str, int]:
        """Return what the sandbox keeps and what its last pause uploaded, in bytes."""
        answer = self._http.get(f"/api/v1/sandboxes/{sandbox.id}")
        answer.raise_for_status()
        storage: dict[str, int] = answer.json()["data"]["storage"]
        return storage

    def row(self, sandbox: Sandbox) -> Row:
        """Return what the database says of the sandbox."""
        with psycopg.connect(self.config.env["DATABASE_URL"]) as database:
            query = f"{_ROW} from sandboxes_sandbox where id = %s"
            found: tuple[Any, ...] | None = database.execute(query, [sandbox.id]).fetchone()
        if found is None:
            raise LaunchFailed(f"{sandbox.id} is not in this platform's database.")
        address, key, generation, volume = found
        return Row(str(address), key, generation, volume.replace("-", ""))

    def guest(self, sandbox: Sandbox) -> GuestEndpoint:
        """Return where the guest of a running sandbox is reached."""
        row, env = self.row(sandbox), self.config.env
        gate = GateEndpoint(env["GATE_HOST"], int(env["GATE_PORT"]), env["GATE_PUBLIC_KEY"])
        name = f"{sandbox.id}:{row.runtime_generation}"
        return GuestEndpoint(gate, row.address, row.host_public_key, name)

    def fetched_bytes(self, sandbox: Sandbox) -> int:
        """Return what its disk has fetched from object storage since its last start."""
        folder = self.config.run_dir / "disks" / self.row(sandbox).volume
        return FetchCounter.read(folder / "fetched").bytes

    def empty_cache(self) -> None:
        """Forget every block that this host has fetched or uploaded; all are fetched anew."""
        packs: Path = self.config.state_dir / "cache/packs"
        for path in packs.rglob("*"):
            if path.is_file():
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Hang up."""
        self._http.close()
        self.client.close()


def run(sandbox: Sandbox, command: str) -> str:
    """Run a command in the sandbox, woken if it sleeps, and return what it wrote.

    Raises:
        LaunchFailed: it failed there.
        APIError: the platform refused, or the sandbox did not wake in time.
    """
    done = _await_command(sandbox, command)
    if done.exit_code != 0:
        raise LaunchFailed(f"{command!r} ended with {done.exit_code}: {done.stderr.strip()}")
    return str(done.stdout)


def _await_command(sandbox: Sandbox, command: str) -> CmdResult:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            return sandbox.cmd(command)
        except APIError as error:
            # One request waits a minute for a boot, which a busy machine may exceed.
            if error.status_code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > until:
                raise


def write_random(sandbox: Sandbox, path: str, size_mb: int) -> None:
    """Have the guest write random bytes to a file, and flush them to its disk."""
    run(
        sandbox,
        f"dd if=/dev/urandom of={path} bs=1000000 count={size_mb} iflag=fullblock "
        "conv=fsync status=none",
    )


def disk_bytes(sandbox: Sandbox) -> tuple[int, int]:
    """Return the size of its root file system, and how much of that is used."""
    size, used = run(sandbox, "df -B1 --output=size,used /").split()[-2:]
    return int(size), int(used)
