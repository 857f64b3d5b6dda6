"""Requests that wait must not be in the way of those that do not."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from django.conf import settings
from django.db import connection

from accounts.models import ApiKey
from common.api.database import WORKERS

WAITERS = 300


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def site(transactional_db: None) -> Iterator[str]:
    """The address of a server process on the test database."""
    url = urlsplit(os.environ["DATABASE_URL"])
    database = url._replace(path=f"/{connection.settings_dict['NAME']}").geturl()
    port = _free_port()
    command = [
        sys.executable,
        *("-m", "uvicorn", "config.asgi:application"),
        *("--port", str(port), "--log-level", "warning"),
    ]
    environment = os.environ | {
        "DATABASE_URL": database,
        "DJANGO_SETTINGS_MODULE": "tests.common.waiting_settings",
    }
    server = subprocess.Popen(command, cwd=settings.BASE_DIR, env=environment)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


async def _until_up(client: httpx.AsyncClient) -> None:
    for _ in range(300):
        try:
            await client.get("/healthz")
        except httpx.TransportError:
            await asyncio.sleep(0.1)
        else:
            return
    pytest.fail("the server did not start")


async def _until_all_wait(client: httpx.AsyncClient) -> int:
    for _ in range(300):
        report = (await client.get("/api/v1/report")).json()["data"]
        if report["waiting"] == WAITERS:
            return int(report["threads"])
        await asyncio.sleep(0.1)
    pytest.fail(f"only {report['waiting']} wait")


@pytest.mark.django_db(transaction=True)
async def test_three_hundred_waiting_requests_hold_no_thread_and_slow_no_list(
    site: str, alices_key: tuple[ApiKey, str]
) -> None:
    headers = {"Authorization": f"Bearer {alices_key[1]}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=site, headers=headers, limits=limits, timeout=60
    ) as client:
        await _until_up(client)
        waiters = [asyncio.create_task(client.get("/api/v1/wait")) for _ in range(WAITERS)]
        threads = await _until_all_wait(client)

        # In five seconds all three: generous, where each takes milliseconds.
        answers = await asyncio.wait_for(
            asyncio.gather(*(client.get("/api-keys") for _ in range(3))), timeout=5
        )
        await client.post("/api/v1/wait")
        waited = await asyncio.gather(*waiters)

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert threads < WORKERS + 20
    assert {answer.status_code for answer in waited} == {200}
