"""The overlay reader against files that QEMU wrote, and against damaged ones."""

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.units import GiB, KiB, MiB, TiB
from hosts.volumes.blocks import BLOCK_BYTES, ZERO_BLOCK
from hosts.volumes.errors import Corrupt
from hosts.volumes.qcow2 import open_overlay
from hosts.volumes.qcow2_writer import write_empty


def make(path: Path, *options: str, size: str = "2T") -> Path:
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", *options, path, size],
        check=True,
    )
    return path


def qemu_io(path: Path, *commands: str) -> None:
    arguments = [part for command in commands for part in ("-c", command)]
    done = subprocess.run(
        ["qemu-io", "-d", "unmap", "-f", "qcow2", *arguments, path],
        check=True,
        capture_output=True,
    )
    assert b"failed" not in done.stdout


def qemu_img(command: str, *arguments: str | Path) -> bytes:
    done = subprocess.run(["qemu-img", command, *arguments], check=True, capture_output=True)
    return done.stdout


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    path = make(tmp_path / "overlay.qcow2")
    qemu_io(
        path,
        "write -P 1 0 64k",
        "write -P 2 100k 1k",
        "write -z -u 1M 128k",
        "write -P 3 1T 64k",
        "write -P 4 2097151M 1M",
    )
    return path


def test_written_zeroed_and_untouched_clusters_are_told_apart(overlay: Path) -> None:
    with open_overlay(overlay) as image:
        assert image.size_bytes == 2 << 40
        found = {n: c for table in image.tables for n, c in image.clusters(table).items()}
        last = (2 << 40) // BLOCK_BYTES
        assert sorted(found) == [
            0,
            1,
            16,
            17,
            (1 << 40) // BLOCK_BYTES,
            *range(last - 16, last),
        ]
        assert found[16] is None
        assert image.read(found[16]) == ZERO_BLOCK
        assert image.read(found[0]) == b"\1" * BLOCK_BYTES
        assert image.read(found[1]) == bytes(36 * KiB) + b"\2" * KiB + bytes(27 * KiB)
        assert image.read(found[last - 1]) == b"\4" * BLOCK_BYTES
        first = found[last - 16]
        assert first is not None
        assert image.read_run(first, 16) == [b"\4" * BLOCK_BYTES] * 16
        assert not image.is_empty()


def test_a_new_overlay_is_empty(tmp_path: Path) -> None:
    with open_overlay(make(tmp_path / "new.qcow2")) as image:
        assert image.is_empty()


@pytest.mark.parametrize("size_bytes", [BLOCK_BYTES, 3 * GiB + BLOCK_BYTES, TiB, 64 * TiB])
def test_an_overlay_that_we_make_is_as_good_as_one_of_qemu(
    tmp_path: Path, size_bytes: int
) -> None:
    ours, theirs = tmp_path / "ours.qcow2", make(tmp_path / "theirs", size=str(size_bytes))
    write_empty(ours, size_bytes)
    with open_overlay(ours) as image:
        assert image.is_empty()
        assert image.size_bytes == size_bytes
    facts = [
        json.loads(qemu_img("info", "--output=json", "-f", "qcow2", path))
        for path in (ours, theirs)
    ]
    for name in ("virtual-size", "cluster-size", "format-specific"):
        assert facts[0][name] == facts[1][name]

    last = size_bytes - BLOCK_BYTES
    for path in (ours, theirs):
        qemu_io(path, "write -P 1 0 64k", "discard 0 64k", f"write -P 2 {last} 64k")
        assert b"No errors" in qemu_img("check", "-f", "qcow2", path)
    assert qemu_img("compare", "-f", "qcow2", "-F", "qcow2", ours, theirs)
    with open_overlay(ours) as image:
        assert image.read(image.clusters(max(image.tables))[last // BLOCK_BYTES])[:1] == b"\2"


def test_an_overlay_never_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write_empty(path, GiB)
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize(
    "options",
    [
        ("-o", "compat=0.10"),
        ("-o", "cluster_size=4k"),
        ("-o", "extended_l2=on,cluster_size=64k"),
        ("-o", "data_file=DATA"),
        ("-b", "/etc/passwd", "-F", "raw"),
    ],
    ids=["version", "cluster", "subclusters", "data-file", "backing"],
)
def test_features_that_ours_never_have_are_refused(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    options = tuple(part.replace("DATA", str(tmp_path / "data")) for part in options)
    path = make(tmp_path / "odd.qcow2", *options, size="1G")
    with pytest.raises(Corrupt), open_overlay(path):
        pass


def test_encryption_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "odd.qcow2", size="1G")
    with path.open("r+b") as image:
        image.seek(32)  # crypt_method: 2 is LUKS
        image.write((2).to_bytes(4))
    with pytest.raises(Corrupt), open_overlay(path):
        pass


def test_internal_snapshots_are_refused(overlay: Path) -> None:
    subprocess.run(["qemu-img", "snapshot", "-c", "inner", overlay], check=True)
    with pytest.raises(Corrupt), open_overlay(overlay):
        pass


def test_compressed_clusters_are_refused(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_bytes(b"compress me" * 50_000 + bytes(-550_000 % 65536))
    packed = tmp_path / "packed.qcow2"
    subprocess.run(["qemu-img", "convert", "-c", "-O", "qcow2", raw, packed], check=True)
    with open_overlay(packed) as image, pytest.raises(Corrupt):
        image.clusters(0)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_a_damaged_overlay_gives_clusters_or_corrupt(
    overlay: Path, tmp_path: Path, data: st.DataObject
) -> None:
    good = overlay.read_bytes()
    body = bytearray(good[: 8 * BLOCK_BYTES])
    for _ in range(data.draw(st.integers(1, 5))):
        # The header, the L1 table and the first L2 tables, where damage can matter.
        at = data.draw(st.integers(0, 111) | st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.qcow2"
    damaged.write_bytes(body[: data.draw(st.integers(0, len(body)) | st.just(len(body)))])
    try:
        with open_overlay(damaged) as image:
            assert len(image.tables) <= 4 * MiB
            for table in list(image.tables)[:20]:
                for cluster in list(image.clusters(table).values())[:20]:
                    assert len(image.read(cluster)) == BLOCK_BYTES
    except Corrupt:
        pass
    finally:
        damaged.unlink()
