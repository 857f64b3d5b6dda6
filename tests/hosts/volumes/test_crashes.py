"""The worker, and the whole host, die at every named step; nothing is lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.units import KiB, MiB
from hosts.volumes.failpoints import NAMES, VARIABLE
from tests.hosts.volumes.conftest import Host
from tests.hosts.volumes.nbd import Nbd

_COMMIT = ("commit.packs", "commit.leaves", "commit.root", "publish.before", "publish.after")
STEPS = {
    "attach": ("attach.recorded", "attach.exported", "attach.served"),
    "checkpoint": (
        "rotate.recorded",
        "rotate.added",
        "rotate.done",
        *_COMMIT,
        "drop.recorded",
        "drop.added",
        "drop.reopened",
        "drop.done",
    ),
    "commit": ("commit.stopped", *_COMMIT, "commit.settled"),
    "detach": ("detach.stopped",),
}


def die_at(host: Host, operation: str, step: str) -> None:
    """Run an operation in a worker that is killed at a step."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "tests.hosts.volumes.worker", host.write_config(), operation],
        env=os.environ
        | {VARIABLE: f"{step}=kill", "PYTHONPATH": f"{root}:{root / 'platform'}"},
        cwd=root,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, "the step was not reached"


def change(host: Host, guest: Nbd, salt: int) -> None:
    """Write over data, into holes, across blocks; zero some, discard some."""
    host.write(guest, 2 * MiB + salt * 37 * KiB, os.urandom(200 * KiB))
    host.write(guest, 500 * MiB + salt * MiB, os.urandom(100 * KiB))
    host.write(guest, 40 * MiB, bytes([salt]) * 70 * KiB)
    at = 10 * MiB + salt * 128 * KiB
    guest.zero(at, 64 * KiB)
    host.expect(at, bytes(64 * KiB))
    guest.flush()


def check_everywhere(host: Host) -> None:
    """Recover here, go on, commit, and read it all back on a host with nothing."""
    with host.attach() as guest:
        host.check(guest)
        change(host, guest, 3)
        host.disks.checkpoint(host.volume_id, host.publish)
        assert len(host.overlay_files()) == 1
        change(host, guest, 4)
        host.check(guest)
    host.disks.commit(host.volume_id, host.publish)
    host.disks.detach(host.volume_id, discard=False)
    host.empty_cache()
    with host.attach(epoch=2) as guest:
        host.check(guest)
    host.disks.detach(host.volume_id, discard=True)


def test_every_failpoint_is_tried() -> None:
    assert {step for steps in STEPS.values() for step in steps} == set(NAMES)


@pytest.mark.parametrize("step", STEPS["attach"])
def test_a_worker_killed_while_attaching_leaves_a_disk_that_can_be_attached(
    host: Host, step: str
) -> None:
    host.import_base()
    die_at(host, "attach", step)
    check_everywhere(host)


@pytest.mark.parametrize("whole_host", [False, True], ids=["worker", "host"])
@pytest.mark.parametrize("step", STEPS["checkpoint"])
def test_a_crash_during_a_checkpoint_loses_nothing(
    host: Host, step: str, *, whole_host: bool
) -> None:
    host.import_base()
    with host.attach() as guest:
        change(host, guest, 1)
        die_at(host, "checkpoint", step)
        # The guest never noticed, and goes on.
        change(host, guest, 2)
        host.check(guest)
    if whole_host:
        host.kill_daemons()
    check_everywhere(host)


@pytest.mark.parametrize("step", STEPS["commit"])
def test_a_worker_killed_while_committing_loses_nothing(host: Host, step: str) -> None:
    host.import_base()
    with host.attach() as guest:
        change(host, guest, 1)
    die_at(host, "commit", step)
    check_everywhere(host)


@pytest.mark.parametrize("step", STEPS["commit"][:-1])
def test_a_commit_that_was_killed_can_simply_be_repeated(host: Host, step: str) -> None:
    host.import_base()
    with host.attach() as guest:
        change(host, guest, 1)
    die_at(host, "commit", step)
    assert host.disks.commit(host.volume_id, host.publish) is not None
    check_everywhere(host)


def test_a_worker_killed_while_discarding_leaves_a_disk_that_can_be_discarded(
    host: Host,
) -> None:
    host.import_base()
    with host.attach() as guest:
        guest.write(0, b"x" * 512)
    die_at(host, "detach", "detach.stopped")
    host.disks.detach(host.volume_id, discard=True)
    assert host.disks.attached() == []
    assert host.overlay_files() == []
