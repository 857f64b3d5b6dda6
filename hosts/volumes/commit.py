"""Writing generations: an image as the first, an overlay's changes as the next.

    packs  →  leaves  →  root  →  (the caller moves the head)

Never the other way round, so a root in the store names only what is there. What is written
depends on nothing but the base and the content, in order: doing it again gives the same
names, and the store keeps what it has.

Every object holds the hash of the root that the commit is based on. So once the head has
moved on, nobody will ever again put an object of an earlier name and publish it: that is
what makes it safe to delete what no root names (see `collect`). And nobody puts an object
before what its commit is based on is the head.

The names of a commit's objects are known before they are put, and so is the base of the next
commit: that is read and encoded while this one is on its way (see `Prepared`).
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol
from uuid import UUID

from common.units import MiB
from hosts.volumes.blocks import BLOCK_BYTES, ZERO_BLOCK, Block, block_digest, encode_block
from hosts.volumes.cache import ObjectCache
from hosts.volumes.errors import Corrupt, ObjectMissing
from hosts.volumes.failpoints import reach
from hosts.volumes.index import (
    LEAF_BLOCKS,
    MAX_LEAF_BYTES,
    NO_PARENT,
    Entry,
    Leaf,
    LeafRef,
    PackUse,
    Root,
    check_device_size,
)
from hosts.volumes.keys import Keyring, Sealer
from hosts.volumes.naming import Kind, ObjectName, content_digest, parse_key
from hosts.volumes.objects import ObjectReader, ObjectStore
from hosts.volumes.qcow2 import Cluster, Overlay, open_overlay
from hosts.volumes.reader import ReaderMemory, VolumeReader, load_leaf, open_leaf
from hosts.volumes.uploads import Gate, Room, Uploads

PACK_MAGIC = b"SKPACK\0\1"

PACK_BYTES = 6 * MiB
"""A pack is closed when it reaches this: large enough that requests cost little beside
bytes, small enough that one with little left alive is cheap to rewrite."""

PACK_BLOCKS = 8192
"""Also closed at this many blocks, so that zeros in all but name cannot fill memory."""

ENCODERS = 2
"""Threads that hash, compress and seal: all three let go of the interpreter's lock."""

BATCH_BLOCKS = 16
"""Blocks that a thread is given at once: handing over costs about what a block does."""

BATCHES = 4
"""Batches under way, 1 MiB each."""

Progress = Callable[[int, int], None]
"""Told (bytes of the device done, bytes in all)."""


@dataclass(frozen=True)
class Commit:
    """A generation that is in the store, and what it cost."""

    root_key: str
    size_bytes: int
    blocks_changed: int
    """Blocks that now read otherwise than before, holes included."""
    uploaded_bytes: int
    """Packs, leaves and root."""
    packs: int
    index_bytes: int
    """Leaves and root."""
    stored_bytes: int
    """What the generation retains in this volume's own packs; a shared base is not in it."""
    base_root_key: str | None = None
    """What it was made from; None for the first."""
    objects: tuple[tuple[str, int], ...] = ()
    """Key and size in bytes of every object that the commit put: packs, leaves, root."""
    adopted: tuple[str, ...] = ()
    """Keys of packs that it names and neither put nor found in its base."""


class Rewrite(frozenset[ObjectName]):
    """Packs that a commit shall not need any more, and who has their blocks elsewhere.

    Blocks that the donor has are not copied: the new generation names what it names.
    Publishing makes sure that this is still there.
    """

    donor_root_key: str | None = None

    @classmethod
    def of(cls, packs: Iterable[ObjectName], donor_root_key: str | None) -> "Rewrite":
        rewrite = cls(packs)
        rewrite.donor_root_key = donor_root_key
        return rewrite


class LeafSource(Protocol):
    """Gives the leaves of the generation that a commit is based on."""

    def __call__(self, ref: LeafRef) -> Leaf: ...


def load_root(reader: ObjectReader, key: str, keyring: Keyring) -> Root:
    """Read a root and check it.

    Raises:
        Corrupt: the store holds something else under its name.
        KeyDestroyed: nobody can read it any more.
    """
    kind, name = parse_key(key)
    body = reader.get(key)
    if kind != "roots" or content_digest(body) != name.digest:
        raise Corrupt(f"{key} is not what its name says.")
    return open_root(body, name, keyring)


def open_root(body: bytes, name: ObjectName, keyring: Keyring) -> Root:
    """Decode a root whose name has been checked, and learn the keys that it needs."""
    root = Root.decode(keyring.open("roots", name.volume, body))
    keyring.learn(root.volumes())
    return root


def import_image(
    image: Path,
    *,
    volume_id: UUID,
    store: ObjectStore,
    size_bytes: int,
    keyring: Keyring,
    epoch: int = 0,
    cache: ObjectCache | None = None,
    progress: Progress | None = None,
) -> Commit:
    """Write a raw image as the first generation of a volume.

    Holes and zeros of the image cost nothing; the device may be larger than the image.

    Args:
        size_bytes: of the device, a multiple of the block size.

    Raises:
        Corrupt: the image is larger than the device, or the size is impossible.
        StoreUnavailable: call again; what was uploaded is found.
    """
    check_device_size(size_bytes)
    with _Writer(
        volume_id=volume_id,
        epoch=epoch,
        base=Root(size_bytes),
        base_root_key=None,
        read_leaf=_no_leaf,
        keyring=keyring,
        uploads=Uploads(store, cache, room=Room(), gate=Gate(is_open=True)),
        rewrite=frozenset(),
    ) as writer:
        fd = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
        try:
            image_bytes = os.fstat(fd).st_size
            if image_bytes > size_bytes:
                raise Corrupt("The image is larger than its device.")
            for number in _data_blocks(fd, image_bytes):
                block = os.pread(fd, BLOCK_BYTES, number * BLOCK_BYTES)
                writer.write(number, block.ljust(BLOCK_BYTES, b"\0"))
                if progress is not None and number % 256 == 0:
                    progress(number * BLOCK_BYTES, image_bytes)
            if progress is not None:
                progress(image_bytes, image_bytes)
        finally:
            os.close(fd)
        prepared = writer.finish(even_if_unchanged=True)
        assert prepared is not None
        return prepared.put()


def _no_leaf(ref: LeafRef) -> Leaf:
    raise Corrupt(f"An empty generation has no leaf {ref}.")


def _data_blocks(fd: int, end: int) -> Iterator[int]:
    """List the blocks of a file that are not wholly in its holes."""
    following = 0
    at = 0
    while at < end:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: no more data
            return
        at = os.lseek(fd, start, os.SEEK_HOLE)
        first = max(following, start // BLOCK_BYTES)
        following = -(-min(at, end) // BLOCK_BYTES)
        yield from range(first, following)


class Prepared:
    """A generation that is encoded whole: its packs are on their way, its index is not yet.

    Nothing of it changes any more, so the next can be made from it before it is put.
    """

    def __init__(
        self, commit: Commit, uploads: Uploads, leaves: Mapping[str, bytes], root: bytes
    ) -> None:
        self.commit = commit
        """What it is once it is put."""
        self._uploads = uploads
        self._leaves = leaves
        self._root = root

    @property
    def index(self) -> Mapping[str, bytes]:
        """The objects of its index by key: they may not be in the store yet."""
        return {**self._leaves, self.commit.root_key: self._root}

    def packs_under_way(self) -> int:
        """Count the packs that are not in the store yet."""
        return self._uploads.under_way()

    def put(self) -> Commit:
        """Wait for the packs, then put the leaves, then the root.

        Raises:
            StoreUnavailable: prepare it again; what was uploaded is found.
        """
        self._uploads.wait()
        reach("commit.packs")
        for key, body in self._leaves.items():
            self._uploads.put(key, body)
        reach("commit.leaves")
        self._uploads.put(self.commit.root_key, self._root)
        reach("commit.root")
        return self.commit


@contextmanager
def prepare_overlays(
    overlays: Sequence[Path],
    *,
    base_root_key: str,
    volume_id: UUID,
    epoch: int,
    store: ObjectStore,
    cache: ObjectCache,
    keyring: Keyring,
    rewrite: frozenset[ObjectName] = frozenset(),
    even_if_unchanged: bool = False,
    base_index: Mapping[str, bytes] = MappingProxyType({}),
    room: Room | None = None,
    gate: Gate | None = None,
) -> Iterator[Prepared | None]:
    """Encode the changes of overlays over their base; what is not put by the end is given up.

    A cluster that holds what the base has costs a hash and nothing else; one of zeros, or
    discarded, becomes a hole. Only leaves that change are read and written.

    Args:
        overlays: the lowest first. Nobody may be writing to them.
        cache: for roots and leaves of the base; uploaded objects are put into it.
        rewrite: packs that the new generation shall not need: what is left alive in them
            is written anew, or named where the donor has it. Packs of other volumes, such
            as a base's, are left only for a donor's: copies would be as many as forks.
        even_if_unchanged: make a generation although the device reads as its base.
        base_index: objects of the base that may not be in the store yet.
        room: shared with a commit that is on its way.
        gate: opened once the base is the head. By default it is.

    Yields: None when the device reads exactly as its base, nothing was to be rewritten, and
        there need not be a generation.

    Raises:
        StoreUnavailable: call again; what was uploaded is found.
        Corrupt: an overlay or the base is not what it should be.
    """
    base_body = base_index.get(base_root_key) or cache.whole(base_root_key)
    base = open_root(base_body, parse_key(base_root_key)[1], keyring)

    def read_leaf(ref: LeafRef) -> Leaf:
        body = base_index.get(ref.object.key("leaves"))
        if body is None:
            return load_leaf(cache, keyring, base, ref)
        return open_leaf(body[ref.offset : ref.offset + ref.length], ref, keyring)

    packs = rewrite & base.packs.keys()
    with _Writer(
        volume_id=volume_id,
        epoch=epoch,
        base=base,
        base_root_key=base_root_key,
        read_leaf=read_leaf,
        keyring=keyring,
        uploads=Uploads(store, cache, room=room or Room(), gate=gate or Gate(is_open=True)),
        rewrite=packs,
    ) as writer:
        # Closed before anything waits: a file that is dropped and open still takes its room.
        with ExitStack() as stack:
            layers = [stack.enter_context(open_overlay(path)) for path in overlays]
            if any(layer.size_bytes != base.size_bytes for layer in layers):
                raise Corrupt("An overlay has another size than its base.")
            blocks = _overlaid_blocks(layers, base.size_bytes // BLOCK_BYTES)
            if packs:
                donor = _Donor.of(rewrite, packs, cache, keyring)
                moving = _entries_in(base, read_leaf, packs)
                reader = VolumeReader(base, ReaderMemory(cache), keyring)
                _write_moving(writer, _in_order(blocks, moving), donor, reader)
            else:
                for number, data in blocks:
                    writer.write(number, data)
            prepared = writer.finish(even_if_unchanged=even_if_unchanged)
        yield prepared


def _write_moving(
    writer: "_Writer",
    blocks: Iterator[tuple[int, Block | Entry]],
    donor: "_Donor",
    reader: VolumeReader,
) -> None:
    """Write blocks, and what only moves: named where the donor has it, else written anew."""
    for number, block in blocks:
        if isinstance(block, bytes | bytearray):
            writer.write(number, block)
        elif (elsewhere := donor.entry(number, block)) is not None:
            writer.adopt(number, block, elsewhere, donor.root.packs[elsewhere.pack])
        elif writer.has(block.pack):
            writer.write(number, reader.read_block(number))


def _entries_in(
    root: Root, read_leaf: LeafSource, packs: frozenset[ObjectName]
) -> Iterator[tuple[int, Entry]]:
    """List the blocks that a generation has in some packs, in order."""
    for leaf_number, ref in sorted(root.leaves.items()):
        for slot, entry in read_leaf(ref).entries(packs):
            yield leaf_number * LEAF_BLOCKS + slot, entry


def _in_order(
    overlaid: Iterator[tuple[int, Block]], moving: Iterator[tuple[int, Entry]]
) -> Iterator[tuple[int, Block | Entry]]:
    """Merge what overlays hold with what only moves; a block of both is the overlay's."""
    last = -1
    streams: tuple[Iterator[tuple[int, Block | Entry]], ...] = (overlaid, moving)
    for number, block in merge(*streams, key=itemgetter(0)):
        if number != last:
            yield number, block
        last = number


class _Donor:
    """A generation that has blocks elsewhere already: the collector moved it."""

    def __init__(
        self, root: Root, packs: frozenset[ObjectName], cache: ObjectCache, keyring: Keyring
    ) -> None:
        self.root = root
        self._packs = packs
        self._cache = cache
        self._keyring = keyring
        self._number = -1
        self._leaf = Leaf.empty()

    @classmethod
    def of(
        cls,
        rewrite: frozenset[ObjectName],
        packs: frozenset[ObjectName],
        cache: ObjectCache,
        keyring: Keyring,
    ) -> "_Donor":
        key = rewrite.donor_root_key if isinstance(rewrite, Rewrite) else None
        root = Root(BLOCK_BYTES)
        if key is not None:
            # It may have been given up since; then everything is written anew.
            with suppress(ObjectMissing):
                root = open_root(cache.whole(key), parse_key(key)[1], keyring)
        return cls(root, packs, cache, keyring)

    def entry(self, number: int, wanted: Entry) -> Entry | None:
        """Say where the same block is in no pack that is to be emptied."""
        leaf_number, slot = divmod(number, LEAF_BLOCKS)
        if leaf_number != self._number:
            ref = self.root.leaves.get(leaf_number)
            self._leaf = Leaf.empty() if ref is None else self._load(ref)
            self._number = leaf_number
        found = self._leaf[slot]
        if found is None or found.digest != wanted.digest or found.pack in self._packs:
            return None
        return found if found.pack.volume == wanted.pack.volume else None

    def _load(self, ref: LeafRef) -> Leaf:
        try:
            return load_leaf(self._cache, self._keyring, self.root, ref)
        except ObjectMissing:
            return Leaf.empty()


def _overlaid_blocks(layers: Sequence[Overlay], end: int) -> Iterator[tuple[int, Block]]:
    """Read what any layer maps, the topmost winning, in order; a table at a time."""
    for table in sorted({table for layer in layers for table in layer.tables}):
        top = {
            number: (layer, cluster)
            for layer in layers
            for number, cluster in layer.clusters(table).items()
        }
        numbers = sorted(number for number in top if number < end)
        for run in _runs(numbers, top):
            layer, first = top[run[0]]
            if first is None:
                yield from ((number, ZERO_BLOCK) for number in run)
            else:
                yield from zip(run, layer.read_run(first, len(run)), strict=True)


def _runs(
    numbers: Sequence[int], places: Mapping[int, tuple[Overlay, Cluster]]
) -> Iterator[list[int]]:
    """Split blocks, so that each part can be read at once: it lies in one piece in one file."""
    run: list[int] = []
    for number in numbers:
        if run:
            layer, first = places[run[0]]
            following = None if first is None else first + len(run) * BLOCK_BYTES
            if len(run) == BATCH_BLOCKS or places[number] != (layer, following):
                yield run
                run = []
        run.append(number)
    if run:
        yield run


class _Block(NamedTuple):
    """A block on its way into a pack."""

    leaf_number: int
    slot: int
    before: Entry | None
    was_sealed: bool
    must_move: bool
    """Written even if it is what the base has: the base's pack is to be emptied."""
    data: Block
    adopted: Entry | None = None
    """Where it is already; there is no data then."""


class _Encoded(NamedTuple):
    """What became of a block: a hole where there is no digest, else bytes for a pack."""

    block: _Block
    digest: bytes | None
    stored: bytes
    """Empty when nothing has to be stored."""


def _encode(blocks: Sequence[_Block], sealer: Sealer | None) -> list[_Encoded]:
    """Hash blocks; compress and seal those that differ from the base's."""
    done = []
    for block in blocks:
        if block.adopted is not None:
            done.append(_Encoded(block, block.adopted.digest, b""))
            continue
        if block.data == ZERO_BLOCK:
            done.append(_Encoded(block, None, b""))
            continue
        digest = block_digest(block.data, is_sealed=sealer is not None)
        stored = b""
        if block.must_move or not _is_same(block, digest, is_sealed=sealer is not None):
            stored = encode_block(block.data, sealer)
        done.append(_Encoded(block._replace(data=b""), digest, stored))
    return done


def _is_same(block: _Block, digest: bytes, *, is_sealed: bool) -> bool:
    """Tell whether a block is what the base has, which may hash it otherwise."""
    if block.before is None:
        return False
    if block.was_sealed != is_sealed:
        digest = block_digest(block.data, is_sealed=block.was_sealed)
    return block.before.digest == digest


class _Writer:
    """Takes blocks in ascending order, and writes those that differ from the base.

    A few threads hash, compress and seal while the caller reads; what they give is taken
    in order, so the packs do not depend on who was faster.
    """

    def __init__(
        self,
        *,
        volume_id: UUID,
        epoch: int,
        base: Root,
        base_root_key: str | None,
        read_leaf: LeafSource,
        keyring: Keyring,
        uploads: Uploads,
        rewrite: frozenset[ObjectName],
    ) -> None:
        self._volume_id = volume_id
        self._epoch = epoch
        self._base = base
        self._base_root_key = base_root_key
        self._parent = (
            NO_PARENT if base_root_key is None else parse_key(base_root_key)[1].digest
        )
        self._read_leaf = read_leaf
        self._rewrite = rewrite
        self._keyring = keyring
        self._sealer = keyring.sealer(volume_id.bytes)
        self._root = base.child(None if self._sealer is None else self._parent)
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
        self._batch: list[_Block] = []
        self._encoding: deque[Future[list[_Encoded]]] = deque()
        self._uploads = uploads
        self._pack = _OpenPack(self._parent)
        self._leaf_number = -1
        self._leaf = Leaf.empty()
        self._taken_leaf_number = -1
        self._changes: dict[int, dict[int, Entry | None]] = {}
        self._encoded: dict[int, bytes | None] = {}
        self._live: dict[ObjectName, int] = {}
        self._stored: dict[ObjectName, int] = {}
        self._adopted: dict[ObjectName, int] = {}
        self._blocks_changed = 0
        self._leaf_objects: dict[str, bytes] = {}

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *exc: object) -> None:
        self._encoders.shutdown(wait=True, cancel_futures=True)
        self._uploads.close()

    def write(self, number: int, data: Block) -> None:
        leaf_number, slot = divmod(number, LEAF_BLOCKS)
        before = self._base_leaf(leaf_number)[slot]
        must_move = (
            before is not None and before.pack in self._rewrite and self.has(before.pack)
        )
        was_sealed = before is not None and self._is_sealed(before.pack.volume)
        self._add(_Block(leaf_number, slot, before, was_sealed, must_move, data))

    def adopt(self, number: int, before: Entry, after: Entry, use: PackUse) -> None:
        """Name a block where it is already, in another pack."""
        self._adopted.setdefault(after.pack, use.stored_bytes)
        self._add(_Block(*divmod(number, LEAF_BLOCKS), before, False, True, b"", after))

    def has(self, pack: ObjectName) -> bool:
        """Tell whether a pack is the volume's own."""
        return pack.volume == self._volume_id.bytes

    def _is_sealed(self, volume: bytes) -> bool:
        return self._keyring.sealer(volume) is not None

    def _add(self, block: _Block) -> None:
        self._batch.append(block)
        if len(self._batch) == BATCH_BLOCKS:
            self._encode_batch()
            while len(self._encoding) > BATCHES:
                self._take(self._encoding.popleft().result())

    def _base_leaf(self, number: int) -> Leaf:
        if number != self._leaf_number:
            ref = self._base.leaves.get(number)
            self._leaf = Leaf.empty() if ref is None else self._read_leaf(ref)
            self._leaf_number = number
        return self._leaf

    def _encode_batch(self) -> None:
        if self._batch:
            self._encoding.append(self._encoders.submit(_encode, self._batch, self._sealer))
            self._batch = []

    def _take(self, encoded: Sequence[_Encoded]) -> None:
        for block, digest, stored in encoded:
            if block.leaf_number != self._taken_leaf_number:
                self._taken_leaf_number = block.leaf_number
                if not self._pack.entries:
                    self._encode_leaves(before=block.leaf_number)
            if digest is None:
                if block.before is not None:
                    self._blocks_changed += 1
                    self._change(block.leaf_number, block.slot, None)
                continue
            if block.adopted is not None:
                self._change(block.leaf_number, block.slot, block.adopted)
            if not stored:
                continue
            if block.before is None or block.before.digest != digest:
                self._blocks_changed += 1
            self._pack.add(block.leaf_number, block.slot, stored, digest)
            if self._pack.is_full():
                self._close_pack()

    def _change(self, leaf_number: int, slot: int, entry: Entry | None) -> None:
        self._changes.setdefault(leaf_number, {})[slot] = entry

    def _close_pack(self) -> None:
        """Name the open pack, send it off, and encode the leaves that are complete."""
        if not self._pack.entries:
            return
        body = self._pack.body()
        name = ObjectName.of("packs", self._volume_id, self._epoch, body)
        self._stored[name] = len(body)
        for leaf_number, slot, offset, length, digest in self._pack.entries:
            self._change(leaf_number, slot, Entry(name, offset, length, digest))
        self._uploads.start(name.key("packs"), body)
        self._pack = _OpenPack(self._parent)
        self._encode_leaves(before=self._taken_leaf_number)

    def _encode_leaves(self, *, before: int) -> None:
        for number in sorted(n for n in self._changes if n < before):
            ref = self._base.leaves.get(number)
            old = Leaf.empty() if ref is None else self._read_leaf(ref)
            new = old.changed(self._changes.pop(number))
            self._account(old.live_bytes(), -1)
            self._account(new.live_bytes(), 1)
            self._encoded[number] = self._seal("leaves", new.encode()) if new else None

    def _seal(self, kind: Kind, data: bytes) -> bytes:
        return data if self._sealer is None else self._sealer.seal(kind, data)

    def _account(self, live: Mapping[ObjectName, int], sign: int) -> None:
        for pack, count in live.items():
            self._live[pack] = self._live.get(pack, 0) + sign * count

    def finish(self, *, even_if_unchanged: bool = False) -> Prepared | None:
        """Encode what is left, then the leaves, then the root; None for no change."""
        self._encode_batch()
        while self._encoding:
            self._take(self._encoding.popleft().result())
        self._encoders.shutdown()
        self._close_pack()
        self._encode_leaves(before=self._root.size_bytes)
        if not self._encoded and not even_if_unchanged:
            return None
        self._name_leaves()
        self._update_packs()
        body = self._seal("roots", self._root.encode())
        root_key = ObjectName.of("roots", self._volume_id, self._epoch, body).key("roots")
        index = {**self._leaf_objects, root_key: body}
        index_bytes = sum(len(one) for one in index.values())
        commit = Commit(
            root_key=root_key,
            size_bytes=self._root.size_bytes,
            blocks_changed=self._blocks_changed,
            uploaded_bytes=sum(self._stored.values()) + index_bytes,
            packs=len(self._stored),
            index_bytes=index_bytes,
            stored_bytes=self._root.own_live_bytes(self._volume_id.bytes),
            base_root_key=self._base_root_key,
            objects=(
                *((name.key("packs"), size) for name, size in self._stored.items()),
                *((key, len(one)) for key, one in index.items()),
            ),
            adopted=tuple(
                pack.key("packs") for pack in self._adopted if pack not in self._base.packs
            ),
        )
        return Prepared(commit, self._uploads, self._leaf_objects, body)

    def _name_leaves(self) -> None:
        """Gather all changed leaves in objects, one unless they are very many."""
        batch: dict[int, bytes] = {}
        batch_bytes = 0
        for number, leaf in sorted(self._encoded.items()):
            self._root.leaves.pop(number, None)
            if leaf is None:
                continue
            batch[number] = leaf
            batch_bytes += len(leaf)
            if batch_bytes > PACK_BYTES:
                self._name_leaf_object(batch)
                batch, batch_bytes = {}, 0
        if batch:
            self._name_leaf_object(batch)

    def _name_leaf_object(self, leaves: Mapping[int, bytes]) -> None:
        body = self._parent + b"".join(leaves.values())
        name = ObjectName.of("leaves", self._volume_id, self._epoch, body)
        self._leaf_objects[name.key("leaves")] = body
        self._root.objects[name] = len(body)
        at = len(self._parent)
        for number, leaf in leaves.items():
            assert len(leaf) <= MAX_LEAF_BYTES
            self._root.leaves[number] = LeafRef(name, at, len(leaf), content_digest(leaf))
            at += len(leaf)

    def _update_packs(self) -> None:
        packs = self._root.packs
        stored = self._stored | self._adopted
        for pack, change in self._live.items():
            use = packs.get(pack) or PackUse(stored[pack], 0)
            packs[pack] = PackUse(use.stored_bytes, use.live_bytes + change)
        for pack in [name for name, use in packs.changed() if not use.live_bytes]:
            del packs[pack]


class _OpenPack:
    """The pack that is being filled."""

    def __init__(self, parent: bytes) -> None:
        self._pieces: list[bytes] = [PACK_MAGIC + parent]
        self._size_bytes = len(self._pieces[0])
        self.entries: list[tuple[int, int, int, int, bytes]] = []

    def add(self, leaf_number: int, slot: int, stored: bytes, digest: bytes) -> None:
        self.entries.append((leaf_number, slot, self._size_bytes, len(stored), digest))
        self._pieces.append(stored)
        self._size_bytes += len(stored)

    def is_full(self) -> bool:
        return self._size_bytes >= PACK_BYTES or len(self.entries) >= PACK_BLOCKS

    def body(self) -> bytes:
        return b"".join(self._pieces)
