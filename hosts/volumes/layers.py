"""Folding overlays that are stored into the layer that a disk's reads go through.

The layer is a local qcow2 between the overlays and the export, filled by a copy-on-read
filter. It is a cache of one running storage daemon: begun empty with it, thrown away with it.

**It never holds an older block than the export below it.** An overlay leaves the chain only
when all of its clusters were written into the layer first, while it still lies above and
hides them; otherwise the layer is replaced by an empty one as the overlay goes. A cluster that
the overlay does not have reads the same from the old base and the new. A read that was on its
way to the layer when the fold wrote there is no danger: QEMU has copy-on-read requests and
writes of the same cluster wait for each other, and the fold's comes last.

Source of the protocol: doc/proto.md of NetworkBlockDevice/nbd.
"""

import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from common.units import KiB, MiB
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.errors import DaemonFailed
from hosts.volumes.qcow2 import Cluster, Overlay, open_overlay

TIMEOUT_S = 30
WRITE_BYTES = MiB
"""The most that one request carries."""

_WRITE, _FLUSH, _ZERO = 1, 3, 6
_OPT_GO = 7
_ACK = 1
_REQUEST_MAGIC = 0x25609513
_MAX_OPTION_BYTES = 64 * KiB


def fold(overlays: Sequence[Path], disk_socket: Path, export: str) -> None:
    """Write all clusters of overlays, the lowest first, into an exported layer.

    Raises:
        DaemonFailed: not all of them are there.
    """
    try:
        with _Writer(disk_socket, export) as layer:
            for path in overlays:
                with open_overlay(path) as overlay:
                    _fold_one(overlay, layer)
            layer.flush()
    except (OSError, struct.error) as error:
        raise DaemonFailed(f"A layer could not be written: {error}.") from error


def flush(disk_socket: Path, export: str) -> None:
    """Have what an export's daemon keeps in memory written out, beside its other users.

    Raises:
        DaemonFailed: it was not.
    """
    try:
        with _Writer(disk_socket, export) as disk:
            disk.flush()
    except (OSError, struct.error) as error:
        raise DaemonFailed(f"A disk could not be flushed: {error}.") from error


def _fold_one(overlay: Overlay, layer: "_Writer") -> None:
    for table in sorted(overlay.tables):
        clusters = overlay.clusters(table)
        run: list[int] = []
        for number in sorted(clusters):
            if run and not _joins(clusters, run, number):
                _write_run(overlay, layer, run, clusters)
                run = []
            run.append(number)
        if run:
            _write_run(overlay, layer, run, clusters)


def _joins(clusters: dict[int, Cluster], run: list[int], number: int) -> bool:
    return (
        number == run[-1] + 1
        and len(run) < WRITE_BYTES // BLOCK_BYTES
        and (clusters[number] is None) == (clusters[run[0]] is None)
    )


def _write_run(
    overlay: Overlay, layer: "_Writer", run: list[int], clusters: dict[int, Cluster]
) -> None:
    at = run[0] * BLOCK_BYTES
    if clusters[run[0]] is None:
        layer.zero(at, len(run) * BLOCK_BYTES)
    else:
        layer.write(at, b"".join(overlay.read(clusters[number]) for number in run))


class _Writer:
    """A connection to an export that is only written to, one request at a time."""

    def __init__(self, path: Path, export: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(TIMEOUT_S)
            self._socket.connect(str(path))
            self._open(export)
        except BaseException:
            self._socket.close()
            raise

    def _open(self, export: str) -> None:
        if self._take(18)[:16] != b"NBDMAGICIHAVEOPT":
            raise OSError("no NBD server")
        name = export.encode()
        body = struct.pack(">I", len(name)) + name + bytes(2)
        option = b"IHAVEOPT" + struct.pack(">II", _OPT_GO, len(body)) + body
        self._socket.sendall(struct.pack(">I", 3) + option)  # fixed newstyle, no zeroes
        kind = 0
        while kind != _ACK:
            _, _, kind, length = struct.unpack(">QIII", self._take(20))
            if kind >> 31 or length > _MAX_OPTION_BYTES:
                raise OSError("the NBD server refused")
            self._take(length)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def write(self, at: int, body: bytes) -> None:
        self._request(_WRITE, at, len(body), body)

    def zero(self, at: int, length: int) -> None:
        self._request(_ZERO, at, length)

    def flush(self) -> None:
        self._request(_FLUSH, 0, 0)

    def _request(self, kind: int, at: int, length: int, body: bytes = b"") -> None:
        self._socket.sendall(struct.pack(">IHHQQI", _REQUEST_MAGIC, 0, kind, 0, at, length))
        if body:
            self._socket.sendall(body)
        _, error, _ = struct.unpack(">IIQ", self._take(16))
        if error:
            raise OSError(error, "the NBD server answered with an error")

    def _take(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise OSError("the NBD server hung up")
            parts += part
        return bytes(parts)
