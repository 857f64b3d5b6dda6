"""The process that takes an image in: it ends in time, and leaves nothing behind."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest

from common.units import GiB, MiB, TiB
from hosts.image_exports import LEFT_OVER_S, ExportsConfig, ImageExports
from hosts.volumes.image_intake import TOO_MUCH_WORK, TOO_SLOW, IntakeConfig
from hosts.volumes.objects import StoreConfig
from tests.fakes.guest_link import wait_until
from tests.hosts.volumes.test_foreign_image import bomb, raw

__all__ = ["raw"]

ID = UUID(int=7)
STORE = StoreConfig("http://127.0.0.1:1", "b", "a", "s")
LIMITS = IntakeConfig(file_bytes=GiB, device_bytes=TiB, data_bytes=TiB)


@pytest.fixture
def exports(tmp_path: Path) -> Iterator[ImageExports]:
    exports = ImageExports(ExportsConfig(tmp_path / "images", tmp_path / "intake", STORE))
    yield exports
    for process in exports._running.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def endless(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An image that takes minutes to unpack."""
    return bomb(raw, tmp_path_factory.mktemp("bomb") / "image", zeros=100_000).read_bytes()


def left(exports: ImageExports) -> list[str]:
    folder = exports._config.intake_dir
    return sorted(path.suffix for path in folder.iterdir())


@contextmanager
def begun(exports: ImageExports) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """Have a process take an image in, and connect to it."""
    exports.take_in(ID, LIMITS)
    with connected(exports._config.images_dir / f"{ID.hex}.sock") as connection:
        yield exports._running[ID], connection


@contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        until = time.monotonic() + 60
        while connection.connect_ex(str(path)):
            assert time.monotonic() < until
            time.sleep(0.05)
        yield connection


@contextmanager
def unpacking(
    exports: ImageExports, image: bytes
) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    with begun(exports) as (process, connection):
        connection.sendall(b"%d\n" % len(image) + image)
        wait_until(lambda: ".raw" in left(exports), timeout_s=60)
        yield process, connection


def answer(connection: socket.socket) -> str:
    with connection.makefile() as file:
        return file.readline()


def test_it_ends_when_its_sender_has_gone(exports: ImageExports, endless: bytes) -> None:
    with unpacking(exports, endless) as (process, _):
        pass

    assert process.wait(timeout=20) == 0
    assert left(exports) == []


def test_it_may_use_as_much_of_a_cpu_as_its_length_is_worth(
    exports: ImageExports, endless: bytes
) -> None:
    with unpacking(exports, endless) as (process, connection):
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_CPU)
        assert 0 < soft < hard < 120
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (1, hard))

        assert answer(connection) == f"error {TOO_MUCH_WORK}\n"
    process.wait(timeout=20)
    assert left(exports) == []


@pytest.mark.parametrize(
    ("spans", "says"),
    [("ARRIVAL_S = 1", TOO_SLOW), ("UNPACK_S = 1", TOO_MUCH_WORK)],
)
def test_it_waits_for_no_image_and_works_on_none_for_ever(
    tmp_path: Path, endless: bytes, spans: str, says: str
) -> None:
    code = (
        "from hosts.volumes import image_intake as intake\n"
        f"intake.{spans}; intake.ARRIVAL_BYTES_PER_S = 1 << 40; intake.main()"
    )
    path, folder = tmp_path / "socket", tmp_path / "intake"
    folder.mkdir()
    command = [sys.executable, "-c", code, str(path), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    with process, process.stdin as stdin:
        stdin.write(LIMITS.text())
        stdin.close()
        with connected(path) as connection:
            image = b"" if says == TOO_SLOW else endless
            connection.sendall(b"%d\n" % len(endless) + image)

            assert answer(connection) == f"error {says}\n"
        assert process.wait(timeout=20) == 0
    assert not list(folder.iterdir())


def test_one_that_is_told_to_end_leaves_nothing(exports: ImageExports, endless: bytes) -> None:
    with unpacking(exports, endless) as (process, _):
        process.terminate()
        assert process.wait(timeout=20) == 1
    assert left(exports) == []


def test_what_a_killed_one_left_is_found_and_what_a_living_one_has_is_not(
    exports: ImageExports, endless: bytes
) -> None:
    with unpacking(exports, endless) as (process, _):
        process.send_signal(signal.SIGSTOP)
        for path in exports._config.intake_dir.iterdir():
            os.utime(path, (0, 0))
        assert exports.left_over() == []

        process.kill()
        process.wait()

    found = exports.left_over()
    assert [(identity, path.suffix) for identity, path in found] == [
        (ID, ".part"),
        (ID, ".raw"),
    ]
    fresh = time.time() - LEFT_OVER_S / 2
    for _, path in found:
        os.utime(path, (fresh, fresh))
    assert exports.left_over() == []


def test_an_image_that_was_taken_in_is_new(exports: ImageExports, raw: Path) -> None:
    content = raw.read_bytes()
    with begun(exports) as (process, connection):
        connection.sendall(b"%d\n" % len(content) + content)
        assert answer(connection) == f"ok {64 * MiB}\n"
    process.wait(timeout=20)
    assert left(exports) == [".raw"]
    assert exports.taken(ID).stat().st_mtime > time.time() - 60
    assert exports.taken(ID).read_bytes() == content
