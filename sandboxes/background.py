"""Commits of running disks in the background, by threads of the host's worker.

The keeper says which disks are due and how they are; here are the rows that belong to them.
No message is sent and no lock of a guest is taken: a commit that waits for a slow object
store keeps neither the queue's workers nor a pause from anything. What a killed worker had
begun, the next one's first commit goes on with.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from uuid import UUID

from django import db
from django.conf import settings
from dramatiq import Worker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Middleware

from common.errors import Refused, Unavailable
from hosts import local
from hosts.keeper import Keeper
from hosts.models import Generation, Volume
from hosts.services import packs_to_rewrite
from sandboxes import disk_samples, operations
from sandboxes.events import announce
from sandboxes.models import Sandbox

log = logging.getLogger(__name__)

T = TypeVar("T")

COMMITS_AT_ONCE = 4
"""Each has several uploads under way; more would only share the same line."""


def commit_in_background(volume_id: UUID) -> bool:
    """Commit what a running sandbox has written, as it is; tell whether there was any.

    Crash-consistent: the guest is neither asked nor held. A disk that is paused, taken away
    or handed over meanwhile is left to whoever did that.
    """
    sandbox = _running_on(volume_id)
    if sandbox is None:
        return False
    publish = operations.publisher(sandbox.volume, Generation.Kind.BACKGROUND)
    try:
        commit = local.disks().checkpoint(
            volume_id, publish, background=True, rewrite=packs_to_rewrite(volume_id)
        )
    except (Refused, Unavailable) as error:
        log.info("volume %s is not stored yet: %s", volume_id, error)
        return False
    if commit is None:
        return False
    disk_samples.record(sandbox)
    announce(sandbox)
    return True


def tell_health(volume_id: UUID, health: str) -> None:
    """Say on the sandbox's row what is the matter with its disk; empty when nothing is."""
    sandbox = _running_on(volume_id)
    if sandbox is None or sandbox.health == health:
        return
    changed = Sandbox.objects.filter(pk=sandbox.pk, state=Sandbox.State.RUNNING).update(
        health=health
    )
    if changed:
        log.warning("sandbox %s: %s", sandbox.id, health or "its disk is well again")
        announce(sandbox)


def _running_on(volume_id: UUID) -> Sandbox | None:
    return (
        Sandbox.objects.filter(
            volume_id=volume_id,
            state=Sandbox.State.RUNNING,
            host=local.this_host(),
            volume__attached_for=Volume.Purpose.RUN,
        )
        .select_related("team", "host", "volume")
        .first()
    )


class BackgroundCommits:
    """Commits disks that are due, a few at once, each by one thread at a time."""

    def __init__(self, commit: Callable[[UUID], object] = commit_in_background) -> None:
        self._commit = commit
        self._pool = ThreadPoolExecutor(COMMITS_AT_ONCE, thread_name_prefix="commit")
        self._lock = threading.Lock()
        self._under_way: set[UUID] = set()

    def due(self, volume_id: UUID) -> None:
        """Have a volume committed soon; returns at once."""
        with self._lock:
            if volume_id in self._under_way:
                return
            self._under_way.add(volume_id)
        self._pool.submit(self._run, volume_id)

    def _run(self, volume_id: UUID) -> None:
        try:
            _with_database(self._commit, volume_id)
        except Exception:
            # Whatever it was, the writes are kept, and the keeper asks again.
            log.exception("the commit of volume %s failed", volume_id)
        finally:
            with self._lock:
                self._under_way.discard(volume_id)

    def stop(self) -> None:
        """Wait for the commits that are under way, and begin no more."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _with_database(work: Callable[..., T], *args: object) -> T:
    """Do some work in a thread that nobody else closes the connections of."""
    db.close_old_connections()
    try:
        return work(*args)
    finally:
        db.close_old_connections()


class KeeperMiddleware(Middleware):
    """Runs the host's keeper for as long as its worker process lives."""

    def __init__(self) -> None:
        self._keeper: Keeper | None = None
        self._commits: BackgroundCommits | None = None

    def after_worker_boot(self, broker: Any, worker: Worker) -> None:
        """Begin to look after this host's disks."""
        if isinstance(broker, StubBroker):
            return
        local.disks().tidy()
        self._commits = BackgroundCommits()
        self._keeper = Keeper(
            local.disks(),
            due=self._commits.due,
            on_health=lambda volume_id, health: _with_database(tell_health, volume_id, health),
            mend=lambda volume_id: _with_database(local.disks().mend, volume_id),
            commit_every_s=settings.COMMIT_EVERY_S,
        )
        self._keeper.start()

    def before_worker_shutdown(self, broker: Any, worker: Worker) -> None:
        """Look after them no longer. Limits that were set stay, and hold by themselves."""
        if self._keeper is not None:
            self._keeper.stop()
        if self._commits is not None:
            self._commits.stop()
