"""Named places where a test can make the engine die or fail.

Active only through the environment variable SANDKEEP_FAILPOINTS, which no service sets:

    SANDKEEP_FAILPOINTS="checkpoint.rotated=kill"     this process dies as by kill -9
    SANDKEEP_FAILPOINTS="commit.packs=fail"           StoreUnavailable is raised
"""

import os
import signal

from hosts.volumes.errors import StoreUnavailable

VARIABLE = "SANDKEEP_FAILPOINTS"

NAMES = (
    "attach.recorded",  # the state file says what to start; nothing runs yet
    "attach.exported",  # the export runs
    "attach.served",  # the storage daemon runs
    "rotate.prepared",  # the daemon knows the next overlay, the state file does not
    "rotate.recorded",  # the state file has it on top, writes still go to the old
    "rotate.done",  # writes go to the new overlay
    "spare.export-moved",  # a spare is reached by its disk's socket, and is not the disk's yet
    "spare.export-set-up",
    "spare.daemon-moved",  # the same of a storage daemon, which has no nodes yet
    "spare.daemon-set-up",  # it serves the disk, and is not yet known to be the disk's
    "ahead.cut",  # the next commit is cut while the last is on its way
    "ahead.encoded",  # and encoded; nothing of it is put
    "commit.packs",  # packs are uploaded
    "commit.leaves",  # leaves too
    "commit.root",  # the root too
    "publish.before",  # the state file names the new root as pending
    "publish.after",  # the head has moved; the state file does not know
    "fold.begun",  # the layer takes in what the frozen overlays hold, in part or in whole
    "fold.recorded",  # it has all of it, and the state file says so
    "drop.recorded",  # the state file has the new root and no frozen overlay
    "drop.added",  # the daemon knows the new root
    "drop.reopened",  # the daemon reads through to it
    "drop.done",  # frozen overlay and old export are gone
    "commit.stopped",  # the storage daemon of a disk that is put away has ended
    "commit.settled",  # its state file says that everything is committed
    "detach.stopped",  # both daemons have ended
    "detach.forgotten",  # the state file is gone, the overlays are not
    "collect.reserved",  # an object of a repacking has a row, and is not in the store
    "collect.packs",  # what stays alive of sparse packs is copied
    "collect.root",  # the twin of a root is stored, and no generation has it yet
    "collect.moved",  # a generation has it
    "collect.buried",  # what no live root names is known to be dead
    "collect.forgotten",  # rows of dead objects are gone, the objects are not
    "collect.deleted",  # they are, too
    "collect.fenced",  # objects without rows can no longer be published
)


def reach(name: str) -> None:
    """Say that a named place is reached."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    if name not in NAMES:
        raise ValueError(f"No failpoint is called {name}.")
    action = dict(item.partition("=")[::2] for item in wanted.split(",")).get(name)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "fail":
        raise StoreUnavailable(f"Failing at {name}, as asked.")
