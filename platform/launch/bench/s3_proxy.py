"""A proxy before an object store that delays, drops, cuts short, repeats and reorders.

Each request draws what is done to it from a seeded source:

    delay      it waits, while others overtake it
    refuse     the connection is closed before the store hears of it
    cut        half of its body reaches the store, then both connections end
    forget     it is carried out, and the connection is closed instead of an answer
    short      the answer ends before its stated length
    twice      it is carried out twice; the answer is that of the second time
    late       it is answered, and carried out once more some seconds later
    error      it is answered with 500 and not carried out

What passes through is not changed, so signatures stay good.
"""

import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import cast
from urllib.parse import urlsplit

from hosts.volumes.objects import StoreConfig

FAULTS = ("delay", "refuse", "cut", "forget", "short", "twice", "late", "error")
UPSTREAM_TIMEOUT_S = 60
LONGEST_DELAY_S = 0.5
LATE_S = 2.0
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "expect", "content-length"}


@dataclass
class Faults:
    """What is done, how often, and what was done. May be changed while the proxy runs."""

    seed: int = 0
    share: float = 0.1
    """Of the requests, how many meet a fault."""
    kinds: tuple[str, ...] = FAULTS
    is_gone: bool = False
    """Refuse every request."""
    delay_s: float = 0.0
    """Added to every request."""
    done: Counter[str] = field(default_factory=Counter)
    """How many requests there were, in all and of each method, and of each fault."""

    @property
    def count(self) -> int:
        """How many requests met a fault."""
        return sum(self.done[kind] for kind in FAULTS)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)  # noqa: S311 - it must give the same again
        self._lock = threading.Lock()

    def draw(self, method: str) -> tuple[str, float]:
        """Choose what is done to the next request, and a number between 0 and 1 for it."""
        with self._lock:
            self.done["requests"] += 1
            self.done[method] += 1
            fault = "refuse" if self.is_gone else ""
            if not fault and self._random.random() < self.share:
                fault = self._random.choice(self.kinds)
            if fault:
                self.done[fault] += 1
            return fault, self._random.random()


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, upstream: str, faults: Faults) -> None:
        self.upstream = upstream
        self.faults = faults
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients hang up when they are killed, which is what is tried."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Say nothing."""

    def _handle(self) -> None:
        server = cast(_Server, self.server)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            return
        request = _Request(self.command, self.path, tuple(self.headers.items()), body)
        fault, amount = server.faults.draw(self.command)
        time.sleep(server.faults.delay_s)
        answer = self._carry_out(server, request, fault, amount)
        if answer is None:
            self._hang_up()
        else:
            self._say(answer, is_short=fault == "short")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815 - http.server's names

    def _carry_out(
        self, server: _Server, request: _Request, fault: str, amount: float
    ) -> _Answer | None:
        if fault == "delay":
            time.sleep(LONGEST_DELAY_S * amount)
        elif fault == "error":
            return _Answer(HTTPStatus.INTERNAL_SERVER_ERROR, (), b"")
        elif fault == "refuse":
            return None
        elif fault == "cut":
            _send_part(server.upstream, request, amount)
            return None
        elif fault == "twice":
            _ask(server.upstream, request)
        elif fault == "late":
            timer = threading.Timer(LATE_S * amount, _ask, [server.upstream, request])
            timer.daemon = True
            timer.start()
        answer = _ask(server.upstream, request)
        return None if fault == "forget" else answer

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _say(self, answer: _Answer, *, is_short: bool) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        length = _stated_length(answer) if self.command == "HEAD" else len(answer.body)
        if answer.status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: len(answer.body) // 2 if is_short else None])
        if is_short:
            self.wfile.flush()
            self._hang_up()


def _stated_length(answer: _Answer) -> int:
    return next((int(v) for name, v in answer.headers if name.lower() == "content-length"), 0)


def _ask(upstream: str, request: _Request) -> _Answer | None:
    """Carry a request out; None when the store gave no answer."""
    connection = http.client.HTTPConnection(upstream, timeout=UPSTREAM_TIMEOUT_S)
    try:
        _send_head(connection, request)
        connection.send(request.body)
        response = connection.getresponse()
        body = response.read()
        return _Answer(response.status, tuple(response.getheaders()), body)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _send_part(upstream: str, request: _Request, amount: float) -> None:
    connection = http.client.HTTPConnection(upstream, timeout=UPSTREAM_TIMEOUT_S)
    with suppress(OSError):
        _send_head(connection, request)
        connection.send(request.body[: int(len(request.body) * amount)])
    connection.close()


def _send_head(connection: http.client.HTTPConnection, request: _Request) -> None:
    connection.putrequest(
        request.method, request.path, skip_host=True, skip_accept_encoding=True
    )
    for name, value in request.headers:
        if name.lower() not in _HOP_BY_HOP:
            connection.putheader(name, value)
    connection.putheader("Content-Length", str(len(request.body)))
    connection.endheaders()


@contextmanager
def faulty(store: StoreConfig, faults: Faults, *, port: int = 0) -> Iterator[StoreConfig]:
    """Run a proxy before a store; give the configuration that leads through it."""
    server = _Server(port, urlsplit(store.endpoint_url).netloc, faults)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield replace(store, endpoint_url=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
