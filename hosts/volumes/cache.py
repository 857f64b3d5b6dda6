"""The host's bounded cache of objects, shared by all its disks.

One sparse file for each object; which ranges are present is what the file system says
(SEEK_DATA, SEEK_HOLE), so there is no bookkeeping that a crash could tear. Nothing here is
trusted: whoever reads checks hashes, and asks again with `fresh=True` when they differ.

    cache/packs/packs-<volume>-<epoch>-<hash>    data of the object, holes where not fetched
    cache/usage                                  bytes allocated, under its own flock

Several processes use one cache: every export, and the worker that uploads. Space is
reserved in `usage` before a write, so that the budget holds at every instant; what is
counted twice (two processes fetching the same range) is put right when files are evicted.
"""

import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Self

from common.units import KiB, MiB
from hosts.volumes.errors import StoreUnavailable
from hosts.volumes.naming import is_object, parse_key
from hosts.volumes.objects import ObjectReader

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * KiB
"""The least that a miss fetches: below it, a request costs more than its bytes."""

MAX_WINDOW_BYTES = 4 * MiB
"""The most that a sequential reader's miss fetches at once."""

PAGE_BYTES = 4 * KiB
"""What the file system allocates in."""

PATIENCE_S = 3600
"""How long a reader waits for a store that is gone before its guest sees an error."""

BACK_OFF_S = (0.1, 0.2, 0.5, 1, 2, 5)
KEEP_SHARE = 0.9
"""Eviction goes down to this share of the budget, so that it is not done for every miss."""

TOUCH_S = 10
"""How exact the order of use is. Coarser than this, and a hot pack could be evicted."""

OPEN_FILES = 64

_CAREFUL = os.O_CLOEXEC | os.O_NOFOLLOW
"""The folder is the exports' own, and the worker that also writes there may be root."""

_WRITE = os.O_WRONLY | os.O_CREAT | _CAREFUL


class ObjectCache:
    """Reads objects through the cache. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        *,
        budget_bytes: int,
        reader: ObjectReader,
        on_fetch: Callable[[int], None] | None = None,
        on_wait: Callable[[int], None] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Use the cache in `directory`, which holds `packs/` and `usage`.

        Args:
            on_fetch: told the size in bytes of every successful request to the store.
            on_wait: told 1 when somebody begins to wait for the store, -1 when that ends.
            patience_s: how long a failing store is asked again; 0 asks once.
        """
        self._packs = directory / "packs"
        self._usage = directory / "usage"
        self._budget_bytes = budget_bytes
        self._reader = reader
        self._on_fetch = on_fetch
        self._on_wait = on_wait
        self._patience_s = patience_s
        self._lock = threading.Condition()
        self._in_flight: dict[str, list[tuple[int, int]]] = {}
        self._streams: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._files: OrderedDict[str, _CacheFile] = OrderedDict()
        self._packs.mkdir(parents=True, exist_ok=True)

    def counted(self, on_fetch: Callable[[int], None]) -> Self:
        """Return the same cache for somebody whose requests are told to `on_fetch`."""
        same = copy(self)
        same._on_fetch = on_fetch  # noqa: SLF001 - of its own kind
        return same

    def read(
        self, key: str, offset: int, length: int, object_bytes: int, *, fresh: bool = False
    ) -> bytes:
        """Read a range of an object of known size; fetch what is not here.

        Args:
            fresh: fetch even what seems present, and replace it. For a reader that found
                a wrong hash.

        Raises:
            StoreUnavailable, ObjectMissing: of the store, once patience has run out.
        """
        name = _file_name(key)
        while not fresh:
            data = self._present(name, offset, length)
            if data is not None:
                return data
            if not self._wait_for_flight(name, offset, offset + length):
                break
        start, end = self._window(name, offset, offset + length, object_bytes)
        with self._flight(name, start, end):
            body = self._fetch(key, start, end - start)
            self._keep(name, start, body)
        return body[offset - start : offset - start + length]

    def whole(self, key: str) -> bytes:
        """Read a whole object, checked against its own name."""
        kind, name = parse_key(key)
        with suppress(FileNotFoundError):
            body = (self._packs / _file_name(key)).read_bytes()
            if is_object(kind, name.digest, body):
                return body
        body = self._fetch(key, 0, None)
        if not is_object(kind, name.digest, body):
            raise StoreUnavailable(f"{key} is not what its name says.")
        self.put(key, body)
        return body

    def put(self, key: str, body: bytes) -> None:
        """Keep an object that was just uploaded."""
        self._keep(_file_name(key), 0, body)

    # -- what is here -------------------------------------------------------------------

    def _present(self, name: str, offset: int, length: int) -> bytes | None:
        file = self._open(name)
        if file is None:
            return None
        data = file.read_present(offset, length)
        if data is None and file.is_stale():
            self._close(name, file)
        return data

    def _open(self, name: str) -> "_CacheFile | None":
        with self._lock:
            file = self._files.get(name)
            if file is not None:
                self._files.move_to_end(name)
                return file
        try:
            opened = _CacheFile(self._packs / name)
        except FileNotFoundError:
            return None
        with self._lock:
            file = self._files.setdefault(name, opened)
            while len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return file

    def _close(self, name: str, file: "_CacheFile") -> None:
        with self._lock:
            if self._files.get(name) is file:
                del self._files[name]

    # -- one fetch per range ------------------------------------------------------------

    def _wait_for_flight(self, name: str, start: int, end: int) -> bool:
        """Wait while someone fetches part of a range; False when nobody did."""
        with self._lock:
            waited = False
            while any(s < end and start < e for s, e in self._in_flight.get(name, ())):
                waited = True
                self._lock.wait()
            return waited

    @contextmanager
    def _flight(self, name: str, start: int, end: int) -> Iterator[None]:
        with self._lock:
            self._in_flight.setdefault(name, []).append((start, end))
        try:
            yield
        finally:
            with self._lock:
                flights = self._in_flight[name]
                flights.remove((start, end))
                if not flights:
                    del self._in_flight[name]
                self._lock.notify_all()

    def _window(self, name: str, start: int, end: int, object_bytes: int) -> tuple[int, int]:
        """Choose what to fetch: whole chunks, more of them while reads go on in order."""
        low = start // CHUNK_BYTES * CHUNK_BYTES
        with self._lock:
            follows, window = self._streams.get(name, (0, self._inherited_window()))
            window = min(2 * window, MAX_WINDOW_BYTES) if low == follows else CHUNK_BYTES
            high = max(low + window, -(-end // CHUNK_BYTES) * CHUNK_BYTES)
            self._streams[name] = (high, window)
            self._streams.move_to_end(name)
            while len(self._streams) > OPEN_FILES:
                self._streams.popitem(last=False)
        return low, min(high, object_bytes)

    def _inherited_window(self) -> int:
        # A stream goes on at the start of the next pack: keep the pace it had in the last.
        if not self._streams:
            return CHUNK_BYTES // 2
        return next(reversed(self._streams.values()))[1]

    def _fetch(self, key: str, start: int, length: int | None) -> bytes:
        if self._on_wait is None:
            return self._ask(key, start, length)
        self._on_wait(1)
        try:
            return self._ask(key, start, length)
        finally:
            self._on_wait(-1)

    def _ask(self, key: str, start: int, length: int | None) -> bytes:
        """Get from the store, for as long as patience lasts; a failure is never kept."""
        deadline = time.monotonic() + self._patience_s
        attempt = 0
        while True:
            try:
                body = self._reader.get(key, start, length)
            except StoreUnavailable as error:
                pause_s = BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)]
                if time.monotonic() + pause_s > deadline:
                    raise
                log.warning("asking again for %s in %s s: %s", key, pause_s, error)
                attempt += 1
                time.sleep(pause_s)
                continue
            if self._on_fetch is not None:
                self._on_fetch(len(body))
            return body

    # -- keeping, within the budget -----------------------------------------------------

    def _keep(self, name: str, offset: int, body: bytes) -> None:
        """Write a range; a full disk or budget only means that it is fetched again."""
        try:
            if not self._reserve(_pages(len(body))):
                return
            # Opened anew: a file that was evicted meanwhile must not take more space.
            fd = os.open(self._packs / name, _WRITE, 0o600)
            try:
                _give_to_owner(fd, self._packs)
                _write_all(fd, body, offset)
            finally:
                os.close(fd)
        except OSError as error:
            log.warning("could not cache %s: %s", name, error.strerror)

    def _reserve(self, more_bytes: int) -> bool:
        with self._locked_usage() as fd:
            used = _read_number(fd)
            if used is None or used + more_bytes > self._budget_bytes:
                used = self._evict(self._budget_bytes - more_bytes)
            fits = used + more_bytes <= self._budget_bytes
            _write_number(fd, used + more_bytes if fits else used)
            return fits

    @contextmanager
    def _locked_usage(self) -> Iterator[int]:
        fd = os.open(self._usage, os.O_RDWR | os.O_CREAT | _CAREFUL, 0o600)
        try:
            _give_to_owner(fd, self._packs)
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _evict(self, room_bytes: int) -> int:
        """Delete least recently used files until the rest fits; count what is left."""
        files = []
        with os.scandir(self._packs) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    files.append((status.st_mtime_ns, status.st_blocks * 512, entry.path))
        used = sum(allocated for _, allocated, _ in files)
        target = min(room_bytes, int(self._budget_bytes * KEEP_SHARE))
        for _, allocated, path in sorted(files):
            if used <= target:
                break
            _delete(path)
            used -= allocated
        return used


class _CacheFile:
    """An open cache file. It is closed when the last user lets go of it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | _CAREFUL)
        self._touched_at = 0.0

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def read_present(self, offset: int, length: int) -> bytes | None:
        """Read a range if all of it is data."""
        try:
            if os.lseek(self._fd, offset, os.SEEK_DATA) != offset:
                return None
            if os.lseek(self._fd, offset, os.SEEK_HOLE) < offset + length:
                return None
        except OSError:  # ENXIO: no data from here to the end
            return None
        data = os.pread(self._fd, length, offset)
        self._touch()
        return data if len(data) == length else None

    def is_stale(self) -> bool:
        """Tell whether the file was evicted."""
        return os.fstat(self._fd).st_nlink == 0

    def _touch(self) -> None:
        now = time.monotonic()
        if now - self._touched_at > TOUCH_S:
            self._touched_at = now
            # Fails for a file of another user; then its age is that of its last fetch.
            with suppress(PermissionError):
                os.utime(self._fd)


def _file_name(key: str) -> str:
    parse_key(key)  # nothing but a key of ours may become a path
    return key.replace("/", "-")


def _pages(length: int) -> int:
    # An unaligned range may touch one page more at either end.
    return (-(-length // PAGE_BYTES) + 1) * PAGE_BYTES


def _write_all(fd: int, body: bytes, offset: int) -> None:
    view = memoryview(body)
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]


def _delete(path: str) -> None:
    """Delete a cache file. It is cut first: others may hold it open."""
    with suppress(OSError):
        fd = os.open(path, os.O_WRONLY | _CAREFUL)
        try:
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
    Path(path).unlink(missing_ok=True)


def _read_number(fd: int) -> int | None:
    raw = os.pread(fd, 8, 0)
    return int.from_bytes(raw, "little") if len(raw) == 8 else None  # noqa: PLR2004


def _write_number(fd: int, number: int) -> None:
    os.pwrite(fd, number.to_bytes(8, "little"), 0)


def _give_to_owner(fd: int, directory: Path) -> None:
    """Let the exports' user own what root writes into their cache."""
    if os.geteuid() == 0:
        owner = directory.stat()
        os.fchown(fd, owner.st_uid, owner.st_gid)
