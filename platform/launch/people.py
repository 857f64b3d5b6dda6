"""The operating system's users that our processes run as.

The launcher itself is root. What needs no privilege runs as an ordinary user: the one that
called sudo, or a system user made for it when root itself started us.
"""

import grp
import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launch.progress import say


@dataclass(frozen=True)
class Person:
    """A user and all groups that it is in."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


def person(name: str) -> Person:
    """Return the user of this name, who must exist."""
    entry = pwd.getpwnam(name)
    groups = tuple(os.getgrouplist(name, entry.pw_gid))
    return Person(name, entry.pw_uid, entry.pw_gid, groups)


def ensure_person(name: str, *, groups: tuple[str, ...] = ()) -> Person:
    """Return this user, made as a system user without a login if it is missing."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        subprocess.run(
            [
                *("useradd", "--system", "--user-group", "--no-create-home"),
                *("--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin", name),
            ],
            check=True,
            capture_output=True,
            timeout=30,
        )
    for group in groups:
        if name not in grp.getgrnam(group).gr_mem:
            subprocess.run(
                ["usermod", "--append", "--groups", group, name],
                check=True,
                capture_output=True,
                timeout=30,
            )
    return person(name)


def let_through(path: Path, who: Person) -> None:
    """Give a user the right to pass through the folders above `path`, and say so.

    Only where it lacks that right, and only to pass: it still cannot list or read them. A
    checkout under /root or a home directory would otherwise be out of its reach.
    """
    for folder in [*reversed(path.parents), path]:
        if not _may_pass(folder, who):
            subprocess.run(
                ["setfacl", "-m", f"u:{who.name}:x", str(folder)], check=True, timeout=10
            )
            say(f"  let {who.name} pass through {folder} (setfacl -m u:{who.name}:x)")


def _may_pass(folder: Path, who: Person) -> bool:
    answer = subprocess.run(
        ["test", "-x", str(folder)],
        user=who.uid,
        group=who.gid,
        extra_groups=who.groups,
        cwd="/",
        timeout=10,
        check=False,
    )
    return answer.returncode == 0
