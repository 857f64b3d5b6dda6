"""A worker in a process of its own, for tests that kill it: `worker.py CONFIG OPERATION`."""

import json
import sys
from pathlib import Path
from uuid import UUID

from hosts.volumes.commit import Commit
from hosts.volumes.disks import Disks, DisksConfig
from hosts.volumes.objects import StoreConfig


def main(config: Path, operation: str) -> None:
    """Carry out one operation on the disk that the configuration names."""
    values = json.loads(config.read_text())
    disks = Disks(
        DisksConfig(
            run_dir=Path(values["run_dir"]),
            state_dir=Path(values["state_dir"]),
            store=StoreConfig(**values["store"]),
            cache_budget_bytes=values["cache_budget_bytes"],
        )
    )
    volume_id = UUID(values["volume_id"])
    head = Path(values["head_file"])

    def publish(commit: Commit) -> None:
        new = head.with_suffix(".new")
        new.write_text(commit.root_key)
        new.replace(head)

    if operation == "attach":
        disks.attach(volume_id, root_key=head.read_text(), epoch=1)
    elif operation == "checkpoint":
        disks.checkpoint(volume_id, publish)
    elif operation == "commit":
        disks.commit(volume_id, publish)
    elif operation == "detach":
        disks.detach(volume_id, discard=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
