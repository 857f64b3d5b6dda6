"""Images with partitions: the one root is taken, and a table that lies is refused."""

import struct
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.units import GiB, MiB
from hosts.volumes.foreign_image import BadImage, Limits, unpack_image
from hosts.volumes.partitions import BadTable, root_partition
from tests.hosts.volumes.test_foreign_image import LIMITS, qemu_img, raw

__all__ = ["raw"]

LINUX = UUID("0fc63daf-8483-4772-8e79-3d69d8477de4")
ROOT = UUID("4f68bce3-e8cd-4db1-96e7-fbcaf984b709")
KERNELS = UUID("bc13c2ff-59e6-4262-a352-b275fd6f7172")
EFI = UUID("c12a7328-f81f-11d2-ba4b-00a0c93ec93b")

SECTOR = 512
DISK_BYTES = 200 * MiB
# Each lies where the one before ends; the first as disks of the last century had it.
FIRST, SECOND = 63 * SECTOR, 66 * MiB

Entry = tuple[UUID, int, int]
"""A type, a place and a length, in bytes."""


def gpt(entries: Sequence[Entry], *, table_at: int = 2, entry_bytes: int = 128) -> bytes:
    """Make the start of a disk with a GPT."""
    body = b"".join(
        (
            kind.bytes_le
            + bytes(16)
            + struct.pack("<QQ", at // SECTOR, (at + length) // SECTOR - 1)
        ).ljust(entry_bytes, b"\0")
        for kind, at, length in entries
    ).ljust(128 * entry_bytes, b"\0")
    header = struct.pack(
        "<8sIIIIQQQQ16sQIII", b"EFI PART", 0x10000, 92, 0, 0, 1, DISK_BYTES // SECTOR - 1,
        34, DISK_BYTES // SECTOR - 34, bytes(16), table_at, 128, entry_bytes, zlib.crc32(body),
    )  # fmt: skip
    header = header[:16] + struct.pack("<I", zlib.crc32(header)) + header[20:]
    start = mbr([(0xEE, SECTOR, DISK_BYTES - SECTOR)]) + header.ljust(SECTOR, b"\0")
    return start.ljust(table_at * SECTOR, b"\0") + body


def mbr(entries: Sequence[tuple[int, int, int]]) -> bytes:
    table = b"".join(
        struct.pack("<B3sB3sII", 0, b"", kind, b"", at // SECTOR, length // SECTOR)
        for kind, at, length in entries
    )
    return bytes(446) + table.ljust(64, b"\0") + b"\x55\xaa"


def disk(path: Path, table: bytes, *parts: tuple[int, bytes]) -> Path:
    with path.open("wb") as file:
        file.truncate(DISK_BYTES)
        file.write(table)
        for at, content in parts:
            file.seek(at)
            file.write(content)
    return path


def taken(image: Path, limits: Limits = LIMITS) -> tuple[int, bytes]:
    target = image.with_name("target")
    size_bytes = unpack_image(image, target, limits)
    return size_bytes, target.read_bytes()


@pytest.mark.parametrize(
    "table",
    [
        gpt([(EFI, MiB, 2 * MiB), (LINUX, SECOND, 64 * MiB)]),
        gpt([(LINUX, SECOND, 64 * MiB)], table_at=40, entry_bytes=256),
        mbr([(0xEF, MiB, 2 * MiB), (0x83, SECOND, 64 * MiB)]),
    ],
    ids=["gpt", "gpt of another shape", "mbr"],
)
@pytest.mark.parametrize("options", [None, ["-c"], ["-o", "cluster_size=2M"]])
def test_the_root_partition_is_taken_and_nothing_beside_it(
    raw: Path, tmp_path: Path, table: bytes, options: list[str] | None
) -> None:
    beside = SECOND + 64 * MiB
    image = disk(
        tmp_path / "disk",
        table,
        (SECOND - MiB, b"before" * 50_000),
        (SECOND, raw.read_bytes()),
        (beside, b"after" * 50_000),
    )
    if options is not None:
        converted = tmp_path / "qcow2"
        qemu_img("convert", "-f", "raw", "-O", "qcow2", *options, image, converted)
        image = converted

    size_bytes, content = taken(image)

    assert size_bytes == 64 * MiB
    assert content == raw.read_bytes()
    assert (tmp_path / "target").stat().st_blocks * SECTOR < 32 * MiB


def test_a_partition_may_lie_anywhere_and_have_any_length(raw: Path, tmp_path: Path) -> None:
    length = 64 * MiB + 3 * SECTOR
    image = disk(
        tmp_path / "disk",
        gpt([(LINUX, FIRST, length)]),
        (FIRST, raw.read_bytes()),
        (FIRST + length, b"after" * 50_000),
    )

    size_bytes, content = taken(image)

    assert size_bytes == len(content) == 64 * MiB + 64 * 1024
    assert content == raw.read_bytes() + bytes(64 * 1024)
    subprocess.run(["e2fsck", "-fn", tmp_path / "target"], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ((KERNELS, LINUX), 1),
        ((LINUX, ROOT), 1),
        ((ROOT, LINUX), 0),
        ((LINUX, KERNELS), 0),
    ],
)
def test_of_two_file_systems_the_one_that_says_it_is_the_root_is_taken(
    raw: Path, kinds: tuple[UUID, UUID], chosen: int
) -> None:
    start = raw.read_bytes()[:MiB]
    at = (MiB, 40 * MiB)
    device = bytearray(DISK_BYTES)
    table = gpt([(kind, place, 32 * MiB) for kind, place in zip(kinds, at, strict=True)])
    device[: len(table)] = table
    for place in at:
        device[place : place + MiB] = start

    found = root_partition(
        lambda where, length: bytes(device[where : where + length]), len(device)
    )

    assert found is not None
    assert found.start == at[chosen]


def test_where_it_cannot_be_told_which_is_the_root_none_is_taken(
    raw: Path, tmp_path: Path
) -> None:
    start = raw.read_bytes()[:MiB]
    two = [(0x83, MiB, 32 * MiB), (0x83, 40 * MiB, 32 * MiB)]
    image = disk(tmp_path / "disk", mbr(two), (MiB, start), (40 * MiB, start))

    with pytest.raises(BadImage, match="2 of the image's partitions"):
        taken(image)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (gpt([(LINUX, MiB, 64 * MiB)]), "None of the image's partitions"),
        (gpt([(LINUX, MiB, GiB)]), "beyond the image's end"),
        (gpt([(LINUX, 10 * MiB, -9 * MiB)]), "impossible place"),
        (gpt([(LINUX, 0, 64 * MiB)]), "impossible place"),
        (mbr([(0x83, MiB, GiB)]), "beyond the image's end"),
        (mbr([(0xEE, SECTOR, MiB)]), "GPT"),
        (gpt([(LINUX, MiB, MiB)])[:1500] + b"?", "damaged"),
        (gpt([(LINUX, MiB, MiB)], table_at=2 * DISK_BYTES // SECTOR), "impossible"),
        (gpt([(LINUX, MiB, MiB)], entry_bytes=4096), "impossible"),
        (mbr([]), "no ext4"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_a_table_that_leads_nowhere_is_refused_with_the_reason(
    tmp_path: Path, table: bytes, says: str
) -> None:
    image = disk(tmp_path / "disk", table[:MiB])

    with pytest.raises(BadImage, match=says):
        taken(image)
    assert not (tmp_path / "target").exists()


def test_a_partition_counts_against_the_limits(raw: Path, tmp_path: Path) -> None:
    image = disk(
        tmp_path / "disk", gpt([(LINUX, SECOND, 64 * MiB)]), (SECOND, raw.read_bytes())
    )

    with pytest.raises(BadImage, match="more data"):
        taken(image, Limits(device_bytes=GiB, data_bytes=MiB))
    with pytest.raises(BadImage, match="at most"):
        taken(image, Limits(device_bytes=DISK_BYTES - 1, data_bytes=GiB))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_table_ends_in_a_partition_inside_the_device_or_in_an_error(
    data: st.DataObject,
) -> None:
    table = bytearray(
        data.draw(
            st.sampled_from(
                [gpt([(LINUX, MiB, 64 * MiB)]), mbr([(0x83, MiB, MiB), (5, 2 * MiB, MiB)])]
            )
        )
    )
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(446, min(len(table), 1200) - 1))
        table[at] = data.draw(st.integers(0, 255))
    if len(table) > SECTOR and data.draw(st.booleans()):
        # Whoever lies can count.
        table[528:532] = bytes(4)
        table[528:532] = struct.pack("<I", zlib.crc32(table[512:604]))
    asked = []

    def read(at: int, length: int) -> bytes:
        asked.append(length)
        assert at >= 0
        # An ext4 file system wherever one looks.
        return (
            b"\x53\xef" if length == 2 else bytes(table[at : at + length]).ljust(length, b"\0")
        )

    try:
        found = root_partition(read, DISK_BYTES)
    except BadTable:
        found = None

    assert len(asked) < 300
    assert max(asked) <= MiB
    if found is not None:
        assert 0 < found.start < found.end <= DISK_BYTES
