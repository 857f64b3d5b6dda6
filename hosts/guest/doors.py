"""The agent's two doors: its unix socket, and the virtio-serial port of the host.

On the socket, a connection asks one thing and is closed when that is answered; see
`protocol` for its frames. On the port, each line is a request and each gets a line back:

    {"id": "7", "op": "ping"}   →   {"id": "7", "ok": true, "ready": true, …}
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from hosts.guest import protocol
from hosts.guest.contexts import Rejected, signal_number, terminal_size
from hosts.guest.loop import EDGE, HANG_UP, READ, WRITE, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from hosts.guest.contexts import Context, Contexts

    Reply = Callable[[dict[str, Any]], None]
    MachineOps = dict[str, Callable[[dict[str, Any], Reply], None]]

MAX_CONNECTIONS = 2000
GONE_AFTER_S = 60.0
"""A reader that takes not one byte for so long is treated as gone."""

INPUT_STALLED_S = 5.0
"""How long `context.input` waits for a command that has stopped reading."""

_FULL_BYTES = 512 * 1024
_READ_BYTES = 65536
_SEND_BYTES = 256 * 1024
_MAX_LINE_BYTES = 1024 * 1024
_LINGER_S = 10.0
_CHECK_EVERY_S = 5.0
_PAUSE_BETWEEN_TRIES_S = 1.0


class SocketDoor:
    """Accepts connections on a unix socket that only root may open."""

    def __init__(self, loop: Loop, path: str, contexts: Contexts, machine: MachineOps) -> None:
        self.loop = loop
        self.contexts = contexts
        self.machine = machine
        self._connections: set[Connection] = set()
        if os.path.exists(path):  # noqa: PTH110 - pathlib is slow to import
            os.unlink(path)  # noqa: PTH108
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        mask = os.umask(0o177)
        try:
            self._listener.bind(path)
        finally:
            os.umask(mask)
        self._listener.listen(512)
        loop.watch(self._listener.fileno(), READ, self._accept)
        loop.later(_CHECK_EVERY_S, self._check)

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def _accept(self, _events: int) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # it went away again, or there are no descriptors left: it is asked again
        if len(self._connections) >= MAX_CONNECTIONS:
            accepted.close()
            return
        self._connections.add(Connection(self, accepted))

    def _check(self) -> None:
        for connection in list(self._connections):
            connection.close_if_gone()
        self.loop.later(_CHECK_EVERY_S, self._check)


class Connection:
    """One request on the socket, and for a while the reader of a context."""

    def __init__(self, door: SocketDoor, sock: socket.socket) -> None:
        self._door = door
        self._loop = door.loop
        self._socket = sock
        self._fd = sock.fileno()
        self._decoder = protocol.Decoder()
        self._queue = bytearray()
        self._progress_s = time.monotonic()
        self._on_frame: Callable[[protocol.Frame], None] = self._ask
        self._waiting: list[protocol.Frame] = []
        self._context: Context | None = None
        self._accepted_bytes = 0
        self._ends = False
        self._client_done = False
        self._leaving = False
        self._taking = False
        self._open = True
        self._events = READ
        sock.setblocking(False)
        self._loop.watch(self._fd, READ, self._ready)

    # What a context tells its reader.

    def output(self, kind: bytes, data: bytes) -> None:
        self._send(protocol.encode(kind, data))

    def finished(self, context: Context) -> None:
        self._say({"event": "exit", "context": context.describe()})
        self._finish()

    def is_full(self) -> bool:
        return len(self._queue) > _FULL_BYTES

    def input_drained(self) -> None:
        self._take_waiting()

    def close_if_gone(self) -> None:
        """Close it if there is something to send and nobody has taken any for long."""
        if self._queue and time.monotonic() - self._progress_s > GONE_AFTER_S:
            self._close()

    # Receiving.

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ and self._open:
            self._receive()
        if events & HANG_UP and self._open:
            self._close()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._close()
            return
        if self._leaving:
            if not data:
                self._close()
            return
        if not data:
            # No more requests, but the client may still be reading.
            self._client_done = True
            if self._on_frame == self._ask:
                self._close()
            else:
                self._take_waiting()
            return
        try:
            self._waiting += self._decoder.feed(data)
        except protocol.ProtocolError as error:
            self._refuse(Rejected(protocol.INVALID_REQUEST, str(error)))
            self._finish()  # where the next frame begins, nobody knows
            return
        self._take_waiting()

    def _take_waiting(self) -> None:
        """Act on frames in order, leaving those that must wait for room."""
        if self._taking:
            return  # what a frame did made room: the loop below goes on by itself
        self._taking = True
        while self._waiting and self._open and not self._ends:
            frame = self._waiting[0]
            if frame.kind == protocol.INPUT and not self._has_room(frame):
                break
            self._waiting.pop(0)
            try:
                self._on_frame(frame)
            except protocol.ProtocolError as error:
                self._refuse(Rejected(protocol.INVALID_REQUEST, str(error)))
            except Rejected as rejected:
                self._refuse(rejected)
        self._taking = False
        if self._open and not self._ends and self._on_frame == self._write_frame:
            if self._waiting:
                self._wait_for_room()
            elif self._client_done:
                self._accept_input()
        self._update_events()

    def _wait_for_room(self) -> None:
        """Give a command that reads nothing some time, then say so."""
        accepted_bytes = self._accepted_bytes

        def check() -> None:
            if self._open and self._waiting and self._accepted_bytes == accepted_bytes:
                message = "the command does not read its input"
                self._refuse(Rejected(protocol.INPUT_BUFFER_FULL, message))

        self._loop.later(INPUT_STALLED_S, check)

    def _has_room(self, frame: protocol.Frame) -> bool:
        context = self._context
        return (
            context is None
            or not context.running
            or len(frame.payload) <= context.input_room_bytes
        )

    # Requests.

    def _ask(self, frame: protocol.Frame) -> None:
        self._on_frame = self._ignore
        params = frame.document()
        op = params.get("op")
        if not isinstance(op, str):
            raise Rejected(protocol.INVALID_REQUEST, "op is missing")
        own = {
            "context.create": self._create,
            "context.run": self._run,
            "context.attach": self._attach,
            "context.get": self._get,
            "context.list": self._list,
            "context.output": self._output,
            "context.delete": self._delete,
            "context.signal": self._signal,
            "context.resize": self._resize,
            "context.input": self._input,
        }
        if op in own:
            own[op](params)
        elif op in self._door.machine:
            self._door.machine[op](params, self._answer)
        else:
            raise Rejected(protocol.INVALID_REQUEST, "op is not known")

    def _create(self, params: dict[str, Any]) -> None:
        self._answer_context(self._door.contexts.create(params))

    def _run(self, params: dict[str, Any]) -> None:
        self._follow(self._door.contexts.create(params), replay=True)

    def _attach(self, params: dict[str, Any]) -> None:
        if params.get("from", "start") not in ("start", "now"):
            raise Rejected(protocol.INVALID_REQUEST, "from must be 'start' or 'now'")
        context = self._door.contexts.find(params)
        # A context that has ended writes no more: its output is all there is to give.
        replay = params.get("from", "start") == "start" or not context.running
        self._follow(context, replay=replay)

    def _get(self, params: dict[str, Any]) -> None:
        self._answer_context(self._door.contexts.find(params))

    def _list(self, _params: dict[str, Any]) -> None:
        # One frame cannot hold a thousand contexts with long environments.
        contexts = self._door.contexts.listed()
        document = {"ok": True, "contexts": contexts}
        if len(json.dumps(document)) > protocol.MAX_PAYLOAD_BYTES:
            for context in contexts:
                context["env"] = {}
                context["argv"] = [argument[:200] for argument in context["argv"][:3]]
        self._answer(document)

    def _output(self, params: dict[str, Any]) -> None:
        context = self._door.contexts.find(params)
        self._say({"ok": True, "context": context.describe()})
        self._replay(context)
        self._say({"event": "end"})
        self._finish()

    def _delete(self, params: dict[str, Any]) -> None:
        context = self._door.contexts.find(params)
        self._door.contexts.delete(context, lambda: self._answer_context(context))

    def _signal(self, params: dict[str, Any]) -> None:
        context = self._door.contexts.find(params)
        context.send_signal(signal_number(params.get("signal")))
        self._answer_context(context)

    def _resize(self, params: dict[str, Any]) -> None:
        context = self._door.contexts.find(params)
        context.resize(*terminal_size(params))
        self._answer_context(context)

    def _input(self, params: dict[str, Any]) -> None:
        context = self._door.contexts.find(params)
        context.write(b"")  # refuses what has no input
        self._say({"ok": True, "context": context.describe()})
        self._context = context
        context.writers.append(self)
        self._on_frame = self._write_frame

    def _write_frame(self, frame: protocol.Frame) -> None:
        assert self._context is not None
        if frame.kind == protocol.INPUT:
            self._context.write(frame.payload)
            self._accepted_bytes += len(frame.payload)
            return
        if frame.kind == protocol.CLOSE_INPUT:
            self._context.close_input()
        elif frame.document().get("event") != "end":
            raise Rejected(protocol.INVALID_REQUEST, "expected input or its end")
        self._accept_input()

    def _accept_input(self) -> None:
        self._say({"event": "accepted", "bytes": self._accepted_bytes})
        self._finish()

    def _follow(self, context: Context, *, replay: bool) -> None:
        self._say({"ok": True, "context": context.describe()})
        if replay:
            self._replay(context)
        self._context = context
        if context.running:
            context.attach(self)
            self._on_frame = self._attached_frame
        else:
            self.finished(context)

    def _replay(self, context: Context) -> None:
        for kind, data in context.journal.retained():
            for frame in protocol.encode_stream(kind, data):
                self._send(frame)

    def _attached_frame(self, frame: protocol.Frame) -> None:
        """Act on what an attached client sends; what comes too late is no error."""
        assert self._context is not None
        if not self._context.running:
            return
        if frame.kind == protocol.INPUT:
            self._context.write(frame.payload)
        elif frame.kind == protocol.CLOSE_INPUT:
            self._context.close_input()
        else:
            params = frame.document()
            if params.get("op") == "resize":
                self._context.resize(*terminal_size(params))
            elif params.get("op") == "signal":
                self._context.send_signal(signal_number(params.get("signal")))
            else:
                raise Rejected(protocol.INVALID_REQUEST, "op is not known here")

    def _ignore(self, _frame: protocol.Frame) -> None:
        """A client that goes on talking after its question is not listened to."""

    # Answering.

    def _answer_context(self, context: Context) -> None:
        self._answer({"ok": True, "context": context.describe()})

    def _answer(self, document: dict[str, Any]) -> None:
        self._say(document)
        self._finish()

    def _refuse(self, rejected: Rejected) -> None:
        error = {"code": rejected.code, "message": str(rejected)}
        if self._context is None:
            self._answer({"ok": False, "error": error})
        elif self._on_frame == self._write_frame:
            self._say({"event": "error", "error": error})
            self._finish()
        else:
            # An attached client made a mistake: it is told, and goes on reading.
            self._say({"event": "error", "error": error})

    def _say(self, document: dict[str, Any]) -> None:
        self._send(protocol.encode_document(document))

    def _send(self, frame: bytes) -> None:
        if not self._open:
            return
        if not self._queue:
            self._progress_s = time.monotonic()
        self._queue += frame
        self._flush()

    def _flush(self) -> None:
        was_full = self.is_full()
        try:
            while self._queue:
                sent = self._socket.send(self._queue[:_SEND_BYTES])
                self._progress_s = time.monotonic()
                del self._queue[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._close()
            return
        if self._ends and not self._queue:
            self._leave()
            return
        self._update_events()
        if was_full and not self.is_full() and self._context:
            self._context.reader_drained()

    def _finish(self) -> None:
        """Close it once everything has been sent."""
        self._ends = True
        self._flush()

    def _leave(self) -> None:
        """Close it, but not while the client may be sending.

        Closing with something unread would be an error on the client's side, and cost it
        the last frames; so that is read away until the client has seen our end.
        """
        if self._context is None or self._client_done:
            self._close()
        elif not self._leaving:
            self._leaving = True
            self._context.detach(self)
            self._waiting.clear()
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self._close()
                return
            self._events = READ
            self._loop.change(self._fd, READ)
            self._loop.later(_LINGER_S, self._close)

    def _update_events(self) -> None:
        if not self._open or self._leaving:
            return
        reads = not (self._client_done or self._ends or self._waiting)
        events = (READ if reads else 0) | (WRITE if self._queue else 0)
        if events != self._events:
            self._events = events
            self._loop.change(self._fd, events)

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._queue.clear()
        self._loop.forget(self._fd)
        self._socket.close()
        self._door.closed(self)
        if self._context:
            self._context.detach(self)


class PortDoor:
    """Answers lines of JSON on a serial port, whose other end may come and go."""

    def __init__(self, loop: Loop, path: str, machine: MachineOps) -> None:
        self._loop = loop
        self._path = path
        self._machine = machine
        self._received = bytearray()
        self._queue = bytearray()
        self._fd = -1
        self._open_port()

    def _open_port(self) -> None:
        try:
            self._fd = os.open(
                self._path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
        except OSError as error:
            sys.stderr.write(f"sandkeep: cannot open {self._path}: {error.strerror}\n")
            self._loop.later(_PAUSE_BETWEEN_TRIES_S, self._open_port)
            return
        # Edges, since a port without a host is hung up all the time.
        self._loop.watch(self._fd, READ | WRITE | EDGE, self._ready)

    def _ready(self, events: int) -> None:
        if events & HANG_UP:
            self._received.clear()
            self._queue.clear()
        if events & READ:
            self._receive()
        self._flush()

    def _receive(self) -> None:
        while True:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except OSError:
                return
            if not data:
                return
            self._received += data
            while b"\n" in self._received:
                line, _, rest = bytes(self._received).partition(b"\n")
                self._received[:] = rest
                if line.strip():
                    self._act(line)
            if len(self._received) > _MAX_LINE_BYTES:
                self._received.clear()

    def _act(self, line: bytes) -> None:
        try:
            params = protocol.parse_document(line)
        except protocol.ProtocolError:
            return  # half a line of an earlier connection; nobody waits for its answer
        request_id = params.get("id")

        def reply(document: dict[str, Any]) -> None:
            document = {"id": request_id, **document}
            self._queue.extend(json.dumps(document, separators=(",", ":")).encode() + b"\n")
            self._flush()

        act = self._machine.get(str(params.get("op")), _refuse_op)
        try:
            act(params, reply)
        except Rejected as rejected:
            error = {"code": rejected.code, "message": str(rejected)}
            reply({"ok": False, "error": error})

    def _flush(self) -> None:
        try:
            while self._queue:
                written = os.write(self._fd, self._queue[:4096])
                del self._queue[:written]
        except BlockingIOError:
            if len(self._queue) > _MAX_LINE_BYTES:
                self._queue.clear()  # nobody is there to read it
        except OSError:
            self._queue.clear()


def _refuse_op(_params: dict[str, Any], _reply: Reply) -> None:
    raise Rejected(protocol.INVALID_REQUEST, "op is not known")
