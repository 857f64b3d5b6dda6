"""One disk's qemu-storage-daemon: its block nodes, and how they are changed while it runs.

    export disk ── overlay-5 ── overlay-4 ── overlay-3 ── base-2 ── (NBD) ── nbdkit
                      │            │            │
                    file-5       file-4       file-3

`reconcile` goes from whatever is to what the state file says. Rotating and dropping are
nothing but that, after the state file was changed: so what a crash interrupts, the next
call finishes.
"""

import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hosts.volumes.daemons import daemon_pid, end_daemon, plain_environment, start_daemon
from hosts.volumes.disk_state import DiskState
from hosts.volumes.errors import DaemonFailed, NotAttached
from hosts.volumes.failpoints import reach
from hosts.volumes.qmp import Qmp, QmpRefused

EXPORT_NAME = "disk"
"""What the NBD export of a disk is called."""

RECONNECT_S = 3600
"""How long reads are held back while the export below is being restarted."""

STOP_GRACE_S = 20
"""To flush and end before it is ended by force, and for an export to be let go."""

_NBD = "nbd0"
_FUSE = "fuse0"
_KINDS = ("overlay", "file", "base")
"""Kinds of nodes, users before what they use."""

_O_PATH = 0o10000000


class StorageDaemon:
    """The storage daemon of one disk."""

    def __init__(self, run_dir: Path, overlay_dir: Path, *, user: str | None) -> None:
        self._run_dir = run_dir
        self._overlay_dir = overlay_dir
        self._user = user
        self._pidfile = run_dir / "daemon.pid"
        self.socket = run_dir / "disk.sock"

    def is_running(self) -> bool:
        return daemon_pid(self._pidfile) is not None

    def overlay_path(self, number: int) -> Path:
        return self._overlay_dir / f"overlay-{number}.qcow2"

    def start(self, state: DiskState, *, export_socket: Path, socket_gid: int | None) -> None:
        """Start it on the whole chain.

        Nodes come first on its command line: the lock of an overlay in use then ends a
        second daemon before it takes the sockets of the first.
        """
        self.stop()  # one that was killed may still hold those locks
        nodes = [self._base_options(state, export_socket)]
        below = f"base-{state.base}"
        for number in state.overlays:
            nodes += [self._file_options(number), _overlay_options(number, below)]
            below = f"overlay-{number}"
        command = ["qemu-storage-daemon", "--daemonize", "--pidfile", str(self._pidfile)]
        for node in nodes:
            command += ["--blockdev", json.dumps(node)]
        monitor = f"socket,path={self._run_dir / 'qmp.sock'},server=on,wait=off,id=qmp"
        command += ["--chardev", monitor, "--monitor", "chardev=qmp"]
        command += ["--nbd-server", f"addr.type=unix,addr.path={self.socket}"]
        command += ["--export", json.dumps(_nbd_export(below))]
        start_daemon(command, user=self._user, environment=plain_environment())
        _grant_socket(self.socket, socket_gid)

    def stop(self) -> None:
        """End it; it flushes first."""
        end_daemon(self._pidfile, grace_s=STOP_GRACE_S)

    def connect(self) -> Qmp:
        """Open its monitor.

        Raises:
            NotAttached: it does not run.
        """
        if not self.is_running():
            raise NotAttached("The disk's storage daemon does not run: attach it.")
        return Qmp(self._run_dir / "qmp.sock")

    def reconcile(self, qmp: Qmp, state: DiskState, export_socket: Path) -> None:
        """Make the running daemon what the state file says, without stopping the guest."""
        nodes = _node_names(qmp)
        self._rotate(qmp, state, nodes)
        base = f"base-{state.base}"
        if base not in nodes:
            qmp.execute("blockdev-add", **self._base_options(state, export_socket))
            reach("drop.added")
        extra = _unnamed(nodes, state)
        if base not in nodes or extra:
            lowest = _overlay_options(state.overlays[0], base)
            qmp.execute("blockdev-reopen", options=[lowest])
            reach("drop.reopened")
        for name in extra:
            qmp.execute("blockdev-del", node_name=name)

    def _rotate(self, qmp: Qmp, state: DiskState, nodes: set[str]) -> None:
        """Let writes go to the overlay that the state file has on top."""
        active = f"overlay-{state.active}"
        if active not in nodes:
            if f"file-{state.active}" not in nodes:
                qmp.execute("blockdev-add", **self._file_options(state.active))
            qmp.execute("blockdev-add", **_overlay_options(state.active, None))
            reach("rotate.added")
        exports = _exports(qmp)
        exported = exports.get(_FUSE) or exports.get(_NBD)
        if exported is None:
            qmp.execute("block-export-add", **_nbd_export(active))
        elif exported != active:
            # Flushes and freezes the old overlay, tables included, before it goes on.
            qmp.execute("blockdev-snapshot", node=exported, overlay=active)
            reach("rotate.done")

    def has_written(self, qmp: Qmp, state: DiskState) -> bool:
        """Tell whether anything was written to the active overlay by this daemon.

        Asked of the daemon: what it has not flushed is in no table on disk yet. A discard
        alone leaves no trace here.
        """
        for stats in qmp.execute("query-blockstats", query_nodes=True):
            if stats.get("node-name") == f"overlay-{state.active}":
                return bool(stats["stats"]["wr_highest_offset"])
        return False

    def flush(self, qmp: Qmp, state: DiskState) -> None:
        """Have the active overlay's tables written to its file.

        There is no command for that; a reopen begins with it, and here changes nothing.
        """
        options = _overlay_options(state.active, self._below(state))
        qmp.execute("blockdev-reopen", options=[options])

    def show_file(self, qmp: Qmp, state: DiskState, mountpoint: Path) -> None:
        """Export by FUSE instead of NBD: one node takes one writer.

        Raises:
            QmpRefused: it cannot be mounted there; the NBD export is gone until the next
                `reconcile`.
        """
        self.hide_file(qmp)
        _delete_export(qmp, _NBD)
        qmp.execute(
            "block-export-add",
            type="fuse",
            id=_FUSE,
            node_name=f"overlay-{state.active}",
            mountpoint=str(mountpoint),
            writable=True,
            growable=False,
        )

    def hide_file(self, qmp: Qmp) -> None:
        """End the FUSE export; nothing if there is none."""
        _delete_export(qmp, _FUSE)

    def shows_file(self, qmp: Qmp) -> bool:
        return _FUSE in _exports(qmp)

    def _below(self, state: DiskState) -> str:
        """Name the node under the active overlay."""
        lower = state.overlays[:-1]
        return f"overlay-{lower[-1]}" if lower else f"base-{state.base}"

    def _base_options(self, state: DiskState, export_socket: Path) -> dict[str, Any]:
        return {
            "driver": "nbd",
            "node-name": f"base-{state.base}",
            "server": {"type": "unix", "path": str(export_socket)},
            "export": state.root_key,
            "read-only": True,
            "reconnect-delay": RECONNECT_S,
        }

    def _file_options(self, number: int) -> dict[str, Any]:
        path = self.overlay_path(number)
        direct = _takes_direct_io(path)
        return {
            "driver": "file",
            "node-name": f"file-{number}",
            "filename": str(path),
            "cache": {"direct": direct},
            "aio": "native" if direct else "threads",
            "discard": "unmap",
        }


def _overlay_options(number: int, backing: str | None) -> dict[str, Any]:
    return {
        "driver": "qcow2",
        "node-name": f"overlay-{number}",
        "file": f"file-{number}",
        "backing": backing,
        "discard": "unmap",
    }


def _nbd_export(node: str) -> dict[str, Any]:
    return {"type": "nbd", "id": _NBD, "node-name": node, "name": EXPORT_NAME, "writable": True}


def _unnamed(nodes: set[str], state: DiskState) -> list[str]:
    """List nodes that the state file does not name, in an order they can be deleted in."""
    wanted = {f"base-{state.base}"}
    for number in state.overlays:
        wanted |= {f"overlay-{number}", f"file-{number}"}
    found = []
    for name in nodes - wanted:
        kind, _, number_text = name.partition("-")
        if kind in _KINDS and number_text.isdecimal():
            found.append((_KINDS.index(kind), -int(number_text), name))
    return [name for _, _, name in sorted(found)]


def _node_names(qmp: Qmp) -> set[str]:
    nodes = qmp.execute("query-named-block-nodes", flat=True)
    return {node["node-name"] for node in nodes}


def _exports(qmp: Qmp) -> Mapping[str, str]:
    """Map each export to its node."""
    return {item["id"]: item["node-name"] for item in qmp.execute("query-block-exports")}


def _delete_export(qmp: Qmp, name: str) -> None:
    """Delete an export and wait until it has let go of its node."""
    if name not in _exports(qmp):
        return
    with suppress(QmpRefused):  # being deleted already
        qmp.execute("block-export-del", id=name, mode="hard")
    deadline = time.monotonic() + STOP_GRACE_S
    while name in _exports(qmp):
        if time.monotonic() > deadline:
            raise DaemonFailed(f"The export {name} is not let go.")
        time.sleep(0.01)


def _takes_direct_io(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:  # EINVAL: tmpfs and others cannot
        return False
    return True


def _grant_socket(path: Path, gid: int | None) -> None:
    """Open a socket to its group.

    The folder is the daemons' own, and we may be root: whatever lies there under the
    socket's name is changed only if it is a socket, and no link is followed.
    """
    fd = os.open(path, _O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise DaemonFailed("A storage daemon made no socket.")
        itself = f"/proc/self/fd/{fd}"
        if gid is not None:
            os.chown(itself, -1, gid)
        Path(itself).chmod(0o660)
    finally:
        os.close(fd)
