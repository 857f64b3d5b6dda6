"""Taking an image in from whoever connects: received, checked and unpacked, then this ends.

    python -m hosts.volumes.image_intake <socket> <folder>     its limits come on stdin

The sender writes a line, `<length of the file>`, and then the file. It is answered with a
line: `ok <bytes of the device>`, and the raw image lies in the folder; or `error <why>`, and
nothing is left. It runs as nobody of importance, with limits on memory and on time, since
all that it reads is hostile; it ends when its sender has gone. Its files are those of a
living process for as long as somebody holds a lock on the first, see `image_exports`.
"""

import contextlib
import fcntl
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from common.units import GiB, MiB
from hosts.volumes.foreign_image import BadImage, Limits, unpack_image

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60
STALL_TIMEOUT_S = 300
PIECE_BYTES = MiB
MEMORY_BYTES = GiB
"""Of addresses: what it needs is a tenth of that."""

SPARE_BYTES = GiB
"""What it leaves free on the disk that it writes to."""

ARRIVAL_S = 1800
ARRIVAL_BYTES_PER_S = MiB
"""How slowly an image may come: this long, and then no slower than that."""

UNPACK_S = 600
"""Whoever sent it waits no longer for the answer."""

CPU_S = 60
CPU_BYTES_PER_S = 16 * MiB
"""Of the file, and this long: several times what unpacking the densest takes."""

CPU_GRACE_S = 30
LOOK_S = 1.0

TOO_SLOW = "The image did not come in time. Try again over a faster line."
TOO_MUCH_WORK = "The image takes longer to unpack than one of its length may."


@dataclass(frozen=True)
class IntakeConfig:
    """How large an image may be, in bytes: as a file, as a disk, and in what it holds."""

    file_bytes: int
    device_bytes: int
    data_bytes: int

    def text(self) -> str:
        return json.dumps(asdict(self))


class _Sender:
    """The connection of who sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")

    def length(self, limit_bytes: int) -> int:
        line = self._stream.readline(32).strip()
        if not line.isdigit():
            raise BadImage("The length of the image is missing.")
        if int(line) > limit_bytes:
            raise BadImage(f"An image may have at most {limit_bytes} bytes.")
        return int(line)

    def receive(self, length: int, fd: int) -> None:
        left_bytes = length
        with os.fdopen(fd, "wb", closefd=False) as file:
            while left_bytes:
                piece = self._stream.read(min(PIECE_BYTES, left_bytes))
                if not piece:
                    raise BadImage("The image ended before its length.")
                file.write(piece)
                left_bytes -= len(piece)

    def is_gone(self) -> bool:
        """Tell whether nobody is there any more who could be answered."""
        poll = select.poll()
        poll.register(self._connection, 0)  # a hang-up is told unasked
        return bool(poll.poll(0))

    def answer(self, text: str) -> None:
        self._connection.sendall(f"{text}\n".encode())


class _Guard:
    """Ends the work of this process when it takes too long, or nobody waits for it.

    It raises out of whatever is being done, once.
    """

    def __init__(self, sender: _Sender) -> None:
        self._sender = sender
        self._until = 0.0
        self._why = ""

    def __enter__(self) -> "_Guard":
        signal.signal(signal.SIGALRM, self._look)
        signal.signal(signal.SIGXCPU, self._no_more_work)
        signal.signal(signal.SIGTERM, self._told_to_end)
        signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._rest()

    def allow(self, wall_s: float, why: str) -> None:
        """Begin something that may take so long."""
        self._until, self._why = time.monotonic() + wall_s, why

    def _look(self, *_: object) -> None:
        if self._sender.is_gone():
            self._rest()
            raise ConnectionAbortedError("nobody waits for it any more")
        if time.monotonic() > self._until:
            self._rest()
            raise BadImage(self._why)

    def _no_more_work(self, _number: int, _frame: FrameType | None) -> None:
        self._rest()
        raise BadImage(TOO_MUCH_WORK)

    def _told_to_end(self, _number: int, _frame: FrameType | None) -> None:
        self._rest()
        raise SystemExit(1)

    def _rest(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (signal.SIGALRM, signal.SIGXCPU, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def limit_work(file_bytes: int) -> None:
    """Let this process use as much of a CPU as the worst image of this length may need."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + CPU_S + file_bytes // CPU_BYTES_PER_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + CPU_GRACE_S))


def serve(path: Path, folder: Path, config: IntakeConfig) -> None:
    """Take one image in from the first that connects."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(CONNECT_TIMEOUT_S)
        listener.bind(str(path))
        try:
            listener.listen(1)
            connection, _ = listener.accept()
        finally:
            path.unlink(missing_ok=True)
    part, raw = folder / f"{path.stem}.part", folder / f"{path.stem}.raw"
    with connection:
        connection.settimeout(STALL_TIMEOUT_S)
        sender = _Sender(connection)
        try:
            with _Guard(sender) as guard:
                guard.allow(STALL_TIMEOUT_S, TOO_SLOW)
                size_bytes = _take(sender, guard, part, raw, config)
            sender.answer(f"ok {size_bytes}")
        except BaseException as error:
            raw.unlink(missing_ok=True)
            if not isinstance(error, BadImage):
                raise
            with contextlib.suppress(OSError):
                sender.answer(f"error {error}")
        finally:
            part.unlink(missing_ok=True)


def _take(sender: _Sender, guard: _Guard, part: Path, raw: Path, config: IntakeConfig) -> int:
    length = sender.length(config.file_bytes)
    space = os.statvfs(part.parent)
    if length + SPARE_BYTES > space.f_bavail * space.f_frsize:
        raise BadImage("The host has no room for the image now. Try again later.")
    for path in (part, raw):
        path.unlink(missing_ok=True)
    limit_work(length)
    limits = Limits(device_bytes=config.device_bytes, data_bytes=config.data_bytes)
    with _held(part) as fd:
        guard.allow(ARRIVAL_S + length / ARRIVAL_BYTES_PER_S, TOO_SLOW)
        sender.receive(length, fd)
        guard.allow(UNPACK_S, TOO_MUCH_WORK)
        size_bytes = unpack_image(part, raw, limits)
        # It is new from now on, however long ago the last of it was written.
        os.utime(raw)
    return size_bytes


@contextlib.contextmanager
def _held(path: Path) -> Iterator[int]:
    """Make a file that shows by a lock that this process lives."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def main() -> None:
    """Be the process of one intake."""
    logging.basicConfig(level=logging.INFO)
    os.umask(0o077)
    config = IntakeConfig(**json.loads(sys.stdin.read()))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        serve(Path(sys.argv[1]), Path(sys.argv[2]), config)
    except OSError as error:  # which time-outs are, too
        log.info("an image was not taken in: %s", error)


if __name__ == "__main__":
    main()
