"""How many requests of a FUSE mount may wait: on real mounts, as the kernel counts them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hosts import fuse_limits
from tests.hosts.machine import needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_root


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    image, top = tmp_path / "image", tmp_path / "mnt"
    top.mkdir()
    subprocess.run(["mke2fs", "-q", "-t", "ext4", image, "8M"], check=True)
    with subprocess.Popen(["/usr/bin/fuse2fs", image, top, "-f"], stdout=subprocess.DEVNULL):
        while not os.path.ismount(top):
            time.sleep(0.005)
        yield top
        subprocess.run(["umount", top], check=True)


def limit_of(mounted: Path) -> int:
    directory = fuse_limits._connections()
    name = f"{os.minor(mounted.stat().st_dev)}/max_background"
    with open(name, opener=lambda path, flags: os.open(path, flags, dir_fd=directory)) as file:
        limit = int(file.read())
    os.close(directory)
    return limit


def held() -> tuple[int, str]:
    return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/mountinfo").read_text()


def test_the_limit_of_one_mount_is_raised(mounted: Path) -> None:
    before = limit_of(mounted)

    fuse_limits.let_wait(os.getpid(), str(mounted), 4_321)

    assert (before, limit_of(mounted)) == (12, 4_321)


def test_nothing_is_left_open_or_mounted(mounted: Path) -> None:
    before = held()

    for _ in range(3):
        fuse_limits.let_wait(os.getpid(), str(mounted), 100)

    assert held() == before


def test_what_is_no_fuse_mount_is_an_error(tmp_path: Path) -> None:
    for place in (str(tmp_path), "/", "/nowhere"):
        with pytest.raises(OSError, match=r"No such file|no mount"):
            fuse_limits.let_wait(os.getpid(), place, 100)
