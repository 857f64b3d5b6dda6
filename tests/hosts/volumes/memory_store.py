"""An object store in memory, which can be told to fail."""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

from hosts.volumes.errors import ObjectMissing, StoreUnavailable
from hosts.volumes.objects import Listed


class MemoryStore:
    """Obeys `ObjectStore`. `fail` is asked before every request."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified_at: dict[str, datetime] = {}
        self.clock: Callable[[], datetime] = lambda: datetime.now(tz=UTC)
        self.gets: list[tuple[str, int, int | None]] = []
        self.fail: Callable[[str], bool] = lambda key: False

    def _maybe_fail(self, key: str) -> None:
        if self.fail(key):
            raise StoreUnavailable("Failing, as told.")

    def put_new(self, key: str, body: bytes) -> bool:
        self._maybe_fail(key)
        if key in self.objects:
            return False
        self.objects[key] = body
        self.modified_at[key] = self.clock()
        return True

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.gets.append((key, start, length))
        self._maybe_fail(key)
        if key not in self.objects:
            raise ObjectMissing(key)
        end = None if length is None else start + length
        body = self.objects[key][start:end]
        if length is not None and len(body) != length:
            raise StoreUnavailable("Short.")
        return body

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._maybe_fail(key)
            self.objects.pop(key, None)

    def keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        for key, body in sorted(self.objects.items()):
            if key.startswith(prefix):
                yield key, len(body)

    def listing(self, prefix: str) -> Iterator[Listed]:
        for key, size in self.keys(prefix):
            yield Listed(key, size, self.modified_at[key])
