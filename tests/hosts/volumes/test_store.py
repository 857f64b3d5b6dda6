"""The two S3 clients against a real server: one contract."""

import os

import pytest

from hosts.volumes.errors import ObjectMissing, StoreUnavailable
from hosts.volumes.objects import ObjectReader, StoreConfig
from hosts.volumes.s3_reader import S3Reader
from hosts.volumes.store import S3ObjectStore


@pytest.fixture
def store(s3: StoreConfig) -> S3ObjectStore:
    return S3ObjectStore(s3)


@pytest.fixture(params=[S3ObjectStore, S3Reader])
def reader(request: pytest.FixtureRequest, s3: StoreConfig) -> ObjectReader:
    made: ObjectReader = request.param(s3)
    return made


def test_an_object_is_stored_once(store: S3ObjectStore) -> None:
    assert store.put_new("packs/a", b"first") is True
    assert store.put_new("packs/a", b"second") is False
    assert store.get("packs/a") == b"first"
    assert (store.counts.puts, store.counts.gets) == (2, 1)
    assert store.counts.downloaded_bytes == 5


def test_ranges_are_exact(store: S3ObjectStore, reader: ObjectReader) -> None:
    body = os.urandom(100_000)
    store.put_new("packs/a", body)
    assert reader.get("packs/a") == body
    assert reader.get("packs/a", 10, 1) == body[10:11]
    assert reader.get("packs/a", 99_000, 1000) == body[99_000:]
    assert reader.get("packs/a", 99_000) == body[99_000:]


def test_a_range_beyond_the_end_is_never_taken_for_the_object(
    store: S3ObjectStore, reader: ObjectReader
) -> None:
    store.put_new("packs/a", b"short")
    with pytest.raises(StoreUnavailable):
        reader.get("packs/a", 2, 100)


def test_what_is_not_there_is_missing(reader: ObjectReader) -> None:
    with pytest.raises(ObjectMissing):
        reader.get("packs/none")


def test_objects_are_listed_and_deleted(store: S3ObjectStore) -> None:
    for name in ("b", "a", "c"):
        store.put_new(f"packs/{name}", name.encode() * 3)
    store.put_new("roots/r", b"r")
    assert list(store.keys("packs/")) == [("packs/a", 3), ("packs/b", 3), ("packs/c", 3)]
    store.delete(["packs/a", "packs/c", "packs/none"])
    assert [key for key, _ in store.keys("packs/")] == ["packs/b"]


@pytest.mark.parametrize("client", [S3ObjectStore, S3Reader])
def test_a_wrong_secret_is_told_without_the_secret(
    s3: StoreConfig, client: type[S3ObjectStore] | type[S3Reader]
) -> None:
    wrong = StoreConfig(s3.endpoint_url, s3.bucket, s3.access_key_id, "hunter2")
    with pytest.raises(StoreUnavailable) as caught:
        client(wrong).get("packs/a")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(wrong)


def test_no_server_is_unavailable(s3: StoreConfig) -> None:
    nowhere = StoreConfig("http://127.0.0.1:9", s3.bucket, "a", "b")
    with pytest.raises(StoreUnavailable):
        S3Reader(nowhere).get("packs/a")
