"""The command line of `bin/bench`."""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import httpx
from sandbox0 import APIError

from common.errors import Unavailable
from launch.bench import lifecycle, round_trip
from launch.bench.figures import Figure, table
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
        target = _target(options)
        say(f"{at.isoformat(timespec='seconds')}  {_machine()}")
        try:
            for figure in _measured(target, options):
                figures.append(figure)
        finally:
            target.close()
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
    command = benches.add_parser("exec", parents=[common], help="a command's round trip")
    command.add_argument("--rounds", type=int, default=100)
    return parser


def _target(options: argparse.Namespace) -> Target:
    if os.geteuid() != 0:
        raise LaunchFailed("bin/bench reads the host's keys and cache: run it as root.")
    key = options.key or platform_of_this_checkout()[1]
    return Target(
        load(os.environ), key, template=options.template, memory_mib=options.memory_mib
    )


def _measured(target: Target, options: argparse.Namespace) -> Iterator[Figure]:
    if options.bench == "exec":
        yield from round_trip.round_trip(target, rounds=options.rounds)
        return
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
