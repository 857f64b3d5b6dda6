"""The attached disks of this host: a generation, the writes over it, and who serves them.

    guest ─ disk.sock ─ qemu-storage-daemon ─ overlay-2 → overlay-1 ─ export.sock ─ nbdkit
                           (qcow2, local)     active      frozen       (roots, read-only)

Every disk has a state file, written before the daemons are changed, which says what should
be. After a crash at any moment, whoever calls next reads it, asks the storage daemon what
is, and goes forward to what should be. An overlay is deleted only when the state file no
longer names it, and the state file drops it only after the head has moved (or when it is
discarded by name): until then it is the only copy.

    RUN_DIR/disks/<volume hex>/       sockets, pidfiles, what the export needs; the daemons' own
    STATE_DIR/overlays/<volume hex>/  overlay-<n>.qcow2, state.json
    STATE_DIR/cache/                  the host's cache, see `cache`
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum
from pathlib import Path
from uuid import UUID

from hosts.volumes.cache import ObjectCache
from hosts.volumes.commit import Commit
from hosts.volumes.disk import AroundCut, AttachedDisk, Disk, DisksConfig, Publish
from hosts.volumes.errors import DiskBusy
from hosts.volumes.exports import FetchCounter, Fetched
from hosts.volumes.storage_daemon import EXPORT_NAME
from hosts.volumes.store import S3ObjectStore

__all__ = [
    "EXPORT_NAME",
    "AroundCut",
    "AttachedDisk",
    "DiskHealth",
    "Disks",
    "DisksConfig",
    "Publish",
]

LOCK_TIMEOUT_S = 300
"""How long to wait for another worker that has the disk; an upload may be under way."""

_PATIENCE_S = 0
"""A commit that cannot read its base gives up: the S3 client has tried several times by
then, and the caller has its own retries."""


class DiskHealth(Enum):
    """What becomes of a disk's daemons."""

    ATTACHED = "attached"
    DEAD = "dead"
    """It was attached and is not served any more; `attach` again brings it back."""
    ABSENT = "absent"


class Disks:
    """The disks of this host. Safe from many threads and processes at once."""

    def __init__(self, config: DisksConfig) -> None:
        self.config = config
        self._store = S3ObjectStore(config.store)
        for path in (config.run_dir / "disks", config.state_dir / "overlays"):
            path.mkdir(parents=True, exist_ok=True)
        config.own_dir(config.cache_dir, 0o711)
        config.own_dir(config.cache_dir / "packs", 0o700)
        self._cache = ObjectCache(
            config.cache_dir,
            budget_bytes=config.cache_budget_bytes,
            reader=self._store,
            patience_s=_PATIENCE_S,
        )

    def attach(self, volume_id: UUID, *, root_key: str, epoch: int) -> AttachedDisk:
        """Serve a generation with an overlay for its writes. Safe to repeat.

        An overlay that is already here for this epoch is used: it is the only copy of what
        it holds. One of an earlier epoch is thrown away, since nothing can publish it.

        Raises:
            StaleEpoch: this host has the disk for a later epoch.
            OverlayMismatch: the overlay here was written over another root.
            StoreUnavailable, DaemonFailed, DiskBusy: call again.
        """
        with self._held(volume_id) as disk:
            disk.attach(root_key, epoch)
            return disk.attached()

    def health(self, volume_id: UUID) -> DiskHealth:
        """Look whether a disk is served. Takes no lock and asks no store."""
        disk = self._disk(volume_id)
        if disk.state is None:
            return DiskHealth.ABSENT
        return DiskHealth.ATTACHED if disk.is_served() else DiskHealth.DEAD

    def checkpoint(
        self, volume_id: UUID, publish: Publish, *, around_cut: AroundCut = nullcontext
    ) -> Commit | None:
        """Commit what a running disk has written until now; its writer is not stopped.

        Rotate to a new overlay, upload the frozen one, publish, drop it. Whatever fails,
        the writes are kept and the next call goes on from there. (When earlier ones have
        left too many overlays behind, `publish` is called twice, for them first.)

        Args:
            around_cut: entered before it is looked whether anything was written, and left
                as soon as writes go to the new overlay, before anything is uploaded. What
                the writer did until it was held still is in the commit.

        Returns: the last commit, None when nothing changed.

        Raises:
            NotAttached: there is no such disk here, or its storage daemon is gone.
            StoreUnavailable, DaemonFailed, DiskBusy: call again.
        """
        with self._held(volume_id) as disk:
            return disk.checkpoint(publish, around_cut)

    def commit(self, volume_id: UUID, publish: Publish) -> Commit | None:
        """Commit a disk that nobody uses any more; it is not served afterwards.

        The overlays are kept until `publish` has returned.

        Returns: None when nothing changed.

        Raises:
            NotAttached: there is no such disk here.
            StoreUnavailable, DaemonFailed, DiskBusy: call again.
        """
        with self._held(volume_id) as disk:
            return disk.commit(publish)

    def detach(self, volume_id: UUID, *, discard: bool) -> None:
        """Stop serving a disk and forget it. Safe to repeat.

        Raises:
            Uncommitted: it has writes that no commit has, and `discard` was not said. It is
                left as it was.
        """
        with self._held(volume_id) as disk:
            disk.detach(discard=discard)

    def attached(self) -> list[AttachedDisk]:
        """List the disks that this host has, served or not."""
        disks = []
        for entry in sorted((self.config.state_dir / "overlays").iterdir()):
            with suppress(ValueError):  # a lock file
                disk = self._disk(UUID(hex=entry.name))
                if disk.state is not None:
                    disks.append(disk.attached())
        return disks

    def fetched(self, volume_id: UUID) -> Fetched:
        """Count what the disk has fetched from object storage since it was attached."""
        return FetchCounter.read(self._disk(volume_id).export.fetched)

    def export_fuse(self, volume_id: UUID, mountpoint: Path) -> None:
        """Show the disk as a file, instead of over NBD, on an existing empty file.

        The daemons' user must own that file. For others to see it (root included), the
        host's /etc/fuse.conf has `user_allow_other`.

        Raises:
            NotAttached: there is no such disk here, or its storage daemon is gone.
        """
        with self._held(volume_id) as disk:
            disk.export_fuse(mountpoint)

    def drop_fuse(self, volume_id: UUID) -> None:
        """Serve the disk over NBD again. The file must not be in use. Safe to repeat."""
        with self._held(volume_id) as disk:
            disk.drop_fuse()

    def _disk(self, volume_id: UUID) -> Disk:
        return Disk(self.config, volume_id, self._store, self._cache)

    @contextmanager
    def _held(self, volume_id: UUID) -> Iterator[Disk]:
        """Hold a disk: one worker at a time, across threads and processes."""
        path: Path = self.config.state_dir / "overlays" / f"{volume_id.hex}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd)
            yield self._disk(volume_id)
        finally:
            os.close(fd)


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
