"""The host's cache: bounded, checked, one fetch per range, nothing bad kept."""

import os
import threading
import time
from pathlib import Path
from uuid import UUID

import pytest

from common.units import KiB, MiB
from hosts.volumes.cache import CHUNK_BYTES, MAX_WINDOW_BYTES, ObjectCache
from hosts.volumes.errors import StoreUnavailable
from hosts.volumes.naming import ObjectName
from tests.hosts.volumes.memory_store import MemoryStore

VOLUME = UUID(int=9)


def add_object(store: MemoryStore, size_bytes: int) -> tuple[str, bytes]:
    body = os.urandom(size_bytes)
    key = ObjectName.of("packs", VOLUME, 1, body).key("packs")
    store.objects[key] = body
    return key, body


def make_cache(
    folder: Path, store: MemoryStore, *, budget_bytes: int = 64 * MiB, patience_s: float = 0
) -> ObjectCache:
    return ObjectCache(folder, budget_bytes=budget_bytes, reader=store, patience_s=patience_s)


def allocated_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (folder / "packs").iterdir())


def test_what_was_fetched_is_not_fetched_again_not_even_by_another_process(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    key, body = add_object(store, 3 * MiB + 777)
    cache = make_cache(tmp_path, store)
    assert cache.read(key, MiB + 5, 100, len(body)) == body[MiB + 5 : MiB + 105]
    assert store.gets == [(key, MiB, CHUNK_BYTES)]
    again = make_cache(tmp_path, store)
    assert again.read(key, MiB, CHUNK_BYTES, len(body)) == body[MiB : MiB + CHUNK_BYTES]
    assert len(store.gets) == 1
    assert again.read(key, len(body) - 50, 50, len(body)) == body[-50:]
    assert again.read(key, len(body) - 50, 50, len(body)) == body[-50:]
    assert len(store.gets) == 2


def test_sequential_reads_fetch_ever_larger_windows(tmp_path: Path) -> None:
    store = MemoryStore()
    key, body = add_object(store, 16 * MiB)
    cache = make_cache(tmp_path, store)
    for at in range(0, len(body), 64 * KiB):
        assert cache.read(key, at, 64 * KiB, len(body)) == body[at : at + 64 * KiB]
    lengths = [length for _, _, length in store.gets if length is not None]
    assert sum(lengths) == len(body)
    assert max(lengths) == MAX_WINDOW_BYTES
    assert len(lengths) < 10


def test_many_readers_of_one_range_make_one_request(tmp_path: Path) -> None:
    store = MemoryStore()
    key, body = add_object(store, MiB)
    slow_get = store.get

    def get(key: str, start: int = 0, length: int | None = None) -> bytes:
        time.sleep(0.2)
        return slow_get(key, start, length)

    store.get = get  # type: ignore[method-assign]
    cache = make_cache(tmp_path, store)
    answers: list[bytes] = []
    readers = [
        threading.Thread(target=lambda: answers.append(cache.read(key, 10, 50, len(body))))
        for _ in range(8)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert answers == [body[10:60]] * 8
    assert len(store.gets) == 1


def test_the_budget_holds_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = MemoryStore()
    budget_bytes = 4 * MiB
    cache = make_cache(tmp_path, store, budget_bytes=budget_bytes)
    objects = [add_object(store, MiB) for _ in range(12)]
    first = tmp_path / "packs" / objects[0][0].replace("/", "-")
    for number, (key, body) in enumerate(objects):
        assert cache.read(key, 0, MiB, MiB) == body
        assert allocated_bytes(tmp_path) <= budget_bytes
        if number < 6:
            assert first.exists()
            os.utime(first)  # it stays in use, for a while
    assert not first.exists()
    asked = len(store.gets)
    key, body = objects[-1]
    assert cache.read(key, 0, MiB, MiB) == body
    assert len(store.gets) == asked, "the latest is still there"


def test_an_object_above_the_budget_is_read_but_not_kept(tmp_path: Path) -> None:
    store = MemoryStore()
    key, body = add_object(store, 2 * MiB)
    cache = make_cache(tmp_path, store, budget_bytes=MiB)
    assert cache.read(key, 0, 2 * MiB, 2 * MiB) == body
    cache.put(key, body)
    assert allocated_bytes(tmp_path) == 0


def test_a_file_that_another_process_evicts_is_fetched_again(tmp_path: Path) -> None:
    store = MemoryStore()
    key, body = add_object(store, MiB)
    cache = make_cache(tmp_path, store)
    cache.read(key, 0, 100, MiB)
    path = next((tmp_path / "packs").iterdir())
    os.truncate(path, 0)
    path.unlink()
    for _ in range(2):
        assert cache.read(key, 0, 100, MiB) == body[:100]
    assert len(store.gets) == 2


def test_a_failed_or_short_fetch_is_never_kept(tmp_path: Path) -> None:
    store = MemoryStore()
    key, body = add_object(store, MiB)
    cache = make_cache(tmp_path, store)
    store.fail = lambda _: True
    with pytest.raises(StoreUnavailable):
        cache.read(key, 0, 100, MiB)
    store.fail = lambda _: False
    store.objects[key] = body[: 100 * KiB]  # cut short on its way
    with pytest.raises(StoreUnavailable):
        cache.read(key, 0, 100, MiB)
    assert allocated_bytes(tmp_path) == 0
    store.objects[key] = body
    assert cache.read(key, 0, 100, MiB) == body[:100]


def test_a_reader_waits_for_a_store_that_comes_back(tmp_path: Path) -> None:
    store = MemoryStore()
    key, body = add_object(store, MiB)
    cache = make_cache(tmp_path, store, patience_s=30)
    failures = iter([True, True, True])
    store.fail = lambda _: next(failures, False)
    assert cache.read(key, 0, 100, MiB) == body[:100]
    assert len(store.gets) == 4


def test_what_seems_present_but_is_wrong_can_be_fetched_afresh(tmp_path: Path) -> None:
    store = MemoryStore()
    key, body = add_object(store, MiB)
    cache = make_cache(tmp_path, store)
    cache.put(key, body)
    path = next((tmp_path / "packs").iterdir())
    path.write_bytes(b"torn" * (MiB // 4))
    assert cache.read(key, 0, 4, MiB) == b"torn"
    assert cache.read(key, 0, 4, MiB, fresh=True) == body[:4]
    assert cache.read(key, 0, 4, MiB) == body[:4]


def test_a_whole_object_is_checked_against_its_name(tmp_path: Path) -> None:
    store = MemoryStore()
    key, body = add_object(store, MiB)
    cache = make_cache(tmp_path, store)
    assert cache.whole(key) == body
    path = next((tmp_path / "packs").iterdir())
    path.write_bytes(b"torn")
    assert cache.whole(key) == body
    store.objects[key] = b"not that"
    path.unlink()
    with pytest.raises(StoreUnavailable):
        cache.whole(key)


def test_a_link_in_the_cache_is_not_followed(tmp_path: Path) -> None:
    # The folder belongs to the exports' user; the worker that writes there may be root.
    store = MemoryStore()
    key, body = add_object(store, MiB)
    cache = make_cache(tmp_path, store)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "packs" / key.replace("/", "-")).symlink_to(victim)
    cache.put(key, body)
    assert victim.read_text() == "precious"
