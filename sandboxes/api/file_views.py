"""Files of a sandbox, whether it runs or sleeps."""

import base64
import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from asyncssh import SFTPClient
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.views import AsyncTeamView
from common.api import bodies
from common.api.database import run_db
from common.api.envelope import ok
from sandboxes import files, listings
from sandboxes.access import files_of, find_sandbox, with_files
from sandboxes.api import schema
from sandboxes.api.bodies import instant
from sandboxes.api.serializers import Move
from sandboxes.errors import BadPath, FileTooLarge
from sandboxes.filenames import to_text

LIMIT = re.compile(r"[0-9]{1,6}", re.ASCII)
GENERATION = re.compile(r"[0-9]{1,9}", re.ASCII)


class FileView(AsyncTeamView):
    """What the views of files share: which path a request means."""

    async def path(self, sandbox_id: str, default: str = "") -> bytes:
        """Return the path in the query of a request about a sandbox that is there."""
        await run_db(find_sandbox, sandbox_id, self.team)
        return files.parse_path(self.query().get("path", default))

    def refuse_generation(self) -> None:
        """Refuse a change that means a moment of the past."""
        if "generation" in self.query():
            raise BadPath("generation", "the past can be read, restored and forked only.")

    def generation(self) -> int | None:
        """Return which moment of the sandbox's history is meant, None where it is now."""
        text = self.query().get("generation")
        if text is None:
            return None
        if not GENERATION.fullmatch(text):
            raise BadPath("generation", "it is a number from the sandbox's history.")
        return int(text)

    def query(self) -> dict[str, str]:
        """Return the query with bytes that are not UTF-8 kept, where Django replaces them."""
        raw = self.request.META.get("QUERY_STRING", "")
        return dict(parse_qsl(raw, keep_blank_values=True, errors="surrogateescape"))


class FileContent(FileView):
    """`/sandboxes/<id>/files`."""

    required_permission = {  # noqa: RUF012
        "GET": "sandbox:read",
        "POST": "sandbox:write",
        "DELETE": "sandbox:write",
    }

    @extend_schema(
        summary="Read a file",
        description=(
            "The raw bytes. Where Accept or Content-Type names application/json: "
            '{content, encoding: "base64"}, for files of at most 100 MiB.'
        ),
        parameters=[schema.PATH, schema.GENERATION],
        responses={(200, "application/octet-stream"): OpenApiTypes.BINARY}
        | schema.refusals(400, 403, 404, 409, 503),
    )
    async def get(self, request: Request, sandbox_id: str) -> HttpResponseBase:
        path = await self.path(sandbox_id)
        opened = await with_files(
            sandbox_id,
            self.team,
            lambda sftp: files.open_file(sftp, path),
            generation=self.generation(),
        )
        if _wants_json(request):
            return await _as_json(opened)
        response = StreamingHttpResponse(opened.pieces, content_type="application/octet-stream")
        if opened.size_bytes is not None:
            response["Content-Length"] = str(opened.size_bytes)
        return response

    @extend_schema(
        summary="Write a file, or make a directory",
        description=(
            "The raw body replaces the file, whole or not at all; directories above are made. "
            "With `mkdir=true` a directory is made and the answer is 201."
        ),
        parameters=[
            schema.PATH,
            OpenApiParameter("mkdir", OpenApiTypes.BOOL),
            OpenApiParameter("recursive", OpenApiTypes.BOOL),
        ],
        request={"application/octet-stream": OpenApiTypes.BINARY},
        responses={200: schema.done("written"), 201: schema.done("created")}
        | schema.refusals(400, 403, 404, 409, 413, 503),
    )
    async def post(self, request: Request, sandbox_id: str) -> Response:
        path = await self.path(sandbox_id)
        self.refuse_generation()
        query = self.query()
        if _flag(query, "mkdir"):
            sftp = await files_of(sandbox_id, self.team)
            recursive = _flag(query, "recursive")
            await files.make_directory(sftp, path, recursive=recursive)
            return ok({"created": True}, 201)
        # Before the sandbox's files are opened, which may take a while.
        size_bytes = _content_length(request)
        sftp = await files_of(sandbox_id, self.team)
        await files.write_file(sftp, path, body_of(request), size_bytes=size_bytes)
        return ok({"written": True})

    @extend_schema(
        summary="Delete a file or a directory with all that is in it",
        parameters=[schema.PATH],
        responses={200: schema.done("deleted")} | schema.refusals(400, 403, 404, 503),
    )
    async def delete(self, request: Request, sandbox_id: str) -> Response:
        path = await self.path(sandbox_id)
        self.refuse_generation()
        await files.delete_path(await files_of(sandbox_id, self.team), path)
        return ok({"deleted": True})


class FileStat(FileView):
    """`/sandboxes/<id>/files/stat`."""

    required_permission = {"GET": "sandbox:read"}  # noqa: RUF012

    @extend_schema(
        summary="Show what is known of a file",
        parameters=[schema.PATH, schema.GENERATION],
        responses={200: schema.enveloped("FileInfo", schema.FileInfo())}
        | schema.refusals(400, 403, 404, 503),
    )
    async def get(self, request: Request, sandbox_id: str) -> Response:
        path = await self.path(sandbox_id)
        info = await with_files(
            sandbox_id,
            self.team,
            lambda sftp: files.stat_file(sftp, path),
            generation=self.generation(),
        )
        return ok(info_body(info))


class FileList(FileView):
    """`/sandboxes/<id>/files/list`."""

    required_permission = {"GET": "sandbox:read"}  # noqa: RUF012

    @extend_schema(
        summary="List a directory",
        description=(
            f"All of it, or its first {files.MAX_ENTRIES:,} entries and `truncated`. With "
            "`limit` or `cursor` the entries come by name, a page at a time; `next_cursor` of "
            "the answer is the `cursor` of the next page, and is missing from the last one. "
            "Pages neither miss nor repeat what is there all along. Of a large directory they "
            "may show it as it was at the first page."
        ),
        parameters=[
            schema.PATH,
            schema.GENERATION,
            OpenApiParameter(
                "limit", OpenApiTypes.INT, description=f"From 1 to {files.MAX_PAGE:,}."
            ),
            OpenApiParameter("cursor", OpenApiTypes.STR),
        ],
        responses={200: schema.enveloped("FileList", schema.FileList())}
        | schema.refusals(400, 403, 404, 409, 503),
    )
    async def get(self, request: Request, sandbox_id: str) -> Response:
        path = await self.path(sandbox_id, default="/")
        page = _page(self.query())
        owner = f"{sandbox_id} {self.generation()}"

        async def listed(sftp: SFTPClient) -> dict[str, Any]:
            if page is None:
                entries, is_cut = await files.list_directory(sftp, path)
                return _listing(entries) | ({"truncated": True} if is_cut else {})
            entries, last = await files.list_page(
                sftp, path, limit=page.limit, after=page.after, owner=owner
            )
            return _listing(entries) | ({} if last is None else {"next_cursor": _cursor(last)})

        body = await with_files(sandbox_id, self.team, listed, generation=self.generation())
        return ok(body)


class Page(NamedTuple):
    """Which part of a listing is asked for."""

    limit: int
    after: files.Position | None


def _page(query: dict[str, str]) -> Page | None:
    """Return the page that a request means, None where it means all.

    Raises:
        ValidationError: the limit is out of bounds, or the cursor is none of ours.
    """
    limit, cursor = query.get("limit"), query.get("cursor")
    if limit is None and cursor is None:
        return None
    if limit is None:
        count = files.DEFAULT_PAGE
    elif LIMIT.fullmatch(limit) and 1 <= int(limit) <= files.MAX_PAGE:
        count = int(limit)
    else:
        raise serializers.ValidationError({"limit": [f"It is from 1 to {files.MAX_PAGE}."]})
    return Page(count, _position(cursor) if cursor else None)


def _position(cursor: str) -> files.Position:
    """Return what a cursor stands for: a name, or a listing's token, a slash and a name."""
    try:
        text = base64.urlsafe_b64decode(cursor.encode("ascii"))
    except (ValueError, UnicodeEncodeError):
        text = b""
    token, _, name = text.rpartition(b"/")
    is_ours = len(token) == (listings.TOKEN_BYTES if b"/" in text else 0)
    if not is_ours or not 0 < len(name) <= files.MAX_NAME_BYTES or b"\0" in name:
        raise serializers.ValidationError({"cursor": ["It is not from an earlier answer."]})
    return files.Position(name, token)


def _cursor(position: files.Position) -> str:
    text = position.listing + b"/" + position.name if position.listing else position.name
    return base64.urlsafe_b64encode(text).decode()


def _listing(entries: list[files.FileInfo]) -> dict[str, Any]:
    return {"entries": [info_body(entry) for entry in entries]}


class FileMove(FileView):
    """`/sandboxes/<id>/files/move`."""

    required_permission = {"POST": "sandbox:write"}  # noqa: RUF012

    @extend_schema(
        summary="Move a file or a directory",
        description="A file that is in the way is replaced; a directory is not.",
        request=Move,
        responses={200: schema.done("moved")} | schema.refusals(400, 403, 404, 409, 503),
    )
    async def post(self, request: Request, sandbox_id: str) -> Response:
        await run_db(find_sandbox, sandbox_id, self.team)
        body = Move(data=request.data)
        body.is_valid(raise_exception=True)
        source, destination = (
            files.parse_path(body.validated_data[field], field)
            for field in ("source", "destination")
        )
        await files.move_file(await files_of(sandbox_id, self.team), source, destination)
        return ok({"moved": True})


def info_body(info: files.FileInfo) -> dict[str, Any]:
    """Return a file's description as clients see it."""
    body: dict[str, Any] = {
        "name": to_text(info.name),
        "path": to_text(info.path),
        "type": info.kind,
        "size": info.size_bytes,
        "mode": f"{info.mode:04o}",
        "mod_time": instant(info.modified_at),
        "is_link": info.kind == "symlink",
    }
    if info.link_target is not None:
        body["link_target"] = to_text(info.link_target)
    return body


def _wants_json(request: Request) -> bool:
    named = (request.headers.get("Accept", ""), request.headers.get("Content-Type", ""))
    return any("application/json" in value.lower() for value in named)


async def _as_json(opened: files.OpenedFile) -> Response:
    content = bytearray()
    async for piece in opened.pieces:
        content += piece
        if len(content) > files.MAX_JSON_FILE_BYTES:
            raise FileTooLarge(files.MAX_JSON_FILE_BYTES)
    return ok({"content": base64.b64encode(content).decode(), "encoding": "base64"})


def _content_length(request: Request) -> int | None:
    text = request.META.get("CONTENT_LENGTH") or ""
    size_bytes = int(text) if text.isascii() and text.isdigit() else None
    if size_bytes is not None and size_bytes > files.MAX_FILE_BYTES:
        raise FileTooLarge(files.MAX_FILE_BYTES)
    return size_bytes


def body_of(request: Request) -> AsyncIterator[bytes]:
    """Give a request's raw body in pieces."""
    return bodies.body_of(request._request)  # noqa: SLF001  (DRF would parse it)


def _flag(query: dict[str, str], name: str) -> bool:
    text = query.get(name, "false").lower()
    if text not in ("true", "1", "false", "0", ""):
        raise serializers.ValidationError({name: ["It is true or false."]})
    return text in ("true", "1")
