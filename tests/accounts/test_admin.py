"""Operators look at everything, and can break nothing."""

import pytest
from django.contrib import admin
from django.db.models import Model
from django.test import Client

from accounts.models import ApiKey, AuditEvent, Membership, Role, Team, User
from accounts.services import record_event
from tests.conftest import make_key, signed_in


@pytest.fixture
def operator(db: None) -> Client:
    return signed_in(User.objects.create_superuser("root@example.com", "x"))


@pytest.mark.parametrize("model", [User, Team, ApiKey, AuditEvent])
def test_each_model_has_a_list_that_can_be_searched(
    operator: Client, model: type[Model], alices_team: Team, alice_user: User, bob_user: User
) -> None:
    make_key(alices_team, alice_user, Role.VIEWER)
    name = f"{model._meta.app_label}/{model._meta.model_name}"

    assert operator.get(f"/admin/{name}/").status_code == 200
    assert operator.get(f"/admin/{name}/?q=alice").status_code == 200
    some = model._default_manager.first()
    assert some
    assert operator.get(f"/admin/{name}/{some.pk}/change/").status_code == 200


def test_every_model_of_accounts_is_registered_or_shown_inline() -> None:
    for model in (User, Team, ApiKey, AuditEvent):
        assert admin.site.is_registered(model)
    assert [inline.model for inline in admin.site._registry[Team].inlines] == [Membership]


def test_keys_and_events_are_not_made_by_hand(operator: Client) -> None:
    for name in ("apikey", "auditevent"):
        assert operator.get(f"/admin/accounts/{name}/add/").status_code == 403


def test_an_operator_can_close_a_key_and_change_nothing_else(
    operator: Client, alices_team: Team, alice_user: User
) -> None:
    key, _ = make_key(alices_team, alice_user, Role.VIEWER)
    url = f"/admin/accounts/apikey/{key.pk}/change/"
    assert key.digest not in operator.get(url).content.decode()

    response = operator.post(url, {"name": "mine", "roles": "admin", "usage_count": "9"})

    assert response.status_code == 302
    key.refresh_from_db()
    assert (key.is_active, key.name, key.roles, key.usage_count) == (
        False,
        "test",
        ["viewer"],
        0,
    )


def test_events_stay_as_they_are(operator: Client, alices_team: Team) -> None:
    event = record_event(
        team=alices_team, action="x.y", resource_type="sandbox", resource_id="rs-1"
    )
    url = f"/admin/accounts/auditevent/{event.pk}"

    assert operator.post(f"{url}/change/", {"action": "z"}).status_code == 403
    assert operator.post(f"{url}/delete/", {"post": "yes"}).status_code == 403


def test_a_user_is_added_and_changed(operator: Client) -> None:
    body = {"email": "new@example.com", "name": "New"}
    inline = {"memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}
    passwords = {"password1": "long and odd enough", "password2": "long and odd enough"}

    response = operator.post("/admin/accounts/user/add/", body | passwords | inline)

    assert response.status_code == 302
    assert User.objects.get(email="new@example.com").check_password("long and odd enough")


def test_who_is_no_operator_is_kept_out(alices_browser: Client) -> None:
    assert alices_browser.get("/admin/accounts/apikey/").status_code == 302
