"""Commits on a store in memory: what is written, and what is not."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from common.units import GiB, KiB, MiB
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.cache import ObjectCache
from hosts.volumes.commit import (
    Commit,
    Prepared,
    Rewrite,
    import_image,
    load_root,
    prepare_overlays,
)
from hosts.volumes.errors import Corrupt, StoreUnavailable
from hosts.volumes.index import Root
from hosts.volumes.keys import GivenKeys, Keyring, PlainKeys
from hosts.volumes.naming import ObjectName, parse_key
from hosts.volumes.reader import ReaderMemory, VolumeReader
from hosts.volumes.uploads import Gate
from tests.hosts.volumes.given_keys import KeyForEach
from tests.hosts.volumes.memory_store import MemoryStore
from tests.hosts.volumes.overlays import commit_overlays
from tests.hosts.volumes.test_qcow2 import make, qemu_io

VOLUME = UUID(int=3)


class Bench:
    """A store, a cache and a folder for images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = MemoryStore()
        self.keyring = Keyring(KeyForEach())
        self.cache = ObjectCache(
            folder / "cache", budget_bytes=GiB, reader=self.store, patience_s=0
        )

    def import_bytes(
        self, content: bytes, size_bytes: int = GiB, volume_id: UUID | None = None
    ) -> Commit:
        image = self.folder / "image"
        image.write_bytes(content)
        return import_image(
            image,
            volume_id=volume_id or uuid4(),
            store=self.store,
            size_bytes=size_bytes,
            keyring=self.keyring,
        )

    def overlay(self, name: str, *commands: str) -> Path:
        path = make(self.folder / f"{name}.qcow2", size="1G")
        qemu_io(path, *commands)
        return path

    def commit(
        self,
        base: Commit,
        *overlays: Path,
        epoch: int = 1,
        rewrite: frozenset[ObjectName] = frozenset(),
    ) -> Commit | None:
        return commit_overlays(
            overlays,
            base_root_key=base.root_key,
            volume_id=VOLUME,
            epoch=epoch,
            store=self.store,
            cache=self.cache,
            keyring=self.keyring,
            rewrite=rewrite,
        )

    @contextmanager
    def prepared(
        self,
        base: Commit,
        *overlays: Path,
        on: Prepared | None = None,
        gate: Gate | None = None,
    ) -> Iterator[Prepared | None]:
        with prepare_overlays(
            overlays,
            base_root_key=base.root_key if on is None else on.commit.root_key,
            volume_id=VOLUME,
            epoch=1,
            store=self.store,
            cache=self.cache,
            keyring=self.keyring,
            base_index={} if on is None else on.index,
            gate=gate,
        ) as prepared:
            yield prepared

    def root(self, commit: Commit) -> Root:
        return load_root(self.store, commit.root_key, self.keyring)

    def read(self, commit: Commit, offset: int, length: int) -> bytes:
        reader = VolumeReader(
            load_root(self.store, commit.root_key, self.keyring),
            ReaderMemory(self.cache),
            self.keyring,
        )
        buffer = bytearray(length)
        reader.read_into(buffer, offset)
        return bytes(buffer)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_image_reads_back_and_its_zeros_cost_nothing(bench: Bench) -> None:
    content = os.urandom(MiB) + bytes(MiB) + b"odd end"
    commit = bench.import_bytes(content)
    assert bench.read(commit, 0, 3 * MiB) == content.ljust(3 * MiB, b"\0")
    assert commit.blocks_changed == MiB // BLOCK_BYTES + 1
    assert commit.size_bytes == GiB
    assert commit.uploaded_bytes == sum(len(body) for body in bench.store.objects.values())


def test_an_image_becomes_packs_of_four_to_eight_mebibytes(bench: Bench) -> None:
    commit = bench.import_bytes(os.urandom(40 * MiB))
    sizes = sorted(size for _, size in bench.store.keys("packs/"))
    assert len(sizes) == commit.packs
    assert all(4 * MiB <= size <= 8 * MiB for size in sizes[1:])


def test_an_import_tells_how_far_it_is(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(os.urandom(40 * MiB))
    told: list[tuple[int, int]] = []
    import_image(
        image,
        volume_id=VOLUME,
        store=MemoryStore(),
        size_bytes=GiB,
        keyring=Keyring(KeyForEach()),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == sorted(told)
    assert len(told) > 2
    assert told[-1] == (40 * MiB, 40 * MiB)


def test_an_image_larger_than_its_device_is_refused(bench: Bench) -> None:
    with pytest.raises(Corrupt):
        bench.import_bytes(bytes(2 * MiB), size_bytes=MiB)


def test_upper_overlays_win_and_zeros_hide_what_is_below(bench: Bench) -> None:
    base = bench.import_bytes(b"b" * MiB)
    lower = bench.overlay("lower", "write -P 0x31 0 256k")
    upper = bench.overlay("upper", "write -P 0x32 64k 64k", "write -z -u 128k 64k")
    commit = bench.commit(base, lower, upper)
    assert commit is not None
    part = 64 * KiB
    expected = b"1" * part + b"2" * part + bytes(part) + b"1" * part + b"b" * part
    assert bench.read(commit, 0, 5 * part) == expected
    assert commit.blocks_changed == 4


def test_clusters_are_read_right_wherever_they_lie_in_the_file(bench: Bench) -> None:
    base = bench.import_bytes(b"b" * MiB)
    # In the file in another order than in the device, in runs short and long.
    order = [*range(40, 60), 3, 2, 1, *range(5, 25), 70, 69]
    lower = bench.overlay("lower", *(f"write -P {n} {64 * n}k 64k" for n in order))
    upper = bench.overlay("upper", "write -P 0xee 448k 128k", "write -z -u 2688k 192k")
    commit = bench.commit(base, lower, upper)
    assert commit is not None
    expected = {n: bytes([n]) for n in order}
    expected |= {7: b"\xee", 8: b"\xee", 42: b"\0", 43: b"\0", 44: b"\0"}
    for number in range(80):
        filler = b"b" if number < 16 else b"\0"
        block = expected.get(number, filler) * BLOCK_BYTES
        assert bench.read(commit, number * BLOCK_BYTES, BLOCK_BYTES) == block


@pytest.mark.parametrize("base_is_plain", [True, False])
@pytest.mark.parametrize("is_plain", [True, False])
def test_what_the_base_has_costs_nothing_whichever_of_them_is_encrypted(
    bench: Bench, base_is_plain: bool, is_plain: bool
) -> None:
    base_volume = uuid4()
    plain = {base_volume} if base_is_plain else set()
    bench.keyring = Keyring(KeyForEach(plain | ({VOLUME} if is_plain else set())))
    base = bench.import_bytes(b"b" * MiB, volume_id=base_volume)
    same = bench.overlay("same", "write -P 0x62 0 512k")
    assert bench.commit(base, same) is None
    other = bench.overlay("other", "write -P 0x62 0 512k", "write -P 0x31 64k 64k")
    commit = bench.commit(base, other)
    assert commit is not None
    assert commit.blocks_changed == 1
    assert bench.read(commit, 0, 256 * KiB) == b"".join(
        bytes([n]) * BLOCK_BYTES for n in b"b1bb"
    )
    assert bench.commit(commit, bench.overlay("again", "write -P 0x31 64k 64k")) is None


def test_a_generation_stays_as_it_was_when_others_follow(bench: Bench) -> None:
    base = bench.import_bytes(b"b" * MiB)
    first = bench.commit(base, bench.overlay("one", "write -P 0x31 0 64k"))
    assert first is not None
    second = bench.commit(first, bench.overlay("two", "write -P 0x32 0 64k"), epoch=2)
    assert second is not None
    assert bench.read(base, 0, 1) == b"b"
    assert bench.read(first, 0, 1) == b"1"
    assert bench.read(second, 0, 1) == b"2"


def test_live_bytes_are_exact_over_many_generations(bench: Bench) -> None:
    commit = bench.import_bytes(os.urandom(2 * MiB))
    for number in range(6):
        pattern = f"write -P {number + 1} {number % 3 * 100}M 192k"
        hole = f"write -z -u {number * 64}k 64k"
        after = bench.commit(commit, bench.overlay(f"o{number}", pattern, hole))
        assert after is not None
        commit = after
    root = load_root(bench.store, commit.root_key, bench.keyring)
    live: dict[ObjectName, int] = {}
    reader = VolumeReader(root, ReaderMemory(bench.cache), bench.keyring)
    for number in range(GiB // BLOCK_BYTES):
        entry = reader._entry(number)
        if entry is not None:
            live[entry.pack] = live.get(entry.pack, 0) + entry.length
    assert {pack: use.live_bytes for pack, use in root.packs.items()} == live
    own = sum(count for pack, count in live.items() if pack.volume == VOLUME.bytes)
    assert commit.stored_bytes == own
    for pack, use in root.packs.items():
        assert len(bench.store.objects[pack.key("packs")]) == use.stored_bytes


def test_doing_it_again_gives_the_same_names_and_stores_nothing_twice(bench: Bench) -> None:
    base = bench.import_bytes(b"b" * MiB)
    overlay = bench.overlay("one", "write -P 0x31 0 640k", "write -P 0x33 600M 64k")
    first = bench.commit(base, overlay)
    before = dict(bench.store.objects)
    assert bench.commit(base, overlay) == first
    assert bench.store.objects == before


def test_a_commit_is_the_same_whether_its_base_is_stored_or_only_prepared(
    bench: Bench,
) -> None:
    base = bench.import_bytes(os.urandom(MiB))
    one = bench.overlay("one", "write -P 1 0 2M")
    two = bench.overlay("two", "write -P 2 1M 2M", "write -P 3 300M 64k")
    first = bench.commit(base, one)
    assert first is not None
    second = bench.commit(first, two)
    bench.store.objects = {
        key: body
        for key, body in bench.store.objects.items()
        if parse_key(key)[1].volume != VOLUME.bytes
    }
    shutil.rmtree(bench.folder / "cache")
    bench.cache = ObjectCache(
        bench.folder / "cache", budget_bytes=GiB, reader=bench.store, patience_s=0
    )
    stored_before = set(bench.store.objects)

    gate = Gate()
    with (
        bench.prepared(base, one) as once,
        bench.prepared(base, two, on=once, gate=gate) as twice,
    ):
        assert set(bench.store.objects) - stored_before <= {key for key, _ in first.objects}
        assert once is not None
        assert once.put() == first
        gate.open()
        assert twice is not None
        assert twice.put() == second


def test_what_is_prepared_keeps_no_overlay_open(bench: Bench) -> None:
    base = bench.import_bytes(os.urandom(MiB))
    overlay = bench.overlay("one", "write -P 1 0 2M")

    with bench.prepared(base, overlay):
        open_files = {os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()}

    assert str(overlay.resolve()) not in open_files


def test_a_commit_fetches_only_the_leaves_that_it_changes(bench: Bench) -> None:
    image = bench.folder / "wide"
    with image.open("wb") as file:
        for at in (0, 300 * MiB, 600 * MiB, 900 * MiB):
            file.seek(at)
            file.write(b"w" * MiB)
    base = import_image(
        image, volume_id=uuid4(), store=bench.store, size_bytes=GiB, keyring=bench.keyring
    )
    bench.store.gets.clear()
    commit = bench.commit(base, bench.overlay("one", "write -P 0x31 300M 64k"))
    assert commit is not None
    assert [key.split("/")[0] for key, _, _ in bench.store.gets] == ["roots", "leaves"]
    assert len(load_root(bench.store, commit.root_key, bench.keyring).leaves) == 4


@pytest.mark.parametrize("kind", ["packs", "leaves", "roots"])
def test_a_root_is_never_there_before_what_it_names(bench: Bench, kind: str) -> None:
    base = bench.import_bytes(b"b" * MiB)
    overlay = bench.overlay("one", "write -P 0x31 0 64k")
    before = set(bench.store.objects)
    bench.store.fail = lambda key: key.startswith(kind) and VOLUME.hex in key
    with pytest.raises(StoreUnavailable):
        bench.commit(base, overlay)
    new = {key.split("/")[0] for key in set(bench.store.objects) - before}
    assert new == {"packs": set(), "leaves": {"packs"}, "roots": {"packs", "leaves"}}[kind]
    bench.store.fail = lambda _: False
    assert bench.commit(base, overlay) is not None


def test_a_failing_upload_ends_a_large_commit_soon(bench: Bench) -> None:
    image = bench.folder / "image"
    image.write_bytes(os.urandom(100 * MiB))
    tried: list[str] = []

    def fail(key: str) -> bool:
        tried.append(key)
        return True

    bench.store.fail = fail
    with pytest.raises(StoreUnavailable):
        import_image(
            image, volume_id=VOLUME, store=bench.store, size_bytes=GiB, keyring=bench.keyring
        )
    assert len(tried) < 16


def test_another_volumes_root_under_a_root_key_is_noticed(bench: Bench) -> None:
    one = bench.import_bytes(b"1" * MiB)
    two = bench.import_bytes(b"2" * MiB)
    bench.store.objects[one.root_key] = bench.store.objects[two.root_key]
    with pytest.raises(Corrupt):
        load_root(bench.store, one.root_key, bench.keyring)
    assert parse_key(one.root_key)[0] == "roots"


def test_an_overlay_of_another_size_is_refused(bench: Bench) -> None:
    base = bench.import_bytes(b"b" * MiB)
    other = bench.folder / "other.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", other, "2G"], check=True)
    with pytest.raises(Corrupt):
        bench.commit(base, other)


def test_packs_that_are_to_be_emptied_are_not_needed_any_more(bench: Bench) -> None:
    base = bench.import_bytes(os.urandom(8 * MiB), volume_id=VOLUME)
    old = frozenset(bench.root(base).packs)
    assert len(old) == 2
    commit = bench.commit(base, bench.overlay("one", "write -P 0x31 0 64k"), rewrite=old)
    assert commit is not None
    assert not old & bench.root(commit).packs.keys()
    assert commit.blocks_changed == 1
    content = bench.read(base, 0, 8 * MiB)
    assert bench.read(commit, 0, 8 * MiB) == b"1" * 64 * KiB + content[64 * KiB :]


def test_a_pack_is_emptied_though_nothing_else_changed(bench: Bench) -> None:
    base = bench.import_bytes(os.urandom(8 * MiB), volume_id=VOLUME)
    first = min(bench.root(base).packs)
    same = bench.overlay("none")
    assert bench.commit(base, same) is None
    commit = bench.commit(base, same, rewrite=frozenset([first]))
    assert commit is not None
    assert commit.blocks_changed == 0
    assert first not in bench.root(commit).packs
    assert len(bench.root(commit).packs) == 2
    assert bench.read(commit, 0, 8 * MiB) == bench.read(base, 0, 8 * MiB)


def test_a_rewritten_block_that_is_written_as_it_was_leaves_its_pack_too(bench: Bench) -> None:
    base = bench.import_bytes(b"1" * MiB, volume_id=VOLUME)
    (only,) = bench.root(base).packs
    overlay = bench.overlay("one", "write -P 0x31 0 256k")
    commit = bench.commit(base, overlay, rewrite=frozenset([only]))
    assert commit is not None
    assert only not in bench.root(commit).packs
    assert bench.read(commit, 0, MiB) == b"1" * MiB


def test_packs_of_a_base_are_not_copied_by_each_that_is_made_of_it(bench: Bench) -> None:
    base = bench.import_bytes(b"1" * MiB)
    packs = frozenset(bench.root(base).packs)
    assert bench.commit(base, bench.overlay("none"), rewrite=packs) is None
    commit = bench.commit(base, bench.overlay("one", "write -P 0x32 0 64k"), rewrite=packs)
    assert commit is not None
    assert packs < bench.root(commit).packs.keys()


def test_packs_that_the_base_does_not_name_are_not_rewritten(bench: Bench) -> None:
    base = bench.import_bytes(b"1" * MiB)
    stranger = ObjectName(uuid4().bytes, 1, b"x" * 16)
    assert bench.commit(base, bench.overlay("o"), rewrite=frozenset([stranger])) is None


def test_a_commit_says_what_it_put(bench: Bench) -> None:
    base = bench.import_bytes(b"b" * MiB)
    before = set(bench.store.objects)
    commit = bench.commit(base, bench.overlay("one", "write -P 0x31 0 64k"))
    assert commit is not None
    assert commit.base_root_key == base.root_key
    new = {key: len(bench.store.objects[key]) for key in set(bench.store.objects) - before}
    assert dict(commit.objects) == new
    assert sum(new.values()) == commit.uploaded_bytes


def test_the_same_writes_over_another_base_make_other_objects(bench: Bench) -> None:
    base = bench.import_bytes(b"b" * MiB)
    there = bench.overlay("there", "write -P 0x31 0 64k")
    back = bench.overlay("back", "write -P 0x62 0 64k")
    keys: set[str] = set()
    commit = base
    for overlay in (there, back, there, back):
        after = bench.commit(commit, overlay)
        assert after is not None
        assert not keys & {key for key, _ in after.objects}
        keys |= {key for key, _ in after.objects}
        commit = after


def test_nothing_of_a_disk_is_in_the_store_in_the_clear(bench: Bench) -> None:
    secret = b"a secret that is longer than a block of AES"
    base = bench.import_bytes(secret + os.urandom(4096))
    assert not any(secret in body for body in bench.store.objects.values())
    assert not any(
        body.startswith((b"SKROOT", b"SKLEAF")) for body in bench.store.objects.values()
    )
    assert bench.read(base, 0, len(secret)) == secret


def test_a_volume_of_the_release_before_stays_plain_and_readable(bench: Bench) -> None:
    sealed = bench.keyring
    bench.keyring = Keyring(PlainKeys())
    base = bench.import_bytes(b"b" * MiB)
    commit = bench.commit(base, bench.overlay("one", "write -P 0x31 0 64k"))
    assert commit is not None
    assert bench.store.objects[commit.root_key].startswith(b"SKROOT\0\1")
    assert bench.read(commit, 0, 64 * KiB) == b"1" * 64 * KiB
    # A new volume over a plain one has a key of its own.
    bench.keyring = Keyring(
        GivenKeys({parsed_volume(base): None} | dict(KeyForEach().keys_of([VOLUME])))
    )
    over = bench.commit(base, bench.overlay("two", "write -P 0x32 0 64k"), epoch=2)
    assert over is not None
    assert bench.read(over, 0, MiB) == b"2" * 64 * KiB + b"b" * (MiB - 64 * KiB)
    bench.keyring = sealed


def parsed_volume(commit: Commit) -> UUID:
    return UUID(bytes=parse_key(commit.root_key)[1].volume)


def test_blocks_that_a_donor_has_elsewhere_are_named_there_and_not_copied(
    bench: Bench,
) -> None:
    base = bench.import_bytes(os.urandom(8 * MiB))
    first, second = sorted(bench.root(base).packs)
    # As the collector does it: the blocks stay with the volume that they are of.
    volume = UUID(bytes=first.volume)
    moved = commit_overlays(
        [],
        base_root_key=base.root_key,
        volume_id=volume,
        epoch=5,
        store=bench.store,
        cache=bench.cache,
        keyring=bench.keyring,
        rewrite=frozenset([first]),
    )
    assert moved is not None
    before = {key for key in bench.store.objects if key.startswith("packs")}

    commit = bench.commit(
        base,
        bench.overlay("one", "write -P 0x31 0 64k"),
        rewrite=Rewrite.of([first], moved.root_key),
    )

    assert commit is not None
    assert commit.packs == 1  # what was written, and nothing of the old pack
    new = {key for key in bench.store.objects if key.startswith("packs")} - before
    assert sum(len(bench.store.objects[key]) for key in new) < MiB
    assert set(commit.adopted) == {
        pack.key("packs") for pack in bench.root(moved).packs if pack != second
    }
    root = bench.root(commit)
    assert first not in root.packs
    content = bench.read(base, 0, 8 * MiB)
    assert bench.read(commit, 0, 8 * MiB) == b"1" * 64 * KiB + content[64 * KiB :]


def test_a_donor_that_is_gone_is_done_without(bench: Bench) -> None:
    base = bench.import_bytes(os.urandom(MiB), volume_id=VOLUME)
    (only,) = bench.root(base).packs
    gone = ObjectName(VOLUME.bytes, 9, b"g" * 16).key("roots")
    commit = bench.commit(base, bench.overlay("o"), rewrite=Rewrite.of([only], gone))
    assert commit is not None
    assert not commit.adopted
    assert bench.read(commit, 0, MiB) == bench.read(base, 0, MiB)
