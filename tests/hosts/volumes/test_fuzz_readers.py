"""Hostile overlays, indexes and sealed objects: `Corrupt`, soon, and in little memory.

Each is read in this process with memory traced; what hangs is ended by the tests' timeout.
"""

import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.units import GiB, KiB, MiB
from hosts.volumes.blocks import BLOCK_BYTES, compress, decode_block, decompress
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
from hosts.volumes.keys import Keyring
from hosts.volumes.naming import ObjectName, content_digest, parse_key
from hosts.volumes.qcow2 import L2_SPAN_BLOCKS, open_overlay
from tests.hosts.volumes.given_keys import KeyForEach
from tests.hosts.volumes.overlays import write_overlay

MEMORY_BYTES = 24 * MiB
"""A few leaves' worth, beyond what was given: no length in the input becomes an allocation."""

SOON_S = 10
QUIET = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
U32 = st.sampled_from([0, 1, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF]) | st.integers(
    0, 0xFFFF_FFFF
)
U64 = st.sampled_from([0, 1, 1 << 32, 1 << 40, (1 << 62) - 1, 1 << 63, (1 << 64) - 1]) | (
    st.integers(0, (1 << 64) - 1)
)


@contextmanager
def bounded(given_bytes: int = 0) -> Iterator[None]:
    """Allow `Corrupt` and nothing else, little memory, little time."""
    tracemalloc.start()
    started = time.monotonic()
    try:
        with suppress(Corrupt):
            yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES + 4 * given_bytes
    assert time.monotonic() - started < SOON_S


# -- overlays -------------------------------------------------------------------------------


def read_all(path: Path) -> None:
    """Read an overlay as a commit does."""
    with open_overlay(path) as overlay:
        overlay.is_empty()
        for table in sorted(overlay.tables)[:8]:
            for cluster in list(overlay.clusters(table).values())[:8]:
                assert len(overlay.read(cluster)) == BLOCK_BYTES


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    blocks = {0: b"w" * BLOCK_BYTES, 5: None, L2_SPAN_BLOCKS + 1: b"x" * BLOCK_BYTES}
    return write_overlay(tmp_path / "good", 4 * GiB, blocks)


@QUIET
@given(st.binary(max_size=4096))
def test_random_bytes_are_no_overlay(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "random"
    for head in (b"", b"QFI\xfb\0\0\0\3"):
        path.write_bytes(head + body)
        with bounded():
            read_all(path)


_SHORT_FIELDS = (4, 16, 20, 32, 36, 56, 60, 96, 100)
_LONG_FIELDS = (8, 24, 40, 48, 64, 72, 80, 88)


@QUIET
@given(
    st.dictionaries(st.sampled_from(_SHORT_FIELDS), U32, max_size=3),
    st.dictionaries(st.sampled_from(_LONG_FIELDS), U64, max_size=3),
)
def test_any_header_gives_clusters_or_corrupt(
    tmp_path: Path, overlay: Path, shorts: dict[int, int], longs: dict[int, int]
) -> None:
    body = bytearray(overlay.read_bytes())
    for at, value in shorts.items():
        struct.pack_into(">I", body, at, value)
    for at, value in longs.items():
        struct.pack_into(">Q", body, at, value)
    path = tmp_path / "headed"
    path.write_bytes(body)
    with bounded():
        read_all(path)


OVERLAY_BYTES = 6 * BLOCK_BYTES
"""Header, L1 table, two L2 tables, two clusters."""

_PLACES = st.sampled_from(
    [BLOCK_BYTES, BLOCK_BYTES + 8, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 40]
) | st.integers(0, OVERLAY_BYTES // 8 - 1).map(lambda n: 8 * n)
_POINTERS = U64 | st.integers(0, 8).map(lambda n: n * BLOCK_BYTES)
_FLAGS = st.sampled_from([0, 1, 1 << 62, 1 << 63, 1 << 56])


@QUIET
@given(
    st.lists(st.tuples(_PLACES, _POINTERS, _FLAGS), min_size=1, max_size=6),
    st.just(OVERLAY_BYTES) | st.integers(0, OVERLAY_BYTES),
)
def test_any_table_entry_gives_clusters_or_corrupt(
    tmp_path: Path, overlay: Path, entries: list[tuple[int, int, int]], cut: int
) -> None:
    """Tables that point at themselves, at each other, outside the file, at odd places."""
    body = bytearray(overlay.read_bytes())
    assert len(body) == OVERLAY_BYTES
    for place, pointer, flag in entries:
        struct.pack_into(">Q", body, place, pointer | flag)
    path = tmp_path / "pointed"
    path.write_bytes(body[:cut])
    with bounded():
        read_all(path)


def test_a_huge_table_in_a_sparse_file_takes_no_more_than_its_bound(tmp_path: Path) -> None:
    """A 64 TiB overlay with a full L1 table, each entry pointing at one same L2 table."""
    path = tmp_path / "huge"
    size_bytes = 64 << 40
    write_overlay(path, size_bytes, {0: None})
    entries = size_bytes // (L2_SPAN_BLOCKS * BLOCK_BYTES)
    l2_at = BLOCK_BYTES + -(-8 * entries // BLOCK_BYTES) * BLOCK_BYTES
    with path.open("r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(struct.pack(">Q", l2_at) * entries)
    with bounded(8 * entries):
        read_all(path)


# -- the index ------------------------------------------------------------------------------


@pytest.fixture
def root() -> Root:
    packs = [ObjectName(UUID(int=7).bytes, 1, bytes([n]) * 16) for n in range(3)]
    root = Root(64 * GiB)
    root.packs = PackTable({pack: PackUse(5 * MiB, 1000) for pack in packs})
    root.objects = {packs[0]: 5000}
    root.leaves = {n: LeafRef(packs[0], n * 100, 100, b"d" * 16) for n in range(3)}
    return root


def leaf() -> Leaf:
    pack = ObjectName(UUID(int=7).bytes, 1, b"p" * 16)
    return Leaf.empty().changed({n: Entry(pack, n * 9, 9, b"d" * 16) for n in range(50)})


def walk_leaf(body: bytes) -> None:
    """Use a leaf as readers and the collector do."""
    found = Leaf.decode(body)
    for slot in range(LEAF_BLOCKS):
        entry = found[slot]
        assert entry is None or 0 < entry.length <= BLOCK_BYTES
    found.live_bytes()
    Leaf.decode(found.changed({3: None}).encode())


def walk_root(body: bytes) -> None:
    found = Root.decode(body)
    for ref in found.leaves.values():
        assert ref.offset + ref.length <= found.objects[ref.object]
    assert Root.decode(found.encode()).leaves == found.leaves


READERS: dict[str, tuple[Callable[[bytes], None], bytes]] = {
    "leaf": (walk_leaf, b"SKLEAF\0\1"),
    "root": (walk_root, b"SKROOT\0\1"),
}


@pytest.mark.parametrize("kind", READERS)
@QUIET
@given(body=st.binary(max_size=2000), is_frame=st.booleans())
def test_random_bytes_are_no_index(kind: str, body: bytes, is_frame: bool) -> None:
    walk, magic = READERS[kind]
    with bounded():
        walk(body)
    with bounded():
        walk(magic + (compress(body) if is_frame else body))


@QUIET
@given(U64, U32, U32, U32, st.integers(0, 400))
def test_a_root_that_claims_more_than_it_has_is_corrupt(
    size_bytes: int, packs: int, objects: int, leaves: int, rest: int
) -> None:
    head = struct.pack("<QIII", size_bytes, packs, objects, leaves)
    for magic in (b"SKROOT\0\1", b"SKROOT\0\2"):
        for before in (b"", b"p" * 16):
            with bounded():
                walk_root(magic + compress(before + head + bytes(rest)))


@pytest.mark.parametrize("kind", READERS)
@QUIET
@given(
    words=st.lists(
        st.tuples(st.integers(0, 120) | st.integers(0, 1 << 20), U32), min_size=1, max_size=4
    )
)
def test_a_changed_word_of_an_index_gives_a_value_or_corrupt(
    root: Root, kind: str, words: list[tuple[int, int]]
) -> None:
    whole = leaf().encode() if kind == "leaf" else root.encode()
    body = bytearray(decompress(whole[8:], 64 * MiB))
    for place, word in words:
        struct.pack_into("<I", body, place * 4 % (len(body) - 4), word)
    with bounded():
        READERS[kind][0](whole[:8] + compress(bytes(body)))


@pytest.mark.parametrize("kind", READERS)
def test_a_frame_that_unpacks_to_very_much_is_refused_before_it_does(kind: str) -> None:
    walk, magic = READERS[kind]
    bomb = compress(bytes(GiB))
    assert len(bomb) < 64 * KiB
    with bounded():
        walk(magic + bomb)


# -- blocks, seals, keys --------------------------------------------------------------------


@QUIET
@given(st.binary(max_size=BLOCK_BYTES + 100), st.binary(min_size=16, max_size=16))
def test_random_bytes_are_no_block(stored: bytes, digest: bytes) -> None:
    keyring = Keyring(KeyForEach())
    for sealer in (None, keyring.sealer(UUID(int=3).bytes)):
        with bounded(len(stored)), pytest.raises(Corrupt):
            decode_block(stored, digest, sealer)


@QUIET
@given(st.data())
def test_no_change_of_a_sealed_object_goes_unnoticed(data: st.DataObject) -> None:
    keyring, volume = Keyring(KeyForEach()), UUID(int=3).bytes
    sealed = bytearray(keyring.seal("leaves", volume, b"what it says" * 10))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.just(len(sealed)) | st.integers(0, len(sealed)))
    with pytest.raises(Corrupt):
        keyring.open("leaves", volume, bytes(sealed[:cut]))


@QUIET
@given(st.text(max_size=120))
def test_any_text_is_a_key_of_ours_or_corrupt(text: str) -> None:
    with suppress(Corrupt):
        kind, name = parse_key(text)
        assert f"{kind}/{name.volume.hex()}/{name.epoch:08x}/{name.digest.hex()}" == text
    assert len(content_digest(text.encode(errors="surrogatepass"))) == 16
