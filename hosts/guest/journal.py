"""What a context wrote, kept within a bound: the newest of it, and how much was dropped."""

from __future__ import annotations

from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRY_COST_BYTES = 200
"""What keeping an entry costs beside its bytes: counted, since entries may hold one byte."""

_JOIN_BELOW_BYTES = 8192


class Journal:
    """The tail of each stream of a context, in the order in which they were written."""

    __slots__ = (
        "_costs",
        "_last",
        "_next",
        "_streams",
        "dropped_bytes",
        "limit_bytes",
        "totals",
    )

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.totals: dict[bytes, int] = {}
        self.dropped_bytes = 0
        self._streams: dict[bytes, deque[tuple[int, bytearray]]] = {}
        self._costs: dict[bytes, int] = {}
        self._next = 0
        self._last: tuple[bytes, bytearray] | None = None

    @property
    def cost_bytes(self) -> int:
        """About how much memory it takes."""
        return sum(self._costs.values())

    def append(self, kind: bytes, data: bytes) -> None:
        """Add to the end of a stream; drops from its beginning what is then too much."""
        self.totals[kind] = self.totals.get(kind, 0) + len(data)
        if self._last and self._last[0] == kind and len(self._last[1]) < _JOIN_BELOW_BYTES:
            self._last[1].extend(data)
            self._costs[kind] += len(data)
        else:
            chunk = bytearray(data)
            self._streams.setdefault(kind, deque()).append((self._next, chunk))
            self._costs[kind] = self._costs.get(kind, 0) + len(data) + _ENTRY_COST_BYTES
            self._next += 1
            self._last = (kind, chunk)
        self._trim(kind)

    def shrink(self, limit_bytes: int) -> None:
        """Keep less from now on."""
        self.limit_bytes = min(self.limit_bytes, limit_bytes)
        for kind in self._streams:
            self._trim(kind)

    def retained(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield what is kept, as (kind, bytes), in the order in which it was written."""
        entries = [
            (order, kind, chunk)
            for kind, stream in self._streams.items()
            for order, chunk in stream
        ]
        entries.sort(key=lambda entry: entry[0])
        for _, kind, chunk in entries:
            yield kind, bytes(chunk)

    def _trim(self, kind: bytes) -> None:
        stream = self._streams[kind]
        while stream and self._costs[kind] > self.limit_bytes:
            _, chunk = stream.popleft()
            self._costs[kind] -= len(chunk) + _ENTRY_COST_BYTES
            self.dropped_bytes += len(chunk)
            if self._last and self._last[1] is chunk:
                self._last = None
