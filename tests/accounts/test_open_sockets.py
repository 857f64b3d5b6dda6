"""An open socket ends when its key is closed."""

from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator

from accounts.api.sockets import KEY_CLOSED, KeyRequired
from accounts.models import ApiKey
from accounts.services import deactivate_api_key, delete_api_key
from common.api.database import run_db

left: list[int] = []


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Accept, send back what comes, and note the code that it ends with."""
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})
    left.append(message["code"])
    await send({"type": "websocket.send", "text": "too late"})


@pytest.mark.parametrize("close", [deactivate_api_key, delete_api_key])
@pytest.mark.django_db(transaction=True)
async def test_an_open_socket_ends_when_its_key_is_closed(
    alices_key: tuple[ApiKey, str], close: Any
) -> None:
    left.clear()
    key, secret = alices_key
    headers = [(b"authorization", f"Bearer {secret}".encode())]
    scope = {"type": "websocket", "path": "/api/v1/x", "headers": headers}
    socket: Any = ApplicationCommunicator(KeyRequired(_echo), scope)  # type: ignore[no-untyped-call]
    await socket.send_input({"type": "websocket.connect"})
    assert (await socket.receive_output(10))["type"] == "websocket.accept"
    for word in ("one", "two"):
        await socket.send_input({"type": "websocket.receive", "text": word})
        assert (await socket.receive_output(10))["text"] == word

    await run_db(close, key=key)

    assert await socket.receive_output(10) == {"type": "websocket.close", "code": KEY_CLOSED}
    await socket.wait(10)
    assert left == [KEY_CLOSED]
    assert await socket.receive_nothing(0.1), "nothing is sent after the close"
