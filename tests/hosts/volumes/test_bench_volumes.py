"""Every part of `bin/bench volumes` works, on as little as there can be."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.units import MiB
from hosts.volumes.objects import StoreConfig
from launch.bench.figures import table
from launch.bench.rig import Scale
from launch.bench.volumes import PARTS, volumes
from tests.hosts.machine import need, wait_for

TINY = Scale(data_bytes=4 * MiB, rounds=1, seconds=0.8, requests=20, retained_gib=(1, 2))


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the parts' own, which the daemons' user may pass through."""
    # Not `tmp_path`: with the test's name in it a socket's path would be too long.
    path = Path(tempfile.mkdtemp(prefix="b-"))
    path.chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_gives_figures_above_nothing(
    s3: StoreConfig, temporary: Path, part: str
) -> None:
    if part == "open":
        need(met=os.geteuid() == 0 and Path("/dev/fuse").exists(), what="root and /dev/fuse")

    figures = list(volumes(s3, [part], TINY))

    assert figures
    assert len({figure.name for figure in figures}) == len(figures)
    for figure in figures:
        assert figure.value > 0 or "idle" in figure.name or "gets" in figure.name, figure
        assert figure.baseline is None or figure.baseline > 0, figure
    assert table(figures)
    assert not list(temporary.iterdir())
    assert str(temporary) not in Path("/proc/self/mounts").read_text()
    assert wait_for(lambda: not processes_of(temporary), timeout_s=5)


def processes_of(folder: Path) -> list[str]:
    """List the processes that have a path below the folder on their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if os.fsencode(f"{folder}/") in line:
            found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found
