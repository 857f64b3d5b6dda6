"""Work of the platform in processes of its own, for tests that kill it half way.

One process with Django set up forks another for each piece of work: to start them one by one
would cost more than what is tested. Use the `processes` fixture.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from hosts.volumes.failpoints import VARIABLE
from tests.forker import start_forker


class Processes:
    """The process that forks others, seen from the tests."""

    def __init__(self) -> None:
        self._process = start_forker(__name__)

    def run(self, work: Callable[..., None], *args: Any, failpoints: str = "") -> int:
        """Call a function of a test module elsewhere; negative is the signal that ended it.

        It sees the rows of tests that commit them (`transactional_db`), and its arguments as
        JSON has them.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [
            work.__module__,
            work.__name__,
            args,
            failpoints,
            connection.settings_dict["NAME"],
        ]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """What can be killed."""
    found = Processes()
    yield found
    found.close()


def serve() -> None:
    """Fork a process for each request until the input ends."""
    import django  # noqa: PLC0415

    django.setup()
    for line in sys.stdin:
        module, name, args, failpoints, database = json.loads(line)
        work = getattr(importlib.import_module(module), name)
        pid = os.fork()
        if not pid:
            os.dup2(2, 1)
            os.environ[VARIABLE] = failpoints
            connection.settings_dict["NAME"] = database
            try:
                work(*args)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
