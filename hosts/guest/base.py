"""Base images: the root file systems that templates are made from.

The recipe is data, and `recipe` is all of it: a base is built again when something in it
changes, which makes every host fetch it anew, and not when other code does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from common.units import GiB
from hosts.guest.packages import run

_PACKAGES = (
    "bash", "bash-completion", "bzip2", "ca-certificates", "curl", "file", "git", "iproute2",
    "iputils-ping", "jq", "less", "nano", "openssh-client", "procps", "psmisc", "python3",
    "python3-pip", "python3-venv", "rsync", "sudo", "tmux", "tree", "unzip", "vim-tiny", "wget",
    "xz-utils", "zip", "zstd",
)  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A root file system to make templates from."""

    packages: tuple[str, ...]
    size_bytes: int = 4 * GiB


BASES = {
    "default": Base(_PACKAGES),
    "dev": Base((*_PACKAGES, "build-essential", "gdb", "pkg-config", "python3-dev", "strace")),
}

# mmdebstrap leaves the host's name and its own settings.
_REMOVED = (
    "etc/hostname", "etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
)  # fmt: skip

# Nothing that was only needed to install: it would be uploaded and fetched for ever.
_EMPTIED = ("var/cache/apt", "var/lib/apt/lists", "var/log")

_FOLDERS = ("workspace",)

_FILES = {
    "etc/machine-id": ("", 0o444),
    "etc/hosts": ("127.0.0.1 localhost\n::1 localhost ip6-localhost\n", 0o644),
    "etc/default/locale": ("LANG=C.UTF-8\n", 0o644),
    # Service starts fail cleanly where no init would take them.
    "usr/sbin/policy-rc.d": ("#!/bin/sh\nexit 101\n", 0o755),
    "usr/sbin/poweroff": ("#!/bin/sh\nexec kill -USR2 1\n", 0o755),
    "usr/sbin/reboot": ("#!/bin/sh\nexec kill -TERM 1\n", 0o755),
    "usr/sbin/halt": ("#!/bin/sh\nexec kill -USR1 1\n", 0o755),
}

_LINKS = {
    # Written at every boot into memory, so that no address is ever part of a template.
    "etc/resolv.conf": "../run/sandkeep/resolv.conf",
}

# It can later grow in place far beyond its device: the resize inode keeps room for 1,024
# times its size, after which the kernel goes on with meta block groups. Inode tables count
# as initialised, since absent blocks read as zeros: the guest never has to write them.
# The journal is small, as each block of it that was ever written is uploaded at a pause.
_FILE_SYSTEM = (
    "-q", "-F", "-t", "ext4", "-L", "sandkeep", "-m", "1", "-b", "4096",
    "-O", "64bit,metadata_csum,dir_index,extent,flex_bg,resize_inode,^orphan_file",
    "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0",
    "-J", "size=16", "-e", "remount-ro", "-i", "16384",
)  # fmt: skip


def recipe(base: Base) -> str:
    """Return all that a base is made of but the Debian release."""
    parts = (asdict(base), _REMOVED, _EMPTIED, _FOLDERS, _FILES, _LINKS, _FILE_SYSTEM)
    return "\n".join(map(repr, parts))


def settle(root: Path) -> None:
    """Turn a fresh minbase tree into what a developer expects to log in to."""
    for name in _REMOVED:
        (root / name).unlink(missing_ok=True)
    for folder in _EMPTIED:
        for path in (root / folder).rglob("*"):
            if path.is_file():
                path.unlink()
    for name in _FOLDERS:
        (root / name).mkdir(exist_ok=True)
    for name, (content, mode) in _FILES.items():
        (root / name).unlink(missing_ok=True)
        (root / name).write_text(content)
        (root / name).chmod(mode)
    for name, target in _LINKS.items():
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target)


def file_system(root: Path, image: Path, *, size_bytes: int) -> None:
    """Write a folder as an ext4 file system into a new sparse file."""
    with image.open("wb") as file:
        file.truncate(size_bytes)
    run("mke2fs", *_FILE_SYSTEM, "-d", root, image)
    # mke2fs writes zeros where a hole says the same.
    run("fallocate", "--dig-holes", image)
