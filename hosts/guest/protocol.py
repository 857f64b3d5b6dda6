"""The frames that the platform and a guest's agent exchange over a stream of bytes.

    ┌──────┬──────────────────┬─────────────────────────────┐
    │ kind │ length, 4 bytes  │ payload, `length` bytes     │
    │ 1 B  │ big-endian       │ at most MAX_PAYLOAD_BYTES   │
    └──────┴──────────────────┴─────────────────────────────┘

The first frame of a client is `JSON` with an `op`, the first of the agent `JSON` with
`ok`. Either side believes nothing of the other: every length is bounded here. A connection
asks one thing; the agent closes it when that is answered.

    context.create   {id, argv, cwd, env, pty, stdin, ttl_s, idle_timeout_s, hidden}
    context.run      the same, and goes on as an attach from the start
    context.attach   {id, from: "start" | "now"}: output frames, then {"event": "exit",
                     "context"}; the client may send INPUT, CLOSE_INPUT, and JSON with op
                     "resize" or "signal". A mistake is {"event": "error", "error"}.
    context.output   {id}: what is retained, then {"event": "end"}
    context.input    {id}, INPUT frames, then CLOSE_INPUT, {"event": "end"} or the end of the
                     stream; answered by {"event": "accepted", "bytes"} or {"event": "error",
                     "error"}
    context.get, .list, .delete, .signal, .resize: one answer
    ping, stats, set_clock, sync, freeze, thaw, prepare_stop, grow: as at the second door

A refusal is {"ok": false, "error": {"code", "message"}}, with one of the codes below.

This file is also part of the agent, which starts under software emulation: it imports
`json` alone, since `enum`, `dataclasses` and `typing` would each cost it a noticeable time.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False  # what `typing.TYPE_CHECKING` is, without importing `typing`
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

JSON = b"J"
STDOUT = b"O"
STDERR = b"E"
PTY = b"P"
INPUT = b"I"
CLOSE_INPUT = b"C"
KINDS = frozenset((JSON, STDOUT, STDERR, PTY, INPUT, CLOSE_INPUT))
OUTPUT_KINDS = frozenset((STDOUT, STDERR, PTY))

HEADER_BYTES = 5
MAX_PAYLOAD_BYTES = 1024 * 1024

AGENT_SOCKET = "/run/sandkeep/agent.sock"
"""Where the agent listens inside the guest."""

CHANNEL_NAME = "org.sandkeep.agent"
"""The virtio-serial port of the second door."""

INVALID_REQUEST = "invalid_request"
CONTEXT_NOT_FOUND = "context_not_found"
PROCESS_FINISHED = "process_finished"
PROCESS_NOT_RUNNING = "process_not_running"
PTY_UNAVAILABLE = "pty_unavailable"
INPUT_BUFFER_FULL = "input_buffer_full"
CREATE_FAILED = "create_failed"


class ProtocolError(Exception):
    """The other side sent what is no frame; the connection is of no more use."""


class Frame:
    """One frame; equal to another of the same kind and payload."""

    __slots__ = ("kind", "payload")

    def __init__(self, kind: bytes, payload: bytes) -> None:
        self.kind = kind
        self.payload = payload

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frame):
            return NotImplemented
        return self.kind == other.kind and self.payload == other.payload

    def __hash__(self) -> int:
        return hash((self.kind, self.payload))

    def __repr__(self) -> str:
        return f"Frame({self.kind!r}, {len(self.payload)} bytes)"

    def document(self) -> dict[str, Any]:
        """The object that a `JSON` frame carries.

        Raises:
            ProtocolError: the frame is of another kind, or carries no JSON object.
        """
        if self.kind != JSON:
            raise ProtocolError(f"expected a JSON frame, not {self.kind!r}")
        return parse_document(self.payload)


def parse_document(payload: bytes) -> dict[str, Any]:
    """Parse a JSON object, as a frame or a line of the second door carries it.

    Raises:
        ProtocolError: it is not UTF-8, not JSON, nested beyond reason, or no object.
    """
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("not valid JSON") from error
    if not isinstance(document, dict):
        raise ProtocolError("not a JSON object")
    return document


def encode(kind: bytes, payload: bytes = b"") -> bytes:
    """Make the bytes of one frame; longer payloads are cut with `encode_stream`."""
    if kind not in KINDS:
        raise ValueError(f"no frame is of kind {kind!r}")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame holds {MAX_PAYLOAD_BYTES} bytes, not {len(payload)}")
    return kind + len(payload).to_bytes(4, "big") + payload


def encode_document(document: dict[str, Any]) -> bytes:
    """Make the bytes of one `JSON` frame."""
    return encode(JSON, json.dumps(document, separators=(",", ":")).encode())


def encode_stream(kind: bytes, data: bytes) -> Iterator[bytes]:
    """Yield the frames that carry `data`, of any length; none for no data."""
    for start in range(0, len(data), MAX_PAYLOAD_BYTES):
        yield encode(kind, data[start : start + MAX_PAYLOAD_BYTES])


def decode_header(header: bytes) -> tuple[bytes, int]:
    """Return the kind and the payload's length from the `HEADER_BYTES` before it.

    Raises:
        ProtocolError: no frame begins like that.
    """
    kind = header[:1]
    length = int.from_bytes(header[1:HEADER_BYTES], "big")
    if kind not in KINDS:
        raise ProtocolError(f"no frame is of kind {kind!r}")
    if length > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is too long")
    return kind, length


class Decoder:
    """Cuts a stream, however it was cut on its way, into the frames that were sent.

    It never holds more than one incomplete frame beyond what it was fed.
    """

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Add what arrived and return the frames that are now whole, in order.

        Raises:
            ProtocolError: what arrived is no frame; the decoder is of no more use.
        """
        self._buffer += data
        frames: list[Frame] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            kind, length = decode_header(bytes(self._buffer[start : start + HEADER_BYTES]))
            end = start + HEADER_BYTES + length
            if end > len(self._buffer):
                break
            frames.append(Frame(kind, bytes(self._buffer[start + HEADER_BYTES : end])))
            start = end
        del self._buffer[:start]
        return frames

    @property
    def pending_bytes(self) -> int:
        """How much of an incomplete frame is held; 0 is a clean place for the stream to end."""
        return len(self._buffer)
