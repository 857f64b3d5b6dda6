"""Waking a sandbox by using it, and what is answered where that is not allowed."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.conf import settings
from django.utils import timezone

from accounts.models import Role, Team, User
from hosts.models import Volume
from sandboxes import access, services
from sandboxes.models import Sandbox
from tests.conftest import make_key
from tests.fakes.guest_link import ADDRESS, LocalGuest

State = Sandbox.State
Make = Callable[..., Sandbox]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WAKE_TIMEOUT_S", 6.0)
    monkeypatch.setattr(access, "LOOK_AGAIN_S", 0.2)


def run(http: httpx.Client, sandbox: Sandbox) -> httpx.Response:
    body = {"type": "cmd", "cmd": {"command": ["echo", "ok"]}, "wait_until_done": True}
    return http.post(f"/sandboxes/{sandbox.id}/contexts", json=body)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def move(sandbox: Sandbox, state: State, **fields: Any) -> None:
    Sandbox.objects.filter(pk=sandbox.pk).update(state=state, **fields)


def test_one_that_starts_is_waited_for(http: httpx.Client, make_sandbox: Make) -> None:
    sandbox = make_sandbox(State.STARTING)
    timer = threading.Timer(0.7, move, (sandbox, State.RUNNING))
    timer.start()

    response = run(http, sandbox)

    timer.join()
    assert response.status_code == 201
    assert response.json()["data"]["stdout"] == "ok\n"


def test_one_that_does_not_start_in_time_is_waking_up(
    http: httpx.Client, make_sandbox: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "WAKE_TIMEOUT_S", 0.5)

    response = run(http, make_sandbox(State.RESUMING))

    assert code_of(response) == (503, "unavailable")
    assert "waking up" in response.json()["error"]["message"]


def test_many_callers_wake_a_paused_one_once(
    http: httpx.Client,
    make_sandbox: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox = make_sandbox(State.PAUSED)
    woken: list[str] = []
    lock = threading.Lock()

    def resume(*, sandbox: Sandbox) -> Sandbox:
        with lock:
            moved = Sandbox.objects.filter(pk=sandbox.pk, state=State.PAUSED).update(
                state=State.RESUMING, runtime_generation=2
            )
            woken.extend([sandbox.id] * moved)
        return sandbox

    monkeypatch.setattr(services, "resume_sandbox", resume)
    timer = threading.Timer(1.5, move, (sandbox, State.RUNNING))
    timer.start()
    answers: list[httpx.Response] = []
    callers = [
        threading.Thread(target=lambda: answers.append(run(http, sandbox))) for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    assert [answer.status_code for answer in answers] == [201] * 8
    assert woken == [sandbox.id]


def test_one_that_may_not_be_woken_is_not(http: httpx.Client, make_sandbox: Make) -> None:
    sandbox = make_sandbox(State.PAUSED, auto_resume=False)

    response = run(http, sandbox)

    assert code_of(response) == (503, "unavailable")
    assert "not running" in response.json()["error"]["message"]
    sandbox.refresh_from_db()
    assert sandbox.state == State.PAUSED


def test_a_resume_that_fails_is_told(http: httpx.Client, make_sandbox: Make) -> None:
    sandbox = make_sandbox(State.RESUMING)
    fields = {"last_error": "no disk"}
    timer = threading.Timer(0.7, move, (sandbox, State.PAUSED), fields)
    timer.start()

    response = run(http, sandbox)

    timer.join()
    assert code_of(response) == (503, "sandbox_resume_failed")
    assert "no disk" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        (State.FAILED, (503, "sandbox_resume_failed")),
        (State.TERMINATING, (404, "not_found")),
        (State.DELETED, (404, "not_found")),
    ],
)
def test_one_that_will_not_run_is_refused(
    http: httpx.Client, make_sandbox: Make, state: State, answer: tuple[int, str]
) -> None:
    sandbox = make_sandbox(state)

    assert code_of(run(http, sandbox)) == answer
    assert code_of(http.get(f"/sandboxes/{sandbox.id}/files/list?path=/")) == answer


@pytest.fixture
def asleep(make_sandbox: Make) -> Sandbox:
    return make_sandbox(State.PAUSED, auto_resume=False, address=ADDRESS)


def test_a_stranger_who_asks_for_its_files_has_nothing_opened(
    url: str, asleep: Sandbox, mallorys_team: Team, mallory_user: User
) -> None:
    _, secret = make_key(mallorys_team, mallory_user, Role.ADMIN, Role.DEVELOPER)
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=f"{url}/api/v1", headers=headers, timeout=60) as stranger:
        answers = [
            stranger.get(f"/sandboxes/{asleep.id}/files", params={"path": "/etc/hostname"}),
            stranger.get(f"/sandboxes/{asleep.id}/files/list", params={"path": "/"}),
            stranger.post(f"/sandboxes/{asleep.id}/files", params={"path": "/x"}, content=b"x"),
        ]

    assert {code_of(answer) for answer in answers} == {(404, "not_found")}
    asleep.volume.refresh_from_db()
    assert asleep.volume.attached_host is None


def test_files_of_a_paused_one_are_had_before_it_is_recorded_that_they_are_open(
    http: httpx.Client,
    asleep: Sandbox,
    guest: LocalGuest,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "AT_THE_GATE_S", 60.0)
    volume = asleep.volume
    (folder / "f").write_bytes(b"asleep")
    asked: list[str] = []

    def open_files(*, sandbox: Sandbox) -> Volume:
        asked.append(sandbox.id)
        threading.Timer(0.3, guest.serve_paused_files, (volume.id.hex,)).start()
        volume.attached_host = sandbox.host
        return volume

    monkeypatch.setattr(services, "request_files", open_files)

    read = http.get(f"/sandboxes/{asleep.id}/files", params={"path": f"{folder}/f"})
    guest.drop_paused_files(volume.id.hex)

    assert (read.status_code, read.content) == (200, b"asleep")
    assert asked == [asleep.id]


def test_files_that_do_not_open_in_time_are_waited_for_the_long_way(
    http: httpx.Client,
    asleep: Sandbox,
    guest: LocalGuest,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "AT_THE_GATE_S", 0.3)
    volume = asleep.volume
    (folder / "f").write_bytes(b"asleep")
    # As while e2fsck runs: there is a socket, and nobody answers.
    silent = socket.socket(socket.AF_UNIX)
    path = guest.files_dir / f"{volume.id.hex}.sock"
    asked: list[str] = []

    def open_files(*, sandbox: Sandbox) -> Volume | None:
        asked.append(sandbox.id)
        if len(asked) == 1:
            silent.bind(str(path))
            silent.listen()
            volume.attached_host = sandbox.host
            return volume
        silent.close()
        path.unlink()
        guest.serve_paused_files(volume.id.hex)
        fields = {"attached_for": "files", "attached_host": sandbox.host}
        Volume.objects.filter(pk=volume.pk).update(files_ready_at=timezone.now(), **fields)
        return None

    monkeypatch.setattr(services, "request_files", open_files)

    read = http.get(f"/sandboxes/{asleep.id}/files", params={"path": f"{folder}/f"})
    guest.drop_paused_files(volume.id.hex)

    assert (read.status_code, read.content) == (200, b"asleep")
    assert len(asked) == 2


def test_files_of_a_paused_one_are_served_without_waking_it(
    http: httpx.Client,
    asleep: Sandbox,
    guest: LocalGuest,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    volume = asleep.volume
    asked: list[str] = []

    def open_files(*, sandbox: Sandbox) -> None:
        asked.append(sandbox.id)
        if len(asked) == 1:
            guest.serve_paused_files(volume.id.hex)
            type(volume).objects.filter(pk=volume.pk).update(
                attached_for="files",
                attached_host=sandbox.host,
                files_ready_at=sandbox.created_at,
            )

    monkeypatch.setattr(services, "request_files", open_files)
    url = f"/sandboxes/{asleep.id}/files"

    written = http.post(url, params={"path": f"{folder}/f"}, content=b"asleep")
    read = http.get(url, params={"path": f"{folder}/f"})
    guest.drop_paused_files(volume.id.hex)
    guest.serve_paused_files(volume.id.hex)
    after = http.get(url, params={"path": f"{folder}/f"})
    guest.drop_paused_files(volume.id.hex)

    assert written.status_code == 200
    assert (folder / "f").read_bytes() == read.content == after.content == b"asleep"
    asleep.refresh_from_db()
    assert asleep.state == State.PAUSED
