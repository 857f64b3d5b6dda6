"""Reading a generation as a device: what an export serves."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from common.units import KiB, MiB
from hosts.volumes.blocks import BLOCK_BYTES, ZERO_BLOCK, decode_block
from hosts.volumes.cache import ObjectCache
from hosts.volumes.errors import Corrupt
from hosts.volumes.index import LEAF_BLOCKS, Entry, Leaf, LeafRef, Root
from hosts.volumes.keys import Keyring
from hosts.volumes.naming import ObjectName, content_digest

MEMORY_BLOCKS = 48
"""Decoded blocks kept: 3 MiB. A guest reads 4 KiB at a time, a block is 16 of them."""

MEMORY_LEAVES = 32
"""Decoded leaves kept: 3.5 MiB, for 8 GiB of device."""

MAX_RUN_BYTES = 4 * MiB
AHEAD_RUN_BYTES = MiB
"""Who needs a part of a run that is fetched ahead waits for all of it."""

NEAR_BYTES = 128 * KiB
"""What is fetched between two blocks costs less than another request."""

TRIES = 3
"""How often bytes that are wrong are fetched anew before they are called corrupt."""


K = TypeVar("K")
V = TypeVar("V")


def load_leaf(cache: ObjectCache, keyring: Keyring, root: Root, ref: LeafRef) -> Leaf:
    """Read a leaf and check it.

    Raises:
        Corrupt: the store holds something else under its name.
    """
    key = ref.object.key("leaves")
    for attempt in range(TRIES):
        body = cache.read(
            key, ref.offset, ref.length, root.objects[ref.object], fresh=attempt > 0
        )
        if content_digest(body) == ref.digest:
            return open_leaf(body, ref, keyring)
    raise Corrupt(f"A leaf in {key} is not what its hash says.")


def open_leaf(body: bytes, ref: LeafRef, keyring: Keyring) -> Leaf:
    """Decode a leaf whose hash has been checked, or that was made here."""
    return Leaf.decode(keyring.open("leaves", ref.object.volume, body))


class PackRange(NamedTuple):
    """A part of a pack."""

    key: str
    offset: int
    length: int
    object_bytes: int


class ReaderMemory:
    """What readers of one process share: the cache, and by content what they decoded."""

    def __init__(self, cache: ObjectCache) -> None:
        self.cache = cache
        self.blocks: _Recent[bytes, bytes] = _Recent(MEMORY_BLOCKS)
        self.leaves: _Recent[bytes, Leaf] = _Recent(MEMORY_LEAVES)


class VolumeReader:
    """Reads one generation through the cache. Thread-safe."""

    def __init__(self, root: Root, memory: ReaderMemory, keyring: Keyring) -> None:
        self.size_bytes = root.size_bytes
        self._root = root
        self._keyring = keyring
        self._cache = memory.cache
        self._blocks = memory.blocks
        self._leaves = memory.leaves

    def read_into(self, buffer: memoryview | bytearray, offset: int) -> None:
        """Fill the buffer from the device, which must not be read beyond its end.

        Raises:
            StoreUnavailable: the store was gone for longer than the cache's patience.
            Corrupt, ObjectMissing: the store has lost or changed an object.
        """
        length = len(buffer)
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        if last > first:
            self._read_runs(first, last)
        done = 0
        for number in range(first, last + 1):
            skip = offset + done - number * BLOCK_BYTES
            count = min(BLOCK_BYTES - skip, length - done)
            block = self._block(number)
            buffer[done : done + count] = (
                bytes(count) if block is None else block[skip : skip + count]
            )
            done += count

    def read_block(self, number: int) -> bytes:
        """Read one block whole.

        Raises: what `read_into` does.
        """
        return self._block(number) or ZERO_BLOCK

    def pack_ranges(self, numbers: Iterable[int]) -> list[PackRange]:
        """Say what to fetch for some blocks: what lies near in a pack together.

        In the order of the first block of each. Blocks that are holes, or nobody's, are left
        out. Leaves are read.

        Raises: what `read_into` does.
        """
        packs: dict[ObjectName, list[tuple[int, int, int]]] = {}
        for place, number in enumerate(numbers):
            entry = self._entry(number)
            if entry is not None:
                extent = (entry.offset, entry.offset + entry.length, place)
                packs.setdefault(entry.pack, []).append(extent)
        found = []
        for pack, extents in packs.items():
            use = self._root.packs.get(pack)
            size_bytes = 0 if use is None else use.stored_bytes
            for start, end, place in _joined(sorted(extents)):
                if end <= size_bytes:
                    wanted = PackRange(pack.key("packs"), start, end - start, size_bytes)
                    found.append((place, wanted))
        return [wanted for _, wanted in sorted(found)]

    def fetch(self, wanted: PackRange) -> None:
        """Have a part of a pack in the cache. Whoever reads it checks it."""
        self._cache.read(*wanted)

    def _entry(self, number: int) -> Entry | None:
        leaf_number, slot = divmod(number, LEAF_BLOCKS)
        ref = self._root.leaves.get(leaf_number)
        if ref is None:
            return None
        leaf = self._leaves.get(ref.digest, lambda: self._load_leaf(ref))
        return leaf[slot]

    def _load_leaf(self, ref: LeafRef) -> Leaf:
        return load_leaf(self._cache, self._keyring, self._root, ref)

    def _block(self, number: int) -> bytes | None:
        entry = self._entry(number)
        if entry is None:
            return None
        return self._blocks.get(entry.digest, lambda: self._load_block(entry))

    def _load_block(self, entry: Entry) -> bytes:
        key = entry.pack.key("packs")
        sealer = self._keyring.sealer(entry.pack.volume)
        error: Corrupt | None = None
        for attempt in range(TRIES):
            stored = self._cache.read(
                key, entry.offset, entry.length, self._pack_bytes(entry), fresh=attempt > 0
            )
            try:
                return decode_block(stored, entry.digest, sealer)
            except Corrupt as wrong:
                error = wrong
        raise Corrupt(f"A block of {key} is not what its hash says.") from error

    def _pack_bytes(self, entry: Entry) -> int:
        use = self._root.packs.get(entry.pack)
        if use is None or entry.offset + entry.length > use.stored_bytes:
            raise Corrupt("A leaf places a block outside the packs of its root.")
        return use.stored_bytes

    def _read_runs(self, first: int, last: int) -> None:
        """Fetch what lies side by side in a pack with one request, ahead of its use."""
        entries = [e for n in range(first, last + 1) if (e := self._entry(n)) is not None]
        run: list[Entry] = entries[:1]
        for before, entry in pairwise(entries):
            joined = before.pack == entry.pack and before.offset + before.length == entry.offset
            if not joined or entry.offset + entry.length - run[0].offset > MAX_RUN_BYTES:
                self._read_run(run)
                run = []
            run.append(entry)
        if run:
            self._read_run(run)

    def _read_run(self, run: list[Entry]) -> None:
        start, end = run[0].offset, run[-1].offset + run[-1].length
        object_bytes = self._pack_bytes(run[-1])
        self._cache.read(run[0].pack.key("packs"), start, end - start, object_bytes)


def _joined(extents: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join sorted (start, end, place) that lie near each other; the least place counts."""
    run: tuple[int, int, int] | None = None
    for start, end, place in extents:
        if run is None:
            run = (start, end, place)
        elif start - run[1] <= NEAR_BYTES and end - run[0] <= AHEAD_RUN_BYTES:
            run = (run[0], max(run[1], end), min(run[2], place))
        else:
            yield run
            run = (start, end, place)
    if run is not None:
        yield run


class _Recent(Generic[K, V]):
    """The most recently used values, each made once however many ask for it at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._values: OrderedDict[K, V] = OrderedDict()
        self._makers: dict[K, threading.Lock] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            maker = self._makers.setdefault(key, threading.Lock())
        with maker:
            with self._lock:
                if key in self._values:
                    return self._values[key]
            try:
                value = make()
            except BaseException:
                self._forget(key)
                raise
            with self._lock:
                self._values[key] = value
                self._makers.pop(key, None)
                while len(self._values) > self._limit:
                    self._values.popitem(last=False)
            return value

    def _forget(self, key: K) -> None:
        with self._lock:
            self._makers.pop(key, None)
