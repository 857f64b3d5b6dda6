"""`/api/v1/sandboxes` and below: list, show, change, pause, resume, refresh, delete."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from accounts.models import Team
from billing.costs import cost_of
from common.units import GiB
from sandboxes import operations, services
from sandboxes.models import Sandbox
from tests.fakes.host import FakeHost

URL = "/api/v1/sandboxes"
State = Sandbox.State

Claim = Callable[..., Sandbox]


def data_of(response: Any, status: int = 200) -> Any:
    assert response.status_code == status, response.content
    body = response.json()
    assert body["success"] is True
    return body["data"]


def error_of(response: Any, status: int) -> Any:
    assert response.status_code == status, response.content
    body = response.json()
    assert body["success"] is False
    return body["error"]


def nulls_in(value: object) -> list[str]:
    assert isinstance(value, dict)
    return [name for name, inner in value.items() if inner is None]


def test_a_running_sandbox_is_shown_in_full(alice: APIClient, running: Sandbox) -> None:
    data = data_of(alice.get(f"{URL}/{running.id}"))

    assert data["id"] == running.id
    assert data["status"] == "running"
    assert data["paused"] is False
    assert data["template_id"] == "default"
    assert data["team_id"] == str(running.team_id)
    assert data["runtime_generation"] == 1
    assert data["runtime_id"] == data["pod_name"] == running.runtime_id != ""
    assert data["resources"] == {"memory": data["memory"]} == {"memory": "512Mi"}
    assert data["services"] == []
    assert data["auto_resume"] is True
    assert not {"ssh", "expires_at", "hard_expires_at", "health"} & data.keys()
    assert nulls_in(data) == []


def test_its_cost_is_the_one_of_the_bill(alice: APIClient, running: Sandbox) -> None:
    shown = Decimal(data_of(alice.get(f"{URL}/{running.id}"))["cost_usd"])

    assert 0 <= shown <= cost_of([running.id])[running.id]


def test_a_paused_sandbox_has_no_runtime(
    alice: APIClient, machine: FakeHost, running: Sandbox
) -> None:
    services.pause_sandbox(sandbox=running)
    operations.pause(running.id)

    data = data_of(alice.get(f"{URL}/{running.id}"))

    assert (data["status"], data["paused"], data["runtime_id"]) == ("paused", True, "")


def test_its_status_is_shown(alice: APIClient, running: Sandbox) -> None:
    data = data_of(alice.get(f"{URL}/{running.id}/status"))

    assert data["sandbox_id"] == running.id
    assert data["status"] == "running"
    assert data["runtime_id"] == running.runtime_id
    assert nulls_in(data) == []


def test_a_list_is_paged_newest_first(alice: APIClient, claim: Claim) -> None:
    ids = [claim().id for _ in range(3)][::-1]

    first = data_of(alice.get(URL, {"limit": 2, "offset": 0}))
    second = data_of(alice.get(URL, {"limit": 2, "offset": 2}))

    assert [one["id"] for one in first["sandboxes"]] == ids[:2]
    assert [one["id"] for one in second["sandboxes"]] == ids[2:]
    assert (first["count"], first["has_more"]) == (3, True)
    assert (second["count"], second["has_more"]) == (3, False)


def test_a_list_is_filtered(alice: APIClient, claim: Claim) -> None:
    asleep, starting = claim(), claim()
    Sandbox.objects.filter(pk=asleep.pk).update(state=State.PAUSED, host=None)

    def listed(**query: str) -> list[str]:
        return [one["id"] for one in data_of(alice.get(URL, query))["sandboxes"]]

    assert listed(paused="true") == listed(status="paused") == [asleep.id]
    assert listed(paused="false") == listed(status="starting") == [starting.id]
    assert listed(template_id="default") == [starting.id, asleep.id]
    assert listed(template_id="other") == []


def test_a_sandbox_that_pauses_or_resumes_is_listed_as_clients_see_it(
    alice: APIClient, claim: Claim
) -> None:
    pausing, resuming = claim(), claim()
    Sandbox.objects.filter(pk=pausing.pk).update(state=State.PAUSING)
    Sandbox.objects.filter(pk=resuming.pk).update(state=State.RESUMING)

    running = data_of(alice.get(URL, {"status": "running"}))["sandboxes"]
    starting = data_of(alice.get(URL, {"status": "starting"}))["sandboxes"]

    assert [one["id"] for one in running] == [pausing.id]
    assert [one["id"] for one in starting] == [resuming.id]


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "0"},
        {"limit": "201"},
        {"limit": "x"},
        {"offset": "-1"},
        {"status": "pausing"},
        {"paused": "maybe"},
    ],
)
def test_a_bad_query_is_refused_by_name(
    alice: APIClient, alices_team: Team, query: dict[str, str]
) -> None:
    error = error_of(alice.get(URL, query), 400)

    assert list(error["details"]) == list(query)


def test_only_the_teams_own_are_listed(
    alice: APIClient, mallory: APIClient, claim: Claim
) -> None:
    claim()

    assert data_of(mallory.get(URL)) == {"sandboxes": [], "count": 0, "has_more": False}
    assert data_of(alice.get(URL))["count"] == 1


def test_its_lifetime_can_be_changed(alice: APIClient, running: Sandbox) -> None:
    config = {"ttl": 100, "hard_ttl": 1000, "auto_resume": False}

    data = data_of(alice.put(f"{URL}/{running.id}", {"config": config}, format="json"))

    running.refresh_from_db()
    assert (running.ttl_s, running.hard_ttl_s, running.auto_resume) == (100, 1000, False)
    assert running.expires_at is not None
    assert data["auto_resume"] is False
    assert data["expires_at"].startswith(running.expires_at.isoformat()[:19])
    assert data["hard_expires_at"].endswith("Z")


def test_a_limit_of_0_is_off(alice: APIClient, claim: Claim) -> None:
    sandbox = claim(ttl_s=50)

    data = data_of(alice.put(f"{URL}/{sandbox.id}", {"config": {"ttl": 0}}, format="json"))

    assert "expires_at" not in data


def test_a_ttl_beyond_the_hard_one_that_it_has_is_refused(
    alice: APIClient, claim: Claim
) -> None:
    sandbox = claim(hard_ttl_s=50)

    error = error_of(
        alice.put(f"{URL}/{sandbox.id}", {"config": {"ttl": 60}}, format="json"), 400
    )

    assert error["message"].startswith("ttl")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"resources": {"memory": "1Gi"}, "ttl": 5}, "config.resources"),
        ({"env_vars": {}}, "config.env_vars"),
        ({"services": [{"id": "web", "port": 80}]}, "config.services"),
        ({"network": {}}, "config.network"),
        ({"ttl": -1}, "config.ttl"),
    ],
)
def test_a_bad_change_is_refused_by_name(
    alice: APIClient, running: Sandbox, config: dict[str, object], field: str
) -> None:
    error = error_of(alice.put(f"{URL}/{running.id}", {"config": config}, format="json"), 400)

    assert list(error["details"]) == [field]


def test_memory_of_a_running_sandbox_is_changed_by_a_restart(
    alice: APIClient, running: Sandbox
) -> None:
    config = {"resources": {"memory": "1Gi"}}

    data = data_of(alice.put(f"{URL}/{running.id}", {"config": config}, format="json"))

    running.refresh_from_db()
    assert running.memory_bytes == GiB
    assert running.state == State.PAUSING
    assert running.resume_when_paused
    assert data["memory"] == "1Gi"


def test_a_pause_is_accepted_then_done(
    alice: APIClient, machine: FakeHost, running: Sandbox
) -> None:
    accepted = data_of(alice.post(f"{URL}/{running.id}/pause", {}, format="json"), 202)
    operations.pause(running.id)
    done = data_of(alice.post(f"{URL}/{running.id}/pause", {"memory": False}, format="json"))

    assert accepted == {"sandbox_id": running.id, "paused": False, "status": "running"}
    assert done == {"sandbox_id": running.id, "paused": True, "status": "paused"}


def test_a_pause_needs_no_body(alice: APIClient, running: Sandbox) -> None:
    assert alice.post(f"{URL}/{running.id}/pause").status_code == 202


@pytest.mark.parametrize("act", ["pause", "resume"])
def test_memory_cannot_be_kept_in_this_version(
    alice: APIClient, running: Sandbox, act: str
) -> None:
    response = alice.post(f"{URL}/{running.id}/{act}", {"memory": True}, format="json")

    assert "not available in this version" in error_of(response, 400)["message"]
    running.refresh_from_db()
    assert running.state == State.RUNNING


def test_a_resume_raises_the_generation_by_one(
    alice: APIClient, machine: FakeHost, running: Sandbox
) -> None:
    services.pause_sandbox(sandbox=running)
    operations.pause(running.id)

    accepted = data_of(alice.post(f"{URL}/{running.id}/resume", {}, format="json"))
    operations.boot(running.id)
    done = data_of(alice.post(f"{URL}/{running.id}/resume", {}, format="json"))

    assert accepted == {"sandbox_id": running.id, "resumed": False, "status": "starting"}
    assert done == {"sandbox_id": running.id, "resumed": True, "status": "running"}
    assert data_of(alice.get(f"{URL}/{running.id}"))["runtime_generation"] == 2


def test_a_resume_counts_against_the_quota(
    alice: APIClient, machine: FakeHost, running: Sandbox, alices_team: Team
) -> None:
    services.pause_sandbox(sandbox=running)
    operations.pause(running.id)
    alices_team.running_limit = 0
    alices_team.save()

    response = alice.post(f"{URL}/{running.id}/resume", {}, format="json")

    assert error_of(response, 429)["code"] == "quota_exceeded"


def test_a_sandbox_that_starts_cannot_be_paused(alice: APIClient, claim: Claim) -> None:
    sandbox = claim()

    assert error_of(alice.post(f"{URL}/{sandbox.id}/pause"), 409)["code"] == "conflict"


def test_a_refresh_pushes_both_deadlines_out(alice: APIClient, claim: Claim) -> None:
    sandbox = claim(ttl_s=100, hard_ttl_s=200)
    soon = timezone.now() + timedelta(seconds=5)
    Sandbox.objects.filter(pk=sandbox.pk).update(expires_at=soon, hard_expires_at=soon)

    data = data_of(alice.post(f"{URL}/{sandbox.id}/refresh", {}, format="json"))

    sandbox.refresh_from_db()
    assert sandbox.expires_at is not None
    assert sandbox.hard_expires_at is not None
    assert soon < sandbox.expires_at < sandbox.hard_expires_at
    assert data["sandbox_id"] == sandbox.id
    assert data["expires_at"] < data["hard_expires_at"]


def test_a_refresh_can_replace_the_span(alice: APIClient, claim: Claim) -> None:
    sandbox = claim()

    data = data_of(alice.post(f"{URL}/{sandbox.id}/refresh", {"duration": 60}, format="json"))

    assert "expires_at" in data
    error_of(alice.post(f"{URL}/{sandbox.id}/refresh", {"duration": -1}, format="json"), 400)


def test_a_deleted_sandbox_is_not_found(
    alice: APIClient, machine: FakeHost, running: Sandbox
) -> None:
    deleted = data_of(alice.delete(f"{URL}/{running.id}"), 202)
    during = data_of(alice.get(f"{URL}/{running.id}"))
    operations.destroy(running.id)

    assert deleted["message"]
    assert during["status"] == "terminating"
    assert error_of(alice.get(f"{URL}/{running.id}"), 404)["code"] == "not_found"
    assert error_of(alice.delete(f"{URL}/{running.id}"), 404)["code"] == "not_found"


def test_a_second_delete_is_accepted_too(alice: APIClient, running: Sandbox) -> None:
    data_of(alice.delete(f"{URL}/{running.id}"), 202)
    data_of(alice.delete(f"{URL}/{running.id}"), 202)
