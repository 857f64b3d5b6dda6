"""Images that other people made: QEMU's own are taken, hostile ones are refused."""

import random
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.units import GiB, KiB, MiB
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.foreign_image import BadImage, Limits, unpack_image

LIMITS = Limits(device_bytes=GiB, data_bytes=256 * MiB)


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file system with something on it."""
    folder = tmp_path_factory.mktemp("raw")
    (folder / "root").mkdir()
    (folder / "root/data").write_bytes(random.Random(1).randbytes(3 * MiB))
    (folder / "root/text").write_text("hello " * 100_000)
    image = folder / "raw"
    image.touch()
    command = ["mkfs.ext4", "-q", "-d", str(folder / "root"), str(image), "64M"]
    subprocess.run(command, check=True, capture_output=True)
    return image


def qemu_img(*arguments: object) -> None:
    subprocess.run(["qemu-img", *map(str, arguments)], check=True, capture_output=True)


def taken(image: Path, folder: Path, limits: Limits = LIMITS) -> tuple[int, bytes]:
    target = folder / "target"
    size_bytes = unpack_image(image, target, limits)
    return size_bytes, target.read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        ["-o", "compat=1.1"],
        ["-o", "compat=0.10"],
        ["-o", "cluster_size=512"],
        ["-o", "cluster_size=2M"],
        ["-c"],
        ["-c", "-o", "compression_type=zstd"],
        ["-c", "-o", "cluster_size=4k"],
        ["-o", "preallocation=metadata"],
        ["-o", "lazy_refcounts=on"],
    ],
)
def test_what_qemu_writes_is_read_as_qemu_reads_it(
    raw: Path, tmp_path: Path, options: list[str]
) -> None:
    image = tmp_path / "image"
    qemu_img("convert", "-f", "raw", "-O", "qcow2", *options, raw, image)

    size_bytes, content = taken(image, tmp_path)

    assert size_bytes == 64 * MiB
    assert content == raw.read_bytes()


def test_a_raw_image_is_taken_with_its_holes(raw: Path, tmp_path: Path) -> None:
    size_bytes, content = taken(raw, tmp_path)

    assert size_bytes == 64 * MiB
    assert content == raw.read_bytes()
    assert (tmp_path / "target").stat().st_blocks * 512 < 16 * MiB


def test_a_size_that_is_no_whole_block_is_rounded_up(raw: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    odd.write_bytes(raw.read_bytes() + b"x")

    assert taken(odd, tmp_path)[0] == 64 * MiB + BLOCK_BYTES


def test_snapshots_inside_are_left_alone(raw: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    qemu_img("convert", "-f", "raw", "-O", "qcow2", raw, image)
    qemu_img("snapshot", "-c", "before", image)

    assert taken(image, tmp_path)[1] == raw.read_bytes()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-o", "extended_l2=on"], "features"),
        (["--object", "secret,id=s,data=x", "-o", "encrypt.format=luks,encrypt.key-secret=s"],
         "encrypted"),
    ],
)  # fmt: skip
def test_features_that_are_not_taken_are_named(
    tmp_path: Path, options: list[str], says: str
) -> None:
    image = tmp_path / "image"
    qemu_img("create", "-f", "qcow2", *options, image, "64M")

    with pytest.raises(BadImage, match=says):
        taken(image, tmp_path)


def test_nothing_outside_the_file_is_followed(raw: Path, tmp_path: Path) -> None:
    backed, split = tmp_path / "backed", tmp_path / "split"
    qemu_img("create", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw", backed, "64M")
    qemu_img("create", "-f", "qcow2", "-o", f"data_file={tmp_path / 'data'}", split, "64M")
    link = tmp_path / "link"
    link.symlink_to(raw)

    with pytest.raises(BadImage, match="backing file"):
        taken(backed, tmp_path)
    with pytest.raises(BadImage, match="another file"):
        taken(split, tmp_path)
    with pytest.raises(OSError, match="symbolic"):
        taken(link, tmp_path)


@pytest.mark.parametrize(
    ("start", "says"),
    [(b"KDMV", "VMDK"), (b"\x1f\x8b", "gzip"), (b"PK\x03\x04", "zip"), (b"", "empty")],
)
def test_other_files_are_told_apart(tmp_path: Path, start: bytes, says: str) -> None:
    image = tmp_path / "image"
    image.write_bytes(start + bytes(4096 if start else 0))

    with pytest.raises(BadImage, match=says):
        taken(image, tmp_path)


def test_an_image_without_a_file_system_is_refused(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(MiB))

    with pytest.raises(BadImage, match="no ext4"):
        taken(image, tmp_path)


def test_sizes_are_bounded(raw: Path, tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    qemu_img("create", "-f", "qcow2", huge, "2G")

    with pytest.raises(BadImage, match="at most"):
        taken(huge, tmp_path)
    with pytest.raises(BadImage, match="more data"):
        taken(raw, tmp_path, Limits(device_bytes=GiB, data_bytes=MiB))


def image_of(raw: Path, path: Path) -> bytearray:
    qemu_img("convert", "-f", "raw", "-O", "qcow2", raw, path)
    return bytearray(path.read_bytes())


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (20, struct.pack(">I", 8)),
        (20, struct.pack(">I", 63)),
        (24, struct.pack(">Q", 1 << 63)),
        (36, struct.pack(">I", 0)),
        (40, struct.pack(">Q", 1 << 60)),
        (40, struct.pack(">Q", 1)),
        (4, struct.pack(">I", 4)),
        (72, struct.pack(">Q", 2)),
        (72, struct.pack(">Q", 1 << 40)),
    ],
)
def test_a_header_that_lies_is_refused(
    raw: Path, tmp_path: Path, at: int, value: bytes
) -> None:
    image = tmp_path / "image"
    content = image_of(raw, image)
    content[at : at + len(value)] = value
    image.write_bytes(content)

    with pytest.raises(BadImage):
        taken(image, tmp_path)


def test_a_table_that_is_used_twice_is_refused(tmp_path: Path) -> None:
    image = tmp_path / "image"
    qemu_img("create", "-f", "qcow2", "-o", "preallocation=metadata", image, "1G")
    content = bytearray(image.read_bytes())
    l1_at = int.from_bytes(content[40:48], "big")
    content[l1_at + 8 : l1_at + 16] = content[l1_at : l1_at + 8]
    image.write_bytes(content)

    with pytest.raises(BadImage, match="two places"):
        taken(image, tmp_path)


def bomb(raw: Path, path: Path, *, zeros: int) -> Path:
    """Make a compressed image, most of whose clusters are one and the same, of zeros."""
    qemu_img("convert", "-f", "raw", "-O", "qcow2", "-c", "-o", "cluster_size=2M", raw, path)
    content = bytearray(path.read_bytes())
    l1_at = int.from_bytes(content[40:48], "big")
    l2_at = int.from_bytes(content[l1_at : l1_at + 8], "big") & ((1 << 56) - 1)
    packer = zlib.compressobj(9, zlib.DEFLATED, -12)
    packed = packer.compress(bytes(2 * MiB)) + packer.flush()
    at = -(-len(content) // 512) * 512
    entry = 1 << 62 | (-(-len(packed) // 512) - 1) << 49 | at
    first = 64 * MiB // (2 * MiB)
    content[l2_at + 8 * first : l2_at + 8 * (first + zeros)] = struct.pack(">Q", entry) * zeros
    content[24:32] = struct.pack(">Q", (first + zeros) * 2 * MiB)
    path.write_bytes(content.ljust(at, b"\0") + packed.ljust(8 * KiB, b"\0"))
    return path


def test_zeros_that_are_to_be_unpacked_again_and_again_count_as_data(
    raw: Path, tmp_path: Path
) -> None:
    limits = Limits(device_bytes=8 * GiB, data_bytes=256 * MiB)
    few = bomb(raw, tmp_path / "few", zeros=8)
    many = bomb(raw, tmp_path / "many", zeros=1000)

    assert taken(few, tmp_path, limits)[1].startswith(raw.read_bytes())
    (tmp_path / "target").unlink()
    with pytest.raises(BadImage, match="more data"):
        unpack_image(many, tmp_path / "target", limits)


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("empty") / "image"
    qemu_img("create", "-f", "qcow2", path, "8M")
    return path.read_bytes()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_bytes_end_in_an_image_or_an_error(
    empty: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    image = folder / "image"
    content = bytearray(empty)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 111))
        content[at] = data.draw(st.integers(0, 255))
    image.write_bytes(content[: data.draw(st.integers(1, len(content)))])

    with pytest.raises(BadImage):  # an empty disk has no file system, whatever else it is
        taken(image, folder, Limits(device_bytes=64 * MiB, data_bytes=64 * KiB))
