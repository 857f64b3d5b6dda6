"""What a disk must read as after a crash. Pure.

A writer stamps every sector with its number and the number of the write, and notes in a
ledger what it sent and what it was told, in order: a position of the ledger is an instant.

    position     1        2        3      4        5      6
                 send A   send B   A ok   send C   C ok   ✗
                                        └── at this instant A is done, C is not, B may be

A device is crash-consistent if there is an instant such that it holds every write answered
before, none that was sent after, and any part of those in flight. Each sector that reads as
its k-th write allows the instants from the sending of that one to the answer of the next;
so the question is whether all sectors have an instant in common, and how late it can be.
Writes in flight at once never overlap, so there is nothing else to it.

A drive that loses power may lose any part of what it did not flush: then each sector is
looked at alone, and must not be older than the last flush that was answered. What was trimmed
or zeroed since may also hold what was written to another place of the same disk: QEMU gives a
freed cluster to the next write before the table that let go of it is on disk. See
docs/benchmarks.md.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

SECTOR_BYTES = 512
_STAMP = struct.Struct("<8sQQQ")
_MAGIC = b"SKSTAMP\0"
_REPEAT = SECTOR_BYTES // _STAMP.size
_ZEROS = bytes(SECTOR_BYTES)
NEVER = 1 << 62
"""The position of what has not happened."""


class Inconsistent(Exception):
    """A device does not read as it must."""


def stamp(sector: int, number: int) -> bytes:
    """Fill a sector with its own number and that of the write."""
    check = zlib.crc32(struct.pack("<QQ", sector, number))
    return _STAMP.pack(_MAGIC, sector, number, check) * _REPEAT


def stamps(first: int, count: int, number: int) -> bytes:
    """Fill some sectors, one after another."""
    return b"".join(stamp(sector, number) for sector in range(first, first + count))


@dataclass(eq=False)
class Write:
    """One write, trim or zeroing, and when it was sent and answered."""

    number: int
    first: int
    count: int
    is_zeros: bool
    sent_at: int
    answered_at: int = NEVER
    found: bytes | None = None
    """What a sector was found to hold after a crash that nobody wrote there."""

    def content(self, sector: int) -> bytes:
        if self.found is not None:
            return self.found
        return _ZEROS if self.is_zeros else stamp(sector, self.number)

    def overlaps(self, first: int, count: int) -> bool:
        return self.first < first + count and first < self.first + self.count


_NOTHING = Write(0, 0, 0, is_zeros=True, sent_at=0, answered_at=0)


class Ledger:
    """What was sent to a device, and what was answered."""

    def __init__(self) -> None:
        self.position = 0
        self.flushed_to = 0
        """Whatever was answered before this instant survives anything but losing the host."""
        self.writes = 0
        self._history: dict[int, list[Write]] = {}

    def begin_with(self, first: int, count: int) -> None:
        """Note what the device held before the first write."""
        write = Write(0, first, count, is_zeros=False, sent_at=0, answered_at=0)
        for sector in range(first, first + count):
            self._history[sector] = [write]

    def send(self, first: int, count: int, *, is_zeros: bool) -> Write:
        """Note a write as it is sent."""
        self.position += 1
        self.writes += 1
        write = Write(self.writes, first, count, is_zeros, sent_at=self.position)
        for sector in range(first, first + count):
            self._history.setdefault(sector, [_NOTHING]).append(write)
        return write

    def answer(self, write: Write) -> None:
        """Note that a write was answered."""
        self.position += 1
        write.answered_at = self.position

    def flushed(self, sent_at: int) -> None:
        """Note that a flush was answered that was sent at this position."""
        self.flushed_to = max(self.flushed_to, sent_at)

    def sectors(self) -> list[int]:
        """List what was ever written, in order."""
        return sorted(self._history)

    # -- what must be ---------------------------------------------------------------------

    def check_instant(self, read: Callable[[int], bytes], *, since: int) -> None:
        """Check that the device is as at one instant, no earlier than `since`.

        Raises:
            Inconsistent: it is not.
        """
        # Sectors that say the same are looked at once: those of one write, mostly.
        claims: dict[tuple[tuple[int, int], ...], int] = {}
        for sector in self.sectors():
            versions = self._versions(sector, read(sector))
            claims[tuple((write.sent_at, before) for _, write, before in versions)] = sector
        allowed = [(since, NEVER)]
        # Those that leave no choice come first, so that few instants are left to others.
        for spans in sorted(claims, key=len):
            both = _common(allowed, spans)
            if not both:
                raise Inconsistent(
                    f"Sector {claims[spans]} is as at {spans}, others as at {allowed}; "
                    f"it is {self.position} now, and it must be as at {since} at least."
                )
            allowed = both

    def check_kept(self, read: Callable[[int], bytes]) -> None:
        """Check that no sector is older than the last flush.

        Raises:
            Inconsistent: one is.
        """
        for sector in self.sectors():
            if self._may_hold_anything(sector):
                continue
            versions = self._versions(sector, read(sector))
            if all(before <= self.flushed_to for _, _, before in versions):
                raise Inconsistent(
                    f"Sector {sector} holds write {versions[-1][1].number}, which was written "
                    f"over before the flush at {self.flushed_to}."
                )

    def _may_hold_anything(self, sector: int) -> bool:
        history = self._history[sector]
        return any(one.is_zeros and one.answered_at > self.flushed_to for one in history)

    def settle(self, read: Callable[[int], bytes]) -> None:
        """After a crash: forget the writes that were lost, and take the others as answered.

        What came before stays known: should the host be lost next, the last commit may be
        from before this crash.
        """
        self.position += 1
        for sector, history in self._history.items():
            content = read(sector)
            matching = self._matching(sector, content)
            if matching or not self._may_hold_anything(sector):
                number, write, _ = self._versions(sector, content)[-1]
                del history[number + 1 :]
                write.answered_at = min(write.answered_at, self.position)
                continue
            self._check_own(sector, content)
            now = self.position
            for one in history:
                one.answered_at = min(one.answered_at, now)
            history.append(Write(0, sector, 1, not any(content), now, now, content))
        self.flushed_to = self.position

    def _check_own(self, sector: int, content: bytes) -> None:
        """Check that what nobody wrote there was at least written to this device."""
        magic, other, number, _ = _STAMP.unpack_from(content)
        is_own = magic == _MAGIC and content == stamp(other, number) and other in self._history
        if any(content) and not (is_own and number <= self.writes):
            raise Inconsistent(f"Sector {sector} holds another's data: {content[:32]!r}.")

    def _versions(self, sector: int, content: bytes) -> list[tuple[int, Write, int]]:
        """List which of its writes a sector holds, and when the next one was answered."""
        history = self._history[sector]
        found = self._matching(sector, content)
        if not found:
            past = ", ".join(map(str, history[-4:]))
            raise Inconsistent(
                f"Sector {sector} holds what nobody wrote there: {content[:32]!r}. Last were "
                f"{past}; it is {self.position} now, flushed to {self.flushed_to}."
            )
        ends = [write.answered_at for write in history[1:]] + [NEVER]
        return [(number, history[number], ends[number]) for number in found]

    def _matching(self, sector: int, content: bytes) -> list[int]:
        """List the places in a sector's history that say what it holds."""
        history = self._history[sector]
        if content == history[-1].content(sector):
            if not history[-1].is_zeros:
                return [len(history) - 1]
            return [number for number, write in enumerate(history) if write.is_zeros]
        return [n for n, write in enumerate(history) if content == write.content(sector)]


def _common(
    some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Intersect two sets of spans."""
    return [
        (max(low, start), min(high, end))
        for low, high in some
        for start, end in others
        if max(low, start) < min(high, end)
    ]


def runs(sectors: list[int], longest: int) -> Iterator[tuple[int, int]]:
    """Join neighbours into (first, count)."""
    start = count = 0
    for sector in sectors:
        if count and sector == start + count and count < longest:
            count += 1
            continue
        if count:
            yield start, count
        start, count = sector, 1
    if count:
        yield start, count
