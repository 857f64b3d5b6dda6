"""Which moments of a sandbox's disk are kept, and for how long."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from hosts.models import Generation, Volume
from hosts.services import new_volume
from sandboxes.history import Thinner, Tier, superfluous
from sandboxes.models import Cut, FileView, Sandbox, Snapshot, Template, new_snapshot_id
from tests.fakes.host import FakeHost

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
KEPT = (
    Tier(timedelta(hours=1), timedelta(0)),
    Tier(timedelta(hours=6), timedelta(minutes=1)),
    Tier(timedelta(hours=24), timedelta(minutes=10)),
)


def kept_of(ages_s: Sequence[float]) -> list[float]:
    """Return which of the moments of these ages stay."""
    moments = [(index, NOW - timedelta(seconds=age)) for index, age in enumerate(ages_s)]
    dropped = set(superfluous(moments, now=NOW, kept=KEPT))
    return [age for index, age in enumerate(ages_s) if index not in dropped]


def test_all_of_the_last_hour_are_kept() -> None:
    ages = [float(age) for age in range(3_600, -1, -10)]

    assert kept_of(ages) == ages


def test_of_each_minute_the_last_is_kept_for_six_hours() -> None:
    assert kept_of([7_259, 7_230, 7_201, 7_199, 7_150]) == [7_201, 7_150]


def test_of_each_ten_minutes_the_last_is_kept_for_a_day() -> None:
    ages = [36_000 + 599, 36_000 + 300, 36_000 + 1, 36_000 - 10, 36_000 - 500]

    assert kept_of(ages) == [36_000 + 1, 36_000 - 500]


def test_none_is_kept_for_longer() -> None:
    assert kept_of([86_401.0, 86_399.0]) == [86_399.0]


def test_a_day_of_commits_each_ten_seconds_keeps_as_many_as_it_says() -> None:
    ages = [float(age) for age in range(100_000, 0, -10)]

    kept = kept_of(ages)

    assert len(kept) == pytest.approx(360 + 300 + 108, abs=3)


def test_what_is_kept_does_not_depend_on_when_it_is_thinned() -> None:
    start = NOW - timedelta(hours=12)
    moments = [(n, start + timedelta(seconds=7 * n)) for n in range(3_000)]
    at_once = set(superfluous(moments, now=NOW, kept=KEPT))

    left = list(moments)
    for minutes in range(0, 721, 30):
        now = start + timedelta(minutes=minutes)
        past = [one for one in left if one[1] <= now]
        dropped = set(superfluous(past, now=now, kept=KEPT))
        left = [one for one in left if one[0] not in dropped]

    assert {n for n, _ in left} == {n for n, _ in moments} - at_once


# -- rows ---------------------------------------------------------------------------------


def add(volume: Volume, *, hours: float) -> Generation:
    """Add an old generation to a volume, behind its head."""
    last = volume.generations.order_by("-number").first()
    return Generation.objects.create(
        volume=volume,
        number=1 + (last.number if last else 0),
        epoch=1,
        kind=Generation.Kind.BACKGROUND,
        root_key=f"roots/{volume.pk.hex}/00000001/{hours}",
        size_bytes=1 << 40,
        created_at=timezone.now() - timedelta(hours=hours),
    )


def left(volume: Volume) -> set[int]:
    return set(volume.generations.values_list("pk", flat=True))


def test_old_moments_go_and_what_anything_names_stays(
    machine: FakeHost, paused: Sandbox, template: Template
) -> None:
    volume = paused.volume
    old = [add(volume, hours=30 - n) for n in range(6)]
    free, in_snapshot, in_template, in_cut, in_view, as_head = old
    Snapshot.objects.create(
        id=new_snapshot_id(), team=paused.team, sandbox=paused, generation=in_snapshot
    )
    Template.objects.create(team=paused.team, template_id="t", spec={}, generation=in_template)
    Cut.objects.create(sandbox=paused, state="done", generation=in_cut)
    FileView.objects.create(
        sandbox=paused,
        generation=in_view,
        volume=new_volume(owner=str(paused.team_id), head=in_view),
    )
    new_volume(owner=str(paused.team_id), head=as_head)
    Volume.objects.filter(pk=volume.pk).update(head=add(volume, hours=0))

    Thinner().step()

    assert free.pk not in left(volume)
    named = {one.pk for one in (in_snapshot, in_template, in_cut, in_view, as_head)}
    assert named <= left(volume)


def test_the_platforms_own_disks_are_left_alone(template: Template) -> None:
    assert template.generation is not None
    old = add(template.generation.volume, hours=50)

    Thinner().step()

    assert Generation.objects.filter(pk=old.pk).exists()


def test_a_deleted_disk_lets_all_go_but_what_others_name(
    machine: FakeHost, paused: Sandbox
) -> None:
    volume = paused.volume
    fork_head, _ = add(volume, hours=0.1), add(volume, hours=0.01)
    child = new_volume(owner=str(paused.team_id), head=fork_head)
    Volume.objects.filter(pk=volume.pk).update(deleted_at=timezone.now())

    Thinner().step()

    assert left(volume) == {fork_head.pk}
    volume.refresh_from_db()
    child.refresh_from_db()
    assert volume.head is None
    assert child.head == fork_head


def test_it_goes_round_many_disks(
    machine: FakeHost,
    paused: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    monkeypatch.setattr("sandboxes.history.BATCH", 2)
    volumes = []
    for _ in range(5):
        volume = new_volume(owner=str(paused.team_id))
        add(volume, hours=40)
        Volume.objects.filter(pk=volume.pk).update(head=add(volume, hours=30))
        volumes.append(volume)
    thinner = Thinner()

    for _ in range(4):
        with django_assert_max_num_queries(12):
            thinner.step()

    assert all(volume.generations.count() == 1 for volume in volumes)
