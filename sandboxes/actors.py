"""How the work of `sandboxes.operations` reaches a host's worker.

An actor takes ids, and calls one operation: what to do is decided there, when to try again
here. A message may arrive twice or late, so operations are safe to repeat. Each is sent to
the queue of one host, which only that host's worker reads.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import dramatiq
from dramatiq.errors import Retry

from common.errors import Refused
from common.queue import send_to
from common.units import MINUTE
from hosts import collection
from hosts.errors import GuestBusy
from sandboxes import exporting, file_commits, importing, operations, past_files, storage
from sandboxes.watch import Watcher

HostActor = dramatiq.Actor[Any, Any]

# Longer than any boot or upload that still makes progress; both have time-outs of their own.
TIME_LIMIT_MS = 60 * MINUTE * 1000
# A customer waits: try again soon, and never so seldom that a cured fault goes unnoticed.
RETRY: dict[str, Any] = {"max_retries": None, "min_backoff": 500, "max_backoff": 5_000}
# What the scheduler asks for again and again while a sandbox is between two states: an older
# message gives way to a newer one, or those of one that is stuck would only become more.
REPEATED: dict[str, Any] = RETRY | {"max_age": 2 * MINUTE * 1000}
# A heartbeat that could not be taken in time is worth nothing; the next one is due.
WATCH_MAX_AGE_MS = 6_000
# So is a collection: another host may have been asked since.
COLLECT_MAX_AGE_MS = 5 * MINUTE * 1000

T = TypeVar("T")

_watcher = Watcher()


def send(actor: HostActor, queue_name: str, *args: object) -> None:
    """Send an actor's message to a host's queue."""
    send_to(queue_name, actor, *args)


def _alone(operation: Callable[[str], T], sandbox_id: str) -> T:
    """Do an operation, or put it off quietly while another one is done to the guest."""
    try:
        return operation(sandbox_id)
    except GuestBusy as error:
        raise Retry(str(error)) from error


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, **REPEATED)
def boot_sandbox(sandbox_id: str) -> None:
    """Start the guest of a sandbox that is starting or resuming."""
    _alone(operations.boot, sandbox_id)


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, **REPEATED)
def pause_sandbox(sandbox_id: str) -> None:
    """Carry a pause out. Asked for without end: what it uploads is the only copy."""
    queue_name = _alone(operations.pause, sandbox_id)
    if queue_name is not None:
        send(boot_sandbox, queue_name, sandbox_id)


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, **REPEATED)
def destroy_sandbox(sandbox_id: str) -> None:
    """Take a sandbox down that is being deleted. Asked for until it is gone: it costs us."""
    _alone(operations.destroy, sandbox_id)


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, max_retries=3)
def checkpoint_sandbox(sandbox_id: str) -> None:
    """Commit the disk of a sandbox that runs on."""
    _alone(operations.checkpoint, sandbox_id)


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, **RETRY)
def cut_sandbox(sandbox_id: str) -> None:
    """Make the cuts that requests wait for; once they have given up there is none to make."""
    try:
        _alone(operations.cut, sandbox_id)
    except operations.CutTooSoon as error:
        raise Retry(str(error)) from error


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, max_retries=3, min_backoff=500)
def open_files(sandbox_id: str) -> None:
    """Serve the files of a paused sandbox."""
    _alone(operations.open_files, sandbox_id)


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, **RETRY)
def close_files(sandbox_id: str) -> None:
    """Commit what was written to a paused sandbox's files, and serve them no longer."""
    _alone(operations.close_files, sandbox_id)


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, **RETRY)
def commit_files(sandbox_id: str) -> None:
    """Store what was written to a paused sandbox's files, which stay open."""
    _alone(file_commits.commit_files, sandbox_id)


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, max_retries=5, min_backoff=500)
def open_view(view_id: str) -> None:
    """Serve the files of a moment of a sandbox's history."""
    _alone(past_files.open_view, view_id)


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, **RETRY)
def close_view(view_id: str) -> None:
    """Serve the files of a moment no longer."""
    _alone(past_files.close_view, view_id)


@dramatiq.actor(time_limit=5 * MINUTE * 1000, throws=Refused, max_retries=5, min_backoff=500)
def serve_image(cut_id: str) -> None:
    """Send the disk of a finished cut as a file to whoever asked for it."""
    exporting.serve_image(cut_id)


@dramatiq.actor(time_limit=MINUTE * 1000, throws=Refused, max_retries=5, min_backoff=500)
def take_image(template_pk: str) -> None:
    """Take the image of a template in."""
    importing.take_image(template_pk)


@dramatiq.actor(time_limit=TIME_LIMIT_MS, throws=Refused, **RETRY)
def import_template(template_pk: str) -> None:
    """Store an image that was taken in. Retried: what was uploaded is the only copy."""
    _alone(importing.import_template, template_pk)


@dramatiq.actor(time_limit=MINUTE * 1000, max_age=WATCH_MAX_AGE_MS, max_retries=0)
def watch_host() -> None:
    """Beat the host's heart, and see to what died or was left over on it."""
    for actor_name, sandbox_id in _watcher.look():
        send(dramatiq.get_broker().get_actor(actor_name), operations.this_queue(), sandbox_id)
    importing.drop_left_over_images()


@dramatiq.actor(time_limit=TIME_LIMIT_MS, max_age=COLLECT_MAX_AGE_MS, max_retries=0)
def collect_store() -> None:
    """Delete what no generation needs, on whichever host was asked; the next run goes on."""
    collection.collect()
    storage.meter_storage()


@dramatiq.actor(time_limit=TIME_LIMIT_MS, max_age=COLLECT_MAX_AGE_MS, max_retries=0)
def sweep_orphans() -> None:
    """Look for objects that no row knows."""
    collection.sweep_orphans()
