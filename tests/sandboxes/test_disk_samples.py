"""How full disks were: what is asked and kept, what is shown, and that it stays bounded."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import time_machine
from django.test import Client
from django.utils import timezone
from rest_framework.test import APIClient

from accounts.models import Team
from hosts.guest.channel import AgentSilent
from sandboxes import disk_samples
from sandboxes.guests import guest_config
from sandboxes.models import DiskSample, Sandbox

GIB = 1024**3
STATS = {
    "disk_bytes": 4 * GIB,
    "disk_free_bytes": 3 * GIB,
    "span_bytes": 4 * GIB + 4096,
    "device_bytes": 1024 * GIB,
    "ceiling_bytes": 512 * GIB,
}


class FakeAgent:
    """Answers for every guest, or does not; counts how often it was asked."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = dict(STATS)
        self.asked = 0

    def stats(self) -> dict[str, Any]:
        self.asked += 1
        if self.answer is None:
            raise AgentSilent
        return self.answer


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    made = FakeAgent()
    monkeypatch.setattr(disk_samples, "AgentChannel", lambda *_, **__: made)
    return made


@pytest.fixture
def box(claim: Callable[..., Sandbox]) -> Sandbox:
    made = claim()
    Sandbox.objects.filter(pk=made.pk).update(state=Sandbox.State.RUNNING)
    made.refresh_from_db()
    return made


def test_a_running_sandbox_is_measured_and_not_again_at_once(
    box: Sandbox, agent: FakeAgent
) -> None:
    sample = disk_samples.record(box)
    again = disk_samples.record(box)
    forced = disk_samples.record(box, must=True)

    assert sample is not None
    assert (sample.used_bytes, sample.size_bytes) == (GIB, 4 * GIB + 4096)
    assert sample.ceiling_bytes == 512 * GIB
    assert again is None
    assert forced is not None
    assert agent.asked == 2


def test_a_guest_that_says_nothing_keeps_its_last_figures(
    box: Sandbox, agent: FakeAgent
) -> None:
    first = disk_samples.record(box)
    agent.answer = None
    second = disk_samples.record(box, must=True)
    Sandbox.objects.filter(pk=box.pk).update(state=Sandbox.State.PAUSED)
    box.refresh_from_db()
    third = disk_samples.record(box, must=True)

    assert first
    assert second
    assert third
    assert first.used_bytes == second.used_bytes == third.used_bytes
    assert agent.asked == 2  # one that sleeps is not asked


def test_one_that_never_answered_has_no_figures(box: Sandbox, agent: FakeAgent) -> None:
    agent.answer = None

    assert disk_samples.record(box) is None
    assert disk_samples.latest(box) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"disk_bytes": "4"},
        {"disk_bytes": None},
        {"disk_free_bytes": -1},
        {"span_bytes": 1 << 62},
        {"ceiling_bytes": True},
        {"ceiling_bytes": 1.5},
    ],
)
def test_figures_that_make_no_sense_are_not_kept(wrong: dict[str, Any]) -> None:
    assert disk_samples.figures_in(STATS | wrong) is None


def test_an_agent_of_an_older_release_has_fewer_figures() -> None:
    old = {name: STATS[name] for name in ("disk_bytes", "disk_free_bytes", "device_bytes")}

    found = disk_samples.figures_in(old)

    assert found == disk_samples.Figures(GIB, 4 * GIB, 1024 * GIB)


def test_samples_are_bounded_and_reach_from_the_claim_to_now(
    box: Sandbox, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_samples, "MAX_SAMPLES", 20)
    begin = timezone.now()
    for minute in range(300):
        with time_machine.travel(begin + timedelta(minutes=2 * minute), tick=False):
            disk_samples.record(box)

    kept = list(box.disk_samples.values_list("measured_at", flat=True))[::-1]
    assert 10 <= len(kept) <= 20
    assert kept[0] == begin
    assert kept[-1] == begin + timedelta(minutes=598)
    # The newer half is dense.
    assert kept[-2] == begin + timedelta(minutes=596)


def test_the_api_tells_them(
    box: Sandbox, agent: FakeAgent, alice: APIClient, mallory: APIClient
) -> None:
    before = alice.get(f"/api/v1/sandboxes/{box.id}").json()["data"]
    disk_samples.record(box)
    after = alice.get(f"/api/v1/sandboxes/{box.id}").json()["data"]

    assert mallory.get(f"/api/v1/sandboxes/{box.id}").status_code == 404
    assert "disk" not in before
    assert set(after["disk"]) == {
        "used_bytes",
        "size_bytes",
        "ceiling_bytes",
        "stored_bytes",
        "measured_at",
    }
    assert after["disk"]["used_bytes"] == GIB


def test_the_console_draws_them(
    box: Sandbox, agent: FakeAgent, alices_browser: Client, mallorys_browser: Client
) -> None:
    page = f"/sandboxes/{box.id}/disk/"
    empty = alices_browser.get(page).content.decode()
    for number in range(3):
        DiskSample.objects.create(
            sandbox=box,
            measured_at=timezone.now() - timedelta(hours=3 - number),
            used_bytes=number * GIB,
            size_bytes=4 * GIB * (1 + number // 2),
            ceiling_bytes=1024 * GIB,
            stored_bytes=0,
        )
    shown = alices_browser.get(page).content.decode()

    assert "Not measured yet" in empty
    assert "<polyline" in shown
    assert "8 GiB" in shown
    assert "1 TiB" in shown
    assert mallorys_browser.get(page).status_code == 404


def test_a_picture_stays_inside_its_frame(box: Sandbox) -> None:
    now = timezone.now()
    samples = [
        DiskSample(
            sandbox=box,
            measured_at=now + timedelta(seconds=number),
            used_bytes=used,
            size_bytes=size,
            ceiling_bytes=size,
            stored_bytes=0,
        )
        for number, (used, size) in enumerate([(0, 0), (5, 10), (40, 40), (40, 80)])
    ]

    drawn = disk_samples.picture(samples)

    assert drawn is not None
    assert disk_samples.picture(samples[:1]) is None
    for points in (drawn.used, drawn.size):
        for point in points.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= disk_samples.WIDTH
            assert 0 <= y <= disk_samples.HEIGHT


def test_a_guest_is_told_the_limit_of_its_team(box: Sandbox) -> None:
    Team.objects.filter(pk=box.team_id).update(disk_limit_bytes=7 * GIB)
    box = Sandbox.objects.select_related("team", "host").get(pk=box.pk)

    assert guest_config(box)["disk_limit_bytes"] == 7 * GIB
