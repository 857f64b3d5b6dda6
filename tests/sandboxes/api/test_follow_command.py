"""`…/contexts/<ctx>/ws`, through the unmodified SDK and a plain WebSocket client."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sandbox0
from sandbox0.sandbox import CmdOptions
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from accounts.models import ApiKey, Role, Team, User
from sandboxes.models import Sandbox
from tests.conftest import make_key
from tests.fakes.guest_link import LocalGuest, wait_until

Follow = Callable[..., ClientConnection]

# The SDK, which we use unmodified, calls `connect` as older releases of websockets liked it.
pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")


def sh(script: str, **options: Any) -> CmdOptions:
    return CmdOptions(command=["/bin/sh", "-c", script], **options)


def text_of(stream: Any, source: str) -> str:
    return "".join(one.data for one in stream.iter_outputs() if one.source == source)


@pytest.fixture
def follow(url: str, alices_key: tuple[ApiKey, str], sandbox: Sandbox) -> Follow:
    """Open a socket on a context with some key."""

    def open_socket(
        context_id: str, *, secret: str = alices_key[1], sandbox_id: str = sandbox.id
    ) -> ClientConnection:
        path = f"/api/v1/sandboxes/{sandbox_id}/contexts/{context_id}/ws"
        headers = {"Authorization": f"Bearer {secret}", "Connection": "keep-alive"}
        return connect(url.replace("http", "ws") + path, additional_headers=headers)

    return open_socket


def test_a_command_is_followed_to_its_end(box: sandbox0.Sandbox) -> None:
    stream = box.cmd_stream("x", sh("echo one; sleep 0.3; echo two >&2; exit 4"))
    outputs = [(one.source, one.data) for one in stream.iter_outputs()]
    done = stream.wait()
    stream.close()

    assert outputs == [("stdout", "one\n"), ("stderr", "two\n")]
    assert (done.exit_code, done.state) == (4, "stopped")


def test_quick_commands_lose_nothing(box: sandbox0.Sandbox) -> None:
    for _ in range(15):
        stream = box.cmd_stream("echo ok")
        assert text_of(stream, "stdout") == "ok\n"
        assert stream.wait().exit_code == 0
        stream.close()


def test_a_finished_context_replays_and_ends(box: sandbox0.Sandbox) -> None:
    started = box.cmd("x", sh("echo kept; exit 2", wait=False))
    wait_until(lambda: not box.get_context(started.context_id).running)

    for _ in range(2):
        stream = box.connect_ws_context(started.context_id)
        assert text_of(stream, "stdout") == "kept\n"
        assert stream.wait().exit_code == 2
        stream.close()


def test_input_is_exact_and_acknowledged(box: sandbox0.Sandbox, follow: Follow) -> None:
    started = box.cmd("x", sh("cat; echo end", wait=False))
    with follow(started.context_id) as socket:
        socket.send(json.dumps({"type": "input", "data": "é\r\t😀", "request_id": "r1"}))
        socket.send(json.dumps({"type": "input", "data": "", "eof": True}))
        frames = [json.loads(frame) for frame in socket]

    outputs = "".join(frame["data"] for frame in frames if frame["type"] == "output")
    assert outputs == "é\r\t😀end\n"
    assert {"type": "done", "request_id": "r1"} in frames
    assert frames[-1] == {"type": "done", "state": "stopped", "exit_code": 0}


def test_a_megabyte_pasted_into_a_terminal_arrives_whole(
    box: sandbox0.Sandbox, folder: Path
) -> None:
    text = "".join(f"line {number} é\n" for number in range(60_000))
    script = f"stty raw -echo; echo ready; head -c {len(text.encode())} > {folder}/pasted"
    stream = box.cmd_stream("x", sh(script, pty_rows=24, pty_cols=80))
    assert "ready" in next(iter(stream.iter_outputs())).data

    for start in range(0, len(text), 200_000):
        stream.send_input(text[start : start + 200_000])

    assert stream.wait().exit_code == 0
    assert (folder / "pasted").read_text() == text
    stream.close()


def test_a_large_output_comes_in_messages_that_the_sdk_takes(box: sandbox0.Sandbox) -> None:
    # It waits for us: what is written before anybody reads is kept for one megabyte only.
    stream = box.cmd_stream("x", sh("read line; head -c 3000000 /dev/zero"))
    stream.send_input("go\n")

    received = [one.data for one in stream.iter_outputs()]

    assert "".join(received) == "\0" * 3_000_000
    assert max(len(json.dumps(data)) for data in received) < 1024 * 1024
    stream.close()


def test_characters_that_are_cut_stay_whole(box: sandbox0.Sandbox, folder: Path) -> None:
    text = "é😀漢" * 20_000
    (folder / "text").write_text(text)

    stream = box.cmd_stream("x", sh(f"dd if={folder}/text bs=1111 status=none"))

    assert text_of(stream, "stdout") == text
    stream.close()


def test_a_terminal_is_resized_and_signalled(box: sandbox0.Sandbox) -> None:
    script = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.1; done"
    stream = box.cmd_stream("x", sh(script, pty_rows=5, pty_cols=5))
    outputs = stream.iter_outputs()
    assert "ready" in next(outputs).data

    stream.send_resize(33, 44)
    assert "33 44" in next(outputs).data
    stream.send_signal("SIGKILL")

    assert stream.wait().exit_code == 137
    stream.close()


@pytest.mark.parametrize(
    "frame",
    [
        "not json",
        "[]",
        '{"type": "nonsense"}',
        '{"type": "input", "data": 5}',
        '{"type": "signal", "signal": "NOSUCH"}',
        '{"type": "resize", "rows": -1, "cols": "x"}',
        '{"type": "resize", "rows": 5, "cols": 5}',
    ],
)
def test_a_frame_that_makes_no_sense_is_refused_and_the_socket_goes_on(
    box: sandbox0.Sandbox, follow: Follow, frame: str
) -> None:
    started = box.cmd("x", sh("read line; echo got $line", wait=False))
    with follow(started.context_id) as socket:
        socket.send(frame)
        refusal = json.loads(socket.recv(timeout=10))
        socket.send(json.dumps({"type": "input", "data": "this\n"}))
        output = json.loads(socket.recv(timeout=10))

    assert refusal["type"] == "error"
    assert output["data"] == "got this\n"


def test_leaving_leaves_the_command_running(
    box: sandbox0.Sandbox, follow: Follow, folder: Path
) -> None:
    started = box.cmd("x", sh(f"sleep 1; echo done > {folder}/done", wait=False))
    with follow(started.context_id):
        pass

    wait_until((folder / "done").exists)


@pytest.mark.parametrize(
    ("context_id", "sandbox_id", "status"),
    [
        ("ctx-nosuchid", None, 404),
        ("%2e%2e", None, 404),
        ("ctx-nosuchid", "rs-c1-nosuch-abcde", 404),
        ("ctx-nosuchid", "a%00b", 404),
    ],
)
def test_a_context_that_is_not_there_is_refused(
    follow: Follow, sandbox: Sandbox, context_id: str, sandbox_id: str | None, status: int
) -> None:
    with pytest.raises(InvalidStatus) as caught:
        follow(context_id, sandbox_id=sandbox_id or sandbox.id)

    assert caught.value.response.status_code == status
    assert json.loads(caught.value.response.body or b"{}")["success"] is False


def test_strangers_are_refused(
    box: sandbox0.Sandbox,
    follow: Follow,
    mallorys_team: Team,
    alices_team: Team,
    alice_user: User,
) -> None:
    started = box.cmd("x", sh("sleep 20", wait=False))
    mallorys = make_key(mallorys_team, alice_user, Role.ADMIN)[1]
    viewers = make_key(alices_team, alice_user, Role.VIEWER)[1]

    for secret, status in ((mallorys, 404), (viewers, 403), ("nonsense", 401)):
        with pytest.raises(InvalidStatus) as caught:
            follow(started.context_id, secret=secret)
        assert caught.value.response.status_code == status

    box.delete_context(started.context_id)


def test_a_key_that_is_deactivated_closes_its_sockets(
    box: sandbox0.Sandbox, follow: Follow, alices_key: tuple[ApiKey, str]
) -> None:
    started = box.cmd("x", sh("sleep 30", wait=False))
    with follow(started.context_id) as socket:
        ApiKey.objects.filter(pk=alices_key[0].pk).update(is_active=False)
        before = time.monotonic()
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=20)

    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1008
    assert time.monotonic() - before < 10


def test_a_guest_that_goes_away_is_no_clean_end(
    box: sandbox0.Sandbox, follow: Follow, guest: LocalGuest, http: httpx.Client
) -> None:
    started = box.cmd("x", sh("echo up; sleep 30", wait=False))
    with follow(started.context_id) as socket:
        socket.recv(timeout=10)
        guest.cut()
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=20)

    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1013
    box.delete_context(started.context_id)
