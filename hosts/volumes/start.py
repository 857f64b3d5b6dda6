"""What a guest reads first after it starts, learned at one start and fetched ahead at the next.

    start blocks   8 bytes of magic and version, then a zstd frame of 4-byte differences
                   between the block numbers, in the order of their first read

A recording is made by an export process, kept with a generation, and given to another export
process: none of them trusts it.
"""

import logging
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from common.errors import Refused, Unavailable
from common.units import KiB, MiB
from hosts.volumes.blocks import BLOCK_BYTES, compress, decompress
from hosts.volumes.errors import Corrupt
from hosts.volumes.reader import PackRange, VolumeReader

log = logging.getLogger(__name__)

RECORD_S = 30
"""How long after its first read a guest counts as starting."""

MAX_BLOCKS = 65_536
MAX_BYTES = 300 * KiB
"""Of an encoded recording."""

AHEAD_BYTES = 256 * MiB
"""The most that is fetched ahead, as stored."""

AHEAD_THREADS = 3
"""Beside the export's own: most of the line is left to who waits."""

BUSY_READS = 4
"""While so many reads wait, nothing more is begun ahead of them."""

_MAGIC = b"SKSTART\1"
_NUMBER_BYTES = 4


def encode_start(numbers: Sequence[int]) -> bytes:
    """Write down block numbers in their order."""
    differences = array("I", bytes(_NUMBER_BYTES * len(numbers)))
    before = 0
    for place, number in enumerate(numbers):
        differences[place] = (number - before) & 0xFFFF_FFFF
        before = number
    if sys.byteorder == "big":
        differences.byteswap()
    return _MAGIC + compress(differences.tobytes())


def decode_start(body: bytes) -> list[int]:
    """Read block numbers, trusting nothing.

    Raises:
        Corrupt: it is no recording, or one of more than may be.
    """
    if len(body) > MAX_BYTES or body[: len(_MAGIC)] != _MAGIC:
        raise Corrupt("Not a recording of a start.")
    raw = decompress(body[len(_MAGIC) :], MAX_BLOCKS * _NUMBER_BYTES)
    if len(raw) % _NUMBER_BYTES:
        raise Corrupt("A recording of a start ends in the middle of a number.")
    differences = array("I", raw)
    if sys.byteorder == "big":
        differences.byteswap()
    numbers, number = [], 0
    for difference in differences:
        number = (number + difference) & 0xFFFF_FFFF
        numbers.append(number)
    return numbers


class StartRecorder:
    """Notes which blocks are read in the first seconds, and writes them down once."""

    def __init__(self, path: Path, *, record_s: float = RECORD_S) -> None:
        """Record into `path`, unless it is there: then this is no start."""
        self._path = path
        self._record_s = record_s
        self._lock = threading.Lock()
        self._numbers: dict[int, None] = {}
        self._is_over = path.exists()
        self._timer: threading.Timer | None = None

    def note(self, offset: int, length: int) -> None:
        """Note a read of the device."""
        if self._is_over or not length:
            return
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(self._record_s, self.finish)
                self._timer.daemon = True
                self._timer.start()
            for number in range(first, last + 1):
                if len(self._numbers) == MAX_BLOCKS:
                    break
                self._numbers.setdefault(number)

    def finish(self) -> None:
        """Write down what was read until now; later reads are not noted."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            body = encode_start(list(self._numbers))
            self._numbers.clear()
        new = self._path.with_suffix(".new")
        try:
            new.write_bytes(body)
            new.replace(self._path)
        except OSError as error:
            log.warning("a start could not be written down: %s", error.strerror)


class Demand:
    """Counts the reads that somebody waits for."""

    def __init__(self) -> None:
        self._waiting = 0
        self._changed = threading.Condition()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count one for as long as the block lasts."""
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def let_pass(self, timeout_s: float = 1.0) -> None:
        """Wait while many wait, for a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting < BUSY_READS, timeout_s)


def fetch_ahead(body: bytes, reader: VolumeReader, demand: Demand) -> None:
    """Bring what a recording names into the cache, in its order, and return.

    Nothing that goes wrong matters: whoever needs a block fetches it.
    """
    started = time.monotonic()
    fetched = 0
    try:
        numbers = [n for n in decode_start(body) if n * BLOCK_BYTES < reader.size_bytes]
        with ThreadPoolExecutor(AHEAD_THREADS, thread_name_prefix="ahead") as pool:
            wanted = _bounded(reader.pack_ranges(numbers), AHEAD_BYTES)
            for length in pool.map(_fetcher(reader, demand), wanted):
                fetched += length
    except (Refused, Unavailable, OSError) as error:
        log.warning("not all of a start was fetched ahead: %s", error)
    log.info("%d bytes ahead in %.1f s", fetched, time.monotonic() - started)


def _fetcher(reader: VolumeReader, demand: Demand) -> Callable[[PackRange], int]:
    def fetch(wanted: PackRange) -> int:
        demand.let_pass()
        reader.fetch(wanted)
        return wanted.length

    return fetch


def _bounded(ranges: Sequence[PackRange], limit_bytes: int) -> list[PackRange]:
    chosen, total = [], 0
    for one in ranges:
        total += one.length
        if total > limit_bytes:
            break
        chosen.append(one)
    return chosen
