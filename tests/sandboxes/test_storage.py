"""The meters of stored data follow the collector's figure."""

from datetime import timedelta
from pathlib import Path

import pytest

from accounts.models import Team
from billing.models import MeterInterval
from hosts.collection import stored_bytes_by_owner
from hosts.models import Generation
from hosts.services import new_volume
from sandboxes.storage import meter_storage, subject_of
from tests.hosts.collecting import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db: None) -> World:
    return World(tmp_path, monkeypatch)


def metered(team: Team) -> int:
    row = MeterInterval.objects.filter(
        subject_id=subject_of(team), meter="storage", period__upper_inf=True
    ).first()
    return 0 if row is None else row.quantity


def test_a_team_is_billed_for_what_the_collector_counts_and_not_for_the_base(
    world: World, alices_team: Team, mallorys_team: Team
) -> None:
    base = world.import_volume("")
    volume = world.attach(new_volume(owner=str(alices_team.pk), head=base))
    meter_storage()
    assert metered(alices_team) == 0
    for _ in range(4):
        world.write(volume, world.blocks(*range(12)))
        meter_storage()
        assert metered(alices_team) == stored_bytes_by_owner()[str(alices_team.pk)] > 0
    most = metered(alices_team)

    Generation.objects.filter(volume=volume).exclude(heads=volume).delete()
    world.collect()
    meter_storage()

    assert 0 < metered(alices_team) < most
    assert metered(alices_team) == stored_bytes_by_owner()[str(alices_team.pk)]
    assert metered(mallorys_team) == 0


def test_what_a_team_no_longer_stores_is_no_longer_billed(
    world: World, alices_team: Team
) -> None:
    base = world.import_volume(str(alices_team.pk))
    meter_storage()
    assert metered(alices_team)
    base.volume.deleted_at = world.now
    base.volume.save()
    world.pass_time(timedelta(minutes=5))
    world.collect()
    meter_storage()

    assert metered(alices_team) == 0


def test_looking_again_at_the_same_writes_no_rows(world: World, alices_team: Team) -> None:
    world.import_volume(str(alices_team.pk))
    for _ in range(3):
        meter_storage()

    assert MeterInterval.objects.count() == 1
