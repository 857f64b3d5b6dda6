"""What an export process is told, and how it opens generations.

Imported by the nbdkit plugin, so it keeps away from boto3.
"""

import json
import mmap
import os
import struct
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

from hosts.volumes.cache import ObjectCache
from hosts.volumes.errors import Corrupt
from hosts.volumes.index import Root
from hosts.volumes.keys import Keyring, keys_from_hex
from hosts.volumes.naming import content_digest, parse_key
from hosts.volumes.objects import StoreConfig
from hosts.volumes.reader import ReaderMemory, VolumeReader
from hosts.volumes.s3_reader import S3Reader
from hosts.volumes.start import Demand, StartRecorder, fetch_ahead


@dataclass(frozen=True)
class ExportConfig:
    """The content of an export's configuration file."""

    LOG_FORMAT: ClassVar[str] = "%(asctime)s %(levelname)s %(message)s"

    roots: str
    """The folder of `root_file`s, so that opening a root asks the store for nothing."""
    cache: str
    cache_budget_bytes: int
    fetched: str
    start: str
    """Where it is written down what is read first; see `start`."""
    ahead: str
    """What was read first at an earlier start, if the file is there."""
    start_s: float
    log: str
    store: StoreConfig
    keys: dict[str, str | None] = field(default_factory=dict, repr=False)
    """In hex, of every volume that the generations name; see `keys.Keyring.in_hex`."""

    @classmethod
    def read(cls, path: Path) -> Self:
        values = json.loads(path.read_text())
        return cls(**values | {"store": StoreConfig(**values["store"])})

    def text(self) -> str:
        return json.dumps(asdict(self))


class Exports:
    """The generations that one process serves; they share its cache and memory."""

    def __init__(self, config: ExportConfig) -> None:
        self._roots = Path(config.roots)
        self._start = StartRecorder(Path(config.start), record_s=config.start_s)
        self._ahead = Path(config.ahead)
        self._demand = Demand()
        counter = FetchCounter(Path(config.fetched))
        cache = ObjectCache(
            Path(config.cache),
            budget_bytes=config.cache_budget_bytes,
            reader=S3Reader(config.store),
            on_fetch=counter.add,
            on_wait=counter.wait,
        )
        self._memory = ReaderMemory(cache)
        self._keyring = Keyring(keys_from_hex(config.keys))

    def open(self, root_key: str) -> VolumeReader:
        """Open the generation with this root.

        Raises:
            Corrupt: its file is not what the key says.
        """
        name = parse_key(root_key)[1]
        body = root_file(self._roots, root_key).read_bytes()
        if content_digest(body) != name.digest:
            raise Corrupt("The root of an export is not what its key says.")
        root = Root.decode(self._keyring.open("roots", name.volume, body))
        reader = VolumeReader(root, self._memory, self._keyring)
        self._begin_ahead(reader)
        return reader

    def read_into(self, reader: VolumeReader, buffer: bytearray, offset: int) -> None:
        """Read for a guest, see `VolumeReader.read_into`."""
        self._start.note(offset, len(buffer))
        with self._demand.waiting():
            reader.read_into(buffer, offset)

    def _begin_ahead(self, reader: VolumeReader) -> None:
        """Fetch the start ahead, in a thread: once, for the first that opens a generation."""
        try:
            body = self._ahead.read_bytes()
            self._ahead.unlink()
        except FileNotFoundError:
            return
        work = threading.Thread(
            target=fetch_ahead, args=(body, reader, self._demand), name="ahead", daemon=True
        )
        work.start()


def root_file(folder: Path, root_key: str) -> Path:
    """Say where the root of an exported generation lies."""
    parse_key(root_key)  # nothing but a key of ours may become a path
    return folder / root_key.replace("/", "-")


class Fetched(NamedTuple):
    """What a disk has asked of object storage since it was attached."""

    requests: int
    bytes: int


class FetchCounter:
    """Numbers in a file, which outlive the export that counts, and who waits just now.

    How long those have waited is counted from the last answer that any of them was given: a
    store that is slow but answers is not one that is away.
    """

    _LAYOUT = struct.Struct("<QQ")
    _WAITS = struct.Struct("<QQ")
    """How many wait, and since when: of the clock that all processes share."""

    _SIZE = _LAYOUT.size + _WAITS.size

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            if os.fstat(fd).st_size < self._SIZE:
                os.ftruncate(fd, self._SIZE)
            self._map = mmap.mmap(fd, self._SIZE)
        finally:
            os.close(fd)
        self._lock = threading.Lock()
        # Who waited in a process before this one waits no more.
        self._waiting = 0
        self._note_waits(0)

    def add(self, fetched_bytes: int) -> None:
        """Count an answer of the store."""
        with self._lock:
            requests, total = self._LAYOUT.unpack_from(self._map)
            self._LAYOUT.pack_into(self._map, 0, requests + 1, total + fetched_bytes)
            if self._waiting:
                self._note_waits(time.monotonic_ns())

    def wait(self, change: int) -> None:
        """Note that somebody begins (1) or ends (-1) to wait for the store."""
        with self._lock:
            self._waiting += change
            if change > 0 and self._waiting == 1:
                self._note_waits(time.monotonic_ns())
            elif not self._waiting:
                self._note_waits(0)

    def _note_waits(self, since_ns: int) -> None:
        self._WAITS.pack_into(self._map, self._LAYOUT.size, self._waiting, since_ns)

    def close(self) -> None:
        self._map.close()

    @classmethod
    def read(cls, path: Path) -> Fetched:
        raw = _content(path)
        if len(raw) < cls._LAYOUT.size:
            return Fetched(0, 0)
        return Fetched(*cls._LAYOUT.unpack_from(raw))

    @classmethod
    def waited_s(cls, path: Path) -> float:
        """Say how long somebody has waited in vain; 0 if nobody does."""
        raw = _content(path)
        if len(raw) < cls._SIZE:
            return 0.0
        _, since_ns = cls._WAITS.unpack_from(raw, cls._LAYOUT.size)
        return max(0.0, (time.monotonic_ns() - since_ns) / 1e9) if since_ns else 0.0


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
