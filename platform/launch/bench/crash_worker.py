"""Workers in processes of their own, to be killed at named steps.

One process with everything imported forks a worker for each request: starting a Python with
boto3 for each would cost more than what is tried. A line of JSON on its input is a request,
one on its output says how its worker ended.

The head that a database would hold is a file that is moved by compare-and-swap: a publish
of an epoch that is over is refused, and one that was made from another root than the head.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any
from uuid import UUID

from common.errors import Refused, Unavailable
from hosts.volumes.commit import Commit
from hosts.volumes.disks import Disks, DisksConfig
from hosts.volumes.errors import HeadMoved
from hosts.volumes.failpoints import VARIABLE
from hosts.volumes.objects import StoreConfig
from hosts.volumes.store import S3ObjectStore

CHECKOUT = Path(__file__).resolve().parents[3]
CACHE_BYTES = 256 << 20
MEND_EVERY_S = 0.5
CUT_WITHIN_S = 5.0


class KeyOfItsNumber:
    """A `KeySource` that makes each volume's key from its id: nothing here is secret."""

    def keys_of(self, volumes: Collection[UUID]) -> Mapping[UUID, bytes | None]:
        return {volume: hashlib.sha256(volume.bytes).digest() for volume in volumes}


class StaleHead(Refused):
    """A later epoch has the volume."""

    code = "stale_head"


@dataclass(frozen=True)
class Head:
    """The head of a volume, in a file."""

    path: Path

    def read(self) -> tuple[int, str]:
        """Return the epoch and the key of the root."""
        epoch, root_key = json.loads(self.path.read_text())
        return epoch, root_key

    def make(self, root_key: str) -> None:
        self._write(0, root_key)

    def claim(self) -> int:
        """Begin the next epoch; return it."""
        with self._locked():
            epoch, root_key = self.read()
            self._write(epoch + 1, root_key)
            return epoch + 1

    def move(self, volume_id: UUID, epoch: int, commit: Commit) -> None:
        """Take a new root. Safe to repeat.

        Raises:
            StaleHead: another epoch has begun.
            HeadMoved: the commit was made from another root.
        """
        with self._locked():
            current, root_key = self.read()
            if current != epoch:
                raise StaleHead(f"Epoch {epoch} is over, {current} has begun.")
            if root_key not in (commit.base_root_key, commit.root_key):
                raise HeadMoved(volume_id, root_key)
            self._write(epoch, commit.root_key)

    def _write(self, epoch: int, root_key: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps([epoch, root_key]))
        new.replace(self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@dataclass(frozen=True)
class Site:
    """Where a worker finds a volume: one host's folders, the store, the head."""

    folder: str
    store: StoreConfig
    volume_id: str
    head: str
    epoch: int

    @property
    def disks_config(self) -> DisksConfig:
        return disks_config(Path(self.folder), self.store)


def disks_config(folder: Path, store: StoreConfig) -> DisksConfig:
    """Describe a host that lives in a folder."""
    return DisksConfig(
        run_dir=folder / "run",
        state_dir=folder / "state",
        store=store,
        cache_budget_bytes=CACHE_BYTES,
        keys=KeyOfItsNumber(),
        soon_share=0,
    )


@dataclass(frozen=True)
class Ended:
    """How a worker ended."""

    status: int
    """Its exit status; negative is the signal that killed it."""
    error: str
    """The class and text of what it raised; empty if it did not."""

    @property
    def is_good(self) -> bool:
        return self.status == 0

    def failed_with(self, *names: str) -> bool:
        return self.error.partition(":")[0] in names


class Workers:
    """The process that forks workers. One request at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "platform")])},
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, site: Site, operation: str, failpoints: str = "") -> None:
        """Begin an operation; `wait` tells how it ended."""
        request = [asdict(site), operation, failpoints]
        self._pipe(self._process.stdin).write(json.dumps(request) + "\n")
        self._pipe(self._process.stdin).flush()

    def wait(self) -> Ended:
        """Wait for the operation that was begun."""
        return Ended(*json.loads(self._pipe(self._process.stdout).readline()))

    def run(self, site: Site, operation: str, failpoints: str = "") -> Ended:
        """Carry out an operation in a new worker."""
        self.start(site, operation, failpoints)
        return self.wait()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def working() -> Iterator[Workers]:
    """Have workers for as long as they are needed."""
    workers = Workers()
    try:
        yield workers
    finally:
        workers.close()


def carry_out(site: Site, operation: str) -> None:
    """Do one operation on the site's volume."""
    disks = Disks(site.disks_config)
    volume_id = UUID(site.volume_id)
    head = Head(Path(site.head))

    def publish(commit: Commit) -> None:
        head.move(volume_id, site.epoch, commit)

    def publish_late(commit: Commit) -> None:
        _await_next_cut(disks, volume_id)
        publish(commit)

    if operation == "attach":
        disks.attach(volume_id, root_key=head.read()[1], epoch=site.epoch)
    elif operation == "checkpoint":
        disks.checkpoint(volume_id, publish)
    elif operation == "background":
        disks.checkpoint(volume_id, publish, background=True)
    elif operation == "ahead":
        disks.checkpoint(volume_id, publish_late, background=True)
    elif operation == "commit":
        disks.commit(volume_id, publish)
    elif operation == "detach":
        disks.detach(volume_id, discard=False)
    elif operation == "discard":
        disks.detach(volume_id, discard=True)
    else:
        raise ValueError(operation)


def _await_next_cut(disks: Disks, volume_id: UUID) -> None:
    """Wait until what was written since the last cut is cut too, if the guest writes."""
    deadline = time.monotonic() + CUT_WITHIN_S
    while time.monotonic() < deadline:
        frozen = [look.frozen for look in disks.look() if look.volume_id == volume_id]
        if not frozen or max(frozen) > 1:
            return
        time.sleep(0.01)


def mend(site: Site, *, within_s: float) -> str:
    """Start a disk's export again as soon as that can be; say what became of it."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            is_alive = Disks(site.disks_config).mend(UUID(site.volume_id))
        except Unavailable as error:
            if time.monotonic() > deadline:
                return f"{type(error).__name__}: {error}"
            time.sleep(MEND_EVERY_S)
        else:
            return "done" if is_alive else "the storage daemon does not run"


def serve() -> None:
    """Fork a worker for each request until the input ends."""
    warm = None
    for line in sys.stdin:
        values, operation, failpoints = json.loads(line)
        site = Site(**values | {"store": StoreConfig(**values["store"])})
        # The description of S3 is read once, not in every worker. It connects to nothing.
        warm = warm or S3ObjectStore(site.store)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            os.environ[VARIABLE] = failpoints
            os._exit(_in_worker(site, operation, write_end))
        os.close(write_end)
        with os.fdopen(read_end) as told:
            error = told.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _answer([status, error])


def _in_worker(site: Site, operation: str, write_end: int) -> int:
    try:
        carry_out(site, operation)
    except BaseException as error:
        if os.environ.get("CRASH_TRACE"):
            traceback.print_exc()
        os.write(write_end, f"{type(error).__name__}: {error}".encode()[:4000])
        return 1
    return 0


def _answer(values: list[Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
