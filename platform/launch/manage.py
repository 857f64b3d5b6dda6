"""`bin/manage`: manage.py with the platform's settings, as its ordinary user."""

import os
import sys
from typing import NoReturn

from launch.config import load
from launch.people import person
from launch.progress import LaunchFailed, say

# These write into the checkout, which is its owner's and not the platform's.
WRITES_SOURCES = {"makemigrations", "makemessages", "compilemessages", "squashmigrations"}


def main(arguments: list[str]) -> NoReturn:
    """Become the ordinary user and manage.py; returns only when that can't be done."""
    try:
        config = load(os.environ)
    except LaunchFailed as error:
        say(str(error))
        sys.exit(1)
    who = person(config.env["SANDKEEP_USER"])
    if not WRITES_SOURCES.intersection(arguments[:1]):
        os.setgroups(who.groups)
        os.setgid(who.gid)
        os.setuid(who.uid)
    command = [config.python, str(config.checkout / "manage.py"), *arguments]
    os.execve(command[0], command, config.environment(who))  # noqa: S606 - no shell is meant


if __name__ == "__main__":
    main(sys.argv[1:])
