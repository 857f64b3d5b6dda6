"""A host that is lost with what runs on it, while another one of the platform lives."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import psycopg
import pytest
from sandbox0 import APIError, Sandbox

from common.units import MiB
from launch.config import Config, configure, load, prepare_folders
from launch.guests import leave_no_guest
from tests.end_to_end.conftest import Platform, children_of, details, eventually, pause, resume

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

# What the hosts of one platform have in common.
SHARED = (
    *("DATABASE_URL", "REDIS_URL", "S3_ENDPOINT_URL", "S3_BUCKET", "S3_PREFIX", "S3_REGION"),
    *("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "SECRET_KEY", "MASTER_KEY_FILE"),
    *("IMAGES_DIR", "DISK_USER", "SOCKET_GROUP", "SANDKEEP_USER", "CLUSTER_KEY"),
)
PLATFORM_KEYS = ("PLATFORM_KEY_FILE", "PLATFORM_PUBLIC_KEY")


def environment(config: Config) -> dict[str, str]:
    """Return the environment of a host's processes, without what only these tests set."""
    return config.environment() | {"QUEUE_URL": config.env["REDIS_URL"]}


def manage(config: Config, *arguments: str) -> None:
    command = [config.python, str(config.checkout / "manage.py"), *arguments]
    subprocess.run(command, env=environment(config), check=True, timeout=120)


@pytest.fixture
def first(platform: Platform) -> Config:
    return load({"STATE_DIR": str(platform.state_dir)})


@pytest.fixture
def second(first: Config) -> Iterator[Config]:
    """Another host of the same platform, on this machine, with nothing of the first one's."""
    state_dir = first.state_dir.parent / "second"
    given = {name: first.env[name] for name in SHARED if name in first.env}
    given |= {"HOST_NAME": "second", "PORT_BASE": str(first.port("WEB_PORT") + 50)}
    config = configure(given, state_dir=state_dir)
    shared_keys = {name: first.env[name] for name in PLATFORM_KEYS}
    config = replace(config, env={**config.env, **shared_keys})
    prepare_folders(config)
    manage(config, "register_host", "--memory-mib", "4096")
    worker = [config.python, "-m", "dramatiq", "config.worker", "--processes", "1"]
    gate = [config.python, str(config.checkout / "manage.py"), "run_gate"]
    try:
        with (
            running(config, "worker", [*worker, "--threads", "4", "--queues", "host.second"]),
            running(config, "gate", gate),
        ):
            yield config
    finally:
        leave_no_guest(config)
        with psycopg.connect(config.env["DATABASE_URL"]) as database:
            database.execute("UPDATE hosts_host SET is_open = false WHERE name = 'second'")
        shutil.rmtree(config.run_dir, ignore_errors=True)


@contextmanager
def running(config: Config, name: str, command: list[str]) -> Iterator[None]:
    with (
        (config.log_dir / f"{name}.log").open("wb") as log,
        subprocess.Popen(command, env=environment(config), stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=90)


def is_heard(config: Config) -> bool:
    """Tell whether the platform has heard of the host in the last ten seconds."""
    query = "SELECT seen_at > now() - interval '10 s' FROM hosts_host WHERE name = %s"
    with psycopg.connect(config.env["DATABASE_URL"]) as database:
        row = database.execute(query, (config.env["HOST_NAME"],)).fetchone()
    return row is not None and bool(row[0])


@contextmanager
def frozen(platform: Platform) -> Iterator[None]:
    """Hold the first host's worker, as a machine that hangs, and let it go on in the end."""
    pid = platform.pid("worker")
    everybody = [pid, *children_of(pid)]
    for victim in everybody:
        os.kill(victim, signal.SIGSTOP)
    try:
        yield
    finally:
        for victim in everybody:
            os.kill(victim, signal.SIGCONT)


def cut_power(platform: Platform) -> None:
    """End all that the first host runs for its sandboxes, with no chance to say good-bye."""
    for pattern in (f"guest={platform.guest_network}-", f"{platform.run_dir}/disks/"):
        subprocess.run(["pkill", "-KILL", "-f", pattern], check=False)


def disks_of(config: Config) -> set[str]:
    """Name the disks whose writes a host keeps, stored already or not."""
    overlays = config.state_dir / "overlays"
    return {path.parent.name for path in overlays.glob("*/*.qcow2")}


def test_a_sandbox_of_a_lost_host_goes_on_elsewhere_from_its_last_commit(
    platform: Platform,
    first: Config,
    http: httpx.Client,
    claim: Callable[..., Sandbox],
    request: pytest.FixtureRequest,
) -> None:
    others = disks_of(first)
    sandbox = claim()
    body = os.urandom(2 * MiB)
    sandbox.write_file("/root/stored", body)
    taken = http.post(f"/api/v1/sandboxes/{sandbox.id}/snapshots", json={"name": "stored"})
    assert taken.status_code == 201
    disk = disks_of(first) - others
    assert len(disk) == 1
    second: Config = request.getfixturevalue("second")
    eventually(lambda: is_heard(second), "the second host's first sign of life")

    with frozen(platform):
        # Never committed: nobody is left who could.
        sandbox.write_file("/root/late", b"written to a host that is lost")
        assert sandbox.cmd("sync").exit_code == 0
        cut_power(platform)
        eventually(lambda: not is_heard(first), "the first host's silence")
        eventually(lambda: leaves(second), "leaving it")
        eventually(
            lambda: (
                details(http, sandbox)["status"] == "running"
                and details(http, sandbox)["runtime_generation"] == 2
            ),
            "the sandbox's start elsewhere",
        )

        assert bytes(sandbox.read_file("/root/stored")) == body
        with pytest.raises(APIError):
            sandbox.read_file("/root/late")
        assert disk <= disks_of(second)  # with those of others that have left the lost one
        sandbox.write_file("/root/after", b"written on the second host")

    # The lost one comes back, has something that was never stored, and drops it.
    eventually(lambda: not disk & disks_of(first), "giving up what is no longer its own")
    client = platform.client()
    pause(client, sandbox)
    resume(client, sandbox)
    assert bytes(sandbox.read_file("/root/stored")) == body
    assert bytes(sandbox.read_file("/root/after")) == b"written on the second host"
    with pytest.raises(APIError):
        sandbox.read_file("/root/late")
    client.sandboxes.delete(sandbox.id)
    eventually(lambda: not disk & disks_of(second), "the end of its disk")
    client.close()


def leaves(config: Config) -> bool:
    """Say as an operator that the first host is lost; refused for as long as it seems alive."""
    try:
        manage(config, "leave_host", "local")
    except subprocess.CalledProcessError:
        return False
    return True
