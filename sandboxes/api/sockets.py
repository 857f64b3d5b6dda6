"""`…/contexts/<ctx>/ws`: follow a context, and write to it, over a WebSocket.

Frames are JSON text, both ways:

    client → {"type": "input", "data": …, "request_id"?: …, "eof"?: true}
             {"type": "resize", "rows": …, "cols": …}   {"type": "signal", "signal": …}
    server → {"type": "output", "source": "stdout" | "stderr" | "pty", "data": …}
             {"type": "done", "request_id": …}                       for one input
             {"type": "error", "error": …}                           for a frame it refused
             {"type": "done", "exit_code": …, "state": …}            then a normal close

What is retained comes first, then what is written from now on; a context that has ended
sends what is retained, and its end. The socket closes within `CHECK_KEY_S` of the moment
when its key is no longer good.
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from django.utils import timezone

from accounts.api.authentication import KeyHolder
from accounts.models import ApiKey, Team
from common.api.database import run_db
from common.api.sockets import Receive, Scope, Send, refuse_with
from common.errors import DomainError
from hosts.guest import protocol
from hosts.guest.protocol import Frame, ProtocolError
from hosts.link import AgentError, AgentStream, LinkDown
from sandboxes import access, contexts
from sandboxes.errors import ContextNotFound

log = logging.getLogger(__name__)

PERMISSION = "sandbox:write"

# The SDK closes the connection at a message over 1 MiB; a control character takes six bytes
# in JSON.
MAX_TEXT_CHARS = 128 * 1024
MAX_FRAME_CHARS = 2 * 1024 * 1024
MAX_INPUT_BYTES = 1024 * 1024
MAX_REQUEST_ID_CHARS = 200

CHECK_KEY_S = 2.0

NORMAL = 1000
POLICY_VIOLATION = 1008
INTERNAL_ERROR = 1011
TRY_AGAIN_LATER = 1013

SOURCES = {protocol.STDOUT: "stdout", protocol.STDERR: "stderr", protocol.PTY: "pty"}


class BadFrame(Exception):
    """A client's frame that means nothing; the message says why."""


async def context_socket(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one WebSocket, an ASGI application; `scope["user"]` is a KeyHolder."""
    ids = scope["url_route"]["kwargs"]
    holder: KeyHolder = scope["user"]
    await receive()  # websocket.connect
    if not holder.may(PERMISSION):
        message = f"This needs a key with the permission {PERMISSION}."
        await refuse_with(scope, send, 403, "forbidden", message)
        return
    try:
        stream = await _attach(ids["sandbox_id"], holder.team, ids["context_id"])
    except DomainError as error:
        await refuse_with(scope, send, error.status, error.code, str(error))
        return
    async with stream:
        await send({"type": "websocket.accept"})
        await _Conversation(stream, holder.key, receive, send).run()


async def _attach(sandbox_id: str, team: Team, context_id: str) -> AgentStream:
    link = await access.guest_of(sandbox_id, team)
    if contexts.CONTEXT_ID.fullmatch(context_id) is None:
        raise ContextNotFound("No such context.")
    try:
        return await link.stream("context.attach", id=context_id, **{"from": "start"})
    except AgentError as error:
        raise contexts.refusal_of(error) from error


class _Conversation:
    """One accepted socket: output one way, input the other, until either side ends it."""

    def __init__(
        self,
        stream: AgentStream,
        key: ApiKey,
        receive: Receive,
        send: Send,
    ) -> None:
        self._stream = stream
        self._key = key
        self._receive = receive
        self._send = send
        self._decoders = {kind: contexts.TextDecoder() for kind in SOURCES}

    async def run(self) -> None:
        """Return once the socket is closed; the context goes on if it has not ended."""
        parts = [
            asyncio.ensure_future(part)
            for part in (self._send_output(), self._take_input(), self._watch_key())
        ]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            code = next(part.result() for part in parts if part.done())
        except LinkDown:
            code = TRY_AGAIN_LATER
        except (ProtocolError, AgentError) as error:
            log.warning("a guest's agent broke the protocol: %s", error)
            code = INTERNAL_ERROR
        finally:
            await _cancel(parts)
        if code is not None:
            await self._send({"type": "websocket.close", "code": code})

    async def _send_output(self) -> int:
        while (frame := await self._stream.recv()) is not None:
            if frame.kind in SOURCES:
                await self._send_text(
                    frame.kind, self._decoders[frame.kind].feed(frame.payload)
                )
            elif frame.kind == protocol.JSON and await self._act_on(frame):
                return NORMAL
        raise LinkDown("The guest's agent hung up.")

    async def _act_on(self, frame: Frame) -> bool:
        """Pass an event of the agent on; True when it was the last."""
        event = frame.document()
        if event.get("event") == "error":
            error = contexts.error_in(event)
            await self._say({"type": "error", "error": error.message, "code": error.code})
        if event.get("event") != "exit":
            return False
        for kind, decoder in self._decoders.items():
            await self._send_text(kind, decoder.end())
        body = contexts.body_of(event.get("context") or {})
        done: dict[str, Any] = {"type": "done", "state": body["state"]}
        for name in ("exit_code", "timed_out", "reason"):
            if name in body:
                done[name] = body[name]
        # What the context wrote before we came, and was no longer kept.
        opening = self._stream.opening.get("context")
        dropped_bytes = opening.get("dropped_bytes") if isinstance(opening, dict) else 0
        if isinstance(dropped_bytes, int) and dropped_bytes > 0:
            done |= {"truncated": True, "dropped_bytes": dropped_bytes}
        await self._say(done)
        return True

    async def _send_text(self, kind: bytes, text: str) -> None:
        for start in range(0, len(text), MAX_TEXT_CHARS):
            piece = text[start : start + MAX_TEXT_CHARS]
            await self._say({"type": "output", "source": SOURCES[kind], "data": piece})

    async def _take_input(self) -> int | None:
        while True:
            message: Any = await self._receive()
            if message["type"] == "websocket.disconnect":
                return None
            try:
                await self._obey(_parsed(message))
            except BadFrame as error:
                await self._say({"type": "error", "error": str(error)})

    async def _obey(self, frame: Mapping[str, Any]) -> None:
        match frame.get("type"):
            case "input":
                await self._write(frame)
            case "resize":
                size = {name: frame.get(name) for name in ("rows", "cols")}
                await self._tell({"op": "resize", **size})
            case "signal":
                await self._tell({"op": "signal", "signal": _signal_in(frame)})
            case _:
                raise BadFrame("type must be input, resize or signal.")

    async def _write(self, frame: Mapping[str, Any]) -> None:
        data = frame.get("data", "")
        if not isinstance(data, str):
            raise BadFrame("data must be text.")
        encoded = data.encode("utf-8", "replace")
        if len(encoded) > MAX_INPUT_BYTES:
            raise BadFrame(f"data holds at most {MAX_INPUT_BYTES} bytes.")
        if encoded:
            await self._stream.send(protocol.INPUT, encoded)
        if frame.get("eof") is True:
            await self._stream.send(protocol.CLOSE_INPUT)
        request_id = frame.get("request_id")
        if isinstance(request_id, str) and request_id:
            await self._say({"type": "done", "request_id": request_id[:MAX_REQUEST_ID_CHARS]})

    async def _tell(self, document: dict[str, Any]) -> None:
        await self._stream.send(protocol.JSON, json.dumps(document).encode())

    async def _watch_key(self) -> int:
        while True:
            await asyncio.sleep(CHECK_KEY_S)
            if not await run_db(_is_still_good, self._key):
                return POLICY_VIOLATION

    async def _say(self, document: dict[str, Any]) -> None:
        text = json.dumps(document, ensure_ascii=False)
        await self._send({"type": "websocket.send", "text": text})


def _parsed(message: Mapping[str, Any]) -> Mapping[str, Any]:
    text = message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace")
    if len(text) > MAX_FRAME_CHARS:
        raise BadFrame("The frame is too long.")
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame("Not valid JSON.") from error
    if not isinstance(frame, dict):
        raise BadFrame("Not a JSON object.")
    return frame


def _signal_in(frame: Mapping[str, Any]) -> str:
    try:
        return contexts.parse_signal(str(frame.get("signal", ""))[:20])
    except ValueError as error:
        raise BadFrame(f"signal: {error}") from error


def _is_still_good(key: ApiKey) -> bool:
    return ApiKey.objects.usable(timezone.now()).filter(pk=key.pk).exists()


async def _cancel(parts: Iterable[asyncio.Future[Any]]) -> None:
    for part in parts:
        part.cancel()
    await asyncio.gather(*parts, return_exceptions=True)
