"""The collector: nothing that is needed is ever deleted, and nothing else is kept for long."""

import signal
import threading
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from django.db import connection, transaction
from django.utils import timezone

from hosts.collection import stored_bytes, stored_bytes_by_owner, unpinned
from hosts.errors import GenerationGone, ObjectsCollected, StaleEpoch
from hosts.keys import DatabaseKeys, destroy
from hosts.models import Generation, StoredObject, Volume
from hosts.services import begin_reading, new_volume, publish_commit, publish_generation
from hosts.volumes.commit import Commit
from hosts.volumes.errors import HeadMoved, KeyDestroyed, StoreUnavailable
from hosts.volumes.failpoints import NAMES, VARIABLE
from hosts.volumes.objects import StoreConfig
from tests.hosts.collecting import GRACE, SETTLE_RUNS, StoredWorld, World
from tests.killed import Processes, processes
from tests.s3 import s3, s3_server

__all__ = ["processes", "s3", "s3_server"]

SOON = timedelta(minutes=5)
STEPS = sorted(name for name in NAMES if name.startswith("collect."))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db: None) -> World:
    return World(tmp_path, monkeypatch)


def volume_of(generation: Generation) -> Volume:
    return Volume.objects.get(pk=generation.volume_id)


def delete(volume: Volume) -> None:
    Volume.objects.filter(pk=volume.pk).update(
        deleted_at=volume.created_at, attached_host=None, attached_for=""
    )


# -- mark and sweep ---------------------------------------------------------------------------


def test_what_generations_need_stays_whatever_its_age(world: World) -> None:
    base = world.import_volume("7")
    child = world.attach(new_volume(owner="7", head=base))
    world.write(child, world.blocks(1, 2, 30))
    before = dict(world.store.objects)
    world.settle()
    assert world.store.objects == before
    world.check()


def test_a_deleted_volume_leaves_nothing_but_what_others_need(world: World) -> None:
    base = world.import_volume("7")
    other = world.attach(new_volume(owner="7", head=base))
    delete(volume_of(base))
    gone = world.attach(new_volume(owner="7", head=base))
    world.write(gone, world.blocks(1, 2))
    delete(gone)
    world.settle()
    assert not world.packs_of(gone.pk)
    assert world.packs_of(base.volume_id)
    world.check()
    delete(other)
    world.settle()
    assert not world.store.objects
    assert not StoredObject.objects.exists()


def test_the_dead_are_kept_for_a_grace_and_not_billed_from_when_they_are_found(
    world: World,
) -> None:
    base = world.import_volume("7")
    assert stored_bytes_by_owner() == {"7": stored_bytes(base.volume_id)}
    delete(volume_of(base))
    count = len(world.store.objects)
    assert world.collect().buried == count
    assert stored_bytes_by_owner() == {}
    world.pass_time(GRACE - SOON)
    assert not world.collect().deleted
    assert len(world.store.objects) == count
    world.pass_time(2 * SOON)
    assert world.collect().deleted == count
    assert not world.store.objects


def test_stored_bytes_are_the_packs_that_live_roots_name_without_the_base(
    world: World,
) -> None:
    base = world.import_volume("")
    one = world.attach(new_volume(owner="7", head=base))
    two = world.attach(new_volume(owner="8", head=base))
    for number in range(4):
        world.write(one, world.blocks(*range(number, number + 9)))
    world.write(two, world.blocks(3))
    Generation.objects.filter(volume=one, number__in=(1, 2)).delete()
    world.collect()
    named = world.named_keys()
    for volume in (one, two):
        expected = sum(len(world.store.objects[k]) for k in world.packs_of(volume.pk) & named)
        assert stored_bytes(volume.pk) == expected > 0
    assert stored_bytes_by_owner() == {"7": stored_bytes(one.pk), "8": stored_bytes(two.pk)}


def test_a_row_that_was_called_dead_too_early_comes_back(world: World) -> None:
    world.import_volume("7")
    StoredObject.objects.update(dead_at=world.now - 10 * GRACE)
    done = world.collect()
    assert done.revived == len(world.store.objects)
    assert not done.deleted
    world.check()


def test_a_root_that_cannot_be_read_spares_all_that_its_owner_has(world: World) -> None:
    base = world.import_volume("7")
    other = world.import_volume("7")
    stranger = world.import_volume("8")
    delete(volume_of(other))
    delete(volume_of(stranger))
    body = world.store.objects.pop(base.root_key)
    for path in (world.folder / "cache" / "packs").iterdir():
        path.unlink()
    world.settle()
    assert world.packs_of(other.volume_id)
    assert not world.packs_of(stranger.volume_id)
    world.store.objects[base.root_key] = body
    world.settle()
    assert not world.packs_of(other.volume_id)
    world.check()


def test_a_store_that_is_away_deletes_nothing(world: World) -> None:
    bases = [world.import_volume("7") for _ in range(5)]
    delete(volume_of(bases[0]))
    world.collect()
    world.pass_time(2 * GRACE)
    for path in (world.folder / "cache" / "packs").iterdir():
        path.unlink()
    world.store.fail = lambda key: True
    with pytest.raises(StoreUnavailable):
        world.collect()
    world.store.fail = lambda key: False
    world.settle()
    assert not world.packs_of(bases[0].volume_id)
    world.check()


def test_what_a_destroyed_key_encrypted_is_garbage(world: World) -> None:
    base = world.import_volume("")
    mine = world.attach(new_volume(owner="7", head=base))
    world.write(mine, world.blocks(1, 2))
    destroy("7")
    with pytest.raises(KeyDestroyed):
        DatabaseKeys().keys_of([mine.pk])
    with pytest.raises(KeyDestroyed):
        new_volume(owner="7", head=base)
    world.settle()
    assert not world.packs_of(mine.pk)
    assert world.packs_of(base.volume_id)


def test_what_somebody_reads_stays_until_the_reading_ends(world: World) -> None:
    base = world.import_volume("7")
    before = dict(world.store.objects)
    begin_reading(base, span=world.now - timezone.now() + timedelta(days=2))
    delete(volume_of(base))
    world.settle()
    assert world.store.objects == before
    world.pass_time(timedelta(days=3))
    world.settle()
    assert not world.store.objects


# -- races ------------------------------------------------------------------------------------


def test_a_publish_in_the_middle_of_a_sweep_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = world.import_volume("7")
    volume = world.attach(new_volume(owner="7", head=base))
    world.write(volume, world.blocks(1, 2, 3))
    world.write(volume, world.blocks(1, 2, 3))
    Generation.objects.filter(volume=volume, number=1).delete()
    world.collect()
    world.pass_time(2 * GRACE)

    def publish_now(name: str) -> None:
        if name == "collect.buried":
            monkeypatch.undo()
            world.write(volume, world.blocks(4, 5))

    monkeypatch.setattr("hosts.collection.reach", publish_now)
    done = world.collect()
    assert done.deleted
    world.check()
    world.settle()
    world.check()


def test_a_worker_that_sleeps_through_many_collections_may_still_publish(
    world: World,
) -> None:
    base = world.import_volume("7")
    volume = world.attach(new_volume(owner="7", head=base))
    made = world.upload(volume, writes := world.blocks(1, 2, 40))
    assert made is not None
    for _ in range(3):
        world.pass_time(2 * GRACE)
        world.collect()
        world.sweep()
    content = {n: b for n, b in (world.contents[base.pk] | writes).items() if b is not None}
    world.publish(volume, made, content)
    world.check()


def test_a_worker_that_sleeps_while_its_volume_goes_to_another_is_refused(
    world: World,
) -> None:
    base = world.import_volume("7")
    volume = world.attach(new_volume(owner="7", head=base))
    made = world.upload(volume, world.blocks(1, 2))
    assert made is not None
    world.detach(volume)
    after = world.attach(volume)
    world.pass_time(2 * GRACE)
    assert world.sweep().orphans == len(made.objects)
    with pytest.raises(StaleEpoch):
        publish_commit(
            volume.pk, epoch=after.epoch - 1, kind=Generation.Kind.PAUSE, commit=made
        )
    world.check()


def test_a_commit_from_a_generation_that_is_no_longer_the_head_is_refused(
    world: World,
) -> None:
    base = world.import_volume("7")
    volume = world.attach(new_volume(owner="7", head=base))
    late = world.upload(volume, world.blocks(1))
    assert late is not None
    head = world.write(volume, world.blocks(2))
    with pytest.raises(HeadMoved):
        world.publish(volume, late, {})
    assert Volume.objects.get(pk=volume.pk).head == head


def test_an_orphan_is_deleted_only_once_the_head_has_moved_past_it(world: World) -> None:
    base = world.import_volume("7")
    volume = world.attach(new_volume(owner="7", head=base))
    lost = world.upload(volume, world.blocks(1))
    assert lost is not None
    world.pass_time(2 * GRACE)
    assert not world.sweep().orphans
    head = world.write(volume, world.blocks(2))
    assert head is not None
    Generation.objects.filter(pk=head.pk).update(created_at=world.now)
    assert world.sweep().orphans == len(lost.objects)
    world.check()


def test_an_import_that_was_cut_off_is_swept_and_cannot_be_published_then(
    world: World,
) -> None:
    volume = new_volume(owner="7")
    world.store.fail = lambda key: key.startswith("roots")
    with pytest.raises(StoreUnavailable):
        world.import_volume("7")
    world.store.fail = lambda key: False
    left = Volume.objects.exclude(pk=volume.pk).get()
    assert world.packs_of(left.pk)
    assert not world.sweep().orphans
    world.pass_time(2 * GRACE)
    assert world.sweep().orphans
    assert not world.packs_of(left.pk)
    with pytest.raises(StaleEpoch):
        publish_generation(
            left.pk, epoch=0, kind=Generation.Kind.BASE, root_key="roots/x", size_bytes=1
        )


def test_objects_of_volumes_that_nobody_knows_are_never_touched(world: World) -> None:
    key = f"packs/{'ab' * 16}/00000001/{'cd' * 16}"
    world.store.put_new(key, b"another platform's")
    world.store.put_new("backups/of-somebody.tar", b"not ours")
    world.pass_time(10 * GRACE)
    assert world.sweep().strangers == 1
    assert key in world.store.objects


def test_what_an_earlier_release_stored_is_given_rows(world: World) -> None:
    base = world.import_volume("7")
    sizes = {key: len(body) for key, body in world.store.objects.items()}
    StoredObject.objects.all().delete()
    world.pass_time(2 * GRACE)
    done = world.sweep()
    assert done.adopted == len(sizes)
    assert dict(StoredObject.objects.values_list("key", "size_bytes")) == sizes
    delete(volume_of(base))
    world.settle()
    assert not world.store.objects


def test_a_plain_volumes_objects_go_only_under_an_earlier_epoch(world: World) -> None:
    base = world.import_volume("")
    Volume.objects.filter(pk=base.volume_id).update(key=None)
    plain = Volume.objects.create(owner="7", head=world_plain(world))
    world.contents[plain.head_id or 0] = {}
    volume = world.attach(plain)
    world.write(volume, world.blocks(1))
    world.write(volume, world.blocks(1))
    Generation.objects.filter(volume=volume, number=1).delete()
    dead = len(world.store.objects)
    world.collect()
    world.pass_time(2 * GRACE)
    assert not world.collect().deleted
    assert len(world.store.objects) == dead
    world.detach(volume)
    assert world.collect().deleted


def world_plain(world: World) -> Generation:
    volume = Volume.objects.create(owner="7")
    image = world.folder / "plain"
    image.write_bytes(b"")
    from hosts.volumes.commit import import_image  # noqa: PLC0415

    made = import_image(
        image,
        volume_id=volume.pk,
        store=world.store,
        size_bytes=1 << 30,
        keyring=world.keyring(),
    )
    return publish_commit(volume.pk, epoch=0, kind=Generation.Kind.BASE, commit=made)


@pytest.mark.django_db(transaction=True)
def test_a_fork_of_a_generation_that_is_about_to_go_gets_it_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    base = world.import_volume("7")
    volume = world.attach(new_volume(owner="7", head=base))
    old = world.write(volume, world.blocks(1, 2))
    assert old is not None
    world.write(volume, world.blocks(1, 2))
    forked = threading.Event()
    go_on = threading.Event()

    def fork() -> None:
        with transaction.atomic():
            new_volume(owner="7", head=old)
            forked.set()
            go_on.wait(10)
        connection.close()

    thread = threading.Thread(target=fork)
    thread.start()
    assert forked.wait(10)
    deleting = threading.Thread(target=thin_elsewhere, args=(old.pk,))
    deleting.start()
    go_on.set()
    thread.join()
    deleting.join()
    assert Generation.objects.filter(pk=old.pk).exists()
    world.settle()
    world.check()
    Volume.objects.filter(head=old).delete()
    thin(old.pk)
    with pytest.raises(GenerationGone):
        new_volume(owner="7", head=old)


def thin_elsewhere(pk: int) -> None:
    thin(pk)
    connection.close()


def thin(pk: int) -> None:
    """Give a generation up as the history does, unless something holds it."""
    from django.db import IntegrityError  # noqa: PLC0415

    try:
        with transaction.atomic():
            unpinned(Generation.objects.filter(pk=pk)).delete()
    except IntegrityError:
        return


# -- repacking --------------------------------------------------------------------------------


def sparse_volume(world: World) -> tuple[Volume, Generation]:
    """Make a volume of whose first packs little is left, with a snapshot of an early state."""
    base = world.import_volume("7", range(1))
    volume = world.attach(new_volume(owner="7", head=base))
    first = world.write(volume, world.blocks(*range(40)))
    assert first is not None
    snapshot = world.write(volume, world.blocks(*(n for n in range(40) if n % 4)))
    assert snapshot is not None
    world.write(volume, world.blocks(*(n for n in range(40) if n % 5)))
    Generation.objects.filter(pk=first.pk).delete()
    return volume, snapshot


def test_sparse_packs_are_emptied_though_a_snapshot_names_them(world: World) -> None:
    volume, snapshot = sparse_volume(world)
    world.detach(volume)
    before = world.packs_of(volume.pk)
    root = snapshot.root_key
    done = world.collect()
    assert done.repacked
    assert done.moved
    world.check()
    snapshot.refresh_from_db()
    assert snapshot.root_key != root
    world.settle()
    world.check()
    assert before - world.packs_of(volume.pk)
    assert world.row_keys() == set(world.store.objects) == world.named_keys()


def test_packs_that_only_a_reading_names_are_not_emptied_and_keep_nobody_waiting(
    world: World,
) -> None:
    volume, snapshot = sparse_volume(world)
    world.detach(volume)
    other, _ = sparse_volume(world)
    world.detach(other)
    begin_reading(snapshot, span=world.now - timezone.now() + timedelta(days=2))
    delete(volume)
    read = world.packs_of(volume.pk)
    before = world.packs_of(other.pk)

    world.settle()

    assert world.packs_of(volume.pk) <= read
    assert before - world.packs_of(other.pk)
    world.pass_time(timedelta(days=3))
    world.settle()
    assert not world.packs_of(volume.pk)


def upload_that_adopts(world: World, volume: Volume) -> Commit:
    """Collect until a commit of the volume takes blocks over that were copied for others.

    One run empties some packs only, and which ones hangs on their names.
    """
    for _ in range(SETTLE_RUNS):
        world.collect()
        made = world.upload(volume, {50: world.block()})
        assert made is not None
        if made.adopted:
            return made
    pytest.fail("no commit was ever given anything to adopt")


def test_a_running_disk_leaves_sparse_packs_at_its_next_commit_and_copies_little(
    world: World,
) -> None:
    volume, _ = sparse_volume(world)
    upload_that_adopts(world, volume)
    volume.refresh_from_db()
    asked = {key for key in volume.packs_to_rewrite if key.startswith("packs/")}
    assert asked
    head = volume.head_id
    world.write(volume, {51: world.block()})
    volume.refresh_from_db()
    assert volume.head_id != head
    assert not volume.packs_to_rewrite
    world.check()
    world.settle()
    world.check()
    assert not asked & set(world.store.objects)


def test_a_commit_that_adopts_what_was_given_up_is_refused_and_made_anew(
    world: World,
) -> None:
    volume, _ = sparse_volume(world)
    made = upload_that_adopts(world, volume)
    StoredObject.objects.filter(key=made.adopted[0]).delete()
    with pytest.raises(ObjectsCollected):
        world.publish(volume, made, {})
    assert world.write(volume, {50: world.block()}) is not None


def test_a_root_is_not_moved_under_a_disk_that_has_it(world: World) -> None:
    volume, snapshot = sparse_volume(world)
    world.detach(volume)
    other = world.attach(new_volume(owner="7", head=snapshot))
    root = snapshot.root_key
    world.collect()
    snapshot.refresh_from_db()
    assert snapshot.root_key == root
    assert world.write(other, world.blocks(1)) is not None
    world.settle()
    world.check()


def test_a_disk_that_is_attached_while_its_root_is_moved_keeps_the_root(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, _ = sparse_volume(world)
    world.detach(volume)
    attached: list[str] = []

    def attach_now(name: str) -> None:
        if name == "collect.root" and not attached:
            head = world.attach(volume).head
            assert head is not None
            attached.append(head.root_key)

    monkeypatch.setattr("hosts.volumes.collect.reach", attach_now)
    world.collect()
    head = Volume.objects.select_related("head").get(pk=volume.pk).head
    assert head is not None
    assert attached == [head.root_key]
    world.write(volume, world.blocks(1))
    world.settle()
    world.check()


def test_a_repacker_that_sleeps_until_its_rows_are_gone_moves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, _ = sparse_volume(world)
    world.detach(volume)

    def sleep_long(name: str) -> None:
        if name == "collect.root":
            monkeypatch.setattr("hosts.volumes.collect.reach", lambda _: None)
            world.settle()

    monkeypatch.setattr("hosts.volumes.collect.reach", sleep_long)
    world.collect()
    world.check()
    world.settle()
    world.check()
    assert world.row_keys() == set(world.store.objects) == world.named_keys()


def prepare_for_all_steps(world: World) -> None:
    """Have something to do at every step: sparse packs, the dead, an orphan."""
    volume, _ = sparse_volume(world)
    world.upload(volume, world.blocks(60))
    world.detach(volume)
    gone = world.import_volume("8")
    delete(volume_of(gone))
    world.collector()._mark()
    StoredObject.objects.filter(volume=gone.volume_id).update(dead_at=world.now - 2 * GRACE)
    world.pass_time(2 * GRACE)


def check_that_the_next_ends_it(world: World) -> None:
    world.settle()
    world.sweep()
    world.check()
    assert world.row_keys() == world.stored_keys() == world.named_keys()


@pytest.mark.parametrize("step", STEPS)
def test_a_collector_that_fails_at_any_step_loses_nothing_and_the_next_ends_it(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    prepare_for_all_steps(world)
    monkeypatch.setenv(VARIABLE, f"{step}=fail")
    with pytest.raises(StoreUnavailable):
        world.sweep() if step == "collect.fenced" else world.collect()
    monkeypatch.delenv(VARIABLE)

    world.check()
    check_that_the_next_ends_it(world)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("step", STEPS)
def test_a_collector_that_is_killed_at_any_step_loses_nothing_and_the_next_ends_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    s3: StoreConfig,
    processes: Processes,
    step: str,
) -> None:
    world = StoredWorld(tmp_path, monkeypatch, s3)
    prepare_for_all_steps(world)
    operation = "sweep" if step == "collect.fenced" else "collect"
    status = world.collect_elsewhere(processes, operation, f"{step}=kill")
    assert status == -signal.SIGKILL, f"{step} was not reached"

    world.check()
    assert world.collect_elsewhere(processes, operation) == 0
    world.check()
    check_that_the_next_ends_it(world)


@pytest.mark.parametrize(
    "step", ["collect.buried", "collect.reserved", "collect.packs", "collect.root"]
)
@pytest.mark.parametrize("uploaded", ["before", "meanwhile"])
def test_a_commit_that_is_published_while_packs_under_it_are_moved_keeps_all_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, uploaded: str
) -> None:
    """A disk is attached; its root leaves the head while the collector empties its packs."""
    volume, snapshot = sparse_volume(world)
    head = Volume.objects.select_related("head").get(pk=volume.pk).head
    assert head is not None
    # Other roots with the same sparse packs, which nothing keeps from being moved.
    world.detach(world.attach(new_volume(owner="7", head=snapshot)))
    writes = world.blocks(2, 3, 41)
    made = world.upload(volume, writes) if uploaded == "before" else None
    published: list[Generation] = []

    def publish_now(name: str) -> None:
        if name != step or published:
            return
        late = made or world.upload(volume, writes)
        assert late is not None
        content = world.contents[head.pk] | {n: b for n, b in writes.items() if b is not None}
        published.append(world.publish(volume, late, content))

    monkeypatch.setattr("hosts.collection.reach", publish_now)
    monkeypatch.setattr("hosts.volumes.collect.reach", publish_now)
    done = world.collect()
    assert published, f"{step} was not reached"
    assert done.moved
    world.check()
    # The disk goes on, and nothing that its root names goes while it does.
    for number in range(3):
        world.pass_time(2 * GRACE)
        world.collect()
        world.check()
        assert world.write(volume, world.blocks(number)) is not None
    world.detach(volume)
    check_that_the_next_ends_it(world)


# -- all of it at once ------------------------------------------------------------------------


class Life:
    """Random things happen to volumes of two teams over one base."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = Random(seed)
        world.random = Random(seed + 1000)
        base = world.import_volume("")
        self.snapshots = [base]
        self.pinned = {base.pk}
        self.volumes = [world.attach(new_volume(owner=o, head=base)) for o in ("7", "8")]

    def step(self) -> None:
        act = self.random.choice(
            (self.write,) * 3
            + (self.fork, self.thin, self.delete, self.move, self.collect, self.sweep)
        )
        act()

    def volume(self) -> Volume | None:
        alive = [v for v in self.volumes if Volume.objects.filter(pk=v.pk, deleted_at=None)]
        return Volume.objects.get(pk=self.random.choice(alive).pk) if alive else None

    def write(self) -> None:
        volume = self.volume()
        if volume is None:
            return
        if volume.attached_host_id is None:
            volume = self.world.attach(volume)
        low = self.random.randrange(50)
        numbers = [n for n in range(low, low + 12) if self.random.random() < 0.7]
        writes = self.world.blocks(*numbers)
        if self.random.random() < 0.3:
            writes |= dict.fromkeys(range(low, low + 3))
        self.world.write(volume, writes)

    def fork(self) -> None:
        rows = list(Generation.objects.filter(volume__deleted_at=None))
        source = self.random.choice(rows)
        owner = Volume.objects.get(pk=source.volume_id).owner or "7"
        self.volumes.append(new_volume(owner=owner, head=source))

    def thin(self) -> None:
        rows = list(unpinned(Generation.objects.exclude(pk__in=self.pinned)))
        for row in rows:
            if self.random.random() < 0.5:
                row.delete()

    def delete(self) -> None:
        volume = self.volume()
        if volume is not None and len(self.volumes) > 2:
            delete(volume)

    def move(self) -> None:
        volume = self.volume()
        if volume is not None and volume.attached_host_id is not None:
            self.world.detach(volume)

    def collect(self) -> None:
        self.world.pass_time(timedelta(hours=self.random.choice((0, 1, 7))))
        self.world.collect()
        self.world.check()

    def sweep(self) -> None:
        self.world.pass_time(timedelta(hours=self.random.choice((0, 7))))
        self.world.sweep()
        self.world.check()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_generations_read_as_written_and_nothing_else_stays(
    world: World, seed: int
) -> None:
    life = Life(world, seed)
    for _ in range(40):
        life.step()
    world.settle()
    world.sweep()
    world.check()
    for volume in Volume.objects.filter(attached_host__isnull=False):
        world.write(volume, world.blocks(63))
        world.detach(volume)
    world.settle()
    world.sweep()
    world.check()
    assert world.row_keys() == set(world.store.objects) == world.named_keys()
    named = world.named_keys()
    owners = dict(Volume.objects.values_list("pk", "owner"))
    expected: dict[str, int] = {}
    for pk, owner in owners.items():
        total = sum(len(world.store.objects[k]) for k in world.packs_of(pk) & named)
        if owner and total:
            expected[owner] = expected.get(owner, 0) + total
    assert stored_bytes_by_owner() == expected
