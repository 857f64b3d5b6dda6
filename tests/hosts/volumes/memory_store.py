"""An object store in memory, which can be told to fail."""

from collections.abc import Callable, Iterable, Iterator

from hosts.volumes.errors import ObjectMissing, StoreUnavailable


class MemoryStore:
    """Obeys `ObjectStore`. `fail` is asked before every request."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
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
            self.objects.pop(key, None)

    def keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        for key, body in sorted(self.objects.items()):
            if key.startswith(prefix):
                yield key, len(body)
