"""Bearer authentication for the API's WebSockets."""

import asyncio

from accounts.api.authentication import KeyHolder, usable_key
from accounts.closing import until_closed
from accounts.services import count_use
from common.api.database import run_db
from common.api.sockets import Application, Message, Receive, Scope, Send, refuse_with

KEY_CLOSED = 4401
"""The code that a socket is closed with when its key is, or that one without a key gets."""


class KeyRequired:
    """ASGI middleware: lets a usable key in as `scope["user"]`, a KeyHolder.

    Which permission a socket needs is for the socket to ask: `scope["user"].may(…)`. When
    the key is closed, the socket is told that its client has left, and the client why.
    """

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        holder = await run_db(_holder_of, _bearer(scope))
        if holder is None:
            message = "This API key is unknown, expired or deactivated."
            await refuse_with(scope, send, 401, "unauthorized", message, close_code=KEY_CLOSED)
            return

        closed = asyncio.ensure_future(until_closed(holder.key))
        told: list[int] = []

        async def receive_or_leave() -> Message:
            incoming = asyncio.ensure_future(receive())
            try:
                await asyncio.wait({incoming, closed}, return_when=asyncio.FIRST_COMPLETED)
                if incoming.done():
                    return incoming.result()
            finally:
                incoming.cancel()
            if not told:
                told.append(KEY_CLOSED)
                await send({"type": "websocket.close", "code": KEY_CLOSED})
            return {"type": "websocket.disconnect", "code": KEY_CLOSED}

        async def send_unless_closed(message: Message) -> None:
            # As to a client that has left: there is nobody to send to.
            if not told:
                await send(message)

        try:
            await self.application(
                {**scope, "user": holder}, receive_or_leave, send_unless_closed
            )
        finally:
            closed.cancel()


def _bearer(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, secret = value.decode("latin-1").partition(" ")
            return secret if scheme.lower() == "bearer" else ""
    return ""


def _holder_of(secret: str) -> KeyHolder | None:
    key = usable_key(secret)
    if key is None:
        return None
    count_use(key)
    return KeyHolder(key)
