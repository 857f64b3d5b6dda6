"""`bin/manage`: manage.py with the platform's settings, as its ordinary user or as root."""

import os
import sys
from typing import NoReturn

from launch.config import load
from launch.people import person
from launch.progress import LaunchFailed, say

# These write into the checkout, which is its owner's and not the platform's.
WRITES_SOURCES = {"makemigrations", "makemessages", "compilemessages", "squashmigrations"}

# These work on this machine as a host, or with the master key: what only root may do.
NEED_ROOT = {"collect", "import_template", "register_host", "rotate_master_key", "run_gate"}


def keeps_root(arguments: list[str]) -> bool:
    """Tell whether a command stays root's, for whoever calls it as root."""
    return not (WRITES_SOURCES | NEED_ROOT).isdisjoint(arguments[:1])


def main(arguments: list[str]) -> NoReturn:
    """Become manage.py, as who it needs; returns only when that can't be done."""
    try:
        config = load(os.environ)
    except LaunchFailed as error:
        say(str(error))
        sys.exit(1)
    command = [config.python, str(config.checkout / "manage.py"), *arguments]
    if keeps_root(arguments):
        os.execve(command[0], command, config.environment())  # noqa: S606 - no shell is meant
    who = person(config.env["SANDKEEP_USER"])
    os.setgroups(who.groups)
    os.setgid(who.gid)
    os.setuid(who.uid)
    os.execve(command[0], command, config.environment(who))  # noqa: S606 - no shell is meant


if __name__ == "__main__":
    main(sys.argv[1:])
