"""API keys, over the API and as a way in."""

import re
from datetime import timedelta

import pytest
import time_machine
from django.core.cache import cache
from django.utils import timezone
from rest_framework.test import APIClient

from accounts.models import ApiKey, AuditEvent, Role, Team, User, digest_of
from tests.conftest import client_with, make_key


@pytest.fixture(autouse=True)
def _counters_at_zero(_empty_cache: None) -> None:
    pass


def test_a_new_key_is_shown_once_and_kept_as_a_digest(
    alice: APIClient, alices_team: Team
) -> None:
    response = alice.post("/api-keys", {"name": "ci", "roles": ["developer"]}, format="json")

    assert response.status_code == 201
    data = response.json()["data"]
    assert re.fullmatch(r"s0_local_[0-9a-f]{48}", data["key"])
    assert (data["name"], data["scope"], data["roles"]) == ("ci", "team", ["developer"])
    key = ApiKey.objects.get(pk=data["id"])
    assert key.digest == digest_of(data["key"])
    assert data["key"] not in str(key.__dict__)
    assert key.hint == f"…{data['key'][-6:]}"
    assert client_with(data["key"]).get("/users/me").status_code == 200
    assert data["key"] not in alice.get("/api-keys").content.decode()


def test_a_key_is_a_developers_for_ninety_days_unless_said_otherwise(alice: APIClient) -> None:
    with time_machine.travel("2026-11-01T12:00:00Z", tick=False):
        made_at = timezone.now()
        client = alice.post("/api-keys", {"name": "plain"}, format="json")
        key = ApiKey.objects.get(pk=client.json()["data"]["id"])

    assert key.roles == ["developer"]
    assert key.expires_at == made_at + timedelta(days=90)


@pytest.mark.parametrize(
    ("expires_in", "days"),
    [("30d", 30), ("90d", 90), ("180d", 180), ("365d", 365), ("never", 36_525)],
)
def test_a_key_lives_as_long_as_asked(alice: APIClient, expires_in: str, days: int) -> None:
    body = {"name": "ci", "expires_in": expires_in}

    data = alice.post("/api-keys", body, format="json").json()["data"]

    key = ApiKey.objects.get(pk=data["id"])
    assert abs(key.expires_at - key.created_at - timedelta(days=days)) < timedelta(seconds=5)
    assert key.never_expires == (expires_in == "never")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "name"),
        ({"name": "x" * 81}, "name"),
        ({"name": "x", "roles": []}, "roles"),
        ({"name": "x", "roles": ["root"]}, "roles.0"),
        ({"name": "x", "expires_in": "1d"}, "expires_in"),
        ({"name": "x", "scope": "platform"}, "scope"),
        ({"name": "x", "colour": "red"}, "colour"),
        ({"name": "a\x00b"}, "name"),
    ],
)
def test_what_is_wrong_with_a_new_key_is_named(
    alice: APIClient, body: dict[str, object], field: str
) -> None:
    response = alice.post("/api-keys", body, format="json")

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "bad_request"
    assert field in error["details"] or field.removesuffix(".0") in error["details"]
    assert error["message"].startswith(field.removesuffix(".0"))
    assert ApiKey.objects.count() == 1


def test_a_key_makes_no_key_that_may_more_than_itself(
    alices_team: Team, alice_user: User, alice: APIClient
) -> None:
    _, secret = make_key(alices_team, alice_user, Role.DEVELOPER)

    response = client_with(secret).post(
        "/api-keys", {"name": "more", "roles": ["admin"]}, format="json"
    )

    assert response.status_code == 403
    assert response.json()["error"]["code"] == "forbidden"
    assert not ApiKey.objects.filter(name="more").exists()


def test_the_teams_keys_are_listed_newest_first(
    alice: APIClient, alices_team: Team, alice_user: User, mallory: APIClient
) -> None:
    newer, _ = make_key(alices_team, alice_user, Role.VIEWER)

    data = alice.get("/api-keys").json()["data"]["api_keys"]

    assert data[0]["id"] == str(newer.pk)
    assert {key["team_id"] for key in data} == {str(alices_team.pk)}
    assert "last_used_at" not in data[0], "null breaks the published client"
    assert data[1]["last_used_at"]


def test_a_deactivated_key_fails_at_the_very_next_request(
    alice: APIClient, alices_team: Team, alice_user: User
) -> None:
    key, secret = make_key(alices_team, alice_user, Role.VIEWER)
    client = client_with(secret)
    assert client.get("/users/me").status_code == 200

    response = alice.post(f"/api-keys/{key.pk}/deactivate")

    assert response.status_code == 200
    refused = client.get("/users/me")
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "unauthorized"
    assert refused["WWW-Authenticate"] == 'Bearer realm="api"'
    key.refresh_from_db()
    assert not key.is_active


def test_a_deleted_key_fails_at_the_very_next_request(
    alice: APIClient, alices_team: Team, alice_user: User
) -> None:
    key, secret = make_key(alices_team, alice_user, Role.VIEWER)
    client = client_with(secret)
    assert client.get("/users/me").status_code == 200

    response = alice.delete(f"/api-keys/{key.pk}")

    assert response.status_code == 200
    assert client.get("/users/me").status_code == 401
    assert not ApiKey.objects.filter(pk=key.pk).exists()


def test_a_key_can_delete_itself(alice: APIClient, alices_key: tuple[ApiKey, str]) -> None:
    assert alice.delete(f"/api-keys/{alices_key[0].pk}").status_code == 200
    assert alice.get("/users/me").status_code == 401
    assert AuditEvent.objects.get(action="api_key.delete").api_key is None


def test_an_expired_key_opens_nothing(alice: APIClient) -> None:
    with time_machine.travel(timezone.now() + timedelta(days=91)):
        assert alice.get("/users/me").status_code == 401


def test_the_key_of_a_closed_account_opens_nothing(alice: APIClient, alice_user: User) -> None:
    alice_user.is_active = False
    alice_user.save(update_fields=["is_active"])

    assert alice.get("/users/me").status_code == 401


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer s0_local_short",
        "Bearer s0_local_" + "0" * 48,
        "Bearer s0_local_" + "z" * 48,
        "Basic YTpi",
        "Bearer \xff\xfe",
        "Bearer " + "s0_" * 5000,
    ],
)
@pytest.mark.django_db
def test_nothing_but_a_key_opens(nobody: APIClient, header: str) -> None:
    response = nobody.get("/users/me", HTTP_AUTHORIZATION=header)

    assert response.status_code == 401
    assert response.json()["success"] is False


def test_a_key_does_not_act_for_another_team(alice: APIClient, mallorys_team: Team) -> None:
    response = alice.get("/teams", HTTP_X_TEAM_ID=str(mallorys_team.pk))

    assert response.status_code == 403


def test_a_key_acts_for_the_team_that_it_names(alice: APIClient, alices_team: Team) -> None:
    assert alice.get("/teams", HTTP_X_TEAM_ID=str(alices_team.pk)).status_code == 200


def test_a_key_describes_itself(alice: APIClient, alices_key: tuple[ApiKey, str]) -> None:
    data = alice.get("/api-keys/current").json()["data"]["api_key"]

    assert data["id"] == str(alices_key[0].pk)
    assert data["roles"] == ["admin", "developer"]
    assert "sandbox:create" in data["permissions"]


def test_uses_are_counted_but_not_all_written(
    alice: APIClient, alices_key: tuple[ApiKey, str]
) -> None:
    for _ in range(5):
        alice.get("/users/me")

    key = ApiKey.objects.get(pk=alices_key[0].pk)
    assert key.usage_count == 1, "one write for five uses within seconds"
    listed = alice.get("/api-keys").json()["data"]["api_keys"]
    assert listed[0]["usage_count"] == 6

    cache.delete(f"key-written:{key.pk}")  # as after a few seconds
    alice.get("/users/me")
    key.refresh_from_db()
    assert key.usage_count == 7
    assert alice.get("/api-keys").json()["data"]["api_keys"][0]["usage_count"] == 8


def test_what_happens_to_keys_is_recorded(
    alice: APIClient, alices_team: Team, alices_key: tuple[ApiKey, str]
) -> None:
    made = alice.post("/api-keys", {"name": "ci"}, format="json").json()["data"]
    alice.post(f"/api-keys/{made['id']}/deactivate")
    alice.post(f"/api-keys/{made['id']}/deactivate")
    alice.delete(f"/api-keys/{made['id']}")

    events = AuditEvent.objects.filter(team=alices_team, resource_id=made["id"]).order_by("at")
    assert [event.action for event in events] == [
        "api_key.create",
        "api_key.deactivate",
        "api_key.delete",
    ]
    assert {event.api_key_id for event in events} == {alices_key[0].pk}
    assert made["key"] not in str([event.attributes for event in events])


@pytest.mark.parametrize("act", ["delete", "deactivate"])
def test_another_teams_key_is_not_found(
    mallory: APIClient, alices_key: tuple[ApiKey, str], act: str
) -> None:
    key = alices_key[0]
    if act == "delete":
        response = mallory.delete(f"/api-keys/{key.pk}")
    else:
        response = mallory.post(f"/api-keys/{key.pk}/deactivate")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    key.refresh_from_db()
    assert key.is_active


@pytest.mark.parametrize("path", ["/api-keys/1", "/api-keys/x/deactivate", "/teams/1"])
def test_a_malformed_id_is_not_found(alice: APIClient, path: str) -> None:
    for method in (alice.get, alice.delete, alice.post):
        response = method(path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"
