"""The Files tab: a sandbox's directories and files, whether it runs or sleeps.

A page comes at once and then asks for what is on the disk, which may have to be opened
first. What a file holds is hostile: it is shown as text or as an image, in a document that
may run nothing, and is otherwise only ever downloaded.
"""

import mimetypes
import posixpath
import re
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from urllib.parse import quote

from asgiref.sync import async_to_sync
from asyncssh import SFTPClient
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_POST

from accounts.web.access import TeamRequest, permission_required
from common.errors import DomainError
from common.units import KiB, MiB
from sandboxes import files
from sandboxes.access import files_of, with_files
from sandboxes.errors import BadPath, FileMissing, PathExists
from sandboxes.filenames import to_text
from sandboxes.files import FileInfo
from sandboxes.models import Sandbox
from sandboxes.web.answers import refusal, sandbox_or_404
from sandboxes.web.views import head_context

HOME = b"/root"
PAGE_ENTRIES = 500
MAX_EDIT_BYTES = 1 * MiB
READ_BODY_BYTES = 512 * KiB

# What a browser draws without running anything of it.
IMAGES = frozenset(
    f"image/{kind}"
    for kind in ("png", "jpeg", "gif", "webp", "avif", "bmp", "vnd.microsoft.icon", "svg+xml")
)
# A document of a guest may load nothing and run nothing, whatever it holds.
SANDBOXED = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"

# CodeMirror's mode for a name; what is not here is plain text.
MODES = {
    ".py": "python", ".js": "javascript", ".mjs": "javascript", ".ts": "javascript",
    ".json": "javascript", ".sh": "shell", ".bash": "shell", ".bashrc": "shell",
    ".profile": "shell", ".c": "clike", ".h": "clike", ".cpp": "clike", ".java": "clike",
    ".go": "go", ".rs": "rust", ".rb": "ruby", ".css": "css", ".html": "htmlmixed",
    ".xml": "xml", ".md": "markdown", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml",
    ".sql": "sql", "Dockerfile": "dockerfile", ".diff": "diff", ".lua": "lua",
}  # fmt: skip
# What a mode is built from, in the order in which it must be loaded.
MODE_PARTS = {
    "htmlmixed": ("xml", "javascript", "css", "htmlmixed"),
    "markdown": ("xml", "markdown"),
    "rust": ("rust",),
}
SIMPLE_MODES = frozenset(("rust", "dockerfile"))

AsyncPage = Callable[[TeamRequest, str], Awaitable[HttpResponseBase]]
Page = Callable[[TeamRequest, str], HttpResponseBase]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A line of a directory, as the page shows it."""

    info: FileInfo
    path: str
    name: str
    target: str

    @property
    def mode(self) -> str:
        """The mode as `ls` writes it, without the letter of the kind."""
        return stat.filemode(self.info.mode)[1:]

    @property
    def is_directory(self) -> bool:
        return self.info.kind == "dir"

    @property
    def icon(self) -> str:
        kinds = {"dir": "folder-filled", "symlink": "link"}
        return kinds.get(self.info.kind, "photo" if is_image(self.path) else "file")


def on_the_loop(view: AsyncPage) -> Page:
    """Run an async view of a sandbox that is there, on the server's loop.

    That is where the connections to guests live.
    """

    @wraps(view)
    def run(request: TeamRequest, sandbox_id: str) -> HttpResponseBase:
        sandbox_or_404(request, sandbox_id)
        # The middleware's look-up is lazy and uses the database, which the loop must not.
        request.team = request.membership.team
        return async_to_sync(view)(request, sandbox_id)

    return run


@require_GET
@permission_required("sandbox:read")
def file_browse(request: TeamRequest, sandbox_id: str) -> HttpResponse:
    """Show the tab; the listing follows by itself."""
    sandbox = sandbox_or_404(request, sandbox_id)
    context = head_context(request, sandbox) | {
        "tab": "files",
        "path": request.GET.get("path") or to_text(HOME),
        "moment_query": _as_query(request),
    }
    return render(request, "sandboxes/files.html", context)


@require_GET
@permission_required("sandbox:read")
def file_list(request: TeamRequest, sandbox_id: str) -> HttpResponseBase:
    """Show one page of a directory, or say why it cannot be shown."""
    sandbox = sandbox_or_404(request, sandbox_id)
    moment_query = _as_query(request)
    context: dict[str, object] = {
        "sandbox": sandbox,
        "may": {} if moment_query else head_context(request, sandbox)["may"],
        "moment_query": moment_query,
        "generation": request.GET.get("generation"),
    }
    try:
        path = _path(request)
        entries, is_cut = _listed(request, sandbox, path)
    except DomainError as error:
        context |= {"error": str(error), "path": request.GET.get("path", "/")}
        return render(request, "sandboxes/file_list.html", context)
    start = _start(request, len(entries))
    sandbox.refresh_from_db(fields=["state"])
    context |= {
        "path": to_text(path),
        "crumbs": crumbs(path),
        "parent": to_text(posixpath.dirname(path)) if path != b"/" else None,
        "entries": [_entry(info) for info in entries[start : start + PAGE_ENTRIES]],
        "count": len(entries),
        "is_cut": is_cut,
        "first": start + 1,
        "last": min(start + PAGE_ENTRIES, len(entries)),
        "before": max(0, start - PAGE_ENTRIES) if start else None,
        "after": start + PAGE_ENTRIES if start + PAGE_ENTRIES < len(entries) else None,
    }
    return render(request, "sandboxes/file_list.html", context)


def _listed(request: TeamRequest, sandbox: Sandbox, path: bytes) -> tuple[list[FileInfo], bool]:
    team, generation = request.membership.team, _generation(request)

    async def read() -> tuple[list[FileInfo], bool]:
        return await with_files(
            sandbox.id,
            team,
            lambda sftp: files.list_directory(sftp, path),
            generation=generation,
        )

    entries, is_cut = async_to_sync(read)()
    # By name within directories and within the rest, which is how people look for things.
    entries.sort(key=lambda entry: (entry.kind != "dir", entry.name.lower()))
    return entries, is_cut


@require_GET
@permission_required("sandbox:read")
def file_view(request: TeamRequest, sandbox_id: str) -> HttpResponseBase:
    """Show a file: text in an editor, an image as such, and of the rest what is known."""
    sandbox = sandbox_or_404(request, sandbox_id)
    context = head_context(request, sandbox) | {
        "tab": "files",
        "moment_query": _as_query(request),
    }
    context["generation"] = request.GET.get("generation")
    try:
        path = _path(request)
        info, text = _read(request, sandbox, path)
    except DomainError as error:
        context |= {"error": str(error), "path": request.GET.get("path", "/")}
        return render(request, "sandboxes/file.html", context, status=error.status)
    mode = mode_of(path)
    context |= {
        "path": to_text(path),
        "crumbs": crumbs(path),
        "info": info,
        "version": version_of(info),
        "text": text,
        "line_ends": line_ends(text or ""),
        "is_image": text is None and is_image(to_text(path)),
        "mode": mode,
        "mode_parts": MODE_PARTS.get(mode, (mode,)) if mode else (),
        "mode_is_simple": mode in SIMPLE_MODES,
        "max_edit_bytes": MAX_EDIT_BYTES,
    }
    return render(request, "sandboxes/file.html", context)


def _read(request: TeamRequest, sandbox: Sandbox, path: bytes) -> tuple[FileInfo, str | None]:
    """Return what is known of a file, and its text if it is one that can be edited."""
    team, generation = request.membership.team, _generation(request)

    async def read() -> tuple[FileInfo, bytes]:
        sftp = await files_of(sandbox.id, team, generation=generation)
        info = await files.stat_file(sftp, path)
        opened = await files.open_file(sftp, path)
        return info, await _up_to(opened.pieces, MAX_EDIT_BYTES + 1)

    info, content = async_to_sync(read)()
    if len(content) > MAX_EDIT_BYTES or b"\0" in content:
        return info, None
    try:
        return info, content.decode()
    except UnicodeDecodeError:
        return info, None


async def _up_to(pieces: AsyncIterator[bytes], limit_bytes: int) -> bytes:
    content = bytearray()
    async for piece in pieces:
        content += piece
        if len(content) >= limit_bytes:
            break
    if isinstance(pieces, AsyncGenerator):
        await pieces.aclose()  # it closes the file
    return bytes(content)


@require_GET
@permission_required("sandbox:read")
@on_the_loop
async def file_raw(request: TeamRequest, sandbox_id: str) -> HttpResponseBase:
    """Send a file's bytes: an image to be drawn, anything else to be saved."""
    try:
        path = _path(request)
        opened = await with_files(
            sandbox_id,
            request.team,
            lambda sftp: files.open_file(sftp, path),
            generation=_generation(request),
        )
    except DomainError as error:
        return refusal(error)
    kind = mimetypes.guess_type(to_text(path))[0] or ""
    inline = kind in IMAGES and "download" not in request.GET
    response = StreamingHttpResponse(
        opened.pieces, content_type=kind if inline else "application/octet-stream"
    )
    if opened.size_bytes is not None:
        response["Content-Length"] = str(opened.size_bytes)
    if not inline:
        # Quoted byte for byte, so that a name with quotes or line ends stays a name.
        name = quote(posixpath.basename(path), safe="")
        response["Content-Disposition"] = f"attachment; filename*=UTF-8''{name}"
    response["Content-Security-Policy"] = SANDBOXED
    response["X-Content-Type-Options"] = "nosniff"
    response["Cache-Control"] = "private, no-store"
    return response


@require_POST
@permission_required("sandbox:write")
@on_the_loop
async def file_write(request: TeamRequest, sandbox_id: str) -> HttpResponseBase:
    """Write the request's raw body to a file, whole or not at all.

    With `was`, the version that the reader saw, it is refused where the file has changed
    since: what somebody or some program wrote meanwhile is not lost. With `new` it is
    refused where there is something already.
    """
    try:
        path = _path_to_change(request)
        sftp = await files_of(sandbox_id, request.team)
        was = request.GET.get("was")
        if was and version_of(await files.stat_file(sftp, path)) != was:
            text = (
                "The file has changed since you opened it. Open it again, or save as another."
            )
            return HttpResponse(text, status=409, content_type="text/plain; charset=utf-8")
        if "new" in request.GET and await _is_there(sftp, path):
            raise PathExists(to_text(path))
        length = request.headers.get("Content-Length", "")
        size_bytes = int(length) if length.isdigit() else None
        await files.write_file(sftp, path, _body(request), size_bytes=size_bytes)
        written = await files.stat_file(sftp, path)
    except DomainError as error:
        return refusal(error)
    return HttpResponse(version_of(written), content_type="text/plain; charset=utf-8")


async def _body(request: TeamRequest) -> AsyncIterator[bytes]:
    # The server has it on disk already, so a read takes no time worth a thread.
    while piece := request.read(READ_BODY_BYTES):
        yield piece


@require_POST
@permission_required("sandbox:write")
@on_the_loop
async def file_mkdir(request: TeamRequest, sandbox_id: str) -> HttpResponseBase:
    """Make a directory."""
    try:
        path = _path_to_change(request)
        sftp = await files_of(sandbox_id, request.team)
        await files.make_directory(sftp, path, recursive=False)
    except DomainError as error:
        return refusal(error)
    return HttpResponse(status=204)


@require_POST
@permission_required("sandbox:write")
@on_the_loop
async def file_move(request: TeamRequest, sandbox_id: str) -> HttpResponseBase:
    """Give a file or directory another path, and never put it over another file."""
    try:
        source = _path_to_change(request)
        destination = files.parse_path(request.POST.get("to", ""), "to")
        sftp = await files_of(sandbox_id, request.team)
        if await _is_there(sftp, destination):
            text = f"There is already a {to_text(destination)}."
            return HttpResponse(text, status=409, content_type="text/plain; charset=utf-8")
        await files.move_file(sftp, source, destination)
    except DomainError as error:
        return refusal(error)
    return HttpResponse(status=204)


@require_POST
@permission_required("sandbox:write")
@on_the_loop
async def file_delete(request: TeamRequest, sandbox_id: str) -> HttpResponseBase:
    """Delete a file, or a directory with all that is in it."""
    try:
        path = _path_to_change(request)
        sftp = await files_of(sandbox_id, request.team)
        await files.delete_path(sftp, path)
    except DomainError as error:
        return refusal(error)
    return HttpResponse(status=204)


async def _is_there(sftp: SFTPClient, path: bytes) -> bool:
    try:
        await files.stat_file(sftp, path)
    except FileMissing:
        return False
    return True


def crumbs(path: bytes) -> list[tuple[str, str]]:
    """Return each directory on the way to a path, and the path, as (name, path)."""
    found = []
    at = b""
    for name in path.strip(b"/").split(b"/"):
        if name:
            at += b"/" + name
            found.append((to_text(name), to_text(at)))
    return found


def is_image(path: str) -> bool:
    """Say whether a file's name promises an image that a browser can draw."""
    return mimetypes.guess_type(path)[0] in IMAGES


def mode_of(path: bytes) -> str:
    """Return the editor's mode for a file's name; empty for plain text."""
    name = to_text(posixpath.basename(path))
    extension = posixpath.splitext(name)[1] or name
    return MODES.get(extension.lower(), MODES.get(name, ""))


def line_ends(text: str) -> str:
    """Return `lf` or `crlf`; `mixed` where an editor could not give back what it was given."""
    if "\r" not in text:
        return "lf"
    pairs = text.count("\r\n")
    return "crlf" if pairs == text.count("\n") == text.count("\r") else "mixed"


def version_of(info: FileInfo) -> str:
    """Return what changes whenever somebody writes the file."""
    return f"{info.modified_at.timestamp():.0f}-{info.size_bytes}"


def _path(request: TeamRequest) -> bytes:
    return files.parse_path(request.GET.get("path") or to_text(HOME))


def _path_to_change(request: TeamRequest) -> bytes:
    if "generation" in request.GET:
        raise BadPath("generation", "the past can be read, restored and forked only.")
    return _path(request)


def _generation(request: TeamRequest) -> int | None:
    """Return which moment of the history is meant, None where it is now."""
    text = request.GET.get("generation")
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise BadPath("generation", "it is a number from the sandbox's history.")
    return int(text)


def _as_query(request: TeamRequest) -> str:
    """Return what keeps a link of the page at the moment of the history that it shows."""
    generation = request.GET.get("generation")
    return "" if generation is None else f"&generation={quote(generation, safe='')}"


def _start(request: TeamRequest, count: int) -> int:
    asked = request.GET.get("from", "")
    start = int(asked) if re.fullmatch(r"[0-9]{1,9}", asked) else 0
    return start if start < count else 0


def _entry(info: FileInfo) -> Entry:
    target = to_text(info.link_target) if info.link_target is not None else ""
    return Entry(info=info, path=to_text(info.path), name=to_text(info.name), target=target)
