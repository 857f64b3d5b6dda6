"""The worker, and the whole host, die at every named step; nothing is lost.

One disk goes through the steps of a group one after the other, as it would in a bad week:
what one crash leaves behind is there at the next.
"""

import os
import signal
from itertools import chain

import pytest

from common.units import KiB, MiB
from hosts.volumes.failpoints import NAMES
from tests.hosts.volumes.conftest import Host
from tests.hosts.volumes.nbd import Nbd
from tests.hosts.volumes.worker import Workers

ATTACH = ("attach.recorded", "attach.exported", "attach.served")
ROTATE = ("rotate.prepared", "rotate.recorded", "rotate.done")
UPLOAD = ("commit.packs", "commit.leaves", "commit.root", "publish.before", "publish.after")
FOLD = ("fold.begun", "fold.recorded")
DROP = ("drop.recorded", "drop.added", "drop.reopened", "drop.done")
PUT_AWAY = ("commit.stopped", *UPLOAD, "commit.settled")
DISCARD = ("detach.stopped", "detach.forgotten")


def die_at(host: Host, workers: Workers, operation: str, step: str, epoch: int = 1) -> None:
    """Run an operation in a worker that is killed at a step."""
    status = workers.run(host.write_config(epoch), operation, f"{step}=kill")
    assert status == -signal.SIGKILL, f"{step} was not reached"


def change(host: Host, guest: Nbd, salt: int) -> None:
    """Write over data, into holes, across blocks; zero some, discard some."""
    host.write(guest, 2 * MiB + salt * 37 * KiB, os.urandom(200 * KiB))
    host.write(guest, 500 * MiB + salt * MiB, os.urandom(100 * KiB))
    host.write(guest, 40 * MiB, bytes([salt]) * 70 * KiB)
    at = 10 * MiB + salt * 128 * KiB
    guest.zero(at, 64 * KiB)
    guest.trim(at + 64 * KiB, 64 * KiB)
    host.expect(at, bytes(128 * KiB))
    guest.flush()


def check_elsewhere(host: Host, epoch: int) -> None:
    """Commit, and read it all back on a host that has nothing of it."""
    host.disks.commit(host.volume_id, host.publish)
    host.disks.detach(host.volume_id, discard=False)
    host.empty_cache()
    with host.attach(epoch) as guest:
        host.check(guest)


def test_every_failpoint_is_tried() -> None:
    tried = {*chain(ATTACH, ROTATE, UPLOAD, FOLD, DROP, PUT_AWAY, DISCARD)}
    # A collector has no disk, a spare none yet, and the next commit is prepared beside another:
    # those are in `tests.hosts.test_collection`, `test_spare*` and `test_crash_runs`.
    elsewhere = ("collect.", "spare.", "ahead.")
    assert tried == {name for name in NAMES if not name.startswith(elsewhere)}


def test_a_worker_killed_while_attaching_leaves_a_disk_that_can_be_attached(
    host: Host, workers: Workers
) -> None:
    host.import_base()
    for epoch, step in enumerate(ATTACH, start=1):
        die_at(host, workers, "attach", step, epoch)
        with host.attach(epoch) as guest:
            change(host, guest, epoch)
        host.disks.commit(host.volume_id, host.publish)
    check_elsewhere(host, epoch + 1)


@pytest.mark.parametrize("whole_host", [False, True], ids=["worker", "host"])
@pytest.mark.parametrize(
    "steps", [ROTATE, UPLOAD, FOLD, DROP], ids=["rotate", "upload", "fold", "drop"]
)
def test_a_crash_during_a_checkpoint_loses_nothing(
    host: Host, workers: Workers, steps: tuple[str, ...], *, whole_host: bool
) -> None:
    host.import_base()
    for number, step in enumerate(steps):
        with host.attach() as guest:
            change(host, guest, 3 * number)
            die_at(host, workers, "checkpoint", step)
            # The guest never noticed, and goes on.
            change(host, guest, 3 * number + 1)
            host.check(guest)
        if whole_host:
            host.kill_daemons()
        with host.attach() as guest:
            host.check(guest)
            change(host, guest, 3 * number + 2)
            host.disks.checkpoint(host.volume_id, host.publish)
            assert len(host.overlay_files()) == 1
            host.check(guest)
    check_elsewhere(host, 2)


@pytest.mark.parametrize("again", ["attach", "commit"])
def test_a_worker_killed_while_committing_loses_nothing(
    host: Host, workers: Workers, again: str
) -> None:
    host.import_base()
    for number, step in enumerate(PUT_AWAY):
        with host.attach() as guest:
            change(host, guest, number)
        die_at(host, workers, "commit", step)
        if again == "commit":
            # Nothing is left to commit once that was recorded, and only then.
            commit = host.disks.commit(host.volume_id, host.publish)
            assert (commit is None) == (step == "commit.settled")
        with host.attach() as guest:
            host.check(guest)
    check_elsewhere(host, 2)


@pytest.mark.parametrize("step", DISCARD)
def test_a_worker_killed_while_discarding_leaves_a_disk_that_can_be_discarded(
    host: Host, workers: Workers, step: str
) -> None:
    host.import_base()
    with host.attach() as guest:
        guest.write(0, b"x" * 512)
    die_at(host, workers, "detach", step)
    host.disks.detach(host.volume_id, discard=True)
    assert host.disks.attached() == []
    assert step == "detach.forgotten" or host.overlay_files() == []
    # Nothing of it shows when the disk is attached again.
    with host.attach(epoch=2) as guest:
        host.check(guest)


def test_a_disk_that_was_only_recorded_can_be_committed(host: Host, workers: Workers) -> None:
    host.import_base()
    die_at(host, workers, "attach", "attach.recorded")
    assert host.disks.commit(host.volume_id, host.publish) is None
    host.disks.detach(host.volume_id, discard=False)
