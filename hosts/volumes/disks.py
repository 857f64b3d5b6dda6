"""The attached disks of this host: a generation, the writes over it, and who serves them.

    guest ─ disk.sock ─ qemu-storage-daemon ─ overlay-2 → overlay-1 ─ export-0.sock ─ nbdkit
                           (qcow2, local)     active      frozen         (a root, read-only)

Every disk has a state file, written before the daemons are changed, which says what should
be. After a crash at any moment, whoever calls next reads it, asks the storage daemon what
is, and goes forward to what should be. An overlay is deleted only when the state file no
longer names it, and the state file drops it only after the head has moved (or when it is
discarded by name): until then it is the only copy.

    RUN_DIR/disks/<volume hex>/       sockets, pidfiles, configuration of the exports
    STATE_DIR/overlays/<volume hex>/  overlay-<n>.qcow2, state.json
    STATE_DIR/cache/                  the host's cache, see `cache`
"""

import fcntl
import grp
import json
import logging
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import zstandard

from hosts.volumes.cache import ObjectCache
from hosts.volumes.commit import Commit, commit_overlays
from hosts.volumes.daemons import daemon_pid, end_daemon, start_daemon
from hosts.volumes.errors import (
    DaemonFailed,
    DiskBusy,
    NotAttached,
    OverlayMismatch,
    StaleEpoch,
    Uncommitted,
)
from hosts.volumes.exports import ExportConfig, FetchCounter, Fetched
from hosts.volumes.failpoints import reach
from hosts.volumes.index import Root
from hosts.volumes.objects import StoreConfig
from hosts.volumes.qcow2 import open_overlay
from hosts.volumes.qmp import Qmp, QmpRefused
from hosts.volumes.store import S3ObjectStore

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 300
"""How long to wait for another worker that has the disk; an upload may be under way."""

RECONNECT_S = 3600
"""How long the storage daemon holds reads back while its export is being restarted."""

STOP_GRACE_S = 20
"""For the storage daemon to flush and end before it is ended by force."""

EXPORT_NAME = "disk"
_NBD_EXPORT = "nbd0"
_FUSE_EXPORT = "fuse0"
_COMMIT_PATIENCE_S = 30
"""A commit that cannot read its base gives up soon: its caller has its own retries."""

Publish = Callable[[Commit], None]
"""Moves the head. It may be called again with the root that is the head already (the
process died just after), and must then succeed."""


@dataclass(frozen=True)
class DisksConfig:
    """Where disks live on this host and who runs their daemons."""

    run_dir: Path
    state_dir: Path
    store: StoreConfig
    cache_budget_bytes: int
    user: str | None = None
    """The unprivileged user of nbdkit and qemu-storage-daemon, when we are root."""
    socket_group: str | None = None
    """The group that may open a disk's socket: QEMU's."""


@dataclass(frozen=True)
class AttachedDisk:
    """A disk of this host."""

    volume_id: UUID
    epoch: int
    root_key: str
    size_bytes: int
    socket: Path
    """NBD over a UNIX socket; the export is called "disk"."""


class DiskHealth(Enum):
    """What becomes of a disk's daemons."""

    ATTACHED = "attached"
    DEAD = "dead"
    """It was attached and does not serve any more; `attach` again brings it back."""
    ABSENT = "absent"


@dataclass
class _State:
    """What should be. `overlays` are numbers, the lowest first; the last takes writes."""

    volume: str
    epoch: int
    root_key: str
    size_bytes: int
    overlays: list[int] = field(default_factory=list)
    next_overlay: int = 0
    export: int = 0
    pending_root_key: str | None = None
    pending_overlays: int = 0
    """The lowest so many overlays are in the pending root."""
    mountpoint: str | None = None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None

    def add_overlay(self) -> int:
        number = self.next_overlay
        self.overlays.append(number)
        self.next_overlay += 1
        return number

    def settle(self) -> None:
        """Take the pending root as the base: the head has moved to it."""
        assert self.pending_root_key is not None
        self.root_key = self.pending_root_key
        self.overlays = self.overlays[self.pending_overlays :]
        self.forget_pending()
        self.export += 1

    def forget_pending(self) -> None:
        self.pending_root_key = None
        self.pending_overlays = 0


class Disks:
    """The disks of this host. Safe from many threads and processes at once."""

    def __init__(self, config: DisksConfig) -> None:
        self.config = config
        self._store = S3ObjectStore(config.store)
        self._cache_dir = config.state_dir / "cache"
        for path in (config.run_dir / "disks", config.state_dir / "overlays", self._cache_dir):
            path.mkdir(parents=True, exist_ok=True)
        self.own_dir(self._cache_dir, 0o755)
        self.own_dir(self._cache_dir / "packs", 0o750)
        self._cache = ObjectCache(
            self._cache_dir,
            budget_bytes=config.cache_budget_bytes,
            reader=self._store,
            patience_s=_COMMIT_PATIENCE_S,
        )

    # -- what others call ---------------------------------------------------------------

    def attach(self, volume_id: UUID, *, root_key: str, epoch: int) -> AttachedDisk:
        """Serve a generation with an overlay for its writes. Safe to repeat.

        An overlay that is already here for this epoch is used: it is the only copy of what
        it holds. One of an earlier epoch is thrown away, since nothing can publish it.

        Raises:
            StaleEpoch: this host has the disk for a later epoch.
            OverlayMismatch: the overlay here was written over another root.
            StoreUnavailable, DaemonFailed, DiskBusy: call again.
        """
        with self._disk(volume_id) as disk:
            disk.attach(root_key, epoch)
            return disk.attached()

    def health(self, volume_id: UUID) -> DiskHealth:
        """Look whether a disk is served. Takes no lock and asks no store."""
        disk = self._unlocked(volume_id)
        if disk.state is None:
            return DiskHealth.ABSENT
        return DiskHealth.ATTACHED if disk.is_served() else DiskHealth.DEAD

    def checkpoint(self, volume_id: UUID, publish: Publish) -> Commit | None:
        """Commit what a running disk has written until now; its writer is not stopped.

        Rotate to a new overlay, upload the frozen one, publish, drop it. Whatever fails,
        the writes are kept and the next call goes on from there.

        Returns: None when nothing changed.

        Raises:
            NotAttached: there is no such disk here, or its daemons are gone.
            StoreUnavailable, DaemonFailed, DiskBusy: call again.
        """
        with self._disk(volume_id) as disk:
            return disk.checkpoint(publish)

    def commit(self, volume_id: UUID, publish: Publish) -> Commit | None:
        """Commit a disk that nobody uses any more; it is not served afterwards.

        The overlays are kept until `publish` has returned.

        Returns: None when nothing changed.

        Raises:
            NotAttached: there is no such disk here.
            StoreUnavailable, DaemonFailed, DiskBusy: call again.
        """
        with self._disk(volume_id) as disk:
            return disk.commit(publish)

    def detach(self, volume_id: UUID, *, discard: bool) -> None:
        """Stop serving a disk and forget it. Safe to repeat.

        Raises:
            Uncommitted: it has writes that no commit has, and `discard` was not said. It is
                left as it was.
        """
        with self._disk(volume_id) as disk:
            disk.detach(discard=discard)

    def attached(self) -> list[AttachedDisk]:
        """List the disks that this host has, served or not."""
        disks = []
        for entry in sorted((self.config.state_dir / "overlays").iterdir()):
            with suppress(ValueError):
                disk = self._unlocked(UUID(hex=entry.name))
                if disk.state is not None:
                    disks.append(disk.attached())
        return disks

    def fetched(self, volume_id: UUID) -> Fetched:
        """Count what the disk has fetched from object storage since it was attached."""
        return FetchCounter.read(self._unlocked(volume_id).run_dir / "fetched")

    def export_fuse(self, volume_id: UUID, mountpoint: Path) -> None:
        """Show the disk as a file, instead of over NBD, on an existing empty file.

        Raises:
            NotAttached: there is no such disk here, or its daemons are gone.
        """
        with self._disk(volume_id) as disk:
            disk.export_fuse(mountpoint)

    def drop_fuse(self, volume_id: UUID) -> None:
        """Serve the disk over NBD again. The file must not be in use. Safe to repeat."""
        with self._disk(volume_id) as disk:
            disk.drop_fuse()

    # -- locks and folders --------------------------------------------------------------

    def _unlocked(self, volume_id: UUID) -> "_Disk":
        return _Disk(self, volume_id, self._store, self._cache)

    @contextmanager
    def _disk(self, volume_id: UUID) -> Iterator["_Disk"]:
        """Hold a disk: one worker at a time, across processes."""
        path = self.config.state_dir / "overlays" / f"{volume_id.hex}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd)
            yield self._unlocked(volume_id)
        finally:
            os.close(fd)

    def own_dir(self, path: Path, mode: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        self.give(path)

    def give(self, path: Path) -> None:
        """Make a path the daemons' own."""
        if self.config.user is not None and os.geteuid() == 0:
            entry = pwd.getpwnam(self.config.user)
            os.chown(path, entry.pw_uid, entry.pw_gid)


def _lock(fd: int) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise DiskBusy("Another worker has the disk.") from error
            time.sleep(0.05)
        else:
            return


class _Disk:
    """One disk, held by its lock (except for looking)."""

    def __init__(
        self, disks: Disks, volume_id: UUID, store: S3ObjectStore, cache: ObjectCache
    ) -> None:
        self._disks = disks
        self._config = disks.config
        self._store = store
        self._cache = cache
        self.volume_id = volume_id
        self.run_dir = self._config.run_dir / "disks" / volume_id.hex
        self.overlay_dir = self._config.state_dir / "overlays" / volume_id.hex
        self.state = _State.read(self.overlay_dir / "state.json")

    # -- the state file -----------------------------------------------------------------

    def _require(self) -> _State:
        if self.state is None:
            raise NotAttached("The volume has no disk on this host.")
        return self.state

    def _save(self) -> None:
        """Write the state file so that it is the old or the new one, power loss included."""
        path = self.overlay_dir / "state.json"
        new = path.with_suffix(".new")
        with new.open("w") as file:
            json.dump(asdict(self._require()), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        directory = os.open(self.overlay_dir, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def attached(self) -> AttachedDisk:
        state = self._require()
        return AttachedDisk(
            self.volume_id, state.epoch, state.root_key, state.size_bytes, self._disk_socket
        )

    # -- paths --------------------------------------------------------------------------

    @property
    def _disk_socket(self) -> Path:
        return self.run_dir / "disk.sock"

    @property
    def _daemon_pidfile(self) -> Path:
        return self.run_dir / "daemon.pid"

    def _export_path(self, number: int, suffix: str) -> Path:
        return self.run_dir / f"export-{number}.{suffix}"

    def _overlay(self, number: int) -> Path:
        return self.overlay_dir / f"overlay-{number}.qcow2"

    # -- attach -------------------------------------------------------------------------

    def attach(self, root_key: str, epoch: int) -> None:
        self._settle_with(root_key, epoch)
        if self.state is None:
            self._record(root_key, epoch)
        state = self._require()
        self._make_run_dir()
        if not state.overlays:
            state.add_overlay()
            self._save()
        reach("attach.recorded")
        for number in state.overlays:
            self._make_overlay(number)
        self._ensure_export()
        reach("attach.exported")
        if daemon_pid(self._daemon_pidfile) is None:
            self._start_daemon()
        reach("attach.served")
        with self._qmp() as qmp:
            self._reconcile(qmp)
        self._delete_strays()

    def _settle_with(self, root_key: str, epoch: int) -> None:
        """Bring what is here into line with the head that the caller knows."""
        state = self.state
        if state is None:
            return
        if state.epoch > epoch:
            raise StaleEpoch(f"This host has the disk for epoch {state.epoch}.")
        if state.epoch < epoch:
            self._tear_down()
        elif root_key == state.pending_root_key:
            state.settle()
            self._save()
        elif root_key != state.root_key:
            if any(self._has_clusters(number) for number in state.overlays):
                raise OverlayMismatch("The overlay here was written over another root.")
            self._tear_down()

    def _record(self, root_key: str, epoch: int) -> None:
        """Begin a disk: its root is read before anything is made."""
        root = Root.decode(self._cache.whole(root_key))
        self._disks.own_dir(self.overlay_dir, 0o700)
        self.state = _State(self.volume_id.hex, epoch, root_key, root.size_bytes)
        self.state.add_overlay()
        self._save()
        (self.run_dir / "fetched").unlink(missing_ok=True)

    def _make_run_dir(self) -> None:
        # Others pass through to the disk's socket; every other one is its owner's alone.
        self._disks.own_dir(self.run_dir, 0o711)

    def _make_overlay(self, number: int) -> None:
        path = self._overlay(number)
        if path.exists():
            return
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        subprocess.run(
            [
                "qemu-img",
                "create",
                "-q",
                "-f",
                "qcow2",
                "-o",
                "cluster_size=64k,compat=1.1",
                str(new),
                str(self._require().size_bytes),
            ],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        self._disks.give(new)
        new.replace(path)

    def _has_clusters(self, number: int) -> bool:
        path = self._overlay(number)
        if not path.exists():
            return False
        with open_overlay(path) as overlay:
            return not overlay.is_empty()

    # -- the export ---------------------------------------------------------------------

    def _ensure_export(self) -> None:
        state = self._require()
        pidfile = self._export_path(state.export, "pid")
        if daemon_pid(pidfile) is not None:
            return
        root = self._export_path(state.export, "root")
        self._write(root, self._cache.whole(state.root_key))
        fetched = self.run_dir / "fetched"
        if not fetched.exists():
            self._write(fetched, b"")
        exports_log = self.run_dir / "export.log"
        self._write(exports_log, b"")
        settings = ExportConfig(
            root_key=state.root_key,
            root=str(root),
            cache=str(self._config.state_dir / "cache"),
            cache_budget_bytes=self._config.cache_budget_bytes,
            fetched=str(fetched),
            log=str(exports_log),
            store=self._config.store,
        )
        config = self._export_path(state.export, "json")
        self._write(config, settings.text().encode())
        socket = self._export_path(state.export, "sock")
        socket.unlink(missing_ok=True)
        plugin = Path(__file__).with_name("export_plugin.py")
        start_daemon(
            [
                "nbdkit",
                "--readonly",
                "-P",
                str(pidfile),
                "-U",
                str(socket),
                "-t",
                "16",
                "python",
                str(plugin),
                f"config={config}",
            ],
            user=self._config.user,
            environment=_python_environment(),
        )

    def _write(self, path: Path, body: bytes) -> None:
        """Write a file that only the daemons' user may read."""
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(body)
        self._disks.give(path)

    # -- the storage daemon -------------------------------------------------------------

    def _start_daemon(self) -> None:
        """Start it on the whole chain.

        Nodes come first on its command line: the lock of an overlay in use then ends a
        second daemon before it takes the sockets of the first.
        """
        state = self._require()
        nodes = [self._base_options(state.export)]
        below = _base_node(state.export)
        for number in state.overlays:
            nodes += [self._file_options(number), self._overlay_options(number, below)]
            below = _overlay_node(number)
        command = ["qemu-storage-daemon", "--daemonize", "--pidfile", str(self._daemon_pidfile)]
        for node in nodes:
            command += ["--blockdev", json.dumps(node)]
        command += [
            "--chardev", f"socket,path={self.run_dir / 'qmp.sock'},server=on,wait=off,id=qmp",
            "--monitor", "chardev=qmp",
            "--nbd-server", f"addr.type=unix,addr.path={self._disk_socket}",
            "--export", json.dumps(_nbd_export(below)),
        ]  # fmt: skip
        self._unmount()
        start_daemon(command, user=self._config.user, environment=_plain_environment())
        self._open_socket()

    def _open_socket(self) -> None:
        group = self._config.socket_group
        if group is not None:
            os.chown(self._disk_socket, -1, grp.getgrnam(group).gr_gid)
        self._disk_socket.chmod(0o660)

    def _base_options(self, export: int) -> dict[str, Any]:
        return {
            "driver": "nbd",
            "node-name": _base_node(export),
            "server": {"type": "unix", "path": str(self._export_path(export, "sock"))},
            "read-only": True,
            "reconnect-delay": RECONNECT_S,
        }

    def _file_options(self, number: int) -> dict[str, Any]:
        path = self._overlay(number)
        direct = _takes_direct_io(path)
        return {
            "driver": "file",
            "node-name": _file_node(number),
            "filename": str(path),
            "cache": {"direct": direct},
            "aio": "native" if direct else "threads",
            "discard": "unmap",
        }

    def _overlay_options(self, number: int, backing: str | None) -> dict[str, Any]:
        return {
            "driver": "qcow2",
            "node-name": _overlay_node(number),
            "file": _file_node(number),
            "backing": backing,
            "discard": "unmap",
        }

    def _qmp(self) -> Qmp:
        if daemon_pid(self._daemon_pidfile) is None:
            raise NotAttached("The disk's storage daemon does not run: attach it.")
        return Qmp(self.run_dir / "qmp.sock")

    def is_served(self) -> bool:
        state = self._require()
        return (
            daemon_pid(self._daemon_pidfile) is not None
            and daemon_pid(self._export_path(state.export, "pid")) is not None
        )

    # -- what is → what should be ---------------------------------------------------------

    def _reconcile(self, qmp: Qmp) -> None:
        """Bring a running storage daemon to what the state file says.

        It may have been left between any two steps of a rotation or a drop.
        """
        state = self._require()
        self._ensure_export()
        reach("drop.exported")
        nodes = _node_names(qmp)
        if _base_node(state.export) not in nodes:
            qmp.execute("blockdev-add", **self._base_options(state.export))
        active = state.overlays[-1]
        if _overlay_node(active) not in nodes:
            self._add_overlay_node(qmp, active, nodes)
        reach("rotate.added")
        exported = _exported_node(qmp)
        if exported is None:
            qmp.execute("block-export-add", **_nbd_export(_overlay_node(active)))
        elif exported != _overlay_node(active):
            qmp.execute("blockdev-snapshot", node=exported, overlay=_overlay_node(active))
        reach("rotate.done")
        lowest = self._overlay_options(state.overlays[0], _base_node(state.export))
        qmp.execute("blockdev-reopen", options=[lowest])
        reach("drop.reopened")
        self._delete_nodes(qmp)

    def _add_overlay_node(self, qmp: Qmp, number: int, nodes: set[str]) -> None:
        self._make_overlay(number)
        if _file_node(number) not in nodes:
            qmp.execute("blockdev-add", **self._file_options(number))
        qmp.execute("blockdev-add", **self._overlay_options(number, None))

    def _delete_nodes(self, qmp: Qmp) -> None:
        """Delete nodes that the state file does not name, users before what they use."""
        state = self._require()
        wanted = {_base_node(state.export)}
        for number in state.overlays:
            wanted |= {_overlay_node(number), _file_node(number)}
        extra = [name for name in _node_names(qmp) - wanted if name.startswith(_OUR_NODES)]
        # Overlays newest first, then files, then exports: nothing is deleted while in use.
        extra.sort(key=lambda name: (_OUR_NODES.index(_kind(name)), -_number(name)))
        for name in extra:
            qmp.execute("blockdev-del", node_name=name)

    def _delete_strays(self) -> None:
        """Delete overlays and end exports that the state file does not name."""
        state = self._require()
        kept = {self._overlay(number) for number in state.overlays}
        for path in self.overlay_dir.glob("overlay-*"):
            if path not in kept:
                path.unlink()
        current = f"export-{state.export}"
        for pidfile in self.run_dir.glob("export-*.pid"):
            if pidfile.stem != current:
                end_daemon(pidfile, grace_s=0)
        for path in self.run_dir.glob("export-*"):
            if path.stem != current:
                path.unlink(missing_ok=True)

    # -- committing -----------------------------------------------------------------------

    def checkpoint(self, publish: Publish) -> Commit | None:
        state = self._require()
        with self._qmp() as qmp:
            self._reconcile(qmp)
            self._delete_strays()
            if len(state.overlays) == 1:
                if not self._has_written(qmp):
                    return None
                self._rotate(qmp)
            commit = self._write_out(len(state.overlays) - 1, publish)
            reach("drop.recorded")
            self._reconcile(qmp)
            self._delete_strays()
            reach("drop.done")
            return commit

    def _has_written(self, qmp: Qmp) -> bool:
        """Tell whether the active overlay can hold anything at all.

        Asked of the daemon: what it has not flushed is in no table on disk yet.
        """
        node = _overlay_node(self._require().overlays[-1])
        for stats in qmp.execute("query-blockstats", query_nodes=True):
            if stats.get("node-name") == node and stats["stats"]["wr_highest_offset"]:
                return True
        # Discards leave no trace there, but in the tables once they are flushed.
        return self._has_clusters(self._require().overlays[-1])

    def _rotate(self, qmp: Qmp) -> None:
        self._require().add_overlay()
        self._save()
        reach("rotate.recorded")
        self._reconcile(qmp)

    def _write_out(self, count: int, publish: Publish) -> Commit | None:
        """Upload the lowest `count` overlays, publish, and drop them from the state file."""
        state = self._require()
        commit = commit_overlays(
            [self._overlay(number) for number in state.overlays[:count]],
            base_root_key=state.root_key,
            volume_id=self.volume_id,
            epoch=state.epoch,
            store=self._store,
            cache=self._cache,
        )
        if commit is None:
            state.overlays = state.overlays[count:]
            state.forget_pending()
        else:
            state.pending_root_key, state.pending_overlays = commit.root_key, count
            self._save()
            reach("publish.before")
            publish(commit)
            reach("publish.after")
            state.settle()
        self._save()
        return commit

    def commit(self, publish: Publish) -> Commit | None:
        state = self._require()
        self._stop()
        reach("commit.stopped")
        if not state.overlays:
            return None
        commit = self._write_out(len(state.overlays), publish)
        reach("commit.settled")
        self._delete_strays()
        return commit

    # -- ending -----------------------------------------------------------------------------

    def detach(self, *, discard: bool) -> None:
        state = self.state
        if state is not None and not discard and self._is_uncommitted():
            raise Uncommitted("The disk has writes that no commit has.")
        self._tear_down()

    def _is_uncommitted(self) -> bool:
        state = self._require()
        if daemon_pid(self._daemon_pidfile) is not None and state.overlays:
            with self._qmp() as qmp:
                if self._has_written(qmp):
                    return True
        return any(self._has_clusters(number) for number in state.overlays)

    def _tear_down(self) -> None:
        """End everything, and delete the overlays."""
        self._stop()
        reach("detach.stopped")
        shutil.rmtree(self.run_dir, ignore_errors=True)
        # The state file goes first: without it, what is left is nobody's.
        (self.overlay_dir / "state.json").unlink(missing_ok=True)
        shutil.rmtree(self.overlay_dir, ignore_errors=True)
        self.state = None

    def _stop(self) -> None:
        """End the storage daemon, which flushes, and then the exports it reads from."""
        end_daemon(self._daemon_pidfile, grace_s=STOP_GRACE_S)
        self._unmount()
        for pidfile in self.run_dir.glob("export-*.pid"):
            end_daemon(pidfile, grace_s=0)
        for socket in self.run_dir.glob("*.sock"):
            socket.unlink(missing_ok=True)

    # -- FUSE -------------------------------------------------------------------------------

    def export_fuse(self, mountpoint: Path) -> None:
        state = self._require()
        with self._qmp() as qmp:
            self._reconcile(qmp)
            exports = _exports(qmp)
            if _FUSE_EXPORT in exports and state.mountpoint == str(mountpoint):
                return
            self._delete_export(qmp, _FUSE_EXPORT)
            self._unmount()
            state.mountpoint = str(mountpoint)
            self._save()
            self._delete_export(qmp, _NBD_EXPORT)
            try:
                qmp.execute(
                    "block-export-add",
                    type="fuse",
                    id=_FUSE_EXPORT,
                    node_name=_overlay_node(state.overlays[-1]),
                    mountpoint=str(mountpoint),
                    writable=True,
                    growable=False,
                )
            except QmpRefused:
                self._reconcile(qmp)  # the NBD export comes back
                raise

    def drop_fuse(self) -> None:
        state = self._require()
        with self._qmp() as qmp:
            self._delete_export(qmp, _FUSE_EXPORT)
            self._reconcile(qmp)
        self._unmount()
        if state.mountpoint is not None:
            state.mountpoint = None
            self._save()

    def _delete_export(self, qmp: Qmp, name: str) -> None:
        """Delete an export and wait until it has let go of its node."""
        if name not in _exports(qmp):
            return
        qmp.execute("block-export-del", id=name, mode="hard")
        deadline = time.monotonic() + STOP_GRACE_S
        while name in _exports(qmp):
            if time.monotonic() > deadline:
                raise DaemonFailed(f"The export {name} is not let go.")
            time.sleep(0.01)

    def _unmount(self) -> None:
        """Undo a FUSE mount that a daemon's death left behind."""
        mountpoint = self.state.mountpoint if self.state is not None else None
        if mountpoint is not None and mountpoint in _mountpoints():
            subprocess.run(["fusermount3", "-u", "-z", mountpoint], check=False)


_OUR_NODES = ("overlay-", "file-", "base-")


def _overlay_node(number: int) -> str:
    return f"overlay-{number}"


def _file_node(number: int) -> str:
    return f"file-{number}"


def _base_node(export: int) -> str:
    return f"base-{export}"


def _kind(node: str) -> str:
    return node.partition("-")[0] + "-"


def _number(node: str) -> int:
    return int(node.partition("-")[2])


def _node_names(qmp: Qmp) -> set[str]:
    nodes = qmp.execute("query-named-block-nodes", flat=True)
    return {node["node-name"] for node in nodes}


def _exports(qmp: Qmp) -> dict[str, str]:
    """Map each export to its node."""
    return {item["id"]: item["node-name"] for item in qmp.execute("query-block-exports")}


def _exported_node(qmp: Qmp) -> str | None:
    exports = _exports(qmp)
    return exports.get(_FUSE_EXPORT) or exports.get(_NBD_EXPORT)


def _nbd_export(node: str) -> dict[str, Any]:
    return {
        "type": "nbd",
        "id": _NBD_EXPORT,
        "node-name": node,
        "name": EXPORT_NAME,
        "writable": True,
    }


def _takes_direct_io(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:  # EINVAL: tmpfs and others cannot
        return False
    return True


def _plain_environment() -> dict[str, str]:
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def _python_environment() -> dict[str, str]:
    """Lead nbdkit's own Python to our packages and the virtual environment's."""
    here = Path(__file__).resolve()
    root = here.parents[2]
    places = (root, root / "platform", Path(zstandard.__file__).resolve().parents[1])
    return _plain_environment() | {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _mountpoints() -> set[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return {line.split(" ")[1] for line in lines}


__all__ = [
    "EXPORT_NAME",
    "AttachedDisk",
    "DiskHealth",
    "Disks",
    "DisksConfig",
    "Publish",
    "QmpRefused",
]
