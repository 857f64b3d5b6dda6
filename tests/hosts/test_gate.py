"""The gate lets the platform in, to guests and paused volumes, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import asyncssh
import pytest

from hosts import gate
from hosts.gate import PATIENCE_VARIABLE, USER, VOLUME_VARIABLE, GateConfig, is_guest
from tests.hosts.ssh_guest import GUEST_ADDRESS, World, new_key, public_text, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

VOLUME = "0123456789abcdef0123456789abcdef"


def config(subnet: str = "10.88.0.0/20") -> GateConfig:
    return GateConfig("127.0.0.1", 0, Path("k"), "", IPv4Network(subnet), Path("files"))


@asynccontextmanager
async def through(
    a_world: World, key: asyncssh.SSHKey | None = None, user: str = USER
) -> AsyncIterator[asyncssh.SSHClientConnection]:
    async with asyncssh.connect(
        "127.0.0.1",
        a_world.gate.port,
        username=user,
        client_keys=[key or a_world.platform_key],
        known_hosts=(
            [asyncssh.import_public_key(a_world.gate_endpoint.public_key)],
            [],
            [],
        ),
        config=None,
        agent_path=None,
        keepalive_interval=0,
    ) as connection:
        yield connection


@pytest.mark.parametrize(
    ("host", "port", "allowed"),
    [
        ("10.88.0.2", 22, True),
        ("10.88.15.254", 22, True),
        ("10.88.0.0", 22, False),
        ("10.88.0.1", 22, False),
        ("10.88.15.255", 22, False),
        ("10.88.16.2", 22, False),
        ("10.88.0.2", 23, False),
        ("127.0.0.1", 22, False),
        ("169.254.169.254", 22, False),
        ("0.0.0.0", 22, False),
        ("10.88.0.02", 22, False),
        ("10.88.2", 22, False),
        ("0x0a580002", 22, False),
        ("::ffff:10.88.0.2", 22, False),
        ("localhost", 22, False),
        ("10.88.0.2\0.example", 22, False),
        ("", 22, False),
    ],
)
def test_only_the_ssh_port_of_a_guests_address_is_a_target(
    host: str, port: int, allowed: bool
) -> None:
    assert is_guest(config(), host, port) is allowed


async def test_it_relays_to_a_guest_and_to_no_other_address(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world, through(a_world) as connection:
        reader, writer = await connection.open_connection(
            GUEST_ADDRESS, a_world.guest_port, encoding=None
        )
        banner = await reader.readline()
        writer.close()

        refused = []
        for host, port in (
            ("127.0.0.1", a_world.guest_port),
            (GUEST_ADDRESS, a_world.gate.port),
            ("localhost", a_world.guest_port),
            ("10.0.0.1", a_world.guest_port),
        ):
            with pytest.raises(asyncssh.ChannelOpenError) as caught:
                await connection.open_connection(host, port)
            refused.append(caught.value.code)

        assert banner.startswith(b"SSH-2.0-")
        assert set(refused) == {asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED}


async def test_a_guest_that_does_not_listen_is_said_to_be_out_of_reach(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world, through(a_world) as connection:
        with pytest.raises(asyncssh.ChannelOpenError) as caught:
            await connection.open_connection("127.0.0.3", a_world.guest_port)

        assert caught.value.code == asyncssh.OPEN_CONNECT_FAILED


@pytest.mark.parametrize("user", [USER, "root"])
async def test_a_strangers_key_is_refused(tmp_path: Path, user: str) -> None:
    async with world(tmp_path) as a_world:
        with pytest.raises(asyncssh.PermissionDenied):
            async with through(a_world, new_key(), user):
                pass


async def test_the_platforms_key_is_refused_for_another_user(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        with pytest.raises(asyncssh.PermissionDenied):
            async with through(a_world, user="root"):
                pass


async def test_there_is_no_shell_command_or_other_subsystem(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world, through(a_world) as connection:
        requests: list[dict[str, Any]] = [
            {},
            {"command": "id"},
            {"subsystem": "netconf"},
            {"subsystem": "sftp"},
            {"term_type": "xterm"},
        ]
        for request in requests:
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.create_process(**request)


async def test_nothing_is_forwarded_but_tcp_to_guests(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world, through(a_world) as connection:
        with pytest.raises(asyncssh.ChannelOpenError):
            await connection.open_unix_connection(str(tmp_path / "agent.sock"))
        with pytest.raises(asyncssh.ChannelListenError):
            await connection.forward_remote_port("127.0.0.1", 0, "127.0.0.1", 1)
        with pytest.raises(asyncssh.ChannelListenError):
            await connection.forward_remote_path(str(tmp_path / "x.sock"), "/y.sock")

        assert not (tmp_path / "x.sock").exists()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../agent",
        VOLUME.upper(),
        VOLUME[:-1],
        VOLUME + "\n",
        VOLUME + "0",
        "../" + VOLUME[3:],
        VOLUME[:-1] + "\0",
        VOLUME[:-1] + "٣",  # a digit, but none of ours
        "f" * 32,  # well-formed, and not open
    ],
)
async def test_a_volume_is_named_by_exactly_32_hexadecimal_digits(
    tmp_path: Path, name: str
) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with world(tmp_path) as a_world, through(a_world) as connection:
        server = await asyncio.start_unix_server(accept, tmp_path / "files" / f"{VOLUME}.sock")
        with pytest.raises(asyncssh.ChannelOpenError):
            await connection.create_process(subsystem="sftp", env={VOLUME_VARIABLE: name})
        server.close()


async def test_the_bytes_of_a_paused_volumes_session_pass_unchanged(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.close()

    sent = os.urandom(3_000_000)
    async with world(tmp_path) as a_world, through(a_world) as connection:
        server = await asyncio.start_unix_server(echo, tmp_path / "files" / f"{VOLUME}.sock")
        writer, reader, _ = await connection.open_session(
            subsystem="sftp", env={VOLUME_VARIABLE: VOLUME}, encoding=None
        )

        async def send() -> None:
            for start in range(0, len(sent), 50_000):
                writer.write(sent[start : start + 50_000])
                await writer.drain()
            writer.write_eof()

        _, received = await asyncio.gather(send(), reader.read())
        server.close()

    assert received == sent


async def test_what_a_session_says_at_once_reaches_a_volume_that_is_slow_to_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = asyncio.get_running_loop().create_unix_connection

    async def connect_late(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.3)
        return await connect(*args, **kwargs)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        writer.close()

    async with world(tmp_path) as a_world, through(a_world) as connection:
        server = await asyncio.start_unix_server(echo, tmp_path / "files" / f"{VOLUME}.sock")
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "create_unix_connection", connect_late, raising=False)
        writer, reader, _ = await connection.open_session(
            subsystem="sftp", env={VOLUME_VARIABLE: VOLUME}, encoding=None
        )

        writer.write(b"early")
        received = await asyncio.wait_for(reader.readexactly(5), 5)
        server.close()

    assert received == b"early"


async def patient(connection: asyncssh.SSHClientConnection, patience: str) -> Any:
    """Open a session on a volume that may come within so many milliseconds."""
    variables = {VOLUME_VARIABLE: VOLUME, PATIENCE_VARIABLE: patience}
    return await connection.open_session(subsystem="sftp", env=variables, encoding=None)


async def test_a_session_with_patience_is_joined_to_a_volume_that_opens_meanwhile(
    tmp_path: Path,
) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        writer.close()

    async with world(tmp_path) as a_world, through(a_world) as connection:
        writer, reader, _ = await patient(connection, "5000")
        writer.write(b"early")
        await asyncio.sleep(0.2)
        server = await asyncio.start_unix_server(echo, tmp_path / "files" / f"{VOLUME}.sock")
        received = await asyncio.wait_for(reader.readexactly(5), 4)
        server.close()

    assert received == b"early"


async def none_is_open(a_world: World) -> None:
    """Wait until the gate has every channel of its only connection back."""
    (connection,) = a_world.gate.connections
    door = cast("Any", connection.get_owner())
    while door._channels:
        await asyncio.sleep(0.01)


async def test_a_session_whose_patience_ends_ends_with_it(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world, through(a_world) as connection:
        writer, reader, _ = await patient(connection, "200")
        writer.write(b"what an SFTP client says first")

        assert await asyncio.wait_for(reader.read(), 5) == b""
        await none_is_open(a_world)


@pytest.mark.parametrize("patience", ["", "-1", "1e3", "0x10", "9" * 7, "٣٣"])
async def test_what_is_no_number_of_milliseconds_is_no_patience(
    tmp_path: Path, patience: str
) -> None:
    async with world(tmp_path) as a_world, through(a_world) as connection:
        with pytest.raises(asyncssh.ChannelOpenError):
            await patient(connection, patience)


async def test_patience_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_PATIENCE_S", 0.2)
    async with world(tmp_path) as a_world, through(a_world) as connection:
        _, reader, _ = await patient(connection, "999999")

        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_session_ends_when_its_volume_is_closed(tmp_path: Path) -> None:
    streams: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams.append(writer)
        await reader.read()

    async with world(tmp_path) as a_world, through(a_world) as connection:
        server = await asyncio.start_unix_server(accept, tmp_path / "files" / f"{VOLUME}.sock")
        writer, reader, _ = await connection.open_session(
            subsystem="sftp", env={VOLUME_VARIABLE: VOLUME}, encoding=None
        )
        writer.write(b"x")
        while not streams:
            await asyncio.sleep(0.01)

        streams[0].close()
        rest = await asyncio.wait_for(reader.read(), 5)
        server.close()

    assert rest == b""


async def test_connections_are_bounded_and_a_closed_one_makes_room(tmp_path: Path) -> None:
    async with world(tmp_path, max_connections=1) as a_world:
        async with through(a_world):
            with pytest.raises((asyncssh.Error, OSError)):
                async with through(a_world):
                    pass
        while a_world.gate.connections:
            await asyncio.sleep(0.01)

        async with through(a_world):
            assert len(a_world.gate.connections) == 1


async def test_channels_are_bounded_and_a_closed_one_makes_room(tmp_path: Path) -> None:
    async with (
        world(tmp_path, max_channels_per_connection=1) as a_world,
        through(a_world) as connection,
    ):
        _, writer = await connection.open_connection(GUEST_ADDRESS, a_world.guest_port)
        with pytest.raises(asyncssh.ChannelOpenError):
            await connection.open_connection(GUEST_ADDRESS, a_world.guest_port)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)

        reader, _ = await connection.open_connection(
            GUEST_ADDRESS, a_world.guest_port, encoding=None
        )
        assert (await reader.readline()).startswith(b"SSH-2.0-")


async def test_sigterm_ends_a_gate_that_has_a_connection(tmp_path: Path) -> None:
    platform_key = new_key()
    key_file = tmp_path / "gate.key"
    key_file.write_bytes(new_key().export_private_key())
    program = (
        "import asyncio, sys; from ipaddress import IPv4Network; from pathlib import Path\n"
        "from hosts.gate import GateConfig, serve\n"
        "key, public, files, port = sys.argv[1:]\n"
        "asyncio.run(serve(GateConfig('127.0.0.1', int(port), Path(key), public,"
        " IPv4Network('10.88.0.0/20'), Path(files))))"
    )
    port = 23017
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(key_file), public_text(platform_key), "/", str(port)
    )
    try:
        connection = await _connect_when_up(port, platform_key)
        process.send_signal(signal.SIGTERM)

        assert await asyncio.wait_for(process.wait(), 10) == 0
        await asyncio.wait_for(connection.wait_closed(), 5)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _connect_when_up(port: int, key: asyncssh.SSHKey) -> asyncssh.SSHClientConnection:
    for _ in range(100):
        try:
            return await asyncssh.connect(
                "127.0.0.1",
                port,
                username=USER,
                client_keys=[key],
                known_hosts=None,
                config=None,
            )
        except OSError:
            await asyncio.sleep(0.1)
    raise AssertionError("the gate did not come up")
