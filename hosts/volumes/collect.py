"""Finding what no live generation needs, and moving generations off packs that are mostly dead.

Pure: roots come in, keys and new roots go out. `hosts.collection` has the rows, and says why
what is done here is safe.

**Mark.** The root of a generation lists every pack and leaf object that it needs, so marking
is reading roots, never data. **Repack.** A pack of which the live roots need little is
emptied: its live blocks are copied, as they are (a seal is bound to the volume, not to a
place), into new packs of the same volume, and every root that names it gets a twin that
names the copies. Blocks that a newer root has elsewhere already are not copied at all.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple
from uuid import UUID

from hosts.volumes.commit import PACK_BYTES, PACK_MAGIC
from hosts.volumes.errors import Corrupt
from hosts.volumes.failpoints import reach
from hosts.volumes.index import Entry, Leaf, LeafRef, PackUse, Root
from hosts.volumes.keys import Keyring
from hosts.volumes.naming import (
    DIGEST_BYTES,
    Kind,
    ObjectName,
    content_digest,
    is_object,
    parse_key,
)
from hosts.volumes.objects import ObjectStore

LIVE_SHARE = 0.6
"""A pack of which less is needed is worth rewriting."""

ROOTS_KEPT = 32
LEAVES_KEPT = 256
"""What a reader remembers: about 60 MiB of leaves."""

Blocks = dict[tuple[ObjectName, int], Entry]
"""Blocks by where they are: the pack and the offset in it."""


@dataclass
class PackMark:
    """A pack that live roots name."""

    stored_bytes: int
    live_bytes: int
    """The most that one of them needs of it; all together may need more."""


@dataclass
class LeafMark:
    """An object of leaves that live roots name."""

    stored_bytes: int
    leaves: dict[int, int] = field(default_factory=dict)
    """Offset → length of those that are needed."""

    @property
    def live_bytes(self) -> int:
        return sum(self.leaves.values())


class Mark:
    """What all live roots need."""

    def __init__(self) -> None:
        self.roots: set[ObjectName] = set()
        self.packs: dict[ObjectName, PackMark] = {}
        self.leaves: dict[ObjectName, LeafMark] = {}

    def add(self, root_key: str, root: Root) -> None:
        """Mark a root and what it names."""
        self.roots.add(parse_key(root_key)[1])
        for name, use in root.packs.items():
            mark = self.packs.setdefault(name, PackMark(use.stored_bytes, 0))
            mark.live_bytes = max(mark.live_bytes, use.live_bytes)
        for name, stored_bytes in root.objects.items():
            self.leaves.setdefault(name, LeafMark(stored_bytes))
        for ref in root.leaves.values():
            self.leaves[ref.object].leaves[ref.offset] = ref.length

    def __contains__(self, key: str) -> bool:
        kind, name = parse_key(key)
        marked: Mapping[str, Collection[ObjectName]] = {
            "roots": self.roots,
            "packs": self.packs,
            "leaves": self.leaves,
        }
        return name in marked[kind]

    def sparse(self) -> dict[bytes, set[ObjectName]]:
        """List packs that may be worth rewriting, by their volume."""
        found: dict[bytes, set[ObjectName]] = {}
        for name, mark in self.packs.items():
            if mark.live_bytes < LIVE_SHARE * mark.stored_bytes:
                found.setdefault(name.volume, set()).add(name)
        return found

    def sparse_leaves(self) -> set[ObjectName]:
        """List objects of leaves that are mostly dead."""
        return {
            name
            for name, mark in self.leaves.items()
            if mark.live_bytes < LIVE_SHARE * mark.stored_bytes
        }


class Reader:
    """Reads roots and leaves, and remembers some."""

    def __init__(
        self,
        *,
        load_root: Callable[[str], Root],
        load_leaf: Callable[[Root, LeafRef], Leaf],
    ) -> None:
        self._load_root = lru_cache(ROOTS_KEPT)(load_root)
        self._load_leaf = load_leaf
        self._leaves: OrderedDict[LeafRef, Leaf] = OrderedDict()

    def root(self, key: str) -> Root:
        """Read a root; it must not be changed."""
        return self._load_root(key)

    def leaf(self, root: Root, ref: LeafRef) -> Leaf:
        """Read a leaf of a root."""
        leaf = self._leaves.get(ref) or self._load_leaf(root, ref)
        self._leaves[ref] = leaf
        self._leaves.move_to_end(ref)
        if len(self._leaves) > LEAVES_KEPT:
            self._leaves.popitem(last=False)
        return leaf

    def leaves(self, root_keys: Iterable[str]) -> Iterator[Leaf]:
        """Give every leaf of some roots, each once."""
        seen = set()
        for key in root_keys:
            root = self.root(key)
            for ref in root.leaves.values():
                if ref not in seen:
                    seen.add(ref)
                    yield self.leaf(root, ref)


class Uses:
    """What some roots need of some packs: the blocks, and the leaves that say so."""

    def __init__(
        self, reader: Reader, root_keys: Iterable[str], packs: Collection[ObjectName]
    ) -> None:
        self.blocks: Blocks = {}
        self._roots: dict[str, frozenset[LeafRef]] = {}
        self._packs: dict[LeafRef, frozenset[ObjectName]] = {}
        for key in root_keys:
            root = reader.root(key)
            for ref in root.leaves.values():
                if ref not in self._packs:
                    self._look(ref, reader.leaf(root, ref), packs)
            self._roots[key] = frozenset(
                ref for ref in root.leaves.values() if self._packs[ref]
            )

    def _look(self, ref: LeafRef, leaf: Leaf, packs: Collection[ObjectName]) -> None:
        self._packs[ref] = frozenset(pack for pack in leaf.packs if pack in packs)
        for _, entry in leaf.entries(self._packs[ref]):
            self.blocks[entry.pack, entry.offset] = entry

    def needed_bytes(self) -> dict[ObjectName, int]:
        """Sum the blocks by pack."""
        sums: dict[ObjectName, int] = {}
        for (pack, _), entry in self.blocks.items():
            sums[pack] = sums.get(pack, 0) + entry.length
        return sums

    def _leaves(self, packs: Collection[ObjectName]) -> set[LeafRef]:
        wanted = set(packs)
        return {ref for ref, named in self._packs.items() if not wanted.isdisjoint(named)}

    def naming(self, packs: Collection[ObjectName]) -> set[str]:
        """List the roots that name any of some packs."""
        leaves = self._leaves(packs)
        return {key for key, refs in self._roots.items() if not leaves.isdisjoint(refs)}

    def index_bytes(self, packs: Collection[ObjectName], root_bytes: int) -> int:
        """Say what the leaves and roots that name some packs take, and their twins would."""
        leaves = sum(ref.length for ref in self._leaves(packs))
        return leaves + root_bytes * len(self.naming(packs))


def worth_emptying(uses: Uses, mark: Mark, root_bytes: int) -> list[ObjectName]:
    """Choose the packs whose emptying frees the most beyond what it writes.

    Every root that names a pack gets new leaves. While a long history does, waiting until
    it is thinned is cheaper than rewriting it; a pack that few roots name is emptied soon.
    """
    needed = uses.needed_bytes()
    sparse = [
        pack
        for pack in sorted(needed)
        if needed[pack] < LIVE_SHARE * mark.packs[pack].stored_bytes
    ]
    named_by = {pack: len(uses.naming([pack])) for pack in sparse}
    best: list[ObjectName] = []
    best_gain = 0
    for most in sorted(set(named_by.values())):
        packs = [pack for pack in sparse if named_by[pack] <= most]
        freed = sum(mark.packs[pack].stored_bytes - needed[pack] for pack in packs)
        gain = freed - uses.index_bytes(packs, root_bytes)
        if gain > best_gain:
            best, best_gain = packs, gain
    return best


class Moved(NamedTuple):
    """A root and its twin, which reads the same and names no emptied pack."""

    old_key: str
    new_key: str
    new_objects: frozenset[str]
    """Keys that it names and the old one did not: they must be there for good before any
    generation is moved to it."""


class Repacking:
    """Empties packs of one volume."""

    def __init__(
        self,
        store: ObjectStore,
        reader: Reader,
        keyring: Keyring,
        *,
        volume: bytes,
        packs: Collection[ObjectName],
        leaf_objects: Collection[ObjectName],
        epochs: Mapping[bytes, int],
        reserve: Callable[[bytes, str, int], None],
    ) -> None:
        """Prepare to empty `packs`, all of `volume`.

        Args:
            leaf_objects: emptied as well, where a root that is moved has leaves in them.
            epochs: of every volume whose roots will be moved, and of this one.
            reserve: told the volume, key and size of each object before it is put.
        """
        self._store = store
        self._reader = reader
        self._keyring = keyring
        self._volume = volume
        self._packs = frozenset(packs)
        self._leaf_objects = frozenset(leaf_objects)
        self._epochs = epochs
        self._reserve = reserve
        # In every object, so that none ever has the name of another.
        self._run = secrets.token_bytes(DIGEST_BYTES)
        self._places: Blocks = {}
        self._stored: dict[ObjectName, int] = {}
        self._leaves: dict[tuple[bytes, LeafRef], LeafRef] = {}
        self._leaf_live: dict[LeafRef, dict[ObjectName, int]] = {}
        self._leaf_bytes: dict[ObjectName, int] = {}

    def find_elsewhere(self, blocks: Blocks, donors: Iterable[str], mark: Mark) -> None:
        """Look in live roots for the same blocks in packs of the volume that stay."""
        wanted: dict[bytes, list[tuple[ObjectName, int]]] = {}
        for place, entry in blocks.items():
            wanted.setdefault(entry.digest, []).append(place)
        for leaf in self._reader.leaves(donors):
            kept = {
                pack
                for pack in leaf.packs
                if pack.volume == self._volume and pack not in self._packs
            }
            for _, entry in leaf.entries(kept):
                for place in wanted.pop(entry.digest, ()):
                    self._places[place] = entry
                    self._stored[entry.pack] = mark.packs[entry.pack].stored_bytes

    def copy(self, blocks: Blocks) -> None:
        """Put the blocks that are nowhere else into new packs.

        Raises:
            Corrupt: a pack is not what its name says; nothing is made of it.
        """
        by_pack: dict[ObjectName, list[Entry]] = {}
        for place, entry in sorted(blocks.items()):
            if place not in self._places:
                by_pack.setdefault(entry.pack, []).append(entry)
        body, waiting = self._new_pack(), list[tuple[Entry, int]]()
        for pack, entries in by_pack.items():
            old = self._store.get(pack.key("packs"))
            if not is_object("packs", pack.digest, old):
                raise Corrupt(f"{pack.key('packs')} is not what its name says.")
            for entry in entries:
                waiting.append((entry, len(body)))
                body += old[entry.offset : entry.offset + entry.length]
                if len(body) >= PACK_BYTES:
                    self._close(body, waiting)
                    body, waiting = self._new_pack(), []
        if waiting:
            self._close(body, waiting)
        reach("collect.packs")

    def _new_pack(self) -> bytearray:
        return bytearray(PACK_MAGIC + self._run)

    def _close(self, body: bytearray, entries: Sequence[tuple[Entry, int]]) -> None:
        name = self._put("packs", self._volume, bytes(body))
        self._stored[name] = len(body)
        for entry, offset in entries:
            self._places[entry.pack, entry.offset] = entry._replace(pack=name, offset=offset)

    def move(self, root_key: str) -> Moved:
        """Put the twin of a root that names emptied packs."""
        name = parse_key(root_key)[1]
        old = self._reader.root(root_key)
        new = old.child(None if old.parent is None else self._run)
        live: dict[ObjectName, int] = {}
        for number, before, after in self._move_leaves(old, name.volume):
            new.leaves[number] = after
            new.objects[after.object] = self._leaf_bytes[after.object]
            _add(live, self._reader.leaf(old, before).live_bytes(), -1)
            _add(live, self._leaf_live[after], 1)
        for pack, change in live.items():
            use = new.packs.get(pack) or PackUse(self._stored[pack], 0)
            new.packs[pack] = PackUse(use.stored_bytes, use.live_bytes + change)
        body = self._keyring.seal("roots", name.volume, new.encode())
        new_name = self._put("roots", name.volume, body)
        reach("collect.root")
        added = {pack for pack, use in new.packs.changed() if use.live_bytes}
        objects = {ref.object for ref in new.leaves.values()}
        return Moved(
            root_key,
            new_name.key("roots"),
            frozenset(
                {new_name.key("roots")}
                | {pack.key("packs") for pack in added - old.packs.keys()}
                | {leaves.key("leaves") for leaves in objects - old.objects.keys()}
            ),
        )

    def _move_leaves(self, root: Root, volume: bytes) -> Iterator[tuple[int, LeafRef, LeafRef]]:
        """Give the new place of every leaf that has one, putting those that have none yet."""
        moving: dict[int, tuple[LeafRef, Leaf]] = {}
        for number, ref in sorted(root.leaves.items()):
            if (volume, ref) not in self._leaves:
                leaf = self._reader.leaf(root, ref)
                changes = {
                    slot: self._places[entry.pack, entry.offset]
                    for slot, entry in leaf.entries(self._packs)
                }
                if changes or ref.object in self._leaf_objects:
                    moving[number] = (ref, leaf.changed(changes) if changes else leaf)
        self._put_leaves(volume, moving)
        for number, ref in sorted(root.leaves.items()):
            after = self._leaves.get((volume, ref))
            if after is not None:
                yield number, ref, after

    def _put_leaves(self, volume: bytes, moving: Mapping[int, tuple[LeafRef, Leaf]]) -> None:
        body = bytearray(self._run)
        placed: list[tuple[LeafRef, Leaf, int, int, bytes]] = []
        for ref, leaf in moving.values():
            sealed = self._keyring.seal("leaves", volume, leaf.encode())
            placed.append((ref, leaf, len(body), len(sealed), content_digest(sealed)))
            body += sealed
        if not placed:
            return
        name = self._put("leaves", volume, bytes(body))
        self._leaf_bytes[name] = len(body)
        for ref, leaf, offset, length, digest in placed:
            after = LeafRef(name, offset, length, digest)
            self._leaves[volume, ref] = after
            self._leaf_live[after] = leaf.live_bytes()

    def _put(self, kind: Kind, volume: bytes, body: bytes) -> ObjectName:
        name = ObjectName.of(kind, UUID(bytes=volume), self._epochs[volume], body)
        self._reserve(volume, name.key(kind), len(body))
        reach("collect.reserved")
        self._store.put_new(name.key(kind), body)
        return name


def _add(sums: dict[ObjectName, int], more: Mapping[ObjectName, int], sign: int) -> None:
    for name, amount in more.items():
        sums[name] = sums.get(name, 0) + sign * amount
