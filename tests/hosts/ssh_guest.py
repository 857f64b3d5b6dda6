"""A stand-in for a guest on the loopback: a real SSH server, and an agent behind its socket."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Any

import asyncssh

from hosts.gate import Gate, GateConfig
from hosts.guest import protocol
from hosts.link import GateEndpoint, GuestEndpoint, Links

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# The gate refuses its own address, 127.0.0.1, as it would refuse the gateway's.
GUEST_ADDRESS = "127.0.0.2"
SUBNET = IPv4Network("127.0.0.0/8")


def new_key() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


def public_text(key: asyncssh.SSHKey) -> str:
    return key.export_public_key().decode()


class GuestSshd(asyncssh.SSHServer):
    """Takes the platform's key and forwards to the agent's socket, as a guest's sshd."""

    def __init__(self, platform_key: asyncssh.SSHKey, socket: Path) -> None:
        self._platform_key = platform_key
        self._socket = socket

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username == "root" and public_text(key) == public_text(self._platform_key)

    def public_key_auth_supported(self) -> bool:
        return True

    def unix_connection_requested(self, dest_path: str) -> bool:
        return dest_path == str(self._socket)


class ScriptedAgent:
    """Answers a few operations in the agent's protocol."""

    def __init__(self) -> None:
        self.connections = 0
        self.received_bytes = 0
        self.poured_bytes = 0
        self.unblocked = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._answer(await self._frame(reader), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def _frame(self, reader: asyncio.StreamReader) -> protocol.Frame:
        kind, length = protocol.decode_header(await reader.readexactly(protocol.HEADER_BYTES))
        return protocol.Frame(kind, await reader.readexactly(length))

    async def _answer(
        self,
        frame: protocol.Frame,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        request = frame.document()
        op = request["op"]
        if op == "refuse":
            error = {"code": protocol.CONTEXT_NOT_FOUND, "message": "no such context"}
            writer.write(protocol.encode_document({"ok": False, "error": error}))
            return
        if op == "garbage":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            return
        if op == "silence":
            await reader.read()
            return
        writer.write(protocol.encode_document({"ok": True, "echo": request}))
        if op == "pour":
            await self._pour(request["size_bytes"], writer)
        if op == "drink":
            await self.unblocked.wait()
            await self._drink(reader, writer)
        if op == "hold":
            await reader.read()

    async def _pour(self, size_bytes: int, writer: asyncio.StreamWriter) -> None:
        for start in range(0, size_bytes, 65536):
            piece = bytes([start // 65536 % 256]) * min(65536, size_bytes - start)
            writer.write(protocol.encode(protocol.STDOUT, piece))
            await writer.drain()
            self.poured_bytes += len(piece)
        writer.write(protocol.encode_document({"event": "exit", "context": {}}))

    async def _drink(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (frame := await self._frame(reader)).kind == protocol.INPUT:
            self.received_bytes += len(frame.payload)
        writer.write(protocol.encode_document({"event": "exit", "context": {}}))


@dataclass
class World:
    """A gate with one guest behind it, and the web process's side of them."""

    gate: Gate
    gate_endpoint: GateEndpoint
    guest_endpoint: GuestEndpoint
    platform_key: asyncssh.SSHKey
    links: Links
    agent: ScriptedAgent
    guest_connections: list[asyncssh.SSHServerConnection]
    guest_port: int
    agent_socket: Path

    def new_links(self, key: asyncssh.SSHKey | None = None, **options: Any) -> Links:
        return Links(
            key or self.platform_key,
            guest_port=self.guest_port,
            agent_socket=str(self.agent_socket),
            **options,
        )


@asynccontextmanager
async def world(folder: Path, **gate_options: Any) -> AsyncIterator[World]:
    """Start a guest, its agent and a gate before them, on free ports of the loopback."""
    platform_key, gate_key, guest_key = new_key(), new_key(), new_key()
    key_file = folder / "gate.key"
    key_file.write_bytes(gate_key.export_private_key())
    (folder / "files").mkdir()

    agent = ScriptedAgent()
    agent_socket = folder / "agent.sock"
    agent_server = await asyncio.start_unix_server(agent.handle, str(agent_socket))
    guest_connections: list[asyncssh.SSHServerConnection] = []
    guest = await asyncssh.listen(
        GUEST_ADDRESS,
        0,
        server_factory=lambda: GuestSshd(platform_key, agent_socket),
        server_host_keys=[guest_key],
        sftp_factory=True,
        acceptor=guest_connections.append,
        encoding=None,
    )
    gate = Gate(
        GateConfig(
            host="127.0.0.1",
            port=0,
            key_file=key_file,
            platform_public_key=public_text(platform_key),
            guest_subnet=SUBNET,
            files_dir=folder / "files",
            guest_port=guest.get_port(),
            **gate_options,
        )
    )
    await gate.start()

    gate_endpoint = GateEndpoint("127.0.0.1", gate.port, public_text(gate_key))
    guest_endpoint = GuestEndpoint(gate_endpoint, GUEST_ADDRESS, public_text(guest_key), "a:1")
    links = Links(platform_key, guest_port=guest.get_port(), agent_socket=str(agent_socket))
    try:
        yield World(
            gate,
            gate_endpoint,
            guest_endpoint,
            platform_key,
            links,
            agent,
            guest_connections,
            guest.get_port(),
            agent_socket,
        )
    finally:
        agent.unblocked.set()
        await links.close()
        await gate.close()
        for connection in guest_connections:
            connection.abort()
        guest.close()
        agent_server.close()
        await asyncio.sleep(0.02)  # lets aborted connections tell their channels
