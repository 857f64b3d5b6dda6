"""A running disk on real daemons and a real store: cuts beside uploads, layers, pace."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from common.units import KiB, MiB
from hosts.keeper import Keeper
from hosts.volumes.ahead import FEW
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.commit import Commit
from hosts.volumes.disk import Disk
from hosts.volumes.disks import WAITS_LONG_S, AroundCut, Cut, Disks
from hosts.volumes.errors import StoreUnavailable
from hosts.volumes.failpoints import VARIABLE
from hosts.volumes.naming import parse_key
from hosts.volumes.pacing import NO_LIMITS, STOP, Limits
from hosts.volumes.qmp import Qmp
from tests.hosts.volumes.conftest import Host
from tests.hosts.volumes.nbd import Nbd
from tests.s3 import seaweed

WAIT_S = 60


class SlowStore:
    """Holds every upload of a host's disks back until it is opened."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.fails = False
        self.reached = threading.Event()
        self.asked: list[str] = []
        put_new = host.disks._store.put_new

        def wait_and_put(key: str, body: bytes) -> None:
            self.asked.append(key)
            self.reached.set()
            assert self._open.wait(WAIT_S)
            if self.fails:
                raise StoreUnavailable("Failing, as told.")
            put_new(key, body)

        monkeypatch.setattr(host.disks._store, "put_new", wait_and_put)

    def open(self) -> None:
        self._open.set()


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[list[object]]:
    """Do some work in a thread; it is over when the block is left."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    yield results
    thread.join(WAIT_S)
    assert results, "it did not end well"


def telling(was_cut: threading.Event) -> AroundCut:
    """Hold nobody at a cut, and tell when it was made."""

    @contextmanager
    def around_cut() -> Iterator[None]:
        yield
        was_cut.set()

    return around_cut


def eventually(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def layer_files(host: Host) -> list[Path]:
    folder = host.config.state_dir / "overlays" / host.volume_id.hex
    return sorted(folder.glob("layer-*"))


def with_budgets(host: Host, *, log: int = 2048 * MiB, layer: int = 512 * MiB) -> None:
    host.config = replace(host.config, log_budget_bytes=log, layer_budget_bytes=layer)
    host.disks = Disks(host.config)


# -- cuts and uploads --------------------------------------------------------------------


def test_a_cut_does_not_wait_for_an_upload_and_is_published_after_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    store = SlowStore(host, monkeypatch)
    published: list[str] = []

    def publish(commit: Commit) -> None:
        published.append(commit.root_key)
        host.publish(commit)

    was_cut = threading.Event()

    with host.attach() as guest:
        host.write(guest, 0, os.urandom(MiB))
        with in_background(
            lambda: host.disks.checkpoint(host.volume_id, publish, background=True)
        ) as first:
            assert store.reached.wait(WAIT_S)
            host.write(guest, 5 * MiB, b"before the cut")
            with in_background(
                lambda: host.disks.cut(host.volume_id, publish, around_cut=telling(was_cut))
            ) as second:
                assert was_cut.wait(5), "the cut waited for the upload"
                assert len(host.overlay_files()) == 3
                assert published == []
                guest.write(5 * MiB, b"after  the cut")
                # Nobody cuts while somebody else's cut is to be published.
                assert host.disks.checkpoint(host.volume_id, publish, background=True) is None
                assert len(host.overlay_files()) == 3
                store.open()
        assert isinstance(first[0], Commit)
        cut = second[0]
        assert published == [first[0].root_key, cut.root_key]  # type: ignore[attr-defined]
    # The cut has what came before it and nothing else.
    host.disks.detach(host.volume_id, discard=True)
    with host.attach(2) as guest:
        host.check(guest)


def test_what_an_earlier_try_left_is_stored_before_anything_is_cut(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    with host.attach() as guest:
        monkeypatch.setenv(VARIABLE, "commit.packs=fail")
        for number in range(4):
            host.write(guest, number * MiB, os.urandom(4096))
            with pytest.raises(StoreUnavailable):
                host.disks.checkpoint(host.volume_id, host.publish, background=True)
            assert len(host.overlay_files()) == 2, "overlays pile up while the store is away"
        monkeypatch.delenv(VARIABLE)
        commits: list[Commit] = []

        def publish(commit: Commit) -> None:
            commits.append(commit)
            host.publish(commit)

        host.disks.checkpoint(host.volume_id, publish, background=True)
        assert [commit.blocks_changed for commit in commits] == [1, 3]
        assert len(host.overlay_files()) == 1
        host.check(guest)


@pytest.mark.parametrize("background", [False, True])
def test_nothing_is_stored_that_is_still_written_to(
    host: Host, monkeypatch: pytest.MonkeyPatch, *, background: bool
) -> None:
    host.import_base()
    with host.attach() as guest:
        host.write(guest, 0, os.urandom(MiB))
        monkeypatch.setenv(VARIABLE, "rotate.recorded=fail")
        with pytest.raises(StoreUnavailable):
            host.disks.checkpoint(host.volume_id, host.publish, background=background)
        monkeypatch.delenv(VARIABLE)
        host.write(guest, 2 * MiB, os.urandom(MiB))

        def publish(commit: Commit) -> None:
            host.write(guest, 4 * MiB, os.urandom(MiB))
            host.publish(commit)

        host.disks.checkpoint(host.volume_id, publish, background=background)
        host.check(guest)
    host.disks.commit(host.volume_id, host.publish)
    with host.attach(2) as guest:
        host.check(guest)


def test_an_idle_disk_is_seen_to_be_idle_and_left_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    with host.attach() as guest:
        assert not host.disks.has_written(host.volume_id)
        guest.read(0, 8 * MiB)
        assert not host.disks.has_written(host.volume_id)
        host.write(guest, 0, b"x")
        assert host.disks.has_written(host.volume_id)
        assert host.disks.log_bytes(host.volume_id) >= 64 * KiB
        host.disks.checkpoint(host.volume_id, host.publish, background=True)
        assert not host.disks.has_written(host.volume_id)
        assert host.disks.log_bytes(host.volume_id) == 0

        keeper = Keeper(host.disks, due=lambda _: pytest.fail("it is idle"), commit_every_s=0)
        keeper.look()
        monkeypatch.setattr(Disk, "limit_writes", lambda *_, **__: pytest.fail("asked"))
        for _ in range(5):
            keeper.look()


def test_a_disk_that_cannot_be_looked_at_hides_no_other(host: Host) -> None:
    host.import_base()
    spoilt = host.config.state_dir / "overlays" / uuid4().hex
    spoilt.mkdir()
    (spoilt / "state.json").write_text('{"volume": ')
    with host.attach():
        assert [look.volume_id for look in host.disks.look()] == [host.volume_id]


def test_an_upload_is_seen_from_outside(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.import_base()
    store = SlowStore(host, monkeypatch)
    with host.attach() as guest:
        host.write(guest, 0, b"x")
        with in_background(
            lambda: host.disks.checkpoint(host.volume_id, host.publish, background=True)
        ):
            assert store.reached.wait(WAIT_S)
            assert host.disks.is_uploading(host.volume_id)
            store.open()
        assert not host.disks.is_uploading(host.volume_id)


def test_a_disk_comes_back_while_its_frozen_overlay_is_being_stored(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    store = SlowStore(host, monkeypatch)
    with host.attach() as guest:
        host.write(guest, 0, os.urandom(MiB))
        guest.flush()
        with in_background(
            lambda: host.disks.checkpoint(host.volume_id, host.publish, background=True)
        ):
            assert store.reached.wait(WAIT_S)
            host.write(guest, 4 * MiB, os.urandom(MiB))
            guest.flush()
            host.kill_daemons()
            with host.attach() as again:
                host.check(again)
                host.write(again, 8 * MiB, os.urandom(MiB))
            store.open()
    assert len(host.overlay_files()) == 1
    host.disks.commit(host.volume_id, host.publish)
    host.empty_cache()
    with host.attach(2) as guest:
        host.check(guest)


def test_a_head_that_was_read_a_moment_too_early_harms_nothing(host: Host) -> None:
    before = host.import_base()
    with host.attach() as guest:
        host.write(guest, 0, b"stored")
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None
        attached = host.disks.attach(host.volume_id, root_key=before.root_key, epoch=1)
        assert attached.root_key == host.head
        host.check(guest)


def test_nobody_writes_to_a_disk_that_is_being_put_away(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    store = SlowStore(host, monkeypatch)
    with host.attach() as guest:
        host.write(guest, 0, b"written")
    with in_background(lambda: host.disks.commit(host.volume_id, host.publish)) as committed:
        assert store.reached.wait(WAIT_S)
        assert host.disks.checkpoint(host.volume_id, host.publish, background=True) is None
        with in_background(lambda: host.attach().close()) as attached:
            time.sleep(0.3)
            assert not attached
            store.open()
    assert isinstance(committed[0], Commit)
    with host.attach() as guest:
        host.check(guest)


def test_packs_are_rewritten_although_nothing_was_written(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        host.write(guest, 30 * MiB, os.urandom(2 * MiB))
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None
        keys = [key for key, _ in host.store.keys(f"packs/{host.volume_id.hex}/")]
        old = frozenset(parse_key(key)[1] for key in keys)
        commit = host.disks.checkpoint(
            host.volume_id, host.publish, background=True, rewrite=old
        )
        assert commit is not None
        assert commit.packs >= 1
        host.check(guest)
        host.empty_cache()
        host.check(guest)
    assert host.disks.commit(host.volume_id, host.publish) is None


# -- the next commit is prepared while the last is on its way ----------------------------


def far_ahead(host: Host) -> None:
    """Prepare the next commit as soon as anything is written."""
    host.config = replace(host.config, soon_share=0)
    host.disks = Disks(host.config)


def test_the_next_commit_is_encoded_while_the_last_is_on_its_way_and_put_after_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_ahead(host)
    base = host.import_base()
    store = SlowStore(host, monkeypatch)
    encoded = prepared_ahead(monkeypatch)
    published: list[Commit] = []

    def publish(commit: Commit) -> None:
        published.append(commit)
        host.publish(commit)

    with host.attach() as guest:
        host.write(guest, 0, os.urandom(MiB))
        with in_background(
            lambda: host.disks.checkpoint(host.volume_id, publish, background=True)
        ) as done:
            assert store.reached.wait(WAIT_S)
            host.write(guest, 5 * MiB, os.urandom(MiB))
            assert encoded.wait(WAIT_S), "it was not prepared"
            assert len(store.asked) == 1, "it was put too early"
            store.open()
        assert done[0] == published[-1]
        assert [commit.base_root_key for commit in published] == [
            base.root_key,
            published[0].root_key,
        ]
        assert [commit.blocks_changed for commit in published] == [16, 16]
        assert len(host.overlay_files()) == 1
        assert not host.disks.has_written(host.volume_id)
    host.lose()
    with host.attach() as guest:
        host.check(guest)


def prepared_ahead(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a commit was prepared while another was on its way."""
    encoded = threading.Event()
    monkeypatch.setattr(
        "hosts.volumes.disks.reach",
        lambda name: encoded.set() if name == "ahead.encoded" else None,
    )
    return encoded


def test_of_a_commit_that_was_prepared_on_one_that_failed_nothing_is_put(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_ahead(host)
    host.import_base()
    encoded = prepared_ahead(monkeypatch)
    store = SlowStore(host, monkeypatch)
    store.fails = True

    def fails() -> bool:
        with pytest.raises(StoreUnavailable):
            host.disks.checkpoint(host.volume_id, host.publish, background=True)
        return True

    with host.attach() as guest:
        host.write(guest, 0, os.urandom(MiB))
        with in_background(fails):
            assert store.reached.wait(WAIT_S)
            host.write(guest, 5 * MiB, os.urandom(MiB))
            assert encoded.wait(WAIT_S)
            store.open()
        assert len(store.asked) == 1
        assert len(host.overlay_files()) == 3

        store.fails = False
        commit = host.disks.checkpoint(host.volume_id, host.publish, background=True)
        assert commit is not None
        assert commit.blocks_changed == 32
        assert len(host.overlay_files()) == 1
    host.lose()
    with host.attach() as guest:
        host.check(guest)


def test_a_cut_while_the_next_commit_is_prepared_has_all_of_its_moment_and_no_more(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_ahead(host)
    host.import_base()
    encoded = prepared_ahead(monkeypatch)
    store = SlowStore(host, monkeypatch)
    was_cut = threading.Event()

    with host.attach() as guest:
        host.write(guest, 0, os.urandom(MiB))
        with in_background(
            lambda: host.disks.checkpoint(host.volume_id, host.publish, background=True)
        ):
            assert store.reached.wait(WAIT_S)
            host.write(guest, 5 * MiB, os.urandom(MiB))
            assert encoded.wait(WAIT_S)
            host.write(guest, 7 * MiB, b"before the cut")
            with in_background(
                lambda: host.disks.cut(
                    host.volume_id, host.publish, around_cut=telling(was_cut)
                )
            ) as cut:
                assert was_cut.wait(5), "the cut waited for the upload"
                guest.write(7 * MiB, b"after  the cut")
                store.open()
        assert isinstance(cut[0], Cut)
        assert cut[0].root_key == host.head
    host.lose()
    with host.attach() as guest:
        host.check(guest)


def test_a_fast_writer_leaves_the_thread_that_stores_it_to_others_now_and_then(
    host: Host,
) -> None:
    far_ahead(host)
    host.import_base()
    published: list[str] = []

    def publish(commit: Commit) -> None:
        host.publish(commit)
        published.append(commit.root_key)
        # What is stored takes no more room here: the log's budget does not know of it.
        assert not dropped_and_open(host)
        before = len(host.overlay_files())
        host.write(guest, len(published) * MiB, os.urandom(BLOCK_BYTES))
        if len(published) < FEW:
            eventually(lambda: len(host.overlay_files()) > before)

    with host.attach() as guest:
        host.write(guest, 0, os.urandom(MiB))
        host.disks.checkpoint(host.volume_id, publish, background=True)
        assert len(published) == FEW
        assert host.disks.has_written(host.volume_id)


def dropped_and_open(host: Host) -> list[str]:
    """List the deleted files of a host's disks that this process still has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            path = str(link.readlink())
            if path.startswith(str(host.config.state_dir)) and path.endswith("(deleted)"):
                found.append(path)
    return found


# -- layers ------------------------------------------------------------------------------


def test_what_was_read_or_stored_is_read_again_without_the_export(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        host.check(guest)
        host.write(guest, 3 * MiB, os.urandom(2 * MiB))
        guest.trim(10 * MiB, MiB)
        host.expect(10 * MiB, bytes(MiB))
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None
        assert len(host.overlay_files()) == 1
        assert len(layer_files(host)) == 1
        export = host.config.run_dir / "disks" / host.volume_id.hex / "export.pid"
        os.kill(int(export.read_text()), 9)
        host.check(guest)


def test_no_read_is_ever_older_than_a_write_whatever_becomes_of_the_layer(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_budgets(host, layer=24 * MiB)
    host.import_base()
    chance = random.Random(7)
    with host.attach() as guest:
        for number in range(30):
            for _ in range(20):
                at = chance.randrange(24 * 16) * 64 * KiB + chance.choice([0, 4096, 33333])
                match chance.randrange(4):
                    case 0 | 1:
                        host.write(guest, at, os.urandom(chance.choice([512, 5000, 200_000])))
                    case 2:
                        guest.trim(at // 4096 * 4096, 64 * KiB)
                        at = at // 4096 * 4096
                        host.expect(at, guest.read(at, 64 * KiB))
                    case 3:
                        guest.read(at, 100_000)
            broken = chance.choice([None, None, "fold.begun", "fold.recorded", "drop.added"])
            if broken is not None:
                monkeypatch.setenv(VARIABLE, f"{broken}=fail")
                with pytest.raises(StoreUnavailable):
                    host.disks.checkpoint(host.volume_id, host.publish)
                monkeypatch.delenv(VARIABLE)
            else:
                host.disks.checkpoint(host.volume_id, host.publish)
            if number % 3 == 0:
                host.check(guest)
        host.check(guest)


def test_a_layer_is_begun_anew_when_it_outgrows_its_budget(host: Host) -> None:
    with_budgets(host, layer=4 * MiB)
    host.import_base()
    with host.attach() as guest:
        before = layer_files(host)
        host.check(guest)
        assert before[0].stat().st_blocks * 512 > 4 * MiB
        keeper = Keeper(host.disks, due=lambda _: None)
        keeper.look()
        after = layer_files(host)
        assert len(after) == 1
        assert after != before
        assert after[0].stat().st_blocks * 512 < MiB
        host.check(guest)


def test_a_host_without_layers_has_none_and_may_get_them_under_a_running_disk(
    host: Host,
) -> None:
    with_budgets(host, layer=0)
    host.import_base()
    with host.attach() as guest:
        host.write(guest, 0, os.urandom(MiB))
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None
        assert layer_files(host) == []
        for layer in (64 * MiB, 0):
            with_budgets(host, layer=layer)
            host.write(guest, layer, os.urandom(MiB))
            assert host.disks.checkpoint(host.volume_id, host.publish) is not None
            assert len(layer_files(host)) == bool(layer)
            host.check(guest)


def test_a_layer_gives_way_when_the_local_disk_fills_up(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    with host.attach() as guest:
        host.check(guest)
        assert len(layer_files(host)) == 1
        free = SimpleNamespace(f_bavail=1000 * MiB, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda _: free)
        Keeper(host.disks, due=lambda _: None).look()
        assert layer_files(host) == []
        host.write(guest, 0, os.urandom(MiB))
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None
        assert layer_files(host) == []
        host.check(guest)
        free.f_bavail *= 2
        host.write(guest, MiB, os.urandom(MiB))
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None
        assert len(layer_files(host)) == 1
        host.check(guest)


# -- pace --------------------------------------------------------------------------------


def test_a_write_waits_at_the_limit_and_is_let_go(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        host.disks.limit_writes(host.volume_id, STOP)
        host.write(guest, 0, b"the first passes")
        waits = threading.Thread(target=host.write, args=(guest, MiB, b"the second waits"))
        waits.start()
        with Nbd(host.config.run_dir / "disks" / host.volume_id.hex / "disk.sock") as other:
            assert other.read(0, 9) == b"the first"
            other.flush()
        time.sleep(0.3)
        assert waits.is_alive()
        # A rotation goes on beneath.
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None
        host.disks.limit_writes(host.volume_id, NO_LIMITS, release=True)
        waits.join(5)
        assert not waits.is_alive()
        host.check(guest)


def test_nobody_is_held_for_a_moment_to_be_told_that_there_are_no_limits(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    commands: list[str] = []
    execute = Qmp.execute

    def note(self: Qmp, command: str, **arguments: object) -> object:
        commands.append(command)
        return execute(self, command, **arguments)

    with host.attach():
        monkeypatch.setattr(Qmp, "execute", note)
        host.disks.limit_writes(host.volume_id, NO_LIMITS, release=True)
        assert "blockdev-reopen" not in commands
        host.disks.limit_writes(host.volume_id, STOP)
        host.disks.limit_writes(host.volume_id, NO_LIMITS, release=True)
        assert "blockdev-reopen" in commands


def test_a_guest_that_is_brought_to_rest_is_not_held_back_meanwhile(host: Host) -> None:
    with_budgets(host, log=8 * MiB)
    host.import_base()
    keeper = Keeper(host.disks, due=lambda _: None)
    with host.attach() as guest:
        for at in range(8):
            host.write(guest, at * MiB, os.urandom(MiB))
        keeper.look()
        assert "until there is room" in keeper.health(host.volume_id)

        @contextmanager
        def rest() -> Iterator[None]:
            keeper.look()
            for at in range(8, 12):
                host.write(guest, at * MiB, os.urandom(MiB))
            yield

        cut = host.disks.cut(host.volume_id, host.publish, around_cut=rest)
        assert cut.commit is not None
        assert cut.commit.blocks_changed == 12 * 16
        keeper.look()
        assert keeper.health(host.volume_id) == ""

        host.disks.ease(host.volume_id)
        for at in range(8):
            host.write(guest, at * MiB, os.urandom(MiB))
        keeper.look()
        host.disks.ease(host.volume_id)
        host.write(guest, 0, os.urandom(3 * MiB))
        host.check(guest)


def test_limits_hold_when_they_are_never_set_again(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        limits = Limits(
            bytes_per_s=16 * KiB,
            burst_bytes_per_s=8 * MiB,
            burst_s=2,
            writes_per_s=1,
            burst_writes=1000,
        )
        host.disks.limit_writes(host.volume_id, limits)
        written = threading.Semaphore(0)
        stop = threading.Event()

        def write() -> None:
            for number in range(64):
                if stop.is_set():
                    return
                host.write(guest, number * MiB, os.urandom(MiB))
                written.release()

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(4)
        assert 16 * MiB <= host.disks.log_bytes(host.volume_id) < 20 * MiB
        stop.set()
        host.disks.limit_writes(host.volume_id, NO_LIMITS, release=True)
        writer.join(WAIT_S)
        host.check(guest)


def test_a_guest_outlasts_a_store_that_is_away_within_its_budget_and_catches_up(
    folder: Path, tmp_path: Path
) -> None:
    budget = 64 * MiB
    with seaweed(tmp_path) as server:
        host = Host(folder, server.config)
        with_budgets(host, log=budget)
        try:
            host.import_base()
            _write_while_the_store_is_away(host, server, budget)
        finally:
            host.kill_daemons()


def _write_while_the_store_is_away(host: Host, server: object, budget: int) -> None:
    due = threading.Event()
    over = threading.Event()
    told: list[str] = []
    longest_log = 0

    def store() -> None:
        while not over.is_set():
            if due.wait(0.1):
                due.clear()
                try:
                    host.disks.checkpoint(host.volume_id, host.publish, background=True)
                except StoreUnavailable:
                    continue

    keeper = Keeper(
        host.disks,
        due=lambda _: due.set(),
        on_health=lambda _, text: told.append(text),
        commit_every_s=1,
    )
    total = 2 * budget
    storing = threading.Thread(target=store)
    guest = host.attach()

    def write() -> bool:
        for number in range(total // MiB):
            host.write(guest, number * MiB, os.urandom(MiB))
        return True

    storing.start()
    keeper.start()
    try:
        server.stop(with_signal=9)  # type: ignore[attr-defined]
        with in_background(write) as done:
            until = time.monotonic() + 15
            while time.monotonic() < until:
                longest_log = max(longest_log, host.disks.log_bytes(host.volume_id))
                time.sleep(0.1)
            assert not done, "the writer was not slowed"
            assert longest_log > budget / 2
            assert "wait to be stored" in keeper.health(host.volume_id)
            server.start()  # type: ignore[attr-defined]
            eventually(lambda: bool(done))
        assert longest_log <= budget
        assert done == [True], "the guest saw an error"
        eventually(lambda: not host.disks.has_written(host.volume_id))
        eventually(lambda: not keeper.health(host.volume_id))
        assert told[0]
        assert told[-1] == ""
    finally:
        over.set()
        keeper.stop()
        storing.join(WAIT_S)
    host.check(guest)
    guest.close()


def test_no_cut_waits_for_a_read_that_waits_for_the_store(folder: Path, tmp_path: Path) -> None:
    with seaweed(tmp_path) as server:
        host = Host(folder, server.config)
        try:
            host.import_base()
            guest = host.attach()
            host.write(guest, 100 * MiB, os.urandom(MiB))
            server.stop(with_signal=9)
            reads: list[bytes] = []
            waiting = _cut_while_a_read_waits(host, guest, reads)
            server.start()
            waiting.join(WAIT_S)
            assert reads == [host.expected[9 * MiB : 9 * MiB + KiB]]
            assert not _reads_wait_s(host)
            host.check(guest)
            assert host.disks.checkpoint(host.volume_id, host.publish) is not None
            guest.close()
        finally:
            host.kill_daemons()


def _cut_while_a_read_waits(host: Host, guest: Nbd, reads: list[bytes]) -> threading.Thread:
    socket = host.config.run_dir / "disks" / host.volume_id.hex / "disk.sock"

    def read() -> None:
        with closing(Nbd(socket)) as other:
            reads.append(other.read(9 * MiB, KiB))

    waiting = threading.Thread(target=read)
    waiting.start()
    eventually(lambda: _reads_wait_s(host) >= WAITS_LONG_S)

    with pytest.raises(StoreUnavailable):
        host.disks.checkpoint(host.volume_id, host.publish)

    # Nobody else was held.
    host.write(guest, 101 * MiB, os.urandom(MiB))
    assert guest.read(100 * MiB, MiB) == host.expected[100 * MiB : 101 * MiB]
    assert waiting.is_alive()
    return waiting


def _reads_wait_s(host: Host) -> float:
    return host.disks.look()[0].reads_wait_s
