"""Which file systems are mounted without e2fsck: those that cannot need it, and no others."""

from __future__ import annotations

import os
import random
import subprocess
from typing import TYPE_CHECKING

import pytest

from common.units import MiB
from hosts.paused_clean import is_clean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SUPERBLOCK = 1024
DESCRIPTORS = 4096


def made(path: Path, *options: str, size: str = "512M") -> Path:
    command = ["mke2fs", "-q", "-t", "ext4", *options, str(path), size]
    subprocess.run(command, check=True, capture_output=True)
    return path


def asked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return is_clean(fd)
    finally:
        os.close(fd)


def change(path: Path, at: int, *, by: Callable[[int], int]) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([by(byte)]))


def debugfs(path: Path, command: str) -> None:
    """Change a field as ext4's own tools do, checksums included."""
    subprocess.run(["debugfs", "-w", "-R", command, path], check=True, capture_output=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return made(tmp_path / "image", "-b", "4096")


@pytest.mark.parametrize(
    "options",
    [
        ("-b", "4096"),
        ("-b", "1024"),
        ("-O", "^metadata_csum_seed"),
        ("-O", "metadata_csum_seed"),
        ("-O", "^orphan_file"),
        ("-O", "^flex_bg"),
    ],
)
def test_a_file_system_that_was_left_in_good_order_is_clean(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert asked(made(tmp_path / "image", *options))


@pytest.mark.parametrize(
    "options",
    [
        ("-O", "^metadata_csum"),
        ("-O", "^64bit"),
        ("-O", "meta_bg,^resize_inode"),
        ("-O", "inline_data"),
        ("-O", "bigalloc"),
    ],
)
def test_what_is_not_understood_or_has_no_checksums_is_left_to_e2fsck(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert not asked(made(tmp_path / "image", *options))


@pytest.mark.parametrize(
    "command",
    [
        "ssv state 0",
        "ssv state 3",
        "ssv state 5",
        "ssv last_orphan 12",
        "ssv error_count 1",
        "feature needs_recovery",
        "feature orphan_present",
    ],
)
def test_what_has_something_to_be_mended_is_not_clean(image: Path, command: str) -> None:
    debugfs(image, command)
    assert not asked(image)


def test_a_journal_that_waits_to_be_replayed_is_seen(image: Path) -> None:
    subprocess.run(
        ["debugfs", "-w", "-f", "/dev/stdin", str(image)],
        input=b"jo\njw -b 333 /dev/zero\njc\n",
        check=True,
        capture_output=True,
    )
    assert not asked(image)
    subprocess.run(["e2fsck", "-p", image], check=False, capture_output=True)
    assert asked(image)


def test_any_flipped_bit_of_the_superblock_or_of_a_descriptor_is_seen(image: Path) -> None:
    draw = random.Random(5)
    groups = 512 * MiB // (32768 * 4096)
    places = [SUPERBLOCK + draw.randrange(1024) for _ in range(200)]
    places += [DESCRIPTORS + draw.randrange(groups * 64) for _ in range(200)]
    for at in places:
        bit = 1 << draw.randrange(8)
        change(image, at, by=lambda byte, bit=bit: byte ^ bit)  # type: ignore[misc]
        assert not asked(image), at
        change(image, at, by=lambda byte, bit=bit: byte ^ bit)  # type: ignore[misc]
    assert asked(image)


@pytest.mark.parametrize("length", [0, 1023, 1500, 2048, 4096, 4100])
def test_an_image_that_is_cut_off_is_not_clean(image: Path, length: int) -> None:
    os.truncate(image, length)
    assert not asked(image)
