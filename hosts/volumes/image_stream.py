"""A generation as one qcow2 file for whoever connects: sent once, then this process ends.

    python -m hosts.volumes.image_stream <socket>     its configuration comes on stdin

First comes a line, `<length of the file>`, then the file. It is read from the object store
in order, a few pieces ahead, past the host's cache, which a whole disk would empty. Memory
is bounded, whatever the size of the disk and however slow the receiver.
"""

import json
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from common.units import KiB, MiB
from hosts.volumes.blocks import decode_block
from hosts.volumes.errors import Corrupt, StoreUnavailable
from hosts.volumes.index import LEAF_BLOCKS, Entry, Leaf, LeafRef, Root
from hosts.volumes.keys import Keyring, keys_from_hex
from hosts.volumes.naming import content_digest, parse_key
from hosts.volumes.objects import ObjectReader, StoreConfig
from hosts.volumes.qcow2 import L2_SPAN_BLOCKS
from hosts.volumes.qcow2_writer import ImagePlan, l2_table
from hosts.volumes.store import S3ObjectStore

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 60
STALL_TIMEOUT_S = 600
"""A receiver that takes nothing for this long has gone."""

PATIENCE_S = 300
"""How long the store may be gone while somebody waits for the file."""

RUN_BYTES = 2 * MiB
NEAR_BYTES = 128 * KiB
AHEAD = 4
"""Pieces on their way at once, each of at most `RUN_BYTES`."""

_TABLE_LEAVES = L2_SPAN_BLOCKS // LEAF_BLOCKS


@dataclass(frozen=True)
class StreamConfig:
    """What the process is told; holds keys, so it is never written to a file."""

    store: StoreConfig
    root_key: str
    keys: dict[str, str | None]

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "StreamConfig":
        values = json.loads(text)
        return cls(
            store=StoreConfig(**values["store"]),
            root_key=values["root_key"],
            keys=values["keys"],
        )


class ImageStream:
    """One generation, as the pieces of a file."""

    def __init__(self, root: Root, store: ObjectReader, keyring: Keyring) -> None:
        self._root = root
        self._store = store
        self._keyring = keyring
        self.plan = ImagePlan(root.size_bytes, dict(self._counts()))

    def _counts(self) -> Iterator[tuple[int, int]]:
        for table in sorted({number // _TABLE_LEAVES for number in self._root.leaves}):
            count = sum(1 for _ in self._entries(table))
            if count:
                yield table, count

    def pieces(self) -> Iterator[bytes]:
        """Give the file from front to back.

        Raises:
            Corrupt, ObjectMissing: the store has lost or changed something.
            StoreUnavailable: it was gone for too long.
        """
        yield from self.plan.head()
        with ThreadPoolExecutor(AHEAD) as pool:
            for table, at_cluster in self.plan.tables():
                entries = list(self._entries(table))
                yield l2_table((number for number, _ in entries), at_cluster=at_cluster)
                yield from self._data(entries, pool)

    def _entries(self, table: int) -> Iterator[tuple[int, Entry]]:
        """List the blocks that an L2 table maps, with where they are stored."""
        for number in range(table * _TABLE_LEAVES, (table + 1) * _TABLE_LEAVES):
            ref = self._root.leaves.get(number)
            if ref is None:
                continue
            for slot, entry in self._leaf(ref).entries():
                yield number * LEAF_BLOCKS + slot, entry

    def _leaf(self, ref: LeafRef) -> Leaf:
        key = ref.object.key("leaves")
        body = patiently(lambda: self._store.get(key, ref.offset, ref.length))
        if content_digest(body) != ref.digest:
            raise Corrupt(f"A leaf in {key} is not what its hash says.")
        return Leaf.decode(self._keyring.open("leaves", ref.object.volume, body))

    def _data(
        self, entries: list[tuple[int, Entry]], pool: ThreadPoolExecutor
    ) -> Iterator[bytes]:
        started: deque[Future[bytes]] = deque()
        for run in runs_of(entry for _, entry in entries):
            started.append(pool.submit(self._read_run, run))
            if len(started) == AHEAD:
                yield started.popleft().result()
        while started:
            yield started.popleft().result()

    def _read_run(self, run: list[Entry]) -> bytes:
        start = min(entry.offset for entry in run)
        end = max(entry.offset + entry.length for entry in run)
        key = run[0].pack.key("packs")
        stored = patiently(lambda: self._store.get(key, start, end - start))
        sealer = self._keyring.sealer(run[0].pack.volume)
        return b"".join(
            decode_block(
                stored[entry.offset - start : entry.offset - start + entry.length],
                entry.digest,
                sealer,
            )
            for entry in run
        )


def runs_of(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Divide blocks, in their order, into what lies near each other in one pack."""
    run: list[Entry] = []
    start = end = 0
    for entry in entries:
        new_start = min(start, entry.offset)
        new_end = max(end, entry.offset + entry.length)
        is_near = (
            bool(run)
            and entry.pack == run[0].pack
            and start - NEAR_BYTES <= entry.offset <= end + NEAR_BYTES
            and new_end - new_start <= RUN_BYTES
            and len(run) < RUN_BYTES // (64 * KiB)
        )
        if is_near:
            run.append(entry)
            start, end = new_start, new_end
            continue
        if run:
            yield run
        run, start, end = [entry], entry.offset, entry.offset + entry.length
    if run:
        yield run


def patiently(read: Callable[[], T], *, patience_s: float = PATIENCE_S) -> T:
    """Read from the store, again and again while it is away."""
    give_up_at = time.monotonic() + patience_s
    pause_s = 0.5
    while True:
        try:
            return read()
        except StoreUnavailable:
            if time.monotonic() + pause_s > give_up_at:
                raise
        time.sleep(pause_s)
        pause_s = min(10.0, 2 * pause_s)


def open_stream(root_key: str, store: ObjectReader, keyring: Keyring) -> ImageStream:
    """Read a generation's root, and where all of its blocks are counted.

    Raises:
        Corrupt, ObjectMissing, StoreUnavailable: it cannot be read.
    """
    kind, name = parse_key(root_key)
    body = patiently(lambda: store.get(root_key))
    if kind != "roots" or content_digest(body) != name.digest:
        raise Corrupt(f"{root_key} is not what its name says.")
    root = Root.decode(keyring.open("roots", name.volume, body))
    keyring.learn(root.volumes())
    return ImageStream(root, store, keyring)


def serve(path: Path, config: StreamConfig) -> None:
    """Send the file to the first that connects."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(CONNECT_TIMEOUT_S)
        listener.bind(str(path))
        try:
            listener.listen(1)
            connection, _ = listener.accept()
        finally:
            path.unlink(missing_ok=True)
    with connection:
        connection.settimeout(STALL_TIMEOUT_S)
        keyring = Keyring(keys_from_hex(config.keys))
        stream = open_stream(config.root_key, S3ObjectStore(config.store), keyring)
        connection.sendall(b"%d\n" % stream.plan.file_bytes)
        for piece in stream.pieces():
            connection.sendall(piece)


def main() -> None:
    """Be the process of one export."""
    logging.basicConfig(level=logging.INFO)
    os.umask(0o077)
    config = StreamConfig.parse(sys.stdin.read())
    try:
        serve(Path(sys.argv[1]), config)
    except (TimeoutError, ConnectionError) as error:
        log.info("nobody took the image to its end: %s", error)


if __name__ == "__main__":
    main()
