"""File systems that came with an image: a guest's kernel could mount what is taken."""

import contextlib
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.units import KiB, MiB
from hosts.volumes.file_system import BadFileSystem, check_file_system
from hosts.volumes.foreign_image import BadImage, Limits, unpack_image

CHECKSUMS_OFF = ["-O", "^metadata_csum"]


def file_system(path: Path, *options: str, size: str = "64M") -> Path:
    kind = [] if "-t" in options else ["-t", "ext4"]
    command = ["mke2fs", "-q", "-F", *kind, *options, str(path), size]
    subprocess.run(command, check=True, capture_output=True)
    return path


def check(content: bytes) -> None:
    check_file_system(lambda at, length: content[at : at + length], len(content))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return file_system(tmp_path_factory.mktemp("fs") / "image", "-b", "4096").read_bytes()


@pytest.fixture(scope="session")
def unchecked(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One without checksums."""
    return file_system(tmp_path_factory.mktemp("fs") / "image", *CHECKSUMS_OFF).read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-b", "1024"],
        ["-b", "4096"],
        CHECKSUMS_OFF,
        ["-O", "^64bit"],
        ["-O", "^64bit,^metadata_csum,^flex_bg"],
        ["-O", "meta_bg,^resize_inode"],
        ["-O", "bigalloc"],
        ["-b", "1024", "-O", "bigalloc"],
        ["-O", "metadata_csum_seed"],
        ["-O", "orphan_file,quota,project,verity,casefold,encrypt,inline_data,large_dir"],
        ["-O", "ea_inode,mmp"],
        ["-I", "128"],
        ["-t", "ext2"],
        ["-t", "ext3"],
        ["-t", "ext2", "-r", "0"],
    ],
    ids=" ".join,
)
def test_what_mke2fs_makes_is_taken(tmp_path: Path, options: list[str]) -> None:
    check(file_system(tmp_path / "image", *options).read_bytes())


def test_a_large_one_is_looked_at_in_a_moment(tmp_path: Path) -> None:
    path = file_system(tmp_path / "image", "-E", "lazy_itable_init=1", size="200G")
    asked = []
    with path.open("rb") as file:

        def read(at: int, length: int) -> bytes:
            asked.append(length)
            file.seek(at)
            return file.read(length)

        check_file_system(read, path.stat().st_size)
    assert sum(asked) < MiB


def test_one_that_was_cut_is_refused(made: bytes, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(made[: 20 * MiB])

    with pytest.raises(BadImage, match="cut short"):
        unpack_image(path, tmp_path / "target", Limits())
    assert not (tmp_path / "target").exists()


def test_a_superblock_of_other_bytes_is_refused(made: bytes, tmp_path: Path) -> None:
    content = bytearray(made)
    content[1024:1080] = random.Random(1).randbytes(56)
    content[1082:2048] = random.Random(2).randbytes(966)

    with pytest.raises(BadFileSystem):
        check(bytes(content))


def test_a_wrong_checksum_is_refused(made: bytes) -> None:
    for at, says in ((1024 + 0x30, "superblock"), (4 * KiB + 0xC, "group 0")):
        content = bytearray(made)
        content[at] ^= 1
        with pytest.raises(BadFileSystem, match=f"checksum of .*{says}"):
            check(bytes(content))


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0x18, (7).to_bytes(4, "little"), "impossible size"),
        (0x18, (4).to_bytes(4, "little"), "at most 4096"),
        (0x14, bytes([9, 0, 0, 0]), "impossible place"),
        (0x20, bytes(4), "groups"),
        (0x20, b"\xff" * 4, "groups"),
        (0x28, bytes(4), "groups"),
        (0x28, bytes([8, 0, 0, 0]), "inodes"),
        (0x58, bytes([100, 0]), "inodes"),
        (0x58, bytes(2), "inodes"),
        (0xFE, bytes([65, 0]), "descriptors"),
        (0x4, b"\xff" * 4, "inodes"),
        (0x4, bytes(4), "impossible place"),
        (0x60, b"\x01", "features"),
        (0x67, b"\x80", "features"),
        (0x4C, b"\x02", "revision"),
    ],
)
def test_a_superblock_that_makes_no_sense_is_refused(
    unchecked: bytes, at: int, value: bytes, says: str
) -> None:
    content = bytearray(unchecked)
    content[1024 + at : 1024 + at + len(value)] = value

    with pytest.raises(BadFileSystem, match=says):
        check(bytes(content))


def test_groups_without_a_place_and_a_missing_root_are_refused(unchecked: bytes) -> None:
    block_bytes = KiB << unchecked[1024 + 0x18]
    table = (1024 // block_bytes + 1) * block_bytes
    inodes = int.from_bytes(unchecked[table + 8 : table + 12], "little") * block_bytes
    for at, length, says in ((table, 64, "group 0"), (inodes, 512, "root directory")):
        content = bytearray(unchecked)
        content[at : at + length] = bytes(length)
        with pytest.raises(BadFileSystem, match=says):
            check(bytes(content))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_superblock_is_taken_or_refused(unchecked: bytes, data: st.DataObject) -> None:
    content = bytearray(unchecked[: 2 * MiB])
    for _ in range(data.draw(st.integers(1, 6))):
        content[1024 + data.draw(st.integers(0, 1023))] = data.draw(st.integers(0, 255))
    asked = []

    def read(at: int, length: int) -> bytes:
        assert at >= 0
        asked.append(length)
        return bytes(content[at : at + length])

    with contextlib.suppress(BadFileSystem):
        check_file_system(read, 64 * MiB)
    assert sum(asked) < 9 * MiB


def test_the_room_of_a_partition_is_what_counts(made: bytes, tmp_path: Path) -> None:
    path = tmp_path / "disk"
    sector = 512
    entry = b"\0\0\0\0\x83\0\0\0" + (2048).to_bytes(4, "little")
    short = (40 * MiB // sector).to_bytes(4, "little")
    path.write_bytes(
        bytes(446) + (entry + short).ljust(64, b"\0") + b"\x55\xaa" + bytes(MiB - sector) + made
    )

    with pytest.raises(BadImage, match="cut short"):
        unpack_image(path, tmp_path / "target", Limits())
