"""`POST …/contexts` and what follows, through the unmodified SDK."""

import base64
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import sandbox0
from sandbox0.errors import APIError
from sandbox0.sandbox import CmdOptions

from common.api.routing import hold_no_thread
from sandboxes import contexts
from sandboxes.models import Sandbox
from tests.fakes.guest_link import LocalGuest, wait_until


def sh(script: str, **options: Any) -> CmdOptions:
    return CmdOptions(command=["/bin/sh", "-c", script], **options)


def test_a_command_gives_its_output_and_exit_code(box: sandbox0.Sandbox) -> None:
    result = box.cmd("x", sh("echo out; echo err >&2; exit 7"))

    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)
    assert result.state == "stopped"
    assert sorted(result.output_raw.split()) == ["err", "out"]


@pytest.mark.parametrize(
    ("script", "exit_code"),
    [
        ("nosuchprogram", 127),
        ("/etc/passwd", 126),
        ("kill -9 $$", 137),
        ("kill -SEGV $$", 139),
        ("exit 256", 0),
        ("exit 300", 44),
        ("cat", 0),
        ("echo 'unclosed", 2),
    ],
)
def test_exit_codes_are_those_of_a_shell(
    box: sandbox0.Sandbox, script: str, exit_code: int
) -> None:
    assert box.cmd("x", sh(script)).exit_code == exit_code


def test_quick_commands_give_all_their_output(box: sandbox0.Sandbox) -> None:
    def echo(_: int) -> tuple[str, int | None]:
        result = box.cmd("echo ok")
        return result.stdout, result.exit_code

    with ThreadPoolExecutor(30) as pool:
        results = list(pool.map(echo, range(100)))

    assert results == [("ok\n", 0)] * 100


def test_standard_input_is_closed_unless_the_command_is_followed(
    box: sandbox0.Sandbox,
) -> None:
    started = time.monotonic()

    assert box.cmd("cat").exit_code == 0
    assert time.monotonic() - started < 20


def test_all_bytes_arrive_and_those_that_are_no_text_also_exactly(
    http: httpx.Client, sandbox: Sandbox, folder: Path
) -> None:
    data = bytes(range(256)) * 4000
    (folder / "data").write_bytes(data)

    body = create(http, sandbox, ["cat", str(folder / "data")], wait_until_done=True)

    assert base64.b64decode(body["stdout_base64"]) == data
    assert len(body["stdout"]) > 0
    assert "truncated" not in body


def test_characters_that_are_cut_stay_whole(box: sandbox0.Sandbox, folder: Path) -> None:
    text = "é😀漢" * 30_000
    (folder / "text").write_text(text)

    result = box.cmd("x", sh(f"dd if={folder}/text bs=777 status=none"))

    assert result.stdout == result.output_raw == text


def test_a_large_output_is_cut_with_a_flag(
    http: httpx.Client, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "MAX_OUTPUT_BYTES", 100_000)

    body = create(
        http,
        sandbox,
        ["/bin/sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo end >&2; exit 3"],
        wait_until_done=True,
    )

    assert body["truncated"] is True
    assert body["stdout"] == "x" * 100_000
    assert body["stderr"] == "end\n"
    assert body["exit_code"] == 3


def test_the_environment_is_exact(box: sandbox0.Sandbox) -> None:
    variables = {
        "A": "line\nbreak",
        "B": "'\" $(id) `id`",
        "C": "back\\nslash",
        "D": "-n",
        "E": "é😀",
        "EMPTY": "",
        "LONG": "x" * 100_000,
    }

    result = box.cmd("x", CmdOptions(command=["printenv", "-0"], env_vars=variables))

    found = dict(line.split("=", 1) for line in result.stdout.split("\0") if line)
    assert found.items() >= variables.items()
    assert found["FROM_IMAGE"] == "1"


def test_it_runs_where_it_is_told(box: sandbox0.Sandbox, folder: Path) -> None:
    assert box.cmd("pwd", CmdOptions(cwd=str(folder))).stdout == f"{folder}\n"


def test_a_directory_that_is_not_there_is_refused_by_name(
    http: httpx.Client, sandbox: Sandbox
) -> None:
    error = refused(http, sandbox, {"cwd": "/no/such/directory"})

    assert error["code"] == "invalid_request"
    assert "cwd" in error["message"]


def test_a_terminal_gives_raw_output(box: sandbox0.Sandbox) -> None:
    result = box.cmd("x", sh("stty size; tty >/dev/null && echo yes", pty_rows=10, pty_cols=33))

    assert result.output_raw == "10 33\r\nyes\r\n"
    assert result.stdout == ""


def test_a_time_limit_ends_it(http: httpx.Client, sandbox: Sandbox) -> None:
    body = create(http, sandbox, ["sleep", "60"], wait_until_done=True, ttl_sec=1)

    assert body["timed_out"] is True
    assert body["exit_code"] == 143
    assert "ttl_sec" in body["reason"]


def test_a_context_is_polled_until_it_has_ended(box: sandbox0.Sandbox) -> None:
    """What the SDK's OpenAI adapter does."""
    started = box.cmd("x", sh("sleep 0.3; echo late", wait=False))
    wait_until(lambda: not box.get_context(started.context_id).running)

    context = box.get_context(started.context_id)

    assert (context.stdout, context.exit_code, context.state) == ("late\n", 0, "stopped")
    assert started.context_id in [one.id for one in box.list_contexts()]
    box.delete_context(started.context_id)
    with pytest.raises(APIError) as caught:
        box.get_context(started.context_id)
    assert caught.value.status_code == 404


def test_deleting_a_context_ends_its_whole_group(box: sandbox0.Sandbox, folder: Path) -> None:
    started = box.cmd("x", sh(f"sleep 300 & echo $! > {folder}/pid; wait", wait=False))
    wait_until(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip())

    box.delete_context(started.context_id)

    pid = (folder / "pid").read_text().strip()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_signals_and_input_reach_it(box: sandbox0.Sandbox) -> None:
    started = box.cmd("x", sh("read line; echo got $line; sleep 60", wait=False))

    box.context_input(started.context_id, "héllo\n")
    wait_until(lambda: box.get_context(started.context_id).stdout == "got héllo\n")
    box.context_signal(started.context_id, "SIGKILL")

    wait_until(lambda: not box.get_context(started.context_id).running)
    assert box.get_context(started.context_id).exit_code == 137


def test_a_terminal_is_resized(box: sandbox0.Sandbox) -> None:
    script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.1; done"
    started = box.cmd("x", sh(script, wait=False, pty_rows=10, pty_cols=10))
    wait_until(lambda: "ready" in str(box.get_context(started.context_id).output_raw))

    box.context_resize(started.context_id, 44, 55)

    wait_until(lambda: "44 55" in str(box.get_context(started.context_id).output_raw))


@pytest.mark.parametrize(
    ("act", "body", "answer"),
    [
        ("input", {"data": "x"}, (410, "process_finished")),
        ("signal", {"signal": "TERM"}, (410, "process_finished")),
        ("signal", {"signal": "NOSUCH"}, (400, "bad_request")),
        ("signal", {"signal": "65"}, (400, "bad_request")),
        ("resize", {"rows": 1, "cols": 1}, (400, "pty_unavailable")),
        ("resize", {"rows": 0, "cols": 1}, (400, "bad_request")),
        ("exec", {"data": "x"}, (400, "invalid_request")),
        ("restart", {}, (400, "invalid_request")),
    ],
)
def test_what_a_finished_context_cannot_do_is_refused(
    http: httpx.Client,
    sandbox: Sandbox,
    act: str,
    body: dict[str, object],
    answer: tuple[int, str],
) -> None:
    context = create(http, sandbox, ["true"], wait_until_done=True)

    response = http.post(f"/sandboxes/{sandbox.id}/contexts/{context['id']}/{act}", json=body)

    assert (response.status_code, response.json()["error"]["code"]) == answer


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"type": "repl"}, "type"),
        ({"cmd": {"command": []}}, "cmd.command"),
        ({"cmd": {"command": [""]}}, "cmd.command"),
        ({"cmd": {"command": "ls"}}, "cmd.command"),
        ({"cmd": {"command": ["a\0b"]}}, "cmd.command.0"),
        ({"cmd": {"command": ["x" * 200_000]}}, "cmd.command"),
        ({"repl": {"alias": "python"}}, "repl"),
        ({"pty_size": {"rows": 0, "cols": 1}}, "pty_size.rows"),
        ({"ttl_sec": -1}, "ttl_sec"),
        ({"env_vars": {"A B": ""}}, "env_vars.A B"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_bad_request_is_refused_by_name(
    http: httpx.Client, sandbox: Sandbox, body: dict[str, object], field: str
) -> None:
    error = refused(http, sandbox, body)

    assert error["code"] == "bad_request"
    assert field in error["details"]


def test_a_command_is_run_once_though_the_link_breaks(
    http: httpx.Client, sandbox: Sandbox, guest: LocalGuest, folder: Path
) -> None:
    script = f"echo run >> {folder}/runs; echo before; sleep 2; echo after; exit 5"
    cutter = threading.Timer(1.0, guest.cut)
    cutter.start()

    body = create(http, sandbox, ["/bin/sh", "-c", script], wait_until_done=True)

    cutter.join()
    assert (body["stdout"], body["exit_code"]) == ("before\nafter\n", 5)
    assert (folder / "runs").read_text() == "run\n"


def test_a_client_that_leaves_leaves_the_command_running(
    http: httpx.Client, sandbox: Sandbox, folder: Path
) -> None:
    script = f"sleep 1; echo done > {folder}/done"
    with pytest.raises(httpx.ReadTimeout):
        http.post(
            f"/sandboxes/{sandbox.id}/contexts",
            json=wanted(["/bin/sh", "-c", script], wait_until_done=True),
            timeout=0.6,
        )

    wait_until((folder / "done").exists)


def test_commands_that_wait_do_not_slow_a_list_down(
    http: httpx.Client, sandbox: Sandbox, folder: Path
) -> None:
    # Django's test client, used by other tests, undoes it.
    hold_no_thread()
    waiting = 300
    present = threading.active_count()
    # Who opens it to read waits, without using the machine, until someone opens it to write.
    os.mkfifo(folder / "go")
    limits = httpx.Limits(max_connections=waiting + 5)
    with (
        httpx.Client(
            base_url=http.base_url, headers=http.headers, timeout=120, limits=limits
        ) as many,
        ThreadPoolExecutor(waiting) as pool,
    ):
        script = f"echo x >> {folder}/started; read _ < {folder}/go"
        runs = [
            pool.submit(create, many, sandbox, ["/bin/sh", "-c", script], wait_until_done=True)
            for _ in range(waiting)
        ]
        started = folder / "started"
        wait_until(lambda: started.exists() and started.read_text().count("x") == waiting, 100)
        threads = threading.active_count() - waiting - present

        before = time.monotonic()
        listed = many.get("/sandboxes")
        took_s = time.monotonic() - before
        (folder / "go").write_text("go\n" * waiting)
        ended = {run.result()["state"] for run in runs}

    assert listed.status_code == 200
    assert took_s < 5
    assert threads < 30
    assert ended == {"stopped"}


def wanted(command: list[str], **more: object) -> dict[str, object]:
    return {"type": "cmd", "cmd": {"command": command}, **more}


def create(
    http: httpx.Client, sandbox: Sandbox, command: list[str], **more: object
) -> dict[str, Any]:
    response = http.post(f"/sandboxes/{sandbox.id}/contexts", json=wanted(command, **more))
    assert response.status_code == 201, response.text
    data: dict[str, Any] = response.json()["data"]
    return data


def refused(http: httpx.Client, sandbox: Sandbox, body: dict[str, object]) -> dict[str, Any]:
    response = http.post(f"/sandboxes/{sandbox.id}/contexts", json=wanted(["true"]) | body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error
