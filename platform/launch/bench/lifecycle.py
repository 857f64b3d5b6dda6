"""What a sandbox's moves take: its first boot, its pauses and its resumes."""

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic

from sandbox0 import Sandbox

from launch.bench.figures import Figure, spread
from launch.bench.plain import PlainMachine
from launch.bench.target import Target, disk_bytes, run, write_random
from launch.progress import say, step

BENCH = "lifecycle"
CHANGES_MB = (1, 10, 100)
SAME_CHANGE_MB = 10
LITTLE_GIB = 0.3
RETAINED_AIM = 1.2
PIECE_MB = 250
MB_PER_GIB = 1024**3 / 1_000_000


def first_command(target: Target, *, rounds: int) -> Iterator[Figure]:
    """Claim until the first command is done, against plain QEMU until sshd answers."""
    plain = PlainMachine(target.config.images_dir, target.memory_mib)
    ours, theirs = [], []
    for number in range(1, rounds + 1):
        with step(f"plain QEMU, round {number} of {rounds}"):
            theirs.append(plain.boot_s())
        with step(f"claim and first command, round {number} of {rounds}"):
            ours.append(_claim_s(target))
    say(f"  ours {spread(ours)}, plain QEMU {spread(theirs)}")
    yield Figure(
        bench=BENCH,
        name="claim to first command, against plain QEMU to sshd",
        value=statistics.median(ours),
        baseline=statistics.median(theirs),
        unit="s",
    )


def _claim_s(target: Target) -> float:
    started = monotonic()
    sandbox = target.claim()
    try:
        run(sandbox, "true")
        return monotonic() - started
    finally:
        target.delete(sandbox)


def changed_data(target: Target) -> Iterator[Figure]:
    """The time and bytes of a pause after some random data was written."""
    with target.sandbox() as sandbox:
        # The first pause also carries what a first boot writes.
        with step("first pause and resume"):
            target.pause(sandbox)
            target.resume(sandbox)
        for size_mb in CHANGES_MB:
            with step(f"write {size_mb} MB and pause"):
                write_random(sandbox, f"/root/changed-{size_mb}", size_mb)
                took_s = target.pause(sandbox)
            uploaded_bytes = target.storage(sandbox)["uploaded_bytes"]
            yield Figure(
                bench=BENCH, name=f"pause with {size_mb} MB changed", value=took_s, unit="s"
            )
            yield Figure(
                bench=BENCH,
                name=f"bytes uploaded with {size_mb} MB changed",
                value=uploaded_bytes,
                baseline=size_mb * 1_000_000,
                unit="bytes",
            )
            with step("resume"):
                target.resume(sandbox)


@dataclass
class _Retaining:
    """A sandbox that keeps much or little, and what its rounds took."""

    sandbox: Sandbox
    gib: float
    pauses_s: list[float] = field(default_factory=list)
    resumes_s: list[float] = field(default_factory=list)


def retained_data(target: Target, *, gib: float, rounds: int) -> Iterator[Figure]:
    """Pause and resume after the same change, with much retained against little."""
    with ExitStack() as stack:
        little, much = (
            _retain(target, stack.enter_context(target.sandbox()), size)
            for size in (LITTLE_GIB, gib)
        )
        for number in range(1, rounds + 1):
            for one in (little, much):
                with step(f"round {number} of {rounds} with {one.gib:g} GiB retained"):
                    _pause_and_resume(target, one)
    for what in ("pauses_s", "resumes_s"):
        slow, quick = getattr(much, what), getattr(little, what)
        say(f"  {what}: {gib:g} GiB {spread(slow)}, {LITTLE_GIB} GiB {spread(quick)}")
        yield Figure(
            bench=BENCH,
            name=f"{what.removesuffix('s_s')} with {gib:g} GiB retained, "
            f"against {LITTLE_GIB:g} GiB",
            value=statistics.median(slow),
            baseline=statistics.median(quick),
            unit="s",
            aim=RETAINED_AIM,
        )


def _retain(target: Target, sandbox: Sandbox, gib: float) -> _Retaining:
    """Fill its disk, and put it to sleep."""
    total_mb = round(gib * MB_PER_GIB)
    with step(f"write {gib:g} GiB"):
        for number, start_mb in enumerate(range(0, total_mb, PIECE_MB)):
            size_mb = min(PIECE_MB, total_mb - start_mb)
            write_random(sandbox, f"/root/retained-{number}", size_mb)
            say(f"  {start_mb + size_mb:,} of {total_mb:,} MB written")
    with step(f"pause with {gib:g} GiB to upload"):
        target.pause(sandbox)
    say(f"  {target.storage(sandbox)['stored_bytes']:,} bytes are stored")
    return _Retaining(sandbox, gib)


def _pause_and_resume(target: Target, one: _Retaining) -> None:
    """Wake it, change the same file as ever, put it to sleep: one of them runs at a time."""
    one.resumes_s.append(target.resume(one.sandbox))
    write_random(one.sandbox, "/root/changed", SAME_CHANGE_MB)
    one.pauses_s.append(target.pause(one.sandbox))


def cold_resume(target: Target) -> Iterator[Figure]:
    """What is fetched until the first command of a resume that finds nothing cached."""
    with target.sandbox() as sandbox:
        write_random(sandbox, "/root/kept", max(CHANGES_MB))
        size_bytes, used_bytes = disk_bytes(sandbox)
        with step("pause"):
            target.pause(sandbox)
        target.empty_cache()
        with step("cold resume"):
            took_s = target.resume(sandbox)
        fetched_bytes = target.fetched_bytes(sandbox)
    for what, whole_bytes in (("used of the disk", used_bytes), ("the disk", size_bytes)):
        yield Figure(
            bench=BENCH,
            name=f"bytes fetched by a cold resume, against all {what}",
            value=fetched_bytes,
            baseline=whole_bytes,
            unit="bytes",
        )
    yield Figure(bench=BENCH, name="cold resume to first command", value=took_s, unit="s")
