"""One attached disk: the steps of attach, checkpoint, commit and detach."""

import grp
import os
import pwd
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from hosts.volumes.cache import ObjectCache
from hosts.volumes.commit import Commit, commit_overlays, open_root
from hosts.volumes.disk_state import DiskState
from hosts.volumes.errors import NotAttached, OverlayMismatch, StaleEpoch, Uncommitted
from hosts.volumes.export_daemon import ExportDaemon
from hosts.volumes.failpoints import reach
from hosts.volumes.index import Root
from hosts.volumes.keys import Keyring, KeySource, PlainKeys
from hosts.volumes.naming import parse_key
from hosts.volumes.objects import ObjectStore, StoreConfig
from hosts.volumes.qcow2 import open_overlay
from hosts.volumes.qmp import Qmp, QmpRefused
from hosts.volumes.storage_daemon import StorageDaemon

MAX_CHAIN = 8
"""Overlays at most: while uploads fail, a checkpoint adds no more of them."""

Publish = Callable[[Commit], None]
"""Moves the head. It may be called again with the root that is the head already (the
process died just after), and must then succeed."""

AroundCut = Callable[[], AbstractContextManager[None]]
"""Holds the disk's writer still for as long as a cut takes."""


@dataclass(frozen=True)
class DisksConfig:
    """Where disks live on this host and who runs their daemons."""

    run_dir: Path
    state_dir: Path
    store: StoreConfig
    cache_budget_bytes: int
    user: str | None = None
    """The unprivileged user of nbdkit and qemu-storage-daemon, when we are root."""
    keys: KeySource = field(default_factory=PlainKeys)
    """Knows what the volumes' objects are encrypted with."""
    socket_group: str | None = None
    """The group that may open a disk's socket: QEMU's."""

    @property
    def cache_dir(self) -> Path:
        return self.state_dir / "cache"

    def own_dir(self, path: Path, mode: int) -> None:
        """Make a folder that is the daemons' own. Its parent must not be."""
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        self.give(path)

    def give(self, path: Path) -> None:
        """Make a path the daemons' own."""
        if self.user is not None and os.geteuid() == 0:
            entry = pwd.getpwnam(self.user)
            os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)


@dataclass(frozen=True)
class AttachedDisk:
    """A disk of this host."""

    volume_id: UUID
    epoch: int
    root_key: str
    size_bytes: int
    socket: Path
    """NBD over a UNIX socket; the export is called "disk"."""


class Disk:
    """One disk. Whoever changes it holds its lock (see `Disks`)."""

    def __init__(
        self, config: DisksConfig, volume_id: UUID, store: ObjectStore, cache: ObjectCache
    ) -> None:
        self._config = config
        self._store = store
        self._cache = cache
        self.volume_id = volume_id
        self._run_dir = config.run_dir / "disks" / volume_id.hex
        self._overlay_dir = config.state_dir / "overlays" / volume_id.hex
        self._state_file = self._overlay_dir / "state.json"
        self.state = DiskState.read(self._state_file)
        self.daemon = StorageDaemon(self._run_dir, self._overlay_dir, user=config.user)
        self.export = ExportDaemon(
            self._run_dir,
            config.cache_dir,
            cache_budget_bytes=config.cache_budget_bytes,
            user=config.user,
        )

    def _require(self) -> DiskState:
        if self.state is None:
            raise NotAttached("The volume has no disk on this host.")
        return self.state

    def _save(self) -> None:
        self._require().write(self._state_file)

    def attached(self) -> AttachedDisk:
        state = self._require()
        return AttachedDisk(
            self.volume_id, state.epoch, state.root_key, state.size_bytes, self.daemon.socket
        )

    def is_served(self) -> bool:
        return self.daemon.is_running() and self.export.is_running()

    # -- attach -------------------------------------------------------------------------

    def attach(self, root_key: str, epoch: int) -> None:
        self._settle_with(root_key, epoch)
        if self.state is None:
            self._record(root_key, epoch)
        state = self._require()
        # Others pass through to the disk's socket; the rest is the daemons' alone.
        self._config.own_dir(self._run_dir, 0o711)
        if not state.overlays:
            state.add_overlay()
            self._save()
        reach("attach.recorded")
        for number in state.overlays:
            self._make_overlay(number)
        self._ensure_export()
        reach("attach.exported")
        if not self.daemon.is_running():
            self._start_daemon(state)
        reach("attach.served")
        with self.daemon.connect() as qmp:
            self._reconcile(qmp)

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
            if self._is_uncommitted():
                raise OverlayMismatch("The overlay here was written over another root.")
            self._tear_down()

    def _record(self, root_key: str, epoch: int) -> None:
        """Begin a disk: its root is read before anything is made."""
        root = self._open_root(root_key, Keyring(self._config.keys))
        # Not the daemons' own: they open what we made, and cannot put anything there.
        self._overlay_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._overlay_dir.chmod(0o711)
        self.state = DiskState(self.volume_id.hex, epoch, root_key, root.size_bytes)
        self.state.add_overlay()
        self._save()
        self.export.fetched.unlink(missing_ok=True)

    def _make_overlay(self, number: int) -> None:
        path = self.daemon.overlay_path(number)
        if path.exists():
            return
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        command = ["qemu-img", "create", "-q", "-f", "qcow2"]
        command += ["-o", "cluster_size=64k,compat=1.1"]
        command += [str(new), str(self._require().size_bytes)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        new.chmod(0o600)
        self._config.give(new)
        new.replace(path)

    def _ensure_export(self) -> None:
        self.export.offer(self._require().root_key, self._cache)
        self.export.ensure(self._config.store, self._export_keys)

    def _export_keys(self) -> Keyring:
        """Give the keys that an export of the disk's generations will ever need."""
        keyring = Keyring(self._config.keys)
        self._open_root(self._require().root_key, keyring)
        keyring.learn([self.volume_id.bytes])
        return keyring

    def _open_root(self, root_key: str, keyring: Keyring) -> Root:
        return open_root(self._cache.whole(root_key), parse_key(root_key)[1], keyring)

    def _start_daemon(self, state: DiskState) -> None:
        self._unmount()
        group = self._config.socket_group
        self.daemon.start(
            state,
            export_socket=self.export.socket,
            socket_gid=None if group is None else grp.getgrnam(group).gr_gid,
        )

    def _reconcile(self, qmp: Qmp) -> None:
        """Go forward to what the state file says, then delete what it does not name."""
        state = self._require()
        self._ensure_export()
        self._make_overlay(state.active)
        self.daemon.reconcile(qmp, state, self.export.socket)
        self._delete_strays()
        self.export.withdraw_others(state.root_key)

    def _delete_strays(self) -> None:
        kept = {self.daemon.overlay_path(number) for number in self._require().overlays}
        for path in self._overlay_dir.glob("overlay-*"):
            if path not in kept:
                path.unlink()

    # -- committing -----------------------------------------------------------------------

    def checkpoint(self, publish: Publish, around_cut: AroundCut) -> Commit | None:
        state = self._require()
        commit: Commit | None = None
        with self.daemon.connect() as qmp:
            self._reconcile(qmp)
            while True:
                can_cut = len(state.overlays) < MAX_CHAIN
                if can_cut:
                    with around_cut():
                        self._cut(qmp)
                if len(state.overlays) == 1:
                    return commit
                commit = self._write_out(len(state.overlays) - 1, publish) or commit
                reach("drop.recorded")
                self._reconcile(qmp)
                reach("drop.done")
                if can_cut:
                    return commit

    def _cut(self, qmp: Qmp) -> None:
        """Freeze what was written until now under a new overlay, if there is anything."""
        if self._has_written(qmp):
            self._rotate(qmp)

    def _has_written(self, qmp: Qmp) -> bool:
        """Tell whether the active overlay can hold anything at all."""
        state = self._require()
        if self.daemon.has_written(qmp, state):
            return True
        # A discard may be in the daemon's memory alone.
        self.daemon.flush(qmp, state)
        return self._has_clusters(state.active)

    def _has_clusters(self, number: int) -> bool:
        path = self.daemon.overlay_path(number)
        if not path.exists():
            return False
        with open_overlay(path) as overlay:
            return not overlay.is_empty()

    def _rotate(self, qmp: Qmp) -> None:
        self._require().add_overlay()
        self._save()
        reach("rotate.recorded")
        self._reconcile(qmp)

    def _write_out(self, count: int, publish: Publish) -> Commit | None:
        """Upload the lowest `count` overlays, publish, and drop them from the state file."""
        state = self._require()
        commit = commit_overlays(
            [self.daemon.overlay_path(number) for number in state.overlays[:count]],
            base_root_key=state.root_key,
            volume_id=self.volume_id,
            epoch=state.epoch,
            store=self._store,
            cache=self._cache,
            keyring=Keyring(self._config.keys),
        )
        if commit is None:
            state.drop_lowest(count)
        else:
            state.announce(commit.root_key, count)
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
        if self.state is not None and not discard and self._is_uncommitted():
            raise Uncommitted("The disk has writes that no commit has.")
        self._tear_down()

    def _is_uncommitted(self) -> bool:
        state = self._require()
        if state.overlays and self.daemon.is_running():
            with self.daemon.connect() as qmp:
                if self._has_written(qmp):
                    return True
        return any(self._has_clusters(number) for number in state.overlays)

    def _tear_down(self) -> None:
        """End everything, and delete the overlays."""
        self._stop()
        reach("detach.stopped")
        shutil.rmtree(self._run_dir, ignore_errors=True)
        # The state file goes first: without it, what is left is nobody's.
        self._state_file.unlink(missing_ok=True)
        shutil.rmtree(self._overlay_dir, ignore_errors=True)
        self.state = None

    def _stop(self) -> None:
        """End the storage daemon, which flushes, and then the export that it reads from."""
        self.daemon.stop()
        self._unmount()
        self.export.stop()
        for socket in self._run_dir.glob("*.sock"):
            socket.unlink(missing_ok=True)

    # -- FUSE -------------------------------------------------------------------------------

    def export_fuse(self, mountpoint: Path) -> None:
        state = self._require()
        with self.daemon.connect() as qmp:
            self._reconcile(qmp)
            if self.daemon.shows_file(qmp) and state.mountpoint == str(mountpoint):
                return
            self._unmount()
            state.mountpoint = str(mountpoint)
            self._save()
            try:
                self.daemon.show_file(qmp, state, mountpoint)
            except QmpRefused:
                self._reconcile(qmp)  # so that it is served over NBD again
                raise

    def drop_fuse(self) -> None:
        state = self._require()
        with self.daemon.connect() as qmp:
            self.daemon.hide_file(qmp)
            self._reconcile(qmp)
        self._unmount()
        if state.mountpoint is not None:
            state.mountpoint = None
            self._save()

    def _unmount(self) -> None:
        """Undo a FUSE mount that a daemon's death left behind."""
        mountpoint = self.state.mountpoint if self.state is not None else None
        if mountpoint is not None and mountpoint in _mountpoints():
            subprocess.run(["fusermount3", "-u", "-z", mountpoint], check=False)


def _mountpoints() -> set[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return {line.split(" ")[1] for line in lines}
