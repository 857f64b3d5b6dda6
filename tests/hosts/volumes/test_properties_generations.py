"""Any history of writes, zeros, forks and collections, against plain dictionaries."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from common.units import GiB, KiB, MiB
from hosts.volumes import collect, commit
from hosts.volumes.blocks import BLOCK_BYTES, ZERO_BLOCK
from hosts.volumes.cache import ObjectCache
from hosts.volumes.collect import Mark, Reader, Repacking, Uses
from hosts.volumes.commit import import_image, load_root, open_root
from hosts.volumes.index import LEAF_BLOCKS, Leaf, LeafRef, Root
from hosts.volumes.keys import Keyring
from hosts.volumes.naming import ObjectName, parse_key
from hosts.volumes.reader import ReaderMemory, VolumeReader, load_leaf
from tests.hosts.volumes.given_keys import KeyForEach
from tests.hosts.volumes.memory_store import MemoryStore
from tests.hosts.volumes.overlays import commit_overlays, write_overlay

DEVICE_BYTES = GiB
PLACES = (
    0,
    1,
    2,
    7,
    LEAF_BLOCKS - 1,
    LEAF_BLOCKS,
    LEAF_BLOCKS + 1,
    DEVICE_BYTES // BLOCK_BYTES - 1,
)
"""In a row, across the border of two leaves, and at the very end."""

Writes = dict[int, int | None]
Content = dict[int, int]
writes = st.dictionaries(st.sampled_from(PLACES), st.none() | st.integers(1, 6), max_size=6)


def block(value: int | None) -> bytes:
    """Make the block of a value: few, so that the same one comes again elsewhere."""
    if value is None:
        return ZERO_BLOCK
    noise = b"".join(bytes([(value * 31 + n * n) % 251]) for n in range(2 * KiB))
    return noise.ljust(BLOCK_BYTES, b"\0")


class Step(NamedTuple):
    """A commit of some overlays over an earlier generation, of its volume or a fork."""

    parent: int
    is_fork: bool
    layers: list[Writes]


steps = st.lists(
    st.builds(
        Step, st.integers(0, 100), st.booleans(), st.lists(writes, min_size=1, max_size=3)
    ),
    min_size=1,
    max_size=8,
)


@dataclass
class Generation:
    volume: UUID
    root_key: str
    content: Content


class History:
    """Generations in a store in memory, and what each must read as."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = MemoryStore()
        self.cache = self.new_cache()
        self.volumes = 1
        self.generations = [self._first()]

    def new_cache(self) -> ObjectCache:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return ObjectCache(folder, budget_bytes=256 * MiB, reader=self.store, patience_s=0)

    def _first(self) -> Generation:
        image = self.folder / "image"
        image.write_bytes(block(1) + ZERO_BLOCK + block(2))
        first = import_image(
            image,
            volume_id=UUID(int=1),
            store=self.store,
            size_bytes=DEVICE_BYTES,
            keyring=Keyring(KeyForEach()),
        )
        return Generation(UUID(int=1), first.root_key, {0: 1, 2: 2})

    def commit(self, step: Step) -> None:
        parent = self.generations[step.parent % len(self.generations)]
        volume = parent.volume
        if step.is_fork:
            self.volumes += 1
            volume = UUID(int=self.volumes)
        layers = [
            write_overlay(
                self.folder / f"overlay-{number}",
                DEVICE_BYTES,
                {at: None if value is None else block(value) for at, value in layer.items()},
            )
            for number, layer in enumerate(step.layers)
        ]
        made = commit_overlays(
            layers,
            base_root_key=parent.root_key,
            volume_id=volume,
            epoch=len(self.generations),
            store=self.store,
            cache=self.cache,
            keyring=Keyring(KeyForEach()),
        )
        content = dict(parent.content)
        for layer in step.layers:
            content |= {at: value for at, value in layer.items() if value is not None}
            for at in [at for at, value in layer.items() if value is None]:
                content.pop(at, None)
        assert (made is None) == (content == parent.content)
        if made is not None:
            changed = {at for at in PLACES if content.get(at) != parent.content.get(at)}
            assert made.blocks_changed == len(changed)
            assert {key for key, _ in made.objects} <= set(self.store.objects)
            assert all(len(self.store.objects[key]) == size for key, size in made.objects)
            assert made.uploaded_bytes == sum(size for _, size in made.objects)
            self.generations.append(Generation(volume, made.root_key, content))

    def check(self, generations: list[Generation]) -> None:
        """Read them with a cache that has nothing, and add up what they need."""
        cache, keyring = self.new_cache(), Keyring(KeyForEach())
        for generation in generations:
            root = load_root(self.store, generation.root_key, keyring)
            reader = VolumeReader(root, ReaderMemory(cache), keyring)
            for at in PLACES:
                assert reader.read_block(at) == block(generation.content.get(at)), at
            live = _live(root, partial(load_leaf, cache, keyring, root))
            assert live == {pack: use.live_bytes for pack, use in root.packs.items()}
            for pack, use in root.packs.items():
                assert len(self.store.objects[pack.key("packs")]) == use.stored_bytes


def _live(root: Root, read: Callable[[LeafRef], Leaf]) -> dict[ObjectName, int]:
    live: dict[ObjectName, int] = {}
    for ref in root.leaves.values():
        for pack, count in read(ref).live_bytes().items():
            live[pack] = live.get(pack, 0) + count
    return live


@contextmanager
def history() -> Iterator[History]:
    """Begin a history whose packs hold a few blocks instead of hundreds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(commit, "PACK_BYTES", 5 * KiB),
        patch.object(collect, "PACK_BYTES", 5 * KiB),
    ):
        yield History(Path(folder))


@settings(max_examples=30, deadline=None)
@given(steps)
def test_every_generation_reads_as_its_writes_say_for_ever(plan: list[Step]) -> None:
    with history() as world:
        for step in plan:
            world.commit(step)
        world.check(world.generations)


@settings(max_examples=30, deadline=None)
@given(steps, st.sets(st.integers(0, 8), max_size=6), st.integers(0, 9))
def test_what_is_left_after_a_collection_is_what_live_generations_need(
    plan: list[Step], given_up: set[int], which: int
) -> None:
    with history() as world:
        for step in plan:
            world.commit(step)
        live = [one for n, one in enumerate(world.generations) if n not in given_up]
        _repack(world, live, which)
        _sweep(world, live)
        world.check(live)


def _reader(world: History, keyring: Keyring) -> Reader:
    def root_of(key: str) -> Root:
        return open_root(world.cache.whole(key), parse_key(key)[1], keyring)

    def leaf_of(root: Root, ref: LeafRef) -> Leaf:
        return load_leaf(world.cache, keyring, root, ref)

    return Reader(load_root=root_of, load_leaf=leaf_of)


def _mark(reader: Reader, live: list[Generation]) -> Mark:
    mark = Mark()
    for generation in live:
        mark.add(generation.root_key, reader.root(generation.root_key))
    return mark


def _repack(world: History, live: list[Generation], which: int) -> None:
    """Empty some packs of one volume, and move every generation that names them."""
    keyring = Keyring(KeyForEach())
    reader = _reader(world, keyring)
    mark = _mark(reader, live)
    by_volume: dict[bytes, set[ObjectName]] = {}
    for pack in mark.packs:
        by_volume.setdefault(pack.volume, set()).add(pack)
    if not by_volume:
        return
    volume = sorted(by_volume)[which % len(by_volume)]
    packs = set(sorted(by_volume[volume])[: 1 + which % 3])
    naming = [g for g in live if not packs.isdisjoint(reader.root(g.root_key).packs)]
    keys = sorted({generation.root_key for generation in naming})
    reserved: set[str] = set()
    repacking = Repacking(
        world.store,
        reader,
        keyring,
        volume=volume,
        packs=packs,
        leaf_objects=mark.sparse_leaves(),
        epochs={generation.volume.bytes: 99 for generation in world.generations},
        reserve=lambda _volume, key, _size: reserved.add(key),
    )
    blocks = Uses(reader, keys, packs).blocks
    repacking.find_elsewhere(blocks, [one.root_key for one in live], mark)
    before = set(world.store.objects)
    repacking.copy(blocks)
    moved = {twin.old_key: twin for twin in map(repacking.move, keys)}
    assert set(world.store.objects) - before <= reserved
    for generation in naming:
        twin = moved[generation.root_key]
        generation.root_key = twin.new_key
        assert packs.isdisjoint(reader.root(twin.new_key).packs)
        assert twin.new_objects <= set(world.store.objects)


def _sweep(world: History, live: list[Generation]) -> None:
    """Delete what a fresh mark does not have."""
    mark = _mark(_reader(world, Keyring(KeyForEach())), live)
    world.store.delete([key for key in world.store.objects if key not in mark])
    kept = {parse_key(key)[0] for key in world.store.objects}
    assert kept <= {"packs", "leaves", "roots"}
