"""What a host's worker does to show the files of a past moment. Safe to repeat."""

import logging
from contextlib import suppress

from django.db import transaction
from django.utils import timezone

from common.errors import Refused
from hosts import local
from hosts.models import Volume
from hosts.paused_files import FileSystemDamaged
from hosts.services import detach_volume, mark_files_ready
from hosts.volumes.errors import NotAttached
from sandboxes import operations
from sandboxes.events import announce
from sandboxes.models import FileView, Sandbox

log = logging.getLogger(__name__)

GONE = (Sandbox.State.TERMINATING, Sandbox.State.DELETED)


def open_view(view_id: str) -> None:
    """Serve the files of a moment, until nobody has read them for a while.

    Raises:
        Unavailable: they are not served; the message comes again.
    """
    view = _read(view_id)
    if view is None:
        return
    with local.guest_lock(view.volume_id):
        view = _read(view_id)
        if view is None or not operations.holds(view.volume):
            return
        try:
            if not local.paused_files().is_open(view.volume_id):
                operations.mount_files(view.volume)
        except FileSystemDamaged as error:
            _fail(view, error)
            return
        mark_files_ready(view.volume_id, epoch=view.volume.epoch, at=timezone.now())
        announce(view.sandbox)


def _read(view_id: str) -> FileView | None:
    views = FileView.objects.select_related("sandbox", "volume__head", "volume__attached_host")
    return views.filter(pk=view_id).first()


def _fail(view: FileView, error: Refused) -> None:
    log.warning("the files of %s cannot be shown: %s", view, error)
    view.error = str(error)[:300]
    view.save(update_fields=["error"])
    announce(view.sandbox)


def close_view(view_id: str) -> None:
    """Serve the files of a moment no longer, and forget the disk that showed them."""
    view = _read(view_id)
    if view is None:
        return
    volume = view.volume
    with local.guest_lock(volume.pk):
        if not operations.holds(volume):
            return
        mark_files_ready(volume.pk, epoch=volume.epoch, at=None)
        files, disks = local.paused_files(), local.disks()
        files.close(volume.pk)
        files.clear_dirty(volume.pk)
        with suppress(NotAttached):  # its daemon died: detaching takes the rest away
            disks.drop_fuse(volume.pk)
        disks.detach(volume.pk, discard=True)
        with transaction.atomic():
            detach_volume(volume.pk, epoch=volume.epoch)
            FileView.objects.filter(pk=view.pk).delete()
            Volume.objects.filter(pk=volume.pk).update(deleted_at=timezone.now(), head=None)
            announce(view.sandbox)
