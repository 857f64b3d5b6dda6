"""Listings of large directories, kept between two of their pages."""

import asyncio
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes import listings
from sandboxes.listings import Entry, Listing, Shelf, Spool


def spooled(entries: list[Entry]) -> Listing | None:
    spool = Spool()
    for name, rest in entries:
        spool.add(name, rest)
    listing = spool.finish()
    spool.close()
    return listing


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.setattr(listings, "MIN_ENTRIES", 1)
    shelf = Shelf()
    yield shelf
    shelf.keep_none()


def small() -> Listing:
    listing = spooled([(b"a", b"1")])
    assert listing is not None
    return listing


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_a_listing_of_many_runs_is_sorted_and_read_from_any_place() -> None:
    names = [b"%06d" % number * random.choice((1, 40)) for number in range(70_003)]
    random.shuffle(names)
    listing = spooled([(name, name[:7]) for name in names])
    assert listing is not None

    names.sort()
    assert list(listing.after(b"")) == [(name, name[:7]) for name in names]
    for place in (0, 1, 499, 500, 501, 69_000, 70_002):
        assert [name for name, _ in listing.after(names[place])] == names[place + 1 :]
    assert [name for name, _ in listing.after(b"034999x")] == [
        name for name in names if name > b"034999x"
    ]
    listing.close()


def test_a_small_directory_is_not_kept() -> None:
    assert spooled([(b"%d" % number, b"") for number in range(4_999)]) is None


def test_what_is_too_large_is_not_kept_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listings, "MAX_BYTES", 1_000_000)
    before = open_files()

    assert spooled([(b"%09d" % number, b"x" * 50) for number in range(30_000)]) is None
    assert spooled([(b"x" * 70_000, b"")] * 6_000) is None
    assert open_files() == before


def test_where_no_file_can_be_made_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))

    assert spooled([(b"%09d" % number, b"") for number in range(30_000)]) is None


async def test_a_shelf_keeps_few_listings_and_of_one_owner_fewer(shelf: Shelf) -> None:
    before = open_files()
    kept = [small() for _ in range(listings.MAX_LISTINGS_OF_ONE + 1)]
    for listing in kept:
        shelf.keep("one", b"/", listing)

    assert shelf.find("one", b"/", kept[0].token) is None
    assert shelf.find("one", b"/", kept[1].token) is kept[1]
    assert shelf.find("other", b"/", kept[1].token) is None
    for number in range(2 * listings.MAX_LISTINGS):
        shelf.keep(str(number), b"/", small())
    assert open_files() == before + listings.MAX_LISTINGS


async def test_a_listing_ends_when_nobody_asks_and_when_it_is_old(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    idle, old = small(), small()
    shelf.keep("one", b"/", idle)
    shelf.keep("one", b"/", old)
    idle.used_at -= listings.MAX_IDLE_S + 1
    old.made_at -= listings.MAX_AGE_S + 1

    assert shelf.find("one", b"/", idle.token) is None
    assert shelf.find("one", b"/", old.token) is None
    assert open_files() == before


def test_no_more_than_some_directories_are_spooled_at_once() -> None:
    shelf = Shelf()
    spools = [shelf.start() for _ in range(listings.MAX_SPOOLS + 1)]

    assert spools[-1] is None
    assert spools[0] is not None
    shelf.end(spools[0])
    assert shelf.start() is not None


async def test_many_listings_are_looked_after_by_one_timer(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    monkeypatch.setattr(listings, "MAX_IDLE_S", -0.95)  # so that it looks after 0.05 s
    monkeypatch.setattr(Shelf, "_drop_and_look", lambda _: looks.append("looked"))

    for number in range(5):
        shelf.keep(f"owner {number}", b"/", small())
    await asyncio.sleep(0.3)

    assert looks == ["looked"]
