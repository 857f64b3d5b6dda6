"""Build what guests boot from: `python -m hosts.guest.build --images DIR`.

Repeating it is cheap: an image is built again only when its recipe has changed, or with
`--force`, which also fetches Debian's newest packages. Needs root, for the owners of files.
A build runs in namespaces of its own, so that one that is killed takes along all that it
started and mounted.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hosts.guest.base import BASES
from hosts.guest.images import Builder, Progress, forget_packages
from hosts.guest.packages import BuildFailed, remove_leftovers

ALL = ("kernel", "initramfs", "toolkit", "base")

_ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def main(arguments: list[str] | None = None) -> int:
    """Build what the command line asks for, and say what takes how long."""
    options = _parser().parse_args(arguments)
    if os.geteuid() != 0:
        sys.stderr.write("Building images needs root.\n")
        return 1
    if os.getpid() != 1:
        arguments = sys.argv[1:] if arguments is None else arguments
        command = [*_ALONE, sys.executable, "-m", "hosts.guest.build", *arguments]
        os.execvp(command[0], command)  # noqa: S606
    parts = options.only.split(",") if options.only else ALL
    images: Path = options.images.absolute()
    images.mkdir(parents=True, exist_ok=True)
    with (images / ".build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_all(images, parts, force=options.force)


def _build_all(images: Path, parts: Sequence[str], *, force: bool) -> int:
    remove_leftovers(images)
    if force:
        forget_packages(images)
    builder = Builder(images, progress=_progress(time.monotonic()), force=force)
    try:
        for part in parts:
            _build(builder, part)
    except BuildFailed as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    builder.progress("images are ready")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hosts.guest.build", description=__doc__)
    parser.add_argument("--images", type=Path, required=True, metavar="DIR")
    bases = ", ".join(f"base:{name}" for name in BASES)
    parser.add_argument(
        "--only", metavar="PARTS", help=f"comma-separated: {', '.join(ALL)}, {bases}"
    )
    parser.add_argument("--force", action="store_true", help="build even what is up to date")
    return parser


def _build(builder: Builder, part: str) -> None:
    name, _, base = part.partition(":")
    base = base or "default"
    if name == "base" and base in BASES:
        builder.build_base(base)
    elif part == "kernel":
        builder.build_kernel()
    elif part == "initramfs":
        builder.build_initramfs()
    elif part == "toolkit":
        builder.build_toolkit()
    else:
        raise BuildFailed(f"there is nothing called {part} to build.")


def _progress(started_s: float) -> Progress:
    def say(text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - started_s:6.1f} s] {text}\n")
        sys.stdout.flush()

    return say


if __name__ == "__main__":
    raise SystemExit(main())
