"""Bearer authentication for the API's WebSockets."""

from accounts.api.authentication import KeyHolder, usable_key
from accounts.services import count_use
from common.api.database import run_db
from common.api.sockets import Application, Receive, Scope, Send, refuse_with


class KeyRequired:
    """ASGI middleware: lets a usable key in as `scope["user"]`, a KeyHolder.

    Which permission a socket needs is for the socket to ask: `scope["user"].may(…)`.
    """

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        holder = await run_db(_holder_of, _bearer(scope))
        if holder is None:
            message = "This API key is unknown, expired or deactivated."
            await refuse_with(scope, send, 401, "unauthorized", message, close_code=4401)
            return
        await self.application({**scope, "user": holder}, receive, send)


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
