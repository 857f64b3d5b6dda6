"""A writer that stamps a disk through its socket, several requests in flight."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from common.units import KiB, MiB
from launch.bench.nbd import FLUSH, READ, TRIM, WRITE, ZERO, Nbd
from launch.bench.stamps import SECTOR_BYTES, Ledger, Write, runs, stamps

IN_FLIGHT = 8
DEVICE_BYTES = 1024 * MiB
AREA_BYTES = 2 * MiB
AREAS = (0, 255 * MiB, 600 * MiB, DEVICE_BYTES - AREA_BYTES)
"""Where it writes: in every leaf, across the border of two, and at the very end."""

_BLOCK_SECTORS = 64 * KiB // SECTOR_BYTES
_PAGE_SECTORS = 4 * KiB // SECTOR_BYTES
_KINDS = ("page", "block", "sector", "odd", "zero", "trim", "flush")
_WEIGHTS = (8, 3, 3, 2, 1, 1, 1)
READ_SECTORS = 2048


class Writer:
    """Writes in a thread of its own until it is stopped or its server hangs up."""

    def __init__(
        self, socket: Path, ledger: Ledger, random: Random, *, pause_s: float = 0.001
    ) -> None:
        self._nbd = Nbd(socket)
        self._ledger = ledger
        self._random = random
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._writes: dict[int, Write] = {}
        self._flushes: dict[int, int] = {}
        self.error: str | None = None
        """Why it ended before it was stopped."""
        self._thread = threading.Thread(target=self._run, name="crash-writer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the answers to what was sent, and end."""
        self._stop.set()
        self._thread.join()

    def cut_off(self) -> None:
        """Hang up, whatever is in flight."""
        self._nbd.hang_up()

    def await_writes(self, count: int, within_s: float = 60) -> bool:
        """Wait until so many more writes were sent; False if it ended, or stands still."""
        target = self._ledger.writes + count
        deadline = time.monotonic() + within_s
        while self._ledger.writes < target and time.monotonic() < deadline:
            if not self._thread.is_alive():
                return False
            time.sleep(0.002)
        return self._ledger.writes >= target

    def _run(self) -> None:
        try:
            with self._nbd:
                while not self._stop.is_set():
                    self._reap(leave=self._random.randrange(IN_FLIGHT))
                    self._send()
                    time.sleep(self._pause_s)
                self._reap(leave=0)
        except OSError as error:
            self.error = f"{type(error).__name__}: {error}"

    def _send(self) -> None:
        kind = self._random.choices(_KINDS, _WEIGHTS)[0]
        if kind == "flush":
            number = self._nbd.submit(FLUSH, 0, 0)
            self._flushes[number] = self._ledger.position
            return
        first, count = self._place(kind)
        while any(write.overlaps(first, count) for write in self._writes.values()):
            self._reap_one()
        is_zeros = kind in {"zero", "trim"}
        write = self._ledger.send(first, count, is_zeros=is_zeros)
        body = b"" if is_zeros else stamps(first, count, write.number)
        request = {"zero": ZERO, "trim": TRIM}.get(kind, WRITE)
        at, length = first * SECTOR_BYTES, count * SECTOR_BYTES
        self._writes[self._nbd.submit(request, at, length, body)] = write

    def _place(self, kind: str) -> tuple[int, int]:
        area = self._random.choice(AREAS) // SECTOR_BYTES
        sectors = AREA_BYTES // SECTOR_BYTES
        if kind in {"sector", "odd"}:
            count = 1 if kind == "sector" else self._random.randrange(2, 200)
            return area + self._random.randrange(sectors - count), count
        size = _PAGE_SECTORS if kind == "page" else _BLOCK_SECTORS
        return area + self._random.randrange(sectors // size) * size, size

    def _reap(self, *, leave: int) -> None:
        while len(self._writes) + len(self._flushes) > leave:
            self._reap_one()

    def _reap_one(self) -> None:
        reply = self._nbd.reap()
        if reply.error:
            raise OSError(reply.error, "a write was answered with an error")
        write = self._writes.pop(reply.number, None)
        if write is not None:
            self._ledger.answer(write)
        else:
            self._ledger.flushed(self._flushes.pop(reply.number))


def reader_of(nbd: Nbd, ledger: Ledger) -> Callable[[int], bytes]:
    """Read all that was ever written; return what gives a sector of it."""
    found: dict[int, bytes] = {}
    waiting: dict[int, tuple[int, int]] = {}

    def reap() -> None:
        reply = nbd.reap()
        first, count = waiting.pop(reply.number)
        if reply.error:
            raise OSError(reply.error, "a read was answered with an error")
        for number in range(count):
            at = number * SECTOR_BYTES
            found[first + number] = reply.data[at : at + SECTOR_BYTES]

    for first, count in runs(ledger.sectors(), READ_SECTORS):
        at, length = first * SECTOR_BYTES, count * SECTOR_BYTES
        waiting[nbd.submit(READ, at, length)] = (first, count)
        if len(waiting) >= IN_FLIGHT:
            reap()
    while waiting:
        reap()
    return found.__getitem__
