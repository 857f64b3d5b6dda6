"""One attached disk: the steps of attach, checkpoint, commit and detach."""

import grp
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from common.units import MiB
from hosts.volumes import layers
from hosts.volumes.cache import ObjectCache
from hosts.volumes.commit import Commit, Prepared, open_root, prepare_overlays
from hosts.volumes.disk_state import DiskState
from hosts.volumes.errors import (
    DaemonFailed,
    DiskBusy,
    NotAttached,
    OverlayMismatch,
    StaleEpoch,
    StoreUnavailable,
    Uncommitted,
)
from hosts.volumes.export_daemon import ExportDaemon
from hosts.volumes.exports import FetchCounter, Fetched
from hosts.volumes.failpoints import reach
from hosts.volumes.keys import Keyring, KeySource, PlainKeys
from hosts.volumes.locks import locked
from hosts.volumes.naming import ObjectName, parse_key
from hosts.volumes.objects import ObjectStore, StoreConfig
from hosts.volumes.pacing import (
    DEFAULT_BUDGET_BYTES,
    FREE_SHARE,
    NO_LIMITS,
    SOON_SHARE,
    Limits,
)
from hosts.volumes.qcow2 import open_overlay
from hosts.volumes.qcow2_writer import write_empty
from hosts.volumes.qmp import TIMEOUT_S, Qmp, QmpRefused
from hosts.volumes.spares import Spares
from hosts.volumes.start import RECORD_S
from hosts.volumes.storage_daemon import EXPORT_NAME, StorageDaemon
from hosts.volumes.uploads import Gate, Room

WAITS_LONG_S = 2.0
"""Reads that have waited so long for the store may go on to: nobody should wait for them."""

RECONCILE_TRIES = 3

MAX_CHAIN = 8
"""Overlays at most: while uploads fail, a checkpoint adds no more of them."""

DEFAULT_LAYER_BUDGET_BYTES = 512 * MiB

LAYER_ROOM = 2
"""The local disk must have room for so many times a layer's budget for there to be one."""

FRESH_NS = 0
"""The time of change of an overlay that nobody has written to: so a look at the file is
enough to know that a disk is idle."""

EASE_S = 60
"""How long writes are let pass at most while a guest is brought to rest."""

Publish = Callable[[Commit], None]
"""Moves the head. It may be called again with the root that is the head already (the
process died just after), and must then succeed. It says by `HeadMoved` where the head is when
that is not what the commit was made from."""

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
    start_s: float = RECORD_S
    """How long after its first read a guest counts as starting; see `start`."""
    log_budget_bytes: int = DEFAULT_BUDGET_BYTES
    """What the overlays of one disk may take; its writer is slowed before that."""
    layer_budget_bytes: int = DEFAULT_LAYER_BUDGET_BYTES
    """What the local layer of one disk may take before it is begun anew; 0: no layers."""
    soon_share: float = SOON_SHARE
    """Once so much of the budget is written, it is stored without waiting; what is written
    beside that is cut and prepared while the last commit is on its way."""

    @property
    def soon_bytes(self) -> int:
        return int(self.soon_share * self.log_budget_bytes)

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


@dataclass(frozen=True)
class Frozen:
    """What a cut has left to be stored."""

    last: int | None
    """The highest frozen overlay; None when there is none."""
    is_all: bool
    """Everything written until the cut is in it."""
    root_key: str
    """What the disk is based on."""
    is_unknown: bool
    """Another root may have become the head, and nobody was told."""


@dataclass(frozen=True)
class Storing:
    """What commits that follow one another share."""

    cache: ObjectCache
    keyring: Keyring
    room: Room


class Disk:
    """One disk. Whoever changes it holds its lock (see `Disks`)."""

    def __init__(
        self,
        config: DisksConfig,
        volume_id: UUID,
        store: ObjectStore,
        cache: ObjectCache,
        *,
        spares: Spares,
        spare_daemons: Spares,
    ) -> None:
        self._config = config
        self._store = store
        self._cache = cache
        self.volume_id = volume_id
        self._run_dir = config.run_dir / "disks" / volume_id.hex
        self._overlay_dir = config.state_dir / "overlays" / volume_id.hex
        self._state_file = self._overlay_dir / "state.json"
        self._export_lock = self._overlay_dir.with_suffix(".export.lock")
        self._eased_file = self._overlay_dir / "eased"
        self._fetched_here = self._overlay_dir / "fetched"
        self.state = DiskState.read(self._state_file)
        self._has_fresh_layer = False
        self._keyring: Keyring | None = None
        """Of the root that was just opened."""
        self.daemon = StorageDaemon(
            self._run_dir,
            self._overlay_dir,
            user=config.user,
            take_spare=spare_daemons.take,
        )
        self.export = ExportDaemon(
            self._run_dir,
            config.cache_dir,
            cache_budget_bytes=config.cache_budget_bytes,
            start_s=config.start_s,
            user=config.user,
            take_spare=spares.take,
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

    def mend(self, *, timeout_s: float) -> bool:
        """Start the export again of a daemon that runs. It needs not the disk's lock.

        Who ends the export ends the daemon before, so none is started for a disk that goes.
        Who moves on to another root ensures the export once that is recorded: what is offered
        here of an older one is withdrawn after that, and not before the daemon let go of it.
        """
        if self.state is None or not self.daemon.is_running():
            return False
        with locked(self._export_lock, timeout_s=timeout_s):
            self.state = DiskState.read(self._state_file)
            if self.state is None or not self.daemon.is_running():
                return False
            self._start_export()
            return True

    # -- what is here, by its files alone -------------------------------------------------

    def log_bytes(self) -> int:
        """Count what the overlays that were written to take."""
        return sum(
            found.st_blocks * 512 for found in self._overlay_stats() if _is_written(found)
        )

    def has_written(self) -> bool:
        """Tell whether anything waits to be stored; a discard may go unnoticed for a while."""
        return any(_is_written(found) for found in self._overlay_stats())

    def written_at_ns(self) -> int:
        """Say when something to store last came about; 0 when nothing did.

        That is an overlay's change, or a publish of which nobody was told how it ended.
        """
        changed_at_ns = [found.st_mtime_ns for found in self._overlay_stats()]
        if self.is_unknown():
            changed_at_ns.append(self._state_file.stat().st_mtime_ns)
        return max(changed_at_ns, default=FRESH_NS)

    def is_unknown(self) -> bool:
        """Tell whether another root may have become the head, and nobody was told."""
        return self.state is not None and self.state.pending_root_key is not None

    def _overlay_stats(self) -> Iterator[os.stat_result]:
        for number in self.state.overlays if self.state is not None else ():
            with suppress(FileNotFoundError):
                yield self.daemon.overlay_path(number).stat()

    # -- attach -------------------------------------------------------------------------

    def goes_on_with(self, root_key: str, epoch: int) -> bool:
        """Tell whether to attach this root is to go on with what is here."""
        state = self.state
        if state is None or state.epoch != epoch or state.is_put_away:
            return False
        if state.is_pending(root_key):
            return True
        return root_key in (state.root_key, *state.past_root_keys)

    def attach(
        self,
        root_key: str,
        epoch: int,
        start_blocks: bytes | None,
        shown_at: Path | None = None,
    ) -> None:
        self._settle_with(root_key, epoch)
        is_new = self.state is None
        if is_new:
            self._record(root_key, epoch, shown_at)
        state = self._require()
        # Others pass through to the disk's socket; the rest is the daemons' alone.
        self._config.own_dir(self._run_dir, 0o711)
        if is_new:
            self.export.begin_start(start_blocks)
        if not state.overlays or state.is_put_away:
            if not state.overlays or state.is_active_pending():
                # Made first: whatever is recorded can be committed, whoever calls next. What
                # may be in a root that was published is never written to again.
                self._make_overlay(state.add_overlay())
            state.is_put_away = False
            self._save()
        reach("attach.recorded")
        for number in state.overlays:
            self._make_overlay(number)
        self._ensure_export()
        reach("attach.exported")
        if not self.daemon.is_running():
            self._start_daemon(state, shown_at)
            reach("attach.served")
            self._clean_up()
            return
        reach("attach.served")
        self.daemon.grant_socket(self._socket_gid())  # who started it may not have come so far
        with self.daemon.connect() as qmp:
            self._reconcile(qmp)
        if shown_at is not None:
            self.export_fuse(shown_at)

    def _settle_with(self, root_key: str, epoch: int) -> None:
        """Bring what is here into line with the head that the caller knows."""
        state = self.state
        if state is None:
            return
        if state.epoch > epoch:
            raise StaleEpoch(f"This host has the disk for epoch {state.epoch}.")
        if state.epoch < epoch:
            self._tear_down()
        elif state.is_pending(root_key):
            state.settle(root_key)
            self._save()
        elif root_key not in (state.root_key, *state.past_root_keys):
            if self._is_uncommitted():
                raise OverlayMismatch("The overlay here was written over another root.")
            self._tear_down()

    def _record(self, root_key: str, epoch: int, shown_at: Path | None) -> None:
        """Begin a disk: its root is read before anything is made."""
        fetched = list[int]()
        cache = self._cache.counted(fetched.append)
        self._keyring = Keyring(self._config.keys)
        root = open_root(cache.whole(root_key), parse_key(root_key)[1], self._keyring)
        # Not the daemons' own: they open what we made, and cannot put anything there.
        self._overlay_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._overlay_dir.chmod(0o711)
        self.state = DiskState(self.volume_id.hex, epoch, root_key, root.size_bytes)
        # Left by a tear-down that was cut short: nobody's, and of another life.
        self._delete_strays()
        self._make_overlay(self.state.add_overlay())
        # All that its daemon will be started with: each time that this is saved takes long.
        self.state.mountpoint = None if shown_at is None else str(shown_at)
        self._make_layer()
        self._save()
        self._has_fresh_layer = True
        self.export.fetched.unlink(missing_ok=True)
        self._fetched_here.unlink(missing_ok=True)
        with self.counter() as counter:
            for size_bytes in fetched:
                counter.add(size_bytes)

    def reads_wait_s(self) -> float:
        """Say for how long reads have been waiting for the store without any answer."""
        return FetchCounter.waited_s(self.export.fetched)

    def fetched(self) -> Fetched:
        """Count what was asked of the store for this disk since it was attached."""
        counts = [FetchCounter.read(path) for path in (self.export.fetched, self._fetched_here)]
        return Fetched(sum(c.requests for c in counts), sum(c.bytes for c in counts))

    def _make_overlay(self, number: int) -> None:
        path = self.daemon.overlay_path(number)
        if not path.exists():
            self._make_image(path)

    def _make_image(self, path: Path) -> None:
        """Make an empty qcow2 of the disk's size that nobody has written to yet."""
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        write_empty(new, self._require().size_bytes)
        self._config.give(new)
        os.utime(new, ns=(FRESH_NS, FRESH_NS))
        new.replace(path)

    def _ensure_export(self) -> None:
        with locked(self._export_lock):
            self._start_export()

    def _start_export(self) -> None:
        self.export.offer(self._require().root_key, self._cache)
        self.export.ensure(self._config.store, self._export_keys)

    def _export_keys(self) -> Keyring:
        """Give the keys that an export of the disk's generations will ever need."""
        keyring = self._keyring
        if keyring is None:
            root_key = self._require().root_key
            keyring = Keyring(self._config.keys)
            open_root(self._cache.whole(root_key), parse_key(root_key)[1], keyring)
        keyring.learn([self.volume_id.bytes])
        return keyring

    def _start_daemon(self, state: DiskState, shown_at: Path | None) -> None:
        self._unmount()
        self.daemon.stop()  # one that was killed may still hold its files
        if not self._has_fresh_layer:
            state.mountpoint = None if shown_at is None else str(shown_at)
            self._begin_layer()
        self._has_fresh_layer = False
        self.daemon.start(
            state,
            export_socket=self.export.socket,
            socket_gid=self._socket_gid(),
            shown_at=shown_at,
        )

    def _socket_gid(self) -> int | None:
        group = self._config.socket_group
        return None if group is None else grp.getgrnam(group).gr_gid

    def _reconcile(self, qmp: Qmp) -> None:
        """Go forward to what the state file says, then delete what it does not name."""
        state = self._require()
        self._ensure_export()
        self._make_overlay(state.active)
        self._bring_into_line(qmp, state)
        self._clean_up()

    def _clean_up(self) -> None:
        """Delete what neither the state file nor a daemon that is what it says names."""
        self._delete_strays()
        self.export.withdraw_others(self._require().root_key)

    def _bring_into_line(self, qmp: Qmp, state: DiskState) -> None:
        """Make the daemon what the state file says.

        A command that an earlier caller gave up waiting for, while there was no export, may
        be carried out at any moment since; what then is there twice is looked at again.
        """
        for tries_left in reversed(range(RECONCILE_TRIES)):
            nodes = self.daemon.nodes(qmp)
            if self._layer_is_over(nodes):
                self._begin_layer()
            try:
                self.daemon.reconcile(qmp, state, self.export.socket, nodes)
            except QmpRefused:
                if not tries_left:
                    raise
            else:
                return

    def _begin_layer(self) -> None:
        """Have an empty layer from here on, or none when the host has none."""
        self._make_layer()
        self._save()

    def _make_layer(self) -> None:
        state = self._require()
        if self._may_have_layer():
            path = self.daemon.layer_path(state.begin_layer())
            path.unlink(missing_ok=True)
            self._make_image(path)
        else:
            state.end_layer()

    def _layer_is_over(self, nodes: frozenset[str]) -> bool:
        """Tell whether the layer must go: it may be wrong, or has become too large."""
        state = self._require()
        if state.layer is None:
            return self._may_have_layer()
        dropped = [n for n in self.daemon.overlays(nodes) if n < state.overlays[0]]
        if dropped and max(dropped) > state.folded:
            return True
        return not self.daemon.has_layer(nodes, state.layer) or self.layer_is_large()

    def layer_is_large(self) -> bool:
        """Tell whether the layer has more than its budget, or than there is room for."""
        if self.state is None or self.state.layer is None:
            return False
        try:
            found = self.daemon.layer_path(self.state.layer).stat()
        except FileNotFoundError:
            return False
        is_large = found.st_blocks * 512 > self._config.layer_budget_bytes
        return is_large or not self._may_have_layer()

    def _may_have_layer(self) -> bool:
        """Tell whether the host has layers, and room for this one.

        A read whose copy finds no room is an error of the read. A disk that is shown as a file
        has none: the kernel keeps what is read of a file, and it is shown sooner without.
        """
        if self._require().mountpoint is not None:
            return False
        budget_bytes = self._config.layer_budget_bytes
        free = os.statvfs(self._overlay_dir)
        return 0 < budget_bytes <= free.f_bavail * free.f_frsize // LAYER_ROOM

    def renew_layer(self, *, timeout_s: float) -> None:
        """Begin a layer anew that has become too large."""
        if self.layer_is_large():
            with self.daemon.connect(timeout_s=timeout_s) as qmp:
                self._reconcile(qmp)

    def _delete_strays(self) -> None:
        state = self._require()
        kept = {self.daemon.overlay_path(number) for number in state.overlays}
        if state.layer is not None:
            kept.add(self.daemon.layer_path(state.layer))
        for pattern in ("overlay-*", "layer-*"):
            for path in self._overlay_dir.glob(pattern):
                if path not in kept:
                    path.unlink()

    # -- pace -----------------------------------------------------------------------------

    def limit_writes(
        self, limits: Limits, *, release: bool, timeout_s: float = TIMEOUT_S
    ) -> None:
        with self.daemon.connect(timeout_s=timeout_s) as qmp:
            self.daemon.limit_writes(qmp, limits, release=release)

    def ease(self, seconds: float) -> None:
        """Let all writes pass for so long: a guest that writes its memory out must end soon."""
        if self.log_bytes() < FREE_SHARE * self._config.log_budget_bytes:
            return  # nothing holds them back
        until_ns = time.time_ns() + int(seconds * 1e9)
        self._eased_file.touch()
        os.utime(self._eased_file, ns=(until_ns, until_ns))
        with suppress(QmpRefused):  # a daemon of an earlier release holds nothing back
            self.limit_writes(NO_LIMITS, release=True)

    def end_ease(self) -> None:
        if self.eased_until_ns() > time.time_ns():
            self._eased_file.touch()

    def eased_until_ns(self) -> int:
        """Say until when all writes are to pass; another value than before: they did."""
        try:
            return self._eased_file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    # -- committing -----------------------------------------------------------------------

    def freeze(self, around_cut: AroundCut, *, leftovers_first: bool) -> Frozen:
        """Freeze what was written until now under a new overlay, if there is anything.

        Nothing is, when the chain is as long as it may be, or when the frozen overlays that
        an earlier try has left are to be stored first.

        Raises:
            StoreUnavailable: a read waits for the store. A cut would wait for it too, and hold
                everybody else meanwhile: it is not begun.
        """
        state = self._require()
        self._refuse_while_reads_wait()
        is_all = len(state.overlays) < MAX_CHAIN
        if leftovers_first and len(state.overlays) > 1:
            is_all = False
        if is_all and around_cut is not nullcontext:
            self.ease(EASE_S)
        try:
            with self.daemon.connect() as qmp:
                # What is recorded as frozen may still be written to.
                self._reconcile(qmp)
                if is_all:
                    self._cut(qmp, around_cut)
        finally:
            self.end_ease()
        frozen = state.overlays[:-1]
        return Frozen(
            frozen[-1] if frozen else None,
            is_all,
            state.root_key,
            is_unknown=self.is_unknown(),
        )

    def _refuse_while_reads_wait(self) -> None:
        if self.export.is_running() and self.reads_wait_s() >= WAITS_LONG_S:
            raise StoreUnavailable("Object storage does not answer.")

    def freeze_next(self, numbers: Sequence[int]) -> list[int]:
        """Freeze what was written since a cut whose overlays are being stored.

        Nothing is, when there are others that are frozen, or as many as there may be.

        Returns: the overlays that are frozen now and were not.

        Raises:
            StoreUnavailable: as `freeze`.
        """
        state = self._require()
        if list(numbers) != state.overlays[:-1] or len(state.overlays) >= MAX_CHAIN:
            return []
        self._refuse_while_reads_wait()
        with self.daemon.connect() as qmp:
            self._reconcile(qmp)
            self._cut(qmp, nullcontext)
        reach("ahead.cut")
        return state.overlays[len(numbers) : -1]

    def is_worth_preparing(self) -> bool:
        """Tell whether enough was written since the last cut for another to be prepared."""
        path = self.daemon.overlay_path(self._require().active)
        found = path.stat()
        return _is_written(found) and found.st_blocks * 512 >= self._config.soon_bytes

    def _cut(self, qmp: Qmp, around_cut: AroundCut) -> None:
        state = self._require()
        # All that takes time comes before the writer is held.
        self._make_overlay(state.next_overlay)
        self.daemon.prepare(qmp, state.next_overlay, self.daemon.nodes(qmp))
        with suppress(DaemonFailed):  # shown as a file, it has no such export
            # The cut flushes too, while everybody waits: leave it little to do.
            layers.flush(self.daemon.socket, EXPORT_NAME)
        reach("rotate.prepared")
        active = state.active
        state.add_overlay()
        self._save()
        reach("rotate.recorded")
        try:
            with around_cut():
                if self._may_hold(qmp, active):
                    self.daemon.rotate(qmp, state)
        except BaseException:
            with suppress(DaemonFailed):  # whoever calls next goes on from what is recorded
                self._end_cut(qmp, active)
            raise
        self._end_cut(qmp, active)

    def _end_cut(self, qmp: Qmp, active: int) -> None:
        """Take back what was recorded for a cut, where there was none."""
        if self.daemon.written(qmp) == active:
            self._require().take_back_overlay()
            self._save()
        self._reconcile(qmp)

    def _may_hold(self, qmp: Qmp, number: int) -> bool:
        """Tell whether the overlay that writes go to can hold anything at all."""
        if self.daemon.has_written(qmp, number):
            return True
        # A discard may be in the daemon's memory alone.
        self.daemon.flush(qmp, self._require(), number)
        return self._has_clusters(number)

    def _has_clusters(self, number: int) -> bool:
        path = self.daemon.overlay_path(number)
        if not path.exists():
            return False
        with open_overlay(path) as overlay:
            return not overlay.is_empty()

    def overlays(self) -> list[int]:
        """List the overlays, the lowest first."""
        return list(self._require().overlays)

    def frozen_until(self, last: int | None) -> list[int]:
        """List the frozen overlays up to one, the lowest first; none for None."""
        if last is None:
            return []
        return [number for number in self._require().overlays[:-1] if number <= last]

    def counter(self) -> closing[FetchCounter]:
        """Count what the host itself asks the store for, beside the export's own count."""
        return closing(FetchCounter(self._fetched_here))

    @contextmanager
    def storing(self) -> Iterator[Storing]:
        """Have what commits that follow one another share."""
        with self.counter() as counter:
            cache = self._cache.counted(counter.add)
            yield Storing(cache, Keyring(self._config.keys), Room())

    def prepare(
        self,
        numbers: Sequence[int],
        storing: Storing,
        *,
        rewrite: frozenset[ObjectName] = frozenset(),
        gate: Gate | None = None,
        base: Prepared | None = None,
    ) -> AbstractContextManager[Prepared | None]:
        """Encode frozen overlays, the lowest of those that are not in the base.

        It takes long, and needs not the disk's lock but that of its uploads.

        Args:
            base: what they lie on, if that is not stored yet; else it is the disk's root.
        """
        state = self._require()
        return prepare_overlays(
            [self.daemon.overlay_path(number) for number in numbers],
            base_root_key=state.root_key if base is None else base.commit.root_key,
            volume_id=self.volume_id,
            epoch=state.epoch,
            store=self._store,
            cache=storing.cache,
            keyring=storing.keyring,
            rewrite=rewrite,
            # An earlier one may have become the head: what now reads as the disk's root does
            # may not read as the head.
            even_if_unchanged=base is None and state.pending_root_key is not None,
            base_index={} if base is None else base.index,
            room=storing.room,
            gate=gate,
        )

    def announce(self, commit: Commit, count: int) -> None:
        """Note that a root with the lowest overlays is about to become the head.

        Raises:
            DiskBusy: it was not made from what the disk is based on now.
        """
        if commit.base_root_key != self._require().root_key:
            raise DiskBusy("The disk has moved on to another root.")
        self._require().announce(commit.root_key, count)
        self._save()

    def settle(self, commit: Commit | None, numbers: Sequence[int]) -> None:
        """Forget overlays that are in the head now, or say nothing that it does not."""
        state = self._require()
        if commit is None:
            state.drop_lowest(len(numbers))
        elif state.pending_root_key == commit.root_key:
            state.settle(commit.root_key)
        self._save()  # otherwise an `attach` that knew the head has done it

    def settle_earlier(self, root_key: str) -> bool:
        """Go on from a root that was published, and nobody was told; tell whether it is one."""
        state = self._require()
        if root_key == state.root_key:
            return True  # an `attach` that knew the head has done it
        if not state.is_pending(root_key):
            return False
        state.settle(root_key)
        self._save()
        self.drop()
        return True

    def drop(self) -> None:
        """Let the running daemon go on without what the state file has forgotten."""
        reach("drop.recorded")
        if self.daemon.is_running():
            with self.daemon.connect() as qmp:
                self._reconcile(qmp)
        reach("drop.done")

    def end(self) -> None:
        """Serve the disk no more; what was written is in its overlays."""
        state = self._require()
        state.is_put_away = True
        state.end_layer()
        state.past_root_keys = []
        self._save()
        self._stop()
        reach("commit.stopped")

    def forget_dropped(self) -> None:
        reach("commit.settled")
        self._delete_strays()

    # -- the layer ------------------------------------------------------------------------

    def begin_fold(self, numbers: Sequence[int]) -> tuple[int, str] | None:
        """Open the layer for what frozen overlays hold; None when it is to go instead."""
        state = self._require()
        paths = [self.daemon.overlay_path(number) for number in numbers]
        size_bytes = sum(path.stat().st_blocks * 512 for path in paths)
        if state.layer is None or 2 * size_bytes > self._config.layer_budget_bytes:
            return None
        with self.daemon.connect() as qmp:
            if not self.daemon.has_layer(self.daemon.nodes(qmp), state.layer):
                return None
            return state.layer, self.daemon.export_layer(qmp, state.layer)

    def fold(self, numbers: Sequence[int], export: str) -> None:
        """Write what frozen overlays hold into the layer. It needs not the disk's lock."""
        reach("fold.begun")
        paths = [self.daemon.overlay_path(number) for number in numbers]
        layers.fold(paths, self.daemon.socket, export)

    def end_fold(self, layer: int, numbers: Sequence[int]) -> None:
        """Note that the layer has all of them, unless it has been replaced since."""
        state = self._require()
        with self.daemon.connect() as qmp:
            self.daemon.withdraw_layer(qmp, layer)
        if state.layer == layer:
            state.folded = max(numbers)
            self._save()
        reach("fold.recorded")

    # -- ending -----------------------------------------------------------------------------

    def detach(self, *, discard: bool) -> None:
        if self.state is not None and not discard and self._is_uncommitted():
            raise Uncommitted("The disk has writes that no commit has.")
        self._tear_down()

    def _is_uncommitted(self) -> bool:
        state = self._require()
        if state.overlays and self.daemon.is_running():
            with self.daemon.connect() as qmp:
                if self._may_hold(qmp, state.active):
                    return True
        return any(self._has_clusters(number) for number in state.overlays)

    def _tear_down(self) -> None:
        """End everything, and delete the overlays."""
        self._stop()
        reach("detach.stopped")
        shutil.rmtree(self._run_dir, ignore_errors=True)
        # The state file goes first: without it, what is left is nobody's.
        self._state_file.unlink(missing_ok=True)
        reach("detach.forgotten")
        shutil.rmtree(self._overlay_dir, ignore_errors=True)
        self.state = None

    def _stop(self) -> None:
        """End the storage daemon, which flushes, and then the export that it reads from."""
        self.daemon.stop()
        self._unmount()
        with locked(self._export_lock):
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


def _is_written(found: os.stat_result) -> bool:
    return found.st_mtime_ns != FRESH_NS


def _mountpoints() -> set[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return {line.split(" ")[1] for line in lines}
