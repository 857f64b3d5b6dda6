"""Workers in processes of their own, for tests that kill them.

One process with everything imported forks a worker for each request: starting a Python
with boto3 for each would cost more than what is tested. A line on its input is a
request, a line on its output the exit status of its worker.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any
from uuid import UUID

from hosts.volumes.commit import Commit
from hosts.volumes.disks import Disks, DisksConfig
from hosts.volumes.errors import HeadMoved
from hosts.volumes.failpoints import VARIABLE
from hosts.volumes.objects import StoreConfig
from tests.forker import start_forker
from tests.hosts.volumes.given_keys import KeyForEach


class Workers:
    """The process that forks workers, seen from the tests."""

    def __init__(self) -> None:
        self._process = start_forker(__name__)

    def run(self, config: Path, operation: str, failpoints: str) -> int:
        """Carry out one operation in a new worker; negative is the signal that ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(config), operation, failpoints]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def carry_out(values: dict[str, Any], operation: str) -> None:
    """Do one operation on the disk that the configuration names."""
    disks = Disks(
        DisksConfig(
            run_dir=Path(values["run_dir"]),
            state_dir=Path(values["state_dir"]),
            store=StoreConfig(**values["store"]),
            cache_budget_bytes=values["cache_budget_bytes"],
            keys=KeyForEach(),
        )
    )
    volume_id = UUID(values["volume_id"])
    head = Path(values["head_file"])

    def publish(commit: Commit) -> None:
        if head.read_text() not in (commit.base_root_key, commit.root_key):
            raise HeadMoved(volume_id, head.read_text())
        new = head.with_suffix(".new")
        new.write_text(commit.root_key)
        new.replace(head)

    if operation == "attach":
        disks.attach(volume_id, root_key=head.read_text(), epoch=values["epoch"])
    elif operation == "checkpoint":
        disks.checkpoint(volume_id, publish)
    elif operation == "commit":
        disks.commit(volume_id, publish)
    elif operation == "detach":
        disks.detach(volume_id, discard=True)


def serve() -> None:
    """Fork a worker for each request until the input ends."""
    for line in sys.stdin:
        config, operation, failpoints = json.loads(line)
        pid = os.fork()
        if not pid:
            os.environ[VARIABLE] = failpoints
            try:
                carry_out(json.loads(Path(config).read_text()), operation)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
