"""The export that waits for the next disk, with real processes."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from uuid import UUID, uuid4

import pytest

from hosts.volumes import spares
from hosts.volumes.daemons import await_end, daemon_pid, spare_mark, spare_name
from hosts.volumes.disks import DiskHealth, Disks
from hosts.volumes.errors import DaemonFailed
from hosts.volumes.spares import Spares, end_spares
from tests.hosts.machine import needs_root
from tests.hosts.volumes.conftest import Host
from tests.hosts.volumes.nbd import Nbd


@pytest.fixture
def warm_host(host: Host) -> Iterator[Host]:
    """A host with a base image and a spare."""
    host.import_base()
    spares_of(host).make()
    yield host
    host.disks.cool()


def spares_of(host: Host) -> Spares:
    return Spares(host.config.run_dir, user=host.config.user, own_dir=host.config.own_dir)


def warm(host: Host) -> Path:
    """Have a spare made, asking for it as a host that looks around does."""

    def is_warm() -> bool:
        host.disks.warm()
        return len(spares_of(host).usable()) == 1

    eventually(is_warm)
    return spares_of(host).usable()[0]


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pidfile(host: Host, volume_id: UUID | None = None) -> Path:
    volume_id = volume_id or host.volume_id
    return host.config.run_dir / "disks" / volume_id.hex / "export.pid"


def pid_in(folder: Path) -> int:
    pid = daemon_pid(folder / "export.pid")
    assert pid is not None
    return pid


def has_ended(pid: int) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return await_end(process, 0)
    finally:
        os.close(process)


def kill(pid: int) -> None:
    process = os.pidfd_open(pid)
    signal.pidfd_send_signal(process, signal.SIGKILL)
    assert await_end(process, 30)
    os.close(process)


def test_a_disk_is_served_by_the_spare_and_another_is_made(warm_host: Host) -> None:
    spare = spares_of(warm_host).usable()[0]
    pid = pid_in(spare)
    with warm_host.attach() as guest:
        assert daemon_pid(pidfile(warm_host)) == pid
        warm_host.write(guest, 100, b"over the spare")
        warm_host.check(guest)
        assert warm_host.disks.checkpoint(warm_host.volume_id, warm_host.publish) is not None
        warm_host.check(guest)
        eventually(lambda: len(spares_of(warm_host).usable()) == 1)
    assert pid_in(spares_of(warm_host).usable()[0]) != pid
    assert warm_host.disks.health(warm_host.volume_id) is DiskHealth.ATTACHED

    warm_host.disks.detach(warm_host.volume_id, discard=True)
    assert has_ended(pid)


def test_secrets_lie_with_the_disk_alone_and_for_its_daemons_alone(warm_host: Host) -> None:
    spare = spares_of(warm_host).usable()[0]
    warm_host.attach().close()
    config = pidfile(warm_host).with_name("export.json")
    assert config.stat().st_mode & 0o077 == 0
    assert (spare / "export.json").readlink() == config
    secret = warm_host.config.store.secret_access_key.encode()
    proc = Path("/proc") / pidfile(warm_host).read_text().strip()
    for name in ("cmdline", "environ"):
        assert secret not in (proc / name).read_bytes()


def test_an_export_that_was_a_spare_and_dies_is_started_again(warm_host: Host) -> None:
    with warm_host.attach() as guest:
        warm_host.check(guest)
        warm_host.disks.cool()
        kill(pid_in(pidfile(warm_host).parent))
        assert warm_host.disks.health(warm_host.volume_id) is DiskHealth.DEAD
        assert warm_host.disks.mend(warm_host.volume_id)
        assert warm_host.disks.health(warm_host.volume_id) is DiskHealth.ATTACHED
        assert spare_name(pidfile(warm_host)) is None
        warm_host.check(guest)


def test_of_disks_that_are_attached_at_once_one_takes_the_spare(warm_host: Host) -> None:
    pid = pid_in(spares_of(warm_host).usable()[0])
    volumes = [uuid4(), uuid4()]
    together = Barrier(2)

    def attach(volume_id: UUID) -> Path:
        disks = Disks(warm_host.config)  # as a worker of its own
        together.wait()
        return disks.attach(volume_id, root_key=warm_host.head, epoch=1).socket

    with ThreadPoolExecutor(2) as pool:
        sockets = list(pool.map(attach, volumes))
    pids = [daemon_pid(pidfile(warm_host, volume_id)) for volume_id in volumes]
    assert pids.count(pid) == 1
    assert len(set(pids) - {None}) == 2
    for socket in sockets:
        with Nbd(socket) as guest:
            warm_host.check(guest)


def test_a_spare_is_given_once_however_many_want_it(warm_host: Host) -> None:
    folders = [warm_host.config.run_dir / "disks" / uuid4().hex for _ in range(8)]
    for folder in folders:
        folder.mkdir()
    together = Barrier(len(folders))

    def take(folder: Path) -> bool:
        mine = spares_of(warm_host)
        together.wait()
        is_taken = mine.take(folder)
        mine.cool()
        return is_taken

    with ThreadPoolExecutor(len(folders)) as pool:
        taken = list(pool.map(take, folders))
    assert taken.count(True) == 1
    running = [daemon_pid(folder / "export.pid") is not None for folder in folders]
    assert running == taken


def test_a_dead_spare_is_not_used_and_is_replaced(warm_host: Host) -> None:
    spare = spares_of(warm_host).usable()[0]
    kill(pid_in(spare))
    assert spares_of(warm_host).usable() == []
    with warm_host.attach() as guest:
        assert spare_name(pidfile(warm_host)) is None
        warm_host.check(guest)
    assert warm(warm_host) != spare
    assert not spare.exists()


def test_a_spare_of_other_code_is_not_used_and_is_ended(
    warm_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = spares_of(warm_host).usable()[0]
    pid = pid_in(spare)
    monkeypatch.setattr(spares, "code_stamp", lambda user: "0" * 12)
    with warm_host.attach() as guest:
        assert daemon_pid(pidfile(warm_host)) != pid
        warm_host.check(guest)
    assert warm(warm_host).name.startswith("0" * 12)
    assert has_ended(pid)
    assert not spare.exists()


def test_the_stamp_of_the_code_is_another_when_a_file_or_the_user_is(folder: Path) -> None:
    file = folder / "plugin.py"
    file.write_text("one")
    before = spares.code_stamp(None, [folder])
    assert spares.code_stamp(None, [folder]) == before
    assert spares.code_stamp("daemon", [folder]) != before
    file.write_text("other")
    changed = spares.code_stamp(None, [folder])
    (folder / "new.py").touch()
    assert len({before, changed, spares.code_stamp(None, [folder])}) == 3
    assert Path(spares.__file__) in {one for place in spares.CODE for one in place.glob("*.py")}
    assert all(any(place.glob("units.py")) or place.name == "volumes" for place in spares.CODE)


def test_without_a_spare_an_export_starts_as_ever(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        assert spare_name(pidfile(host)) is None
        host.check(guest)
    assert not (host.config.run_dir / "spares").exists()


def test_a_worker_that_dies_while_it_takes_the_spare_leaves_nothing(warm_host: Host) -> None:
    spare = spares_of(warm_host).usable()[0]
    pid = pid_in(spare)
    folder = pidfile(warm_host).parent
    folder.mkdir()
    spare_mark(folder / "export.pid").write_text(spare.name)
    (spare / "export.sock").rename(folder / "export.sock")
    assert warm_host.disks.health(warm_host.volume_id) is DiskHealth.ABSENT
    warm(warm_host)
    assert has_ended(pid)
    with warm_host.attach() as guest:
        warm_host.check(guest)


def test_what_the_daemons_user_puts_there_is_not_followed(warm_host: Host) -> None:
    other = warm_host.folder / "other"
    other.write_text("as it was")
    spare = spares_of(warm_host).usable()[0]
    (spare / "export.json").symlink_to(other)
    mark = spare_mark(pidfile(warm_host))
    mark.parent.mkdir()
    mark.symlink_to(other)
    assert spare_name(pidfile(warm_host)) is None
    with warm_host.attach() as guest:
        assert spare_name(pidfile(warm_host)) == spare.name
        warm_host.check(guest)
    assert other.read_text() == "as it was"


def test_a_spare_that_cannot_be_moved_is_thrown_away(warm_host: Host) -> None:
    spare = spares_of(warm_host).usable()[0]
    pid = pid_in(spare)
    (spare / "export.json").mkdir()
    with warm_host.attach() as guest:
        assert spare_name(pidfile(warm_host)) is None
        warm_host.check(guest)
    assert has_ended(pid)
    assert not spare.exists()


@pytest.mark.parametrize("name", ["", "python3", "../../x", "0" * 29, "a" * 4000])
def test_a_mark_that_is_no_name_makes_no_process_a_daemon(folder: Path, name: str) -> None:
    file = folder / "run/disks/0/export.pid"
    file.parent.mkdir(parents=True)
    file.write_text(str(os.getpid()))
    spare_mark(file).write_text(name)
    assert daemon_pid(file) is None


def test_a_platform_that_stops_ends_the_spare(warm_host: Host) -> None:
    spare = spares_of(warm_host).usable()[0]
    pid = pid_in(spare)
    end_spares(warm_host.config.run_dir)
    assert has_ended(pid)
    assert not spare.exists()


def test_a_spare_whose_folder_is_gone_ends_of_itself(warm_host: Host) -> None:
    pid = pid_in(spares_of(warm_host).usable()[0])
    shutil.rmtree(warm_host.config.run_dir / "spares")
    eventually(lambda: has_ended(pid))


def test_a_spare_that_does_not_start_is_no_error_of_the_disk(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise DaemonFailed("nbdkit did not start.")

    monkeypatch.setattr(spares, "start_export", fail)
    host.import_base()
    host.disks.warm()
    with host.attach() as guest:
        host.check(guest)
    host.disks.cool()
    assert spares_of(host).usable() == []


def check_privacy(spare: Path, pid: int) -> None:
    """A spare is another user's than root, and its folder nobody else's to look into."""
    assert Path(f"/proc/{pid}").stat().st_uid == spare.stat().st_uid != 0
    assert spare.stat().st_mode & 0o077 == 0
    assert spare.parent.stat().st_uid == 0


@needs_root
def test_the_spare_is_the_daemons_users_and_its_folder_nobody_elses(host: Host) -> None:
    host.folder.chmod(0o711)
    host.config = replace(host.config, user="daemon")
    host.disks = Disks(host.config)
    host.import_base()
    spare = warm(host)
    pid = pid_in(spare)
    check_privacy(spare, pid)
    with host.attach() as guest:
        assert daemon_pid(pidfile(host)) == pid
        host.check(guest)
    host.disks.cool()
