"""Keys, team, audit and the team switcher in the console."""

import re
from datetime import timedelta
from uuid import uuid4

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from accounts.models import ApiKey, AuditEvent, Membership, Role, Team, User
from accounts.services import record_event
from tests.conftest import client_with, make_key

NEW_KEY = {"name": "laptop", "role": "developer", "expires_in": "30d"}


@pytest.fixture(autouse=True)
def _counters_at_zero(_empty_cache: None) -> None:
    pass


def _text(page: bytes) -> str:
    return " ".join(page.decode().split())


def test_a_new_keys_secret_is_shown_once_and_opens_the_api(
    alices_browser: Client, alices_team: Team, alice_user: User
) -> None:
    response = alices_browser.post("/keys", NEW_KEY)

    assert response.status_code == 200
    secret = re.search(r"s0_local_[0-9a-f]{48}", response.content.decode())
    assert secret
    assert "no-store" in response["Cache-Control"]
    assert client_with(secret[0]).get("/users/me").status_code == 200
    key = ApiKey.objects.get()
    assert (key.team, key.created_by, key.roles) == (alices_team, alice_user, ["developer"])
    assert key.expires_at - key.created_at < timedelta(days=30, minutes=1)
    later = alices_browser.get("/keys").content.decode()
    assert secret[0] not in later
    assert key.hint in later


def test_what_is_wrong_with_a_new_key_is_said(alices_browser: Client) -> None:
    response = alices_browser.post("/keys", NEW_KEY | {"name": "", "role": "root"})

    assert response.status_code == 400
    assert "This field is required." in response.content.decode()
    assert not ApiKey.objects.exists()


def test_a_name_is_text_and_no_markup(alices_browser: Client) -> None:
    page = alices_browser.post("/keys", NEW_KEY | {"name": "<script>x</script>"})

    assert "<script>x" not in page.content.decode()


def test_a_key_is_deactivated(
    alices_browser: Client, alices_team: Team, alice_user: User
) -> None:
    key, secret = make_key(alices_team, alice_user, Role.VIEWER)

    response = alices_browser.post(f"/keys/{key.pk}/deactivate", follow=True)

    assert "deactivated" in response.content.decode()
    assert client_with(secret).get("/users/me").status_code == 401
    event = AuditEvent.objects.get(action="api_key.deactivate")
    assert (event.user, event.source_ip) == (alice_user, "127.0.0.1")


def test_a_key_is_deleted_once_that_is_confirmed(
    alices_browser: Client, alices_team: Team, alice_user: User
) -> None:
    key, secret = make_key(alices_team, alice_user, Role.VIEWER)

    question = alices_browser.get(f"/keys/{key.pk}/delete").content.decode()
    assert key.name in question
    assert ApiKey.objects.exists()
    response = alices_browser.post(f"/keys/{key.pk}/delete", follow=True)

    assert "is deleted" in response.content.decode()
    assert not ApiKey.objects.exists()
    assert client_with(secret).get("/users/me").status_code == 401


def test_the_list_tells_each_keys_state(
    alices_browser: Client, alices_team: Team, alice_user: User
) -> None:
    expired, _ = make_key(alices_team, alice_user, Role.VIEWER)
    ApiKey.objects.filter(pk=expired.pk).update(expires_at=timezone.now())
    closed, _ = make_key(alices_team, alice_user, Role.VIEWER)
    ApiKey.objects.filter(pk=closed.pk).update(is_active=False)
    make_key(alices_team, alice_user, Role.VIEWER)

    page = alices_browser.get("/keys").content.decode()

    for state in ("expired", "deactivated", "active"):
        assert page.count(f">{state}<") == 1


def test_a_list_of_many_keys_takes_no_more_queries(
    alices_browser: Client,
    alices_team: Team,
    alice_user: User,
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    for _ in range(10):
        make_key(alices_team, alice_user, Role.VIEWER)

    with django_assert_max_num_queries(6):
        assert alices_browser.get("/keys").content.decode().count(">active<") == 10


def test_who_is_no_admin_is_told_whom_to_ask(bobs_browser: Client) -> None:
    response = bobs_browser.get("/keys")

    assert response.status_code == 403
    page = response.content.decode()
    assert "alice@example.com" in page
    assert bobs_browser.post("/keys", NEW_KEY).status_code == 403
    assert not ApiKey.objects.exists()


def test_who_is_no_admin_changes_no_key(
    bobs_browser: Client, alices_team: Team, alice_user: User
) -> None:
    key, _ = make_key(alices_team, alice_user, Role.VIEWER)

    for act in ("deactivate", "delete"):
        assert bobs_browser.post(f"/keys/{key.pk}/{act}").status_code == 403
    key.refresh_from_db()
    assert key.is_active


def test_another_teams_key_is_not_found(
    mallorys_browser: Client, alices_team: Team, alice_user: User
) -> None:
    key, _ = make_key(alices_team, alice_user, Role.VIEWER)

    for act in ("deactivate", "delete"):
        assert mallorys_browser.post(f"/keys/{key.pk}/{act}").status_code == 404
    assert mallorys_browser.get(f"/keys/{key.pk}/delete").status_code == 404
    assert key.hint not in mallorys_browser.get("/keys").content.decode()


@pytest.mark.parametrize("path", ["/keys", "/team", "/audit"])
@pytest.mark.django_db
def test_a_stranger_is_sent_to_sign_in(path: str) -> None:
    response = Client().get(path)

    assert response.status_code == 302
    assert response["Location"] == f"/accounts/login/?next={path}"


def test_a_get_deactivates_nothing(alices_browser: Client) -> None:
    assert alices_browser.get(f"/keys/{uuid4()}/deactivate").status_code == 405
    assert alices_browser.get("/console/team/switch").status_code == 405


def test_the_team_page_shows_who_is_in_it(
    alices_browser: Client, bob_user: User, mallory_user: User
) -> None:
    page = _text(alices_browser.get("/team").content)

    assert "alice@example.com" in page
    assert "bob@example.com" in page
    assert "mallory@example.com" not in page


def test_one_switches_between_ones_teams(
    alices_browser: Client, alice_user: User, alices_team: Team, mallorys_team: Team
) -> None:
    Membership.objects.create(team=mallorys_team, user=alice_user, role=Role.VIEWER)
    assert "<h1>Alice&#x27;s team</h1>" in alices_browser.get("/team").content.decode()

    response = alices_browser.post("/console/team/switch", {"team": str(mallorys_team.pk)})

    assert response["Location"] == "/"
    assert "<h1>Mallory&#x27;s team</h1>" in alices_browser.get("/team").content.decode()
    assert alices_browser.get("/keys").status_code == 403, "a viewer there"
    assert AuditEvent.objects.get(action="team.switch").team == mallorys_team


def test_one_does_not_switch_to_a_team_of_others(
    alices_browser: Client, mallorys_team: Team
) -> None:
    for team in (str(mallorys_team.pk), str(uuid4()), "nonsense", ""):
        response = alices_browser.post("/console/team/switch", {"team": team})
        assert response.status_code == 404
    assert "<h1>Alice&#x27;s team</h1>" in alices_browser.get("/team").content.decode()


@pytest.mark.parametrize(
    ("wanted", "led_to"),
    [
        ("/keys", "/keys"),
        ("/sandboxes/rs-1", "/"),
        ("https://evil.example/", "/"),
        ("//evil.example", "/"),
        ("javascript:alert(1)", "/"),
    ],
)
def test_switching_leads_on_to_a_page_that_any_team_has(
    alices_browser: Client, alices_team: Team, wanted: str, led_to: str
) -> None:
    response = alices_browser.post(
        "/console/team/switch", {"team": str(alices_team.pk), "next": wanted}
    )

    assert response["Location"] == led_to


def test_who_is_removed_from_a_team_is_out_of_it_at_once(
    bobs_browser: Client, bob_user: User
) -> None:
    assert bobs_browser.get("/team").status_code == 200

    Membership.objects.filter(user=bob_user).delete()

    assert bobs_browser.get("/team").status_code == 403


def test_the_audit_record_is_paged_and_the_teams_own(
    alices_browser: Client, alice_user: User, alices_team: Team, mallorys_team: Team
) -> None:
    for number in range(60):
        record_event(
            team=alices_team,
            user=alice_user,
            action="sandbox.claim",
            resource_type="sandbox",
            resource_id=f"rs-{number:02}",
            source_ip="not an address",
        )
    record_event(
        team=mallorys_team, action="x.y", resource_type="sandbox", resource_id="rs-other"
    )

    first = alices_browser.get("/audit").content.decode()
    second = alices_browser.get("/audit?page=2").content.decode()

    assert "rs-59" in first
    assert "rs-09" not in first
    assert "rs-09" in second
    assert "rs-other" not in first + second
    assert alices_browser.get("/audit?page=nonsense").status_code == 200


def test_the_audit_record_is_for_admins(bobs_browser: Client) -> None:
    response = bobs_browser.get("/audit")

    assert response.status_code == 403
    assert "audit:read" in response.content.decode()
