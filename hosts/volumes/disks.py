"""The attached disks of this host: a generation, the writes over it, and who serves them.

    guest ─ disk.sock ─ storage daemon ─ overlay-2 → overlay-1 → layer ─ export.sock ─ nbdkit
                        (qcow2, local)   active      frozen      cache   (roots, read-only)

Every disk has a state file, written before the daemons are changed, which says what should
be. After a crash at any moment, whoever calls next reads it, asks the storage daemon what
is, and goes forward to what should be. An overlay is deleted only when the state file no
longer names it, and the state file drops it only after the head has moved (or when it is
discarded by name): until then it is the only copy.

A disk has four locks. The one of its state is held for moments, whoever changes anything:
so a cut never waits for an upload. The one of its uploads is held while frozen overlays are
stored, published and dropped. The one of its cuts is held by who wants a cut of a moment of
its own (a snapshot): until that is published, no other cut is made that could be published
in its place. The one of its export is held while that is started or ended, and no longer: a
change of the storage daemon's nodes waits for reads that wait for the export, so whoever
holds the state at that moment must not be in the way of who starts it again (`mend`). They
are taken in the order cuts, uploads, state, export.

    RUN_DIR/disks/<volume hex>/       sockets, pidfiles, what the export needs; the daemons' own
    RUN_DIR/spares/                   what waits for the next disk, see `spares`
    STATE_DIR/overlays/<volume hex>/  overlay-<n>.qcow2, layer-<n>.qcow2, state.json
    STATE_DIR/cache/                  the host's cache, see `cache`
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from uuid import UUID

from hosts.volumes.ahead import FEW, PACKS_LEFT, Ahead, Stage
from hosts.volumes.cache import ObjectCache
from hosts.volumes.commit import Commit
from hosts.volumes.disk import (
    EASE_S,
    WAITS_LONG_S,
    AroundCut,
    AttachedDisk,
    Disk,
    DisksConfig,
    Frozen,
    Publish,
    Storing,
)
from hosts.volumes.errors import DaemonFailed, DiskBusy, HeadMoved, NotAttached
from hosts.volumes.exports import Fetched
from hosts.volumes.failpoints import reach
from hosts.volumes.locks import LOCK_TIMEOUT_S, forget, locked
from hosts.volumes.naming import ObjectName
from hosts.volumes.pacing import Limits
from hosts.volumes.spares import DAEMONS, Spares
from hosts.volumes.storage_daemon import EXPORT_NAME
from hosts.volumes.store import S3ObjectStore
from hosts.volumes.uploads import Gate

log = logging.getLogger(__name__)

__all__ = [
    "EXPORT_NAME",
    "WAITS_LONG_S",
    "AroundCut",
    "AttachedDisk",
    "Cut",
    "DiskHealth",
    "Disks",
    "DisksConfig",
    "LogLook",
    "Publish",
]

SHORT_S = 1.0
"""How long one who looks after all disks waits for one of them."""

_STATE, _UPLOADS, _CUTS = "lock", "uploads.lock", "cuts.lock"

_PATIENCE_S = 0
"""A commit that cannot read its base gives up: the S3 client has tried several times by
then, and the caller has its own retries."""


class _WentOn(DiskBusy):
    """The disk has found that it lies on another root, for which nothing was prepared."""


class DiskHealth(Enum):
    """What becomes of a disk's daemons."""

    ATTACHED = "attached"
    DEAD = "dead"
    """It was attached and is not served any more; `attach` again brings it back."""
    ABSENT = "absent"


@dataclass(frozen=True)
class Cut:
    """A committed moment of a running disk."""

    root_key: str
    commit: Commit | None
    """None when nothing was written since the last one."""


@dataclass(frozen=True)
class LogLook:
    """What the files of an attached disk say about its log."""

    volume_id: UUID
    root_key: str
    is_served: bool
    """Over NBD, to a guest."""
    log_bytes: int
    written_at_ns: int
    """When an overlay was last changed; 0 when there is nothing to store."""
    frozen: int
    """Overlays that wait to be stored or are being stored."""
    layer_is_large: bool
    lacks_export: bool = False
    """Its storage daemon runs and what that reads from does not; see `Disks.mend`."""
    reads_wait_s: float = 0.0
    """For how long reads have been waiting for the store without any answer."""
    eased_until_ns: int = 0
    """Until when writes are to pass; see `Disks.ease`. It changes when they did."""


class Disks:
    """The disks of this host. Safe from many threads and processes at once."""

    def __init__(self, config: DisksConfig) -> None:
        self.config = config
        self._store = S3ObjectStore(config.store)
        for path in (config.run_dir / "disks", config.state_dir / "overlays"):
            path.mkdir(parents=True, exist_ok=True)
        config.own_dir(config.cache_dir, 0o711)
        config.own_dir(config.cache_dir / "packs", 0o700)
        self._spares = Spares(config.run_dir, user=config.user, own_dir=config.own_dir)
        self._spare_daemons = Spares(
            config.run_dir, user=config.user, own_dir=config.own_dir, kind=DAEMONS
        )
        self._cache = ObjectCache(
            config.cache_dir,
            budget_bytes=config.cache_budget_bytes,
            reader=self._store,
            patience_s=_PATIENCE_S,
        )

    def warm(self) -> None:
        """See to it that the next `attach` is a fast one; does not wait for that."""
        self._spares.warm()
        self._spare_daemons.warm()

    def cool(self) -> None:
        """End what `warm` has started. Disks stay as they are."""
        self._spares.cool()
        self._spare_daemons.cool()

    def attach(
        self,
        volume_id: UUID,
        *,
        root_key: str,
        epoch: int,
        start_blocks: bytes | None = None,
        shown_at: Path | None = None,
    ) -> AttachedDisk:
        """Serve a generation with an overlay for its writes. Safe to repeat.

        An overlay that is already here for this epoch is used: it is the only copy of what
        it holds. One of an earlier epoch is thrown away, since nothing can publish it.

        Args:
            start_blocks: what `start_blocks` gave at an earlier start: it is fetched ahead in
                the background.
            shown_at: as `export_fuse` has it, which is done along with it, in less time.

        Raises:
            StaleEpoch: this host has the disk for a later epoch.
            OverlayMismatch: the overlay here was written over another root.
            StoreUnavailable, DaemonFailed, DiskBusy: call again.
        """
        with self._held(volume_id) as disk:
            if disk.goes_on_with(root_key, epoch):
                disk.attach(root_key, epoch, start_blocks, shown_at)
                return disk.attached()
        # What is here may have to go: nobody may be storing it.
        with self._alone(volume_id) as disk:
            disk.attach(root_key, epoch, start_blocks, shown_at)
            return disk.attached()

    def health(self, volume_id: UUID) -> DiskHealth:
        """Look whether a disk is served. Takes no lock and asks no store."""
        disk = self._disk(volume_id)
        if disk.state is None:
            return DiskHealth.ABSENT
        return DiskHealth.ATTACHED if disk.is_served() else DiskHealth.DEAD

    def mend(self, volume_id: UUID) -> bool:
        """Start the export again of a disk whose storage daemon lives; tell whether it does.

        The storage daemon held the guest's reads back meanwhile, so the guest has felt
        nothing but the wait. It waits for nobody who works on the disk: they may be waiting
        for the export themselves.

        Raises:
            StoreUnavailable, DaemonFailed: call again.
            DiskBusy: somebody else is about to start it.
        """
        return self._disk(volume_id).mend(timeout_s=SHORT_S)

    def checkpoint(
        self,
        volume_id: UUID,
        publish: Publish,
        *,
        around_cut: AroundCut = nullcontext,
        background: bool = False,
        rewrite: frozenset[ObjectName] = frozenset(),
    ) -> Commit | None:
        """Commit what a running disk has written until now; its writer is not stopped.

        Rotate to a new overlay, upload the frozen one, publish, drop it. Whatever fails,
        the writes are kept and the next call goes on from there. (When earlier ones have
        left too many overlays behind, `publish` is called twice, for them first.)

        Args:
            around_cut: entered before it is looked whether anything was written, and left
                as soon as writes go to the new overlay, before anything is uploaded. What
                the writer did until it was held still is in the commit, and nothing later.
            background: only keep up with the writer. What earlier tries have left is
                stored before anything is cut, and nothing is cut while someone else makes a
                cut of his own.
            rewrite: packs that the commit shall not need, see `prepare_overlays`. There is
                a commit then even when nothing was written.

        Returns: the last commit, None when nothing changed.

        Raises:
            NotAttached: there is no such disk here, or its storage daemon is gone.
            StoreUnavailable, DaemonFailed, DiskBusy: call again.
        """
        if background:
            return self._keep_up(volume_id, publish, rewrite)
        return self.cut(volume_id, publish, around_cut=around_cut, rewrite=rewrite).commit

    def cut(
        self,
        volume_id: UUID,
        publish: Publish,
        *,
        around_cut: AroundCut = nullcontext,
        rewrite: frozenset[ObjectName] = frozenset(),
    ) -> Cut:
        """Do as `checkpoint` does, and name the root of the moment of the cut.

        It is the commit's, or, when nothing was written, the one that was there already:
        the head may have moved on by the time that the caller looks.
        """
        with self._lock_file(volume_id, _CUTS):
            commit: Commit | None = None
            while True:
                with self._held(volume_id) as disk:
                    frozen = disk.freeze(around_cut, leftovers_first=False)
                if frozen.last is None and not rewrite and not frozen.is_unknown:
                    return Cut(frozen.root_key, commit)
                with self._lock_file(volume_id, _UPLOADS):
                    commit = self._store_until(volume_id, frozen, publish, rewrite) or commit
                    root_key = self._disk(volume_id).attached().root_key
                if frozen.is_all:
                    return Cut(root_key, commit)

    def _keep_up(
        self, volume_id: UUID, publish: Publish, rewrite: frozenset[ObjectName]
    ) -> Commit | None:
        commit: Commit | None = None
        while True:
            with self._held(volume_id) as disk:
                try:
                    with self._lock_file(volume_id, _CUTS, timeout_s=0):
                        frozen = disk.freeze(nullcontext, leftovers_first=True)
                except DiskBusy:
                    return commit  # whoever has it stores all of it
            if frozen.last is None and not rewrite and not frozen.is_unknown:
                return commit
            with self._lock_file(volume_id, _UPLOADS):
                stored = self._store_until(volume_id, frozen, publish, rewrite, ahead=True)
            commit = stored or commit
            if frozen.is_all:
                return commit

    def _store_until(
        self,
        volume_id: UUID,
        frozen: Frozen,
        publish: Publish,
        rewrite: frozenset[ObjectName],
        *,
        ahead: bool = False,
    ) -> Commit | None:
        """Store what a cut has frozen, publish and drop it.

        Args:
            ahead: go on with what was written meanwhile, prepared meanwhile, see `ahead`.
        """
        if not frozen.is_all:
            rewrite = frozenset()  # there is another commit to come
        try:
            return self._store_stages(volume_id, frozen, publish, rewrite, ahead=ahead)
        except _WentOn:  # what is left of it lies on the head now
            return self._store_stages(volume_id, frozen, publish, rewrite, ahead=ahead)

    def _store_stages(
        self,
        volume_id: UUID,
        frozen: Frozen,
        publish: Publish,
        rewrite: frozenset[ObjectName],
        *,
        ahead: bool,
    ) -> Commit | None:
        # Read once: an `attach` may go on to another root between two reads.
        disk = self._disk(volume_id)
        numbers = disk.frozen_until(frozen.last)
        if not numbers and not rewrite and not disk.is_unknown():
            return None  # somebody else has stored them
        commit: Commit | None = None
        with ExitStack() as stack:
            storing = stack.enter_context(disk.storing())
            prepared = stack.enter_context(disk.prepare(numbers, storing, rewrite=rewrite))
            stage: Stage | None = Stage(numbers, prepared)
            for left in reversed(range(FEW if ahead else 1)):
                if stage is None:
                    break
                following = None
                if left and stage.prepared is not None:
                    following = stack.enter_context(self._ahead(volume_id, stage, storing))
                commit = self._store_stage(volume_id, stage, publish, following) or commit
                stage = following.take() if following is not None else None
        return commit

    def _ahead(self, volume_id: UUID, stage: Stage, storing: Storing) -> Ahead:
        """Prepare what follows a stage while that is on its way."""

        def is_wanted() -> bool:
            if stage.packs_under_way() > PACKS_LEFT:
                return False
            return self._disk(volume_id).is_worth_preparing()

        @contextmanager
        def prepare(gate: Gate) -> Iterator[Stage | None]:
            # Whoever has the cuts waits for the uploads, which are ours: no waiting for him.
            with (
                self._held(volume_id, timeout_s=SHORT_S) as disk,
                self._lock_file(volume_id, _CUTS, timeout_s=0),
            ):
                numbers = disk.freeze_next(stage.overlays)
            if not numbers:
                yield None
                return
            with disk.prepare(numbers, storing, gate=gate, base=stage.prepared) as prepared:
                reach("ahead.encoded")
                yield Stage(numbers, prepared)

        return Ahead(is_wanted, prepare)

    def _store_stage(
        self, volume_id: UUID, stage: Stage, publish: Publish, following: Ahead | None
    ) -> Commit | None:
        """Put a stage, publish and drop it."""
        commit = self._publish(volume_id, stage, publish)
        if following is not None:
            following.open()
        if stage.overlays:
            self._fold(volume_id, stage.overlays)
        with self._held(volume_id) as disk:
            disk.settle(commit, stage.overlays)
            disk.drop()
        return commit

    def _publish(self, volume_id: UUID, stage: Stage, publish: Publish) -> Commit | None:
        """Put what a disk's lowest overlays come to, and move the head there."""
        if stage.prepared is None:
            return None
        commit = stage.prepared.put()
        with self._held(volume_id) as disk:
            disk.announce(commit, len(stage.overlays))
        reach("publish.before")
        try:
            publish(commit)
        except HeadMoved as error:
            self._go_on_from(volume_id, error)
            raise
        reach("publish.after")
        return commit

    def _go_on_from(self, volume_id: UUID, moved: HeadMoved) -> None:
        """Find out what became of an earlier commit: nobody was told whether it was published.

        What this one had beyond it is in its own overlays still.

        Raises:
            _WentOn: it is the head, and what the disk is based on now.
        """
        if moved.root_key is None:
            return
        with self._held(volume_id) as disk:
            if disk.settle_earlier(moved.root_key):
                raise _WentOn("An earlier commit turns out to be published.") from moved

    def _fold(self, volume_id: UUID, numbers: Sequence[int]) -> None:
        """Keep what was stored in the layer; without that, the layer goes with the overlays."""
        try:
            with self._held(volume_id) as disk:
                begun = disk.begin_fold(numbers)
            if begun is None:
                return
            layer, export = begun
            disk.fold(numbers, export)
            with self._held(volume_id) as disk:
                disk.end_fold(layer, numbers)
        except (DaemonFailed, NotAttached, FileNotFoundError) as error:
            log.info("the layer of volume %s begins anew: %s", volume_id, error)

    def commit(
        self,
        volume_id: UUID,
        publish: Publish,
        *,
        rewrite: frozenset[ObjectName] = frozenset(),
    ) -> Commit | None:
        """Commit a disk that nobody uses any more; it is not served afterwards.

        The overlays are kept until `publish` has returned.

        Args:
            rewrite: as `checkpoint` has it.

        Returns: None when nothing changed.

        Raises:
            NotAttached: there is no such disk here.
            StoreUnavailable, DaemonFailed, DiskBusy: call again.
        """
        with self._lock_file(volume_id, _CUTS), self._lock_file(volume_id, _UPLOADS):
            try:
                return self._put_away(volume_id, publish, rewrite)
            except _WentOn:  # what is left of it lies on the head now
                return self._put_away(volume_id, publish, rewrite)

    def _put_away(
        self, volume_id: UUID, publish: Publish, rewrite: frozenset[ObjectName]
    ) -> Commit | None:
        with self._held(volume_id) as disk:
            disk.end()
            numbers = disk.overlays()
        if not numbers and not rewrite and not disk.is_unknown():
            return None
        with (
            disk.storing() as storing,
            disk.prepare(numbers, storing, rewrite=rewrite) as prepared,
        ):
            commit = self._publish(volume_id, Stage(numbers, prepared), publish)
        with self._held(volume_id) as disk:
            disk.settle(commit, numbers)
            disk.forget_dropped()
        return commit

    def detach(self, volume_id: UUID, *, discard: bool) -> None:
        """Stop serving a disk and forget it. Safe to repeat.

        Raises:
            Uncommitted: it has writes that no commit has, and `discard` was not said. It is
                left as it was.
        """
        with self._alone(volume_id) as disk:
            disk.detach(discard=discard)
        self._forget_locks(volume_id.hex)

    def tidy(self) -> None:
        """Remove the locks of disks that are not here (any more)."""
        overlays = self.config.state_dir / "overlays"
        for name in {path.name.partition(".")[0] for path in overlays.glob("*.lock")}:
            if not (overlays / name).exists():
                self._forget_locks(name)

    def _forget_locks(self, name: str) -> None:
        for path in (self.config.state_dir / "overlays").glob(f"{name}.*lock"):
            forget(path)

    # -- the log --------------------------------------------------------------------------

    def log_bytes(self, volume_id: UUID) -> int:
        """Count what the disk's writes that are not stored yet take here."""
        return self._disk(volume_id).log_bytes()

    def has_written(self, volume_id: UUID) -> bool:
        """Look whether there is anything to store. Takes no lock and asks no daemon.

        A discard that was never flushed may go unnoticed.
        """
        return self._disk(volume_id).has_written()

    def look(self) -> list[LogLook]:
        """Look at the logs of all disks that are here, by their files alone."""
        looks = []
        for volume_id in self._volume_ids():
            try:
                look = self._look(volume_id)
            except (OSError, ValueError, TypeError) as error:
                # It goes away just now, or its state file is spoilt: others are not.
                log.warning("volume %s cannot be looked at: %s", volume_id, error)
                continue
            if look is not None:
                looks.append(look)
        return looks

    def _look(self, volume_id: UUID) -> LogLook | None:
        disk = self._disk(volume_id)
        if disk.state is None:
            return None
        is_running = disk.daemon.is_running()
        is_exported = disk.export.is_running()
        return LogLook(
            volume_id=volume_id,
            root_key=disk.state.root_key,
            is_served=disk.state.mountpoint is None and is_running,
            log_bytes=disk.log_bytes(),
            written_at_ns=disk.written_at_ns(),
            frozen=max(0, len(disk.state.overlays) - 1),
            layer_is_large=disk.layer_is_large(),
            lacks_export=is_running and not is_exported,
            reads_wait_s=disk.reads_wait_s() if is_exported else 0.0,
            eased_until_ns=disk.eased_until_ns(),
        )

    def is_uploading(self, volume_id: UUID) -> bool:
        """Look whether somebody stores frozen overlays of the disk at this moment."""
        try:
            with self._lock_file(volume_id, _UPLOADS, timeout_s=0):
                return False
        except DiskBusy:
            return True

    def limit_writes(self, volume_id: UUID, limits: Limits, *, release: bool = False) -> None:
        """Hold a guest's writes back, or (`NO_LIMITS`, `release`) let all of them go.

        It waits for nobody for long: the limits that are set hold meanwhile.

        Raises:
            NotAttached, DaemonFailed, DiskBusy: nothing may have changed.
        """
        with self._held(volume_id, timeout_s=SHORT_S) as disk:
            disk.limit_writes(limits, release=release, timeout_s=SHORT_S)

    def ease(self, volume_id: UUID) -> None:
        """Let all writes pass for the next minute, although the log may outgrow its budget.

        To be called before a guest is made to write out its memory with a deadline: what
        that can be is bounded. A cut with `around_cut` does it of itself.

        Raises:
            NotAttached, DaemonFailed, DiskBusy: nothing may have changed.
        """
        with self._held(volume_id) as disk:
            disk.ease(EASE_S)

    def renew_layer(self, volume_id: UUID) -> None:
        """Begin the disk's layer anew if it has outgrown its budget.

        Raises:
            NotAttached, DaemonFailed, DiskBusy: it waits for nobody for long.
        """
        with self._held(volume_id, timeout_s=SHORT_S) as disk:
            disk.renew_layer(timeout_s=SHORT_S)

    def attached(self) -> list[AttachedDisk]:
        """List the disks that this host has, served or not."""
        disks = (self._disk(volume_id) for volume_id in self._volume_ids())
        return [disk.attached() for disk in disks if disk.state is not None]

    def _volume_ids(self) -> list[UUID]:
        found = []
        for entry in sorted((self.config.state_dir / "overlays").iterdir()):
            with suppress(ValueError):  # a lock file
                found.append(UUID(hex=entry.name))
        return found

    def fetched(self, volume_id: UUID) -> Fetched:
        """Count what was asked of object storage for the disk since it was attached."""
        return self._disk(volume_id).fetched()

    def start_blocks(self, volume_id: UUID) -> bytes | None:
        """Give what the disk's reader read in the first seconds, to be fetched ahead.

        None until half a minute after its first read, and once it is detached.
        """
        return self._disk(volume_id).export.start_blocks()

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
        return Disk(
            self.config,
            volume_id,
            self._store,
            self._cache,
            spares=self._spares,
            spare_daemons=self._spare_daemons,
        )

    @contextmanager
    def _held(self, volume_id: UUID, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Disk]:
        """Hold a disk's state: one worker at a time, across threads and processes."""
        with self._lock_file(volume_id, _STATE, timeout_s=timeout_s):
            yield self._disk(volume_id)

    @contextmanager
    def _alone(self, volume_id: UUID) -> Iterator[Disk]:
        """Hold all of a disk."""
        with (
            self._lock_file(volume_id, _CUTS),
            self._lock_file(volume_id, _UPLOADS),
            self._held(volume_id) as disk,
        ):
            yield disk

    @contextmanager
    def _lock_file(
        self, volume_id: UUID, kind: str, *, timeout_s: float = LOCK_TIMEOUT_S
    ) -> Iterator[None]:
        path = self.config.state_dir / "overlays" / f"{volume_id.hex}.{kind}"
        with locked(path, timeout_s=timeout_s):
            yield
