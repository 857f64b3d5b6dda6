"""The host's one door: an SSH server that only the platform may enter.

    web ──SSH──▶ gate ──TCP──▶ a guest's sshd          (direct-tcpip, guests' addresses only)
                   ├──UNIX──▶ <files>/<volume>.sock     (subsystem sftp of a paused volume)
                   └──UNIX──▶ <images>/<export>.sock    (subsystem image of an export)

It runs as root beside the worker, so it does nothing else: no shell, no command, no other
address, no forwarding of sockets, agents, X11 or listeners.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from pathlib import Path
from typing import cast

import asyncssh

log = logging.getLogger(__name__)

USER = "sandkeep"
VOLUME_VARIABLE = "SANDKEEP_VOLUME"
PATIENCE_VARIABLE = "SANDKEEP_PATIENCE_MS"
IMAGE_SUBSYSTEM = "image"
GUEST_SSH_PORT = 22

MAX_PATIENCE_S = 5.0
LOOK_AGAIN_S, LATER_S = 0.002, 0.02
PROMPT_FOR_S = 0.3
"""What waits for a socket looks often while it is likely to come, then less so."""

DIAL_TIMEOUT_S = (
    5.0  # a guest that is up answers at once; one that is not must not hold a channel
)
LOGIN_TIMEOUT_S = 10.0
KEEPALIVE_S = 15
CLOSE_TIMEOUT_S = 5.0

# OpenSSL has AES-GCM in hardware; the chacha of asyncssh's default costs twice the time.
ENCRYPTION_ALGS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "chacha20-poly1305@openssh.com",
)

_MILLISECONDS = re.compile(r"[0-9]{1,6}", re.ASCII)
_VOLUME_HEX = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True)
class GateConfig:
    """What a gate is told; nothing is read from the environment.

    `files_dir` holds the sockets of paused volumes, `images_dir` those of exports, which
    there are none of without it. The gateway is the host itself, so it
    is refused as a target; by default it is the subnet's first address.
    """

    host: str
    port: int
    key_file: Path
    platform_public_key: str
    guest_subnet: IPv4Network
    files_dir: Path
    images_dir: Path | None = None
    guest_port: int = GUEST_SSH_PORT
    gateway: IPv4Address | None = None
    max_connections: int = 64
    max_channels_per_connection: int = 8192


def is_guest(config: GateConfig, host: str, port: int) -> bool:
    """Tell whether this is the SSH port of an address that a guest may have."""
    try:
        address = IPv4Address(host)
    except AddressValueError:
        return False  # a name is never resolved: what it means here is not what it says there

    subnet = config.guest_subnet
    gateway = config.gateway or subnet.network_address + 1
    reserved = (subnet.network_address, subnet.broadcast_address, gateway)
    return port == config.guest_port and address in subnet and address not in reserved


class Gate:
    """A listening gate; `close` ends it and every connection through it."""

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        self.connections: set[asyncssh.SSHServerConnection] = set()
        self.platform_key = asyncssh.import_public_key(config.platform_public_key)
        self._acceptor: asyncssh.SSHAcceptor | None = None

    async def start(self) -> None:
        """Bind and begin to accept."""
        self._acceptor = await asyncssh.listen(
            self.config.host,
            self.config.port,
            server_factory=lambda: _Door(self),
            server_host_keys=[str(self.config.key_file)],
            config=None,
            encoding=None,
            password_auth=False,
            kbdint_auth=False,
            host_based_auth=False,
            gss_host=None,
            x11_forwarding=False,
            agent_forwarding=False,
            line_editor=False,
            compression_algs=None,
            encryption_algs=ENCRYPTION_ALGS,
            login_timeout=LOGIN_TIMEOUT_S,
            keepalive_interval=KEEPALIVE_S,
            keepalive_count_max=3,
            reuse_address=True,
            server_version="Sandkeep",
        )
        log.info("gate listens on %s:%d", self.config.host, self.port)

    @property
    def port(self) -> int:
        """The port in use, also where the configuration asked for any (0)."""
        if self._acceptor is None:
            raise RuntimeError("the gate was not started")
        return self._acceptor.get_port()

    async def close(self) -> None:
        """Stop accepting, then end what is connected; takes at most `CLOSE_TIMEOUT_S`."""
        if self._acceptor is None:
            return
        self._acceptor.close()
        open_now = list(self.connections)
        for connection in open_now:
            connection.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for connection in open_now:
                    await connection.wait_closed()
        except TimeoutError:
            for connection in open_now:
                connection.abort()
        self._acceptor = None


async def serve(config: GateConfig) -> None:
    """Run a gate until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    gate = Gate(config)
    await gate.start()
    await stop.wait()
    log.info("gate closes")
    await gate.close()


class _Door(asyncssh.SSHServer):
    """What one connection may do."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._connection: asyncssh.SSHServerConnection | None = None
        self._channels = 0

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        if len(self._gate.connections) >= self._gate.config.max_connections:
            log.warning("gate is full, a connection is refused")
            conn.abort()
            return
        self._gate.connections.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._gate.connections.discard(self._connection)

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        allowed = username == USER and key == self._gate.platform_key
        if not allowed:
            log.warning("gate refused a key that is not the platform's")
        return allowed

    def session_requested(self) -> asyncssh.SSHServerSession[bytes] | bool:
        if not self._take_channel():
            return False
        config = self._gate.config
        folders = {"sftp": config.files_dir}
        if config.images_dir is not None:
            folders[IMAGE_SUBSYSTEM] = config.images_dir
        return _SocketRelay(folders, self._give_channel_back)

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> bool | asyncssh.SSHTCPSession[bytes]:
        if not is_guest(self._gate.config, dest_host, dest_port):
            log.warning("gate refused a target that is no guest")
            raise asyncssh.ChannelOpenError(
                asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED, "not a guest"
            )
        if not self._take_channel():
            return False
        # asyncssh also takes an awaitable here, which its annotation does not say.
        return cast("asyncssh.SSHTCPSession[bytes]", self._dial(dest_host, dest_port))

    async def _dial(self, host: str, port: int) -> _Relay:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                _, peer = await loop.create_connection(asyncssh.SSHForwarder, host, port)
        except OSError as error:  # which TimeoutError is, too
            self._give_channel_back()
            raise asyncssh.ChannelOpenError(
                asyncssh.OPEN_CONNECT_FAILED, "the guest does not answer"
            ) from error
        return _Relay(self._give_channel_back, peer)

    def _take_channel(self) -> bool:
        if self._channels >= self._gate.config.max_channels_per_connection:
            log.warning("gate refused a channel, the connection has too many")
            return False
        self._channels += 1
        return True

    def _give_channel_back(self) -> None:
        self._channels -= 1


class _Relay(asyncssh.SSHForwarder):
    """The SSH side of a relayed channel; says once when it has closed."""

    def __init__(
        self, on_close: Callable[[], None], peer: asyncssh.SSHForwarder | None = None
    ) -> None:
        super().__init__(peer)
        self._on_close: Callable[[], None] | None = on_close

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._on_close is not None:
            self._on_close()
            self._on_close = None


class _SocketRelay(_Relay, asyncssh.SSHServerSession[bytes]):
    """A session that leads, byte for byte, to a socket in the folder of its subsystem.

    That is SFTP on a paused volume, or an export.
    """

    def __init__(self, folders: Mapping[str, Path], on_close: Callable[[], None]) -> None:
        super().__init__(on_close)
        self._folders = folders
        self._channel: asyncssh.SSHServerChannel[bytes] | None = None
        self._path = Path()
        self._patience_s = 0.0
        self._socket: socket.socket | None = None
        self._joining: asyncio.Task[None] | None = None
        self._early = b""
        self._is_joined = False

    def connection_made(
        self, transport: asyncio.BaseTransport | asyncssh.SSHServerChannel[bytes]
    ) -> None:
        super().connection_made(cast("asyncio.BaseTransport", transport))
        self._channel = cast("asyncssh.SSHServerChannel[bytes]", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._joining is not None:
            self._joining.cancel()
        if self._socket is not None:
            self._socket.close()

    def pty_requested(
        self, term_type: str, term_size: tuple[int, int, int, int], term_modes: object
    ) -> bool:
        return False

    def shell_requested(self) -> bool:
        return False

    def exec_requested(self, command: str) -> bool:
        return False

    def subsystem_requested(self, subsystem: str) -> bool:
        """Accept only what can be relayed now, so that the caller learns it at once.

        One that comes with patience is accepted, and ended if there is nothing to relay to
        by then.
        """
        folder = self._folders.get(subsystem)
        if folder is None or self._channel is None:
            return False
        environment = self._channel.get_environment()
        volume_hex = environment.get(VOLUME_VARIABLE, "")
        if not _VOLUME_HEX.fullmatch(volume_hex):
            return False
        # The name has no more than 32 hexadecimal digits in it, so it cannot leave the folder.
        self._path = folder / f"{volume_hex}.sock"
        self._patience_s = _patience_s(environment.get(PATIENCE_VARIABLE, ""))
        self._socket = _connected(self._path)
        return self._socket is not None or self._patience_s > 0

    def session_started(self) -> None:
        self._joining = asyncio.get_running_loop().create_task(self._join())

    def data_received(self, data: bytes, datatype: int | None = None) -> None:
        if self._is_joined:
            super().data_received(data, datatype)
        else:
            self._early += data

    async def _join(self) -> None:
        # Not in `session_started`: asyncssh resumes reading right after it. What came until
        # now is kept here; what comes until the join waits in the channel's window.
        self.pause_reading()
        try:
            await self._await_socket()
            stream, self._socket = self._socket, None
            if stream is None:
                raise FileNotFoundError(self._path)
            inside = asyncssh.SSHForwarder(self)
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: inside, sock=stream)
        except OSError:
            assert self._channel is not None
            self._channel.close()
            return
        self._is_joined = True
        if self._early:
            inside.write(self._early)
            self._early = b""
        self.resume_reading()

    async def _await_socket(self) -> None:
        """Connect as soon as there is something to connect to, while the patience lasts."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while self._socket is None and (waited_s := loop.time() - began) < self._patience_s:
            await asyncio.sleep(LOOK_AGAIN_S if waited_s < PROMPT_FOR_S else LATER_S)
            if self._path.exists():
                self._socket = _connected(self._path)


def _patience_s(text: str) -> float:
    """Read how long a caller would wait: whole milliseconds; what is no number is 0."""
    return min(int(text) / 1000, MAX_PATIENCE_S) if _MILLISECONDS.fullmatch(text) else 0.0


def _connected(path: Path) -> socket.socket | None:
    """Connect to a UNIX socket without waiting; None where nobody can answer there."""
    with ExitStack() as stack:
        try:
            stream = stack.enter_context(socket.socket(socket.AF_UNIX))
            stream.setblocking(False)
            stream.connect(str(path))
        except OSError:
            return None
        stack.pop_all()
        return stream
