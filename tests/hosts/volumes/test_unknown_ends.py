"""A commit became the head, and its worker was never told: the next one goes on from it.

So it is when a worker is killed, or the database's answer lost, just after the head has moved.
"""

import json
import os
from collections.abc import Callable

import pytest

from common.units import MiB
from hosts.volumes.commit import Commit
from hosts.volumes.disk import Disk
from hosts.volumes.errors import DiskBusy, HeadMoved, StoreUnavailable
from hosts.volumes.naming import ObjectName, parse_key
from tests.hosts.volumes.conftest import Host
from tests.hosts.volumes.nbd import Nbd


def publish_untold(host: Host, rewrite: frozenset[ObjectName] = frozenset()) -> None:
    """Move the head to what the disk has written, and never say so."""

    def publish(commit: Commit) -> None:
        host.publish(commit)
        raise StoreUnavailable("The answer is lost.")

    with pytest.raises(StoreUnavailable):
        host.disks.checkpoint(host.volume_id, publish, rewrite=rewrite)


def stored_packs(host: Host) -> frozenset[ObjectName]:
    """Commit, and name the packs that came of it."""
    made = host.disks.checkpoint(host.volume_id, host.publish)
    assert made is not None
    return frozenset(parse_key(key)[1] for key, _ in made.objects if key.startswith("packs/"))


def refuse(commit: Commit) -> None:
    raise StoreUnavailable("The database is away.")


def cut_in_vain(host: Host) -> None:
    """Leave another frozen overlay behind."""
    with pytest.raises(StoreUnavailable):
        host.disks.cut(host.volume_id, refuse)


def commit(host: Host) -> None:
    host.disks.commit(host.volume_id, host.publish)


def cut(host: Host) -> None:
    host.disks.cut(host.volume_id, host.publish)


def keep_up(host: Host) -> None:
    host.disks.checkpoint(host.volume_id, host.publish, background=True)


def attach(host: Host) -> None:
    host.attach().close()


def check_elsewhere(host: Host) -> None:
    commit(host)
    host.lose()
    with host.attach(2) as guest:
        host.check(guest)


def write(host: Host, guest: Nbd, number: int) -> None:
    host.write(guest, number * MiB, os.urandom(MiB))
    guest.flush()


@pytest.mark.parametrize("then", [commit, cut, keep_up, attach])
@pytest.mark.parametrize("cuts", [0, 2])
def test_what_was_written_since_is_stored_over_it(
    host: Host, cuts: int, then: Callable[[Host], None]
) -> None:
    host.import_base()
    with host.attach() as guest:
        write(host, guest, 0)
        publish_untold(host)
        for number in range(cuts):
            write(host, guest, 2 + number)
            cut_in_vain(host)
        write(host, guest, 7)
        then(host)
    with host.attach() as guest:
        host.check(guest)
        write(host, guest, 2)
    check_elsewhere(host)


def test_the_head_is_what_the_disk_reads_although_nothing_differs_from_before(
    host: Host,
) -> None:
    host.import_base()
    before = host.expected[:MiB]
    with host.attach() as guest:
        write(host, guest, 0)
        publish_untold(host)
        host.write(guest, 0, before)
    check_elsewhere(host)


def test_a_commit_that_is_made_otherwise_the_second_time_is_no_obstacle(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        write(host, guest, 0)
        packs = stored_packs(host)
        write(host, guest, 1)
        publish_untold(host, packs)  # published, nobody asks for that any more
        keep_up(host)
        host.check(guest)
    check_elsewhere(host)


def test_a_head_that_the_disk_knows_nothing_of_is_left_alone(host: Host) -> None:
    base = host.import_base()
    with host.attach() as guest:
        write(host, guest, 0)
        host.head_file.write_text(f"{base.root_key[:-1]}x")
        for _ in range(2):
            with pytest.raises(HeadMoved):
                keep_up(host)
        host.check(guest)
        host.head_file.write_text(base.root_key)
        keep_up(host)
    check_elsewhere(host)


def test_an_attach_that_finds_the_head_while_it_is_stored_again_drops_nothing_else(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.import_base()
    with host.attach() as guest:
        write(host, guest, 0)
        publish_untold(host)
        write(host, guest, 1)
        frozen_until = Disk.frozen_until

        def attach_after(disk: Disk, last: int | None) -> list[int]:
            numbers = frozen_until(disk, last)
            attach(host)
            return numbers

        with monkeypatch.context() as patched:
            patched.setattr(Disk, "frozen_until", attach_after)
            patched.setattr(Disk, "_delete_strays", lambda _: None)  # it is a moment later
            with pytest.raises(DiskBusy):
                keep_up(host)
        keep_up(host)
        host.check(guest)
    check_elsewhere(host)


def test_a_commit_that_only_rewrote_is_found_out_although_nothing_is_written_since(
    host: Host,
) -> None:
    host.import_base()
    with host.attach() as guest:
        write(host, guest, 0)
        packs = stored_packs(host)
        assert not host.disks.look()[0].written_at_ns
        publish_untold(host, packs)
        assert host.disks.look()[0].written_at_ns
        keep_up(host)
        assert host.disks.look()[0].root_key == host.head
        assert not host.disks.look()[0].written_at_ns
        host.check(guest)
    check_elsewhere(host)


def test_what_may_be_in_a_published_root_is_not_written_to_again(host: Host) -> None:
    base = host.import_base()
    with host.attach() as guest:
        write(host, guest, 0)

    def publish(commit: Commit) -> None:
        host.publish(commit)
        raise StoreUnavailable("The answer is lost.")

    with pytest.raises(StoreUnavailable):
        host.disks.commit(host.volume_id, publish)
    # Whoever attaches it has read the head a moment too early.
    socket = host.disks.attach(host.volume_id, root_key=base.root_key, epoch=1).socket
    with Nbd(socket) as guest:
        host.check(guest)
        write(host, guest, 1)
    check_elsewhere(host)


def test_an_attach_between_announcing_and_publishing_is_gone_on_from(host: Host) -> None:
    host.import_base()
    with host.attach() as guest:
        write(host, guest, 0)
        publish_untold(host)
        write(host, guest, 1)
        published: list[str] = []

        def publish(commit: Commit) -> None:
            if not published:
                attach(host)
            published.append(commit.root_key)
            host.publish(commit)

        assert host.disks.checkpoint(host.volume_id, publish) is not None
        host.check(guest)
    check_elsewhere(host)


def test_a_disk_whose_socket_was_never_opened_to_its_users_is_when_it_is_attached(
    host: Host,
) -> None:
    host.import_base()
    host.attach().close()
    path = host.config.run_dir / "disks" / host.volume_id.hex / "disk.sock"
    path.chmod(0o600)  # as a worker leaves it that dies at that moment
    host.attach().close()
    assert path.stat().st_mode & 0o777 == 0o660


def test_a_state_file_is_read_by_the_release_before_and_by_one_after(host: Host) -> None:
    host.import_base()
    host.attach().close()
    (path,) = host.config.state_dir.glob("overlays/*/state.json")
    found = json.loads(path.read_text())
    assert "earlier_pending" not in found
    path.write_text(json.dumps(found | {"of_a_later_release": 1}))
    with host.attach() as guest:
        host.check(guest)
