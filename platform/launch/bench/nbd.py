"""A small NBD client, for measuring and for proofs: what a guest's driver does, without it.

Source: the NBD protocol, doc/proto.md of NetworkBlockDevice/nbd.
"""

import select
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

READ, WRITE, _DISCONNECT, FLUSH, TRIM, ZERO = 0, 1, 2, 3, 4, 6
_OPT_GO = 7
_REQUEST = struct.Struct(">IHHQQI")
_REPLY = struct.Struct(">IIQ")
_REQUEST_MAGIC = 0x25609513
_INFO_EXPORT = 3
_ACK = 1
_IS_ERROR = 1 << 31
_PIECE_BYTES = 1 << 20


class NbdError(OSError):
    """The server answered a request with an error, or hung up."""


@dataclass(frozen=True)
class Reply:
    """What came back for one request."""

    number: int
    """The request's, as `submit` gave it."""
    error: int
    """An errno; 0 when it was carried out."""
    data: bytes


class Nbd:
    """One connection to an export; either one request at a time, or several in flight.

    `submit` sends a request, `reap` waits for any answer. The rest are one request each,
    for when none is in flight.
    """

    def __init__(self, path: Path, export: str = "disk", *, timeout_s: float = 60) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        self._reads: dict[int, int] = {}
        self._number = 0
        try:
            self._socket.connect(str(path))
            self.size_bytes = self._negotiate(export)
        except BaseException:
            self._socket.close()
            raise

    def _negotiate(self, export: str) -> int:
        magic, option_magic, _flags = struct.unpack(">8s8sH", self._take(18))
        if (magic, option_magic) != (b"NBDMAGIC", b"IHAVEOPT"):
            raise NbdError("this is no NBD server")
        self._socket.sendall(struct.pack(">I", 3))
        name = export.encode()
        body = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
        self._socket.sendall(b"IHAVEOPT" + struct.pack(">II", _OPT_GO, len(body)) + body)
        size = -1
        while True:
            _, _, kind, length = struct.unpack(">QIII", self._take(20))
            body = self._take(length)
            if kind == _ACK:
                return size
            if kind & _IS_ERROR:
                raise NbdError(f"the server refused: {kind:x} {body!r}")
            if kind == _INFO_EXPORT and body[:2] == b"\0\0":
                size = int.from_bytes(body[2:10], "big")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        """End the connection under whoever waits for an answer, in another thread too."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _take(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(min(count - len(parts), _PIECE_BYTES))
            if not part:
                raise NbdError("the server hung up")
            parts += part
        return bytes(parts)

    # -- several in flight ----------------------------------------------------------------

    def submit(self, kind: int, offset: int, length: int, body: bytes = b"") -> int:
        """Send a request; return its number."""
        self._number += 1
        if kind == READ:
            self._reads[self._number] = length
        head = _REQUEST.pack(_REQUEST_MAGIC, 0, kind, self._number, offset, length)
        self._socket.sendall(head + body)
        return self._number

    def has_reply(self, within_s: float) -> bool:
        """Wait until something can be reaped; tell whether it can."""
        return bool(select.select([self._socket], [], [], within_s)[0])

    def reap(self) -> Reply:
        """Wait for the answer to any request.

        Raises:
            NbdError: the server hung up.
        """
        _, error, number = _REPLY.unpack(self._take(_REPLY.size))
        length = self._reads.pop(number, 0)
        return Reply(number, error, self._take(length) if length and not error else b"")

    # -- one at a time --------------------------------------------------------------------

    def _request(self, kind: int, offset: int, length: int, body: bytes = b"") -> bytes:
        self.submit(kind, offset, length, body)
        reply = self.reap()
        if reply.error:
            raise NbdError(reply.error, "the server answered with an error")
        return reply.data

    def read(self, offset: int, length: int) -> bytes:
        return self._request(READ, offset, length)

    def write(self, offset: int, body: bytes) -> None:
        self._request(WRITE, offset, len(body), body)

    def trim(self, offset: int, length: int) -> None:
        self._request(TRIM, offset, length)

    def zero(self, offset: int, length: int) -> None:
        self._request(ZERO, offset, length)

    def flush(self) -> None:
        self._request(FLUSH, 0, 0)
