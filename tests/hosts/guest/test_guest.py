"""The real images, booted by QEMU: what only a whole machine can show."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import asyncssh
import pytest

from hosts.guest import protocol
from hosts.guest.channel import AgentSilent
from hosts.guest.probe import boots, known_accelerator
from hosts.guest.protocol import Decoder, Frame
from tests.hosts.guest.machines import (
    IMAGES,
    Guest,
    file_system_check,
    make_small,
    new_guest,
)

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

GIB = 1024**3
MIB = 1024**2


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    made = new_guest(tmp_path)
    yield made
    assert "Kernel panic" not in made.serial()


async def ask(connection: asyncssh.SSHClientConnection, **question: Any) -> list[Frame]:
    """Ask the agent through SSH, and return all it says."""
    reader, writer = await connection.open_unix_connection(protocol.AGENT_SOCKET)
    writer.write(protocol.encode_document(question))
    decoder, frames = Decoder(), []
    while data := await reader.read(1 << 16):
        frames += decoder.feed(data)
    writer.close()
    return frames


async def run(connection: asyncssh.SSHClientConnection, *argv: str, **params: Any) -> Any:
    """Run a command in a context: (stdout or terminal, stderr, exit code)."""
    name = f"c{time.monotonic_ns()}"
    frames = await ask(connection, op="context.run", id=name, argv=list(argv), **params)
    out = b"".join(f.payload for f in frames if f.kind in (protocol.STDOUT, protocol.PTY))
    err = b"".join(f.payload for f in frames if f.kind == protocol.STDERR)
    return out, err, frames[-1].document()["context"]["exit_code"]


async def test_a_guest_through_a_stop_a_power_cut_and_a_fork_bomb(guest: Guest) -> None:
    with guest.running():
        async with await guest.connect() as connection:
            await check_identity(connection, guest)
            await check_commands(connection)
            await check_files(connection)
            await check_growth(connection, guest)
        guest.channel.prepare_stop(20)
    checked = file_system_check(guest)
    assert checked.returncode == 0, checked.stdout
    assert "recovering journal" not in checked.stdout

    with guest.running(memory_mib=128):
        async with await guest.connect() as connection:
            out, _, code = await run(connection, "sha256sum", "-c", "/root/sums")
            assert (out, code) == (b"/usr/local/kept: OK\n", 0)
            assert (await run(connection, "ls", "/tmp"))[0] == b""
            await check_lack_of_memory(connection)
            await run(connection, "bash", "-c", "echo kept > /root/kept; sync")
            await ask(
                connection, op="context.create", id="writer",
                argv=["bash", "-c", "while :; do date >> /root/log; sync /root/log; done"],
            )  # fmt: skip

    # Its plug was pulled.
    with guest.running():
        async with await guest.connect() as connection:
            assert (await run(connection, "cat", "/root/kept"))[0] == b"kept\n"
            await ask(
                connection, op="context.create", id="bomb",
                argv=["bash", "-c", "trap '' TERM; f() { f & f; }; ulimit -u 300; f"],
            )  # fmt: skip
        guest.channel.prepare_stop(60)
    assert file_system_check(guest).returncode == 0


async def check_identity(connection: asyncssh.SSHClientConnection, guest: Guest) -> None:
    guest.channel.set_clock()
    out, _, _ = await run(connection, "date", "+%s.%N")
    assert abs(float(out) - time.time()) < 2
    assert (await run(connection, "hostname"))[0] == b"sb-test\n"
    assert (await run(connection, "cat", "/etc/hostname"))[0] == b"sb-test\n"
    assert (await run(connection, "cat", "/etc/machine-id"))[0] == b"5b" * 16 + b"\n"
    assert b"10.0.2.15" in (await run(connection, "ip", "-4", "addr", "show", "eth0"))[0]
    assert (await run(connection, "cat", "/etc/resolv.conf"))[0] == b"nameserver 10.0.2.3\n"
    assert (await run(connection, "getent", "hosts", "sb-test"))[2] == 0
    assert (await run(connection, "printenv", "FROM_PLATFORM"))[0] == "é\nx\n".encode()
    mounts = str((await run(connection, "cat", "/proc/mounts"))[0], "utf-8")
    for folder in ("/run", "/tmp", "/dev/shm"):
        assert f" {folder} tmpfs " in mounts
    assert " /sys/fs/cgroup cgroup2 " in mounts
    # Only keys get in.
    with pytest.raises(asyncssh.PermissionDenied):
        await asyncssh.connect(
            "127.0.0.1", guest.port, username="root", password="", known_hosts=None,
            client_keys=None, config=None, agent_path=None,
        )  # fmt: skip


async def check_commands(connection: asyncssh.SSHClientConnection) -> None:
    for _ in range(30):
        assert await run(connection, "echo", "ok") == (b"ok\n", b"", 0)
    assert await run(connection, "nosuch") == (b"", b"nosuch: command not found\n", 127)
    out, _, _ = await run(
        connection, "bash", "-c", "stty size; tty", pty={"rows": 30, "cols": 99}
    )
    assert out.startswith(b"30 99\r\n/dev/pts/")
    out, _, code = await run(connection, "bash", "-c", "cat /proc/self/oom_score_adj")
    assert (out, code) == (b"0\n", 0)


async def check_files(connection: asyncssh.SSHClientConnection) -> None:
    async with connection.start_sftp_client() as sftp:
        data = bytes(range(256)) * 8192
        async with sftp.open("/usr/local/kept", "wb") as file:
            await file.write(data)
        async with sftp.open("/usr/local/kept", "rb") as file:
            assert bytes(await file.read()) == data  # type: ignore[arg-type]
    await run(
        connection, "bash", "-c", "sha256sum /usr/local/kept > /root/sums; echo x > /tmp/x"
    )
    assert (await run(connection, "bash", "-c", "exec 3<>/dev/fuse"))[2] == 0


async def check_growth(connection: asyncssh.SSHClientConnection, guest: Guest) -> None:
    before = guest.channel.stats()["disk_bytes"]
    assert guest.channel.grow() > 1.9 * before
    assert guest.channel.grow(100 * GIB) > 97 * GIB
    assert guest.channel.stats()["disk_bytes"] > 97 * GIB
    guest.channel.freeze(30)
    guest.channel.thaw()
    # One that nobody thaws thaws by itself.
    guest.channel.freeze(1)
    started_s = time.monotonic()
    assert (await run(connection, "bash", "-c", "echo x > /root/after; sync"))[2] == 0
    assert time.monotonic() - started_s < 30


async def check_lack_of_memory(connection: asyncssh.SSHClientConnection) -> None:
    script = "x = []\nwhile True: x.append(bytearray(1 << 22))"
    frames = await ask(
        connection, op="context.run", id="hungry", argv=["python3", "-c", script]
    )
    context = frames[-1].document()["context"]
    assert (context["exit_code"], context["oom_killed"]) == (137, True)
    assert await run(connection, "echo", "ok") == (b"ok\n", b"", 0)


# How far a disk of some 0.4 GiB is filled; the race is the same all the way up.
TIMES = int(os.environ.get("GROWTH_TIMES", "4"))
"""Each costs half a GiB that an emulated guest writes."""

WRITER = """
import os, sys, time
kept = os.open('/root/kept', os.O_RDWR | os.O_CREAT)
os.write(kept, b'kept')
piece = os.urandom(1 << 20)
out = os.open('/root/big', os.O_WRONLY | os.O_CREAT)
started = time.monotonic()
for number in range(int(sys.argv[1])):
    os.write(out, number.to_bytes(8, 'big') + piece[8:])
took = time.monotonic() - started
assert os.pread(kept, 4, 0) == b'kept'
assert os.readlink('/proc/self/fd/%d' % kept) == '/root/kept'
check = os.open('/root/big', os.O_RDONLY)
for number in range(0, int(sys.argv[1]), 97):
    assert os.pread(check, 8, number << 20) == number.to_bytes(8, 'big')
print(took)
"""


@pytest.mark.timeout(900 + 120 * TIMES)
async def test_a_writer_never_finds_a_small_disk_full_below_its_ceiling(
    tmp_path: Path,
) -> None:
    # A base image that is full but for 10 MB, in a device of 16 GiB.
    guest = new_guest(tmp_path, size_bytes=16 * GIB)
    made = make_small(tmp_path, guest)
    with guest.running(memory_mib=512):
        async with await guest.connect() as connection:
            count = TIMES * made.size_bytes // MIB
            out, err, code = await run(connection, "python3", "-c", WRITER, str(count))
            assert (code, err) == (0, b"")
            stats = guest.channel.stats()
        guest.channel.prepare_stop(20)
    checked = file_system_check(guest)

    assert stats["span_bytes"] > TIMES * made.size_bytes
    assert float(out) > 0
    assert stats["ceiling_bytes"] == 16 * GIB
    assert checked.returncode == 0, checked.stdout


TARGET_BYTES = 256 * GIB
"""Far enough that the kernel is surely not done when the plug is pulled."""
CUT_AFTER_S = 0.3


async def test_a_disk_that_is_full_at_its_ceiling_refuses_and_boots_again(
    tmp_path: Path,
) -> None:
    guest = new_guest(tmp_path, size_bytes=8 * GIB)
    made = make_small(tmp_path, guest)
    fill = "import os; f = open('/root/fill', 'wb', 0)\nwhile True: f.write(bytes(65536))"
    guest.more_config = {"disk_limit_bytes": made.size_bytes + 256 * MIB}
    with guest.running(memory_mib=512):
        async with await guest.connect() as connection:
            _, err, code = await run(connection, "python3", "-c", fill)
            assert code == 1
            assert b"No space left on device" in err
            stats = guest.channel.stats()
        guest.channel.prepare_stop(20)
    # It boots, tells its figures, runs what needs no space, and goes on once there is some.
    guest.more_config = {}
    with guest.running(memory_mib=512):
        async with await guest.connect() as connection:
            out, _, code = await run(
                connection, "bash", "-c", "echo x > /root/new; cat /root/new"
            )
            assert (out, code) == (b"x\n", 0)
        guest.channel.prepare_stop(20)

    assert stats["ceiling_bytes"] == made.size_bytes + 256 * MIB
    assert stats["disk_free_bytes"] < 20 * MIB
    assert file_system_check(guest).returncode == 0


CUT_WHILE_GROWING = """
import os, sys
def span_blocks():
    block = os.pread(disk, 1024, 1024)
    return int.from_bytes(block[4:8], 'little')
disk = os.open('/dev/vda', os.O_RDONLY)
kept = os.open('/root/kept', os.O_WRONLY | os.O_CREAT)
trigger = os.open('/proc/sysrq-trigger', os.O_WRONLY)
started = span_blocks()
print('ready', flush=True)
while span_blocks() < started + 2 * 32768:
    pass
os.write(kept, b'kept')
os.fsync(kept)
os.write(trigger, b'b')
"""
"""Commits the journal once groups of 32,768 blocks were added, and resets at once."""


async def test_growth_that_only_the_journal_holds_goes_on_at_the_next_start(
    tmp_path: Path,
) -> None:
    guest = new_guest(tmp_path, size_bytes=TARGET_BYTES)
    made = make_small(tmp_path, guest, spare_bytes=2 * GIB)
    with guest.running() as process:
        async with await guest.connect() as connection:
            waiter = await connection.create_process(f"python3 -c {quote(CUT_WHILE_GROWING)}")
            assert await waiter.stdout.readline() == "ready\n"
            with pytest.raises(AgentSilent):
                await asyncio.to_thread(guest.channel.grow, TARGET_BYTES)
        process.wait(60)

    with guest.running():
        between = guest.channel.stats()
        grown_bytes = guest.channel.grow(TARGET_BYTES)
        guest.channel.prepare_stop(20)

    assert made.size_bytes < between["span_bytes"] < TARGET_BYTES - GIB < grown_bytes
    assert file_system_check(guest).returncode == 0


def test_growth_that_is_cut_off_goes_on_at_the_next_start(tmp_path: Path) -> None:
    guest = new_guest(tmp_path, size_bytes=TARGET_BYTES)
    made = make_small(tmp_path, guest, spare_bytes=2 * GIB)
    with guest.running() as process:
        threading.Timer(CUT_AFTER_S, process.kill).start()
        with pytest.raises(AgentSilent):
            guest.channel.grow(TARGET_BYTES)
        process.wait()

    with guest.running():
        between = guest.channel.stats()
        grown_bytes = guest.channel.grow(TARGET_BYTES)
        guest.channel.prepare_stop(20)

    assert made.size_bytes <= between["span_bytes"] < TARGET_BYTES - GIB < grown_bytes
    assert file_system_check(guest).returncode == 0


def test_a_probe_tells_how_guests_are_run() -> None:
    chosen = known_accelerator(IMAGES)

    assert chosen is not None
    assert boots(IMAGES, chosen, deadline_s=120)
