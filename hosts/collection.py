"""The collector: which objects no generation needs, their rows, and deleting both.

An object is deleted only when nothing can ever need it again. Why that holds, whatever
races, and however long any worker or collector sleeps on any line:

1. A *live root* is the root of a `Generation` row, or of a `Reading` that began while there
   was one. Heads, snapshots, templates and history are such rows; a fork is a volume whose
   head is one. Whoever makes something of a
   generation holds its row (`services.keep_generation`, or the foreign key), so it cannot
   be given up in the same moment.
2. A commit can be published under the epoch that is its volume's, and only if it was made
   from the volume's head (`services.publish_commit`, under the row's lock). It names what
   it put itself, what its base names, and packs that it adopted from a donor.
3. What it put has names that hold the hash of its base (`volumes.commit`), and a head never
   comes back under one epoch. So once the head has moved on, no commit that puts an object
   of such a name can be published. Every published object has a row from the moment that
   the head names it. Hence: **an object with a row which no live root names now is never
   named again**, but through 5.
4. A collector reads the live roots, and calls rows *dead* that they do not name. One that
   was dead for longer than the grace and that a fresh reading does not name either is
   deleted, its row first: in one statement, which only takes rows that are dead *still*.
   A collector that wakes after hours with an old reading can therefore do no harm: what it
   saw dead has died for ever, or was revived, and then its row is not dead.
5. What revives a row, under its lock: the move of a generation to the twin of its root
   (repacking; its objects have dead rows before they are put), and a commit that adopts.
   Both are refused when a row is gone. Row gone means object gone, or going; never the
   other way round.
6. Objects without a row (uploads that came to nothing, a deletion that was cut off, what an
   earlier release stored) are found by listing the store. One is deleted when it is older
   than the grace and *can no longer be published*: its volume's epoch is a later one (that
   of a volume which nobody has attached is raised for the purpose), or its head has moved
   since. Only after that has been made sure are roots and rows read once more.
7. Volumes of the release before know no base in their names, so 3 does not hold for them:
   their objects are deleted only under an earlier epoch than the volume's.

The grace is there for whoever still reads a generation that was just given up; one who
will read for long says so (`services.begin_reading`).
A root that cannot be read spares all that its owner has.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, TypeVar
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, connection, transaction
from django.db.models import Exists, OuterRef, QuerySet, Sum
from django.utils import timezone

from common.units import GiB
from hosts import local
from hosts.keys import DatabaseKeys
from hosts.models import Generation, Reading, StoredObject, Volume
from hosts.volumes.cache import ObjectCache
from hosts.volumes.collect import (
    Mark,
    Moved,
    Reader,
    Repacking,
    Uses,
    worth_emptying,
)
from hosts.volumes.commit import open_root
from hosts.volumes.errors import Corrupt, KeyDestroyed, ObjectMissing, StoreUnavailable
from hosts.volumes.failpoints import reach
from hosts.volumes.index import Leaf, LeafRef, Root
from hosts.volumes.keys import Keyring, KeySource
from hosts.volumes.naming import ObjectName, parse_key
from hosts.volumes.objects import Listed, ObjectStore
from hosts.volumes.reader import load_leaf

log = logging.getLogger(__name__)

ROWS = 1000
SETTLED = timedelta(minutes=1)
"""Younger rows are not looked at: their generation may be newer than the reading of roots.
Clocks of two machines may differ by less."""
MOVED_SINCE = timedelta(minutes=10)
"""By how much a head must be younger than an object to be sure that it came after it: the
object store has a clock of its own."""
UNREADABLE = 3
"""So many roots may be unavailable before a run gives up."""
PACKS_AT_ONCE = 64
"""Of one volume, in one run."""
COPIED_SHARE = 0.05
"""Of a volume's packs, in one run."""
REPACKED_BYTES = 2 * GiB
"""Copied in one run; the next goes on."""
DONORS = 8
_LOCK = "sandkeep collector"

T = TypeVar("T")


@dataclass
class Collected:
    """What a run has done."""

    roots: int = 0
    buried: int = 0
    """Objects that were found dead."""
    revived: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    repacked: int = 0
    """Packs that were emptied."""
    moved: int = 0
    """Roots that were given a twin."""
    adopted: int = 0
    """Objects of earlier releases that were given a row."""
    orphans: int = 0
    strangers: int = 0
    """Objects of volumes that no row knows: they are never touched."""
    unreadable: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Live:
    """A generation row, as the roots were read."""

    pk: int
    number: int
    volume_id: UUID


class Collector:
    """One run's work. Safe beside anything, other collectors included."""

    def __init__(
        self, store: ObjectStore, cache: ObjectCache, keys: KeySource, *, grace: timedelta
    ) -> None:
        self._store = store
        self._cache = cache
        self._grace = grace
        self._keyring = Keyring(keys)
        self._reader = Reader(load_root=self._load_root, load_leaf=self._load_leaf)
        self._done = Collected()
        self._spared: set[str] = set()
        self._roots: dict[str, list[_Live]] = {}
        self._named_by: dict[bytes, set[str]] = {}

    def _load_root(self, key: str) -> Root:
        return open_root(self._cache.whole(key), parse_key(key)[1], self._keyring)

    def _load_leaf(self, root: Root, ref: LeafRef) -> Leaf:
        return load_leaf(self._cache, self._keyring, root, ref)

    # -- a run ------------------------------------------------------------------------------

    def collect(self) -> Collected:
        """Forget deleted volumes, mark, bury, delete what is long dead, and repack.

        Raises:
            StoreUnavailable: nothing was deleted that should not be; the next run goes on.
        """
        forget_deleted_volumes()
        began_at = timezone.now()
        mark = self._mark()
        self._bury(mark, began_at)
        reach("collect.buried")
        self._delete_dead(mark, began_at - self._grace)
        self._repack(mark)
        return self._done

    def _mark(self) -> Mark:
        """Read every live root."""
        mark = Mark()
        self._roots, self._named_by = {}, {}
        owners: dict[str, str] = {}
        rows = Generation.objects.values_list(
            "pk", "number", "volume_id", "root_key", "volume__owner"
        )
        for pk, number, volume_id, root_key, owner in _pages(rows):
            self._roots.setdefault(root_key, []).append(_Live(pk, number, volume_id))
            owners[root_key] = owner
        for root_key in list(self._roots):
            root = self._read_root(root_key, owners[root_key])
            if root is None:
                del self._roots[root_key]
                continue
            mark.add(root_key, root)
            for volume in root.volumes():
                self._named_by.setdefault(volume, set()).add(root_key)
        self._done.roots = len(self._roots)
        for root_key in _read_roots() - self._roots.keys():
            root = self._read_root(root_key, "")
            if root is not None:
                mark.add(root_key, root)
        return mark

    def _read_root(self, root_key: str, owner: str) -> Root | None:
        """Read a root; None for one that says nothing (any more)."""
        try:
            return self._reader.root(root_key)
        except KeyDestroyed:
            return None  # nobody will ever read what it names
        except (Corrupt, ObjectMissing, StoreUnavailable) as error:
            log.warning("root %s cannot be read, its owner's objects stay: %s", root_key, error)
            self._done.unreadable.append(root_key)
            self._spared |= {owner, ""}
            if len(self._done.unreadable) > UNREADABLE and isinstance(error, StoreUnavailable):
                raise
            return None

    # -- what is dead -----------------------------------------------------------------------

    def _bury(self, mark: Mark, began_at: datetime) -> None:
        """Note which objects died, and which were called dead too early."""
        rows = StoredObject.objects.filter(created_at__lt=began_at - SETTLED).values_list(
            "pk", "key", "dead_at", "volume__owner"
        )
        died: list[int] = []
        alive: list[int] = []
        for pk, key, dead_at, owner in _pages(rows):
            if key in mark:
                if dead_at is not None:
                    alive.append(pk)
            elif dead_at is None and owner not in self._spared:
                died.append(pk)
        for pks in _batches(died):
            dead = StoredObject.objects.filter(pk__in=pks, dead_at=None)
            self._done.buried += dead.update(dead_at=timezone.now())
        for pks in _batches(alive):
            marked = StoredObject.objects.filter(pk__in=pks, dead_at__isnull=False)
            self._done.revived += marked.update(dead_at=None)

    def _delete_dead(self, mark: Mark, before: datetime) -> None:
        rows = StoredObject.objects.filter(dead_at__lt=before).values_list(
            "pk", "key", "volume_id", "volume__owner"
        )
        doomed: list[int] = []
        volumes: dict[UUID, list[tuple[int, str]]] = {}
        for pk, key, volume_id, owner in _pages(rows):
            if key not in mark and owner not in self._spared:
                volumes.setdefault(volume_id, []).append((pk, key))
        for volume_id, objects in volumes.items():
            plain = _plain_epoch(volume_id)
            doomed += [
                pk for pk, key in objects if plain is None or parse_key(key)[1].epoch < plain
            ]
        for pks in _batches(doomed):
            self._delete_rows(pks, before)

    def _delete_rows(self, pks: Sequence[int], before: datetime) -> None:
        """Delete objects, rows first: a row that is there says that its object is."""
        with transaction.atomic():
            dead = StoredObject.objects.filter(pk__in=pks, dead_at__lt=before)
            rows = list(dead.select_for_update().values_list("pk", "key", "size_bytes"))
            StoredObject.objects.filter(pk__in=[pk for pk, _, _ in rows]).delete()
        reach("collect.forgotten")
        self._store.delete([key for _, key, _ in rows])
        reach("collect.deleted")
        self._done.deleted += len(rows)
        self._done.deleted_bytes += sum(size for _, _, size in rows)

    # -- repacking --------------------------------------------------------------------------

    def _repack(self, mark: Mark) -> None:
        fixed = set(
            Volume.objects.filter(attached_host__isnull=False, head__isnull=False).values_list(
                "head_id", flat=True
            )
        )
        budget_bytes = REPACKED_BYTES
        for volume, packs in mark.sparse().items():
            if budget_bytes <= 0:
                return
            try:
                budget_bytes -= self._repack_volume(mark, volume, packs, fixed)
            except (Corrupt, ObjectMissing, KeyDestroyed) as error:
                log.warning("packs of volume %s stay as they are: %s", volume.hex(), error)

    def _repack_volume(
        self, mark: Mark, volume: bytes, packs: set[ObjectName], fixed: set[int]
    ) -> int:
        """Empty sparse packs of a volume; return how many bytes were copied at most."""
        roots = sorted(self._named_by.get(volume, ()), key=self._age)
        naming = [key for key in roots if not packs.isdisjoint(self._reader.root(key).packs)]
        if not naming:
            return 0  # only who reads without a generation needs them, and that ends
        uses = Uses(self._reader, naming, packs)
        root_bytes = max(self._reader.root(key).encoded_bytes() for key in naming)
        sparse = self._some(mark, volume, worth_emptying(uses, mark, root_bytes), uses)
        if not sparse:
            return 0
        emptied = uses.naming(sparse)
        held = {key for key in emptied if any(row.pk in fixed for row in self._roots[key])}
        movable = [key for key in roots if key in emptied - held]
        moved = self._move(mark, volume, sparse, movable)
        others = [key for key in roots if key not in emptied]
        self._ask_attached(sparse, held, next(reversed([*others, *moved.values()]), None))
        self._done.repacked += len(sparse)
        needed = uses.needed_bytes()
        return sum(needed[pack] for pack in sparse)

    def _some(
        self, mark: Mark, volume: bytes, packs: Sequence[ObjectName], uses: Uses
    ) -> list[ObjectName]:
        """Take the sparsest packs: what is copied lies in the store twice for a grace."""
        needed = uses.needed_bytes()
        stored = sum(m.stored_bytes for name, m in mark.packs.items() if name.volume == volume)
        budget_bytes = COPIED_SHARE * stored
        chosen: list[ObjectName] = []
        for pack in sorted(
            packs, key=lambda pack: needed[pack] / mark.packs[pack].stored_bytes
        ):
            budget_bytes -= needed[pack]
            if chosen and (budget_bytes < 0 or len(chosen) == PACKS_AT_ONCE):
                break
            chosen.append(pack)
        return chosen

    def _age(self, root_key: str) -> tuple[int, int]:
        return max((row.number, row.pk) for row in self._roots[root_key])

    def _move(
        self, mark: Mark, volume: bytes, packs: Sequence[ObjectName], root_keys: Sequence[str]
    ) -> dict[str, str]:
        """Give roots twins that do not name these packs; return old key → new key."""
        if not root_keys:
            return {}
        involved = {volume} | {parse_key(key)[1].volume for key in root_keys}
        found = Volume.objects.in_bulk([UUID(bytes=one) for one in involved])
        repacking = Repacking(
            self._store,
            self._reader,
            self._keyring,
            volume=volume,
            packs=packs,
            leaf_objects=mark.sparse_leaves(),
            epochs={one.bytes: row.epoch for one, row in found.items()},
            reserve=_reserve,
        )
        blocks = Uses(self._reader, root_keys, set(packs)).blocks
        newest = sorted(self._named_by[volume], key=self._age)[-DONORS:]
        repacking.find_elsewhere(blocks, newest, mark)
        repacking.copy(blocks)
        done = {}
        for key in root_keys:
            twin = repacking.move(key)
            if self._publish_twin(twin):
                done[twin.old_key] = twin.new_key
                reach("collect.moved")
        self._done.moved += len(done)
        return done

    def _publish_twin(self, twin: Moved) -> bool:
        """Move every generation of a root to its twin, unless a host has one attached."""
        with transaction.atomic():
            rows = Generation.objects.filter(root_key=twin.old_key).order_by("pk")
            pks = list(rows.select_for_update(no_key=True).values_list("pk", flat=True))
            if Volume.objects.filter(head__in=pks, attached_host__isnull=False).exists():
                return False
            stored = StoredObject.objects.filter(key__in=twin.new_objects)
            if stored.update(dead_at=None) != len(twin.new_objects):
                transaction.set_rollback(True)
                return False
            return bool(Generation.objects.filter(pk__in=pks).update(root_key=twin.new_key))

    def _ask_attached(
        self, packs: Sequence[ObjectName], held: Collection[str], donor: str | None
    ) -> None:
        """Have the next commit of attached volumes leave these packs.

        Args:
            donor: a root that has the same blocks elsewhere.
        """
        for root_key in held:
            named = self._reader.root(root_key).packs
            for volume_id in Volume.objects.filter(
                head__in=[row.pk for row in self._roots[root_key]], attached_host__isnull=False
            ).values_list("pk", flat=True):
                keys = [
                    pack.key("packs")
                    for pack in packs
                    if pack in named and (donor or pack.volume == volume_id.bytes)
                ]
                if keys:
                    Volume.objects.filter(pk=volume_id).update(
                        packs_to_rewrite=keys + ([donor] if donor else [])
                    )

    # -- what has no row --------------------------------------------------------------------

    def sweep_orphans(self) -> Collected:
        """Delete what lies in the store and can never be published; adopt what is needed.

        Raises:
            StoreUnavailable: the next run goes on.
        """
        old = timezone.now() - self._grace
        unknown: dict[UUID, list[Listed]] = {}
        for kind in ("packs/", "leaves/", "roots/"):
            for batch in _batches(self._store.listing(kind)):
                for item in self._without_row(batch):
                    if item.modified_at < old:
                        volume_id = UUID(bytes=parse_key(item.key)[1].volume)
                        unknown.setdefault(volume_id, []).append(item)
        doomed = [
            item
            for volume_id, items in unknown.items()
            for item in self._unpublishable(volume_id, items)
        ]
        reach("collect.fenced")
        mark = self._mark()
        self._adopt(mark, unknown)
        for batch in _batches(doomed):
            self._delete_orphans(mark, batch)
        return self._done

    def _without_row(self, batch: Sequence[Listed]) -> list[Listed]:
        keys = [item.key for item in batch]
        known = set(StoredObject.objects.filter(key__in=keys).values_list("key", flat=True))
        return [item for item in batch if item.key not in known and _is_key(item.key)]

    def _unpublishable(self, volume_id: UUID, items: Sequence[Listed]) -> list[Listed]:
        """Pick what no commit can name any more, and see to it that none can."""
        with transaction.atomic():
            volume = (
                Volume.objects.select_for_update(of=("self",))
                .select_related("head")
                .filter(pk=volume_id)
                .first()
            )
            if volume is None:
                self._done.strangers += len(items)
                return []
            epochs = {item.key: parse_key(item.key)[1].epoch for item in items}
            if volume.attached_host_id is None and max(epochs.values()) >= volume.epoch:
                volume.epoch = max(epochs.values()) + 1
                volume.save(update_fields=["epoch"])
            moved_at = None
            if volume.head is not None and volume.key_id is not None:
                moved_at = volume.head.created_at - MOVED_SINCE
        return [
            item
            for item in items
            if epochs[item.key] < volume.epoch
            or volume.deleted_at is not None
            or (moved_at is not None and item.modified_at < moved_at)
        ]

    def _adopt(self, mark: Mark, unknown: Mapping[UUID, Sequence[Listed]]) -> None:
        """Give rows to objects that live roots name: an earlier release wrote none."""
        for volume_id, items in unknown.items():
            needed = [item for item in items if item.key in mark]
            rows = [
                StoredObject(volume_id=volume_id, key=item.key, size_bytes=item.size_bytes)
                for item in needed
            ]
            for batch in _batches(rows):
                StoredObject.objects.bulk_create(batch, ignore_conflicts=True)
            self._done.adopted += len(rows)

    def _delete_orphans(self, mark: Mark, batch: Sequence[Listed]) -> None:
        owners = dict(
            Volume.objects.filter(
                pk__in={UUID(bytes=parse_key(item.key)[1].volume) for item in batch}
            ).values_list("pk", "owner")
        )
        doomed = [
            item
            for item in self._without_row(batch)
            if item.key not in mark
            and owners[UUID(bytes=parse_key(item.key)[1].volume)] not in self._spared
        ]
        self._store.delete([item.key for item in doomed])
        self._done.orphans += len(doomed)
        self._done.deleted_bytes += sum(item.size_bytes for item in doomed)


# -- rows ---------------------------------------------------------------------------------


def forget_deleted_volumes() -> int:
    """Give up the generations of deleted volumes that nothing else is made of."""
    deleted = Volume.objects.filter(deleted_at__isnull=False)
    deleted.filter(head__isnull=False).update(head=None)
    gone = unpinned(Generation.objects.filter(volume__in=deleted)).values_list("pk", flat=True)
    forgotten = 0
    for pks in _batches(list(gone)):
        try:
            with transaction.atomic():
                forgotten += unpinned(Generation.objects.filter(pk__in=pks)).delete()[0]
        except IntegrityError:
            # Something was made of one at this moment; the next run leaves that one out.
            log.info("generations of deleted volumes are kept for now")
    return forgotten


def unpinned(generations: QuerySet[Generation]) -> QuerySet[Generation]:
    """Leave out the generations that a head, a snapshot or anything else names."""
    for relation in Generation._meta.related_objects:  # noqa: SLF001 - Django's, and documented
        naming = relation.related_model._default_manager.filter(  # noqa: SLF001 - so is this
            **{relation.field.name: OuterRef("pk")}
        )
        generations = generations.filter(~Exists(naming))
    return generations


def _read_roots() -> set[str]:
    """List the roots that somebody reads without a generation that has them (any more)."""
    readings = Reading.objects.filter(until__gt=timezone.now())
    return set(readings.values_list("root_key", flat=True))


def _reserve(volume: bytes, key: str, size_bytes: int) -> None:
    """Give an object a row before it is put: dead, until a generation needs it."""
    StoredObject.objects.create(
        volume_id=UUID(bytes=volume), key=key, size_bytes=size_bytes, dead_at=timezone.now()
    )


def _plain_epoch(volume_id: UUID) -> int | None:
    """Say below which epoch objects of a volume without a key may be deleted; None is all.

    Nobody publishes under an earlier epoch. That of a volume which no host has is raised.
    """
    with transaction.atomic():
        volume = Volume.objects.select_for_update().get(pk=volume_id)
        if volume.key_id is not None or volume.deleted_at is not None:
            return None
        if volume.attached_host_id is None:
            volume.epoch += 1
            volume.save(update_fields=["epoch"])
        return volume.epoch


def _pages(rows: "QuerySet[Any, tuple[Any, ...]]") -> Iterator[tuple[Any, ...]]:
    """Read rows, whose first column is the primary key, some at a time."""
    last = 0
    while True:
        page = list(rows.filter(pk__gt=last).order_by("pk")[:ROWS])
        yield from page
        if len(page) < ROWS:
            return
        last = page[-1][0]


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, ROWS)):
        yield batch


def _is_key(key: str) -> bool:
    try:
        parse_key(key)
    except Corrupt:
        return False
    return True


# -- what services call -------------------------------------------------------------------


def collect() -> Collected | None:
    """Collect with this host's store and keys; None while another collector runs."""
    with _alone() as is_alone:
        return _collector().collect() if is_alone else None


def sweep_orphans() -> Collected | None:
    """Look for objects without rows; None while another collector runs."""
    with _alone() as is_alone:
        return _collector().sweep_orphans() if is_alone else None


def _collector() -> Collector:
    store = local.object_store()
    cache = ObjectCache(
        local.disks().config.cache_dir,
        budget_bytes=settings.CACHE_BUDGET_BYTES,
        reader=store,
        patience_s=0,
    )
    grace = timedelta(seconds=settings.COLLECT_GRACE_S)
    return Collector(store, cache, DatabaseKeys(), grace=grace)


@contextmanager
def _alone() -> Iterator[bool]:
    """Take turns, to save work: what is done is safe beside others (see above)."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [_LOCK])
        is_alone = bool(cursor.fetchone()[0])
    try:
        yield is_alone
    finally:
        if is_alone:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", [_LOCK])


def stored_bytes_by_owner() -> dict[str, int]:
    """Sum the packs that each owner stores and some live root names; the platform's are free.

    The bill and the collector both go by this.
    """
    rows = (
        StoredObject.objects.filter(dead_at=None, key__startswith="packs/")
        .exclude(volume__owner="")
        .values_list("volume__owner")
        .annotate(bytes=Sum("size_bytes"))
    )
    return {owner: int(total) for owner, total in rows}


def stored_bytes(volume_id: UUID) -> int:
    """Sum the packs of one volume that some live root names."""
    rows = StoredObject.objects.filter(
        volume_id=volume_id, dead_at=None, key__startswith="packs/"
    )
    return int(rows.aggregate(total=Sum("size_bytes"))["total"] or 0)
