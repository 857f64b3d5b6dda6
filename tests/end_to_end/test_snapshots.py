"""Snapshots, forks and the history of a guest that really runs, through the SDK."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sandbox0 import APIError, Client, Sandbox
from sandbox0.apispec.models.create_context_request import CreateContextRequest
from sandbox0.apispec.models.restore_sandbox_root_fs_request import (
    RestoreSandboxRootFSRequest as Restore,
)

from tests.end_to_end.conftest import details, eventually, pause, resume

pytestmark = [pytest.mark.guest, pytest.mark.timeout(1200)]

# Each number replaces one file and then another: at any moment the second has the first's
# number or the one before it.
WRITER = """
mkdir -p /srv/count; cd /srv/count; i=0
while :; do
  i=$((i+1)); echo $i > part; mv part begun; echo $i > part; mv part done
done
"""
WHO_AM_I = (
    "sh -c 'hostname; cat /etc/machine-id; sha256sum /run/sandkeep/ssh/host_key; "
    "ip -4 -o addr show eth0'"
)


@pytest.fixture
def forks(client: Client) -> Iterator[list[str]]:
    """Ids of forks, which are deleted when the test ends."""
    made: list[str] = []
    yield made
    for sandbox_id in made:
        try:
            client.sandboxes.delete(sandbox_id)
        except APIError as error:
            if error.status_code != 404:
                raise


def who_is(sandbox: Sandbox) -> list[str]:
    """Return name, machine id, host key and address of a guest."""
    name, machine_id, key, address = sandbox.cmd(WHO_AM_I).stdout.splitlines()
    return [name, machine_id, key.split()[0], address.split()[3].partition("/")[0]]


def test_a_running_sandbox_is_kept_forked_and_put_back(
    client: Client,
    http: httpx.Client,
    sandbox: Sandbox,
    forks: list[str],
) -> None:
    sandbox.write_file("/srv/marker", b"as it was")
    start_writer(sandbox)

    snapshot = client.sandboxes.create_rootfs_snapshot(sandbox.id)
    before = int(bytes(sandbox.read_file("/srv/count/done")))
    eventually(
        lambda: int(bytes(sandbox.read_file("/srv/count/begun"))) > before,
        "the writer writes on",
    )
    sandbox.write_file("/srv/marker", b"changed")

    # Ten at once, while it writes.
    with ThreadPoolExecutor(10) as pool:
        made = list(pool.map(lambda _: client.sandboxes.fork(sandbox.id), range(10)))
    forks += [one.sandbox.id for one in made]
    assert len(set(forks)) == 10
    assert all(one.sandbox.paused for one in made)

    # A fork is a machine of its own, with the files of its parent.
    child = client.sandbox(forks[0])
    resume(client, child)
    mine, theirs = who_is(sandbox), who_is(child)
    assert mine[0] == sandbox.id
    assert theirs[0] == child.id
    assert all(one != other for one, other in zip(mine, theirs, strict=True)), (mine, theirs)
    assert bytes(child.read_file("/srv/marker")) == b"changed"
    begun, done = counts(child)
    assert done in {begun - 1, begun}
    assert done >= before

    # And a fork of the fork.
    child.write_file("/srv/marker", b"the fork's")
    grandchild = client.sandboxes.fork(child.id)
    forks.append(grandchild.sandbox.id)
    asleep = client.sandbox(grandchild.sandbox.id)
    assert bytes(asleep.read_file("/srv/marker")) == b"the fork's"
    client.sandboxes.delete(child.id)

    # The parent goes back to the snapshot, and forward again by its history.
    pause(client, sandbox)
    later = details(http, sandbox)["storage"]["generation"]  # type: ignore[index]
    client.sandboxes.restore_rootfs(sandbox.id, Restore(snapshot_id=snapshot.id))
    assert bytes(sandbox.read_file("/srv/marker")) == b"as it was"
    read = http.get(
        f"/api/v1/sandboxes/{sandbox.id}/files",
        params={"path": "/srv/marker", "generation": later},
    )
    assert read.content == b"changed"
    resume(client, sandbox)
    assert bytes(sandbox.read_file("/srv/marker")) == b"as it was"
    begun, done = counts(sandbox)
    assert done in {begun - 1, begun}
    assert done <= before


def start_writer(sandbox: Sandbox) -> None:
    request = CreateContextRequest.from_dict(
        {"type": "cmd", "cmd": {"command": ["sh", "-c", WRITER]}, "wait_until_done": False}
    )
    sandbox.create_context(request)
    eventually(lambda: is_there(sandbox, "/srv/count/done"), "the writer has begun")


def is_there(sandbox: Sandbox, path: str) -> bool:
    try:
        sandbox.stat_file(path)
    except APIError as error:
        if error.status_code == 404:
            return False
        raise
    return True


def counts(sandbox: Sandbox) -> tuple[int, int]:
    begun, done = (
        int(bytes(sandbox.read_file(f"/srv/count/{name}"))) for name in ("begun", "done")
    )
    return begun, done


def test_a_snapshot_outlives_its_sandbox_and_can_be_taken_away(
    client: Client,
    http: httpx.Client,
    sandbox: Sandbox,
    forks: list[str],
    tmp_path: Path,
) -> None:
    sandbox.write_file("/srv/marker", b"in the snapshot")
    snapshot = client.sandboxes.create_rootfs_snapshot(sandbox.id)
    client.sandboxes.delete(sandbox.id)

    claimed = client.sandboxes.claim("default", snapshot_id=snapshot.id)
    forks.append(claimed.id)
    assert claimed.cmd("cat /srv/marker").stdout == "in the snapshot"

    image, raw = tmp_path / "image.qcow2", tmp_path / "image.raw"
    url = f"/api/v1/sandbox-rootfs-snapshots/{snapshot.id}/export.qcow2"
    with http.stream("GET", url) as answer, image.open("wb") as file:
        assert answer.status_code == 200, answer.read()
        for piece in answer.iter_raw():
            file.write(piece)
    assert image.stat().st_size == int(answer.headers["Content-Length"])
    commands: list[list[str | Path]] = [
        ["qemu-img", "check", "-f", "qcow2", image],
        ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", image, raw],
        ["e2fsck", "-fn", raw],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    found = subprocess.run(
        ["debugfs", "-R", "cat /srv/marker", raw], capture_output=True, check=True
    )
    assert found.stdout == b"in the snapshot"
