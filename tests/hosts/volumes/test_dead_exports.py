"""An export that dies while its disk is being worked on comes back, whoever waits for it."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from common.units import KiB, MiB
from hosts.keeper import Keeper
from hosts.volumes import disk, storage_daemon
from hosts.volumes.daemons import daemon_pid
from hosts.volumes.disks import DiskHealth, Disks
from hosts.volumes.errors import DiskBusy
from hosts.volumes.export_daemon import ExportDaemon
from hosts.volumes.locks import locked
from tests.hosts.volumes.conftest import Host
from tests.hosts.volumes.nbd import Nbd

SOON_S = 40
"""Less than a command waits for its answer (60 s), and more than a busy machine needs."""


@pytest.fixture
def keeper(host: Host) -> Iterator[None]:
    """Look after the host's disks, as its worker does."""
    keeper = Keeper(Disks(host.config), due=lambda _: None)
    keeper.start()
    yield
    keeper.stop()


class Reads:
    """Reads of what no cache of the storage daemon has, which wait for a dead export."""

    def __init__(self, host: Host, pool: ThreadPoolExecutor) -> None:
        self._host = host
        self._pool = pool
        self.waiting: list[Future[None]] = []

    def kill_export(self) -> None:
        self._host.kill_daemons("export")
        for number in range(4):
            at = 12 * MiB + number * 512 * KiB
            self.waiting.append(self._pool.submit(self._read, at))
        time.sleep(0.3)
        assert not any(read.done() for read in self.waiting)

    def _read(self, at: int) -> None:
        found = self._host.disks.attached()[0]
        with Nbd(found.socket) as guest:
            assert guest.read(at, 64 * KiB) == self._host.expected[at : at + 64 * KiB]


def at_step(monkeypatch: pytest.MonkeyPatch, step: str, happens: Callable[[], None]) -> None:
    """Have something happen once, when a step is reached."""
    done = threading.Event()

    def reach(name: str) -> None:
        if name == step and not done.is_set():
            done.set()
            happens()

    monkeypatch.setattr(disk, "reach", reach)
    monkeypatch.setattr(storage_daemon, "reach", reach)


@pytest.mark.usefixtures("keeper")
@pytest.mark.parametrize(
    "step",
    ["rotate.prepared", "rotate.recorded", "rotate.done", "fold.begun", "drop.added"],
)
def test_an_export_that_dies_during_a_checkpoint_is_started_while_that_waits(
    host: Host, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    host.import_base()
    with host.attach() as guest, ThreadPoolExecutor(4) as pool:
        host.write(guest, 5 * MiB, b"before the cut")
        reads = Reads(host, pool)
        at_step(monkeypatch, step, reads.kill_export)
        began_at = time.monotonic()
        commit = host.disks.checkpoint(host.volume_id, host.publish)
        took_s = time.monotonic() - began_at
        assert len(reads.waiting) == 4, "the step was not reached"
        for read in reads.waiting:
            read.result(timeout=SOON_S)
        assert commit is not None
        assert took_s < SOON_S
        host.check(guest)
    assert host.disks.health(host.volume_id) is DiskHealth.ATTACHED


def test_an_export_is_started_again_while_the_disk_is_held(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        host.kill_daemons("export")
        with host.disks._held(host.volume_id):
            assert Disks(host.config).mend(host.volume_id)
            host.check(guest)


def test_of_many_who_start_an_export_again_one_does(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    begun: list[int] = []
    ensure = ExportDaemon.ensure

    def counting(self: ExportDaemon, *args: object) -> None:
        before = daemon_pid(self._pidfile)
        ensure(self, *args)  # type: ignore[arg-type]
        if before is None:
            begun.append(1)

    monkeypatch.setattr(ExportDaemon, "ensure", counting)
    with host.attach() as guest, ThreadPoolExecutor(8) as pool:
        begun.clear()
        host.kill_daemons("export")
        together = threading.Barrier(8)

        def mend() -> bool | None:
            together.wait()
            try:
                return Disks(host.config).mend(host.volume_id)
            except DiskBusy:  # somebody else has been at it for a while
                return None

        mended = [pool.submit(mend) for _ in range(7)]
        together.wait()
        host.attach().close()
        assert False not in [one.result() for one in mended]
        host.check(guest)
    assert len(begun) == 1


def test_no_export_is_started_for_a_disk_that_goes_meanwhile(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started just as the disk ends, and ended with it."""
    host.import_base()
    host.attach().close()
    run_dir = host.config.run_dir / "disks" / host.volume_id.hex
    host.kill_daemons("export")
    ensure = ExportDaemon.ensure
    may_go_on = threading.Event()
    was_begun = threading.Event()

    def slow(self: ExportDaemon, *args: object) -> None:
        was_begun.set()
        assert may_go_on.wait(SOON_S)
        ensure(self, *args)  # type: ignore[arg-type]

    started: list[int | None] = []
    stop = ExportDaemon.stop

    def noting(self: ExportDaemon) -> None:
        started.append(daemon_pid(self._pidfile))
        stop(self)

    monkeypatch.setattr(ExportDaemon, "ensure", slow)
    monkeypatch.setattr(ExportDaemon, "stop", noting)
    with ThreadPoolExecutor(2) as pool:
        mending = pool.submit(Disks(host.config).mend, host.volume_id)
        assert was_begun.wait(SOON_S)
        detaching = pool.submit(host.disks.detach, host.volume_id, discard=True)
        deadline = time.monotonic() + SOON_S
        while host.disks._disk(host.volume_id).daemon.is_running():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        may_go_on.set()
        assert mending.result(timeout=SOON_S)
        detaching.result(timeout=SOON_S)
    (pid,) = started
    assert pid is not None
    assert not run_dir.exists()
    assert not host.disks.mend(host.volume_id)
    assert daemon_pid(run_dir / "export.pid") is None


def test_a_disk_that_has_ended_is_not_mended_by_who_looked_before(host: Host) -> None:
    host.import_base()
    host.attach().close()
    run_dir = host.config.run_dir / "disks" / host.volume_id.hex
    late = host.disks._disk(host.volume_id)
    host.disks.detach(host.volume_id, discard=True)
    assert not late.mend(timeout_s=1)
    assert not run_dir.exists()


def test_who_mends_while_another_starts_the_export_is_told_so(host: Host) -> None:
    host.import_base()
    with host.attach():
        host.kill_daemons("export")
        lock = host.config.state_dir / "overlays" / f"{host.volume_id.hex}.export.lock"
        with locked(lock), pytest.raises(DiskBusy):
            host.disks.mend(host.volume_id)
        assert host.disks.mend(host.volume_id)
