"""Views of the past: a generation of a sandbox's history, opened for its files.

A view is a disk of its own whose head is that generation. A host attaches it and serves its
files as it serves those of a paused sandbox; it is closed when nobody has read for a while,
and nothing of it is kept.
"""

from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from common.errors import Refused
from hosts.models import Generation, Volume
from hosts.services import attach_volume, detach_volume, keep_generation, new_volume
from sandboxes import actors
from sandboxes.errors import MomentNotFound
from sandboxes.events import announce
from sandboxes.models import FileView, Sandbox
from sandboxes.services import host_for_files, locked, refuse_if_ending, send_to_host

# Each takes the host some memory; one that is idle is closed within a minute.
MAX_VIEWS = 8
# A host that has not been heard of for this long will not open it.
HOST_LOST_AFTER = timedelta(seconds=60)


class TooManyViews(Refused):
    code = "conflict"
    status = 409

    def __str__(self) -> str:
        return (
            f"The files of {MAX_VIEWS} moments of this sandbox are open. One that nobody reads "
            "is closed within a minute; try again then."
        )


def request_view(*, sandbox: Sandbox, number: int) -> FileView:
    """Ask a host to serve the files of a moment; does nothing while one does.

    They are served once its volume's `files_ready_at` is set.

    Raises:
        MomentNotFound: the disk's history has no such generation (any more).
        TooManyViews, NoCapacity, WrongState: nothing is opened.
    """
    with transaction.atomic():
        sandbox = locked(sandbox)
        refuse_if_ending(sandbox)
        generation = _own_moment(sandbox, number)
        found = FileView.objects.filter(generation=generation)
        view = found.select_related("volume__attached_host").first()
        if view is not None and _is_served(view):
            return view
        if view is not None:
            forget_view(view)
        return _open(sandbox, generation)


def _own_moment(sandbox: Sandbox, number: int) -> Generation:
    generation = sandbox.volume.generations.filter(number=number).first()
    if generation is None:
        raise MomentNotFound(number)
    keep_generation(generation)
    return generation


def _is_served(view: FileView) -> bool:
    """Tell whether a view is open, or may still be opened by the host it was given to."""
    host = view.volume.attached_host
    return host is not None and host.is_alive and not view.error


def _open(sandbox: Sandbox, generation: Generation) -> FileView:
    if sandbox.file_views.count() >= MAX_VIEWS:
        raise TooManyViews
    host = host_for_files()
    volume = new_volume(owner=str(sandbox.team_id), head=generation)
    volume = attach_volume(volume.pk, host=host, purpose=Volume.Purpose.FILES)
    view = FileView.objects.create(sandbox=sandbox, generation=generation, volume=volume)
    view.volume.attached_host = host
    send_to_host(actors.open_view, str(view.pk), host)
    return view


def forget_view(view: FileView) -> None:
    """Let a view go; the host that has it takes its disk down by itself."""
    with transaction.atomic():
        volume = view.volume
        detach_volume(volume.pk, epoch=volume.epoch)
        Volume.objects.filter(pk=volume.pk).update(deleted_at=timezone.now(), head=None)
        FileView.objects.filter(pk=view.pk).delete()
        announce(view.sandbox)


def forget_lost_views() -> None:
    """Let the views go whose host is not heard of any more, and which would stay for ever."""
    lost = FileView.objects.filter(
        volume__attached_host__seen_at__lt=timezone.now() - HOST_LOST_AFTER
    )
    for view in lost.select_related("sandbox", "volume")[:200]:
        forget_view(view)
