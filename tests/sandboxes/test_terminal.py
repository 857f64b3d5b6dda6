"""The terminal's WebSocket, down to a real shell: the real agent, SSH and gate on loopback."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from channels.layers import get_channel_layer
from channels.routing import URLRouter
from channels.sessions import SessionMiddlewareStack
from django.test import Client
from django.utils import timezone

from accounts.models import Membership, Role, Team, User
from common.units import KiB, MiB
from hosts.models import Host, Volume
from sandboxes import access, consumers
from sandboxes.events import announce
from sandboxes.models import Sandbox
from sandboxes.web.routing import websocket_urlpatterns
from tests.fakes.guest_link import ADDRESS, LocalGuest, local_guest

pytestmark = pytest.mark.django_db(transaction=True)

WAIT_S = 30


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGuest]:
    with local_guest(tmp_path_factory.mktemp("guest")) as guest:
        yield guest


@pytest.fixture
def awake(
    guest: LocalGuest,
    alices_team: Team,
    transactional_db: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Sandbox:
    """A sandbox whose guest is the one on loopback."""
    monkeypatch.setattr(access, "links", guest.links)
    host = Host.objects.create(
        name="loopback",
        gate_host="127.0.0.1",
        gate_port=guest.gate_port,
        gate_public_key=guest.gate_public_key,
        subnet="127.0.0.0/8",
        memory_bytes=64 * MiB,
        seen_at=timezone.now(),
    )
    return Sandbox.objects.create(
        id=f"rs-c1-x-{Sandbox.objects.count():05}",
        team=alices_team,
        template_name="x",
        volume=Volume.objects.create(),
        state=Sandbox.State.RUNNING,
        host=host,
        address=ADDRESS,
        host_public_key=guest.host_public_key,
        memory_bytes=512 * MiB,
        started_at=timezone.now(),
    )


class Page:
    """What a browser does with the socket."""

    def __init__(self, browser: Client | None, path: str) -> None:
        cookie = browser.cookies["sessionid"].value if browser else ""
        application: Any = SessionMiddlewareStack(URLRouter([*websocket_urlpatterns]))  # type: ignore[list-item]
        path, _, query = path.partition("?")
        scope = {
            "type": "websocket",
            "path": path,
            "query_string": query.encode(),
            "headers": [(b"cookie", f"sessionid={cookie}".encode())],
            "subprotocols": [],
        }
        self.socket: Any = ApplicationCommunicator(application, scope)  # type: ignore[no-untyped-call]
        self.said: list[dict[str, Any]] = []
        self.output = b""
        self.on_way_bytes = 0

    async def open(self) -> None:
        await self.socket.send_input({"type": "websocket.connect"})
        assert (await self.socket.receive_output(WAIT_S))["type"] == "websocket.accept"

    async def step(self) -> int | None:
        """Take one frame; returns the code once the socket was closed."""
        event = await self.socket.receive_output(timeout=WAIT_S)
        if event["type"] == "websocket.close":
            return int(event["code"])
        if event.get("text"):
            message = json.loads(event["text"])
            self.said.append(message)
            if message["type"] == "taken":
                self.on_way_bytes -= message["bytes"]
            return None
        self.output += event["bytes"]
        await self.say(type="ack", bytes=len(event["bytes"]))
        return None

    async def until(self, *needles: bytes) -> None:
        while not all(needle in self.output for needle in needles):
            assert await self.step() is None, self.said

    async def until_said(self, kind: str) -> dict[str, Any]:
        while not (found := [said for said in self.said if said["type"] == kind]):
            assert await self.step() is None, self.said
        return found[-1]

    async def until_closed(self) -> int:
        while (code := await self.step()) is None:
            pass
        return code

    async def say(self, **message: object) -> None:
        await self.send(text=json.dumps(message))

    async def send(self, **data: str | bytes) -> None:
        await self.socket.send_input({"type": "websocket.receive", **data})

    async def type(self, data: bytes) -> None:
        """Type as the page does: never more on the way than the window."""
        for start in range(0, len(data), 16 * KiB):
            while self.on_way_bytes >= consumers.INPUT_WINDOW_BYTES:
                assert await self.step() is None
            piece = data[start : start + 16 * KiB]
            self.on_way_bytes += len(piece)
            await self.send(bytes=piece)

    async def close(self) -> None:
        await self.socket.send_input({"type": "websocket.disconnect", "code": 1001})
        await self.socket.wait(WAIT_S)


@pytest.fixture
async def pages(guest: LocalGuest) -> AsyncIterator[list[Page]]:
    opened: list[Page] = []
    yield opened
    for page in opened:
        await page.close()
    # Both belong to the loop of this test.
    await guest.links().close()
    layer: Any = get_channel_layer()
    await layer.flush()
    await asyncio.sleep(0.05)


def terminal_of(sandbox: Sandbox, shell: str = "1", query: str = "") -> str:
    return f"/ws/sandboxes/{sandbox.id}/terminal?shell={shell}&rows=30&cols=100{query}"


async def open_page(pages: list[Page], browser: Client | None, path: str) -> Page:
    page = Page(browser, path)
    pages.append(page)
    await page.open()
    return page


async def test_what_is_typed_is_run_and_answered(
    awake: Sandbox, alices_browser: Client, pages: list[Page]
) -> None:
    page = await open_page(pages, alices_browser, terminal_of(awake, "typed"))
    await page.until_said("attached")

    await page.type("echo é😀漢-$((40 + 2)); stty size\r".encode())

    await page.until("é😀漢-42".encode(), b"30 100")


async def test_a_reload_shows_the_same_shell_and_what_it_wrote(
    awake: Sandbox, alices_browser: Client, pages: list[Page]
) -> None:
    first = await open_page(pages, alices_browser, terminal_of(awake, "same"))
    await first.until_said("attached")
    await first.type(b"kept=in-$((1 + 1))-memory; echo begin-$kept\r")
    await first.until(b"begin-in-2-memory")
    await pages.pop().close()

    second = await open_page(pages, alices_browser, terminal_of(awake, "same"))

    attached = await second.until_said("attached")
    await second.until(b"begin-in-2-memory")
    assert attached["replay_bytes"] >= len(b"begin-in-2-memory")
    await second.type(b"echo again-$kept\r")
    await second.until(b"again-in-2-memory")
    assert second.output.count(b"begin-in-2-memory") == 1


async def test_a_resize_reaches_the_program(
    awake: Sandbox, alices_browser: Client, pages: list[Page]
) -> None:
    page = await open_page(pages, alices_browser, terminal_of(awake, "size"))
    await page.until_said("attached")

    for rows in range(10, 60):
        await page.say(type="resize", rows=rows, cols=2 * rows)
    await page.type(b"echo now; stty size\r")

    await page.until(b"59 118")


async def test_a_paste_of_a_megabyte_arrives_whole(
    awake: Sandbox, alices_browser: Client, pages: list[Page], tmp_path: Path
) -> None:
    target = tmp_path / "pasted"
    lines = b"".join(b"%07d %s\r" % (number, b"x" * 55) for number in range(16 * 1024))
    page = await open_page(pages, alices_browser, terminal_of(awake, "paste"))
    await page.until_said("attached")
    # Until the shell has given the terminal away, what comes is edited as a command line.
    await page.type(f"stty -echo; echo go''es; cat > {target}; echo do''ne\r".encode())
    await page.until(b"goes")

    await page.type(lines + b"\x04")

    await page.until(b"done")
    pasted = target.read_bytes()
    assert len(lines) == MiB
    assert (
        hashlib.sha256(pasted).digest() == hashlib.sha256(lines.replace(b"\r", b"\n")).digest()
    )


async def test_a_program_waits_for_a_page_that_does_not_draw(
    awake: Sandbox, alices_browser: Client, pages: list[Page]
) -> None:
    page = await open_page(pages, alices_browser, terminal_of(awake, "flood"))
    await page.until_said("attached")
    await page.type(b"head -c 8000000 /dev/zero | tr '\\0' x; echo e''nd\r")
    received = 0

    while True:
        try:
            event = await page.socket.receive_output(timeout=2)
        except TimeoutError:
            break
        received += len(event.get("bytes") or b"")
    pages.clear()

    assert received <= consumers.OUTPUT_WINDOW_BYTES + protocol_frame_bytes()


def protocol_frame_bytes() -> int:
    """One frame may go over the window, since it is looked at before it is sent."""
    return MiB


async def test_a_shell_that_ends_closes_with_its_code_and_the_next_is_fresh(
    awake: Sandbox, alices_browser: Client, pages: list[Page]
) -> None:
    page = await open_page(pages, alices_browser, terminal_of(awake, "ends"))
    await page.until_said("attached")
    await page.type(b"old=yes; exit 3\r")

    assert await page.until_closed() == consumers.SHELL_ENDED
    assert page.said[-1] == {"type": "exit", "exit_code": 3}

    again = await open_page(pages, alices_browser, terminal_of(awake, "ends"))
    await again.until_said("attached")
    await again.type(b"echo old-is-${old:-gone}\r")
    await again.until(b"old-is-gone")


async def test_closing_the_tab_ends_what_runs_in_it(
    awake: Sandbox, alices_browser: Client, pages: list[Page]
) -> None:
    page = await open_page(pages, alices_browser, terminal_of(awake, "closed"))
    await page.until_said("attached")
    await page.type(b"sleep 1000\r")
    await page.until(b"sleep 1000")

    await page.say(type="end")

    assert await page.until_closed() == consumers.SHELL_ENDED


async def test_a_broken_connection_comes_back_to_the_shell(
    guest: LocalGuest, awake: Sandbox, alices_browser: Client, pages: list[Page]
) -> None:
    page = await open_page(pages, alices_browser, terminal_of(awake, "broken"))
    await page.until_said("attached")
    await page.type(b"mine=still-$((6 * 7)); echo rea''dy\r")
    await page.until(b"ready")
    page.said.clear()

    await asyncio.to_thread(guest.cut)

    await page.until_said("attached")
    await page.type(b"echo $mine\r")
    await page.until(b"still-42")


async def test_a_pause_closes_the_terminal_and_it_does_not_wake_by_itself(
    awake: Sandbox, alices_browser: Client, pages: list[Page]
) -> None:
    page = await open_page(pages, alices_browser, terminal_of(awake, "pause"))
    await page.until_said("attached")

    await asyncio.to_thread(fall_asleep, awake)

    assert await page.until_closed() == consumers.ASLEEP
    again = await open_page(pages, alices_browser, terminal_of(awake, "pause"))
    assert await again.until_closed() == consumers.ASLEEP
    await asyncio.to_thread(awake.refresh_from_db)
    assert awake.state == Sandbox.State.PAUSED
    assert again.said[0]["price_per_hour"] == "$0.0075"


def fall_asleep(sandbox: Sandbox) -> None:
    Sandbox.objects.filter(pk=sandbox.pk).update(state=Sandbox.State.PAUSED, host=None)
    announce(sandbox)


async def test_a_wake_that_cannot_be_is_said(
    awake: Sandbox, alices_browser: Client, pages: list[Page]
) -> None:
    await asyncio.to_thread(fall_asleep, awake)

    page = await open_page(pages, alices_browser, terminal_of(awake, "wake", "&wake=1"))

    assert await page.until_closed() == consumers.FAILED
    assert "memory" in page.said[-1]["text"]


@pytest.mark.parametrize("who", ["mallory", "nobody"])
async def test_a_stranger_is_told_that_there_is_no_such_sandbox(
    awake: Sandbox, mallorys_browser: Client, pages: list[Page], who: str
) -> None:
    browser = mallorys_browser if who == "mallory" else None

    page = await open_page(pages, browser, terminal_of(awake))

    assert await page.until_closed() == consumers.NOT_FOUND
    assert page.said == []


async def test_a_viewer_may_not_type(
    awake: Sandbox, bobs_browser: Client, pages: list[Page]
) -> None:
    page = await open_page(pages, bobs_browser, terminal_of(awake))

    assert await page.until_closed() == consumers.NOT_ALLOWED


@pytest.mark.parametrize("change", ["sign out", "role", "removed", "deactivated", "password"])
async def test_who_may_no_longer_be_there_is_thrown_out(
    awake: Sandbox,
    alice_user: User,
    alices_browser: Client,
    pages: list[Page],
    change: str,
) -> None:
    page = await open_page(pages, alices_browser, terminal_of(awake, "out"))
    await page.until_said("attached")

    await asyncio.to_thread(take_away, change, alice_user, alices_browser)

    assert await page.until_closed() in (consumers.SIGNED_OUT, consumers.NOT_ALLOWED)


def take_away(change: str, user: User, browser: Client) -> None:
    match change:
        case "sign out":
            browser.logout()
        case "role":
            Membership.objects.filter(user=user).update(role=Role.VIEWER)
        case "removed":
            Membership.objects.filter(user=user).delete()
        case "deactivated":
            User.objects.filter(pk=user.pk).update(is_active=False)
        case _:
            user.set_password("another one entirely")
            user.save()


@pytest.mark.parametrize(
    "frame", ["{", "[]", '{"type": "nonsense"}', '{"rows": 1}', '{"type": "ack", "bytes": "x"}']
)
async def test_a_frame_that_means_nothing_closes_the_socket(
    awake: Sandbox, alices_browser: Client, pages: list[Page], frame: str
) -> None:
    page = await open_page(pages, alices_browser, terminal_of(awake, "bad"))
    await page.until_said("attached")

    await page.send(text=frame)

    assert await page.until_closed() == consumers.BAD_REQUEST


@pytest.mark.parametrize("shell", ["..%2F", "A", "x" * 17, "%20"])
async def test_a_shells_name_is_a_plain_word(
    awake: Sandbox, alices_browser: Client, pages: list[Page], shell: str
) -> None:
    page = await open_page(pages, alices_browser, terminal_of(awake, shell))

    assert await page.until_closed() == consumers.BAD_REQUEST


async def test_the_live_list_hears_of_its_team_alone(
    awake: Sandbox,
    alices_browser: Client,
    mallorys_browser: Client,
    pages: list[Page],
) -> None:
    hers = await open_page(pages, alices_browser, f"/ws/teams/{awake.team_id}/live")
    await hers.until_said("ready")
    stranger = await open_page(pages, mallorys_browser, f"/ws/teams/{awake.team_id}/live")
    assert await stranger.until_closed() == consumers.NOT_FOUND

    await asyncio.to_thread(announce, awake)

    assert await hers.until_said("changed") == {"type": "changed", "sandbox_id": awake.id}
