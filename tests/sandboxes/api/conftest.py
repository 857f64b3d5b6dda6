"""A platform on loopback: the real ASGI application in uvicorn, a guest, and the SDK."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import sandbox0
import uvicorn
from django.db import connections

from accounts.models import ApiKey, Team
from common.server import HttpProtocol
from hosts.models import Generation, Host, Volume
from sandboxes import access
from sandboxes.models import Sandbox
from tests.fakes.guest_link import ADDRESS, LocalGuest, local_guest, wait_until


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGuest]:
    with local_guest(tmp_path_factory.mktemp("guest")) as guest:
        yield guest


@pytest.fixture(scope="session")
def _server() -> Iterator[str]:
    from config.asgi import application  # noqa: PLC0415  (sets Django up)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(
        application, port=port, log_level="warning", lifespan="off", http=HttpProtocol
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()
    connections.close_all()


@pytest.fixture
def url(
    _server: str,
    guest: LocalGuest,
    monkeypatch: pytest.MonkeyPatch,
    transactional_db: None,
) -> str:
    """Where the live application answers."""
    monkeypatch.setattr(access, "links", guest.links)
    return _server


@pytest.fixture
def http(url: str, alices_key: tuple[ApiKey, str]) -> Iterator[httpx.Client]:
    """Alice's plain HTTP client, below the sandboxes' paths."""
    headers = {"Authorization": f"Bearer {alices_key[1]}"}
    with httpx.Client(base_url=f"{url}/api/v1", headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def sdk(url: str, alices_key: tuple[ApiKey, str]) -> Iterator[sandbox0.Client]:
    """The unmodified SDK with Alice's key."""
    client = sandbox0.Client(token=alices_key[1], base_url=url, timeout=60)
    yield client
    client.close()


@pytest.fixture
def gated_host(guest: LocalGuest, transactional_db: None) -> Host:
    return Host.objects.create(
        name="local-guest",
        gate_host="127.0.0.1",
        gate_port=guest.gate_port,
        gate_public_key=guest.gate_public_key,
        subnet="127.0.0.0/8",
        memory_bytes=64 << 30,
    )


@pytest.fixture
def make_sandbox(
    gated_host: Host, guest: LocalGuest, alices_team: Team
) -> Callable[..., Sandbox]:
    """Make a sandbox row in any state; its guest is the one on loopback."""

    def make(state: Sandbox.State = Sandbox.State.RUNNING, **fields: object) -> Sandbox:
        volume = Volume.objects.create()
        generation = Generation.objects.create(
            volume=volume, number=1, epoch=0, kind="base", root_key="r", size_bytes=1 << 30
        )
        volume.head = generation
        volume.save()
        values = {
            "id": f"rs-c1-test-{uuid4().hex[:5]}",
            "team": alices_team,
            "template_name": "default",
            "volume": volume,
            "state": state,
            "memory_bytes": 512 << 20,
            "runtime_id": f"run-{uuid4().hex[:6]}",
            "host": gated_host,
            "address": ADDRESS,
            "host_public_key": guest.host_public_key,
        }
        return Sandbox.objects.create(**(values | fields))

    return make


@pytest.fixture
def sandbox(make_sandbox: Callable[..., Sandbox]) -> Sandbox:
    """One that runs."""
    return make_sandbox()


@pytest.fixture
def box(sdk: sandbox0.Client, sandbox: Sandbox) -> "sandbox0.Sandbox":
    """The same, as the SDK sees it."""
    return sdk.sandbox(sandbox.id)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the guest's, which is on this machine."""
    return tmp_path


@pytest.fixture
def run_async() -> Callable[..., object]:
    return asyncio.run
