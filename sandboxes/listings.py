"""Sorted listings of large directories, kept for a short time between two of their pages.

A directory comes in no order, so its first page costs a reading of all of it. What was read
is kept here, sorted, in a file without a name, and the pages that follow are read from that.
A listing is known by a token that only those who got its first page hold; where it is gone,
or another process has it, the directory is read anew.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
import struct
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import BinaryIO, cast

from common.units import MiB

log = logging.getLogger(__name__)

MIN_ENTRIES = 5_000
"""A smaller directory is read for each page: it is cheap, and shows what is there now."""
MAX_BYTES = 64 * MiB
MAX_LISTINGS = 32
MAX_LISTINGS_OF_ONE = 4
MAX_SPOOLS = 8
MAX_IDLE_S = 60.0
MAX_AGE_S = 600.0

RUN_ENTRIES = 20_000
INDEX_EVERY = 500
READ_BYTES = 64 * 1024

TOKEN_BYTES = 24

_LENGTHS = struct.Struct("<HH")

Entry = tuple[bytes, bytes]
"""A name, and what is known of it."""


class Spool:
    """Sorts what is added, in files, with no more than a run of it in memory."""

    def __init__(self) -> None:
        self._run: list[Entry] = []
        self._file: BinaryIO | None = None
        self._bounds = [0]
        self._is_too_large = False

    def add(self, name: bytes, rest: bytes) -> None:
        """Take an entry; what is too large for a listing is forgotten as a whole."""
        if self._is_too_large or len(name) > READ_BYTES - 1 or len(rest) > READ_BYTES - 1:
            self._is_too_large = True
            return
        self._run.append((name, rest))
        if len(self._run) == RUN_ENTRIES:
            with self._given_up_if_disk_is_full():
                self._write_run()

    def finish(self) -> Listing | None:
        """Return the listing; None where it is too small or too large to be kept."""
        if self._is_too_large or (len(self._bounds) == 1 and len(self._run) < MIN_ENTRIES):
            return None
        with self._given_up_if_disk_is_full():
            self._write_run()
            if not self._is_too_large and self._file is not None:
                file = self._file
                runs = [_read(file, begin, end) for begin, end in pairwise(self._bounds)]
                return Listing(heapq.merge(*runs))
        return None

    def close(self) -> None:
        """Drop what was added."""
        self._run = []
        if self._file is not None:
            self._file.close()

    @contextmanager
    def _given_up_if_disk_is_full(self) -> Iterator[None]:
        """A listing only saves work: without it each page reads the directory."""
        try:
            yield
        except OSError as error:
            log.warning("a listing cannot be kept: %s", error)
            self._is_too_large = True

    def _write_run(self) -> None:
        if self._file is None:
            self._file = _unnamed()
        self._run.sort()
        data = b"".join(_packed(entry) for entry in self._run)
        self._run = []
        if self._bounds[-1] + len(data) > MAX_BYTES:
            self._is_too_large = True
            return
        self._file.write(data)
        self._file.flush()
        self._bounds.append(self._bounds[-1] + len(data))


class Listing:
    """The entries of a directory by name, in a file."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self.token = secrets.token_hex(TOKEN_BYTES // 2).encode()
        self.made_at = self.used_at = time.monotonic()
        self._file = _unnamed()
        self._names: list[bytes] = []
        self._places: list[int] = []
        self._end = 0
        for number, entry in enumerate(entries):
            if number % INDEX_EVERY == 0:
                self._names.append(entry[0])
                self._places.append(self._end)
            self._end += self._file.write(_packed(entry))
        self._file.flush()

    def after(self, name: bytes) -> Iterator[Entry]:
        """Yield what comes after a name, which need not be there."""
        place = max(bisect_right(self._names, name) - 1, 0)
        for entry in _read(self._file, self._places[place], self._end):
            if entry[0] > name:
                yield entry

    def close(self) -> None:
        """Free its file."""
        self._file.close()


class Shelf:
    """The listings of a process, bounded in their number, size and age."""

    def __init__(self) -> None:
        self._listings: dict[tuple[str, bytes, bytes], Listing] = {}
        self._spools = 0
        self._next_look: asyncio.TimerHandle | None = None

    def start(self) -> Spool | None:
        """Return a spool for a directory that is about to be read; None where too many are."""
        if self._spools >= MAX_SPOOLS:
            return None
        self._spools += 1
        return Spool()

    def end(self, spool: Spool) -> None:
        """Drop a spool, finished or not."""
        self._spools -= 1
        spool.close()

    def keep(self, owner: str, path: bytes, listing: Listing) -> None:
        """Keep a listing for the pages that follow; the least used ones make room."""
        self._drop_old()
        of_owner = [key for key in self._listings if key[0] == owner]
        if len(of_owner) >= MAX_LISTINGS_OF_ONE:
            self._drop_least_used(of_owner)
        if len(self._listings) >= MAX_LISTINGS:
            self._drop_least_used(list(self._listings))
        self._listings[owner, path, listing.token] = listing
        self._look_again()

    def find(self, owner: str, path: bytes, token: bytes) -> Listing | None:
        """Return a listing that is still kept."""
        self._drop_old()
        found = self._listings.get((owner, path, token))
        if found is not None:
            found.used_at = time.monotonic()
        return found

    def keep_none(self) -> None:
        """Drop every listing; their next pages read the directories anew."""
        for listing in self._listings.values():
            listing.close()
        self._listings.clear()

    def _look_again(self) -> None:
        """See to it that old ones go although nobody asks; once, however many there are."""
        if self._next_look is not None:
            self._next_look.cancel()
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(MAX_IDLE_S + 1, self._drop_and_look)

    def _drop_and_look(self) -> None:
        self._next_look = None
        self._drop_old()
        if self._listings:
            self._look_again()

    def _drop_old(self) -> None:
        now = time.monotonic()
        for key, listing in list(self._listings.items()):
            if now - listing.used_at > MAX_IDLE_S or now - listing.made_at > MAX_AGE_S:
                self._listings.pop(key).close()

    def _drop_least_used(self, keys: list[tuple[str, bytes, bytes]]) -> None:
        key = min(keys, key=lambda one: self._listings[one].used_at)
        self._listings.pop(key).close()


def _unnamed() -> BinaryIO:
    return cast("BinaryIO", tempfile.TemporaryFile())


def _packed(entry: Entry) -> bytes:
    name, rest = entry
    return _LENGTHS.pack(len(name), len(rest)) + name + rest


def _read(file: BinaryIO, at: int, end: int) -> Iterator[Entry]:
    """Yield the entries between two places, a piece of the file in memory."""
    piece = b""
    while at < end or piece:
        file.seek(at)
        more = file.read(min(READ_BYTES, end - at))
        at += len(more)
        piece += more
        done = 0
        while done + _LENGTHS.size <= len(piece):
            name_bytes, rest_bytes = _LENGTHS.unpack_from(piece, done)
            begin = done + _LENGTHS.size
            if begin + name_bytes + rest_bytes > len(piece):
                break
            rest_at = begin + name_bytes
            yield piece[begin:rest_at], piece[rest_at : rest_at + rest_bytes]
            done = rest_at + rest_bytes
        piece = piece[done:]
        if not more:
            return
