"""Debian packages as the raw material of images: found, fetched, unpacked, never installed."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from common.units import GiB, KiB

_APT = Path("/etc/apt")
_SCRATCH_PREFIX = ".scratch-"
_PLENTY_BYTES = 6 * GiB


class BuildFailed(Exception):
    """An image could not be made; the one that was there before, if any, still is."""


def host_suite() -> str:
    """The code name of this machine's Debian, such as `bookworm`."""
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return shlex.split(value)[0]
    raise BuildFailed("/etc/os-release names no Debian release.")


def apt_sources(suite: str) -> list[str]:
    """What to give mmdebstrap to fetch `suite`: the machine's own sources where they have it.

    Sources of other vendors are left out, as a guest has no use for them.
    """
    lists = [_APT / "sources.list"]
    for pattern in ("*.sources", "*.list"):
        lists += sorted((_APT / "sources.list.d").glob(pattern))
    own = [str(path) for path in lists if path.is_file() and _is_debian(path, suite)]
    return own or ["http://deb.debian.org/debian"]


def _is_debian(path: Path, suite: str) -> bool:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines)
    return "debian" in text and suite in text and "nodesource" not in text


def unpack(packages: Iterable[str], target: Path, *, variant: str, suite: str) -> None:
    """Put packages and what they depend on into the new folder `target`.

    Args:
        packages: names, without versions.
        variant: of mmdebstrap; `extract` runs none of the packages' scripts.
        suite: the Debian release's code name.

    Raises:
        BuildFailed: with what mmdebstrap said last.
    """
    # Ordinary users must be able to walk in: apt fetches as one.
    target.parent.chmod(0o755)
    run(
        *("mmdebstrap", f"--variant={variant}", "--mode=root", "--format=directory"),
        *(f"--aptopt={option}" for option in _proxy_options()),
        "--dpkgopt=force-unsafe-io",  # a build that loses power is begun anew
        f"--include={','.join(packages)}",
        suite,
        target,
        *apt_sources(suite),
    )


def _proxy_options() -> Iterator[str]:
    """The machine's apt proxies: mmdebstrap reads none of its settings by itself."""
    for scheme in ("http", "https"):
        option = f"Acquire::{scheme}::Proxy"
        found = run("apt-config", "shell", "proxy", option)
        if found:
            proxy = shlex.split(found.partition("=")[2])[0]
            yield f'{option} "{proxy}"'


@contextmanager
def scratch_folder(beside: Path, *, in_memory: bool = False) -> Iterator[Path]:
    """A folder on the same file system as `beside`, so that results can be renamed.

    Args:
        in_memory: keep its contents in memory where there is plenty: dpkg waits for the
            disk after each package, which is more than half of the time it takes.
    """
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=beside))
    try:
        if in_memory and _available_bytes() >= _PLENTY_BYTES:
            size = f"mode=755,size={_PLENTY_BYTES // 2}"
            run("mount", "-t", "tmpfs", "-o", size, "scratch", folder)
        yield folder
    finally:
        _remove(folder)


def remove_leftovers(beside: Path) -> None:
    """Remove the scratch folders of builds that were killed; to be called while none runs."""
    for folder in beside.glob(f"{_SCRATCH_PREFIX}*"):
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, after what a killed build may have left mounted in it.

    Removing through a mount would empty the machine's own /dev or /proc, so what cannot be
    unmounted stays.
    """
    while mounts := _mounts_in(folder):
        run("umount", "--lazy", mounts[-1])
    run("rm", "-rf", "--one-file-system", folder)


def _mounts_in(folder: Path) -> list[str]:
    """Where something is mounted in a folder or on it, the oldest first.

    Source: https://docs.kernel.org/filesystems/proc.html, /proc/<pid>/mountinfo
    """
    inside = f"{folder.resolve()}/"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [point for point in points if f"{point}/".startswith(inside)]


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * KiB
    return 0


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Run a program and return what it printed.

    Raises:
        BuildFailed: it is not there, or it failed; the message ends as its output did.
    """
    program = Path(command[0]).name
    try:
        done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BuildFailed(f"{program} is not installed.") from error
    if done.returncode:
        raise BuildFailed(f"{program} failed: {(done.stdout + done.stderr)[-2000:].strip()}")
    return done.stdout


def only(paths: Iterable[Path]) -> Path:
    """The one path among `paths`.

    Raises:
        BuildFailed: there is none, or there are several.
    """
    found = sorted(paths)
    if len(found) != 1:
        raise BuildFailed(f"expected one file, found {[str(path) for path in found]}.")
    return found[0]
