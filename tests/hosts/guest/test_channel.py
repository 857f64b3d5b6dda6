import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hosts.guest.channel import AgentChannel, AgentFailed, AgentSilent


@contextmanager
def answering(path: Path, answer: Callable[[dict[str, object]], bytes]) -> Iterator[None]:
    """Answer each line of each connection as a port's other end would."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    if line.strip():
                        try:
                            connection.sendall(answer(json.loads(line)))
                        except BrokenPipeError:
                            break

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def line(document: dict[str, object]) -> bytes:
    return json.dumps(document).encode() + b"\n"


def test_what_an_earlier_connection_left_is_passed_over(tmp_path: Path) -> None:
    def answer(request: dict[str, object]) -> bytes:
        stale = (
            b'the tail of something"}\n' + line({"id": "old", "ok": False}) + b"\xff\xfe\n[]\n"
        )
        return stale + line({"id": request["id"], "ok": True, "ready": True, "uptime_s": 2.5})

    with answering(tmp_path / "s", answer):
        state = AgentChannel(tmp_path / "s").ping()

    assert (state.ready, state.uptime_s) == (True, 2.5)


def test_a_failure_says_why(tmp_path: Path) -> None:
    def answer(request: dict[str, object]) -> bytes:
        return line({"id": request["id"], "ok": False, "error": {"message": "it is stuck"}})

    with answering(tmp_path / "s", answer), pytest.raises(AgentFailed, match="it is stuck"):
        AgentChannel(tmp_path / "s").freeze(5)


@pytest.mark.parametrize("said", [b"", b"x" * 6_000_000, b"noise\n" * 1_000_000])
def test_one_that_is_silent_or_babbles_is_given_up_in_time(tmp_path: Path, said: bytes) -> None:
    started_s = time.monotonic()

    with answering(tmp_path / "s", lambda _: said), pytest.raises(AgentSilent):
        AgentChannel(tmp_path / "s", timeout_s=0.5).ping()

    assert time.monotonic() - started_s < 5


def test_a_guest_that_is_not_there_is_silent(tmp_path: Path) -> None:
    with pytest.raises(AgentSilent):
        AgentChannel(tmp_path / "none").thaw()
    with pytest.raises(AgentSilent):
        AgentChannel(tmp_path / "none").await_ready(timeout_s=0.2)


def test_a_booting_guest_is_waited_for(tmp_path: Path) -> None:
    asked: list[object] = []

    def answer(request: dict[str, object]) -> bytes:
        asked.append(request["op"])
        return line({"id": request["id"], "ok": True, "ready": len(asked) > 2})

    with answering(tmp_path / "s", answer):
        AgentChannel(tmp_path / "s").await_ready(timeout_s=10)

    assert asked == ["ping"] * 3
