"""`POST /api/v1/sandboxes`."""

from typing import Any

import pytest
from django.utils import timezone
from dramatiq.brokers.stub import StubBroker
from rest_framework.test import APIClient

from accounts.models import Team
from common.units import GiB, MiB
from hosts.models import Host
from sandboxes.models import Sandbox, Template

URL = "/api/v1/sandboxes"

pytestmark = pytest.mark.usefixtures("host", "queue")


@pytest.fixture(autouse=True)
def _template(template: Template) -> None:
    pass


def claim(client: APIClient, config: object = None, **more: Any) -> Any:
    body: dict[str, Any] = {"template": "default"}
    if config is not None:
        body["config"] = config
    return client.post(URL, body | more.pop("body", {}), format="json", **more)


def test_it_records_the_sandbox_and_answers_201(alice: APIClient, alices_team: Team) -> None:
    response = claim(alice)

    assert response.status_code == 201
    data = response.json()["data"]
    sandbox = Sandbox.objects.get()
    assert data["sandbox_id"] == sandbox.id
    assert data["status"] == "starting"
    assert data["template"] == "default"
    assert data["memory"] == "512Mi"
    assert data["runtime_id"] == data["pod_name"] == sandbox.runtime_id
    assert "cluster_id" not in data
    assert sandbox.team == alices_team


def test_its_config_is_kept(alice: APIClient) -> None:
    config = {
        "env_vars": {"A": "x\ny $(id) 'é'", "EMPTY": ""},
        "resources": {"memory": "1.5Gi"},
        "ttl": 60,
        "hard_ttl": 3600,
        "auto_resume": False,
    }

    response = claim(alice, config)

    assert response.status_code == 201
    sandbox = Sandbox.objects.get()
    assert sandbox.env_vars == config["env_vars"]
    assert sandbox.memory_bytes == 1536 * MiB
    assert (sandbox.ttl_s, sandbox.hard_ttl_s, sandbox.auto_resume) == (60, 3600, False)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"ttl": -1}, "config.ttl"),
        ({"ttl": "5"}, "config.ttl"),
        ({"ttl": 1.5}, "config.ttl"),
        ({"ttl": True}, "config.ttl"),
        ({"ttl": None}, "config.ttl"),
        ({"ttl": 20, "hard_ttl": 10}, "config.ttl"),
        ({"hard_ttl": 10**12}, "config.hard_ttl"),
        ({"auto_resume": "yes"}, "config.auto_resume"),
        ({"resources": {"memory": "64Mi"}}, "config.resources.memory"),
        ({"resources": {"memory": "32Gi"}}, "config.resources.memory"),
        ({"resources": {"memory": 512}}, "config.resources.memory"),
        ({"resources": {"cpu": "1"}}, "config.resources.cpu"),
        ({"env_vars": {"1A": "x"}}, "config.env_vars.1A"),
        ({"env_vars": {"A=B": "x"}}, "config.env_vars.A=B"),
        ({"env_vars": {"A": 1}}, "config.env_vars.A"),
        ({"env_vars": {"A": "a\0b"}}, "config.env_vars.A"),
        ({"env_vars": {f"A{n}": "" for n in range(501)}}, "config.env_vars"),
        ({"env_vars": {"A": "x" * 300_000}}, "config.env_vars"),
        ({"network": {"mode": "block-all"}}, "config.network"),
        ({"webhook": {"url": "http://x"}}, "config.webhook"),
        ({"services": [{"id": "web", "port": 80}]}, "config.services"),
        ({"nonsense": 1}, "config.nonsense"),
        ([], "config"),
    ],
)
def test_it_refuses_a_bad_config_and_names_the_field(
    alice: APIClient, config: object, field: str
) -> None:
    response = claim(alice, config)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "bad_request"
    assert list(error["details"]) == [field]
    assert error["message"].startswith(f"{field}: ")
    assert not Sandbox.objects.exists()


@pytest.mark.parametrize("more", [{"snapshot": "x"}, {"memory": "1Gi"}, {"template": ""}])
def test_it_refuses_other_fields(alice: APIClient, more: dict[str, object]) -> None:
    response = claim(alice, body=more)

    assert response.status_code == 400
    assert list(response.json()["error"]["details"]) == list(more)


def test_an_unknown_template_is_not_found(alice: APIClient) -> None:
    response = claim(alice, body={"template": "nosuch"})

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_the_template_of_another_team_is_not_found(
    alice: APIClient, mallorys_team: Team, template: Template
) -> None:
    Template.objects.create(
        team=mallorys_team, template_id="secret", spec={}, generation=template.generation
    )

    assert claim(alice, body={"template": "secret"}).status_code == 404


def test_a_template_that_is_not_ready_is_refused(alice: APIClient) -> None:
    Template.objects.create(template_id="soon", spec={})

    response = claim(alice, body={"template": "soon"})

    assert response.status_code == 409
    assert response.json()["error"]["code"] == "template_not_ready"


def test_the_same_key_and_body_give_the_same_sandbox(alice: APIClient) -> None:
    first = claim(alice, {"ttl": 5}, headers={"Idempotency-Key": "k"})
    again = claim(alice, {"ttl": 5}, headers={"Idempotency-Key": "k"})

    assert first.status_code == again.status_code == 201
    assert first.json()["data"]["sandbox_id"] == again.json()["data"]["sandbox_id"]
    assert Sandbox.objects.count() == 1


def test_the_same_key_with_another_body_is_refused(alice: APIClient) -> None:
    claim(alice, {"ttl": 5}, headers={"Idempotency-Key": "k"})

    response = claim(alice, {"ttl": 6}, headers={"Idempotency-Key": "k"})

    assert response.status_code == 409
    assert Sandbox.objects.count() == 1


def test_a_key_of_another_team_is_another_key(alice: APIClient, mallory: APIClient) -> None:
    first = claim(alice, headers={"Idempotency-Key": "k"})
    other = claim(mallory, headers={"Idempotency-Key": "k"})

    assert first.json()["data"]["sandbox_id"] != other.json()["data"]["sandbox_id"]


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_has_1_to_255_bytes(alice: APIClient, key: str) -> None:
    response = claim(alice, headers={"Idempotency-Key": key})

    assert response.status_code == 400
    assert "Idempotency-Key" in response.json()["error"]["message"]


def test_a_team_is_kept_to_its_quota(alice: APIClient, alices_team: Team) -> None:
    alices_team.running_limit = 1
    alices_team.save()
    claim(alice)

    response = claim(alice)

    assert response.status_code == 429
    assert response.json()["error"]["code"] == "quota_exceeded"


def test_without_room_on_any_host_it_answers_503(alice: APIClient, host: Host) -> None:
    host.memory_bytes = 1 * GiB
    host.seen_at = timezone.now()
    host.save()

    response = claim(alice, {"resources": {"memory": "2Gi"}})

    assert response.status_code == 503
    assert not Sandbox.objects.exists()


def test_who_may_only_look_may_not_claim(bob: APIClient) -> None:
    assert claim(bob).status_code == 403


def test_it_wants_a_key(nobody: APIClient) -> None:
    assert claim(nobody).status_code == 401


def test_a_claim_queues_the_boot_at_the_host(
    alice: APIClient,
    queue: StubBroker,
    host: Host,
    django_capture_on_commit_callbacks: Any,
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        claim(alice)

    assert queue.queues[host.queue].qsize() == 1


def test_no_services_are_what_the_sdk_asks_for_of_itself(alice: APIClient) -> None:
    body = {"template": "default", "config": {"ttl": 60, "services": []}}

    response = alice.post(URL, body, format="json")

    assert response.status_code == 201
    assert Sandbox.objects.get().ttl_s == 60
