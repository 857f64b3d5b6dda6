"""A host with real daemons on a real store, in folders with short names."""

import json
import mmap
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from common.units import MiB
from hosts.volumes.commit import Commit, import_image
from hosts.volumes.daemons import await_end
from hosts.volumes.disks import Disks, DisksConfig
from hosts.volumes.errors import HeadMoved
from hosts.volumes.keys import Keyring
from hosts.volumes.objects import StoreConfig
from hosts.volumes.store import S3ObjectStore
from tests.hosts.volumes.given_keys import KeyForEach
from tests.hosts.volumes.nbd import Nbd
from tests.hosts.volumes.worker import Workers
from tests.s3 import s3, s3_server

__all__ = ["s3", "s3_server"]

DEVICE_BYTES = 1024 * MiB
IMAGE_BYTES = 24 * MiB


class Host:
    """A host's disks, one volume, and the head that a database would hold."""

    def __init__(self, folder: Path, store: StoreConfig) -> None:
        self.folder = folder
        self.volume_id: UUID = uuid4()
        self.head_file = folder / "head"
        self.config = DisksConfig(
            run_dir=folder / "run",
            state_dir=folder / "state",
            store=store,
            cache_budget_bytes=256 * MiB,
            keys=KeyForEach(),
        )
        self.disks = Disks(self.config)
        self.store = S3ObjectStore(store)
        # Anonymous memory: what is never written is zeros and takes none.
        self.expected = mmap.mmap(-1, DEVICE_BYTES)
        self._touched = set(range(0, DEVICE_BYTES // MiB, 97)) | set(range(IMAGE_BYTES // MiB))

    @property
    def head(self) -> str:
        return self.head_file.read_text()

    def publish(self, commit: Commit) -> None:
        """Move the head as the database does: only from what the commit was made from."""
        head = self.head if self.head_file.exists() else None
        if head not in (commit.base_root_key, commit.root_key):
            raise HeadMoved(self.volume_id, head)
        new = self.head_file.with_suffix(".new")
        new.write_text(commit.root_key)
        new.replace(self.head_file)

    def import_base(self) -> Commit:
        """Make the first generation: random data, a hole, and zeros that are written."""
        image = self.folder / "image"
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
            for at in (0, 9 * MiB):
                data = os.urandom(3 * MiB) + b"text " * (MiB // 5)
                file.seek(at)
                file.write(data)
                self.expected[at : at + len(data)] = data
            file.seek(20 * MiB)
            file.write(bytes(MiB))
        commit = import_image(
            image,
            volume_id=uuid4(),
            store=self.store,
            size_bytes=DEVICE_BYTES,
            keyring=Keyring(KeyForEach()),
        )
        self.head_file.write_text(commit.root_key)
        return commit

    def attach(self, epoch: int = 1) -> Nbd:
        disk = self.disks.attach(self.volume_id, root_key=self.head, epoch=epoch)
        return Nbd(disk.socket)

    def write(self, guest: Nbd, offset: int, data: bytes) -> None:
        guest.write(offset, data)
        self.expect(offset, data)

    def expect(self, offset: int, data: bytes) -> None:
        self.expected[offset : offset + len(data)] = data
        self._touched.update(range(offset // MiB, (offset + len(data) - 1) // MiB + 1))

    def check(self, guest: Nbd) -> None:
        """Compare the device with what was written, and samples of where nothing was."""
        for number in sorted(self._touched):
            at = number * MiB
            assert guest.read(at, MiB) == self.expected[at : at + MiB], f"near {at}"

    def empty_cache(self) -> None:
        for path in (self.config.cache_dir / "packs").iterdir():
            path.unlink()

    def write_config(self, epoch: int) -> Path:
        """Write what a worker in a process of its own needs."""
        path = self.folder / "worker.json"
        values = {
            "run_dir": str(self.config.run_dir),
            "state_dir": str(self.config.state_dir),
            "store": asdict(self.config.store),
            "cache_budget_bytes": self.config.cache_budget_bytes,
            "volume_id": self.volume_id.hex,
            "head_file": str(self.head_file),
            "epoch": epoch,
        }
        path.write_text(json.dumps(values))
        return path

    def kill_daemons(self, kind: str = "*") -> None:
        """End what serves the disks, as a crash of the host would, or one kind of it."""
        for pidfile in (self.config.run_dir / "disks").glob(f"*/{kind}.pid"):
            with suppress(ProcessLookupError, ValueError):
                process = os.pidfd_open(int(pidfile.read_text()))
                signal.pidfd_send_signal(process, signal.SIGKILL)
                assert await_end(process, 30)
                os.close(process)

    def lose(self) -> None:
        """Go on as another host, with nothing of this one but what is in the store."""
        self.kill_daemons()
        shutil.rmtree(self.config.run_dir)
        shutil.rmtree(self.config.state_dir)
        self.disks = Disks(self.config)

    def overlay_files(self) -> list[Path]:
        folder = self.config.state_dir / "overlays" / self.volume_id.hex
        return sorted(folder.glob("overlay-*"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder short enough for the path of a UNIX socket."""
    path = Path(tempfile.mkdtemp(prefix="vol-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def host(folder: Path, s3: StoreConfig) -> Iterator[Host]:
    host = Host(folder, s3)
    yield host
    host.disks.cool()
    host.kill_daemons()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()
