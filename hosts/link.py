"""How the web process reaches guests: SSH through a host's gate, kept open and shared.

    a connection to each gate ─┬─ through it, a connection to each guest ─┬─ a channel a call
                               │                                          ├─ a channel a stream
                               │                                          └─ one SFTP session
                               └─ one SFTP session for each paused volume

Everything here lives on one event loop and holds no thread while it waits. Both host keys,
the gate's and the guest's, are pinned. Each wait is bounded, but for `AgentStream.recv`:
a command may be silent for as long as it likes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

import asyncssh
from asyncssh.sftp import MIN_SFTP_VERSION, start_sftp_client

from common.errors import Unavailable
from common.units import KiB
from hosts.gate import (
    ENCRYPTION_ALGS,
    IMAGE_SUBSYSTEM,
    KEEPALIVE_S,
    PATIENCE_VARIABLE,
    USER,
    VOLUME_VARIABLE,
)
from hosts.guest import protocol
from hosts.guest.protocol import Frame, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

GUEST_USER = "root"

GATE_TIMEOUT_S = 10.0
# A handshake takes 0.7 s under software emulation, and more on a host that boots others.
GUEST_TIMEOUT_S = 30.0
OPEN_TIMEOUT_S = 15.0
CALL_TIMEOUT_S = 30.0
# For how long a process may leave its full input unread before the sender gives up on it.
SEND_TIMEOUT_S = 60.0

# What one stream may buffer for a slow reader; the guest waits beyond it.
STREAM_WINDOW_BYTES = 512 * KiB
READ_BYTES = 64 * KiB

K = TypeVar("K", bound=Hashable)


class LinkDown(Unavailable):
    """The guest, or the gate before it, cannot be reached; the outcome is unknown."""

    code = "link_down"


class AgentError(Exception):
    """The agent understood the request and refused it; `code` is one of the protocol's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class GateEndpoint:
    """Where a host's gate listens, and the key it must show (OpenSSH text)."""

    host: str
    port: int
    public_key: str


@dataclass(frozen=True)
class GuestEndpoint:
    """One run of one sandbox.

    `key` names it, such as "<sandbox id>:<generation>": a new run has another key, so
    that it never inherits the connection of the one before.
    """

    gate: GateEndpoint
    address: str
    host_public_key: str
    key: str


class Links:
    """The connections of one event loop, opened on demand and shared by all its callers."""

    def __init__(
        self,
        client_key: asyncssh.SSHKey,
        *,
        guest_user: str = GUEST_USER,
        guest_port: int = 22,
        agent_socket: str = protocol.AGENT_SOCKET,
        max_guests: int = 2000,
    ) -> None:
        self.agent_socket = agent_socket
        self._client_key = client_key
        self._guest_user = guest_user
        self._guest_port = guest_port
        self._gates: _Pool[GateEndpoint, _Connection] = _Pool(limit=max_guests)
        self._guests: _Pool[str, _Connection] = _Pool(limit=max_guests)
        self._files: _Pool[tuple[GateEndpoint, UUID], _Sftp] = _Pool(limit=max_guests)

    async def guest(self, endpoint: GuestEndpoint) -> GuestLink:
        """Return the link to a guest, connected.

        Raises:
            LinkDown: the gate or the guest cannot be reached, or shows another key.
        """
        await self.connection(endpoint)
        return GuestLink(self, endpoint)

    async def paused_sftp(
        self, gate: GateEndpoint, volume_id: UUID, *, patience_s: float = 0.0
    ) -> asyncssh.SFTPClient:
        """Return the SFTP session on a paused volume, which its host must have opened.

        With patience the gate waits for that: then it is there as soon as it can be.

        It is shared by all callers, so none of them may `exit` it. Its requests raise
        `asyncssh.SFTPConnectionLost` or `SFTPNoConnection` once the host has closed the
        volume; the next call here then opens another.

        Raises:
            LinkDown: the gate cannot be reached, or the volume is not open there.
        """

        async def open_session() -> _Sftp:
            connection = await self._gate(gate)
            variables = {VOLUME_VARIABLE: volume_id.hex}
            if patience_s > 0:
                variables[PATIENCE_VARIABLE] = str(round(patience_s * 1000))
            return await _open_sftp(connection, variables)

        return (await self._files.get((gate, volume_id), open_session)).client

    async def image(
        self, gate: GateEndpoint, export_id: UUID
    ) -> tuple[asyncssh.SSHReader[bytes], asyncssh.SSHWriter[bytes]]:
        """Open the stream of an export, which its host must have started. Close the writer.

        Raises:
            LinkDown: the gate cannot be reached, or there is no such export (yet).
        """
        connection = await self._gate(gate)
        with _translated("the image cannot be reached"):
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                writer, reader, _ = await connection.ssh.open_session(
                    subsystem=IMAGE_SUBSYSTEM,
                    env={VOLUME_VARIABLE: export_id.hex},
                    encoding=None,
                    window=STREAM_WINDOW_BYTES,
                )
        return reader, writer

    async def connection(self, endpoint: GuestEndpoint) -> _Connection:
        """Return a live connection to the guest's sshd, made once however many ask."""
        found = self._guests.peek(endpoint.key)
        if found is not None and found.endpoint != endpoint:
            self._guests.discard(endpoint.key)

        async def connect() -> _Connection:
            gate = await self._gate(endpoint.gate)
            return await self._connect_guest(endpoint, gate)

        return await self._guests.get(endpoint.key, connect)

    def close_endpoint(self, key: str) -> None:
        """End the connection to a guest, and with it all its calls and streams."""
        self._guests.discard(key)

    async def close(self) -> None:
        """End everything."""
        self._files.clear()
        self._guests.clear()
        self._gates.clear()
        await asyncio.sleep(0)  # lets the transports send their farewell

    async def _gate(self, endpoint: GateEndpoint) -> _Connection:
        async def connect() -> _Connection:
            with _translated("the gate cannot be reached"):
                async with asyncio.timeout(GATE_TIMEOUT_S):
                    connection = await asyncssh.connect(
                        endpoint.host,
                        endpoint.port,
                        username=USER,
                        known_hosts=_pinned(endpoint.public_key),
                        encryption_algs=ENCRYPTION_ALGS,
                        **self._options(),
                    )
            return _Connection(connection, endpoint)

        return await self._gates.get(endpoint, connect)

    async def _connect_guest(self, endpoint: GuestEndpoint, gate: _Connection) -> _Connection:
        with _translated("the guest cannot be reached"):
            async with asyncio.timeout(GUEST_TIMEOUT_S):
                connection = await asyncssh.connect(
                    endpoint.address,
                    self._guest_port,
                    tunnel=gate.ssh,
                    username=self._guest_user,
                    known_hosts=_pinned(endpoint.host_public_key),
                    **self._options(),
                )
        return _Connection(connection, endpoint)

    def _options(self) -> dict[str, Any]:
        return {
            "client_keys": [self._client_key],
            "config": None,  # never what happens to be in the user's ~/.ssh
            "agent_path": None,
            "gss_host": None,
            "password_auth": False,
            "kbdint_auth": False,
            "preferred_auth": ("publickey",),
            "compression_algs": None,
            "keepalive_interval": KEEPALIVE_S,
            "keepalive_count_max": 3,
        }


class GuestLink:
    """What can be asked of one running guest. Cheap; reconnects by itself when needed."""

    def __init__(self, links: Links, endpoint: GuestEndpoint) -> None:
        self.endpoint = endpoint
        self._links = links

    async def call(
        self, op: str, *, timeout_s: float = CALL_TIMEOUT_S, **params: object
    ) -> dict[str, Any]:
        """Ask the agent one thing and return its answer.

        Raises:
            AgentError: the agent refused.
            LinkDown: there was no answer in time; it may have been carried out.
        """
        try:
            async with asyncio.timeout(timeout_s):
                stream = await self.stream(op, **params)
        except TimeoutError as error:
            raise LinkDown("The guest's agent does not answer.") from error
        stream.abandon()
        return stream.opening

    async def stream(self, op: str, **params: object) -> AgentStream:
        """Ask the agent for something that goes on; its first answer is `opening`.

        Raises:
            AgentError: the agent refused.
            LinkDown: there was no answer in time; it may have been carried out.
        """
        # Made before the wait for a channel, so that the request leaves right behind it.
        request = protocol.encode_document({"op": op, **params})
        connection, reader, writer = await self._open_channel()
        stream = AgentStream(connection, reader, writer)
        try:
            with _translated("the guest's agent does not answer"):
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    writer.write(request)
                    await stream.read_opening()
        except BaseException:
            stream.abandon()
            raise
        return stream

    async def sftp(self) -> asyncssh.SFTPClient:
        """Return the SFTP session on the guest's files, shared: no caller may `exit` it.

        Its requests raise `asyncssh.SFTPConnectionLost` or `SFTPNoConnection` when the
        guest goes away.

        Raises:
            LinkDown: the guest cannot be reached.
        """
        connection = await self._links.connection(self.endpoint)

        async def open_session() -> _Sftp:
            return await _open_sftp(connection, {})

        return (await connection.sftp.get("", open_session)).client

    async def _open_channel(
        self,
    ) -> tuple[_Connection, asyncssh.SSHReader[bytes], asyncssh.SSHWriter[bytes]]:
        connection = await self._links.connection(self.endpoint)
        try:
            return connection, *await _open_agent(connection, self._links.agent_socket)
        except LinkDown:
            if connection.is_live:
                raise
        # It was dead already and nobody had noticed. Nothing was asked yet, so ask anew.
        connection = await self._links.connection(self.endpoint)
        return connection, *await _open_agent(connection, self._links.agent_socket)


class AgentStream:
    """A conversation with the agent. Close it, or use it in `async with`."""

    def __init__(
        self,
        connection: _Connection,
        reader: asyncssh.SSHReader[bytes],
        writer: asyncssh.SSHWriter[bytes],
    ) -> None:
        self.opening: dict[str, Any] = {}
        self._connection = connection
        self._reader = reader
        self._writer = writer
        self._decoder = protocol.Decoder()
        self._frames: list[Frame] = []  # in reverse: the next one is last
        connection.in_use += 1
        self._is_open = True

    async def __aenter__(self) -> AgentStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abandon()

    async def recv(self) -> Frame | None:
        """Return the next frame, or None once the agent has said all.

        It waits without limit. An agent that ends early, without its closing event, also
        gives None: only the event says that the context is over.

        Raises:
            LinkDown: the connection broke, or what came over it was no frame.
        """
        while not self._frames:
            with _translated("the connection to the guest broke"):
                piece = await self._reader.read(READ_BYTES)
                if piece:
                    self._frames = self._decoder.feed(piece)[::-1]
            if not piece:
                self._check_clean_end()
                return None
        return self._frames.pop()

    async def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a frame, or several when the payload is long; waits while the guest is full.

        Raises:
            LinkDown: the connection broke, or nobody read for `SEND_TIMEOUT_S`.
        """
        frames = protocol.encode_stream(kind, payload) if payload else (protocol.encode(kind),)
        for frame in frames:
            with _translated("the guest takes no more input"):
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    self._writer.write(frame)
                    await self._writer.drain()

    async def close(self) -> None:
        """End the conversation; the context in the guest goes on."""
        self.abandon()

    def abandon(self) -> None:
        """Do what `close` does, where nothing can be awaited."""
        if self._is_open:
            self._is_open = False
            self._connection.in_use -= 1
            self._writer.close()

    async def read_opening(self) -> None:
        """Read the agent's first answer."""
        frame = await self.recv()
        if frame is None:
            raise LinkDown("The guest's agent hung up.")
        answer = frame.document()
        if answer.get("ok") is not True:
            raise _agent_error(answer)
        self.opening = answer

    def _check_clean_end(self) -> None:
        if not self._connection.is_live:
            raise LinkDown("The connection to the guest broke.")
        if self._decoder.pending_bytes:
            raise LinkDown("The guest's agent stopped in the middle of a frame.")


class _Connection:
    """An SSH connection, of a gate or a guest."""

    def __init__(
        self, ssh: asyncssh.SSHClientConnection, endpoint: GateEndpoint | GuestEndpoint
    ) -> None:
        self.ssh = ssh
        self.endpoint = endpoint
        self.in_use = 0
        self.sftp: _Pool[str, _Sftp] = _Pool(limit=1)

    @property
    def is_live(self) -> bool:
        return not self.ssh.is_closed()

    def end(self) -> None:
        self.ssh.abort()


class _Sftp:
    """An SFTP session that knows when it has ended."""

    def __init__(self, client: asyncssh.SFTPClient) -> None:
        self.client = client
        self.in_use = 0
        self._closed = asyncio.get_running_loop().create_task(client.wait_closed())

    @property
    def is_live(self) -> bool:
        return not self._closed.done()

    def end(self) -> None:
        self.client.exit()


P = TypeVar("P", _Connection, _Sftp)


class _Pool(Generic[K, P]):
    """Live things by key, least recently used first; each is made once at a time."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._tasks: OrderedDict[K, asyncio.Task[P]] = OrderedDict()

    async def get(self, key: K, make: Callable[[], Coroutine[Any, Any, P]]) -> P:
        """Return the live one, or wait for the one being made, or make one."""
        task = self._tasks.get(key)
        if task is None or _is_spent(task):
            task = asyncio.get_running_loop().create_task(make())
            task.add_done_callback(lambda done: self._forget_failed(key, done))
            self._tasks[key] = task
            self._evict()
        self._tasks.move_to_end(key)
        # Shielded: the caller who began it may go away while others wait for the same.
        return await asyncio.shield(task)

    def peek(self, key: K) -> P | None:
        """Return what is there and made."""
        task = self._tasks.get(key)
        return _made(task) if task is not None else None

    def discard(self, key: K) -> None:
        """End it, or its making."""
        task = self._tasks.pop(key, None)
        if task is not None:
            _end(task)

    def clear(self) -> None:
        for key in list(self._tasks):
            self.discard(key)

    def _forget_failed(self, key: K, task: asyncio.Task[P]) -> None:
        if (task.cancelled() or task.exception()) and self._tasks.get(key) is task:
            del self._tasks[key]

    def _evict(self) -> None:
        """Keep to the limit; what is dead goes first, and what is in use never."""
        if len(self._tasks) <= self._limit:
            return
        for key in [key for key, task in self._tasks.items() if _is_spent(task)]:
            del self._tasks[key]
        idle = [
            key
            for key, task in self._tasks.items()
            if (made := _made(task)) is not None and not made.in_use
        ]
        for key in idle[: max(0, len(self._tasks) - self._limit)]:
            self.discard(key)


def _made(task: asyncio.Task[P]) -> P | None:
    if not task.done() or task.cancelled() or task.exception():
        return None
    return task.result()


def _is_spent(task: asyncio.Task[P]) -> bool:
    if not task.done():
        return False
    made = _made(task)
    return made is None or not made.is_live


def _end(task: asyncio.Task[P]) -> None:
    made = _made(task)
    if made is None:
        task.cancel()
    else:
        made.end()


async def _open_agent(
    connection: _Connection, path: str
) -> tuple[asyncssh.SSHReader[bytes], asyncssh.SSHWriter[bytes]]:
    with _translated("the guest's agent cannot be reached"):
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            return await connection.ssh.open_unix_connection(path, window=STREAM_WINDOW_BYTES)


async def _open_sftp(connection: _Connection, variables: dict[str, str]) -> _Sftp:
    with _translated("its files cannot be reached"):
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            writer, reader, _ = await connection.ssh.open_session(
                subsystem="sftp", env=variables, encoding=None
            )
            # Names are any bytes: a caller gives and gets `bytes`, or `str` as os.fsdecode
            # makes it.
            try:
                client = await start_sftp_client(
                    connection.ssh,
                    asyncio.get_running_loop(),
                    "strict",
                    reader,
                    writer,
                    "utf-8",
                    "surrogateescape",
                    MIN_SFTP_VERSION,
                )
            except BaseException:
                writer.close()  # it would stay, and be one of the few that a server takes
                raise
    return _Sftp(client)


def _pinned(public_key: str) -> tuple[list[asyncssh.SSHKey], list[Any], list[Any]]:
    return [asyncssh.import_public_key(public_key)], [], []


def _agent_error(answer: dict[str, Any]) -> Exception:
    error = answer.get("error")
    if not isinstance(error, dict):
        return LinkDown("The guest's agent gave no proper answer.")
    return AgentError(str(error.get("code", ""))[:100], str(error.get("message", ""))[:2000])


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn what the network and the guest can do to us into `LinkDown`."""
    try:
        yield
    except asyncssh.HostKeyNotVerifiable as error:
        log.warning("refused a host key that is not the pinned one: %s", what)
        raise LinkDown(f"Refused: {what}, its key is another.") from error
    except (OSError, EOFError, asyncssh.Error, ProtocolError) as error:
        raise LinkDown(f"{what[0].upper()}{what[1:]}.") from error
