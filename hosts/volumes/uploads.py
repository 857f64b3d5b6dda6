"""Objects on their way to the store, several at once, in bounded memory.

A commit that is prepared while the one before it is still on its way shares that one's room,
so that both together hold no more than one alone, and waits at a gate: nothing of it is put
before what it is based on has been published.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore, Event

from hosts.volumes.cache import ObjectCache
from hosts.volumes.errors import StoreUnavailable
from hosts.volumes.objects import ObjectStore

UPLOADS = 8
"""Packs on their way at once: one stream fills no link to an object store."""


class Room:
    """Bounds the packs that are in memory to be put."""

    def __init__(self, packs: int = UPLOADS) -> None:
        self._free = BoundedSemaphore(packs)

    def take(self) -> None:
        self._free.acquire()

    def give_back(self) -> None:
        self._free.release()


class Gate:
    """Holds uploads back until they may begin, or until it is known that they never may."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._decided = Event()
        self._is_open = is_open
        if is_open:
            self._decided.set()

    def open(self) -> None:
        """Let all through."""
        self._is_open = True
        self._decided.set()

    def shut(self) -> None:
        """Turn back all who wait, and who come later; too late for whom was let through."""
        self._decided.set()

    def pass_through(self) -> None:
        """Wait until it is decided.

        Raises:
            StoreUnavailable: nothing is to be put.
        """
        self._decided.wait()
        if not self._is_open:
            raise StoreUnavailable("What this is based on was not stored.")


class Uploads:
    """Puts the objects of one commit."""

    def __init__(
        self, store: ObjectStore, cache: ObjectCache | None, *, room: Room, gate: Gate
    ) -> None:
        self._store = store
        self._cache = cache
        self._pool = ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload")
        self._room = room
        self._gate = gate
        self._failed = Event()
        self._started: list[Future[None]] = []

    def start(self, key: str, body: bytes) -> None:
        """Put an object in the background, once there is room.

        Raises:
            StoreUnavailable: an earlier one failed, so there is no use in going on.
        """
        self._room.take()
        if self._failed.is_set():
            self._room.give_back()
            self.wait()
        self._started = [one for one in self._started if not one.done() or one.exception()]
        self._started.append(self._pool.submit(self._put_and_give_back, key, body))

    def _put_and_give_back(self, key: str, body: bytes) -> None:
        try:
            if not self._failed.is_set():
                self.put(key, body)
        except BaseException:
            self._failed.set()
            raise
        finally:
            self._room.give_back()

    def put(self, key: str, body: bytes) -> None:
        """Put an object now."""
        self._gate.pass_through()
        self._store.put_new(key, body)
        if self._cache is not None:
            self._cache.put(key, body)

    def under_way(self) -> int:
        """Count what was started and has not ended."""
        return sum(not one.done() for one in self._started)

    def wait(self) -> None:
        """Wait for all that was started.

        Raises:
            StoreUnavailable: one of them failed.
        """
        for upload in self._started:
            upload.result()
        self._started = []
        if self._failed.is_set():
            raise StoreUnavailable("An upload failed.")

    def close(self) -> None:
        """End; what waits at the gate is turned back, what is being put is waited for."""
        self._failed.set()
        self._gate.shut()
        self._pool.shutdown(wait=True)
