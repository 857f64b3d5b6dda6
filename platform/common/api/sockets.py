"""Refusing a WebSocket before it is one."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from common.api.envelope import failure

Scope = dict[str, Any]
Message = Any
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

NOT_FOUND_CLOSE_CODE = 4404
"""For servers that cannot answer an upgrade with a status of their own."""


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a path that no socket serves."""
    await refuse_with(
        scope, send, 404, "not_found", "No such resource.", close_code=NOT_FOUND_CLOSE_CODE
    )


async def refuse_with(
    scope: Scope,
    send: Send,
    status: int,
    code: str,
    message: str,
    *,
    close_code: int = 1008,
) -> None:
    """Answer an upgrade with an HTTP status and the envelope, where the server can."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": close_code})
        return
    body = json.dumps(failure(code, message)).encode()
    headers = [(b"content-type", b"application/json")]
    if status == 401:  # noqa: PLR2004
        headers.append((b"www-authenticate", b'Bearer realm="api"'))
    start = {"type": "websocket.http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})
