"""SFTP on the file system of a paused sandbox, for a process that is already confined in it.

`hosts.paused_mount` starts this after it has made the sandbox's file system the root of the
process. From then on nothing may be imported, looked up or loaded: what lies at
`/usr/lib/python3` or `/etc/nsswitch.conf` now is the guest's. So names of users are never
looked up (that loads libraries), and `forbid_imports` closes Python's own doors.

The protocol is asyncssh's, version 3 with OpenSSH's extensions, on a plain socket.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import stat
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import asyncssh
from asyncssh import sftp
from asyncssh.constants import FXP_VERSION
from asyncssh.logging import logger as asyncssh_logger

from hosts.paused_directory import Entry, Image, Senseless
from hosts.paused_settle import Settler, answers, serve_one

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Iterator

MAX_SESSIONS = 64

# One request that takes longer is taken for a file system that leads fuse2fs in circles.
REQUEST_LIMIT_S = 120

# A directory with more names than this is not described file by file through fuse2fs.
LARGE_DIRECTORY = 5_000

# The one thing that holds a piece of a file in memory.
MAX_READ_BYTES = sftp.MAX_SFTP_READ_LEN

# They copy or map a whole file in one request, however large the guest says that it is.
UNBOUNDED_EXTENSIONS = (b"copy-data", b"ranges@asyncssh.com")


class Journal:
    """What the host learns of a session: that it was used, and that it has changed things.

    Both are files outside the confinement, held open since before it. The second gets a mark
    at the first change, and at the first after each commit.
    """

    def __init__(self, used_fd: int, dirty_fd: int) -> None:
        self._used_fd = used_fd
        self._dirty_fd = dirty_fd
        # One mark too many does no harm, one too few would.
        self._is_marked = False

    def note_use(self) -> None:
        # Written to, since only its owner (the host's root) could set its time.
        os.pwrite(self._used_fd, b"1", 0)

    def note_change(self) -> None:
        """Record durably that the image is about to differ from the committed one."""
        if not self._is_marked:
            os.lseek(self._dirty_fd, 0, os.SEEK_END)
            os.write(self._dirty_fd, b"1")
            os.fsync(self._dirty_fd)
            self._is_marked = True

    def forget_changes(self) -> None:
        """Mark the next change again: those until now are about to be committed."""
        self._is_marked = False


@dataclass
class OpenFile:
    """A file handle of a session."""

    fd: int


def attributes(result: os.stat_result) -> asyncssh.SFTPAttrs:
    """Make SFTP attributes, by numbers alone.

    asyncssh's own conversion also looks up the names of owner and group, for which the C
    library would load what the guest's /etc/nsswitch.conf names.
    """
    return asyncssh.SFTPAttrs(
        size=result.st_size,
        uid=result.st_uid,
        gid=result.st_gid,
        permissions=result.st_mode,
        atime=int(result.st_atime),
        mtime=int(result.st_mtime),
        nlink=result.st_nlink,
    )


class ConfinedServer(asyncssh.SFTPServer):
    """The requests, on the process's own root."""

    def __init__(self, journal: Journal, settler: Settler) -> None:
        super().__init__(cast("asyncssh.SSHServerChannel[bytes]", None))
        self.journal = journal
        self.image = settler.image
        self._settler = settler

    def format_longname(self, name: asyncssh.SFTPName) -> None:
        """Say no more than the name: the rest would need the guest's users and time zone."""
        name.longname = name.filename

    def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> OpenFile:
        flags = _open_flags(pflags)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            self.journal.note_change()
        mode = 0o666 if attrs.permissions is None else stat.S_IMODE(attrs.permissions)
        fd = os.open(path, flags, mode)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            # A FIFO or a device would wait for ever, or do something.
            os.close(fd)
            raise OSError(errno.EISDIR, "Not a regular file")
        return OpenFile(fd)

    def close(self, file_obj: object) -> None:
        os.close(_fd(file_obj))

    def read(self, file_obj: object, offset: int, size: int) -> bytes:
        return os.pread(_fd(file_obj), min(size, MAX_READ_BYTES), offset)

    def write(self, file_obj: object, offset: int, data: bytes) -> int:
        self.journal.note_change()
        rest = memoryview(data)
        while rest:
            written = os.pwrite(_fd(file_obj), rest, offset)
            rest = rest[written:]
            offset += written
        return len(data)

    def stat(self, path: bytes) -> asyncssh.SFTPAttrs:
        return attributes(os.stat(path))

    def lstat(self, path: bytes) -> asyncssh.SFTPAttrs:
        return attributes(os.lstat(path))

    def fstat(self, file_obj: object) -> asyncssh.SFTPAttrs:
        return attributes(os.fstat(_fd(file_obj)))

    def setstat(self, path: bytes, attrs: asyncssh.SFTPAttrs) -> None:
        self.journal.note_change()
        _apply(path, attrs)

    def lsetstat(self, path: bytes, attrs: asyncssh.SFTPAttrs) -> None:
        self.journal.note_change()
        _apply(path, attrs, follow_symlinks=False)

    def fsetstat(self, file_obj: object, attrs: asyncssh.SFTPAttrs) -> None:
        self.journal.note_change()
        _apply(_fd(file_obj), attrs)

    async def scandir(self, path: bytes) -> AsyncIterator[asyncssh.SFTPName]:
        """List a directory. Of a large one in a strange shape the names come alone."""
        for name in (b".", b".."):
            yield _entry(name, os.lstat(os.path.join(path, name)))
        is_large = _is_large(path)
        found = self._in_image(path) if is_large else None
        if found is not None:
            for one in found:
                yield asyncssh.SFTPName(one.name, one.name, _attributes_of(one))
            return
        with os.scandir(path) as entries:
            for entry in entries:
                yield _name_alone(entry.name) if is_large else _described(entry)

    def _in_image(self, path: bytes) -> Iterator[Entry] | None:
        """Read a directory past fuse2fs, see `hosts.paused_directory`; None if that fails."""
        try:
            with self._settler.flushed():
                image = Image(self._settler.image)
                entries = image.entries(image.number_of(os.path.realpath(path)))
                first = next(entries, None)
        except (Senseless, OSError, struct.error):
            return None
        return itertools.chain([] if first is None else [first], _sensible(entries))

    def remove(self, path: bytes) -> None:
        self.journal.note_change()
        os.unlink(path)

    def mkdir(self, path: bytes, attrs: asyncssh.SFTPAttrs) -> None:
        self.journal.note_change()
        mode = 0o777 if attrs.permissions is None else stat.S_IMODE(attrs.permissions)
        os.mkdir(path, mode)

    def rmdir(self, path: bytes) -> None:
        self.journal.note_change()
        os.rmdir(path)

    def rename(self, oldpath: bytes, newpath: bytes) -> None:
        """Rename without replacing, as version 3 of the protocol wants it."""
        if os.path.lexists(newpath):
            raise FileExistsError(errno.EEXIST, "File exists")
        self.posix_rename(oldpath, newpath)

    def posix_rename(self, oldpath: bytes, newpath: bytes) -> None:
        self.journal.note_change()
        os.rename(oldpath, newpath)

    def readlink(self, path: bytes) -> bytes:
        return os.readlink(path)

    def symlink(self, oldpath: bytes, newpath: bytes) -> None:
        self.journal.note_change()
        os.symlink(oldpath, newpath)

    def link(self, oldpath: bytes, newpath: bytes) -> None:
        self.journal.note_change()
        os.link(oldpath, newpath, follow_symlinks=False)

    def fsync(self, file_obj: object) -> None:
        os.fsync(_fd(file_obj))

    def fstatvfs(self, file_obj: object) -> os.statvfs_result:
        return os.statvfs(_fd(file_obj))


def _sensible(entries: Iterator[Entry]) -> Iterator[Entry]:
    try:
        yield from entries
    except (Senseless, struct.error) as error:
        raise OSError(errno.EIO, f"The directory is damaged: {error}") from error


def _name_alone(name: bytes) -> asyncssh.SFTPName:
    return asyncssh.SFTPName(name, name, asyncssh.SFTPAttrs())


def _described(entry: os.DirEntry[bytes]) -> asyncssh.SFTPName:
    try:
        return _entry(entry.name, entry.stat(follow_symlinks=False))
    except OSError:
        return _name_alone(entry.name)  # one damaged inode does not hide its neighbours


def _attributes_of(entry: Entry) -> asyncssh.SFTPAttrs:
    return asyncssh.SFTPAttrs(
        size=entry.size_bytes,
        uid=entry.uid,
        gid=entry.gid,
        permissions=entry.mode,
        atime=entry.atime,
        mtime=entry.mtime,
        nlink=entry.links,
    )


def _is_large(path: bytes) -> bool:
    with os.scandir(path) as entries:
        return next(itertools.islice(entries, LARGE_DIRECTORY, None), None) is not None


def _open_flags(pflags: int) -> int:
    # Never to wait (for a FIFO's other end), never to take a terminal.
    flags = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if pflags & asyncssh.FXF_READ and pflags & asyncssh.FXF_WRITE:
        flags |= os.O_RDWR
    elif pflags & asyncssh.FXF_WRITE:
        flags |= os.O_WRONLY
    for theirs, ours in (
        (asyncssh.FXF_APPEND, os.O_APPEND),
        (asyncssh.FXF_CREAT, os.O_CREAT),
        (asyncssh.FXF_TRUNC, os.O_TRUNC),
        (asyncssh.FXF_EXCL, os.O_EXCL),
    ):
        if pflags & theirs:
            flags |= ours
    return flags


def _fd(file_obj: object) -> int:
    return cast("OpenFile", file_obj).fd


def _entry(name: bytes, found: os.stat_result) -> asyncssh.SFTPName:
    return asyncssh.SFTPName(name, name, attributes(found))


def _apply(
    target: bytes | int, attrs: asyncssh.SFTPAttrs, *, follow_symlinks: bool = True
) -> None:
    """Set what is given: size, then owner, then mode (a change of owner may clear bits)."""
    if attrs.size is not None:
        os.truncate(target, attrs.size)
    if attrs.uid is not None and attrs.gid is not None:
        os.chown(target, attrs.uid, attrs.gid, follow_symlinks=follow_symlinks)
    if attrs.permissions is not None and follow_symlinks:
        os.chmod(target, stat.S_IMODE(attrs.permissions))
    if attrs.atime is not None and attrs.mtime is not None:
        os.utime(target, (attrs.atime, attrs.mtime), follow_symlinks=follow_symlinks)


class _Handler(sftp.SFTPServerHandler):
    """asyncssh's handler of the protocol, with each request bounded in time."""

    # These two are asyncssh's tables of what it offers; there is no public way to offer less.
    _extensions = [  # noqa: RUF012 -- as in the base class
        pair
        for pair in sftp.SFTPServerHandler._extensions  # noqa: SLF001
        if pair[0] not in UNBOUNDED_EXTENSIONS
    ]
    _packet_handlers = {  # noqa: RUF012 -- as in the base class
        kind: handler
        for kind, handler in sftp.SFTPServerHandler._packet_handlers.items()  # noqa: SLF001
        if kind not in UNBOUNDED_EXTENSIONS
    }

    def __init__(
        self, server: ConfinedServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        plain = _PlainWriter(writer)
        super().__init__(
            server,
            cast("asyncssh.SSHReader[bytes]", _PlainReader(reader, writer)),
            cast("asyncssh.SSHWriter[bytes]", plain),
            sftp.MIN_SFTP_VERSION,
        )
        self._journal = server.journal
        self._image = server.image

    async def _process_packet(self, pkttype: int, pktid: int, packet: Any) -> None:
        self._journal.note_use()
        # Ends the process, even inside a system call that fuse2fs does not answer. Requests
        # never overlap: each runs to its end on the loop's one thread.
        signal.alarm(REQUEST_LIMIT_S)
        try:
            await super()._process_packet(pkttype, pktid, packet)
        finally:
            signal.alarm(0)

    def send_packet(self, pkttype: int, pktid: int | None, *args: bytes) -> None:
        """Send an answer, unless the disk that it was read from is gone: then end at once."""
        if pkttype != FXP_VERSION and not answers(self._image):
            os._exit(1)
        super().send_packet(pkttype, pktid, *args)


class _PlainReader:
    """A socket's stream, as much like asyncssh's as its handler needs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.logger = asyncssh_logger
        self._reader = reader
        self._writer = writer

    async def readexactly(self, size: int) -> bytes:
        # A client that asks and never reads the answers is not read from either.
        await self._writer.drain()
        return await self._reader.readexactly(size)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


class _PlainWriter:
    """The other direction; it is its own `channel`."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.channel = self
        self.write: Callable[[bytes], None] = writer.write
        self.close: Callable[[], None] = writer.close
        self.is_closing: Callable[[], bool] = writer.is_closing


async def serve(
    listener: socket.socket, journal: Journal, settling: socket.socket, image: int
) -> None:
    """Serve the sessions that connect to `listener`, until SIGTERM.

    What connects to `settling` has the file system held still, see `hosts.paused_settle`.
    """
    loop = asyncio.get_running_loop()
    settler = Settler(image)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    for one in (listener, settling):
        one.setblocking(False)
    tasks = [
        loop.create_task(_accept(listener, journal, settler)),
        loop.create_task(_settle(settling, journal, settler)),
    ]
    await stop.wait()
    for task in tasks:
        task.cancel()


async def _settle(listener: socket.socket, journal: Journal, settler: Settler) -> None:
    loop = asyncio.get_running_loop()
    while True:
        stream, _ = await loop.sock_accept(listener)
        journal.forget_changes()
        signal.alarm(REQUEST_LIMIT_S)
        serve_one(stream, settler)
        signal.alarm(0)


async def _accept(listener: socket.socket, journal: Journal, settler: Settler) -> None:
    loop = asyncio.get_running_loop()
    sessions: set[asyncio.Task[None]] = set()
    while True:
        while len(sessions) >= MAX_SESSIONS:
            await asyncio.wait(sessions, return_when=asyncio.FIRST_COMPLETED)
        stream, _ = await loop.sock_accept(listener)
        session = loop.create_task(_session(stream, journal, settler))
        sessions.add(session)
        session.add_done_callback(sessions.discard)


async def _session(stream: socket.socket, journal: Journal, settler: Settler) -> None:
    journal.note_use()
    reader, writer = await asyncio.open_unix_connection(sock=stream)
    try:
        await _Handler(ConfinedServer(journal, settler), reader, writer).run()
    except (EOFError, OSError):
        return  # the client went away in the middle of a packet
    finally:
        writer.close()


def forbid_imports() -> None:
    """Make every later import of a file fail: it would come from the guest."""
    sys.path.clear()
    sys.path_hooks.clear()
    sys.path_importer_cache.clear()
    sys.meta_path.clear()
    # asyncssh looks users up where these can be imported; None makes that an ImportError.
    modules = cast("dict[str, object]", sys.modules)
    modules["pwd"] = None
    modules["grp"] = None
