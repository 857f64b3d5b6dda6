"""A generation as one qcow2 file: QEMU's own tools are the judge."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from common.units import GiB, KiB, MiB, TiB
from hosts.volumes import image_stream
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.commit import import_image
from hosts.volumes.errors import Corrupt, StoreUnavailable
from hosts.volumes.image_stream import StreamConfig, open_stream, patiently, runs_of
from hosts.volumes.index import Entry
from hosts.volumes.keys import Keyring
from hosts.volumes.naming import ObjectName
from hosts.volumes.objects import ObjectStore, StoreConfig
from hosts.volumes.qcow2_writer import ImagePlan
from hosts.volumes.store import S3ObjectStore
from tests.hosts.volumes.given_keys import KeyForEach
from tests.hosts.volumes.memory_store import MemoryStore

KEYRING = Keyring(KeyForEach())


def raw_image(path: Path, size_bytes: int, places: list[int], *, seed: int = 1) -> Path:
    """Write a sparse image with a block of random data at each place, in blocks."""
    chance = random.Random(seed)
    with path.open("wb") as file:
        file.truncate(size_bytes)
        for place in places:
            file.seek(place * BLOCK_BYTES)
            file.write(chance.randbytes(BLOCK_BYTES))
    return path


def stored(image: Path, store: ObjectStore, size_bytes: int) -> str:
    return import_image(
        image, volume_id=uuid4(), store=store, size_bytes=size_bytes, keyring=KEYRING
    ).root_key


def qemu_img(*arguments: object) -> str:
    done = subprocess.run(
        ["qemu-img", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("size_bytes", "places"),
    [
        (GiB, []),
        (GiB, [0]),
        (GiB, [GiB // BLOCK_BYTES - 1]),
        (BLOCK_BYTES, [0]),
        (GiB + BLOCK_BYTES, [0, 1, 2, 4095, 4096, 8191, 8192, 16383, 16384]),
        (64 * GiB, [*range(100), 8192 * 3, 8192 * 50 + 4097, 8192 * 127 + 5]),
        (2 * GiB, sorted(random.Random(3).sample(range(2 * GiB // BLOCK_BYTES), 700))),
    ],
)
def test_the_file_stands_alone_and_holds_what_the_disk_does(
    tmp_path: Path, size_bytes: int, places: list[int]
) -> None:
    store = MemoryStore()
    raw = raw_image(tmp_path / "raw", size_bytes, places)
    stream = open_stream(stored(raw, store, size_bytes), store, KEYRING)
    image = tmp_path / "image.qcow2"

    with image.open("wb") as file:
        for piece in stream.pieces():
            file.write(piece)

    assert image.stat().st_size == stream.plan.file_bytes
    qemu_img("check", "-f", "qcow2", image)
    qemu_img("compare", "-f", "raw", "-F", "qcow2", raw, image)
    facts = json.loads(qemu_img("info", "--output=json", "-f", "qcow2", image))
    assert facts["virtual-size"] == size_bytes
    assert "backing-filename" not in facts
    assert image.stat().st_size < (len(places) + 140) * BLOCK_BYTES


def test_a_device_of_64_tib_has_places_for_all(tmp_path: Path) -> None:
    """As large as devices get, and full: more refcount blocks than one table lists."""
    tables = 64 * TiB // (8192 * BLOCK_BYTES)
    plan = ImagePlan(64 * TiB, dict.fromkeys(range(tables), 8192))

    head = sum(len(piece) for piece in plan.head())

    first = next(plan.tables())[1]
    assert head == first * BLOCK_BYTES
    assert plan.file_bytes > 64 * TiB
    table, blocks = plan._refcounts
    assert blocks * 32_768 >= plan.clusters
    assert table * 8_192 >= blocks > 8_192


def test_a_huge_sparse_device_costs_next_to_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    raw = raw_image(tmp_path / "raw", GiB, [5])
    stream = open_stream(stored(raw, store, 16 * TiB), store, KEYRING)
    image = tmp_path / "image.qcow2"
    image.write_bytes(b"".join(stream.pieces()))

    qemu_img("check", "-f", "qcow2", image)
    facts = json.loads(qemu_img("info", "--output=json", "-f", "qcow2", image))
    assert facts["virtual-size"] == 16 * TiB
    assert image.stat().st_size < MiB


def test_what_the_store_changed_is_never_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    raw = raw_image(tmp_path / "raw", GiB, [5])
    root_key = stored(raw, store, GiB)
    [pack] = [key for key in store.objects if key.startswith("packs/")]
    body = bytearray(store.objects[pack])
    body[len(body) // 2] ^= 1
    store.objects[pack] = bytes(body)

    with pytest.raises(Corrupt):
        list(open_stream(root_key, store, KEYRING).pieces())


def test_a_store_that_comes_back_is_waited_for() -> None:
    answers: Iterator[Exception | bytes] = iter([StoreUnavailable("away"), b"there"])

    def read() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert patiently(read) == b"there"
    with pytest.raises(StoreUnavailable):
        patiently(lambda: (_ for _ in ()).throw(StoreUnavailable("away")), patience_s=0)


def test_runs_keep_to_a_pack_and_to_a_length() -> None:
    packs = [ObjectName(bytes(16), 1, bytes([number]) * 16) for number in range(2)]

    def entry(pack: int, offset: int) -> Entry:
        return Entry(packs[pack], offset, 1000, bytes(16))

    entries = [entry(0, 8), entry(0, 1008), entry(1, 2008), entry(1, 8), entry(1, 900 * KiB)]

    runs = list(runs_of(entries))

    assert [len(run) for run in runs] == [2, 2, 1]
    assert [one for run in runs for one in run] == entries
    many = list(runs_of(entry(0, 1000 * number) for number in range(100)))
    assert max(len(run) for run in many) == 32


# -- the process --------------------------------------------------------------------------


def start(socket_path: Path, config: StreamConfig) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "hosts.volumes.image_stream", str(socket_path)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    process.stdin.write(config.text())
    process.stdin.close()
    until = time.monotonic() + 30
    while not socket_path.exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


def test_the_process_sends_it_once_and_ends(tmp_path: Path, s3: StoreConfig) -> None:
    store = S3ObjectStore(s3)
    raw = raw_image(tmp_path / "raw", GiB, list(range(200)))
    root_key = stored(raw, store, GiB)
    keyring = Keyring(KeyForEach())
    open_stream(root_key, store, keyring)
    config = StreamConfig(s3, root_key, keyring.in_hex())
    socket_path = tmp_path / "x.sock"

    with start(socket_path, config) as process, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(socket_path))
        with client.makefile("rb") as stream:
            length = int(stream.readline())
            image = tmp_path / "image.qcow2"
            image.write_bytes(stream.read())
        assert process.wait(30) == 0

    assert image.stat().st_size == length
    assert not socket_path.exists()
    qemu_img("compare", "-f", "raw", "-F", "qcow2", raw, image)


def test_one_that_nobody_wants_ends_by_itself(
    tmp_path: Path, s3: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_stream, "CONNECT_TIMEOUT_S", 0.1)

    with pytest.raises(TimeoutError):
        image_stream.serve(tmp_path / "x.sock", StreamConfig(s3, "", {}))

    assert not (tmp_path / "x.sock").exists()


def test_a_receiver_that_leaves_ends_it(tmp_path: Path, s3: StoreConfig) -> None:
    store = S3ObjectStore(s3)
    root_key = stored(raw_image(tmp_path / "raw", GiB, list(range(400))), store, GiB)
    keyring = Keyring(KeyForEach())
    open_stream(root_key, store, keyring)
    path = tmp_path / "x.sock"
    failures: list[type[BaseException]] = []

    def serve() -> None:
        try:
            image_stream.serve(path, StreamConfig(s3, root_key, keyring.in_hex()))
        except ConnectionError as error:
            failures.append(type(error))

    thread = threading.Thread(target=serve)
    thread.start()
    until = time.monotonic() + 10
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.recv(10)
    thread.join(30)

    assert not thread.is_alive()
    assert len(failures) == 1
