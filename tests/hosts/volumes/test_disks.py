"""A disk's life on a real store, with real daemons."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from common.units import KiB, MiB
from hosts.volumes.commit import Commit
from hosts.volumes.disks import DiskHealth
from hosts.volumes.errors import (
    NotAttached,
    OverlayMismatch,
    StaleEpoch,
    StoreUnavailable,
    Uncommitted,
)
from hosts.volumes.failpoints import VARIABLE
from hosts.volumes.naming import parse_key
from hosts.volumes.qmp import Qmp
from hosts.volumes.storage_daemon import StorageDaemon
from tests.hosts.machine import need_fuse
from tests.hosts.volumes.conftest import IMAGE_BYTES, Host
from tests.hosts.volumes.nbd import Nbd
from tests.s3 import seaweed


def test_a_disk_reads_as_its_image_and_takes_writes(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        assert guest.size_bytes == len(host.expected)
        host.write(guest, 5 * MiB + 123, os.urandom(300 * KiB))
        host.check(guest)


def test_three_cycles_survive_with_an_emptied_cache_between(host: Host) -> None:
    host.import_base()
    for epoch in (1, 2, 3):
        with host.attach(epoch) as guest:
            host.check(guest)
            host.write(guest, epoch * 3 * MiB, os.urandom(150 * KiB))
            host.write(guest, (200 + 300 * epoch % 700) * MiB, os.urandom(MiB))
        commit = host.disks.commit(host.volume_id, host.publish)
        assert commit is not None
        assert commit.root_key == host.head
        assert parse_key(commit.root_key)[1].epoch == epoch
        host.disks.detach(host.volume_id, discard=False)
        assert host.disks.health(host.volume_id) is DiskHealth.ABSENT
        host.empty_cache()
    with host.attach(4) as guest:
        host.check(guest)


def test_a_resume_fetches_only_what_is_read(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        root = host.disks.fetched(host.volume_id)
        assert root.requests == 1
        guest.read(0, 4096)
        fetched = host.disks.fetched(host.volume_id)
        assert 1 <= fetched.requests - root.requests <= 2
        assert fetched.bytes < MiB
        guest.read(4096, 4096)
        assert host.disks.fetched(host.volume_id) == fetched


def test_what_a_commit_asks_of_the_store_is_counted_too(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        host.write(guest, 5 * MiB, os.urandom(64 * KiB))
        before = host.disks.fetched(host.volume_id)
        host.empty_cache()
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None
    after = host.disks.fetched(host.volume_id)

    assert after.requests > before.requests
    assert after.bytes > before.bytes


def test_a_disk_that_went_leaves_no_locks(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        host.write(guest, 5 * MiB, os.urandom(64 * KiB))
    host.disks.commit(host.volume_id, host.publish)
    overlays = host.disks.config.state_dir / "overlays"
    stray, kept = overlays / f"{uuid4().hex}.lock", overlays / f"{host.volume_id.hex}.lock"
    stray.touch()

    host.disks.tidy()
    assert (stray.exists(), kept.exists()) == (False, True)

    host.disks.detach(host.volume_id, discard=False)
    assert list(overlays.iterdir()) == []


@contextmanager
def noted(host: Host, notes: list[object]) -> Iterator[None]:
    """Note how many overlays there are when a cut begins and when it has ended."""
    notes.append(("held", len(host.overlay_files())))
    try:
        yield
    finally:
        notes.append(("let go", len(host.overlay_files())))


def test_a_cut_is_made_while_the_writer_is_held_and_uploads_after(host: Host) -> None:
    host.import_base()
    notes: list[object] = []

    def publish(commit: Commit) -> None:
        notes.append("published")
        host.publish(commit)

    @contextmanager
    def held() -> Iterator[None]:
        with noted(host, notes):
            # The last that a guest writes on its way to being still.
            host.write(guest, 60 * MiB, b"last words")
            yield
        assert not any(host.store.keys(f"packs/{host.volume_id.hex}/"))

    with host.attach() as guest:
        commit = host.disks.checkpoint(host.volume_id, publish, around_cut=held)
        assert commit is not None
        assert commit.blocks_changed == 1
        assert notes == [("held", 2), ("let go", 2), "published"]
        assert host.disks.commit(host.volume_id, host.publish) is None


def test_a_writer_is_let_go_whatever_happens(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    notes: list[object] = []
    around_cut = partial(noted, host, notes)
    with host.attach() as guest:
        assert (
            host.disks.checkpoint(host.volume_id, host.publish, around_cut=around_cut) is None
        )
        assert notes == [("held", 2), ("let go", 2)]
        assert len(host.overlay_files()) == 1

        notes.clear()
        host.write(guest, 0, b"written")
        monkeypatch.setenv(VARIABLE, "rotate.done=fail")
        with pytest.raises(StoreUnavailable):
            host.disks.checkpoint(host.volume_id, host.publish, around_cut=around_cut)
        assert notes == [("held", 2), ("let go", 2)]
        monkeypatch.delenv(VARIABLE)
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None
        host.check(guest)


def test_a_writer_that_cannot_be_held_is_not_cut(host: Host) -> None:
    host.import_base()

    @contextmanager
    def mute() -> Iterator[None]:
        raise TimeoutError
        yield

    with host.attach() as guest:
        host.write(guest, 0, b"written")
        with pytest.raises(TimeoutError):
            host.disks.checkpoint(host.volume_id, host.publish, around_cut=mute)
        assert len(host.overlay_files()) == 1
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None


def test_a_discard_that_nobody_flushed_is_in_the_cut(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        guest.trim(0, MiB)
        host.expect(0, bytes(MiB))
        commit = host.disks.checkpoint(host.volume_id, host.publish)
        assert commit is not None
        assert commit.blocks_changed == 16
        host.check(guest)


def test_a_cluster_written_with_what_was_there_costs_nothing(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        host.write(guest, 0, bytes(host.expected[: 2 * MiB]))
        host.write(guest, 700 * MiB, bytes(MiB))  # zeros into a hole
        assert host.disks.checkpoint(host.volume_id, host.publish) is None
        assert len(host.overlay_files()) == 1
    before = host.head
    assert host.disks.commit(host.volume_id, host.publish) is None
    assert host.head == before


def test_zeros_and_discards_become_holes_and_stop_being_stored(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        host.write(guest, 100 * MiB, os.urandom(3 * MiB))
        first = host.disks.checkpoint(host.volume_id, host.publish)
        assert first is not None
        assert 3 * MiB <= first.stored_bytes < 4 * MiB
        guest.trim(100 * MiB, MiB)
        guest.zero(101 * MiB, MiB)
        host.write(guest, 102 * MiB, bytes(MiB))
        host.expect(100 * MiB, bytes(2 * MiB))
        guest.flush()
        second = host.disks.checkpoint(host.volume_id, host.publish)
        assert second is not None
        assert second.stored_bytes == 0
        assert (second.packs, second.blocks_changed) == (0, 48)
        host.check(guest)


def test_the_cost_of_a_commit_follows_the_change(host: Host) -> None:
    base = host.import_base()
    with host.attach() as guest:
        host.write(guest, 333 * MiB, os.urandom(64 * KiB))
        commit = host.disks.checkpoint(host.volume_id, host.publish)
    assert commit is not None
    assert (commit.blocks_changed, commit.packs) == (1, 1)
    assert 64 * KiB < commit.uploaded_bytes < 64 * KiB + 2000
    assert base.uploaded_bytes > 6 * MiB
    assert commit.stored_bytes < 65 * KiB, "the base is not this volume's to pay for"


def test_a_checkpoint_does_not_stop_a_writing_guest(host: Host) -> None:
    host.import_base()
    stop = threading.Event()
    stamps = 0
    longest_s = 0.0
    with host.attach() as guest:

        def keep_writing() -> None:
            nonlocal stamps, longest_s
            while not stop.is_set():
                started = time.monotonic()
                stamps += 1
                host.write(guest, (stamps * 7919 * 4096) % (300 * MiB), os.urandom(4096))
                longest_s = max(longest_s, time.monotonic() - started)

        writer = threading.Thread(target=keep_writing)
        writer.start()
        try:
            for _ in range(4):
                time.sleep(0.1)
                assert host.disks.checkpoint(host.volume_id, host.publish) is not None
        finally:
            stop.set()
            writer.join()
        assert stamps > 50
        assert longest_s < 5
        assert len(host.overlay_files()) == 1
        host.check(guest)
    assert host.disks.commit(host.volume_id, host.publish) is not None
    host.empty_cache()
    with host.attach(2) as guest:
        host.check(guest)


def test_attaching_twice_is_attaching_once(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        host.write(guest, 0, b"kept")
        with host.attach() as again:
            assert again.read(0, 4) == b"kept"
        assert guest.read(0, 4) == b"kept"
    assert len(host.disks.attached()) == 1


@pytest.mark.parametrize("daemon", ["daemon", "export"])
def test_a_dead_daemon_is_noticed_and_attach_brings_it_back(host: Host, daemon: str) -> None:
    host.import_base()
    with host.attach() as guest:
        host.write(guest, 0, os.urandom(4096))
        guest.flush()
        pidfile = host.config.run_dir / "disks" / host.volume_id.hex / f"{daemon}.pid"
        pid = int(pidfile.read_text())
        os.kill(pid, 9)
        deadline = time.monotonic() + 10
        while host.disks.health(host.volume_id) is DiskHealth.ATTACHED:
            assert time.monotonic() < deadline
        assert host.disks.health(host.volume_id) is DiskHealth.DEAD
        with host.attach() as again:
            host.check(again)
        assert host.disks.health(host.volume_id) is DiskHealth.ATTACHED


def test_a_read_waits_for_an_export_that_died_and_comes_back(host: Host) -> None:
    host.import_base()
    with host.attach() as guest, ThreadPoolExecutor(1) as pool:
        host.kill_daemons("export")
        reading = pool.submit(guest.read, 0, MiB)
        time.sleep(0.3)
        assert not reading.done()
        assert host.disks.mend(host.volume_id)
        assert reading.result(timeout=30) == host.expected[:MiB]


def test_a_command_that_is_carried_out_late_does_not_refuse_an_attach(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was given up waiting for, between the look at the daemon and the next step."""
    host.import_base()
    nodes = StorageDaemon.nodes
    looks: list[frozenset[str]] = []

    def look(self: StorageDaemon, qmp: Qmp) -> frozenset[str]:
        found = nodes(self, qmp)
        looks.append(found)
        late = {name for name in found if name.startswith(("file-", "overlay-"))}
        return found - late if len(looks) == 1 else found

    with host.attach() as guest:
        host.write(guest, 0, os.urandom(4096))
        with monkeypatch.context() as patch:
            patch.setattr(StorageDaemon, "nodes", look)
            with host.attach() as again:
                host.check(again)
    assert len(looks) == 2


def test_a_pid_of_another_process_is_not_taken_for_the_daemon(host: Host) -> None:
    host.import_base()
    host.attach().close()
    host.kill_daemons()
    pidfile = host.config.run_dir / "disks" / host.volume_id.hex / "daemon.pid"
    with subprocess.Popen(["sleep", "60"]) as stranger:
        pidfile.write_text(str(stranger.pid))
        assert host.disks.health(host.volume_id) is DiskHealth.DEAD
        host.disks.detach(host.volume_id, discard=True)
        assert stranger.poll() is None
        stranger.kill()


def test_writes_are_not_thrown_away_unless_that_is_said(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        host.write(guest, 0, b"precious")
        with pytest.raises(Uncommitted):
            host.disks.detach(host.volume_id, discard=False)
        assert guest.read(0, 8) == b"precious"
    host.disks.detach(host.volume_id, discard=True)
    host.disks.detach(host.volume_id, discard=True)
    assert host.disks.attached() == []


def test_an_older_epoch_cannot_attach_and_a_newer_one_starts_afresh(host: Host) -> None:
    host.import_base()
    with host.attach(epoch=5) as guest:
        guest.write(0, b"left behind")
    with pytest.raises(StaleEpoch):
        host.attach(epoch=4)
    with host.attach(epoch=6) as guest:
        host.check(guest)


def test_an_overlay_is_never_put_over_another_root(host: Host) -> None:
    first = host.import_base()
    with host.attach() as guest:
        guest.write(0, b"only copy")
        other = host.import_base()
        assert other.root_key != first.root_key
        with pytest.raises(OverlayMismatch):
            host.attach()
        assert guest.read(0, 9) == b"only copy"


def test_the_same_change_under_another_epoch_makes_other_objects(host: Host) -> None:
    base = host.import_base()
    change = os.urandom(64 * KiB)
    keys = []
    for epoch in (1, 2):
        with host.attach(epoch) as guest:
            guest.write(0, change)
        commit = host.disks.commit(host.volume_id, lambda _: None)
        assert commit is not None
        keys.append(commit.root_key)
        host.disks.detach(host.volume_id, discard=True)
    assert keys[0].split("/")[2] == "00000001"
    assert keys[1].split("/")[2] == "00000002"
    assert base.root_key not in keys
    packs = [key for key, _ in host.store.keys(f"packs/{host.volume_id.hex}/")]
    assert len(packs) == 2


def test_a_publication_that_fails_keeps_everything(host: Host) -> None:
    host.import_base()

    def refuse(commit: Commit) -> None:
        raise StoreUnavailable("the database said no")

    with host.attach() as guest:
        host.write(guest, 0, os.urandom(MiB))
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                host.disks.checkpoint(host.volume_id, refuse)
            host.write(guest, 4 * MiB, os.urandom(MiB))
        host.check(guest)
    with pytest.raises(StoreUnavailable):
        host.disks.commit(host.volume_id, refuse)
    with host.attach() as guest:
        host.check(guest)
    assert host.disks.commit(host.volume_id, host.publish) is not None
    with host.attach(2) as guest:
        host.check(guest)


def test_checkpoints_that_keep_failing_do_not_pile_up_overlays(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    monkeypatch.setenv(VARIABLE, "commit.packs=fail")
    with host.attach() as guest:
        for number in range(12):
            host.write(guest, number * MiB, os.urandom(4096))
            with pytest.raises(StoreUnavailable):
                host.disks.checkpoint(host.volume_id, host.publish)
        assert len(host.overlay_files()) <= 8
        monkeypatch.delenv(VARIABLE)
        assert host.disks.checkpoint(host.volume_id, host.publish) is not None
        assert len(host.overlay_files()) == 1
        host.check(guest)
    # All twelve writes were in it, also those after the chain was full.
    assert host.disks.commit(host.volume_id, host.publish) is None


def test_a_store_that_is_gone_delays_a_guest_and_a_commit_but_loses_nothing(
    folder: Path, tmp_path: Path
) -> None:
    with seaweed(tmp_path) as server:
        host = Host(folder, server.config)
        try:
            host.import_base()
            with host.attach() as guest:
                host.write(guest, 0, os.urandom(MiB))
                server.stop(with_signal=9)
                with pytest.raises(StoreUnavailable):
                    host.disks.checkpoint(host.volume_id, host.publish)
                assert host.overlay_files()
                _read_while_the_store_returns(host, guest, server.start)
                assert host.disks.checkpoint(host.volume_id, host.publish) is not None
                host.check(guest)
            host.disks.detach(host.volume_id, discard=False)
        finally:
            host.kill_daemons()


def _read_while_the_store_returns(host: Host, guest: Nbd, start: object) -> None:
    at = 10 * MiB
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(guest.read(at, 64 * KiB)))
    reader.start()
    time.sleep(2)
    assert not read, "it was cached already, and proves nothing"
    assert callable(start)
    start()
    reader.join(timeout=60)
    assert read == [host.expected[at : at + 64 * KiB]]


def test_a_torn_cache_file_heals(host: Host) -> None:
    host.import_base()
    host.attach().close()
    host.disks.detach(host.volume_id, discard=True)
    with host.attach(2) as guest:
        host.check(guest)
    host.disks.detach(host.volume_id, discard=True)
    for path in (host.config.cache_dir / "packs").iterdir():
        with path.open("r+b") as file:
            for at in range(0, path.stat().st_size, 50_000):
                file.seek(at)
                file.write(b"torn")
    with host.attach(3) as guest:
        host.check(guest)
        assert host.disks.fetched(host.volume_id).requests > 0


def test_a_volume_that_has_no_disk_is_said_to_have_none(host: Host) -> None:
    assert host.disks.health(uuid4()) is DiskHealth.ABSENT
    with pytest.raises(NotAttached):
        host.disks.checkpoint(uuid4(), host.publish)
    with pytest.raises(NotAttached):
        host.disks.commit(uuid4(), host.publish)
    host.disks.detach(uuid4(), discard=False)


def test_secrets_are_on_no_command_line_and_in_no_open_file(host: Host) -> None:
    host.import_base()
    host.attach().close()
    secret = host.config.store.secret_access_key
    folder = host.config.run_dir / "disks" / host.volume_id.hex
    for name in ("daemon.pid", "export.pid"):
        proc = Path("/proc") / (folder / name).read_text().strip()
        assert secret.encode() not in (proc / "cmdline").read_bytes()
        assert secret.encode() not in (proc / "environ").read_bytes()
    config = folder / "export.json"
    assert json.loads(config.read_text())["store"]["secret_access_key"] == secret
    assert config.stat().st_mode & 0o077 == 0
    assert secret not in repr(host.config)


def test_a_disk_can_be_shown_as_a_file_and_served_again(host: Host) -> None:
    need_fuse()
    host.import_base()
    guest = host.attach()
    host.write(guest, 0, b"by nbd")
    guest.close()
    file = host.folder / "disk"
    file.touch()
    host.disks.export_fuse(host.volume_id, file)
    host.disks.export_fuse(host.volume_id, file)
    with file.open("r+b") as disk:
        assert disk.read(IMAGE_BYTES) == host.expected[:IMAGE_BYTES]
        disk.seek(0)
        disk.write(b"by fuse")
        host.expect(0, b"by fuse")
    assert host.disks.checkpoint(host.volume_id, host.publish) is not None
    host.disks.drop_fuse(host.volume_id)
    host.disks.drop_fuse(host.volume_id)
    with host.attach() as guest:
        host.check(guest)
