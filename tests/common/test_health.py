"""Health endpoints, which ask for no key."""

import pytest
from django.core.cache import cache
from django.db import DatabaseError, connection
from redis.exceptions import ConnectionError as RedisDown
from rest_framework.test import APIClient


def test_it_is_alive_without_a_database(nobody: APIClient) -> None:
    response = nobody.get("/healthz")

    assert response.status_code == 200
    assert response.json()["data"]["status"] == "ok"


@pytest.mark.django_db
def test_it_is_ready(nobody: APIClient) -> None:
    assert nobody.get("/readyz").json()["data"]["status"] == "ok"


@pytest.mark.django_db
def test_it_is_not_ready_without_redis(
    nobody: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*args: object) -> None:
        raise RedisDown("redis://:hunter2@host is down")

    monkeypatch.setattr(type(cache._connections[cache._alias]), "get", down)  # type: ignore[attr-defined]

    response = nobody.get("/readyz")

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"
    assert "hunter2" not in response.content.decode()


def test_it_is_not_ready_without_a_database(
    nobody: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down() -> None:
        raise DatabaseError("host is down")

    monkeypatch.setattr(connection, "cursor", down)

    response = nobody.get("/readyz")

    assert response.status_code == 503
    assert response.json()["error"]["message"] == "PostgreSQL does not answer."


def test_it_says_which_kind_of_gateway_it_is(nobody: APIClient) -> None:
    data = nobody.get("/metadata").json()["data"]

    assert data == {"gateway_mode": "direct", "service": "sandkeep"}
