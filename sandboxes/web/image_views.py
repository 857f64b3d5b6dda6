"""Disks as files in the console: exports of sandboxes and snapshots, imports of templates.

An upload is a form like any other, but reaches its view before its body does (see
`common.api.bodies`): who may not import is told at once, and the file goes to a temporary
one that is counted while it grows.
"""

import errno
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore
from typing import Any

from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import StopUpload, TemporaryFileUploadHandler
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.decorators.http import require_GET, require_http_methods

from accounts.web.access import TeamRequest, doer, permission_required
from common.errors import Unavailable
from common.units import MiB
from sandboxes import images, imports, snapshots
from sandboxes.errors import TemplateExists
from sandboxes.templatetags.console import size
from sandboxes.web.answers import leave_to, sandbox_or_404, shows_refusals
from sandboxes.web.forms import ImportForm

# Each has a thread and a file of up to IMPORT_MAX_BYTES while it comes.
MAX_UPLOADS = 2
# What a form has around its file.
FORM_BYTES = MiB
READ_BYTES = MiB

_uploads = BoundedSemaphore(MAX_UPLOADS)


class TooManyUploads(Unavailable):
    """This process takes no more uploads now."""

    def __str__(self) -> str:
        return "Other images are being uploaded. Try again in a few minutes."


class NoRoom(Unavailable):
    """The upload does not fit on this machine now."""

    def __str__(self) -> str:
        return "There is no room for the image now. Nothing was made. Try again later."


@require_GET
@permission_required("sandbox:read")
@shows_refusals
def sandbox_export(request: TeamRequest, sandbox_id: str) -> HttpResponseBase:
    """Send the sandbox's disk as it is now."""
    sandbox = sandbox_or_404(request, sandbox_id)
    return _sent(images.export_sandbox(sandbox, by=doer(request)))


@require_GET
@permission_required("sandbox:read")
@shows_refusals
def snapshot_export(request: TeamRequest, snapshot_id: str) -> HttpResponseBase:
    """Send the disk that a snapshot keeps."""
    snapshot = snapshots.find_snapshot(snapshot_id, request.team)
    return _sent(images.export_snapshot(snapshot, by=doer(request)))


def _sent(opening: Awaitable[images.ImageDownload]) -> HttpResponseBase:
    async def opened() -> images.ImageDownload:
        return await opening

    # On the server's loop, where the connections to hosts live.
    return images.sent(async_to_sync(opened)())


# -- imports ------------------------------------------------------------------------------


class ImageUpload(TemporaryFileUploadHandler):
    """Puts a file into a temporary one as it comes, as long as it is not too large."""

    is_too_large = False
    _taken_bytes = 0

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        """Begin with a file, unless the form is said to be too large for it."""
        announced = (self.request and self.request.META.get("CONTENT_LENGTH")) or ""
        if announced.isdigit() and int(announced) > settings.IMPORT_MAX_BYTES + FORM_BYTES:
            self._refuse()
        super().new_file(*args, **kwargs)

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        """Write a piece."""
        self._taken_bytes += len(raw_data)
        if self._taken_bytes > settings.IMPORT_MAX_BYTES:
            self._refuse()
        super().receive_data_chunk(raw_data, start)

    def _refuse(self) -> None:
        self.is_too_large = True
        raise StopUpload(connection_reset=True)


# Middleware would read all of the form for its token, before the view says who may send it.
@csrf_exempt
@require_http_methods(["GET", "POST"])
@permission_required("template:create")
@shows_refusals
def template_import(request: TeamRequest) -> HttpResponseBase:
    """Make a template of an image that the reader uploads, and show how far it is."""
    if request.method != "POST":
        return _form(request, ImportForm())
    upload = ImageUpload(request)
    request.upload_handlers = [upload]
    with _place():
        response: HttpResponseBase = csrf_protect(_import)(request, upload)
    return response


@contextmanager
def _place() -> Iterator[None]:
    if not _uploads.acquire(blocking=False):
        raise TooManyUploads
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoRoom from error
        raise
    finally:
        _uploads.release()


def _import(request: TeamRequest, upload: ImageUpload) -> HttpResponseBase:
    form = ImportForm(request.POST, request.FILES)
    is_valid = form.is_valid()
    if upload.is_too_large:
        form.errors.clear()
        form.add_error("image", f"It is larger than {size(settings.IMPORT_MAX_BYTES)}.")
    if upload.is_too_large or not is_valid:
        return _form(request, form)
    given = form.cleaned_data
    image: UploadedFile[bytes] = given["image"]
    try:
        async_to_sync(imports.import_template)(
            team=request.membership.team,
            by=doer(request),
            template_id=given["template_id"],
            spec=_spec(given),
            body=_pieces_of(image),
            size_bytes=image.size or 0,
        )
    except TemplateExists as error:
        form.add_error("template_id", str(error))
    except imports.ImageRefused as error:
        form.add_error("image", str(error))
    else:
        return leave_to(request, "template-list")
    return _form(request, form)


def _spec(given: dict[str, Any]) -> dict[str, str]:
    spec = {"displayName": given["display_name"], "description": given["description"]}
    return {name: value for name, value in spec.items() if value}


async def _pieces_of(image: UploadedFile[bytes]) -> AsyncIterator[bytes]:
    # It has just been written, so a read takes no time worth a thread.
    while piece := image.read(READ_BYTES):
        yield piece


def _form(request: TeamRequest, form: ImportForm) -> HttpResponse:
    context = {"form": form, "limit": size(settings.IMPORT_MAX_BYTES)}
    status = 422 if form.errors else 200
    return render(request, "sandboxes/template_import.html", context, status=status)
