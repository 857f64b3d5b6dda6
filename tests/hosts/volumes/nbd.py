"""A small NBD client for tests: what a guest's driver does, without a guest.

Source: the NBD protocol, doc/proto.md of NetworkBlockDevice/nbd.
"""

import socket
import struct
from pathlib import Path
from typing import Self

_READ, _WRITE, _DISCONNECT, _FLUSH, _TRIM, _ZEROES = 0, 1, 2, 3, 4, 6
_OPT_GO = 7


class NbdError(OSError):
    """The server answered a request with an error."""


class Nbd:
    """One connection to an export, one request at a time."""

    def __init__(self, path: Path, export: str = "disk", *, timeout_s: float = 60) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        self._socket.connect(str(path))
        magic, option_magic, _flags = struct.unpack(">8s8sH", self._take(18))
        assert (magic, option_magic) == (b"NBDMAGIC", b"IHAVEOPT")
        self._socket.sendall(struct.pack(">I", 3))
        name = export.encode()
        body = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
        self._socket.sendall(b"IHAVEOPT" + struct.pack(">II", _OPT_GO, len(body)) + body)
        self.size_bytes = self._negotiate()

    def _negotiate(self) -> int:
        size = -1
        while True:
            _, _, kind, length = struct.unpack(">QIII", self._take(20))
            body = self._take(length)
            if kind == 1:
                return size
            if kind & 0x80000000:
                raise NbdError(f"the server refused: {kind:x} {body!r}")
            if kind == 3 and body[:2] == b"\0\0":
                size = int.from_bytes(body[2:10], "big")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def _take(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise NbdError("the server hung up")
            parts += part
        return bytes(parts)

    def _request(self, kind: int, offset: int, length: int, body: bytes = b"") -> None:
        self._socket.sendall(
            struct.pack(">IHHQQI", 0x25609513, 0, kind, 7, offset, length) + body
        )
        _, error, _ = struct.unpack(">IIQ", self._take(16))
        if error:
            raise NbdError(error, "the server answered with an error")

    def read(self, offset: int, length: int) -> bytes:
        self._request(_READ, offset, length)
        return self._take(length)

    def write(self, offset: int, body: bytes) -> None:
        self._request(_WRITE, offset, len(body), body)

    def trim(self, offset: int, length: int) -> None:
        self._request(_TRIM, offset, length)

    def zero(self, offset: int, length: int) -> None:
        self._request(_ZEROES, offset, length)

    def flush(self) -> None:
        self._request(_FLUSH, 0, 0)
