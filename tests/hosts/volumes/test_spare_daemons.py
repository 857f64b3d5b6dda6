"""The storage daemon that waits for the next disk, with real processes."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from uuid import UUID, uuid4

import pytest

from hosts.volumes import spares
from hosts.volumes.daemons import daemon_pid, spare_mark, spare_name
from hosts.volumes.disks import DiskHealth, Disks
from hosts.volumes.errors import DaemonFailed
from hosts.volumes.spares import DAEMONS, Spares, end_spares
from tests.hosts.machine import need_fuse, needs_root
from tests.hosts.volumes.conftest import DEVICE_BYTES, IMAGE_BYTES, Host
from tests.hosts.volumes.nbd import Nbd
from tests.hosts.volumes.test_spares import check_privacy, eventually, has_ended, kill
from tests.hosts.volumes.worker import Workers


@pytest.fixture
def warm_host(host: Host) -> Iterator[Host]:
    """A host with a base image and a spare."""
    host.import_base()
    spares_of(host).make()
    yield host
    host.disks.cool()


@pytest.fixture
def file(host: Host) -> Path:
    """Where a disk may be shown as a file."""
    need_fuse()
    path = host.folder / "disk"
    path.touch()
    return path


def spares_of(host: Host) -> Spares:
    config = host.config
    return Spares(config.run_dir, user=config.user, own_dir=config.own_dir, kind=DAEMONS)


def the_spare(host: Host) -> Path:
    (folder,) = spares_of(host).usable()
    return folder


def pid_of(pidfile: Path) -> int:
    pid = daemon_pid(pidfile)
    assert pid is not None
    return pid


def pid_in(folder: Path) -> int:
    return pid_of(folder / "daemon.pid")


def disk_dir(host: Host, volume_id: UUID | None = None) -> Path:
    return host.config.run_dir / "disks" / (volume_id or host.volume_id).hex


def spare_of_disk(host: Host) -> str | None:
    return spare_name(disk_dir(host) / "daemon.pid")


def test_a_disk_is_served_by_the_spare_and_another_is_made(warm_host: Host) -> None:
    pid = pid_in(the_spare(warm_host))
    with warm_host.attach() as guest:
        assert pid_in(disk_dir(warm_host)) == pid
        for number in range(3):
            warm_host.write(guest, number * 5_000_000, b"over the spare" * (number + 1))
            warm_host.check(guest)
            assert warm_host.disks.checkpoint(warm_host.volume_id, warm_host.publish)
        warm_host.check(guest)
        eventually(lambda: len(spares_of(warm_host).usable()) == 1)
    assert pid_in(the_spare(warm_host)) != pid
    assert warm_host.disks.health(warm_host.volume_id) is DiskHealth.ATTACHED

    warm_host.disks.detach(warm_host.volume_id, discard=True)
    assert has_ended(pid)
    assert not disk_dir(warm_host).exists()


def test_a_daemon_that_was_a_spare_and_dies_is_started_again(warm_host: Host) -> None:
    with warm_host.attach() as guest:
        warm_host.write(guest, 100, b"flushed")
        guest.flush()
    warm_host.disks.cool()
    kill(pid_in(disk_dir(warm_host)))
    assert warm_host.disks.health(warm_host.volume_id) is DiskHealth.DEAD
    with warm_host.attach() as guest:
        assert spare_of_disk(warm_host) is None
        warm_host.check(guest)


def test_a_disk_that_goes_on_takes_a_spare_over_what_was_written(warm_host: Host) -> None:
    with warm_host.attach() as guest:
        warm_host.write(guest, 100, b"before")
        guest.flush()
    warm_host.kill_daemons()
    spares_of(warm_host).make()
    with warm_host.attach() as guest:
        assert spare_of_disk(warm_host) is not None
        warm_host.check(guest)
        warm_host.write(guest, 200, b"after")
    warm_host.disks.commit(warm_host.volume_id, warm_host.publish)
    warm_host.disks.detach(warm_host.volume_id, discard=False)
    with warm_host.attach(2) as guest:
        warm_host.check(guest)


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_disk_is_attached_and_shown_as_a_file_at_once(
    host: Host, file: Path, is_warm: bool
) -> None:
    host.import_base()
    if is_warm:
        spares_of(host).make()

    def attach() -> None:
        host.disks.attach(host.volume_id, root_key=host.head, epoch=1, shown_at=file)

    attach()
    assert (spare_of_disk(host) is not None) == is_warm
    attach()  # safe to repeat
    with file.open("r+b") as disk:
        assert disk.read(IMAGE_BYTES) == host.expected[:IMAGE_BYTES]
        disk.seek(0)
        disk.write(b"by fuse")
    host.expect(0, b"by fuse")
    assert not host.disks.look()[0].is_served
    host.kill_daemons("daemon")
    attach()
    assert file.stat().st_size == DEVICE_BYTES
    assert host.disks.checkpoint(host.volume_id, host.publish) is not None
    host.disks.drop_fuse(host.volume_id)
    with host.attach() as guest:
        host.check(guest)
    host.disks.cool()


def test_a_disk_that_is_served_already_is_shown_as_a_file(warm_host: Host, file: Path) -> None:
    with warm_host.attach() as guest:
        warm_host.write(guest, 0, b"by nbd")
    warm_host.disks.attach(warm_host.volume_id, root_key=warm_host.head, epoch=1, shown_at=file)
    with file.open("rb") as disk:
        assert disk.read(6) == b"by nbd"
    warm_host.disks.detach(warm_host.volume_id, discard=True)


def test_where_a_disk_cannot_be_shown_it_can_be_attached_after_all(warm_host: Host) -> None:
    with pytest.raises(DaemonFailed):
        warm_host.disks.attach(
            warm_host.volume_id,
            root_key=warm_host.head,
            epoch=1,
            shown_at=warm_host.folder / "nowhere",
        )
    with warm_host.attach() as guest:
        warm_host.check(guest)


@pytest.mark.parametrize("step", ["moved", "set-up"])
@pytest.mark.parametrize("kind", ["export", "daemon"])
def test_a_worker_that_dies_while_it_takes_a_spare_leaves_nothing(
    warm_host: Host, workers: Workers, kind: str, step: str
) -> None:
    config = warm_host.config
    Spares(config.run_dir, user=config.user, own_dir=config.own_dir).make()
    (pid,) = [pid_of(path) for path in (config.run_dir / "spares").glob(f"*/{kind}.pid")]
    failpoint = f"spare.{kind}-{step}=kill"

    status = workers.run(warm_host.write_config(1), "attach", failpoint)

    assert status == -signal.SIGKILL, f"{failpoint} was not reached"
    assert warm_host.disks.health(warm_host.volume_id) is DiskHealth.DEAD
    with warm_host.attach() as guest:
        if kind == "daemon":
            assert has_ended(pid)
        warm_host.check(guest)
        warm_host.write(guest, 100, b"after all")
        warm_host.check(guest)
    spares_of(warm_host).make()
    Spares(config.run_dir, user=config.user, own_dir=config.own_dir).make()
    assert has_ended(pid)
    warm_host.disks.detach(warm_host.volume_id, discard=True)


def test_what_a_worker_that_died_was_given_ends_with_the_disk(
    warm_host: Host, workers: Workers
) -> None:
    pid = pid_in(the_spare(warm_host))
    status = workers.run(warm_host.write_config(1), "attach", "spare.daemon-set-up=kill")
    assert status == -signal.SIGKILL
    warm_host.disks.detach(warm_host.volume_id, discard=True)
    assert has_ended(pid)


def test_a_spare_is_given_once_however_many_want_it(warm_host: Host) -> None:
    pid = pid_in(the_spare(warm_host))
    volumes = [uuid4() for _ in range(4)]
    together = Barrier(len(volumes))

    def attach(volume_id: UUID) -> Path:
        disks = Disks(warm_host.config)  # as a worker of its own
        together.wait()
        socket = disks.attach(volume_id, root_key=warm_host.head, epoch=1).socket
        disks.cool()
        return socket

    with ThreadPoolExecutor(len(volumes)) as pool:
        sockets = list(pool.map(attach, volumes))
    pids = [pid_in(disk_dir(warm_host, volume_id)) for volume_id in volumes]
    assert pids.count(pid) <= 1
    assert len(set(pids)) == len(volumes)
    for socket in sockets:
        with Nbd(socket) as guest:
            warm_host.check(guest)


def test_a_dead_spare_is_not_used_and_is_replaced(warm_host: Host) -> None:
    spare = the_spare(warm_host)
    kill(pid_in(spare))
    assert spares_of(warm_host).usable() == []
    with warm_host.attach() as guest:
        assert spare_of_disk(warm_host) is None
        warm_host.check(guest)
    spares_of(warm_host).make()
    assert the_spare(warm_host) != spare
    assert not spare.exists()


def test_a_spare_that_cannot_be_set_up_is_thrown_away(warm_host: Host) -> None:
    spare = the_spare(warm_host)
    pid = pid_in(spare)
    (spare / "qmp.sock").unlink()
    other = spare / "qmp.sock"
    os.mknod(other, 0o140600)  # a socket that nobody listens on
    with warm_host.attach() as guest:
        assert spare_of_disk(warm_host) is None
        warm_host.check(guest)
    assert has_ended(pid)
    assert not spare.exists()


def test_a_spare_of_other_code_is_not_used_and_is_ended(
    warm_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = pid_in(the_spare(warm_host))
    monkeypatch.setattr(spares, "code_stamp", lambda user: "0" * 12)
    with warm_host.attach() as guest:
        assert pid_in(disk_dir(warm_host)) != pid
        warm_host.check(guest)
    spares_of(warm_host).make()
    assert the_spare(warm_host).name.startswith("0" * 12)
    assert has_ended(pid)


def test_the_stamp_is_another_with_another_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = folder / "qemu-storage-daemon"
    program.write_text("one")
    program.chmod(0o755)
    monkeypatch.setattr(spares, "plain_environment", lambda: {"PATH": str(folder)})
    before = spares.code_stamp(None)
    program.write_text("another")
    assert spares.code_stamp(None) != before


@pytest.mark.parametrize("end", [lambda host: host.disks.cool(), None])
def test_spares_end_with_the_worker_that_cools_or_the_platform(
    warm_host: Host, end: Callable[[Host], None] | None
) -> None:
    spare = the_spare(warm_host)
    pid = pid_in(spare)
    if end is None:
        end_spares(warm_host.config.run_dir)
    else:
        end(warm_host)
    assert has_ended(pid)
    assert not spare.exists()


def test_a_mark_with_another_spares_name_harms_no_disk(warm_host: Host) -> None:
    with warm_host.attach() as guest:
        taken = spare_of_disk(warm_host)
        assert taken is not None
        other = uuid4()
        disk_dir(warm_host, other).mkdir()
        spare_mark(disk_dir(warm_host, other) / "daemon.pid").write_text(taken)
        warm_host.disks.attach(other, root_key=warm_host.head, epoch=1)
        assert warm_host.disks.health(warm_host.volume_id) is DiskHealth.ATTACHED
        warm_host.check(guest)


@needs_root
def test_the_spare_is_the_daemons_users_and_its_folder_nobody_elses(host: Host) -> None:
    host.folder.chmod(0o711)
    host.config = replace(host.config, user="daemon")
    host.disks = Disks(host.config)
    host.import_base()
    spares_of(host).make()
    spare = the_spare(host)
    pid = pid_in(spare)
    check_privacy(spare, pid)
    with host.attach() as guest:
        assert pid_in(disk_dir(host)) == pid
        host.check(guest)
    host.disks.cool()


@pytest.mark.parametrize(
    "end", [Host.kill_daemons, lambda host: host.disks.drop_fuse(host.volume_id)]
)
def test_a_disk_that_is_shown_as_a_file_has_no_layer_until_it_no_longer_is(
    warm_host: Host, file: Path, end: Callable[[Host], None]
) -> None:
    def layers() -> list[Path]:
        return list(warm_host.config.state_dir.glob("overlays/*/layer-*"))

    warm_host.disks.attach(warm_host.volume_id, root_key=warm_host.head, epoch=1, shown_at=file)
    assert not layers()
    with file.open("rb") as disk:
        assert disk.read(IMAGE_BYTES) == warm_host.expected[:IMAGE_BYTES]
    end(warm_host)
    with warm_host.attach() as guest:
        assert layers()
        warm_host.check(guest)
