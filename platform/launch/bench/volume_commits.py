"""What commits cost: uploads, the writer beside them, the stall of a cut, requests."""

import math
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from secrets import token_hex

from common.units import KiB, MiB
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.commit import PACK_BYTES, Commit
from hosts.volumes.objects import StoreConfig
from hosts.volumes.pacing import SOON_SHARE
from hosts.volumes.store import S3ObjectStore
from launch.bench.figures import Figure
from launch.bench.nbd import WRITE, Nbd
from launch.bench.rig import Samples, Scale, Used, Volume, data, host, make_image, timed
from launch.bench.s3_proxy import Faults, faulty
from launch.progress import step

BENCH = "volumes"
UPLOAD_LEAST, BACKGROUND_LEAST = 0.8, 0.9
RAW_UPLOADS = 8
"""As many at once as a commit has."""

STALL_AIM_MS = 10.0
COMMIT_EVERY_S = 2.0
"""Five times as often as the platform does, so that a short run has some."""

FAR_S = 0.25
"""What each request to a store takes that is far away, or busy."""

QUICK_BYTES_PER_S = 64 * MiB
SMALL_LOG_BYTES = 512 * MiB
NEVER = 1000.0

INTERVAL_S = 10
INTERVALS_AN_HOUR = 3600 // INTERVAL_S
PACED_BYTES_PER_S = 20 * MiB
"""What an emulated guest writes; one under KVM writes as fast as it is let."""


def upload(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """Commit much data until it is published, against putting as many bytes in such objects."""
    image = make_image(folder / "image", 4 * MiB)
    samples = Samples()
    with host(folder, store) as one:
        volume = one.volume(one.import_image(image, 2 * scale.data_bytes))
        volume.attach()
        for number in range(1, scale.rounds + 1):
            with step(f"upload, round {number} of {scale.rounds}"):
                fill(volume, 0, scale.data_bytes, seed=number)
                used = Used()
                took_s = _upload(volume)
                size = volume.commits[-1].uploaded_bytes
                samples.add("CPU", 100 * MiB / size * used.cpu_s())
                samples.add("ours", size / MiB / took_s)
                samples.add("device", scale.data_bytes / MiB / took_s)
                used = Used()
                samples.add("raw", size / MiB / timed(partial(_put_raw, store, size)))
                samples.add("raw CPU", 100 * MiB / size * used.cpu_s())
    yield Figure(
        bench=BENCH,
        name="upload of a commit, against raw puts of as many bytes",
        value=samples["ours"],
        baseline=samples["raw"],
        unit="MiB/s",
        least=UPLOAD_LEAST,
    )
    yield Figure(
        bench=BENCH, name="the same, bytes of the device", value=samples["device"], unit="MiB/s"
    )
    yield Figure(
        bench=BENCH,
        name="CPU of 100 MiB of it in the worker, against raw puts",
        value=samples["CPU"],
        baseline=samples["raw CPU"],
        unit="s",
    )


def _upload(volume: Volume) -> float:
    """Commit what was written; return how long it took until that was the head."""
    started = time.monotonic()
    published_at = started

    def publish(commit: Commit) -> None:
        nonlocal published_at
        volume.publish(commit)
        published_at = time.monotonic()

    volume.host.disks.checkpoint(volume.volume_id, publish)
    return published_at - started


def fill(volume: Volume, start: int, size_bytes: int, *, seed: int) -> None:
    """Write data to a disk."""
    with Nbd(volume.socket) as nbd:
        for at in range(0, size_bytes, MiB):
            nbd.write(start + at, data(MiB, seed=seed * 10_000 + at // MiB))
        nbd.flush()


def _put_raw(store: StoreConfig, size_bytes: int) -> None:
    objects = S3ObjectStore(store)
    body = Random(0).randbytes(PACK_BYTES)  # noqa: S311 - not a secret
    sizes = [PACK_BYTES] * (size_bytes // PACK_BYTES)
    sizes += [rest] if (rest := size_bytes % PACK_BYTES) else []
    with ThreadPoolExecutor(RAW_UPLOADS) as pool:
        puts = [
            pool.submit(objects.put_new, f"raw/{token_hex(8)}", body[:size]) for size in sizes
        ]
        for put in puts:
            put.result()


# -- the writer beside commits ------------------------------------------------------------


@dataclass
class Written:
    """What a writer did."""

    bytes: int = 0
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """(sent at, answered at) of each write."""

    def worst_ms(self, spans: list[tuple[float, float]]) -> float:
        """Return the longest wait of a write that was under way in any of these spans."""
        waits = [
            answered - sent
            for sent, answered in self.latencies
            if any(sent < end and start < answered for start, end in spans)
        ]
        return 1000 * max(waits, default=0.0)


class Hurried:
    """A writer with some writes in flight; as fast as they are answered, or at a pace."""

    def __init__(
        self, socket: Path, size_bytes: int, *, write_bytes: int, depth: int, pace: float = 0
    ) -> None:
        self._nbd = Nbd(socket)
        self._size_bytes = size_bytes
        self._write_bytes = write_bytes
        self._depth = depth
        self._pace = pace
        self.written = Written()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = time.monotonic()
        self._thread.start()

    def stop(self) -> float:
        """End it; return how many MiB it wrote a second."""
        self._stop.set()
        self._thread.join()
        return self.written.bytes / MiB / (time.monotonic() - self._started)

    def _run(self) -> None:
        pool = data(16 * MiB, seed=99)
        random = Random(1)  # noqa: S311 - not a secret
        sent: dict[int, float] = {}
        at = 0
        with self._nbd as nbd:
            while not self._stop.is_set():
                self._wait()
                start = random.randrange(len(pool) - self._write_bytes)
                body = pool[start : start + self._write_bytes]
                sent_at = time.monotonic()
                sent[nbd.submit(WRITE, at, len(body), body)] = sent_at
                at = (at + len(body)) % (self._size_bytes - self._write_bytes)
                at -= at % self._write_bytes
                # An answer that is left lying while it sleeps would seem to come late.
                self._reap(nbd, sent, leave=0 if self._pace else self._depth - 1)
            self._reap(nbd, sent, leave=0)

    def _wait(self) -> None:
        if self._pace:
            ahead_s = self.written.bytes / self._pace - (time.monotonic() - self._started)
            if ahead_s > 0:
                time.sleep(min(ahead_s, 0.05))

    def _reap(self, nbd: Nbd, sent: dict[int, float], *, leave: int) -> None:
        while len(sent) > leave:
            reply = nbd.reap()
            if reply.error:
                raise OSError(reply.error, "a write was answered with an error")
            self.written.latencies.append((sent.pop(reply.number), time.monotonic()))
            self.written.bytes += self._write_bytes


def background(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """A writer with commits going on, against the same writer without."""
    image = make_image(folder / "image", 4 * MiB)
    samples = Samples()
    with host(folder, store) as one:
        head = one.import_image(image, 4 * scale.data_bytes)
        for number in range(1, scale.rounds + 1):
            for pace in (0, PACED_BYTES_PER_S):
                for commits in (False, True):
                    with step(_writing(number, scale, pace=pace, commits=commits)):
                        volume = one.volume(head)
                        volume.attach()
                        rate = _write_beside(volume, scale, pace=pace, commits=commits)
                        samples.add(f"{pace} {commits}", rate)
                        volume.discard()
    for pace, name in ((0, "as fast as it can"), (PACED_BYTES_PER_S, "at a guest's pace")):
        yield Figure(
            bench=BENCH,
            name=f"writing {name} with a commit every {COMMIT_EVERY_S:g} s, against none",
            value=samples[f"{pace} True"],
            baseline=samples[f"{pace} False"],
            unit="MiB/s",
            least=BACKGROUND_LEAST,
        )


def _writing(number: int, scale: Scale, *, pace: float, commits: bool) -> str:
    return (
        f"write {'at a pace' if pace else 'fast'} {'with' if commits else 'without'} commits, "
        f"round {number} of {scale.rounds}"
    )


def _write_beside(volume: Volume, scale: Scale, *, pace: float, commits: bool) -> float:
    writer = Hurried(
        volume.socket, 4 * scale.data_bytes, write_bytes=256 * KiB, depth=4, pace=pace
    )
    until = time.monotonic() + scale.seconds
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(left_s, COMMIT_EVERY_S if scale.seconds > COMMIT_EVERY_S else 0.3))
        if commits and time.monotonic() < until:
            volume.host.disks.checkpoint(volume.volume_id, volume.publish, background=True)
    return writer.stop()


def ahead(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """What is stored of a fast writer, with commits prepared ahead and without."""
    image = make_image(folder / "image", 4 * MiB)
    samples = Samples()
    with faulty(store, Faults(share=0, delay_s=FAR_S)) as far:
        for number in range(1, scale.rounds + 1):
            for name, share in (("ahead", SOON_SHARE), ("in turn", NEVER)):
                with (
                    step(f"store {name}, round {number} of {scale.rounds}"),
                    host(
                        folder,
                        far,
                        f"{name} {number}",
                        log_budget_bytes=SMALL_LOG_BYTES,
                        soon_share=share,
                    ) as one,
                ):
                    volume = one.volume(one.import_image(image, 16 * scale.data_bytes))
                    volume.attach()
                    ages_s, rate = _ages_when_stored(volume, scale)
                    samples.add(name, statistics.median(ages_s))
                    samples.add(f"{name}, rate", rate)
    yield Figure(
        bench=BENCH,
        name="age of a commit's oldest write as it is stored, prepared ahead, against in turn",
        value=samples["ahead"],
        baseline=samples["in turn"],
        unit="s",
    )
    yield Figure(
        bench=BENCH,
        name="bytes stored of it in that time, prepared ahead, against in turn",
        value=samples["ahead, rate"],
        baseline=samples["in turn, rate"],
        unit="MiB/s",
    )


def _ages_when_stored(volume: Volume, scale: Scale) -> tuple[list[float], float]:
    """Store what a writer writes at a pace, for a while.

    Returns: the age of the oldest write of each commit as that is published, in seconds, and
        MiB stored a second.
    """
    published: list[tuple[float, int]] = []

    def publish(commit: Commit) -> None:
        volume.publish(commit)
        published.append((time.monotonic(), commit.blocks_changed * BLOCK_BYTES))

    started = time.monotonic()
    writer = Hurried(
        volume.socket,
        16 * scale.data_bytes,
        write_bytes=256 * KiB,
        depth=4,
        pace=QUICK_BYTES_PER_S,
    )
    while time.monotonic() < started + scale.seconds or not published:
        volume.host.disks.checkpoint(volume.volume_id, publish, background=True)
    writer.stop()
    ages_s, stored_bytes = [], 0
    for published_at, size_bytes in published:
        # It writes in order, so what was stored tells when the first that was not was written.
        ages_s.append(published_at - started - stored_bytes / QUICK_BYTES_PER_S)
        stored_bytes += size_bytes
    return ages_s, stored_bytes / MiB / (published[-1][0] - started)


def rotation(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """How long a write waits at a cut, at most, and how long at other times."""
    image = make_image(folder / "image", 4 * MiB)
    size_bytes = 64 * MiB
    cuts: list[tuple[float, float]] = []
    with host(folder, store) as one:
        volume = one.volume(one.import_image(image, size_bytes))
        volume.attach()
        writer = Hurried(volume.socket, size_bytes, write_bytes=4 * KiB, depth=4, pace=2 * MiB)

        @contextmanager
        def noted() -> Iterator[None]:
            started = time.monotonic()
            yield
            cuts.append((started, time.monotonic()))

        with step("write small, and cut now and then"):
            until = time.monotonic() + scale.seconds
            while time.monotonic() < until:
                time.sleep(0.3)
                one.disks.checkpoint(volume.volume_id, volume.publish, around_cut=noted)
        writer.stop()
        written = writer.written
    bounds = [(0.0, 0.0), *cuts, (math.inf, math.inf)]
    between = [(end, start) for (_, end), (start, _) in pairwise(bounds)]
    yield Figure(
        bench=BENCH,
        name=f"longest wait of a 4 KiB write at {len(cuts)} cuts, against the aim",
        value=written.worst_ms(cuts),
        baseline=STALL_AIM_MS,
        unit="ms",
        aim=1.0,
    )
    yield Figure(
        bench=BENCH,
        name="the same, median of all cuts",
        value=statistics.median(written.worst_ms([cut]) for cut in cuts),
        baseline=STALL_AIM_MS,
        unit="ms",
        aim=1.0,
    )
    waits = sorted(answered - sent for sent, answered in written.latencies)
    yield Figure(
        bench=BENCH,
        name="longest wait of one between cuts",
        value=written.worst_ms(between),
        unit="ms",
    )
    yield Figure(
        bench=BENCH, name="median wait of one", value=1000 * waits[len(waits) // 2], unit="ms"
    )


# -- requests -----------------------------------------------------------------------------

_SANDBOXES = {
    "an idle sandbox": (0, 0),
    "a light sandbox (64 KiB every 10 s)": (16, 4 * KiB),
    "a busy sandbox (20 MiB every 10 s)": (20, MiB),
}


def requests(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """Puts and gets of an hour: some intervals of writes and a commit, the rest by rule."""
    image = make_image(folder / "image", 4 * MiB)
    intervals = 3 * scale.rounds
    counts = Faults(share=0)
    with faulty(store, counts) as counted, host(folder, counted) as one:
        head = one.import_image(image, 1024 * MiB)
        for name, (writes, write_bytes) in _SANDBOXES.items():
            with step(f"{intervals} intervals of {name}"):
                volume = one.volume(head)
                volume.attach()
                before = counts.done.copy()
                _live(volume, intervals, writes, write_bytes)
                done = counts.done - before
                volume.discard()
            for method, title in (("PUT", "puts"), ("GET", "gets")):
                yield Figure(
                    bench=BENCH,
                    name=f"{title} an hour of {name}",
                    value=done[method] / intervals * INTERVALS_AN_HOUR,
                    unit="requests",
                )
            if volume.commits:
                yield Figure(
                    bench=BENCH,
                    name=f"index bytes of a commit of {name}",
                    value=volume.commits[-1].index_bytes,
                    baseline=writes * write_bytes,
                    unit="bytes",
                )


def _live(volume: Volume, intervals: int, writes: int, write_bytes: int) -> None:
    random = Random(5)  # noqa: S311 - not a secret
    pool = data(4 * MiB, seed=7)
    for _ in range(intervals):
        with Nbd(volume.socket) as nbd:
            for _ in range(writes):
                at = random.randrange(1024 * MiB // write_bytes) * write_bytes
                start = random.randrange(len(pool) - write_bytes)
                nbd.write(at, pool[start : start + write_bytes])
        volume.host.disks.checkpoint(volume.volume_id, volume.publish, background=True)
