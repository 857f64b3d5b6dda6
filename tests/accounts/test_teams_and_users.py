"""`/users/me` and `/teams`, as a key sees them."""

from uuid import uuid4

from rest_framework.test import APIClient

from accounts.models import Team, User


def test_a_key_reads_its_maker(alice: APIClient, alice_user: User) -> None:
    data = alice.get("/users/me").json()["data"]

    assert data["id"] == str(alice_user.pk)
    assert data["email"] == "alice@example.com"
    assert data["name"] == "Alice"
    assert data["email_verified"] is False
    assert data["is_admin"] is False
    assert data["avatar_url"] is None


def test_a_key_does_not_change_its_maker(alice: APIClient, alice_user: User) -> None:
    response = alice.put("/users/me", {"name": "Eve"}, format="json")

    assert response.status_code == 403
    alice_user.refresh_from_db()
    assert alice_user.name == "Alice"


def test_a_key_sees_its_own_team_alone(
    alice: APIClient, alice_user: User, alices_team: Team, mallorys_team: Team
) -> None:
    data = alice.get("/teams").json()["data"]["teams"]

    assert [team["id"] for team in data] == [str(alices_team.pk)]
    assert data[0]["owner_id"] == str(alice_user.pk)
    assert data[0]["slug"] == "alices-team"
    assert alice.get(f"/teams/{alices_team.pk}").json()["data"] == data[0]


def test_any_other_team_is_not_found(alice: APIClient, mallorys_team: Team) -> None:
    assert alice.get(f"/teams/{mallorys_team.pk}").status_code == 404
    assert alice.get(f"/teams/{uuid4()}").status_code == 404


def test_what_is_not_there_yet_is_refused_in_the_envelope(
    alice: APIClient, alices_team: Team
) -> None:
    answers = [
        alice.post("/teams", {"name": "x"}, format="json"),
        alice.put(f"/teams/{alices_team.pk}", {"name": "x"}, format="json"),
        alice.delete(f"/teams/{alices_team.pk}"),
        alice.get(f"/teams/{alices_team.pk}/members"),
    ]

    assert [answer.status_code for answer in answers] == [405, 405, 405, 404]
    assert {answer.json()["success"] for answer in answers} == {False}
    assert answers[0].json()["error"]["code"] == "method_not_allowed"
