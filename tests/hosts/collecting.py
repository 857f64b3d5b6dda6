"""A fleet's volumes in small: a store in memory, real rows, and a clock that can be set."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, cast
from uuid import UUID

import pytest
from django.utils import timezone

from common.units import GiB, KiB, MiB
from hosts import collection
from hosts.collection import Collected, Collector
from hosts.keys import DatabaseKeys
from hosts.models import Generation, Host, StoredObject, Volume
from hosts.services import (
    attach_volume,
    detach_volume,
    new_volume,
    packs_to_rewrite,
    publish_commit,
)
from hosts.volumes import collect, commit
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.cache import ObjectCache
from hosts.volumes.commit import Commit, import_image, load_root
from hosts.volumes.keys import Keyring
from hosts.volumes.objects import StoreConfig
from hosts.volumes.reader import ReaderMemory, VolumeReader
from hosts.volumes.store import S3ObjectStore
from tests.hosts.volumes.memory_store import MemoryStore
from tests.hosts.volumes.overlays import commit_overlays, write_overlay
from tests.killed import Processes

DEVICE_BYTES = 1 * GiB
GRACE = timedelta(hours=6)
CONTENT_BYTES = 2 * KiB
"""Of each block that tests write; the rest is zeros, so that they are quick."""

PACK_BYTES = 16 * KiB

SETTLE_RUNS = 40
LOCK_FREE_S = 20

Content = dict[int, bytes]


class World:
    """Volumes of some owners, what each of their generations must read, and the collector."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        # Ahead of the rows' own clock: every row is one that the collector looks at.
        self.now = timezone.now() + timedelta(days=1)
        self.store = MemoryStore()
        self.store.clock = lambda: self.now
        self.cache = ObjectCache(
            folder / "cache", budget_bytes=256 * MiB, reader=self.store, patience_s=0
        )
        self.random = Random(1)
        self.contents: dict[int, Content] = {}
        self.host = Host.objects.create(
            name="collecting",
            gate_host="127.0.0.1",
            gate_port=1,
            gate_public_key="ssh-ed25519 AAAA",
            subnet="10.99.0.0/24",
            memory_bytes=GiB,
        )
        monkeypatch.setattr("hosts.collection.timezone.now", lambda: self.now)
        # Packs of some blocks, instead of thousands.
        monkeypatch.setattr(commit, "PACK_BYTES", PACK_BYTES)
        monkeypatch.setattr(collect, "PACK_BYTES", PACK_BYTES)

    def pass_time(self, span: timedelta) -> datetime:
        self.now += span
        return self.now

    def block(self) -> bytes:
        """Make a block that no other is equal to."""
        return self.random.randbytes(CONTENT_BYTES).ljust(BLOCK_BYTES, b"\0")

    def blocks(self, *numbers: int) -> dict[int, bytes | None]:
        return {number: self.block() for number in numbers}

    # -- what hosts and services do -----------------------------------------------------

    def import_volume(self, owner: str, numbers: range = range(20)) -> Generation:
        """Make a volume with an image."""
        volume = new_volume(owner=owner)
        content = {number: self.block() for number in numbers}
        image = self.folder / "image"
        with image.open("wb") as file:
            for number, block in content.items():
                file.seek(number * BLOCK_BYTES)
                file.write(block)
        made = import_image(
            image,
            volume_id=volume.pk,
            store=self.store,
            size_bytes=DEVICE_BYTES,
            keyring=self.keyring(),
        )
        return self.publish(volume, made, content, Generation.Kind.BASE)

    def keyring(self) -> Keyring:
        return Keyring(DatabaseKeys())

    def attach(self, volume: Volume) -> Volume:
        return attach_volume(volume.pk, host=self.host, purpose=Volume.Purpose.RUN)

    def detach(self, volume: Volume) -> None:
        detach_volume(volume.pk, epoch=Volume.objects.get(pk=volume.pk).epoch)

    def upload(self, volume: Volume, writes: Mapping[int, bytes | None]) -> Commit | None:
        """Commit writes of an attached volume, and do not publish."""
        volume = Volume.objects.select_related("head").get(pk=volume.pk)
        assert volume.head is not None
        return commit_overlays(
            [write_overlay(self.folder / "overlay", DEVICE_BYTES, writes)],
            base_root_key=volume.head.root_key,
            volume_id=volume.pk,
            epoch=volume.epoch,
            store=self.store,
            cache=self.cache,
            keyring=self.keyring(),
            rewrite=packs_to_rewrite(volume.pk),
        )

    def publish(
        self,
        volume: Volume,
        made: Commit,
        content: Content,
        kind: Generation.Kind = Generation.Kind.BACKGROUND,
        epoch: int | None = None,
    ) -> Generation:
        epoch = Volume.objects.get(pk=volume.pk).epoch if epoch is None else epoch
        generation = publish_commit(volume.pk, epoch=epoch, kind=kind, commit=made)
        self.contents[generation.pk] = content
        return generation

    def write(self, volume: Volume, writes: Mapping[int, bytes | None]) -> Generation | None:
        """Commit and publish writes of an attached volume."""
        head = Volume.objects.get(pk=volume.pk).head_id
        assert head is not None
        made = self.upload(volume, writes)
        if made is None:
            return None
        content = {
            number: block
            for number, block in (self.contents[head] | dict(writes)).items()
            if block is not None
        }
        return self.publish(volume, made, content)

    def collect(self) -> Collected:
        return self.collector().collect()

    def sweep(self) -> Collected:
        return self.collector().sweep_orphans()

    def collector(self) -> Collector:
        return Collector(self.store, self.cache, DatabaseKeys(), grace=GRACE)

    def settle(self) -> None:
        """Let the collector work, a grace apart, until it finds nothing more to do."""
        for _ in range(SETTLE_RUNS):
            done = self.collect()
            is_waiting = StoredObject.objects.filter(dead_at__isnull=False).exists()
            if not (done.buried or done.moved or is_waiting):
                return
            self.pass_time(GRACE + timedelta(minutes=1))
        raise AssertionError("The collector does not come to an end.")

    # -- what must be true ----------------------------------------------------------------

    def check(self) -> None:
        """Every generation that has a row reads as it was written, from the store alone."""
        cache = ObjectCache(
            self.folder / f"cold{self.random.random()}",
            budget_bytes=256 * MiB,
            reader=self.store,
            patience_s=0,
        )
        for generation in Generation.objects.all():
            keyring = self.keyring()
            root = load_root(self.store, generation.root_key, keyring)
            reader = VolumeReader(root, ReaderMemory(cache), keyring)
            content = self.contents[generation.pk]
            for number in range(64):
                expected = content.get(number, bytes(BLOCK_BYTES))
                assert reader.read_block(number) == expected, f"{generation} {number}"

    def named_keys(self) -> set[str]:
        """List what the live roots name, read without the collector."""
        keys: set[str] = set()
        for root_key in Generation.objects.values_list("root_key", flat=True):
            root = load_root(self.store, root_key, self.keyring())
            keys |= {root_key}
            keys |= {pack.key("packs") for pack in root.packs}
            keys |= {name.key("leaves") for name in root.objects}
        return keys

    def row_keys(self) -> set[str]:
        return set(StoredObject.objects.values_list("key", flat=True))

    def packs_of(self, volume_id: UUID) -> set[str]:
        return {key for key, _ in self.store.keys(f"packs/{volume_id.hex}")}

    def stored_keys(self) -> set[str]:
        kinds = ("packs/", "leaves/", "roots/")
        return {key for kind in kinds for key, _ in self.store.keys(kind)}


class StoredWorld(World):
    """The same in a real store, which collectors in other processes see as well."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, config: StoreConfig
    ) -> None:
        super().__init__(folder, monkeypatch)
        self.config = config
        self.store = cast(MemoryStore, S3ObjectStore(config))
        self.cache = ObjectCache(
            folder / "cache", budget_bytes=256 * MiB, reader=self.store, patience_s=0
        )

    def collect_elsewhere(
        self, processes: Processes, operation: str, failpoints: str = ""
    ) -> int:
        """Collect or sweep in another process; negative is the signal that ended it."""
        return processes.run(
            be_collector,
            asdict(self.config),
            str(self.folder),
            self.now.isoformat(),
            operation,
            failpoints=failpoints,
        )


def be_collector(store: dict[str, Any], folder: str, now: str, operation: str) -> None:
    """Be the process of a collector, at a time of its own."""
    for module in (commit, collect):
        setattr(module, "PACK_BYTES", PACK_BYTES)  # noqa: B010 - the types call it a constant
    timezone.now = lambda: datetime.fromisoformat(now)
    objects = S3ObjectStore(StoreConfig(**store))
    cache = ObjectCache(
        Path(folder) / "elsewhere", budget_bytes=256 * MiB, reader=objects, patience_s=0
    )
    collector = Collector(objects, cache, DatabaseKeys(), grace=GRACE)
    deadline = time.monotonic() + LOCK_FREE_S
    while True:
        with collection._alone() as is_alone:
            if is_alone:
                collector.collect() if operation == "collect" else collector.sweep_orphans()
                return
        if time.monotonic() > deadline:
            raise AssertionError("a collector that was killed keeps the others out")
        time.sleep(0.05)
