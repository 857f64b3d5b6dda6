"""This machine as a host, in memory: disks, guests, their agents and paused files.

The hypervisor is `FakeHypervisor`. `FakeHost.install` puts all of it behind `hosts.local`.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from hosts import local
from hosts.errors import GuestBusy
from hosts.guest.channel import AgentSilent, AgentState
from hosts.hypervisor import HypervisorConfig
from hosts.paused_files import FilesUnavailable
from hosts.volumes.commit import Commit
from hosts.volumes.disks import AttachedDisk, Cut, DiskHealth, LogLook
from hosts.volumes.errors import (
    NotAttached,
    OverlayMismatch,
    StaleEpoch,
    StoreUnavailable,
    Uncommitted,
)
from hosts.volumes.exports import Fetched
from hosts.volumes.naming import ObjectName
from hosts.volumes.pacing import Limits
from sandboxes import disk_samples, operations, watch
from tests.fakes.hypervisor import FakeHypervisor


def fake_hypervisor() -> FakeHypervisor:
    """Open the one fake host."""
    config = HypervisorConfig(
        uri="fake://host", images_dir=Path("/nowhere"), network="fake", accelerator="tcg"
    )
    return FakeHypervisor(config)


class FakeDisks:
    """Disks whose content is the number of times that a guest wrote to them."""

    def __init__(self) -> None:
        self.disks: dict[UUID, SimpleNamespace] = {}
        self.store_is_up = True
        self.dead: set[UUID] = set()
        self.unexported: set[UUID] = set()
        """Dead ones of which only the export is."""
        self.fetched_ahead: dict[UUID, bytes] = {}
        self._numbers = itertools.count(1)

    def warm(self) -> None:
        """There is nothing to start."""

    def attach(
        self,
        volume_id: UUID,
        *,
        root_key: str,
        epoch: int,
        start_blocks: bytes | None = None,
        shown_at: Path | None = None,
    ) -> AttachedDisk:
        disk = self.disks.get(volume_id)
        if disk is not None and disk.epoch > epoch:
            raise StaleEpoch(f"This host has the disk for epoch {disk.epoch}.")
        if disk is not None and disk.epoch == epoch and disk.root_key != root_key:
            if disk.writes:
                raise OverlayMismatch("The overlay here was written over another root.")
            disk = None
        if disk is None or disk.epoch < epoch:
            disk = SimpleNamespace(root_key=root_key, epoch=epoch, writes=0)
        self.disks[volume_id] = disk
        self.dead.discard(volume_id)
        if start_blocks is not None:
            self.fetched_ahead[volume_id] = start_blocks
        return self._attached(volume_id)

    def _disk(self, volume_id: UUID, *, served: bool) -> SimpleNamespace:
        if volume_id not in self.disks or (served and volume_id in self.dead):
            raise NotAttached("The volume has no disk on this host.")
        return self.disks[volume_id]

    def _attached(self, volume_id: UUID) -> AttachedDisk:
        disk = self.disks[volume_id]
        return AttachedDisk(
            volume_id=volume_id,
            epoch=disk.epoch,
            root_key=disk.root_key,
            size_bytes=1 << 40,
            socket=Path("/nowhere/disk.sock"),
        )

    def health(self, volume_id: UUID) -> DiskHealth:
        if volume_id not in self.disks:
            return DiskHealth.ABSENT
        return DiskHealth.DEAD if volume_id in self.dead else DiskHealth.ATTACHED

    def mend(self, volume_id: UUID) -> bool:
        if volume_id in self.unexported:
            self.dead.discard(volume_id)
            self.unexported.discard(volume_id)
        return volume_id in self.disks and volume_id not in self.dead

    def commit(
        self,
        volume_id: UUID,
        publish: Callable[[Commit], None],
        *,
        rewrite: frozenset[ObjectName] = frozenset(),
    ) -> Commit | None:
        disk = self._disk(volume_id, served=False)
        self.dead.add(volume_id)  # it is served no longer, whatever becomes of the commit
        return self._commit(volume_id, disk, publish)

    def _commit(
        self, volume_id: UUID, disk: SimpleNamespace, publish: Callable[[Commit], None]
    ) -> Commit | None:
        if not disk.writes:
            return None
        if not self.store_is_up:
            raise StoreUnavailable("The object store is away.")
        number = next(self._numbers)
        commit = Commit(
            root_key=f"roots/{volume_id.hex}/{disk.epoch:08x}/{number:032x}",
            base_root_key=disk.root_key,
            blocks_changed=disk.writes,
            uploaded_bytes=disk.writes,
            packs=1,
            index_bytes=1,
            stored_bytes=disk.writes,
            size_bytes=1 << 40,
        )
        publish(commit)
        disk.root_key, disk.writes = commit.root_key, 0
        return commit

    def checkpoint(
        self,
        volume_id: UUID,
        publish: Callable[[Commit], None],
        *,
        around_cut: Callable[[], AbstractContextManager[None]] = nullcontext,
        background: bool = False,
        rewrite: frozenset[ObjectName] = frozenset(),
    ) -> Commit | None:
        return self.cut(volume_id, publish, around_cut=around_cut, rewrite=rewrite).commit

    def cut(
        self,
        volume_id: UUID,
        publish: Callable[[Commit], None],
        *,
        around_cut: Callable[[], AbstractContextManager[None]] = nullcontext,
        rewrite: frozenset[ObjectName] = frozenset(),
    ) -> Cut:
        disk = self._disk(volume_id, served=True)
        with around_cut():
            pass
        commit = self._commit(volume_id, disk, publish)
        return Cut(disk.root_key, commit)

    def log_bytes(self, volume_id: UUID) -> int:
        return 65536 * self.disks[volume_id].writes if volume_id in self.disks else 0

    def has_written(self, volume_id: UUID) -> bool:
        return self.log_bytes(volume_id) > 0

    def is_uploading(self, volume_id: UUID) -> bool:
        return False

    def look(self) -> list[LogLook]:
        return [
            LogLook(
                volume_id=volume_id,
                root_key=disk.root_key,
                is_served=volume_id not in self.dead,
                log_bytes=self.log_bytes(volume_id),
                written_at_ns=disk.writes,
                frozen=0,
                layer_is_large=False,
            )
            for volume_id, disk in self.disks.items()
        ]

    def limit_writes(self, volume_id: UUID, limits: Limits, *, release: bool = False) -> None:
        self._disk(volume_id, served=True).limits = limits

    def start_blocks(self, volume_id: UUID) -> bytes | None:
        return b"start" if volume_id in self.disks else None

    def ease(self, volume_id: UUID) -> None:
        self._disk(volume_id, served=True)

    def detach(self, volume_id: UUID, *, discard: bool) -> None:
        if volume_id in self.disks and self.disks[volume_id].writes and not discard:
            raise Uncommitted("The disk has writes that no commit has.")
        self.disks.pop(volume_id, None)
        self.dead.discard(volume_id)

    def attached(self) -> list[AttachedDisk]:
        return [self._attached(volume_id) for volume_id in self.disks]

    def fetched(self, volume_id: UUID) -> Fetched:
        return Fetched(requests=1, bytes=4096) if volume_id in self.disks else Fetched(0, 0)

    def export_fuse(self, volume_id: UUID, mountpoint: Path) -> None:
        self._disk(volume_id, served=True)

    def drop_fuse(self, volume_id: UUID) -> None:
        self._disk(volume_id, served=True)


class FakePausedFiles:
    """Files that are open or not, and how often they were changed and stored."""

    def __init__(self, disks: FakeDisks) -> None:
        self._disks = disks
        self.used_at: dict[UUID, datetime] = {}
        self.known: dict[UUID, datetime] = {}
        self.stored: dict[UUID, int] = {}
        self.can_settle = True

    def warm(self) -> None:
        """There is nothing to load."""

    def open(
        self, volume_id: UUID, image: Path, *, show: Callable[[], object] = lambda: None
    ) -> Path:
        show()
        self.used_at.setdefault(volume_id, datetime(2026, 1, 1, tzinfo=UTC))
        self.known[volume_id] = self.used_at[volume_id]
        return Path("/nowhere/files.sock")

    def is_open(self, volume_id: UUID) -> bool:
        return volume_id in self.used_at

    def opened(self) -> list[UUID]:
        return list(self.used_at)

    def is_dirty(self, volume_id: UUID) -> bool:
        disk = self._disks.disks.get(volume_id)
        return disk is not None and bool(disk.writes)

    def is_unchanged(self, volume_id: UUID) -> bool:
        return volume_id in self.known and not self.is_dirty(volume_id)

    def marked_at(self, volume_id: UUID) -> datetime | None:
        return self.known.get(volume_id)

    def last_used_at(self, volume_id: UUID) -> datetime | None:
        return self.used_at.get(volume_id) or self.known.get(volume_id)

    @contextmanager
    def settled(self, volume_id: UUID) -> Iterator[int]:
        if volume_id not in self.used_at or not self.can_settle:
            raise FilesUnavailable("The files cannot be held still.")
        yield self._disks.disks[volume_id].writes

    def note_stored(self, volume_id: UUID, marks: int) -> None:
        self.stored[volume_id] = marks

    def clear_dirty(self, volume_id: UUID) -> None:
        if volume_id in self.used_at:
            raise FilesUnavailable("The volume's files are open.")
        self.known.pop(volume_id, None)

    def close(self, volume_id: UUID) -> bool:
        """Tell whether the image is whole, which it is here."""
        self.used_at.pop(volume_id, None)
        return True


class FakeHost:
    """Everything that `hosts.local` gives; `silent` holds guests whose agent is mute."""

    def __init__(self) -> None:
        self.disks = FakeDisks()
        self.files = FakePausedFiles(self.disks)
        self.silent: set[UUID] = set()
        self.asked: list[tuple[str, UUID]] = []
        self.locked: set[UUID] = set()

    def channel(self, path: Path, **options: object) -> Any:
        uuid = UUID(path.parent.name)

        def ask(op: str) -> Callable[..., AgentState]:
            def answer(*args: object, **options: object) -> AgentState:
                if uuid in self.silent:
                    raise AgentSilent
                self.asked.append((op, uuid))
                return AgentState(ready=True, boot_id="fake", uptime_s=1.0)

            return answer

        def stats() -> dict[str, Any]:
            ask("stats")()
            return {"disk_bytes": 4 << 30, "disk_free_bytes": 3 << 30, "device_bytes": 1 << 40}

        names = ("ping", "set_clock", "sync", "prepare_stop", "freeze", "thaw")
        return SimpleNamespace(stats=stats, **{name: ask(name) for name in names})

    @contextmanager
    def lock(self, uuid: UUID) -> Iterator[None]:
        if uuid in self.locked:
            raise GuestBusy(uuid)
        self.locked.add(uuid)
        try:
            yield
        finally:
            self.locked.discard(uuid)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "disks", lambda: self.disks)
        monkeypatch.setattr(local, "paused_files", lambda: self.files)
        monkeypatch.setattr(local, "hypervisor", fake_hypervisor)
        monkeypatch.setattr(local, "guest_lock", self.lock)
        monkeypatch.setattr(local, "device_file", lambda _: Path("/nowhere/device"))
        for module in (operations, watch, disk_samples):
            monkeypatch.setattr(module, "AgentChannel", self.channel)
