"""What the benches of volumes stand on: a host in a folder, volumes, images, load.

It runs the engine itself in this process, on a corner of the platform's object store, so
that nothing but the engine is measured: no guest, no database, no web.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID, uuid4

from common.units import KiB, MiB
from hosts.volumes.commit import Commit, import_image
from hosts.volumes.daemons import daemon_pid
from hosts.volumes.disks import Disks, DisksConfig
from hosts.volumes.keys import Keyring
from hosts.volumes.objects import StoreConfig
from hosts.volumes.store import S3ObjectStore
from launch.bench.crash_worker import KeyOfItsNumber
from launch.progress import LaunchFailed

CACHE_BYTES = 8192 * MiB
SCATTER_BYTES = 17 * 64 * KiB + 4 * KiB
"""From one small request to the next: each in another block, none next to the last."""

DEPTH = 16
LOAD_TIMEOUT_S = 600
_COMPLETED = re.compile(r"Run completed in ([0-9.]+) seconds")
_COMPRESSIBLE = 24 * KiB
"""Of each 64 KiB that is written, this much is text; the rest is noise."""


@dataclass(frozen=True)
class Scale:
    """How much is measured: enough for figures, or just enough to see that it works."""

    data_bytes: int
    """Of an image that is read and written."""
    rounds: int
    seconds: float
    """How long a writer writes."""
    requests: int
    """Small requests of one measurement."""
    retained_gib: tuple[int, ...]


FULL = Scale(256 * MiB, 3, 10, 4000, (1, 10, 100))
QUICK = Scale(16 * MiB, 1, 1, 100, (1, 2))


@dataclass
class Volume:
    """A volume, its head, and the host that it is on."""

    host: "Host"
    head: str
    volume_id: UUID = field(default_factory=uuid4)
    epoch: int = 0
    commits: list[Commit] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.host.folder / "run/disks" / self.volume_id.hex / "disk.sock"

    def attach(self) -> None:
        """Begin a new epoch here."""
        self.epoch += 1
        self.host.disks.attach(self.volume_id, root_key=self.head, epoch=self.epoch)

    def publish(self, commit: Commit) -> None:
        self.head = commit.root_key
        self.commits.append(commit)

    def discard(self) -> None:
        """Forget it and what was written since its last commit."""
        self.host.disks.detach(self.volume_id, discard=True)

    def pids(self) -> dict[str, int]:
        """Find the processes that serve it."""
        folder = self.socket.parent
        found = {name: daemon_pid(folder / f"{name}.pid") for name in ("export", "daemon")}
        return {name: pid for name, pid in found.items() if pid is not None}


class Host:
    """A host that lives in a folder."""

    def __init__(self, folder: Path, store: StoreConfig, **more: Any) -> None:
        self.folder = folder
        self.store = store
        self.objects = S3ObjectStore(store)
        self.disks = Disks(
            DisksConfig(
                run_dir=folder / "run",
                state_dir=folder / "state",
                store=store,
                cache_budget_bytes=CACHE_BYTES,
                keys=KeyOfItsNumber(),
                **more,
            )
        )

    def volume(self, head: str) -> Volume:
        return Volume(self, head)

    def import_image(self, image: Path, size_bytes: int) -> str:
        """Make a first generation; return the key of its root."""
        commit = import_image(
            image,
            volume_id=uuid4(),
            store=self.objects,
            size_bytes=size_bytes,
            keyring=Keyring(KeyOfItsNumber()),
        )
        return commit.root_key

    def empty_cache(self) -> None:
        for path in (self.disks.config.cache_dir / "packs").iterdir():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        for disk in self.disks.attached():
            self.disks.detach(disk.volume_id, discard=True)


@contextmanager
def host(folder: Path, store: StoreConfig, name: str = "h", **more: Any) -> Iterator[Host]:
    """Have a host for a while; nothing of it is left."""
    path = folder / name
    path.mkdir()
    one = Host(path, store, **more)
    try:
        yield one
    finally:
        one.close()
        shutil.rmtree(path)


# -- data ----------------------------------------------------------------------------------


def data(size_bytes: int, seed: int = 0) -> bytes:
    """Make data that compresses as files do: by a third or so."""
    random = Random(seed)  # noqa: S311 - not a secret
    blocks = []
    for number in range(-(-size_bytes // (64 * KiB))):
        text = f"line {seed} {number} of a file that compresses\n".encode()
        blocks.append(random.randbytes(64 * KiB - _COMPRESSIBLE))
        blocks.append((text * (_COMPRESSIBLE // len(text) + 1))[:_COMPRESSIBLE])
    return b"".join(blocks)[:size_bytes]


def make_image(path: Path, size_bytes: int) -> Path:
    """Write an image full of data."""
    with path.open("wb") as file:
        for number in range(0, size_bytes, 8 * MiB):
            file.write(data(min(8 * MiB, size_bytes - number), seed=number // MiB))
    return path


# -- load ----------------------------------------------------------------------------------


@contextmanager
def plain_disk(folder: Path, image: Path) -> Iterator[Path]:
    """Serve a plain local qcow2 by the storage daemon; give its socket."""
    disk, socket = folder / "plain.qcow2", folder / "plain.sock"
    convert = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=64k"]
    subprocess.run([*convert, "-S", "0", str(image), str(disk)], check=True)
    node = {
        "driver": "qcow2",
        "node-name": "disk",
        "discard": "unmap",
        "file": {
            "driver": "file",
            "filename": str(disk),
            "cache": {"direct": True},
            "aio": "native",
            "discard": "unmap",
        },
    }
    export = {"type": "nbd", "id": "e", "node-name": "disk", "name": "disk", "writable": True}
    command = ["qemu-storage-daemon", "--blockdev", json.dumps(node)]
    command += ["--nbd-server", f"addr.type=unix,addr.path={socket}"]
    command += ["--export", json.dumps(export)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as daemon:
        try:
            await_path(socket)
            yield socket
        finally:
            daemon.terminate()
    disk.unlink()
    with suppress(FileNotFoundError):
        socket.unlink()


def await_path(path: Path) -> None:
    """Wait until there is something under a path, such as a server's socket."""
    deadline = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > deadline:
            raise LaunchFailed(f"{path} did not appear.")
        time.sleep(0.01)


def drive(
    socket: Path,
    *,
    size_bytes: int,
    count: int,
    step_bytes: int = 0,
    writes: bool = False,
    export: str = "disk",
) -> float:
    """Send requests through a socket with `qemu-img bench`; return how many a second."""
    command = ["qemu-img", "bench", "-f", "raw", "-t", "none", "-d", str(DEPTH)]
    command += ["-c", str(count), "-s", str(size_bytes), "-S", str(step_bytes or size_bytes)]
    command += ["-w", "--pattern=90"] if writes else []
    done = subprocess.run(
        [*command, f"nbd+unix:///{export}?socket={socket}"],
        capture_output=True,
        text=True,
        timeout=LOAD_TIMEOUT_S,
        check=False,
    )
    completed = _COMPLETED.search(done.stdout)
    if done.returncode or completed is None:
        raise LaunchFailed(f"qemu-img bench failed: {done.stderr or done.stdout}")
    return count / float(completed[1])


def timed(act: Callable[[], object]) -> float:
    """Return how many seconds something takes."""
    started = time.monotonic()
    act()
    return time.monotonic() - started


class Used:
    """The CPU that this process uses from now on."""

    def __init__(self) -> None:
        self._before_s = time.process_time()

    def cpu_s(self) -> float:
        return time.process_time() - self._before_s


class Samples:
    """What was measured, by name; medians of it."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(value)

    def __getitem__(self, name: str) -> float:
        return statistics.median(self._values[name])

    def most(self, name: str) -> float:
        return max(self._values[name])


def memory_bytes(pid: int) -> int:
    """Return a process's share of memory: what it shares counts in parts (PSS)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * KiB
    raise LaunchFailed(f"The kernel does not tell the memory of process {pid}.")


def cpu_s(pid: int) -> float:
    """Return how much CPU a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
