"""The crash test: a disk is written while what serves and commits it is killed.

A run is one crash, the recovery from it, and a look at every sector that was ever written.
Several runs make a life: what one crash leaves behind is there at the next. After each,
depending on what was lost,

    a worker, nbdkit, QEMU   nothing: the device holds every write that was answered
    the storage daemon       every sector is as new as the last flush, or newer
    the host with its disk   the device is as it was at one instant, no earlier than that of
                             the last commit that was acknowledged; and the host that was
                             thought dead cannot move the head any more

see `stamps`. A life is made from its seed alone, though not to the microsecond.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from uuid import uuid4

from hosts.volumes.commit import import_image
from hosts.volumes.daemons import await_end
from hosts.volumes.failpoints import NAMES
from hosts.volumes.keys import Keyring
from hosts.volumes.objects import StoreConfig
from hosts.volumes.store import S3ObjectStore
from launch.bench.crash_worker import (
    Ended,
    Head,
    KeyOfItsNumber,
    Site,
    Workers,
    mend,
    working,
)
from launch.bench.crash_writer import AREA_BYTES, AREAS, DEVICE_BYTES, Writer, reader_of
from launch.bench.figures import Figure
from launch.bench.nbd import Nbd
from launch.bench.s3_proxy import Faults, faulty
from launch.bench.stamps import SECTOR_BYTES, Inconsistent, Ledger, stamps
from launch.progress import LaunchFailed, say

BENCH = "crash"
RUNS_IN_A_LIFE = 5
RETRY_S = 120
RETRIED = ("StoreUnavailable", "DaemonFailed", "DiskBusy")
"""What the platform's actors try again."""

_KILL_WITHIN_S = 0.25
_PATIENCE_S = 90

CHECKPOINT, COMMIT, ATTACH, DETACH = "checkpoint", "commit", "attach", "detach"
BACKGROUND = "background"
AHEAD = "ahead"
"""In the background, with the next commit prepared before the first is published."""
RUNNING = (CHECKPOINT, AHEAD)
WRITER, EXPORT, DAEMON = "writer", "export", "daemon"
CHECKED_WELL, CHECKED_LEAKS = 0, 3
"""Of `qemu-img check`."""
SETTLE_S = 0.3
"""What a storage daemon takes to carry out what a client sent before it died."""


class Broken(Exception):
    """A run ended otherwise than it must."""


@dataclass(frozen=True)
class Crash:
    """What is killed, when, and what is lost with it."""

    name: str
    operation: str
    """What the worker is doing."""
    failpoint: str = ""
    """The step at which the worker dies; without one it lives, and daemons die at random."""
    kills: tuple[str, ...] = ()
    """The daemons that die: with the worker, or at a random moment of its operation."""
    loses_host: bool = False


def crashes() -> list[Crash]:
    """List every crash that is tried."""
    found = [
        Crash("QEMU", CHECKPOINT, kills=(WRITER,)),
        Crash("nbdkit", CHECKPOINT, kills=(EXPORT,)),
        Crash("storage daemon", CHECKPOINT, kills=(DAEMON,)),
        Crash("host", CHECKPOINT, kills=(EXPORT, DAEMON)),
        Crash("host lost", CHECKPOINT, kills=(EXPORT, DAEMON), loses_host=True),
    ]
    for name in NAMES:
        for operation in _operations(name):
            found.append(Crash(f"{name} ({operation})", operation, name))
            if operation in RUNNING:
                found.append(
                    Crash(
                        f"{name} ({operation}, host)", operation, name, kills=(EXPORT, DAEMON)
                    )
                )
            if operation != DETACH:
                lost = Crash(
                    f"{name} ({operation}, host lost)",
                    operation,
                    name,
                    kills=(EXPORT, DAEMON),
                    loses_host=True,
                )
                found.append(lost)
    return found


OPERATIONS = {
    "attach": (ATTACH,),
    "rotate": (CHECKPOINT,),
    "ahead": (AHEAD,),
    "commit": (CHECKPOINT, COMMIT),
    "commit.stopped": (COMMIT,),
    "commit.settled": (COMMIT,),
    "publish": (*RUNNING, COMMIT),
    "fold": RUNNING,
    "drop": RUNNING,
    "detach": (DETACH,),
}
"""Which operations go through a failpoint, by its name or what that begins with."""


def _operations(failpoint: str) -> tuple[str, ...]:
    of_its_kind = OPERATIONS.get(failpoint.partition(".")[0], ())
    return OPERATIONS.get(failpoint, of_its_kind)


@dataclass(frozen=True)
class Base:
    """The first generation of every volume that is tried."""

    root_key: str


def make_base(store: StoreConfig) -> Base:
    """Stamp the first half of every area but the last, and put that into the store."""
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        image = Path(folder) / "image"
        with image.open("wb") as file:
            for first, count in _base_sectors():
                file.seek(first * SECTOR_BYTES)
                file.write(stamps(first, count, 0))
        commit = import_image(
            image,
            volume_id=uuid4(),
            store=S3ObjectStore(store),
            size_bytes=DEVICE_BYTES,
            keyring=Keyring(KeyOfItsNumber()),
        )
    return Base(commit.root_key)


def _base_sectors() -> Iterator[tuple[int, int]]:
    for area in AREAS[:-1]:
        yield area // SECTOR_BYTES, AREA_BYTES // 2 // SECTOR_BYTES


@dataclass(frozen=True)
class World:
    """What all lives share."""

    store: StoreConfig
    workers: Workers
    base: Base


@dataclass
class Life:
    """One volume, and the hosts that it has been on."""

    world: World
    seed: int
    folder: Path
    ledger: Ledger = field(default_factory=Ledger)
    acknowledged: int = 0
    """The instant at which the last acknowledged commit was asked for."""
    writer: Writer | None = None
    epoch: int = 0
    hosts: int = 0
    moves: list[str] = field(default_factory=list)
    """What was done, for whoever must find out what went wrong."""

    def __post_init__(self) -> None:
        self.random = Random(self.seed)  # noqa: S311 - it must give the same again
        self.volume_id = uuid4().hex
        self.head = Head(self.folder / "head")
        self.head.make(self.world.base.root_key)
        for first, count in _base_sectors():
            self.ledger.begin_with(first, count)

    # -- hosts and workers ----------------------------------------------------------------

    @property
    def host(self) -> Path:
        return self.folder / f"h{self.hosts}"

    @property
    def site(self) -> Site:
        return Site(
            str(self.host), self.world.store, self.volume_id, str(self.head.path), self.epoch
        )

    @property
    def socket(self) -> Path:
        return self.host / "run/disks" / self.volume_id / "disk.sock"

    def work(self, operation: str, site: Site | None = None) -> Ended:
        """Carry out an operation, again for as long as that may help."""
        deadline = time.monotonic() + RETRY_S
        while True:
            ended = self.world.workers.run(site or self.site, operation)
            self.moves.append(f"{operation}: {ended.error or 'done'}")
            if not ended.failed_with(*RETRIED) or time.monotonic() > deadline:
                return ended
            time.sleep(0.1)

    def must(self, operation: str) -> None:
        """Carry out an operation that nothing hinders."""
        ended = self.work(self._kind_of(operation))
        if not ended.is_good:
            raise Broken(f"{operation} ended with {ended.status}: {ended.error}")

    def _kind_of(self, operation: str) -> str:
        """Commit a running disk by turns as for a snapshot and as in the background."""
        if operation == CHECKPOINT and self.random.random() < 0.5:  # noqa: PLR2004
            return BACKGROUND
        return operation

    def attach(self) -> None:
        """Attach in a new epoch."""
        self.epoch = self.head.claim()
        self.must(ATTACH)

    def commit_now(self) -> None:
        """Commit in the background; what was answered before this call is then safe."""
        asked_at = self.ledger.position
        self.must(CHECKPOINT)
        self.acknowledge(asked_at)

    def acknowledge(self, asked_at: int) -> None:
        self.acknowledged = asked_at
        self.ledger.flushed(asked_at)

    def put_away(self) -> None:
        """Commit a disk that nobody writes to any more."""
        self.stop_writer()
        self.must(COMMIT)
        self.acknowledge(self.ledger.position)

    # -- the writer -----------------------------------------------------------------------

    def write(self, least: int, most: int) -> None:
        """Have some writes sent."""
        if self.writer is None:
            self.writer = Writer(self.socket, self.ledger, Random(self.random.random()))  # noqa: S311
        if not self.writer.await_writes(self.random.randint(least, most), _PATIENCE_S):
            raise Broken(f"the writer stands still: {self.writer.error}")

    def stop_writer(self, *, is_cut_off: bool = False) -> None:
        if self.writer is None:
            return
        self.writer.stop()
        error, self.writer = self.writer.error, None
        if error is not None and not is_cut_off:
            raise Broken(f"the writer got an error: {error}")

    def _cut_writer_off(self) -> None:
        """Let the writer die with requests in flight, as QEMU does."""
        if self.writer is not None:
            self.writer.cut_off()
            self.stop_writer(is_cut_off=True)
            time.sleep(SETTLE_S)

    # -- looking --------------------------------------------------------------------------

    @contextmanager
    def device(self) -> Iterator[Callable[[int], bytes]]:
        with Nbd(self.socket) as nbd:
            yield reader_of(nbd, self.ledger)

    def check_all(self) -> None:
        """Nothing that was answered is missing."""
        self.stop_writer()
        with self.device() as read:
            self.ledger.check_instant(read, since=self.ledger.position)

    # -- one run --------------------------------------------------------------------------

    def run(self, crash: Crash) -> None:
        """Crash once, recover, look."""
        self.moves.append(f"── {crash.name}")
        self._prepare(crash)
        ended = self._crash(crash)
        if crash.failpoint and ended.status != -signal.SIGKILL:
            raise Broken(f"{crash.failpoint} was not reached: {ended}")
        if not crash.failpoint and not ended.is_good and not crash.kills:
            raise Broken(f"{crash.operation} failed: {ended.error}")
        if crash.loses_host:
            self._recover_elsewhere(crash)
        elif DAEMON in crash.kills:
            self._recover_daemon()
        else:
            self._recover_worker(crash)

    def _prepare(self, crash: Crash) -> None:
        """Bring the disk to where the operation can be begun."""
        if crash.operation == ATTACH:
            self.put_away()
            self.must(DETACH)
            self.epoch = self.head.claim()
            return
        self.write(10, 60)
        if self.random.random() < 0.5:  # noqa: PLR2004 - every other time
            self.commit_now()
            self.write(10, 60)
        if crash.operation == DETACH:
            self.put_away()
        elif crash.operation == COMMIT:
            self.stop_writer()

    def _crash(self, crash: Crash) -> Ended:
        asked_at = self.ledger.position
        if crash.failpoint:
            ended = self._crash_at(crash)
        else:
            self.world.workers.start(self.site, self._kind_of(crash.operation))
            time.sleep(self.random.random() * _KILL_WITHIN_S)
            self._kill(crash.kills)
            with self._looked_after(crash):
                ended = self.world.workers.wait()
            self.moves.append(f"{crash.operation} was told: {ended.error or 'done'}")
        if ended.is_good and crash.operation == CHECKPOINT:
            self.acknowledge(asked_at)
        return ended

    @contextmanager
    def _looked_after(self, crash: Crash) -> Iterator[None]:
        """Start an export again that died alone, as a host's keeper does beside all work."""
        if crash.kills != (EXPORT,):
            yield
            return
        with ThreadPoolExecutor(1) as pool:
            mended = pool.submit(mend, self.site, within_s=RETRY_S)
            yield
            self.moves.append(f"mend: {mended.result()}")

    def _crash_at(self, crash: Crash) -> Ended:
        """Have the worker die at a step; a failing store may end it before it gets there."""
        deadline = time.monotonic() + RETRY_S
        while True:
            ended = self.world.workers.run(
                self.site, crash.operation, f"{crash.failpoint}=kill"
            )
            if not ended.failed_with(*RETRIED) or time.monotonic() > deadline:
                break
            self.moves.append(f"{crash.operation} was told: {ended.error}")
        if crash.kills and self.writer is not None and self.random.random() < 0.5:  # noqa: PLR2004
            # The guest did not notice that the worker died, and went on for a while.
            self.writer.await_writes(self.random.randint(1, 30), within_s=2)
        self._kill(crash.kills)
        return ended

    def _kill(self, which: Sequence[str]) -> None:
        for name in which:
            if name == WRITER:
                self._cut_writer_off()
                continue
            pidfile = self.socket.with_name(f"{name}.pid")
            with suppress(FileNotFoundError, ProcessLookupError, ValueError):
                process = os.pidfd_open(int(pidfile.read_text()))
                signal.pidfd_send_signal(process, signal.SIGKILL)
                await_end(process, 30)
                os.close(process)

    def _recover_worker(self, crash: Crash) -> None:
        """The guest goes on; whoever comes next finishes what was begun."""
        if crash.operation in RUNNING and self.random.random() < 0.3:  # noqa: PLR2004
            # It is put to sleep instead.
            self.put_away()
            self.attach()
        elif crash.operation in RUNNING:
            if crash.kills:
                self.must(ATTACH)
            self.write(5, 30)
            self.commit_now()
        elif crash.operation == DETACH or (
            crash.operation == COMMIT and self.random.random() < 0.5  # noqa: PLR2004
        ):
            # Put away after all, and woken: by turns here and on another host.
            self.must(COMMIT) if crash.operation == COMMIT else None
            self.must(DETACH)
            self.acknowledge(self.ledger.position)
            self.hosts += self.random.randrange(2)
            self.attach()
        else:
            self.must(ATTACH)
        self.check_all()

    def _recover_daemon(self) -> None:
        """What was in the daemon's memory may be gone, what was flushed may not."""
        self.stop_writer(is_cut_off=True)
        self._check_overlays()
        self.must(ATTACH)
        with self.device() as read:
            self.ledger.check_kept(read)
            self.ledger.settle(read)

    def _check_overlays(self) -> None:
        """No two places share a cluster, and none is free that is in use; leaks are no harm."""
        for path in sorted((self.host / "state/overlays" / self.volume_id).glob("overlay-*")):
            command = ["qemu-img", "check", "-f", "qcow2", "--output", "json", str(path)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode not in (CHECKED_WELL, CHECKED_LEAKS):
                raise Broken(f"{path.name} is not whole: {done.stdout} {done.stderr}")

    def _recover_elsewhere(self, crash: Crash) -> None:
        self.stop_writer(is_cut_off=True)
        old = self.site
        self.hosts += 1
        self.attach()
        with self.device() as read:
            self.ledger.check_instant(read, since=self.acknowledged)
            self.ledger.settle(read)
        self.acknowledged = self.ledger.position
        self._refuse_late(old)
        shutil.rmtree(old.folder)

    def _refuse_late(self, old: Site) -> None:
        """The host that was thought dead wakes up, and wants to publish what it has."""
        before = self.head.read()
        ended = self.work(COMMIT, old)
        if not ended.is_good and not ended.failed_with("StaleHead", "NotAttached"):
            raise Broken(f"a late commit failed with {ended.error}")
        if self.head.read() != before:
            raise Broken("a host that was thought dead moved the head")
        _kill_all(Path(old.folder))

    def end(self) -> None:
        """Put the disk away, and read it all back where there is nothing of it."""
        self.put_away()
        self.must(DETACH)
        shutil.rmtree(self.host)
        self.hosts += 1
        self.attach()
        self.check_all()

    def close(self) -> None:
        for host in self.folder.glob("h*"):
            _kill_all(host)
        with suppress(Broken):
            self.stop_writer(is_cut_off=True)


def _kill_all(host: Path) -> None:
    """End every daemon of a host."""
    for pidfile in (host / "run/disks").glob("*/*.pid"):
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            process = os.pidfd_open(int(pidfile.read_text()))
            signal.pidfd_send_signal(process, signal.SIGKILL)
            await_end(process, 30)
            os.close(process)


@dataclass
class Outcome:
    """What became of all runs."""

    runs: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def deck(seed: int) -> list[Crash]:
    """Choose the crashes of a life, so that lives one after another try every one."""
    every = crashes()
    Random(len(every)).shuffle(every)  # noqa: S311
    start = seed * RUNS_IN_A_LIFE
    return [every[(start + number) % len(every)] for number in range(RUNS_IN_A_LIFE)]


def live(world: World, seed: int, runs: int, outcome: Outcome) -> None:
    """Go through a life; what goes wrong ends it, and is noted."""
    with tempfile.TemporaryDirectory(prefix="cr-") as folder, contextlib.ExitStack() as stack:
        life = Life(world, seed, Path(folder))
        stack.callback(life.close)
        crash = None
        try:
            life.attach()
            for crash in deck(seed)[:runs]:
                outcome.runs[crash.name] += 1
                life.run(crash)
            life.end()
        except (Broken, Inconsistent, OSError) as error:
            where = crash.name if crash else "the first attach"
            story = "\n    ".join(life.moves)
            outcome.failures.append(f"seed {seed}, {where}: {error}\n    {story}")


def crash(
    store: StoreConfig, *, runs: int, seed: int, faults: Faults | None = None
) -> Iterator[Figure]:
    """Go through so many runs; tell how many of each there were.

    Args:
        faults: what a proxy does to the requests between the hosts and the store.

    Raises:
        LaunchFailed: some went wrong; it says which, and what led there.
    """
    outcome = Outcome()
    base = make_base(store)
    with contextlib.ExitStack() as stack:
        if faults is not None:
            store = stack.enter_context(faulty(store, faults))
        world = World(store, stack.enter_context(working()), base)
        for life in range(-(-runs // RUNS_IN_A_LIFE)):
            rest = min(RUNS_IN_A_LIFE, runs - life * RUNS_IN_A_LIFE)
            live(world, seed + life, rest, outcome)
            done, failed = outcome.runs.total(), len(outcome.failures)
            say(f"  {done} of {runs} runs, {failed} failed, seed {seed + life}")
    yield from (
        Figure(bench=BENCH, name=name, value=count, unit="runs")
        for name, count in sorted(outcome.runs.items())
    )
    if faults is not None:
        say(f"  the proxy did {dict(faults.done)}")
    yield Figure(
        bench=BENCH,
        name="crashes survived, against all",
        value=outcome.runs.total() - len(outcome.failures),
        baseline=outcome.runs.total(),
        unit="runs",
        least=1.0,
    )
    if outcome.failures:
        raise LaunchFailed("\n\n".join(outcome.failures))
