"""Requests whose bodies are handled while they arrive, and are never whole in one place.

Django keeps a body in a temporary file before any view sees it. Under ASGI a POST to a path
of STREAMED_PATHS reaches its view at once, with its headers, and the view reads the body as
it comes: so it is refused before it was sent, and takes no more memory than a piece of it.
The server holds the sender back while nobody reads.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest

from common.api.sockets import Message, Receive, Scope, Send
from common.errors import Refused
from common.units import KiB

KEY = "common.body"
"""Where the scope has the body."""

READ_BYTES = 512 * KiB


class BodyBroken(Refused):
    """The sender went away before all of it came, so nobody hears this."""

    code = "bad_request"
    status = 400

    def __str__(self) -> str:
        return "The request broke off."


def is_streamed(scope: Scope) -> bool:
    """Say whether a request's view reads its body as it comes."""
    return scope["method"] == "POST" and bool(settings.STREAMED_PATHS.fullmatch(scope["path"]))


class StreamedBody:
    """The body of one request, on its way."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_announced = False
        self._ended = asyncio.Event()
        self._piece, self._at = b"", 0

    async def pieces(self) -> AsyncIterator[bytes]:
        """Give what comes, until all of it did.

        Raises:
            BodyBroken: the sender went away.
        """
        while piece := await self._next():
            yield piece

    async def _next(self) -> bytes:
        """Wait for more; empty at the end."""
        while not self._ended.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._ended.set()
                raise BodyBroken
            if not message.get("more_body", False):
                self._ended.set()
            piece: bytes = message.get("body", b"")
            if piece:
                return piece
        return b""

    async def receive(self) -> Message:
        """Tell Django that there is no body, and later when the sender has gone away."""
        if not self._is_announced:
            self._is_announced = True
            return {"type": "http.request", "body": b"", "more_body": False}
        # Two must not wait for the server's next message at once.
        await self._ended.wait()
        return await self._receive()

    def read(self, size_bytes: int = -1, /) -> bytes:
        """Read in a thread as from a file: what has come, empty at the end.

        Without a size it is all of a small body.
        """
        if size_bytes < 0:
            return self._read_all()
        self._fill()
        return self._take(self._at + size_bytes)

    def readline(self) -> bytes:
        """Read in a thread up to the end of a line, or of what has come."""
        self._fill()
        end = self._piece.find(b"\n", self._at) + 1
        return self._take(end or len(self._piece))

    def _read_all(self) -> bytes:
        whole = bytearray()
        while self._fill():
            whole += self._take(len(self._piece))
            if len(whole) > settings.DATA_UPLOAD_MAX_MEMORY_SIZE:
                raise RequestDataTooBig("A body is too large to be read at once.")
        return bytes(whole)

    def _fill(self) -> bool:
        """Wait where nothing is left of the last piece; say whether there is something."""
        if self._at >= len(self._piece):
            try:
                self._piece, self._at = async_to_sync(self._next)(), 0
            except BodyBroken as error:
                # What Django expects of a file.
                raise ConnectionError(str(error)) from error
        return bool(self._piece)

    def _take(self, end: int) -> bytes:
        taken = self._piece[self._at : end]
        self._at += len(taken)
        return taken

    def close(self) -> None:
        """Do nothing: the server ends it with the request."""


class StreamingHandler(ASGIHandler):
    """Django's handler, and streamed bodies."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_streamed(scope):
            body = StreamedBody(receive)
            await super().handle({**scope, KEY: body}, body.receive, send)
        else:
            await super().handle(scope, receive, send)

    def create_request(self, scope: Mapping[str, Any], body_file: Any) -> Any:
        """Have the request read the body as it comes."""
        return super().create_request(scope, scope.get(KEY, body_file))


async def body_of(request: HttpRequest) -> AsyncIterator[bytes]:
    """Give a request's raw body in pieces."""
    body = getattr(request, "scope", {}).get(KEY)
    if body is not None:
        async for piece in body.pieces():
            yield piece
        return
    # The server has it whole, in memory or in a temporary file.
    while piece := request.read(READ_BYTES):
        yield piece
