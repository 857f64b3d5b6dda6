"""Calls and streams to a guest's agent, over real SSH through a real gate."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import asyncssh
import pytest

from common.units import MiB
from hosts import link
from hosts.guest import protocol
from hosts.link import AgentError, LinkDown
from tests.hosts.ssh_guest import new_key, public_text, world

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_call_gives_the_agents_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)

        answer = await link.call("ping", name="é\n", number=7)

    assert answer["echo"] == {"op": "ping", "name": "é\n", "number": 7}


async def test_a_refusal_of_the_agent_carries_its_code(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)

        with pytest.raises(AgentError, match="no such context") as caught:
            await link.call("refuse")

    assert caught.value.code == protocol.CONTEXT_NOT_FOUND


async def test_an_agent_that_talks_nonsense_is_a_link_that_is_down(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)

        with pytest.raises(LinkDown):
            await link.call("garbage")

        assert (await link.call("ping"))["ok"]


async def test_an_agent_that_is_silent_is_given_up_in_time(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)

        with pytest.raises(LinkDown):
            await link.call("silence", timeout_s=0.3)

        assert (await link.call("ping"))["ok"]


async def test_a_hundred_calls_at_once_share_one_connection(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:

        async def ping(number: int) -> int:
            link = await a_world.links.guest(a_world.guest_endpoint)
            answer = await link.call("ping", number=number)
            return int(answer["echo"]["number"])

        numbers = await asyncio.gather(*(ping(number) for number in range(100)))

        assert numbers == list(range(100))
        assert len(a_world.guest_connections) == 1
        assert len(a_world.gate.connections) == 1
        assert a_world.agent.connections == 100


async def test_two_hundred_streams_stay_open_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)
        streams = [await link.stream("hold") for _ in range(200)]

        assert (await link.call("ping"))["ok"]

        for stream in streams:
            await stream.close()


async def test_a_stream_carries_every_byte_in_order(tmp_path: Path) -> None:
    size_bytes = 5 * MiB + 123
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)
        received = bytearray()
        async with await link.stream("pour", size_bytes=size_bytes) as stream:
            while (frame := await stream.recv()) and frame.kind == protocol.STDOUT:
                received += frame.payload
            end = await stream.recv()

    assert frame is not None
    assert frame.document() == {"event": "exit", "context": {}}
    assert end is None
    assert len(received) == size_bytes
    assert all(received[start] == start // 65536 % 256 for start in range(0, size_bytes, 65536))


async def test_a_reader_that_is_slow_holds_the_agent_back(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)
        stream = await link.stream("pour", size_bytes=200 * MiB)
        await asyncio.sleep(0.5)

        poured_bytes = a_world.agent.poured_bytes
        await asyncio.sleep(0.5)
        held_back = a_world.agent.poured_bytes == poured_bytes
        await stream.recv()
        await stream.close()

        assert held_back
        assert poured_bytes < 16 * MiB  # what all buffers on the way hold together


async def test_a_sender_waits_for_an_agent_that_does_not_read(tmp_path: Path) -> None:
    size_bytes = 16 * MiB
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)
        async with await link.stream("drink") as stream:
            sending = asyncio.create_task(stream.send(protocol.INPUT, b"x" * size_bytes))
            done, _ = await asyncio.wait([sending], timeout=1)
            assert not done

            a_world.agent.unblocked.set()
            await sending
            await stream.send(protocol.CLOSE_INPUT)
            frame = await stream.recv()

        assert frame is not None
        assert frame.document()["event"] == "exit"
        assert a_world.agent.received_bytes == size_bytes


async def test_a_cut_connection_ends_its_streams_and_the_next_call_reconnects(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)
        stream = await link.stream("hold")
        waiting = asyncio.create_task(stream.recv())
        await asyncio.sleep(0)

        a_world.guest_connections[0].abort()

        with pytest.raises(LinkDown):
            await asyncio.wait_for(waiting, 5)
        await stream.close()
        assert (await link.call("ping"))["ok"]
        assert len(a_world.guest_connections) == 2


async def test_a_gate_that_went_away_is_reached_again(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)
        stream = await link.stream("hold")
        for connection in list(a_world.gate.connections):
            connection.abort()

        with pytest.raises(LinkDown):
            await asyncio.wait_for(stream.recv(), 5)

        assert (await link.call("ping"))["ok"]


async def test_a_link_closed_by_us_ends_its_streams_loudly(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)
        stream = await link.stream("hold")

        a_world.links.close_endpoint(a_world.guest_endpoint.key)

        with pytest.raises(LinkDown):
            await asyncio.wait_for(stream.recv(), 5)


async def test_no_gate_is_a_link_that_is_down(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        await a_world.gate.close()

        with pytest.raises(LinkDown):
            await a_world.links.guest(a_world.guest_endpoint)


@pytest.mark.parametrize("whose", ["gate", "guest"])
async def test_another_host_key_than_the_pinned_one_is_refused(
    tmp_path: Path, whose: str
) -> None:
    async with world(tmp_path) as a_world:
        other = public_text(new_key())
        endpoint = a_world.guest_endpoint
        if whose == "gate":
            endpoint = replace(endpoint, gate=replace(endpoint.gate, public_key=other))
        else:
            endpoint = replace(endpoint, host_public_key=other)

        with pytest.raises(LinkDown, match="key"):
            await a_world.links.guest(endpoint)


async def test_a_key_that_the_gate_does_not_know_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        links = a_world.new_links(new_key())

        with pytest.raises(LinkDown):
            await links.guest(a_world.guest_endpoint)

        await links.close()


async def test_an_address_outside_the_guests_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        with pytest.raises(LinkDown):
            await a_world.links.guest(replace(a_world.guest_endpoint, address="127.0.0.1"))


async def test_a_caller_that_gives_up_does_not_take_the_connection_from_the_others(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as a_world:
        first = asyncio.create_task(a_world.links.guest(a_world.guest_endpoint))
        second = asyncio.create_task(a_world.links.guest(a_world.guest_endpoint))
        await asyncio.sleep(0)

        first.cancel()

        assert (await (await second).call("ping"))["ok"]
        assert len(a_world.guest_connections) == 1


async def test_idle_connections_beyond_the_limit_are_ended_and_busy_ones_kept(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as a_world:
        links = a_world.new_links(max_guests=2)
        busy = await links.guest(a_world.guest_endpoint)
        stream = await busy.stream("hold")
        for number in range(4):
            await links.guest(replace(a_world.guest_endpoint, key=f"b:{number}"))
        await asyncio.sleep(0.1)

        live = [one for one in a_world.guest_connections if not one.is_closed()]
        assert len(live) == 2
        assert len(a_world.guest_connections) == 5
        assert (await busy.call("ping"))["ok"]
        assert len(a_world.guest_connections) == 5

        await stream.close()
        await links.close()


async def test_a_guests_files_are_one_shared_session(tmp_path: Path) -> None:
    odd = tmp_path / "odd\n\udcff é"
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)
        clients = await asyncio.gather(*(link.sftp() for _ in range(20)))

        async with clients[0].open(str(odd), "wb") as file:
            await file.write(b"content")
        names = await clients[1].listdir(str(tmp_path))

    assert len(set(map(id, clients))) == 1
    assert odd.read_bytes() == b"content"
    assert odd.name in names


async def test_a_files_session_that_ended_is_opened_again(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        link = await a_world.links.guest(a_world.guest_endpoint)
        before = await link.sftp()
        before.exit()
        await before.wait_closed()
        await asyncio.sleep(0)

        after = await link.sftp()

        assert await after.exists(str(tmp_path))


async def test_a_volume_that_is_not_open_has_no_files(tmp_path: Path) -> None:
    async with world(tmp_path) as a_world:
        with pytest.raises(LinkDown):
            await a_world.links.paused_sftp(a_world.gate_endpoint, uuid.uuid4())


async def test_a_session_that_nobody_answers_in_time_is_not_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "OPEN_TIMEOUT_S", 0.3)
    volume_id = uuid.uuid4()
    ended = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(9)  # an SFTP client's first packet
        await reader.read()
        ended.set()
        writer.close()

    async with world(tmp_path) as a_world:
        path = tmp_path / "files" / f"{volume_id.hex}.sock"
        server = await asyncio.start_unix_server(say_nothing, path)

        with pytest.raises(LinkDown):
            await a_world.links.paused_sftp(a_world.gate_endpoint, volume_id)

        await asyncio.wait_for(ended.wait(), 5)
        server.close()


async def test_the_files_of_a_paused_volume_come_through_the_gate(tmp_path: Path) -> None:
    volume_id = uuid.uuid4()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(9)  # an SFTP client's first packet
        writer.write(b"\0\0\0\x05\x02\0\0\0\x03")  # FXP_VERSION 3
        await reader.read(9)
        writer.close()

    async with world(tmp_path) as a_world:
        path = tmp_path / "files" / f"{volume_id.hex}.sock"
        server = await asyncio.start_unix_server(hang_up, path)
        client = await a_world.links.paused_sftp(a_world.gate_endpoint, volume_id)

        with pytest.raises((asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection)):
            await client.stat("/")

        server.close()
