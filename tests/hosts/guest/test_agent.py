import hashlib
import os
import pty
import signal
import stat
import termios
import time
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hosts.guest import protocol
from tests.hosts.guest.agents import Agent, Client, running_agent

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with running_agent(tmp_path_factory.mktemp("agent")) as running:
        yield running


def alive(text: str) -> list[str]:
    """The processes that have `text` on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if text.encode() in line and path.parent.name != str(os.getpid()):
            found.append(path.parent.name)
    return found


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for what a busy machine does in its own time."""
    deadline_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_three_hundred_quick_commands_lose_nothing(agent: Agent) -> None:
    for _ in range(300):
        result = agent.run("echo", "ok")
        assert (result.out, result.err, result.code) == (b"ok\n", b"", 0)


def test_a_hundred_quick_commands_at_once_lose_nothing(agent: Agent) -> None:
    with ThreadPoolExecutor(100) as pool:
        results = list(pool.map(lambda _: agent.run("echo", "ok"), range(100)))

    assert [(result.out, result.code) for result in results] == [(b"ok\n", 0)] * 100


@pytest.mark.parametrize(
    ("script", "out", "code"),
    [
        ("cat <<'EOF'\n$x `y`\nEOF", b"$x `y`\n", 0),
        ("echo 'unclosed", b"", 2),
        ("set -e; false; echo no", b"", 1),
        ("exit 7", b"", 7),
        ("exec true", b"", 0),
        ("exit 256", b"", 0),
        ("exit 300", b"", 44),
        ("kill -9 $$", b"", 137),
        ("kill -SEGV $$", b"", 139),
        ("nosuch", b"", 127),
    ],
)
def test_exit_codes_and_output_are_those_of_a_shell(
    agent: Agent, script: str, out: bytes, code: int
) -> None:
    result = agent.sh(script)

    assert (result.out, result.code) == (out, code)
    assert agent.sh("echo alive").out == b"alive\n"


def test_a_program_that_is_missing_or_no_program_says_so_on_stderr(
    agent: Agent, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    script = tmp_path / "script"
    script.write_text("echo run by sh: $1\n")
    script.chmod(0o755)

    missing = agent.run("nosuch")
    absent = agent.run("/no/such")
    unexecutable = agent.run(str(plain))
    folder = agent.run(str(tmp_path))
    without_shebang = agent.run(str(script), "a b")

    assert (missing.code, missing.err) == (127, b"nosuch: command not found\n")
    assert (absent.code, absent.err) == (127, b"/no/such: No such file or directory\n")
    assert (unexecutable.code, unexecutable.err[-19:]) == (126, b" Permission denied\n")
    assert folder.code == 126
    assert (without_shebang.code, without_shebang.out) == (0, b"run by sh: a b\n")


def test_states_tell_who_ended_a_command(agent: Agent) -> None:
    assert agent.run("false").context["state"] == "stopped"
    crashed = agent.sh("kill -SEGV $$").context
    assert (crashed["state"], crashed["signal"]) == ("crashed", signal.SIGSEGV)
    with agent.connect(op="context.run", id="killed", argv=["sleep", "60"]) as client:
        assert agent.ask(op="context.signal", id="killed", signal="SIGTERM")["ok"]
        killed = client.result().context
    assert (killed["state"], killed["exit_code"]) == ("killed", 143)


def test_input_is_at_its_end_unless_it_was_asked_for(agent: Agent) -> None:
    started_s = time.monotonic()

    assert agent.run("cat").code == 0
    with agent.connect(op="context.run", id="open", argv=["cat"], stdin="open") as client:
        client.send(protocol.INPUT, b"hello")
        client.send(protocol.CLOSE_INPUT)
        assert client.result().out == b"hello"
    # One that never reads ends although its input stays open.
    assert agent.run("echo", "hi", stdin="open").out == b"hi\n"
    assert time.monotonic() - started_s < 5


def test_ten_mebibytes_of_input_arrive_whole(agent: Agent) -> None:
    data = os.urandom(MIB)
    with agent.connect(op="context.run", id="wc", argv=["sha256sum"], stdin="open") as client:
        for _ in range(10):
            client.send(protocol.INPUT, data)
        client.send(protocol.CLOSE_INPUT)

        assert client.result().out.split()[0].decode() == hashlib.sha256(data * 10).hexdigest()


def test_input_can_be_given_by_another_connection(agent: Agent) -> None:
    data = os.urandom(3 * MIB)
    with agent.connect(op="context.run", id="fed", argv=["sha256sum"], stdin="open") as reader:
        reader.document()
        with agent.connect(op="context.input", id="fed") as writer:
            assert writer.document()["ok"]
            for start in range(0, len(data), MIB):
                writer.send(protocol.INPUT, data[start : start + MIB])
            writer.say({"event": "end"})
            assert writer.document() == {"event": "accepted", "bytes": len(data)}
        with agent.connect(op="context.input", id="fed") as writer:
            writer.document()
            writer.send(protocol.CLOSE_INPUT)
            assert writer.document()["event"] == "accepted"
        frame = reader.frame()

    assert frame is not None
    assert frame.payload.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_input_that_is_never_read_is_refused_in_the_end(agent: Agent) -> None:
    agent.ask(op="context.create", id="deaf", argv=["sleep", "60"], stdin="open")
    with agent.connect(op="context.input", id="deaf") as writer:
        assert writer.document()["ok"]
        for _ in range(3):
            writer.send(protocol.INPUT, bytes(MIB))
        writer.say({"event": "end"})

        assert writer.document()["error"]["code"] == "input_buffer_full"
    agent.ask(op="context.delete", id="deaf")


def test_all_bytes_arrive_exactly(agent: Agent, tmp_path: Path) -> None:
    every = bytes(range(256))
    text = "é😀漢".encode() * 30_000
    (tmp_path / "every").write_bytes(every)
    (tmp_path / "text").write_bytes(text)

    assert agent.run("cat", str(tmp_path / "every")).out == every
    odd = agent.run("dd", f"if={tmp_path / 'text'}", "bs=7", "status=none")
    assert odd.out == text
    noise = agent.sh(f"head -c 1000000 /dev/urandom | tee {tmp_path / 'noise'}")
    assert noise.out == (tmp_path / "noise").read_bytes()


def test_environment_and_arguments_are_exact(agent: Agent) -> None:
    values = {
        "NEWLINE": "a\nb", "QUOTES": "'\"`", "SUBST": "$(id)", "BACKSLASH": "\\n", "DASH": "-n",
        "UTF8": "é😀", "EMPTY": "", "LONG": "x" * 100_000,
        "RAW": b"\xff\xfe".decode(errors="surrogateescape"),
    }  # fmt: skip

    out = agent.run("printenv", "-0", env=values).out

    seen = dict(entry.split(b"=", 1) for entry in out.split(b"\0") if entry)
    for name, value in values.items():
        assert seen[name.encode()] == value.encode(errors="surrogateescape")
    assert agent.run("printf", "%s|", "-n", "", "a b", "\\n").out == b"-n||a b|\\n|"


def test_a_script_of_megabytes_runs_as_input(agent: Agent) -> None:
    script = b"# " + b"x" * 3_000_000 + b"\necho done\n"
    with agent.connect(op="context.run", id="long", argv=["bash"], stdin="open") as client:
        for start in range(0, len(script), MIB):
            client.send(protocol.INPUT, script[start : start + MIB])
        client.send(protocol.CLOSE_INPUT)
        assert client.result().out == b"done\n"


def test_an_argument_too_long_for_linux_is_refused_clearly(agent: Agent) -> None:
    result = agent.sh("#" * 200_000)

    assert (result.code, result.err) == (126, b"bash: Argument list too long\n")


def test_a_slow_reader_gets_all_of_a_long_output(agent: Agent, tmp_path: Path) -> None:
    piece = os.urandom(MIB)
    (tmp_path / "piece").write_bytes(piece)
    script = f"for i in $(seq 200); do cat {tmp_path}/piece; done"
    digest = hashlib.sha256()
    received = 0
    with agent.connect(op="context.run", id="slow", argv=["bash", "-c", script]) as client:
        client.document()
        time.sleep(1)  # by now all that may wait on the way does
        assert agent.resident_bytes() < 100 * MIB
        while (frame := client.frame()) is not None and frame.kind == protocol.STDOUT:
            received += len(frame.payload)
            digest.update(frame.payload)
            if received % (20 * MIB) < len(frame.payload):
                time.sleep(0.1)
        assert frame is not None
        context = frame.document()["context"]

    assert received == 200 * MIB == context["stdout_bytes"]
    assert digest.hexdigest() == hashlib.sha256(piece * 200).hexdigest()
    assert agent.resident_bytes() < 100 * MIB


def test_a_vanished_reader_holds_nothing_back(agent: Agent) -> None:
    command = "yes | head -c 500M; echo end >&2"
    client = agent.connect(op="context.run", id="chatty", argv=["bash", "-c", command])
    client.document()
    client.frame()
    client.socket.close()

    slowest_s = 0.0
    deadline_s = time.monotonic() + 240
    while agent.ask(op="context.get", id="chatty")["context"]["running"]:
        assert time.monotonic() < deadline_s
        started_s = time.monotonic()
        assert agent.run("echo", "ok").out == b"ok\n"
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        time.sleep(0.2)

    context = agent.ask(op="context.get", id="chatty")["context"]
    assert context["stdout_bytes"] == 500 * MIB
    assert 0 < context["stdout_bytes"] - context["dropped_bytes"] <= MIB
    assert agent.resident_bytes() < 100 * MIB
    assert slowest_s < 10
    with agent.connect(op="context.attach", id="chatty") as late:
        result = late.result()
    assert len(result.out) == context["stdout_bytes"] - context["dropped_bytes"]
    assert result.err == b"end\n"


def test_output_of_single_bytes_keeps_memory_bounded(agent: Agent) -> None:
    script = "import os\nfor _ in range(150000): os.write(1, b'o'); os.write(2, b'e')"
    result = agent.run("python3", "-c", script, id="bytewise")

    assert (len(result.out), len(result.err)) == (150_000, 150_000)
    assert agent.resident_bytes() < 100 * MIB


def test_time_to_live_ends_a_command_and_what_it_started(agent: Agent) -> None:
    started_s = time.monotonic()

    result = agent.sh("sleep 4321 & sleep 4322", ttl_s=0.5)

    assert 0.4 < time.monotonic() - started_s < 4
    assert (result.context["timed_out"], result.context["state"]) == (True, "killed")
    assert result.code == 143
    wait_until(lambda: not alive("sleep\x00432"))


def test_one_that_ignores_term_is_killed_five_seconds_later(agent: Agent) -> None:
    started_s = time.monotonic()

    result = agent.sh("trap '' TERM; while :; do sleep 0.1; done", ttl_s=0.2)

    assert 5 < time.monotonic() - started_s < 8
    assert result.code == 137


def test_idleness_ends_a_command_but_activity_does_not(agent: Agent) -> None:
    busy = agent.sh("for i in 1 2 3 4 5; do echo $i; sleep 0.3; done", idle_timeout_s=1)
    idle = agent.sh("echo once; sleep 60", idle_timeout_s=0.5)

    assert (busy.code, busy.context["timed_out"]) == (0, False)
    assert (idle.out, idle.context["timed_out"]) == (b"once\n", True)


def test_delete_leaves_no_process_of_the_session(agent: Agent) -> None:
    agent.ask(op="context.create", id="tree", argv=["bash", "-c", "sleep 5432 & sleep 5433"])
    wait_until(lambda: len(alive("sleep\x00543")) == 2)

    assert agent.ask(op="context.delete", id="tree")["ok"]

    assert not alive("sleep\x00543")
    assert agent.ask(op="context.get", id="tree")["error"]["code"] == "context_not_found"


def test_what_runs_on_in_the_background_does_not_keep_a_command_open(agent: Agent) -> None:
    started_s = time.monotonic()

    result = agent.sh("(sleep 2; echo late) & echo early", id="parent")

    assert (result.out, result.code) == (b"early\n", 0)
    assert time.monotonic() - started_s < 1.5

    def output() -> bytes:
        with agent.connect(op="context.attach", id="parent") as client:
            return client.result().out

    give_up_at_s = time.monotonic() + 20
    while output() != b"early\nlate\n" and time.monotonic() < give_up_at_s:
        time.sleep(0.2)
    assert output() == b"early\nlate\n"


def test_one_id_is_one_command(agent: Agent, tmp_path: Path) -> None:
    question = {
        "op": "context.create", "id": "once",
        "argv": ["bash", "-c", f"echo x >> {tmp_path}/count; sleep 0.2"],
    }  # fmt: skip

    first, second = agent.ask(**question), agent.ask(**question)

    assert first["context"]["pid"] == second["context"]["pid"]
    time.sleep(0.5)
    assert (tmp_path / "count").read_text() == "x\n"


def test_output_can_be_had_again_after_the_end(agent: Agent) -> None:
    agent.sh("echo out; echo err >&2", id="again")

    with agent.connect(op="context.output", id="again") as client:
        assert client.document()["context"]["exit_code"] == 0
        frames = []
        while (frame := client.frame()) is not None:
            frames.append((frame.kind, frame.payload))

    assert sorted(frames[:-1]) == [(protocol.STDERR, b"err\n"), (protocol.STDOUT, b"out\n")]
    assert frames[-1][1] == b'{"event":"end"}'


def test_attaching_from_now_gives_only_what_comes(agent: Agent) -> None:
    agent.ask(
        op="context.create", id="now", argv=["bash", "-c", "echo a; read; echo b"], stdin="open"
    )
    time.sleep(0.3)

    with agent.connect(op="context.attach", id="now", **{"from": "now"}) as client:
        client.send(protocol.INPUT, b"\n")
        assert client.result().out == b"b\n"


def test_a_terminal_is_one(agent: Agent) -> None:
    result = agent.sh(
        "tty; stty size; echo $TERM; ps -o tty= -p $$", pty={"rows": 33, "cols": 101}
    )

    lines = result.pty.decode().split()
    assert lines[0].startswith("/dev/pts/")
    assert lines[1:4] == ["33", "101", "xterm-256color"]
    assert lines[4] == lines[0].removeprefix("/dev/")
    assert result.code == 0


def test_resize_reaches_the_program_under_load(agent: Agent) -> None:
    script = "for i in $(seq 20000); do echo $i; done; read; stty size"
    with agent.connect(
        op="context.run",
        id="resized",
        argv=["bash", "-c", script],
        pty={"rows": 24, "cols": 80},
    ) as client:
        for columns in range(81, 131):
            client.say({"op": "resize", "rows": 40, "cols": columns})
        client.send(protocol.INPUT, b"\n")
        result = client.result()

    lines = result.pty.split()
    assert [int(line) for line in lines if b"\n" not in line][:20000] == list(range(1, 20001))
    assert lines[-2:] == [b"40", b"130"]


def test_a_megabyte_pasted_into_a_terminal_arrives(agent: Agent, tmp_path: Path) -> None:
    pasted = b"".join(f"line {n} é😀\n".encode() for n in range(60_000))
    with agent.connect(
        op="context.run",
        id="paste",
        argv=["bash", "-c", f"stty -echo; cat > {tmp_path}/f"],
        pty={"rows": 24, "cols": 80},
    ) as client:
        time.sleep(0.5)
        for start in range(0, len(pasted), 50_000):
            client.send(protocol.INPUT, pasted[start : start + 50_000])
        client.send(protocol.CLOSE_INPUT)
        assert client.result().code == 0

    assert (tmp_path / "f").read_bytes() == pasted


def test_interrupting_a_terminal_ends_what_is_in_front(agent: Agent) -> None:
    with agent.connect(
        op="context.run", id="int", argv=["bash", "-i"], pty={"rows": 24, "cols": 80}
    ) as client:
        client.send(protocol.INPUT, b"sleep 7654\n")
        wait_until(lambda: bool(alive("sleep\x007654")))
        assert agent.ask(op="context.signal", id="int", signal="INT")["ok"]
        client.send(protocol.INPUT, b"echo code $?; exit 3\n")
        result = client.result()

    assert b"code 130" in result.pty
    assert result.code == 3


def test_a_slow_reader_of_a_terminal_gets_its_last_words(agent: Agent) -> None:
    for attempt in range(10):
        with agent.connect(
            op="context.run",
            id=f"last{attempt}",
            argv=["seq", "200000"],
            pty={"rows": 24, "cols": 80},
        ) as client:
            time.sleep(0.2)
            result = client.result()
        assert result.pty.split() == [str(n).encode() for n in range(1, 200_001)]


def test_mistakes_are_named(agent: Agent) -> None:
    agent.run("true", id="ended")
    new: dict[str, object] = {"op": "context.create", "id": "x", "argv": ["ls"]}
    questions: list[tuple[dict[str, object], str]] = [
        ({"op": "nonsense"}, "invalid_request"),
        ({}, "invalid_request"),
        (new | {"argv": []}, "invalid_request"),
        (new | {"argv": "ls"}, "invalid_request"),
        (new | {"argv": ["a\0b"]}, "invalid_request"),
        (new | {"id": "../x"}, "invalid_request"),
        (new | {"cwd": "/nope"}, "invalid_request"),
        (new | {"env": {"A=B": "c"}}, "invalid_request"),
        (new | {"env": {"A": 1}}, "invalid_request"),
        (new | {"ttl_s": -1}, "invalid_request"),
        (new | {"pty": {"rows": 0, "cols": 9}}, "invalid_request"),
        ({"op": "context.get", "id": "nope"}, "context_not_found"),
        ({"op": "context.signal", "id": "ended", "signal": "TERM"}, "process_finished"),
        ({"op": "context.input", "id": "ended"}, "process_finished"),
        ({"op": "context.resize", "id": "ended", "rows": 1, "cols": 1}, "pty_unavailable"),
    ]
    for question, code in questions:
        answer = agent.ask(**question)
        assert (answer["ok"], answer["error"]["code"]) == (False, code), question


def test_garbage_closes_its_connection_and_no_other(agent: Agent) -> None:
    with agent.connect(op="context.run", id="bystander", argv=["sleep", "0.5"]) as bystander:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"J\xff\xff\xff\xff", b"J\x00\x00\x00\x01{"):
            with Client(agent.path) as raw:
                raw.socket.sendall(garbage)
                assert raw.document()["error"]["code"] == "invalid_request"
                assert raw.frame() is None
        assert bystander.result().code == 0


def test_only_root_may_open_the_socket(agent: Agent) -> None:
    assert stat.S_IMODE(agent.path.stat().st_mode) == 0o600


def test_the_oldest_finished_contexts_make_room(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        agent.ask(op="context.create", id="lasting", argv=["sleep", "60"])
        for number in range(1005):
            agent.ask(op="context.create", id=f"c{number}", argv=["true"])
        names = [context["id"] for context in agent.ask(op="context.list")["contexts"]]

    assert len(names) == 1000
    assert names[0] == "lasting"
    assert names[-1] == "c1004"
    assert "c5" not in names


def test_journals_share_a_bound_that_follows_the_machine(tmp_path: Path) -> None:
    with running_agent(tmp_path, memory_bytes=128 * MIB) as agent:
        for number in range(40):
            agent.run("head", "-c", "2000000", "/dev/zero", id=f"c{number}")
        assert agent.resident_bytes() < 60 * MIB
        newest = agent.ask(op="context.get", id="c39")["context"]
        assert newest["stdout_bytes"] - newest["dropped_bytes"] > 500_000


def test_signals_are_the_usual_ones_in_a_command(agent: Agent) -> None:
    result = agent.sh(
        "grep -E 'Sig(Ign|Blk)' /proc/self/status; ulimit -n; echo $$; ps -o sid= -p $$"
    )

    lines = result.out.split()
    assert lines[1] == b"0" * 16
    assert int(lines[3], 16) == 0
    assert lines[4] == b"1024"
    assert lines[5] == lines[6]


def test_no_descriptor_leaks_into_a_command(agent: Agent) -> None:
    assert agent.run("ls", "/proc/self/fd").out.split() == [b"0", b"1", b"2", b"3"]


def test_the_port_answers_each_line_by_its_id(tmp_path: Path) -> None:
    host, guest = pty.openpty()
    tty.setraw(guest, termios.TCSANOW)
    with running_agent(tmp_path, port=os.ttyname(guest)):
        os.write(host, b'half a line of before\n{"id":"1","op":"ping"}\n{"id":"2","op":"no"}\n')
        received = b""
        while received.count(b"\n") < 2:
            received += os.read(host, 4096)

    first, second = received.splitlines()
    assert protocol.parse_document(first) == {
        "id": "1",
        "ok": True,
        "ready": True,
        "boot_id": "b",
        "uptime_s": 1,
    }
    assert protocol.parse_document(second)["error"]["code"] == "invalid_request"
    os.close(host)
    os.close(guest)
