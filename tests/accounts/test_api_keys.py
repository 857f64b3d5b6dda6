"""API keys over the API."""

from rest_framework.test import APIClient

from accounts.models import ApiKey, Role


def test_a_key_reads_its_maker(alice: APIClient) -> None:
    response = alice.get("/users/me")

    assert response.status_code == 200
    assert response.json()["success"] is True
    assert response.json()["data"]["email"] == "alice@example.com"
    assert response["X-Request-Id"]
