"""Taking an image in from whoever connects: received, checked and unpacked, then this ends.

    python -m hosts.volumes.image_intake <socket> <folder>     its limits come on stdin

The sender writes a line, `<length of the file>`, and then the file. It is answered with a
line: `ok <bytes of the device>`, and the raw image lies in the folder; or `error <why>`, and
nothing is left. It runs as nobody of importance, with limits on memory, since all that it
reads is hostile.
"""

import contextlib
import json
import logging
import os
import resource
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

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

    def receive(self, length: int, path: Path) -> None:
        left_bytes = length
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            while left_bytes:
                piece = self._stream.read(min(PIECE_BYTES, left_bytes))
                if not piece:
                    raise BadImage("The image ended before its length.")
                file.write(piece)
                left_bytes -= len(piece)

    def answer(self, text: str) -> None:
        self._connection.sendall(f"{text}\n".encode())


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
            size_bytes = _take(sender, part, raw, config)
            sender.answer(f"ok {size_bytes}")
        except BaseException as error:
            raw.unlink(missing_ok=True)
            if not isinstance(error, BadImage):
                raise
            with contextlib.suppress(OSError):
                sender.answer(f"error {error}")
        finally:
            part.unlink(missing_ok=True)


def _take(sender: _Sender, part: Path, raw: Path, config: IntakeConfig) -> int:
    length = sender.length(config.file_bytes)
    space = os.statvfs(part.parent)
    if length + SPARE_BYTES > space.f_bavail * space.f_frsize:
        raise BadImage("The host has no room for the image now. Try again later.")
    for path in (part, raw):
        path.unlink(missing_ok=True)
    sender.receive(length, part)
    limits = Limits(device_bytes=config.device_bytes, data_bytes=config.data_bytes)
    return unpack_image(part, raw, limits)


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
