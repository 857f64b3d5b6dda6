"""What comes in by ASGI: which stack it meets, and what is refused at the door."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator

from accounts.models import ApiKey
from accounts.services import deactivate_api_key
from accounts.web.sockets import is_same_site
from common.api.database import run_db
from common.api.routing import limit_bodies
from config.asgi import application

Sent = list[dict[str, Any]]


async def _ask(
    app: Callable[..., Awaitable[None]],
    path: str,
    *,
    headers: list[tuple[bytes, bytes]] | None = None,
    pieces: list[bytes] | None = None,
) -> tuple[int, bytes, dict[str, str]]:
    """Send one request to an ASGI application; returns status, body and headers."""
    scope = {
        "type": "http",
        "method": "POST" if pieces else "GET",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), *(headers or [])],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
        "scheme": "http",
    }
    incoming = [
        {"type": "http.request", "body": piece, "more_body": True} for piece in pieces or []
    ]
    incoming.append({"type": "http.request", "body": b"", "more_body": False})
    sent: Sent = []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop(0)
        return await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    answer = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], body, answer


@pytest.mark.django_db(transaction=True)
async def test_the_api_is_answered_past_the_consoles_stack() -> None:
    status, body, headers = await _ask(application, "/users/me")

    assert status == 401
    assert json.loads(body)["error"]["code"] == "unauthorized"
    assert headers["x-request-id"]
    assert "set-cookie" not in headers


@pytest.mark.django_db(transaction=True)
async def test_an_unknown_path_of_the_api_is_in_the_envelope() -> None:
    status, body, _ = await _ask(application, "/api/v1/nothing")

    assert status == 404
    assert json.loads(body)["error"]["code"] == "not_found"


@pytest.mark.django_db(transaction=True)
async def test_a_page_passes_the_consoles_stack() -> None:
    status, body, headers = await _ask(application, "/accounts/login/")

    assert status == 200
    assert b"<form" in body
    assert "script-src" in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"


async def _swallow(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["more_body"]:
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"swallowed"})


async def test_a_body_within_the_limit_passes() -> None:
    app = limit_bodies(_swallow, limit_bytes=10)

    assert (await _ask(app, "/", pieces=[b"12345", b"67890"]))[0] == 200


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    app = limit_bodies(_swallow, limit_bytes=10)

    status, body, _ = await _ask(app, "/", headers=[(b"content-length", b"11")])

    assert status == 413
    assert json.loads(body)["error"]["code"] == "payload_too_large"


async def test_a_body_that_does_not_say_how_large_it_is_is_cut_off() -> None:
    app = limit_bodies(_swallow, limit_bytes=10)

    assert (await _ask(app, "/", pieces=[b"123456", b"67890"]))[0] == 413


# -- sockets -------------------------------------------------------------------------------


async def _refusal(path: str, **headers: str) -> int:
    """Ask for a socket that is refused; returns the code that it is closed with."""
    scope = {
        "type": "websocket",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "subprotocols": [],
    }
    socket: Any = ApplicationCommunicator(application, scope)  # type: ignore[no-untyped-call]
    await socket.send_input({"type": "websocket.connect"})
    answer = await socket.receive_output(timeout=10)
    await socket.wait()
    assert answer["type"] == "websocket.close"
    code: int = answer["code"]
    return code


@pytest.mark.django_db(transaction=True)
async def test_an_api_socket_wants_a_key() -> None:
    for headers in ({}, {"authorization": "Bearer s0_local_" + "0" * 48}):
        assert await _refusal("/api/v1/nothing", **headers) == 4401


@pytest.mark.django_db(transaction=True)
async def test_an_unknown_api_socket_is_closed_as_not_found(
    alices_key: tuple[ApiKey, str],
) -> None:
    authorization = f"Bearer {alices_key[1]}"

    assert await _refusal("/api/v1/nothing", authorization=authorization) == 4404


@pytest.mark.django_db(transaction=True)
async def test_a_deactivated_key_opens_no_socket(alices_key: tuple[ApiKey, str]) -> None:
    await run_db(deactivate_api_key, key=alices_key[0])
    authorization = f"Bearer {alices_key[1]}"

    assert await _refusal("/api/v1/nothing", authorization=authorization) == 4401


@pytest.mark.django_db(transaction=True)
async def test_an_unknown_console_socket_is_closed_as_not_found() -> None:
    origin = "http://localhost"

    assert await _refusal("/nothing", host="localhost", origin=origin) == 4404


async def test_a_console_socket_wants_a_page_of_ours() -> None:
    for origin in ("", "http://evil.example", "http://localhost:9999", "null"):
        assert await _refusal("/nothing", host="localhost", origin=origin) == 4403


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("https://localhost", "localhost", True),
        ("http://localhost:8001", "localhost:8000", False),
        ("http://evil.example", "evil.example", False),
        ("http://evil.example", "localhost", False),
        ("", "localhost", False),
        ("null", "localhost", False),
        ("", "", False),
        ("http://localhost@evil.example", "localhost", False),
    ],
)
def test_which_pages_are_ours(origin: str, host: str, *, same: bool) -> None:
    assert is_same_site(origin, host) is same
