"""Operations on a sandbox's files over SFTP, the same while it runs and while it sleeps.

Paths are bytes, absolute, and resolved on the other side, in the sandbox's own root: a link
to `/etc/passwd` is the sandbox's. Nothing here trusts a size or a name that it is told.

Source: statuses and codes are those of the wire contract; that a write and a move make
missing parent directories, and that a move replaces a file, is what its server does.
"""

import asyncio
import posixpath
import secrets
import stat
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple, TypeVar

import asyncssh
from asyncssh import SFTPAttrs, SFTPClient

from common.units import GiB, KiB, MiB
from sandboxes.errors import (
    BadPath,
    BodyIncomplete,
    DirectoryMissing,
    DiskFull,
    FileMissing,
    FileOperationFailed,
    FilePermissionDenied,
    FilesLost,
    FileTooLarge,
    PathExists,
    PathNotDirectory,
    PathNotFile,
)
from sandboxes.filenames import to_bytes, to_text
from sandboxes.listings import Shelf, Spool

MAX_FILE_BYTES = 16 * GiB
# What is answered as JSON is held in memory, twice.
MAX_JSON_FILE_BYTES = 100 * MiB
MAX_PATH_BYTES = 4096
MAX_NAME_BYTES = 255

# One request of ours is answered by then, or the session is taken for dead. Reads of a
# paused disk may wait for the object store.
REQUEST_TIMEOUT_S = 60.0
# A listing is as many requests as it is long.
LIST_TIMEOUT_S = 300.0

# Large enough that asyncssh keeps many requests on their way.
PIECE_BYTES = 512 * KiB

# What one listing carries; a larger directory is read page by page.
MAX_ENTRIES = 50_000
MAX_PAGE = 10_000
DEFAULT_PAGE = 1_000
MAX_LINKS_READ = 1_000
# The other side may list names alone, see `hosts.sftp_server`; so many are looked up for a
# listing that is not paged.
MAX_LOOKED_UP = 2_000
UNKNOWN = ""
KINDS = (UNKNOWN, "file", "dir", "symlink")
_ATTRIBUTES = struct.Struct("<BHQd")
AT_ONCE = 32

# A tree that is deeper than this is a loop or an attack.
MAX_DEPTH = 1_000

NEW_FILE_MODE = 0o644
NEW_DIRECTORY_MODE = 0o755

T = TypeVar("T")

_shelf = Shelf()


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """What is known of one name in a directory; links are not followed."""

    path: bytes
    kind: str
    size_bytes: int
    mode: int
    modified_at: datetime
    link_target: bytes | None = None

    @property
    def name(self) -> bytes:
        return posixpath.basename(self.path) or b"/"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedFile:
    """A file that is being read. `size_bytes` is None where only its end tells."""

    size_bytes: int | None
    pieces: AsyncIterator[bytes]


class Position(NamedTuple):
    """Where a page of a directory begins: after a name, of a listing that may be kept."""

    name: bytes
    listing: bytes = b""


def parse_path(text: str, field: str = "path") -> bytes:
    """Return the path that a client means: absolute, without `.`, `..` and doubled slashes.

    A relative one starts at the root.

    Raises:
        BadPath: it is empty, too long, or holds a NUL.
    """
    if not text:
        raise BadPath(field, "is needed.")
    if "\0" in text:
        raise BadPath(field, "holds a NUL.")
    try:
        raw = to_bytes(text)
    except UnicodeEncodeError as error:
        raise BadPath(field, "is not valid Unicode.") from error
    if len(raw) > MAX_PATH_BYTES:
        raise BadPath(field, f"has more than {MAX_PATH_BYTES} bytes.")
    path = posixpath.normpath(b"/" + raw.lstrip(b"/"))
    if any(len(name) > MAX_NAME_BYTES for name in path.split(b"/")):
        raise BadPath(field, f"has a name of more than {MAX_NAME_BYTES} bytes.")
    return path


async def stat_file(sftp: SFTPClient, path: bytes) -> FileInfo:
    """Return what is known of a path; of a link, not of what it points to.

    Raises:
        FileMissing, FilePermissionDenied, FilesLost
    """
    async with _request(path):
        attrs = await sftp.lstat(path)
        target = await _link_target(sftp, path) if _is(attrs, stat.S_ISLNK) else None
    return _info(path, attrs, target)


async def list_directory(sftp: SFTPClient, path: bytes) -> tuple[list[FileInfo], bool]:
    """Return a directory's entries by name, and whether there are more than fit.

    Raises:
        DirectoryMissing, PathNotDirectory, FilePermissionDenied, FilesLost
    """
    entries: list[FileInfo] = []
    is_cut = False
    async with _directory(sftp, path) as found:
        async for entry in found:
            if len(entries) == MAX_ENTRIES:
                is_cut = True
                break
            entries.append(entry)
    entries.sort(key=lambda entry: entry.path)
    if sum(entry.kind == UNKNOWN for entry in entries) > MAX_LOOKED_UP:
        entries, is_cut = entries[:MAX_LOOKED_UP], True
    return await _described(sftp, entries), is_cut


async def list_page(
    sftp: SFTPClient, path: bytes, *, limit: int, after: Position | None, owner: str
) -> tuple[list[FileInfo], Position | None]:
    """Return the first entries by name that come after one, and where the next page begins.

    The name need not exist any more: pages neither miss nor repeat what stays. A large
    directory is read for its first page, and kept for those that follow: they show it as it
    was then. No more than two pages' worth is held in memory.

    Args:
        owner: whose directory it is, such as a sandbox at a moment.

    Raises:
        DirectoryMissing, PathNotDirectory, FilePermissionDenied, FilesLost
    """
    kept = None if after is None else _shelf.find(owner, path, after.listing)
    if kept is not None and after is not None:
        rows = list(islice(kept.after(after.name), limit + 1))
        first, token = [_unpacked(path, *row) for row in rows], kept.token
        async with _request(path, missing=DirectoryMissing):
            await _need_directory(sftp, path)
    else:
        name = None if after is None else after.name
        first, token = await _read_page(sftp, path, limit + 1, name, owner)
    page = await _described(sftp, first[:limit])
    return page, Position(page[-1].name, token) if len(first) > limit else None


async def _read_page(
    sftp: SFTPClient, path: bytes, limit: int, after: bytes | None, owner: str
) -> tuple[list[FileInfo], bytes]:
    """Read a whole directory for one page; with the token of what is kept of it, if any is."""
    first: list[FileInfo] = []
    after_path = None if after is None else posixpath.join(path, after)
    bound: bytes | None = None
    with _spooled() as spool:
        async with _directory(sftp, path) as found:
            async for entry in found:
                if spool is not None:
                    spool.add(entry.name, _packed(entry))
                if after_path is not None and entry.path <= after_path:
                    continue
                if bound is not None and entry.path > bound:
                    continue
                first.append(entry)
                if len(first) > 2 * limit:
                    first = _first(first, limit)
                    bound = first[-1].path
        first = _first(first, limit)
        listing = None if spool is None else await asyncio.to_thread(spool.finish)
    if listing is None:
        return first, b""
    _shelf.keep(owner, path, listing)
    return first, listing.token


@contextmanager
def _spooled() -> Iterator[Spool | None]:
    spool = _shelf.start()
    try:
        yield spool
    finally:
        if spool is not None:
            _shelf.end(spool)


def _packed(entry: FileInfo) -> bytes:
    kind = KINDS.index(entry.kind)
    return _ATTRIBUTES.pack(kind, entry.mode, entry.size_bytes, entry.modified_at.timestamp())


def _unpacked(path: bytes, name: bytes, rest: bytes) -> FileInfo:
    kind, mode, size_bytes, modified_at = _ATTRIBUTES.unpack(rest)
    return FileInfo(
        path=posixpath.join(path, name),
        kind=KINDS[kind],
        size_bytes=size_bytes,
        mode=mode,
        modified_at=datetime.fromtimestamp(modified_at, UTC),
    )


def _first(entries: list[FileInfo], count: int) -> list[FileInfo]:
    return sorted(entries, key=lambda entry: entry.path)[:count]


@asynccontextmanager
async def _directory(sftp: SFTPClient, path: bytes) -> AsyncIterator[AsyncIterator[FileInfo]]:
    """Yield the entries of a directory as they come, without itself and the one above."""
    async with _request(path, missing=DirectoryMissing):
        attrs = await sftp.stat(path)
    if not _is(attrs, stat.S_ISDIR):
        raise PathNotDirectory(to_text(path))
    async with (
        _request(path, missing=DirectoryMissing, timeout_s=LIST_TIMEOUT_S),
        aclosing(_entries(sftp, path)) as found,
    ):
        yield found


async def _entries(sftp: SFTPClient, path: bytes) -> AsyncGenerator[FileInfo, None]:
    async for entry in sftp.scandir(path):
        name = _as_bytes(entry.filename)
        if name not in (b".", b"..") and b"/" not in name:
            yield _info(posixpath.join(path, name), entry.attrs)


async def open_file(sftp: SFTPClient, path: bytes) -> OpenedFile:
    """Open a file, through links, to be read in pieces; the caller reads or closes them.

    Raises:
        FileMissing, PathNotFile, FilePermissionDenied, FilesLost
    """
    async with _request(path):
        # Looked at first: to open a FIFO would hang the other side, for everyone.
        attrs = await sftp.stat(path)
        if not _is(attrs, stat.S_ISREG):
            raise PathNotFile(to_text(path))
        file = await sftp.open(path, "rb")
        try:
            first = await _read(file, 0)
        except BaseException:
            await _close(file)
            raise
    # Files of /proc say that they are empty.
    size_bytes = attrs.size if attrs.size or not first else None
    return OpenedFile(size_bytes=size_bytes, pieces=_pieces(file, path, first, size_bytes))


async def _pieces(
    file: asyncssh.SFTPClientFile, path: bytes, first: bytes, size_bytes: int | None
) -> AsyncIterator[bytes]:
    """Yield the file, exactly as many bytes as were announced.

    Raises:
        FilesLost: it became shorter meanwhile, or the session broke.
    """
    offset, piece = 0, first
    try:
        while piece:
            if size_bytes is not None:
                piece = piece[: size_bytes - offset]
            yield piece
            offset += len(piece)
            if offset == size_bytes:
                return
            async with _request(path):
                piece = await _read(file, offset)
        if size_bytes is not None and offset != size_bytes:
            raise FilesLost
    finally:
        await _close(file)


async def _read(file: asyncssh.SFTPClientFile, offset: int) -> bytes:
    piece = await file.read(PIECE_BYTES, offset)
    assert isinstance(piece, bytes)  # it was opened as binary
    return piece


async def write_file(
    sftp: SFTPClient,
    path: bytes,
    pieces: AsyncIterator[bytes],
    *,
    size_bytes: int | None = None,
) -> int:
    """Write a whole file, through links, and return its size.

    The bytes go to a name beside the target, are counted and synced, and only then take its
    place: what was there stays until all of the new is. Its mode and owner are kept; the
    directories above are made where they are missing.

    Raises:
        FileTooLarge: more than `MAX_FILE_BYTES` came.
        BodyIncomplete: fewer or more than `size_bytes` came.
        PathNotFile, PathNotDirectory, FilePermissionDenied, DiskFull, FilesLost
    """
    if size_bytes is not None and size_bytes > MAX_FILE_BYTES:
        raise FileTooLarge(MAX_FILE_BYTES)
    target, existing = await _write_target(sftp, path)
    await make_directory(sftp, posixpath.dirname(target), recursive=True)
    async with _temporary(sftp, target, path) as (name, file):
        written_bytes = await _copy_in(file, pieces, path)
        if size_bytes is not None and written_bytes != size_bytes:
            raise BodyIncomplete
        async with _request(path, sftp=sftp):
            if existing is not None:
                await _keep_owner_and_mode(file, existing)
            await _sync(file)
            if (await file.stat()).size != written_bytes:
                raise FileOperationFailed(to_text(path))
            await file.close()
            await sftp.posix_rename(name, target)
    return written_bytes


async def make_directory(sftp: SFTPClient, path: bytes, *, recursive: bool) -> None:
    """Make a directory; with `recursive` also those above, and it may be there already.

    Raises:
        PathExists, PathNotDirectory, DirectoryMissing, FilePermissionDenied, FilesLost
    """
    async with _request(path, sftp=sftp):
        found = await _stat_or_none(sftp, path)
    if found is not None:
        if not _is(found, stat.S_ISDIR):
            raise PathNotDirectory(to_text(path))
        if not recursive:
            raise PathExists(to_text(path))
        return
    parent = posixpath.dirname(path)
    if recursive and parent != path:
        await make_directory(sftp, parent, recursive=True)
    async with _request(path, missing=DirectoryMissing, sftp=sftp):
        if not recursive:
            await _need_directory(sftp, parent)
        try:
            await sftp.mkdir(path, SFTPAttrs(permissions=NEW_DIRECTORY_MODE))
        except asyncssh.SFTPFailure:
            # Somebody else may have made it at this moment.
            again = await _stat_or_none(sftp, path)
            if again is None or not _is(again, stat.S_ISDIR):
                raise
            if not recursive:
                raise PathExists(to_text(path)) from None


async def move_file(sftp: SFTPClient, source: bytes, destination: bytes) -> None:
    """Move a file, link or directory. A file in its way is replaced; a directory is not.

    Raises:
        FileMissing, PathExists, PathNotDirectory, FilePermissionDenied, FilesLost
    """
    if source == b"/" or destination == b"/":
        raise BadPath("source" if source == b"/" else "destination", "cannot be the root.")
    async with _request(source):
        moved = await sftp.lstat(source)
    if source == destination:
        return
    if destination.startswith(source + b"/"):
        raise PathExists(to_text(destination))
    async with _request(destination, sftp=sftp):
        in_its_way = await _stat_or_none(sftp, destination, follows_links=False)
    if in_its_way is not None and _is(in_its_way, stat.S_ISDIR) | _is(moved, stat.S_ISDIR):
        raise PathExists(to_text(destination))
    await make_directory(sftp, posixpath.dirname(destination), recursive=True)
    async with _request(source, sftp=sftp):
        try:
            await sftp.posix_rename(source, destination)
        except asyncssh.SFTPFailure:
            if not _is(moved, stat.S_ISREG):
                raise
        else:
            return
    # Another file system, such as /tmp, which a rename cannot leave.
    await _copy_over(sftp, source, destination, moved)


async def delete_path(sftp: SFTPClient, path: bytes) -> None:
    """Delete a file or link, or a directory with all that is in it.

    Raises:
        FileMissing, FilePermissionDenied, FilesLost
    """
    if path == b"/":
        raise BadPath("path", "cannot be the root.")
    async with _request(path):
        attrs = await sftp.lstat(path)
    if _is(attrs, stat.S_ISDIR):
        await _delete_tree(sftp, path)
        return
    async with _request(path, sftp=sftp):
        await sftp.remove(path)


async def _delete_tree(sftp: SFTPClient, top: bytes) -> None:
    """Empty directories from the top down, then remove them from the bottom up."""
    pending, emptied = [top], []
    while pending:
        directory = pending.pop()
        emptied.append(directory)
        if directory.count(b"/") - top.count(b"/") > MAX_DEPTH:
            raise FileOperationFailed(to_text(top))
        pending += await _delete_files_in(sftp, directory)
    for directory in reversed(emptied):
        async with _request(directory, sftp=sftp):
            with _ignored_if_gone():
                await sftp.rmdir(directory)


async def _delete_files_in(sftp: SFTPClient, directory: bytes) -> list[bytes]:
    """Delete all but the directories in a directory, and return those."""
    async with _directory(sftp, directory) as found:
        entries = [entry async for entry in found]
    if any(entry.kind == UNKNOWN for entry in entries):
        entries = await _described(sftp, entries)
    directories = [entry.path for entry in entries if entry.kind == "dir"]
    files = [entry.path for entry in entries if entry.kind != "dir"]

    async def delete(path: bytes) -> None:
        async with _request(path, sftp=sftp):
            with _ignored_if_gone():
                await sftp.remove(path)

    await _each(delete, files)
    return directories


async def _write_target(sftp: SFTPClient, path: bytes) -> tuple[bytes, SFTPAttrs | None]:
    """Return the real path to write to, and what is there now."""
    async with _request(path, sftp=sftp):
        found = await _stat_or_none(sftp, path, follows_links=False)
        if found is not None and _is(found, stat.S_ISLNK):
            path = await sftp.realpath(path)
            found = await _stat_or_none(sftp, path)
    if found is not None and not _is(found, stat.S_ISREG):
        raise PathNotFile(to_text(path))
    return path, found


@asynccontextmanager
async def _temporary(
    sftp: SFTPClient, target: bytes, path: bytes
) -> AsyncIterator[tuple[bytes, asyncssh.SFTPClientFile]]:
    """Open a new file beside the target, which is removed again if the block fails."""
    unique = f".sandkeep-upload-{secrets.token_hex(8)}".encode()
    name = posixpath.join(posixpath.dirname(target), unique)
    async with _request(path, sftp=sftp):
        file = await sftp.open(name, "xb", SFTPAttrs(permissions=NEW_FILE_MODE))
    try:
        yield name, file
    except BaseException:
        await asyncio.shield(_abandon(sftp, file, name))
        raise


async def _abandon(sftp: SFTPClient, file: asyncssh.SFTPClientFile, name: bytes) -> None:
    await _close(file)
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await sftp.remove(name)
    except (asyncssh.Error, OSError, TimeoutError):
        return  # the session is gone, and the name with it or not: it is an odd, hidden one


async def _copy_in(
    file: asyncssh.SFTPClientFile, pieces: AsyncIterator[bytes], path: bytes
) -> int:
    written_bytes = 0
    async for piece in _gathered(pieces):
        if written_bytes + len(piece) > MAX_FILE_BYTES:
            raise FileTooLarge(MAX_FILE_BYTES)
        async with _request(path):
            await file.write(piece, written_bytes)
        written_bytes += len(piece)
    return written_bytes


async def _gathered(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join pieces as they come from a network: each write waits for its answer."""
    held: list[bytes] = []
    held_bytes = 0
    async for piece in pieces:
        held.append(piece)
        held_bytes += len(piece)
        if held_bytes >= PIECE_BYTES:
            yield b"".join(held)
            held, held_bytes = [], 0
    if held:
        yield b"".join(held)


async def _copy_over(
    sftp: SFTPClient, source: bytes, destination: bytes, moved: SFTPAttrs
) -> None:
    """Move a regular file by copying it, with its mode, owner and time."""
    opened = await open_file(sftp, source)
    async with _temporary(sftp, destination, destination) as (name, file):
        offset = 0
        async for piece in opened.pieces:
            async with _request(destination, sftp=sftp):
                await file.write(piece, offset)
            offset += len(piece)
        async with _request(destination, sftp=sftp):
            await _keep_owner_and_mode(file, moved)
            await file.setstat(SFTPAttrs(atime=moved.atime, mtime=moved.mtime))
            await _sync(file)
            await file.close()
            await sftp.posix_rename(name, destination)
    async with _request(source, sftp=sftp):
        await sftp.remove(source)


async def _keep_owner_and_mode(file: asyncssh.SFTPClientFile, existing: SFTPAttrs) -> None:
    # The owner first: changing it clears the set-user-id bit.
    await file.setstat(SFTPAttrs(uid=existing.uid, gid=existing.gid))
    if existing.permissions is not None:
        await file.setstat(SFTPAttrs(permissions=stat.S_IMODE(existing.permissions)))


async def _sync(file: asyncssh.SFTPClientFile) -> None:
    try:
        await file.fsync()
    except asyncssh.SFTPOpUnsupported:
        return  # an sftp-server of before OpenSSH 6.5; its close has to do


async def _need_directory(sftp: SFTPClient, path: bytes) -> None:
    if not _is(await sftp.stat(path), stat.S_ISDIR):
        raise PathNotDirectory(to_text(path))


async def _stat_or_none(
    sftp: SFTPClient, path: bytes, *, follows_links: bool = True
) -> SFTPAttrs | None:
    try:
        return await (sftp.stat(path) if follows_links else sftp.lstat(path))
    except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
        return None


async def _described(sftp: SFTPClient, entries: list[FileInfo]) -> list[FileInfo]:
    """Return the entries with what the listing did not say of them."""
    unknown = [entry.path for entry in entries if entry.kind == UNKNOWN]
    found: dict[bytes, FileInfo] = {}

    async def look(path: bytes) -> None:
        try:
            async with _request(path):
                attrs = await sftp.lstat(path)
        except (FileMissing, FileOperationFailed):
            # It is damaged, or it was just removed.
            attrs = SFTPAttrs(permissions=stat.S_IFREG)
        found[path] = _info(path, attrs)

    await _each(look, unknown)
    return await _with_targets(sftp, [found.get(entry.path, entry) for entry in entries])


async def _with_targets(sftp: SFTPClient, entries: list[FileInfo]) -> list[FileInfo]:
    """Return the entries with the targets of their links, of the first many of them."""
    links = [entry.path for entry in entries if entry.kind == "symlink"][:MAX_LINKS_READ]
    targets: dict[bytes, bytes | None] = {}

    async def read(path: bytes) -> None:
        async with _request(path):
            targets[path] = await _link_target(sftp, path)

    await _each(read, links)
    return [_pointed(entry, targets.get(entry.path)) for entry in entries]


def _pointed(entry: FileInfo, target: bytes | None) -> FileInfo:
    if target is None:
        return entry
    return FileInfo(
        path=entry.path,
        kind=entry.kind,
        size_bytes=entry.size_bytes,
        mode=entry.mode,
        modified_at=entry.modified_at,
        link_target=target,
    )


async def _link_target(sftp: SFTPClient, path: bytes) -> bytes | None:
    try:
        return await sftp.readlink(path)
    except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPFailure):
        return None  # it is no link any more


async def _each(act: Callable[[bytes], Awaitable[None]], paths: list[bytes]) -> None:
    for start in range(0, len(paths), AT_ONCE):
        async with asyncio.TaskGroup() as group:
            for path in paths[start : start + AT_ONCE]:
                group.create_task(_awaited(act(path)))


async def _awaited(step: Awaitable[None]) -> None:
    await step


async def _close(file: asyncssh.SFTPClientFile) -> None:
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await file.close()
    except (asyncssh.Error, OSError, TimeoutError):
        return  # with the session the handle is gone too


def _info(path: bytes, attrs: SFTPAttrs, link_target: bytes | None = None) -> FileInfo:
    return FileInfo(
        path=path,
        kind=_kind(attrs),
        size_bytes=attrs.size or 0,
        mode=stat.S_IMODE(attrs.permissions or 0),
        modified_at=datetime.fromtimestamp(attrs.mtime or 0, UTC),
        link_target=link_target,
    )


def _kind(attrs: SFTPAttrs) -> str:
    if attrs.permissions is None:
        return UNKNOWN
    if _is(attrs, stat.S_ISDIR):
        return "dir"
    # Clients know three kinds; devices, sockets and FIFOs are shown as files.
    return "symlink" if _is(attrs, stat.S_ISLNK) else "file"


def _is(attrs: SFTPAttrs, test: Callable[[int], bool]) -> bool:
    return attrs.permissions is not None and test(attrs.permissions)


def _as_bytes(name: bytes | str) -> bytes:
    return name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")


@contextmanager
def _ignored_if_gone() -> Iterator[None]:
    try:
        yield
    except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
        return


@asynccontextmanager
async def _request(
    path: bytes,
    *,
    missing: type[FileMissing] | type[DirectoryMissing] = FileMissing,
    sftp: SFTPClient | None = None,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> AsyncIterator[None]:
    """Bound the requests inside in time, and turn their errors into ours.

    With `sftp`, a refusal without a reason is looked into: the disk may be full, or a part
    of the path be no directory.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath) as error:
        raise missing(to_text(path)) from error
    except asyncssh.SFTPPermissionDenied as error:
        raise FilePermissionDenied(to_text(path)) from error
    except asyncssh.SFTPNotADirectory as error:
        raise PathNotDirectory(to_text(path)) from error
    except (asyncssh.SFTPNoSpaceOnFilesystem, asyncssh.SFTPQuotaExceeded) as error:
        raise DiskFull(to_text(path)) from error
    except (
        asyncssh.SFTPConnectionLost,
        asyncssh.SFTPNoConnection,
        asyncssh.SFTPBadMessage,
        asyncssh.DisconnectError,
        ConnectionError,
        TimeoutError,
    ) as error:
        raise FilesLost from error
    except asyncssh.SFTPError as error:
        raise await _reason(path, sftp) from error


async def _reason(path: bytes, sftp: SFTPClient | None) -> Exception:
    if sftp is not None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                if (await sftp.statvfs(b"/")).bavail == 0:
                    return DiskFull(to_text(path))
                if await _leads_through_a_file(sftp, path):
                    return PathNotDirectory(to_text(path))
        except (asyncssh.Error, OSError, TimeoutError):
            return FileOperationFailed(to_text(path))
    return FileOperationFailed(to_text(path))


async def _leads_through_a_file(sftp: SFTPClient, path: bytes) -> bool:
    while (path := posixpath.dirname(path)) != b"/":
        found = await _stat_or_none(sftp, path)
        if found is not None:
            return not _is(found, stat.S_ISDIR)
    return False
