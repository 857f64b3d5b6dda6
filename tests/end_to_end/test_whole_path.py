"""The product's whole path, through the unmodified SDK and a guest that really boots."""

import hashlib
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from decimal import Decimal

import httpx
import pytest
from sandbox0 import APIError, Client, CmdOptions, Sandbox

from tests.end_to_end.conftest import (
    Platform,
    details,
    eventually,
    pause,
    resume,
)

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def test_every_cycle_of_pause_and_resume_builds_on_the_last(
    platform: Platform, client: Client, http: httpx.Client, sandbox: Sandbox
) -> None:
    chance = random.Random(20261129)
    hashes: dict[str, str] = {}
    sandbox.cmd("mkdir -p /usr/local/share/cycles")
    for cycle in range(3):
        for number in range(4):
            path = f"/usr/local/share/cycles/{cycle}-{number}"
            body = chance.randbytes(chance.choice([0, 1, 4095, 65_537, 1_500_000]))
            sandbox.write_file(path, body)
            hashes[path] = sha256(body)
        if cycle:
            gone = f"/usr/local/share/cycles/{cycle - 1}-0"
            sandbox.delete_file(gone)
            del hashes[gone]

        pause(client, sandbox)
        platform.empty_cache()
        resume(client, sandbox)

        listing = sandbox.cmd("sh -c 'cd /usr/local/share/cycles && sha256sum *'").stdout
        found = {
            f"/usr/local/share/cycles/{name}": digest
            for digest, name in (line.split() for line in listing.splitlines())
        }
        assert found == hashes
        assert details(http, sandbox)["runtime_generation"] == cycle + 2


def test_a_whole_life(
    platform: Platform, client: Client, http: httpx.Client, sandbox: Sandbox
) -> None:
    """Install something, sleep, edit a file asleep, wake, find it, see what it cost."""
    sandbox.write_file("/usr/local/bin/greet", b"#!/bin/sh\necho hello from $*\n")
    sandbox.cmd("chmod +x /usr/local/bin/greet")
    sandbox.write_file("/etc/greeting", b"awake\n")
    sandbox.cmd("sh -c 'echo volatile > /tmp/gone; ln -s /etc/passwd /root/link'")

    pause(client, sandbox)
    asleep = details(http, sandbox)
    assert asleep["status"] == "paused"
    assert asleep["runtime_id"] == ""
    bill = Decimal(str(asleep["cost_usd"]))
    assert bill > 0

    # Read, list, stat, write, mkdir, move and delete while no machine runs.
    assert bytes(sandbox.read_file("/etc/greeting")) == b"awake\n"
    assert b"root:x:0:0" in bytes(sandbox.read_file("/root/link"))
    assert os.uname().nodename.encode() not in bytes(sandbox.read_file("/etc/hostname"))
    sandbox.write_file("/etc/greeting", b"edited asleep\n")
    sandbox.mkdir("/srv/a/b", recursive=True)
    sandbox.write_file("/srv/a/b/one", b"1")
    sandbox.move_file("/srv/a/b/one", "/srv/a/b/two")
    sandbox.write_file("/srv/a/b/three", b"3")
    sandbox.delete_file("/srv/a/b/three")
    assert {entry.name for entry in sandbox.list_files("/srv/a/b")} == {"two"}
    assert sandbox.stat_file("/srv/a/b/two").size == 1
    still = details(http, sandbox)
    assert still["status"] == "paused"
    assert Decimal(str(still["cost_usd"])) == bill

    platform.empty_cache()
    resume(client, sandbox)
    done = sandbox.cmd("sh -c 'greet $(cat /etc/greeting); cat /srv/a/b/two; ls /tmp'")
    assert done.stdout == "hello from edited asleep\n1"
    storage = details(http, sandbox)["storage"]
    assert isinstance(storage, dict)
    assert 0 < storage["fetched_bytes"] < 400_000_000
    assert Decimal(str(details(http, sandbox)["cost_usd"])) > bill


def test_commands_give_what_a_shell_gives(sandbox: Sandbox) -> None:
    def run(*command: str, **options: object) -> tuple[int | None, str, str]:
        wanted = CmdOptions(command=list(command), **options)  # type: ignore[arg-type]
        done = sandbox.cmd(command[0], wanted)
        return done.exit_code, done.stdout or "", done.stderr or ""

    assert run("sh", "-c", "echo out; echo err >&2; exit 7") == (7, "out\n", "err\n")
    assert run("nosuch")[0] == 127
    assert run("/etc/passwd")[0] == 126
    assert run("sh", "-c", "kill -9 $$")[0] == 137
    assert run("cat") == (0, "", "")
    assert run("sh", "-c", "cat <<'EOF'\n$HOME `id`\nEOF") == (0, "$HOME `id`\n", "")
    assert run("pwd", cwd="/usr") == (0, "/usr\n", "")
    odd = "a\n\"b'$(id)\\n é😀"
    assert run("printenv", "ODD", env_vars={"ODD": odd}) == (0, f"{odd}\n", "")
    assert run("hostname") == (0, f"{sandbox.id}\n", "")


def test_quick_commands_never_come_back_empty(sandbox: Sandbox) -> None:
    for number in range(200):
        done = sandbox.cmd(f"echo ok {number}")
        assert (done.stdout, done.exit_code) == (f"ok {number}\n", 0)

    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda n: sandbox.cmd(f"echo at once {n}").stdout, range(30)))
    assert answers == [f"at once {number}\n" for number in range(30)]


# The SDK opens its sockets in a way that newer websockets releases warn of.
@pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")
def test_a_command_can_be_followed_while_it_runs(sandbox: Sandbox) -> None:
    follow = sandbox.cmd_stream("sh -c 'echo one; sleep 1; echo two >&2; exit 3'")
    with closing(follow) as stream:
        outputs = [(output.source, output.data) for output in stream.iter_outputs()]
        done = stream.wait()

    assert outputs == [("stdout", "one\n"), ("stderr", "two\n")]
    assert done.exit_code == 3

    with closing(sandbox.cmd_stream("true")) as stream:
        assert stream.wait().exit_code == 0


def test_the_clock_is_right_at_the_first_command(sandbox: Sandbox) -> None:
    done = sandbox.cmd("date +%s")

    assert abs(int(done.stdout) - time.time()) < 5


def test_access_wakes_a_sleeping_sandbox_once(
    client: Client, http: httpx.Client, sandbox: Sandbox
) -> None:
    pause(client, sandbox)

    with ThreadPoolExecutor(20) as pool:
        boots = list(
            pool.map(
                lambda _: sandbox.cmd("cat /proc/sys/kernel/random/boot_id").stdout, range(20)
            )
        )

    assert len(set(boots)) == 1
    assert details(http, sandbox)["runtime_generation"] == 2


def test_a_sandbox_that_may_not_be_woken_says_so(
    client: Client, claim: Callable[..., Sandbox]
) -> None:
    sandbox = claim(auto_resume=False)
    sandbox.write_file("/root/kept", b"kept")
    pause(client, sandbox)

    with pytest.raises(APIError) as refused:
        sandbox.cmd("true")

    assert refused.value.status_code == 503
    assert bytes(sandbox.read_file("/root/kept")) == b"kept"


def test_the_soft_limit_pauses_and_the_hard_one_deletes(
    http: httpx.Client, claim: Callable[..., Sandbox]
) -> None:
    sandbox = claim(ttl=20, hard_ttl=75)

    eventually(lambda: details(http, sandbox)["status"] == "paused", "the pause")

    def is_gone() -> bool:
        return http.get(f"/api/v1/sandboxes/{sandbox.id}").status_code == 404

    eventually(is_gone, "the end")


def test_guests_reach_neither_the_host_nor_each_other(
    claim: Callable[..., Sandbox], sandbox: Sandbox
) -> None:
    other = claim()
    address = other.cmd("hostname -I").stdout.strip()
    gateway = sandbox.cmd("sh -c \"ip route | sed -n 's/^default via \\([^ ]*\\).*/\\1/p'\"")
    probe = (
        "import socket,sys\n"
        "for host, port in [a.split(':') for a in sys.argv[1:]]:\n"
        "    s = socket.socket(); s.settimeout(4)\n"
        "    try: s.connect((host, int(port))); print('reached', host, port)\n"
        "    except OSError: pass\n"
    )
    sandbox.write_file("/root/probe.py", probe.encode())
    targets = [f"{address}:22", f"{gateway.stdout.strip()}:22", "169.254.169.254:80"]

    found = sandbox.cmd("python3 /root/probe.py " + " ".join(targets))

    assert (found.stdout, found.exit_code) == ("", 0)
