"""Leaves and roots against plain dictionaries, and against hostile bytes."""

import os
import struct
from contextlib import suppress
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.units import GiB, MiB
from hosts.volumes.blocks import BLOCK_BYTES, compress, decode_block, decompress, encode_block
from hosts.volumes.errors import Corrupt
from hosts.volumes.index import (
    LEAF_BLOCKS,
    Entry,
    Leaf,
    LeafRef,
    PackTable,
    PackUse,
    Root,
)
from hosts.volumes.naming import Kind, ObjectName, content_digest, is_object, parse_key

VOLUME = UUID(int=7)
PACKS = [ObjectName(VOLUME.bytes, 1, bytes([n]) * 16) for n in range(5)]

entries = st.builds(
    Entry,
    st.sampled_from(PACKS),
    st.integers(0, 8 * MiB),
    st.integers(1, BLOCK_BYTES),
    st.binary(min_size=16, max_size=16),
)
changes = st.dictionaries(st.integers(0, LEAF_BLOCKS - 1), st.none() | entries, max_size=30)


@settings(max_examples=25, deadline=None)
@given(st.lists(changes, max_size=5))
def test_a_leaf_is_a_dictionary_of_entries(steps: list[dict[int, Entry | None]]) -> None:
    leaf = Leaf.empty()
    model: dict[int, Entry] = {}
    for step in steps:
        leaf = Leaf.decode(leaf.changed(step).encode())
        model.update({slot: entry for slot, entry in step.items() if entry is not None})
        for slot in [slot for slot, entry in step.items() if entry is None]:
            model.pop(slot, None)
        assert {n: e for n in range(LEAF_BLOCKS) if (e := leaf[n]) is not None} == model
        live: dict[ObjectName, int] = {}
        for entry in model.values():
            live[entry.pack] = live.get(entry.pack, 0) + entry.length
        assert leaf.live_bytes() == live
        assert bool(leaf) == bool(model)


@settings(max_examples=30, deadline=None)
@given(changes, changes)
def test_equal_leaves_are_equal_bytes_however_they_came_about(
    one: dict[int, Entry | None], two: dict[int, Entry | None]
) -> None:
    whole = one | two
    by_steps = Leaf.empty().changed(one).changed(two)
    assert by_steps.encode() == Leaf.empty().changed(whole).encode()


def example_root() -> Root:
    root = Root(64 * GiB)
    root.packs = PackTable({p: PackUse(5 * MiB, 1000 + n) for n, p in enumerate(PACKS)})
    root.objects = {PACKS[0]: 5000, PACKS[1]: 900}
    root.leaves = {
        0: LeafRef(PACKS[0], 0, 3000, b"a" * 16),
        3: LeafRef(PACKS[0], 3000, 2000, b"b" * 16),
        255: LeafRef(PACKS[1], 0, 900, b"c" * 16),
    }
    return root


@pytest.mark.parametrize("parent", [None, bytes(16), b"p" * 16])
def test_a_root_reads_as_it_was_written(parent: bytes | None) -> None:
    root = example_root()
    root.parent = parent
    assert Root.decode(root.encode()) == root


def test_a_root_without_a_parent_is_one_of_the_release_before() -> None:
    assert example_root().encode()[:8] == b"SKROOT\0\1"


def test_a_root_forgets_what_nothing_refers_to() -> None:
    root = example_root()
    del root.leaves[255]
    root.packs[PACKS[4]] = PackUse(5 * MiB, 0)
    again = Root.decode(root.encode())
    assert PACKS[1] not in again.objects
    assert PACKS[4] not in again.packs


names = st.builds(
    ObjectName,
    st.sampled_from([bytes(16), b"v" * 16, b"\xff" * 16]),
    st.sampled_from([0, 1, 255, 256, (1 << 32) - 1]),
    st.sampled_from([bytes(16), b"d" * 16, b"\xff" * 16]),
)
uses = st.builds(PackUse, st.integers(0, (1 << 64) - 1), st.integers(0, 9))
tables = st.dictionaries(names, uses, max_size=12)


def rows_of(pairs: list[tuple[ObjectName, PackUse]]) -> bytes:
    return b"".join(struct.pack("<36sQQ", name.pack(), *use) for name, use in pairs)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(names, uses), max_size=12), st.booleans(), st.data())
def test_a_table_of_packs_is_a_dictionary_whatever_rows_it_was_read_from(
    pairs: list[tuple[ObjectName, PackUse]], in_order: bool, data: st.DataObject
) -> None:
    if in_order:
        pairs = sorted((name, use) for name, use in dict(pairs).items() if use.live_bytes)
    model = dict(pairs)
    first = PackTable.of_rows(rows_of(pairs))
    table = first.copy()
    changes = data.draw(st.lists(st.tuples(names, uses | st.none()), max_size=8))
    for name, use in changes:
        if use is not None:
            table[name] = model[name] = use
        elif name in model:
            del table[name], model[name]
        else:
            with pytest.raises(KeyError):
                del table[name]
    assert dict(table) == model
    assert len(table) == len(model)
    assert first == dict(pairs)
    assert table.volumes() == {name.volume for name in model}
    for volume in (bytes(16), b"v" * 16, b"\xff" * 16, b"n" * 16):
        live = sum(use.live_bytes for name, use in model.items() if name.volume == volume)
        assert table.live_bytes(volume) == live
    alive = sorted((name, use) for name, use in model.items() if use.live_bytes)
    assert b"".join(table.rows()) == rows_of(alive)


@given(tables)
def test_equal_tables_of_packs_are_equal_bytes_however_they_came_about(
    packs: dict[ObjectName, PackUse],
) -> None:
    by_one = PackTable.of_rows(b"")
    for name, use in reversed(packs.items()):
        by_one[name] = use
    again = PackTable.of_rows(b"".join(by_one.rows()))
    assert again.rows() == [b"".join(PackTable(packs).rows())]


@pytest.mark.parametrize(
    "damage",
    [
        {"leaves": {256: LeafRef(PACKS[0], 0, 10, b"a" * 16)}},
        {"leaves": {0: LeafRef(PACKS[0], 4999, 10, b"a" * 16)}},
        {"size_bytes": 0},
        {"size_bytes": 12345},
        {"size_bytes": 1 << 62},
    ],
)
def test_a_root_that_cannot_be_is_refused(damage: dict[str, object]) -> None:
    root = example_root()
    for name, value in damage.items():
        setattr(root, name, value)
    with pytest.raises(Corrupt):
        Root.decode(root.encode())


def payload_of(body: bytes) -> bytes:
    return decompress(body[8:], 64 * MiB)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_give_a_value_or_corrupt_and_nothing_else(data: st.DataObject) -> None:
    leaf = Leaf.empty().changed({n: Entry(PACKS[n % 5], n, 100, b"d" * 16) for n in range(99)})
    body, decode = data.draw(
        st.sampled_from([(example_root().encode(), Root.decode), (leaf.encode(), Leaf.decode)])
    )
    # Damage what is compressed as well as the compressed form, or zstd would catch it all.
    inside = data.draw(st.booleans())
    raw = bytearray(payload_of(body) if inside else body)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)) | st.just(len(raw)))
    damaged = bytes(raw[:cut])
    with suppress(Corrupt):
        decode(body[:8] + compress(damaged) if inside else damaged)


def test_a_frame_that_claims_a_huge_size_asks_for_no_memory() -> None:
    bomb = compress(bytes(64 * MiB))
    assert len(bomb) < 10_000
    with pytest.raises(Corrupt):
        decompress(bomb, BLOCK_BYTES)
    with pytest.raises(Corrupt):
        # A header that states 2^62 bytes.
        decompress(b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little"), BLOCK_BYTES)


@pytest.mark.parametrize("block", [os.urandom(BLOCK_BYTES), b"text" * (BLOCK_BYTES // 4)])
def test_a_block_survives_its_encoding_and_any_change_is_noticed(block: bytes) -> None:
    digest = content_digest(block)
    stored = encode_block(block, None)
    assert len(stored) <= BLOCK_BYTES
    assert decode_block(stored, digest, None) == block
    for at in range(0, len(stored), 1 + len(stored) // 50):
        damaged = stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
        with pytest.raises(Corrupt):
            decode_block(damaged, digest, None)
        with pytest.raises(Corrupt):
            decode_block(stored[:at], digest, None)


@pytest.mark.parametrize(
    "key", ["", "packs/../../etc/passwd", "roots/" + "0" * 32 + "/00000001/zz", "packs/a/b/c"]
)
def test_only_our_own_keys_are_keys(key: str) -> None:
    with pytest.raises(Corrupt):
        parse_key(key)


def test_a_name_survives_its_key() -> None:
    assert parse_key(PACKS[3].key("packs")) == ("packs", PACKS[3])
    assert ObjectName.unpack(PACKS[3].pack()) == PACKS[3]


def test_a_pack_is_known_by_its_name_and_by_that_of_the_release_before() -> None:
    body = os.urandom(1000)
    name = ObjectName.of("packs", VOLUME, 1, body)
    assert name.digest != content_digest(body)
    assert is_object("packs", name.digest, body)
    assert is_object("packs", content_digest(body), body)
    assert not is_object("packs", name.digest, body + b"x")


@pytest.mark.parametrize("kind", ["leaves", "roots"])
def test_leaves_and_roots_have_one_name_each(kind: Kind) -> None:
    body = os.urandom(1000)
    assert ObjectName.of(kind, VOLUME, 1, body).digest == content_digest(body)
    assert not is_object(kind, ObjectName.of("packs", VOLUME, 1, body).digest, body)
