"""A day of a busy disk's churn, simulated: what is stored stays near what is needed."""

from datetime import datetime, timedelta
from pathlib import Path
from random import Random

import pytest
from django.conf import settings

from common.units import KiB
from hosts.collection import unpinned
from hosts.models import Generation, Volume
from hosts.services import new_volume
from hosts.volumes import collect, commit
from tests.hosts import collecting
from tests.hosts.collecting import World

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
COMMIT_EVERY = 10
COLLECT_EVERY = 20
"""Minutes."""

# As the history is thinned, with a commit every ten minutes where there is one every ten
# seconds: younger than (a), one is kept in each (b).
KEPT = ((HOUR, COMMIT_EVERY * MINUTE), (6 * HOUR, 30 * MINUTE), (24 * HOUR, HOUR))
MOST = 1.5


class Day:
    """A disk that runs, with a hot part, its history, and forks that sleep for hours."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = Random(5)
        base = world.import_volume("", range(10))
        self.at = {base.pk: world.now}
        self.running = [world.attach(new_volume(owner="7", head=base)) for _ in range(1)]
        for volume in self.running:
            self.note(world.write(volume, world.blocks(*range(300))))
        self.snapshots: list[tuple[datetime, Volume]] = []
        self.ratios: list[float] = []

    def note(self, generation: Generation | None) -> None:
        if generation is not None:
            self.at[generation.pk] = self.world.now

    def minute(self, number: int) -> None:
        if number % COMMIT_EVERY == 0:
            for volume in self.running:
                hot = self.random.sample(range(40), 6)
                cold = self.random.sample(range(40, 300), 3)
                self.note(self.world.write(volume, self.world.blocks(*hot, *cold)))
        if number % 90 == 0:
            self.keep_snapshot()
        if number % COLLECT_EVERY == 0:
            self.thin()
            self.world.collect()
            self.ratios.append(self.stored_bytes() / self.live_bytes())

    def keep_snapshot(self) -> None:
        """Name a head by a fork that sleeps; the oldest go after five hours."""
        source = Volume.objects.get(pk=self.random.choice(self.running).pk)
        assert source.head is not None
        fork = new_volume(owner="7", head=source.head)
        self.snapshots.append((self.world.now, fork))
        for at, volume in list(self.snapshots):
            if self.world.now - at > 5 * HOUR:
                Volume.objects.filter(pk=volume.pk).update(deleted_at=self.world.now)
                self.snapshots.remove((at, volume))

    def thin(self) -> None:
        for volume in self.running:
            last: dict[timedelta, datetime] = {}
            rows = Generation.objects.filter(volume=volume).order_by("-number")
            for row in rows:
                age = self.world.now - self.at[row.pk]
                step = next((step for limit, step in KEPT if age < limit), None)
                if (
                    step is not None
                    and last.get(step, self.world.now + step) - step >= (self.at[row.pk])
                ):
                    last[step] = self.at[row.pk]
                    continue
                unpinned(Generation.objects.filter(pk=row.pk)).delete()

    def stored_bytes(self) -> int:
        return sum(len(body) for body in self.world.store.objects.values())

    def live_bytes(self) -> int:
        """Sum what live roots need, each block once however many places it is in."""
        reader = self.world.collector()._reader
        blocks: dict[bytes, int] = {}
        leaves: dict[bytes, int] = {}
        roots = set(Generation.objects.values_list("root_key", flat=True))
        for key in roots:
            root = reader.root(key)
            new = [ref for ref in root.leaves.values() if ref.digest not in leaves]
            for ref in new:
                leaves[ref.digest] = ref.length
                for _, entry in reader.leaf(root, ref).entries():
                    blocks[entry.digest] = entry.length
        index = sum(len(self.world.store.objects[key]) for key in roots)
        return sum(blocks.values()) + sum(leaves.values()) + index


def test_a_days_churn_keeps_what_is_stored_under_one_and_a_half_of_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db: None
) -> None:
    monkeypatch.setattr(collecting, "GRACE", timedelta(seconds=settings.COLLECT_GRACE_S))
    # Blocks and packs in the measure of real ones, so that the index weighs what it does.
    monkeypatch.setattr(collecting, "CONTENT_BYTES", 8 * KiB)
    world = World(tmp_path, monkeypatch)
    monkeypatch.setattr(commit, "PACK_BYTES", 64 * KiB)
    monkeypatch.setattr(collect, "PACK_BYTES", 64 * KiB)
    day = Day(world)
    for number in range(24 * 60):
        world.pass_time(MINUTE)
        day.minute(number)
    world.check()
    assert max(day.ratios) < MOST
