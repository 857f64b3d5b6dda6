"""The command line of `bin/bench`."""

import argparse
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime

import httpx
from sandbox0 import APIError

from common.errors import Unavailable
from hosts.volumes.objects import StoreConfig
from hosts.volumes.store import S3ObjectStore
from launch.bench import crash, lifecycle, round_trip, volumes
from launch.bench.figures import Figure, table
from launch.bench.rig import FULL, QUICK
from launch.bench.s3_proxy import Faults
from launch.bench.target import Target
from launch.config import load
from launch.demo import platform_of_this_checkout
from launch.progress import LaunchFailed, say

PARTS = ("first", "changes", "retained", "cold")


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(arguments)
    figures: list[Figure] = []
    at = datetime.now(UTC)
    try:
        measured = options.measure(options)
        say(f"{at.isoformat(timespec='seconds')}  {_machine()}")
        try:
            for figure in measured:
                figures.append(figure)
        finally:
            measured.close()
            # Also of a run that was interrupted: some of these take long to measure.
            _show(figures, command=shlex.join(["bin/bench", *arguments]), at=at)
    except (LaunchFailed, Unavailable, APIError, httpx.HTTPError) as error:
        say(f"\n{error}")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bin/bench", description="Measure the platform that bin/up runs here."
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--key", default=os.environ.get("SANDBOX0_TOKEN"), help="an API key")
    common.add_argument("--template", default="default")
    common.add_argument("--memory-mib", type=int, default=512)
    benches = parser.add_subparsers(dest="bench", required=True)

    moves = benches.add_parser("lifecycle", parents=[common], help="claim, pause and resume")
    moves.add_argument("--only", choices=PARTS, action="append", help="measure a part alone")
    moves.add_argument("--rounds", type=int, default=5)
    moves.add_argument(
        "--retained-gib", type=float, default=5.0, help="how much is much, in GiB"
    )
    moves.set_defaults(measure=_on_the_platform(_lifecycle))
    command = benches.add_parser("exec", parents=[common], help="a command's round trip")
    command.add_argument("--rounds", type=int, default=100)
    command.set_defaults(measure=_on_the_platform(_round_trip))

    crashes = benches.add_parser("crash", help="kill what commits and serves a disk")
    crashes.add_argument("--runs", type=int, default=500)
    crashes.add_argument("--seed", type=int, default=0, help="of the first life")
    crashes.add_argument(
        "--faults", type=float, default=0.0, help="the share of store requests that go wrong"
    )
    crashes.set_defaults(measure=_on_the_store(_crash))

    engine = benches.add_parser("volumes", help="the volume engine beside plain files and S3")
    engine.add_argument("--only", choices=tuple(volumes.PARTS), action="append")
    engine.add_argument("--quick", action="store_true", help="only see that it works")
    engine.set_defaults(measure=_on_the_store(_volumes))
    return parser


Measure = Callable[[argparse.Namespace], Generator[Figure, None, None]]


def _on_the_platform(
    measure: Callable[[Target, argparse.Namespace], Generator[Figure, None, None]],
) -> Measure:
    """Give a bench the running platform."""

    def measured(options: argparse.Namespace) -> Generator[Figure, None, None]:
        _need_root()
        key = options.key or platform_of_this_checkout()[1]
        with closing(
            Target(
                load(os.environ), key, template=options.template, memory_mib=options.memory_mib
            )
        ) as target:
            yield from measure(target, options)

    return measured


def _on_the_store(
    measure: Callable[[StoreConfig, argparse.Namespace], Generator[Figure, None, None]],
) -> Measure:
    """Give a bench a corner of the platform's object store; it brings its own disks."""

    def measured(options: argparse.Namespace) -> Generator[Figure, None, None]:
        _need_root()
        with _own_corner() as store:
            yield from measure(store, options)

    return measured


def _need_root() -> None:
    if os.geteuid() != 0:
        raise LaunchFailed("bin/bench reads the host's keys and cache: run it as root.")


@contextmanager
def _own_corner() -> Iterator[StoreConfig]:
    """Lend a part of the platform's object store, or a given one's; empty it afterwards."""
    given = "S3_ENDPOINT_URL" in os.environ
    env = os.environ if given else load(os.environ).env
    store = StoreConfig(
        endpoint_url=env["S3_ENDPOINT_URL"],
        bucket=env.get("S3_BUCKET", "sandkeep"),
        access_key_id=env["S3_ACCESS_KEY_ID"],
        secret_access_key=env["S3_SECRET_ACCESS_KEY"],
        region=env.get("S3_REGION", "us-east-1"),
        prefix=f"{env.get('S3_PREFIX', '')}bench-{secrets.token_hex(6)}/",
    )
    try:
        yield store
    finally:
        objects = S3ObjectStore(store)
        objects.delete([key for key, _ in objects.keys("")])


def _lifecycle(target: Target, options: argparse.Namespace) -> Generator[Figure, None, None]:
    parts = options.only or PARTS
    if "first" in parts:
        yield from lifecycle.first_command(target, rounds=options.rounds)
    if "changes" in parts:
        yield from lifecycle.changed_data(target)
    if "cold" in parts:
        yield from lifecycle.cold_resume(target)
    if "retained" in parts:
        yield from lifecycle.retained_data(
            target, gib=options.retained_gib, rounds=options.rounds
        )


def _round_trip(target: Target, options: argparse.Namespace) -> Generator[Figure, None, None]:
    yield from round_trip.round_trip(target, rounds=options.rounds)


def _crash(store: StoreConfig, options: argparse.Namespace) -> Generator[Figure, None, None]:
    faults = Faults(seed=options.seed, share=options.faults) if options.faults else None
    yield from crash.crash(store, runs=options.runs, seed=options.seed, faults=faults)


def _volumes(store: StoreConfig, options: argparse.Namespace) -> Generator[Figure, None, None]:
    parts = options.only or tuple(volumes.PARTS)
    yield from volumes.volumes(store, parts, QUICK if options.quick else FULL)


def _machine() -> str:
    """Return what a reader must know of the machine to believe the figures."""
    load_1, load_5, _ = os.getloadavg()
    return (
        f"{os.cpu_count()} CPUs, Linux {platform.release()}, "
        f"load {load_1:.1f} in the last minute, {load_5:.1f} in the last five"
    )


def _show(figures: list[Figure], *, command: str, at: datetime) -> None:
    if not figures:
        return
    say(f"\n{table(figures)}\n")
    for figure in figures:
        say(figure.json_line(command=command, at=at))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
