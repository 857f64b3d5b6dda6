"""What survives when a part of the platform dies at once."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable

import httpx
import pytest
from sandbox0 import Client, CmdOptions, Sandbox

from tests.end_to_end.conftest import Platform, details, eventually, pause, resume

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]


def guests(platform: Platform) -> set[int]:
    """List the processes that run guests of this platform."""
    command = ["pgrep", "-f", f"guest={platform.guest_network}-"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return {int(pid) for pid in found.stdout.split()}


def test_a_worker_that_dies_during_a_pause_loses_nothing(
    platform: Platform, client: Client, http: httpx.Client, sandbox: Sandbox
) -> None:
    body = os.urandom(6_000_000)
    sandbox.write_file("/root/precious", body)
    client.sandboxes.pause(sandbox.id)
    platform.kill("worker")

    eventually(lambda: details(http, sandbox)["status"] == "paused", "the pause")
    platform.empty_cache()
    resume(client, sandbox)

    assert bytes(sandbox.read_file("/root/precious")) == body


def test_a_guest_whose_qemu_dies_is_started_again_on_what_it_had(
    platform: Platform, http: httpx.Client, claim: Callable[[], Sandbox]
) -> None:
    others = guests(platform)
    sandbox = claim()
    sandbox.write_file("/root/synced", b"still here")
    sandbox.cmd("sync")

    (guest,) = guests(platform) - others
    os.kill(guest, signal.SIGKILL)

    eventually(
        lambda: details(http, sandbox)["runtime_generation"] == 2,
        "noticing the dead guest",
        within_s=30,
    )
    assert bytes(sandbox.read_file("/root/synced")) == b"still here"
    assert details(http, sandbox)["status"] == "running"


def test_a_guest_whose_disk_server_dies_is_started_again_on_what_it_had(
    platform: Platform, http: httpx.Client, sandbox: Sandbox
) -> None:
    sandbox.write_file("/root/synced", b"still here")
    sandbox.cmd("sync")
    daemons = [
        int(pid)
        for pid in subprocess.run(
            ["pgrep", "-f", f"qemu-storage-daemon.*{platform.run_dir}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
    ]

    for pid in daemons:
        os.kill(pid, signal.SIGKILL)

    eventually(
        lambda: details(http, sandbox)["runtime_generation"] == 2,
        "noticing the dead disk",
        within_s=30,
    )
    assert bytes(sandbox.read_file("/root/synced")) == b"still here"


def test_a_command_outlives_the_web_process(
    platform: Platform, client: Client, http: httpx.Client, sandbox: Sandbox
) -> None:
    command = ["sh", "-c", "sleep 8; echo finished"]
    started = http.post(
        f"/api/v1/sandboxes/{sandbox.id}/contexts",
        json={"type": "cmd", "cmd": {"command": command}},
    )
    context_id = started.json()["data"]["id"]

    platform.kill("web")

    def is_up() -> bool:
        try:
            return http.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    eventually(is_up, "the web process's return")
    eventually(lambda: not sandbox.get_context(context_id).running, "the command's end")
    found = sandbox.get_context(context_id)
    assert (found.stdout, found.exit_code) == ("finished\n", 0)


def test_a_waiting_caller_is_told_when_the_web_process_dies_and_the_command_ran_once(
    platform: Platform, client: Client, http: httpx.Client, sandbox: Sandbox
) -> None:
    failures: list[Exception] = []

    def wait() -> None:
        try:
            sandbox.cmd("sh", CmdOptions(command=["sh", "-c", "echo x >> /root/runs; sleep 6"]))
        except Exception as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(
        lambda: any(entry.name == "runs" for entry in sandbox.list_files("/root")), "the start"
    )
    platform.kill("web")
    waiter.join(timeout=60)

    def runs() -> bytes:
        try:
            return bytes(sandbox.read_file("/root/runs"))
        except Exception:
            return b""

    eventually(lambda: runs() != b"", "the web process's return")
    assert len(failures) == 1
    assert runs() == b"x\n"


def test_a_pause_waits_for_the_object_store_and_can_be_turned_round(
    platform: Platform, client: Client, http: httpx.Client, sandbox: Sandbox
) -> None:
    body = os.urandom(3_000_000)
    sandbox.write_file("/root/precious", body)
    store = platform.pid("seaweedfs")
    os.kill(store, signal.SIGSTOP)
    try:
        client.sandboxes.pause(sandbox.id)
        eventually(
            lambda: "object store" in str(details(http, sandbox).get("health")),
            "saying that the store is away",
        )
        assert details(http, sandbox)["paused"] is False

        client.sandboxes.resume(sandbox.id)
        eventually(lambda: details(http, sandbox)["runtime_generation"] == 2, "turning round")
    finally:
        os.kill(store, signal.SIGCONT)

    assert bytes(sandbox.read_file("/root/precious")) == body
    pause(client, sandbox)
    platform.empty_cache()
    assert bytes(sandbox.read_file("/root/precious")) == body
