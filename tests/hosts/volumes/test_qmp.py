"""The client of a storage daemon's monitor, against a monitor that answers as it is told."""

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hosts.volumes.qmp import Qmp, QmpRefused

Answers = Callable[[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture
def monitor(folder: Path) -> Callable[[Answers], Path]:
    """Serve one client: a greeting, then for each request what the function says."""

    def serve(answers: Answers) -> Path:
        path = folder / "qmp.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()

        def talk() -> None:
            with listener, listener.accept()[0] as client, client.makefile("rwb") as lines:
                lines.write(b'{"QMP": {}}\n')
                lines.flush()
                for line in lines:
                    for answer in answers(json.loads(line)):
                        lines.write(json.dumps(answer).encode() + b"\n")
                    lines.flush()

        threading.Thread(target=talk, daemon=True).start()
        return path

    return serve


def test_the_answer_to_what_an_earlier_client_asked_is_not_taken_for_ones_own(
    monitor: Callable[[Answers], Path],
) -> None:
    def answers(request: dict[str, Any]) -> list[dict[str, Any]]:
        late = {"error": {"class": "GenericError", "desc": "late"}, "id": "of another"}
        also_late = {"return": "late", "id": "of another"}
        event = {"event": "STOP"}
        mine = {"return": request["execute"], "id": request["id"]}
        return [late, event, also_late, mine]

    with Qmp(monitor(answers)) as qmp:
        assert qmp.execute("query-status") == "query-status"


def test_commands_are_sent_at_once_and_their_answers_come_in_order(
    monitor: Callable[[Answers], Path],
) -> None:
    def answers(request: dict[str, Any]) -> list[dict[str, Any]]:
        event = {"event": "STOP"}
        return [event, {"return": request.get("arguments"), "id": request["id"]}]

    with Qmp(monitor(answers)) as qmp:
        asked: list[tuple[str, dict[str, Any]]] = [
            ("one", {"node_name": "a"}),
            ("two", {}),
            ("three", {"x": [1]}),
        ]
        assert qmp.execute_all(asked) == [{"node-name": "a"}, None, {"x": [1]}]


def test_the_first_of_many_commands_that_is_refused_is_said(
    monitor: Callable[[Answers], Path],
) -> None:
    def answers(request: dict[str, Any]) -> list[dict[str, Any]]:
        if request["execute"] in ("two", "three"):
            error = {"class": "GenericError", "desc": f"not {request['execute']}"}
            return [{"error": error, "id": request["id"]}]
        return [{"return": {}, "id": request["id"]}]

    with Qmp(monitor(answers)) as qmp:
        with pytest.raises(QmpRefused, match="two: not two"):
            qmp.execute_all([("one", {}), ("two", {}), ("three", {}), ("four", {})])
        assert qmp.execute("five") == {}


def test_what_the_daemon_refuses_is_said(monitor: Callable[[Answers], Path]) -> None:
    def answers(request: dict[str, Any]) -> list[dict[str, Any]]:
        if request["execute"] == "qmp_capabilities":
            return [{"return": {}, "id": request["id"]}]
        return [
            {"error": {"class": "GenericError", "desc": "no such node"}, "id": request["id"]}
        ]

    with Qmp(monitor(answers)) as qmp, pytest.raises(QmpRefused, match="no such node"):
        qmp.execute("blockdev-del", node_name="x")
