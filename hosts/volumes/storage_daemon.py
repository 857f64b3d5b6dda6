"""One disk's qemu-storage-daemon: its block nodes, and how they are changed while it runs.

    export disk ─ paced ─ overlay-5 ─ overlay-4 ─ cor-1 ─ layer-1 ─ base-2 ─ (NBD) ─ nbdkit
                             │           │                   │
                           file-5      file-4             cache-1

`paced` holds writes back (see `pacing`); reads and flushes pass. `cor-1` copies what is read
from the base into the layer, a local cache of it: see `layers`. Without one, the lowest
overlay lies on the base itself.

`reconcile` goes from whatever is to what the state file says. Rotating and dropping are
nothing but that, after the state file was changed: so what a crash interrupts, the next
call finishes.
"""

import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hosts.volumes.daemons import (
    daemon_pid,
    end_daemon,
    plain_environment,
    spare_mark,
    spare_pidfile,
    start_daemon,
)
from hosts.volumes.disk_state import DiskState
from hosts.volumes.errors import DaemonFailed, NotAttached
from hosts.volumes.failpoints import reach
from hosts.volumes.pacing import Limits
from hosts.volumes.qmp import TIMEOUT_S, Qmp, QmpRefused

EXPORT_NAME = "disk"
"""What the NBD export of a disk is called."""

PID_NAME = "daemon.pid"
MONITOR_NAME = "qmp.sock"
SOCKET_NAME = "disk.sock"

SET_UP_TIMEOUT_S = 20
"""For a daemon that was started ahead; one that takes longer is ended, and another started."""

RECONNECT_S = 3600
"""How long reads are held back while the export below is being restarted."""

STOP_GRACE_S = 20
"""To flush and end before it is ended by force, and for an export to be let go."""

_NBD = "nbd0"
_FUSE = "fuse0"
_PACED = "paced"
_LIMITS = "limits"
_KINDS = ("overlay", "file", "cor", "layer", "cache", "base")
"""Kinds of nodes, users before what they use."""

_O_PATH = 0o10000000


class StorageDaemon:
    """The storage daemon of one disk."""

    def __init__(
        self,
        run_dir: Path,
        overlay_dir: Path,
        *,
        user: str | None,
        take_spare: Callable[[Path, Callable[[], None]], bool] = lambda *_: False,
    ) -> None:
        self._run_dir = run_dir
        self._overlay_dir = overlay_dir
        self._user = user
        self._take_spare = take_spare
        self._pidfile = run_dir / PID_NAME
        self._monitor = run_dir / MONITOR_NAME
        self.socket = run_dir / SOCKET_NAME

    def is_running(self) -> bool:
        return daemon_pid(self._pidfile) is not None

    def overlay_path(self, number: int) -> Path:
        return self._overlay_dir / f"overlay-{number}.qcow2"

    def layer_path(self, number: int) -> Path:
        return self._overlay_dir / f"layer-{number}.qcow2"

    def start(
        self,
        state: DiskState,
        *,
        export_socket: Path,
        socket_gid: int | None,
        shown_at: Path | None = None,
    ) -> None:
        """Start it on the whole chain, or make a spare that.

        Args:
            shown_at: where it is shown as a file, instead of over NBD.
        """
        self.stop()  # one that was killed may still hold the locks of the overlays
        nodes = self._chain(state, export_socket)
        export = _nbd_export(_PACED) if shown_at is None else _fuse_export(_PACED, shown_at)
        if not self._take_spare(self._run_dir, lambda: self._set_up(nodes, export)):
            spare_mark(self._pidfile).unlink(missing_ok=True)
            self._start(nodes, export)
        self.grant_socket(socket_gid)

    def grant_socket(self, gid: int | None) -> None:
        """Open the disk's socket to its group. Safe to repeat.

        Raises:
            DaemonFailed: something else lies under its name.
        """
        _grant_socket(self.socket, gid)

    def _chain(self, state: DiskState, export_socket: Path) -> list[dict[str, Any]]:
        """List the state's nodes, what is used before its users."""
        nodes = [self._base_options(state, export_socket), *self._layer_nodes(state)]
        below = _lowest(state)
        for number in state.overlays:
            nodes += [self._file_options(number), _overlay_options(number, below)]
            below = f"overlay-{number}"
        return [*nodes, _paced_options(below)]

    def _start(self, nodes: list[dict[str, Any]], export: dict[str, Any]) -> None:
        """Start a new one.

        Nodes come first on its command line: the lock of an overlay in use then ends a
        second daemon before it takes the sockets of the first.
        """
        command = _command(self._pidfile)
        for node in nodes:
            command += ["--blockdev", json.dumps(node)]
        command += _socket_options(self._run_dir)
        command += ["--export", json.dumps(export)]
        start_daemon(
            command,
            pidfile=self._pidfile,
            user=self._user,
            environment=plain_environment(),
        )

    def _set_up(self, nodes: list[dict[str, Any]], export: dict[str, Any]) -> None:
        """Give a daemon without nodes, whose monitor is here already, what it is to serve."""
        commands = [("blockdev-add", node) for node in nodes]
        commands.append(("block-export-add", export))
        with Qmp(self._monitor, timeout_s=SET_UP_TIMEOUT_S) as qmp:
            qmp.execute_all(commands)

    def stop(self) -> None:
        """End it; it flushes first. So is a spare that a worker died over when it took it."""
        end_daemon(self._pidfile, grace_s=STOP_GRACE_S)
        spare = spare_pidfile(self._pidfile)
        if spare is not None:
            end_daemon(spare, grace_s=0)  # nobody was ever told of it

    def connect(self, *, timeout_s: float = TIMEOUT_S) -> Qmp:
        """Open its monitor.

        Args:
            timeout_s: for each command. A change of nodes waits for reads under way, and
                these for the object store.

        Raises:
            NotAttached: it does not run.
        """
        if not self.is_running():
            raise NotAttached("The disk's storage daemon does not run: attach it.")
        return Qmp(self._monitor, timeout_s=timeout_s)

    def nodes(self, qmp: Qmp) -> frozenset[str]:
        """Name what the running daemon has. It serves nobody while it answers: ask once."""
        return frozenset(_node_names(qmp))

    def reconcile(
        self, qmp: Qmp, state: DiskState, export_socket: Path, nodes: frozenset[str]
    ) -> None:
        """Make the running daemon what the state file says, without stopping the guest.

        Args:
            nodes: what `nodes` has just said.
        """
        self._rotate(qmp, state, nodes)
        base = f"base-{state.base}"
        if base not in nodes:
            qmp.execute("blockdev-add", **self._base_options(state, export_socket))
            reach("drop.added")
        fresh_layer = state.layer is not None and f"cor-{state.layer}" not in nodes
        if fresh_layer:
            for node in self._layer_nodes(state):
                if node["node-name"] not in nodes:
                    qmp.execute("blockdev-add", **node)
        extra = _unnamed(nodes, state)
        if base not in nodes or fresh_layer or extra:
            options = [_overlay_options(state.overlays[0], _lowest(state))]
            if state.layer is not None:
                options.insert(0, _layer_options(state.layer, base))
            qmp.execute("blockdev-reopen", options=options)
            reach("drop.reopened")
        for name in extra:
            if name.startswith("layer-"):
                _delete_export(qmp, name)
            qmp.execute("blockdev-del", node_name=name)

    def prepare(self, qmp: Qmp, number: int, nodes: frozenset[str]) -> None:
        """Make an overlay's file known, so that a rotation to it need only switch."""
        if f"file-{number}" not in nodes:
            qmp.execute("blockdev-add", **self._file_options(number))
        if f"overlay-{number}" not in nodes:
            qmp.execute("blockdev-add", **_overlay_options(number, None))

    def _rotate(self, qmp: Qmp, state: DiskState, nodes: frozenset[str]) -> None:
        """Let writes go to the overlay that the state file has on top."""
        active = f"overlay-{state.active}"
        if active not in nodes:
            self.prepare(qmp, state.active, nodes)
        exports = _exports(qmp)
        exported = exports.get(_FUSE) or exports.get(_NBD)
        if exported is None:
            top = _PACED if _PACED in nodes else active
            qmp.execute("block-export-add", **_nbd_export(top))
        self.rotate(qmp, state)

    def rotate(self, qmp: Qmp, state: DiskState) -> None:
        """Let writes go to the overlay that the state file has on top, which is known here."""
        written = self.written(qmp)
        if written != state.active:
            # Flushes and freezes the old overlay, tables included, before it goes on.
            qmp.execute(
                "blockdev-snapshot",
                node=f"overlay-{written}",
                overlay=f"overlay-{state.active}",
            )
            reach("rotate.done")

    def written(self, qmp: Qmp) -> int:
        """Number the overlay that writes go to."""
        exports = _exports(qmp)
        node = exports.get(_FUSE) or exports.get(_NBD) or ""
        if node == _PACED:
            node = _under_paced(qmp)
        kind, _, number = node.partition("-")
        if kind != "overlay":
            raise DaemonFailed("A storage daemon exports no overlay.")
        return int(number)

    def overlays(self, nodes: frozenset[str]) -> set[int]:
        """List the overlays among nodes."""
        names = (name.partition("-") for name in nodes)
        return {int(number) for kind, _, number in names if kind == "overlay"}

    def has_layer(self, nodes: frozenset[str], number: int) -> bool:
        return f"cor-{number}" in nodes

    def export_layer(self, qmp: Qmp, number: int) -> str:
        """Let a layer be written to, over the disk's socket; returns the export's name."""
        name = f"layer-{number}"
        if name not in _exports(qmp):
            qmp.execute(
                "block-export-add",
                type="nbd",
                id=name,
                node_name=name,
                name=name,
                writable=True,
            )
        return name

    def withdraw_layer(self, qmp: Qmp, number: int) -> None:
        """End what `export_layer` began; nothing if it has ended."""
        _delete_export(qmp, f"layer-{number}")

    def limit_writes(self, qmp: Qmp, limits: Limits, *, release: bool = False) -> None:
        """Hold the guest's writes back, or let them go.

        Args:
            release: also let go at once what waits because of the limits until now: a write
                that was told to wait does not look at them again.

        Raises:
            QmpRefused: the daemon was started by an earlier release, which had no limits.
        """
        group = {"path": f"/objects/{_LIMITS}", "property": "limits"}
        before = qmp.execute("qom-get", **group)
        qmp.execute("qom-set", **group, value=limits.as_qemu())
        # It holds all requests for a moment: not for nothing.
        if release and (before["bps-write"] or before["iops-write"]):
            qmp.execute("blockdev-reopen", options=[_paced_options(_under_paced(qmp))])

    def has_written(self, qmp: Qmp, number: int) -> bool:
        """Tell whether anything was written to an overlay by this daemon.

        Asked of the daemon: what it has not flushed is in no table on disk yet. A discard
        alone leaves no trace here.
        """
        for stats in qmp.execute("query-blockstats", query_nodes=True):
            if stats.get("node-name") == f"overlay-{number}":
                return bool(stats["stats"]["wr_highest_offset"])
        return False

    def flush(self, qmp: Qmp, state: DiskState, number: int) -> None:
        """Have an overlay's tables written to its file.

        There is no command for that; a reopen begins with it, and here changes nothing.
        """
        options = _overlay_options(number, _below(state, number))
        qmp.execute("blockdev-reopen", options=[options])

    def show_file(self, qmp: Qmp, state: DiskState, mountpoint: Path) -> None:
        """Export by FUSE instead of NBD: one node takes one writer.

        Raises:
            QmpRefused: it cannot be mounted there; the NBD export is gone until the next
                `reconcile`.
        """
        self.hide_file(qmp)
        _delete_export(qmp, _NBD)
        node = _PACED if _PACED in _node_names(qmp) else f"overlay-{state.active}"
        qmp.execute("block-export-add", **_fuse_export(node, mountpoint))

    def hide_file(self, qmp: Qmp) -> None:
        """End the FUSE export; nothing if there is none."""
        _delete_export(qmp, _FUSE)

    def shows_file(self, qmp: Qmp) -> bool:
        return _FUSE in _exports(qmp)

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
        return _local_file(f"file-{number}", self.overlay_path(number))

    def _layer_nodes(self, state: DiskState) -> list[dict[str, Any]]:
        """List the nodes of the state's layer, what is used before its users."""
        number = state.layer
        if number is None:
            return []
        return [
            _local_file(f"cache-{number}", self.layer_path(number)),
            _layer_options(number, f"base-{state.base}"),
            {"driver": "copy-on-read", "node-name": f"cor-{number}", "file": f"layer-{number}"},
        ]


def _local_file(name: str, path: Path) -> dict[str, Any]:
    direct = _takes_direct_io(path)
    return {
        "driver": "file",
        "node-name": name,
        "filename": str(path),
        "cache": {"direct": direct},
        "aio": "native" if direct else "threads",
        "discard": "unmap",
    }


def _below(state: DiskState, number: int) -> str:
    """Name the node under an overlay."""
    lower = [other for other in state.overlays if other < number]
    return f"overlay-{lower[-1]}" if lower else _lowest(state)


def _lowest(state: DiskState) -> str:
    """Name the node that the lowest overlay lies on."""
    return f"base-{state.base}" if state.layer is None else f"cor-{state.layer}"


def _layer_options(number: int, base: str) -> dict[str, Any]:
    return {
        "driver": "qcow2",
        "node-name": f"layer-{number}",
        "file": f"cache-{number}",
        "backing": base,
        "discard": "unmap",
    }


def _paced_options(below: str) -> dict[str, Any]:
    # Without "unmap" the filter would swallow discards.
    return {
        "driver": "throttle",
        "node-name": _PACED,
        "throttle-group": _LIMITS,
        "file": below,
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


def _fuse_export(node: str, mountpoint: Path) -> dict[str, Any]:
    return {
        "type": "fuse",
        "id": _FUSE,
        "node-name": node,
        "mountpoint": str(mountpoint),
        "writable": True,
        "growable": False,
    }


def start_empty(folder: Path, *, user: str | None) -> None:
    """Start a daemon that has no nodes yet, whose sockets and pidfile are in a folder.

    Raises:
        DaemonFailed: it did not start.
    """
    pidfile = folder / PID_NAME
    command = [*_command(pidfile), *_socket_options(folder)]
    start_daemon(command, pidfile=pidfile, user=user, environment=plain_environment())


def _command(pidfile: Path) -> list[str]:
    command = ["qemu-storage-daemon", "--daemonize", "--pidfile", str(pidfile)]
    return [*command, "--object", f"throttle-group,id={_LIMITS}"]


def _socket_options(folder: Path) -> list[str]:
    chardev = f"socket,path={folder / MONITOR_NAME},server=on,wait=off,id=qmp"
    nbd = f"addr.type=unix,addr.path={folder / SOCKET_NAME}"
    return ["--chardev", chardev, "--monitor", "chardev=qmp", "--nbd-server", nbd]


def _unnamed(nodes: frozenset[str], state: DiskState) -> list[str]:
    """List nodes that the state file does not name, in an order they can be deleted in."""
    wanted = {f"base-{state.base}"}
    if state.layer is not None:
        wanted |= {f"{kind}-{state.layer}" for kind in ("cor", "layer", "cache")}
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


def _under_paced(qmp: Qmp) -> str:
    """Name the overlay that writes reach through the filter."""
    for stats in qmp.execute("query-blockstats", query_nodes=True):
        if stats.get("node-name") == _PACED:
            return str(stats["parent"]["node-name"])
    raise DaemonFailed("A storage daemon has lost its filter.")


def _delete_export(qmp: Qmp, name: str) -> None:
    """Delete an export and wait until it has let go of its node."""
    if name not in _exports(qmp):
        return
    with suppress(QmpRefused):  # being deleted already
        qmp.execute("block-export-del", id=name, mode="hard")
    deadline, pause_s = time.monotonic() + STOP_GRACE_S, 0.001
    while name in _exports(qmp):
        if time.monotonic() > deadline:
            raise DaemonFailed(f"The export {name} is not let go.")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)


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
