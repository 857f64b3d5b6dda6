"""An object store that is away, then far slower than a guest that goes on writing."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from sandbox0 import Client, CmdOptions, Sandbox

from common.units import MiB
from tests.end_to_end.conftest import Platform, details, eventually, pause, resume

pytestmark = [pytest.mark.guest, pytest.mark.timeout(1200)]

# More than the log of a disk may take (`bin/test` gives it 128 MiB), so that writes must wait.
PIECES = 220
WRITER = """
import os, sys
piece = os.urandom(1 << 20)
out = os.open('/root/big', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for number in range(int(sys.argv[1])):
    os.write(out, number.to_bytes(8, 'big') + piece[8:])
    if number % 8 == 7:
        os.fsync(out)
os.fsync(out)
print('written')
"""
READER = """
import os, sys
big = os.open('/root/big', os.O_RDONLY)
numbers = [int.from_bytes(os.pread(big, 8, at << 20), 'big') for at in range(int(sys.argv[1]))]
assert numbers == list(range(len(numbers))), numbers
assert os.fstat(big).st_size == len(numbers) << 20
assert ' / ext4 rw,' in open('/proc/mounts').read()
print('read')
"""


def log_bytes(platform: Platform) -> int:
    """Count what the writes of all disks of this host take."""
    overlays = (platform.state_dir / "overlays").glob("*/overlay-*.qcow2")
    return sum(path.stat().st_blocks * 512 for path in overlays)


@contextmanager
def away(pid: int) -> Iterator[None]:
    """Hold the store: it takes connections and answers nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def slow(pid: int) -> Iterator[None]:
    """Let the store run a fiftieth of the time: some 2 MiB a second on a machine of tests."""
    done = threading.Event()

    def take_turns() -> None:
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.49)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)

    turns = threading.Thread(target=take_turns)
    turns.start()
    try:
        yield
    finally:
        done.set()
        turns.join()


def test_a_guest_waits_for_the_store_gets_no_error_and_catches_up(
    platform: Platform, client: Client, http: httpx.Client, sandbox: Sandbox
) -> None:
    store = platform.pid("seaweedfs")
    # What other disks keep there is little, and stored already.
    limit_bytes = 128 * MiB + log_bytes(platform)
    sandbox.write_file("/root/writer.py", WRITER.encode())
    sandbox.write_file("/root/reader.py", READER.encode())
    most_bytes = 0

    def health() -> str:
        nonlocal most_bytes
        most_bytes = max(most_bytes, log_bytes(platform))
        return str(details(http, sandbox).get("health"))

    command = ["python3", "/root/writer.py", str(PIECES)]
    started = http.post(
        f"/api/v1/sandboxes/{sandbox.id}/contexts",
        json={"type": "cmd", "cmd": {"command": command}},
    )
    context_id = started.json()["data"]["id"]
    # Python has been read by then; what else it reads is not on the host, and waits, too.
    eventually(lambda: log_bytes(platform) > limit_bytes - 120 * MiB, "the first writes")
    with away(store):
        eventually(lambda: "writes are slowed" in health(), "slowing the writer")
        eventually(lambda: "writes wait" in health(), "holding the writer")
        assert sandbox.get_context(context_id).running
    with slow(store):
        until = time.monotonic() + 20
        while time.monotonic() < until:
            health()
            time.sleep(1)

    eventually(lambda: not sandbox.get_context(context_id).running, "the writer's end")
    found = sandbox.get_context(context_id)
    assert (found.stdout, found.exit_code) == ("written\n", 0)
    eventually(lambda: health() == "None", "saying that all is well again")
    assert most_bytes <= limit_bytes

    pause(client, sandbox)
    platform.empty_cache()
    resume(client, sandbox)
    read = sandbox.cmd("read", CmdOptions(command=["python3", "/root/reader.py", str(PIECES)]))
    assert (read.stdout, read.exit_code) == ("read\n", 0)
