"""Storing what was written to a paused sandbox's files, which stay open. Safe to repeat."""

import logging

from hosts import local
from hosts.models import Volume
from hosts.paused_files import FilesUnavailable
from hosts.volumes.errors import NotAttached
from sandboxes import operations
from sandboxes.events import announce
from sandboxes.models import Sandbox

log = logging.getLogger(__name__)


def commit_files(sandbox_id: str) -> None:
    """Make what was written a generation of its own.

    Where the files cannot be held still for the cut, or the disk under them died, they are
    closed, which stores it too.

    Raises:
        Unavailable: it is not all stored yet; the message comes again.
    """
    sandbox = _read(sandbox_id)
    try:
        with local.guest_lock(sandbox.uuid):
            sandbox = _read(sandbox_id)
            volume = sandbox.volume
            if sandbox.state == Sandbox.State.PAUSED and _has_changes(volume):
                operations.store_files(volume)
                announce(sandbox)
    except (FilesUnavailable, NotAttached) as error:
        log.info("the files of sandbox %s are closed to be stored: %s", sandbox_id, error)
        operations.close_files(sandbox_id)


def _read(sandbox_id: str) -> Sandbox:
    related = ("volume__head", "volume__attached_host")
    return Sandbox.objects.select_related(*related).get(pk=sandbox_id)


def _has_changes(volume: Volume) -> bool:
    if volume.attached_for != Volume.Purpose.FILES or not operations.holds(volume):
        return False
    files = local.paused_files()
    return files.is_open(volume.pk) and files.is_dirty(volume.pk)
