"""Directories read from an image, sound and spoiled."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.units import KiB
from hosts.paused_directory import Image, Senseless

COUNT = 700
SEEDS = range(120)


@pytest.fixture(scope="module", params=[1024, 4096])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("directory")
    (folder / "source/many").mkdir(parents=True)
    for number in range(COUNT):
        (folder / f"source/many/{number:04}-{'n' * (number % 90)}").touch()
    path = folder / "image"
    command = ("mke2fs", "-q", "-t", "ext4", "-b", str(request.param), "-N", "1000", "-d")
    subprocess.run([*command, str(folder / "source"), str(path), "8M"], check=True)
    return path


@pytest.fixture(scope="module")
def number(image: Path) -> int:
    """The directory's inode."""
    found = subprocess.run(
        ["debugfs", "-R", "stat /many", str(image)], check=True, capture_output=True, text=True
    ).stdout
    return int(found.split()[1])


@pytest.fixture
def copy(image: Path, tmp_path: Path) -> Iterator[int]:
    """A copy that may be spoiled, open."""
    path = tmp_path / "copy"
    path.write_bytes(image.read_bytes())
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def test_a_directory_has_its_names_and_what_its_files_are(copy: int, number: int) -> None:
    found = {entry.name: entry for entry in Image(copy).entries(number)}

    assert set(found) == {f"{n:04}-{'n' * (n % 90)}".encode() for n in range(COUNT)}
    assert {entry.links for entry in found.values()} == {1}


def test_a_directory_is_found_by_its_path(copy: int, number: int) -> None:
    image = Image(copy)

    assert [image.number_of(path) for path in (b"/many", b"many", b"//many/")] == [number] * 3
    assert image.number_of(b"/") == 2


@pytest.mark.parametrize(
    "path",
    [b"/none", b"/many/none", b"/many/0000-/below", b"/man", b"/many\0", b"/many/none/x"],
)
def test_a_path_that_leads_nowhere_is_senseless(copy: int, path: bytes) -> None:
    with pytest.raises(Senseless):
        Image(copy).number_of(path)


@pytest.mark.parametrize("wrong", [0, 1 << 31, (1 << 32) - 1, 11_000])
def test_an_inode_that_there_is_not_is_senseless(copy: int, wrong: int) -> None:
    with pytest.raises(Senseless):
        list(Image(copy).entries(wrong))


def test_a_file_is_no_directory(copy: int, number: int) -> None:
    with pytest.raises(Senseless):
        list(Image(copy).entries(number + 1))


def test_something_else_is_no_image(tmp_path: Path) -> None:
    for content in (b"", b"x" * 100, os.urandom(64 * KiB)):
        path = tmp_path / "other"
        path.write_bytes(content)
        with path.open("rb") as file, pytest.raises(Senseless):
            Image(file.fileno())


def test_spoiled_bytes_end_in_an_error_or_in_names_but_in_time(copy: int, number: int) -> None:
    sound = os.pread(copy, 8 << 20, 0)
    areas = ((1024, 2048), (2048, 8192), (8192, 600_000), (0, len(sound)))
    for seed in SEEDS:
        draw = random.Random(seed)
        spoiled = [
            (draw.randrange(*draw.choice(areas)), draw.randrange(256))
            for _ in range(draw.choice([1, 5, 200]))
        ]
        for at, value in spoiled:
            os.pwrite(copy, bytes([value]), at)
        began = time.monotonic()

        try:
            seen = sum(1 for _ in Image(copy).entries(number))
        except (Senseless, OSError, struct.error):
            seen = 0

        assert time.monotonic() - began < 10, seed
        assert seen < 100 * COUNT, seed
        for at, _ in spoiled:
            os.pwrite(copy, sound[at : at + 1], at)


def test_a_directory_that_says_it_is_huge_is_refused(copy: int, number: int) -> None:
    image = Image(copy)
    inode = image._inode(number)
    at = os.pread(copy, 8 << 20, 0).index(inode)
    os.pwrite(copy, (1 << 40).to_bytes(8, "little")[4:], at + 0x6C)

    with pytest.raises(Senseless):
        list(Image(copy).entries(number))
