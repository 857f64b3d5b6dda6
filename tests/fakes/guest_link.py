"""A guest without a machine: the real agent, a real SSH server and a gate, on loopback.

What the web process talks to is what it talks to in production, over the same SSH; only
that everything runs on this machine, and that files are this machine's own.
"""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import asyncssh

from config.settings import BASE_DIR
from hosts.gate import Gate, GateConfig
from hosts.link import Links

# The gate refuses its own address, 127.0.0.1, as it would refuse the gateway's.
ADDRESS = "127.0.0.2"
SFTP_SERVER = "/usr/lib/openssh/sftp-server"

AGENT = """
import sys
from hosts.guest import agent
from hosts.guest.contexts import Contexts
from hosts.guest.loop import Loop
loop = Loop()
env = {b"PATH": b"/usr/bin:/bin", b"HOME": b"/root", b"LANG": b"C.UTF-8", b"FROM_IMAGE": b"1"}
contexts = Contexts(loop, env=env, memory_bytes=512 << 20, cwd=b"/")
agent.serve(loop, contexts, {}, socket_path=sys.argv[1], port_path=None)
loop.run()
"""


class LocalGuest:
    """One guest; `stop_agent` and `cut` break it in the ways that guests break."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "agent.sock"
        self.platform_key = asyncssh.generate_private_key("ssh-ed25519")
        self._folder = folder
        self._host_key = asyncssh.generate_private_key("ssh-ed25519")
        self._gate_key = asyncssh.generate_private_key("ssh-ed25519")
        self._connections: list[asyncssh.SSHServerConnection] = []
        self._agent: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._links: dict[int, tuple[asyncio.AbstractEventLoop, Links]] = {}
        self.gate_port = 0
        self._guest_port = 0

    @property
    def host_public_key(self) -> str:
        return self._host_key.export_public_key().decode()

    @property
    def gate_public_key(self) -> str:
        return self._gate_key.export_public_key().decode()

    def links(self) -> Links:
        """Return the connections of the running loop, in place of `access.links`."""
        loop = asyncio.get_running_loop()
        if id(loop) not in self._links:
            links = Links(
                self.platform_key,
                guest_port=self._guest_port,
                agent_socket=str(self.socket),
            )
            self._links[id(loop)] = (loop, links)
        return self._links[id(loop)][1]

    def start(self) -> None:
        self.start_agent()
        self._thread.start()
        self._run(self._serve())

    def start_agent(self) -> None:
        env = {"PYTHONPATH": f"{BASE_DIR}:{BASE_DIR / 'platform'}", "PATH": os.environ["PATH"]}
        self._agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(self.socket)], env=env, stdin=subprocess.DEVNULL
        )
        wait_until(self.socket.exists)

    def stop_agent(self) -> None:
        assert self._agent is not None
        self._agent.kill()
        self._agent.wait()
        self.socket.unlink(missing_ok=True)

    def cut(self) -> None:
        """Break every connection to the guest, and leave guest and agent alive."""
        self._run(self._abort_connections())

    def close(self) -> None:
        self._run(self._abort_connections())
        self._run(self._gate.close())
        self._guest.close()
        self._run(asyncio.sleep(0.05))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.stop_agent()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _abort_connections(self) -> None:
        for connection in self._connections:
            connection.abort()
        self._connections.clear()

    async def _serve(self) -> None:
        self._guest = await asyncssh.listen(
            ADDRESS,
            0,
            server_factory=lambda: _Sshd(self.platform_key, self.socket),
            server_host_keys=[self._host_key],
            sftp_factory=True,
            acceptor=self._connections.append,
            encoding=None,
        )
        self._guest_port = self._guest.get_port()
        key_file = self._folder / "gate.key"
        key_file.write_bytes(self._gate_key.export_private_key())
        files_dir = self._folder / "files"
        files_dir.mkdir()
        self.images_dir = self._folder / "images"
        self.images_dir.mkdir()
        self._gate = Gate(
            GateConfig(
                host="127.0.0.1",
                port=0,
                key_file=key_file,
                platform_public_key=self.platform_key.export_public_key().decode(),
                guest_subnet=IPv4Network("127.0.0.0/8"),
                files_dir=files_dir,
                images_dir=self.images_dir,
                guest_port=self._guest_port,
            )
        )
        await self._gate.start()
        self.gate_port = self._gate.port
        self.files_dir = files_dir

    def serve_paused_files(self, volume_hex: str) -> None:
        """Serve SFTP where the gate looks for a paused volume's."""
        self._run(self._serve_paused(volume_hex))

    def drop_paused_files(self, volume_hex: str) -> None:
        """Close a paused volume's files, sessions included."""
        self._run(self._drop_paused(volume_hex))

    async def _serve_paused(self, volume_hex: str) -> None:
        self._paused = getattr(self, "_paused", {})
        writers: list[asyncio.StreamWriter] = []

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            server = await asyncio.create_subprocess_exec(
                SFTP_SERVER,
                "-e",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            assert server.stdin is not None
            assert server.stdout is not None
            await asyncio.gather(_pump(reader, server.stdin), _pump(server.stdout, writer))
            await server.wait()

        path = self.files_dir / f"{volume_hex}.sock"
        self._paused[volume_hex] = (
            await asyncio.start_unix_server(relay, str(path)),
            writers,
            path,
        )

    async def _drop_paused(self, volume_hex: str) -> None:
        server, writers, path = self._paused.pop(volume_hex)
        server.close()
        for writer in writers:
            writer.close()
        path.unlink(missing_ok=True)


class _Sshd(asyncssh.SSHServer):
    """Takes the platform's key and forwards to the agent's socket, as a guest's sshd."""

    def __init__(self, platform_key: asyncssh.SSHKey, socket: Path) -> None:
        self._platform_key = platform_key
        self._socket = socket

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        mine = self._platform_key.export_public_key()
        return username == "root" and key.export_public_key() == mine

    def unix_connection_requested(self, dest_path: str) -> bool:
        return dest_path == str(self._socket)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return
    finally:
        writer.close()


def wait_until(is_true: Any, timeout_s: float = 20.0) -> None:
    """Wait for something that happens in another process or thread."""
    until = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > until:
            raise AssertionError("it did not happen in time")
        time.sleep(0.02)


@contextmanager
def local_guest(folder: Path) -> Iterator[LocalGuest]:
    """Run a guest for as long as the block lasts."""
    guest = LocalGuest(folder)
    guest.start()
    try:
        yield guest
    finally:
        guest.close()
