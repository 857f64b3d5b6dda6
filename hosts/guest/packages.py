"""Debian packages as the raw material of images: found, fetched, unpacked, never installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_APT = Path("/etc/apt")


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
def scratch_folder(beside: Path) -> Iterator[Path]:
    """A folder on the same file system as `beside`, so that results can be renamed."""
    folder = Path(tempfile.mkdtemp(prefix=".scratch-", dir=beside))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


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
