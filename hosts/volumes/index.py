"""The index of a generation: a root that lists leaves, leaves that map blocks to packs.

    root ── size of the device, hash of the root that it was made from
         ├─ packs:   name, stored bytes, live bytes     for every pack that a leaf names
         ├─ objects: name, bytes                        the objects that hold the leaves
         └─ leaves:  number → object, offset, length, hash
    leaf ── names of its packs
         └─ 4,096 of (pack, offset, length, hash)        length 0 is a hole: zeros

Both are copy on write: a commit writes the leaves it changed, all into one object, and a
new root. A leaf that maps nothing is left out. Numbers are little-endian, columns lie one
after another (zstd then takes the holes for nothing), and everything is checked on reading:
whatever the bytes are, the answer is a value or `Corrupt`, in bounded memory.
"""

import struct
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter, lt
from typing import NamedTuple, Self

from common.units import MiB
from hosts.volumes.blocks import BLOCK_BYTES, MAX_STORED_BYTES, compress, decompress
from hosts.volumes.errors import Corrupt
from hosts.volumes.naming import DIGEST_BYTES, NAME_BYTES, ObjectName

LEAF_BLOCKS = 4096
LEAF_SPAN_BYTES = LEAF_BLOCKS * BLOCK_BYTES
"""What a leaf covers: 256 MiB of the device."""

MAX_DEVICE_BYTES = 64 * 1024 * 1024 * MiB
MAX_ROOT_BYTES = 256 * MiB
"""Decoded. A full 64 TiB device has 262,144 leaves (8 MiB) and about 4 million packs."""

_LEAF_MAGIC = b"SKLEAF\0\1"
_ROOT_MAGIC = b"SKROOT\0\2"
_OLD_ROOT_MAGIC = b"SKROOT\0\1"
"""Without a parent: what the release before wrote, and its exports can still read."""

NO_PARENT = bytes(DIGEST_BYTES)
"""What the first generation of a volume was made from."""

_PACK_NUMBERS = struct.Struct(f"<{LEAF_BLOCKS}H")
_WORDS = struct.Struct(f"<{LEAF_BLOCKS}I")
_OFFSETS_AT = _PACK_NUMBERS.size
_LENGTHS_AT = _OFFSETS_AT + _WORDS.size
_DIGESTS_AT = _LENGTHS_AT + _WORDS.size
_COLUMNS_BYTES = _DIGESTS_AT + LEAF_BLOCKS * DIGEST_BYTES
MAX_LEAF_BYTES = 4 + LEAF_BLOCKS * NAME_BYTES + _COLUMNS_BYTES

_ROOT_HEAD = struct.Struct("<QIII")
_ROOT_PACK = struct.Struct(f"<{NAME_BYTES}sQQ")
_PACK_NAME = struct.Struct(f"<16sI{DIGEST_BYTES}s16x")
_PACK_USE = struct.Struct(f"<{NAME_BYTES}xQQ")
_PACK_LIVE = struct.Struct(f"<16s{NAME_BYTES - 16 + 8}xQ")
"""The same row as `_ROOT_PACK`: its name alone, its use, its volume and live bytes."""

_ROOT_OBJECT = struct.Struct(f"<{NAME_BYTES}sI")
_ROOT_LEAF = struct.Struct(f"<IIII{DIGEST_BYTES}s")


class Entry(NamedTuple):
    """Where a block is: bytes `[offset, offset + length)` of a pack."""

    pack: ObjectName
    offset: int
    length: int
    digest: bytes
    """Hash of the block itself, not of its compressed form."""


class LeafRef(NamedTuple):
    """Where an encoded leaf is, and what it hashes to."""

    object: ObjectName
    offset: int
    length: int
    digest: bytes


class PackUse(NamedTuple):
    """How large a pack is, and how much of it this generation needs."""

    stored_bytes: int
    live_bytes: int


class Leaf:
    """A decoded leaf; immutable. Lookups read the columns in place."""

    __slots__ = ("_columns", "_packs")

    def __init__(self, packs: list[ObjectName], columns: bytes) -> None:
        self._packs = packs
        self._columns = columns

    @classmethod
    def empty(cls) -> Self:
        return cls([], bytes(_COLUMNS_BYTES))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Read what `encode` wrote.

        Raises:
            Corrupt: it is not that.
        """
        if body[:8] != _LEAF_MAGIC:
            raise Corrupt("Not a leaf.")
        raw = decompress(body[8:], MAX_LEAF_BYTES)
        count = int.from_bytes(raw[:4], "little")
        columns_at = 4 + count * NAME_BYTES
        if count > LEAF_BLOCKS or len(raw) != columns_at + _COLUMNS_BYTES:
            raise Corrupt("A leaf has the wrong length.")
        packs = [
            ObjectName.unpack(raw[at : at + NAME_BYTES])
            for at in range(4, columns_at, NAME_BYTES)
        ]
        leaf = cls(packs, raw[columns_at:])
        leaf._check()
        return leaf

    def _check(self) -> None:
        numbers, _, lengths = self._columns_as_numbers()
        if max(lengths) > MAX_STORED_BYTES:
            raise Corrupt("A leaf has an entry that is longer than a block.")
        top = max((n for n, length in zip(numbers, lengths, strict=True) if length), default=-1)
        if top >= len(self._packs):
            raise Corrupt("A leaf names a pack that it does not list.")

    def _columns_as_numbers(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (
            _PACK_NUMBERS.unpack_from(self._columns, 0),
            _WORDS.unpack_from(self._columns, _OFFSETS_AT),
            _WORDS.unpack_from(self._columns, _LENGTHS_AT),
        )

    def __getitem__(self, slot: int) -> Entry | None:
        """Look a block up by its place in the leaf; None is a hole."""
        columns = self._columns
        at = _LENGTHS_AT + 4 * slot
        length = int.from_bytes(columns[at : at + 4], "little")
        if not length:
            return None
        at = _OFFSETS_AT + 4 * slot
        offset = int.from_bytes(columns[at : at + 4], "little")
        pack = self._packs[int.from_bytes(columns[2 * slot : 2 * slot + 2], "little")]
        at = _DIGESTS_AT + DIGEST_BYTES * slot
        return Entry(pack, offset, length, columns[at : at + DIGEST_BYTES])

    def live_bytes(self) -> dict[ObjectName, int]:
        """Sum, for every pack that is named, the bytes that the leaf needs of it."""
        live: dict[ObjectName, int] = {}
        numbers, _, lengths = self._columns_as_numbers()
        for number, length in zip(numbers, lengths, strict=True):
            if length:
                pack = self._packs[number]
                live[pack] = live.get(pack, 0) + length
        return live

    @property
    def packs(self) -> list[ObjectName]:
        """The packs that it names."""
        return list(self._packs)

    def entries(
        self, packs: Collection[ObjectName] | None = None
    ) -> Iterator[tuple[int, Entry]]:
        """List (place, entry) of what is no hole, in order; of some packs only, if given."""
        wanted = {n for n, pack in enumerate(self._packs) if packs is None or pack in packs}
        if not wanted:
            return
        numbers, offsets, lengths = self._columns_as_numbers()
        for slot in range(LEAF_BLOCKS):
            number, length = numbers[slot], lengths[slot]
            if length and number in wanted:
                at = _DIGESTS_AT + DIGEST_BYTES * slot
                digest = self._columns[at : at + DIGEST_BYTES]
                yield slot, Entry(self._packs[number], offsets[slot], length, digest)

    def changed(self, changes: Mapping[int, Entry | None]) -> "Leaf":
        """Make a leaf with some entries replaced (None makes a hole)."""
        columns = bytearray(self._columns)
        packs = list(self._packs)
        numbers = {pack: number for number, pack in enumerate(packs)}
        for slot, entry in changes.items():
            number = 0
            if entry is not None:
                number = numbers.setdefault(entry.pack, len(packs))
                if number == len(packs):
                    packs.append(entry.pack)
            _write_entry(columns, slot, number, entry)
        return Leaf(packs, bytes(columns)).compacted()

    def compacted(self) -> "Leaf":
        """Renumber, so that only packs in use are listed and equal maps are equal bytes."""
        numbers, _, lengths = self._columns_as_numbers()
        used = sorted({self._packs[n] for n, ln in zip(numbers, lengths, strict=True) if ln})
        renumbered = {pack: number for number, pack in enumerate(used)}
        new_numbers = [
            renumbered[self._packs[n]] if ln else 0
            for n, ln in zip(numbers, lengths, strict=True)
        ]
        return Leaf(used, _PACK_NUMBERS.pack(*new_numbers) + self._columns[_OFFSETS_AT:])

    def encode(self) -> bytes:
        names = b"".join(pack.pack() for pack in self._packs)
        count = len(self._packs).to_bytes(4, "little")
        return _LEAF_MAGIC + compress(count + names + self._columns)

    def __bool__(self) -> bool:
        return bool(self._packs)


def _write_entry(columns: bytearray, slot: int, number: int, entry: Entry | None) -> None:
    offset, length, digest = (
        (0, 0, bytes(DIGEST_BYTES))
        if entry is None
        else (entry.offset, entry.length, entry.digest)
    )
    struct.pack_into("<H", columns, 2 * slot, number)
    struct.pack_into("<I", columns, _OFFSETS_AT + 4 * slot, offset)
    struct.pack_into("<I", columns, _LENGTHS_AT + 4 * slot, length)
    at = _DIGESTS_AT + DIGEST_BYTES * slot
    columns[at : at + DIGEST_BYTES] = digest


Name = tuple[bytes, int, bytes]
"""An `ObjectName`, or what compares as one."""


class PackTable(MutableMapping[ObjectName, PackUse]):
    """The packs of a root: rows as they are stored, and what has been changed since.

    A root of 100 GiB has 17,000 and more of them, and whoever opens it asks for a few: as
    objects they would take most of the time of a resume, and of the memory of an export.
    """

    __slots__ = ("_changed", "_count", "_rows")

    def __init__(
        self, changed: Mapping[ObjectName, PackUse | None] | None = None, rows: bytes = b""
    ) -> None:
        """Make one of rows in ascending order, and what is otherwise; None is gone."""
        self._rows = rows
        self._count = len(rows) // _ROOT_PACK.size
        self._changed = dict(changed or {})

    @classmethod
    def of_rows(cls, rows: bytes) -> Self:
        """Read rows, which are trusted in nothing but their length."""
        if _is_in_order(rows):
            return cls(rows=rows)
        # None that we wrote. The last of equal names counts.
        return cls(
            {
                ObjectName.unpack(name): PackUse(stored, live)
                for name, stored, live in _ROOT_PACK.iter_unpack(rows)
            }
        )

    def copy(self) -> Self:
        """Make one that can be changed; what is stored is shared."""
        return type(self)(self._changed, self._rows)

    def _place(self, name: Name) -> int:
        """Find the row of a name, or where it would be."""
        return bisect_left(range(self._count), name, key=self._name_at)

    def _name_at(self, row: int) -> Name:
        name: Name = _PACK_NAME.unpack_from(self._rows, row * _ROOT_PACK.size)
        return name

    def _is_at(self, row: int, name: ObjectName) -> bool:
        return row < self._count and self._name_at(row) == name

    def __getitem__(self, name: ObjectName) -> PackUse:
        if name in self._changed:
            use = self._changed[name]
            if use is None:
                raise KeyError(name)
            return use
        row = self._place(name)
        if not self._is_at(row, name):
            raise KeyError(name)
        return PackUse(*_PACK_USE.unpack_from(self._rows, row * _ROOT_PACK.size))

    def __setitem__(self, name: ObjectName, use: PackUse) -> None:
        self._changed[name] = use

    def __delitem__(self, name: ObjectName) -> None:
        if name not in self:
            raise KeyError(name)
        self._changed[name] = None

    def __iter__(self) -> Iterator[ObjectName]:
        for fields in _PACK_NAME.iter_unpack(self._rows):
            name = ObjectName(*fields)
            if name not in self._changed:
                yield name
        yield from [name for name, use in self._changed.items() if use is not None]

    def __len__(self) -> int:
        count = self._count
        for name, use in self._changed.items():
            count += (use is not None) - self._is_at(self._place(name), name)
        return count

    def changed(self) -> Iterator[tuple[ObjectName, PackUse]]:
        """List those that have been set since it was read."""
        for name, use in self._changed.items():
            if use is not None:
                yield name, use

    def volumes(self) -> set[bytes]:
        """List the volumes of its packs, reading the first row of each where none is gone."""
        if None in self._changed.values():
            return {name.volume for name in self}
        volumes = {name.volume for name, _ in self.changed()}
        row = 0
        while row < self._count:
            volume = self._name_at(row)[0]
            volumes.add(volume)
            row = self._place((volume, 1 << 32, b""))
        return volumes

    def live_bytes(self, volume: bytes) -> int:
        """Sum what is live in the packs of one volume."""
        first = self._place((volume, 0, b"")) * _ROOT_PACK.size
        end = self._place((volume, 1 << 32, b"")) * _ROOT_PACK.size
        live: int = sum(map(itemgetter(1), _PACK_LIVE.iter_unpack(self._rows[first:end])))
        for name, use in self._changed.items():
            if name.volume == volume:
                row = self._place(name)
                if self._is_at(row, name):
                    live -= _PACK_USE.unpack_from(self._rows, row * _ROOT_PACK.size)[1]
                live += 0 if use is None else use.live_bytes
        return live

    def rows(self) -> list[bytes]:
        """Write the rows of all that is live, in order of name: pieces to be joined."""
        pieces, at = [], 0
        for name, use in sorted(self._changed.items(), key=itemgetter(0)):
            row = self._place(name)
            start = row * _ROOT_PACK.size
            pieces.append(self._rows[at:start])
            at = start + (_ROOT_PACK.size if self._is_at(row, name) else 0)
            if use is not None and use.live_bytes:
                pieces.append(_ROOT_PACK.pack(name.pack(), *use))
        return [*pieces, self._rows[at:]]


def _is_in_order(rows: bytes) -> bool:
    """Tell whether rows are as we write them: in ascending order, each of something live."""
    names, following = _PACK_NAME.iter_unpack(rows), _PACK_NAME.iter_unpack(rows)
    return all(map(lt, names, islice(following, 1, None))) and all(
        map(itemgetter(1), _PACK_LIVE.iter_unpack(rows))
    )


@dataclass
class Root:
    """A generation: self-contained, so that no other root is needed to read it."""

    size_bytes: int
    parent: bytes | None = None
    """Hash in the name of the root that it was made from, so that no root comes twice in
    the life of a disk, whatever was written and taken back. None in volumes of the release
    before, which knew none."""
    packs: PackTable = field(default_factory=PackTable)
    objects: dict[ObjectName, int] = field(default_factory=dict)
    """Objects that hold leaves, and their lengths in bytes."""
    leaves: dict[int, LeafRef] = field(default_factory=dict)

    def child(self, parent: bytes | None) -> "Root":
        """Begin a generation that is made from this one, whose name has this hash."""
        return Root(
            self.size_bytes, parent, self.packs.copy(), dict(self.objects), dict(self.leaves)
        )

    def volumes(self) -> set[bytes]:
        """List the volumes whose objects it names: its own, its base's, those it came from."""
        return self.packs.volumes() | {name.volume for name in self.objects}

    def own_live_bytes(self, volume: bytes) -> int:
        """Sum what this generation retains in packs of one volume: what its owner pays for."""
        return self.packs.live_bytes(volume)

    def encode(self) -> bytes:
        """Write it so that equal generations are equal bytes; drops what nothing refers to."""
        packs = b"".join(self.packs.rows())
        needed = sorted({ref.object for ref in self.leaves.values()})
        numbers = {name: number for number, name in enumerate(needed)}
        parts = [
            self.parent or b"",
            _ROOT_HEAD.pack(
                self.size_bytes, len(packs) // _ROOT_PACK.size, len(needed), len(self.leaves)
            ),
            packs,
        ]
        parts += [_ROOT_OBJECT.pack(name.pack(), self.objects[name]) for name in needed]
        parts += [
            _ROOT_LEAF.pack(number, numbers[ref.object], ref.offset, ref.length, ref.digest)
            for number, ref in sorted(self.leaves.items())
        ]
        magic = _OLD_ROOT_MAGIC if self.parent is None else _ROOT_MAGIC
        return magic + compress(b"".join(parts))

    def encoded_bytes(self) -> int:
        """Say about how long it is when it is encoded: hashes do not get shorter."""
        return (
            _ROOT_HEAD.size
            + len(self.packs) * _ROOT_PACK.size
            + len(self.objects) * _ROOT_OBJECT.size
            + len(self.leaves) * _ROOT_LEAF.size
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Read what `encode` wrote.

        Raises:
            Corrupt: it is not that.
        """
        if body[:8] not in (_ROOT_MAGIC, _OLD_ROOT_MAGIC):
            raise Corrupt("Not a root.")
        raw = decompress(body[8:], MAX_ROOT_BYTES)
        parent = None
        if body[:8] == _ROOT_MAGIC:
            parent, raw = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]
        if len(raw) < _ROOT_HEAD.size:
            raise Corrupt("A root is cut short.")
        size_bytes, packs, objects, leaves = _ROOT_HEAD.unpack_from(raw)
        packs_at = _ROOT_HEAD.size
        objects_at = packs_at + packs * _ROOT_PACK.size
        leaves_at = objects_at + objects * _ROOT_OBJECT.size
        if len(raw) != leaves_at + leaves * _ROOT_LEAF.size:
            raise Corrupt("A root has the wrong length.")
        check_device_size(size_bytes)
        root = cls(size_bytes, parent, PackTable.of_rows(raw[packs_at:objects_at]))
        for name, length in _ROOT_OBJECT.iter_unpack(raw[objects_at:leaves_at]):
            root.objects[ObjectName.unpack(name)] = length
        root._read_leaves(list(root.objects), _ROOT_LEAF.iter_unpack(raw[leaves_at:]))
        return root

    def _read_leaves(
        self, names: list[ObjectName], rows: Iterator[tuple[int, int, int, int, bytes]]
    ) -> None:
        end = -(-self.size_bytes // LEAF_SPAN_BYTES)
        last = -1
        for number, object_number, offset, length, digest in rows:
            if not last < number < end or object_number >= len(names):
                raise Corrupt("A root lists a leaf that cannot be.")
            name = names[object_number]
            if not 0 < length <= MAX_LEAF_BYTES or offset + length > self.objects[name]:
                raise Corrupt("A root places a leaf outside its object.")
            self.leaves[number] = LeafRef(name, offset, length, digest)
            last = number


def check_device_size(size_bytes: int) -> None:
    """Refuse sizes that no device of ours has.

    Raises:
        Corrupt: not a positive multiple of the block size, or above 64 TiB.
    """
    if not 0 < size_bytes <= MAX_DEVICE_BYTES or size_bytes % BLOCK_BYTES:
        raise Corrupt(f"A device cannot have {size_bytes} bytes.")
