"""Signing up, in and out in a browser."""

import re
from datetime import timedelta

import pytest
import time_machine
from allauth.account.models import EmailAddress
from django.core import mail
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from pytest_django import DjangoCaptureOnCommitCallbacks

from accounts.models import AuditEvent, Membership, Role, Team, User
from accounts.web.signup import signup
from tests.conftest import PASSWORD

SIGN_UP = {"name": "Ann Lee", "email": "Ann@Example.com", "password1": "purple monkey dish"}
URL = "/accounts/signup/"
LOGIN = "/accounts/login/"


@pytest.fixture(autouse=True)
def _limits_at_zero(_empty_cache: None) -> None:
    pass


@pytest.fixture
def browser(db: None) -> Client:
    return Client()


def _link(path: str) -> str:
    """Return the path of the link in the first mail."""
    found = re.search(rf"http://testserver({path}\S+)", str(mail.outbox[0].body))
    assert found
    return found[1]


def test_sign_up_makes_user_and_first_team(
    browser: Client, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        response = browser.post(URL, SIGN_UP)

    assert response.status_code == 302
    user = User.objects.get()
    assert (user.email, user.name) == ("ann@example.com", "Ann Lee")
    team = Team.objects.get()
    assert (team.name, team.slug, team.owner) == ("Ann Lee's team", "ann-lees-team", user)
    assert Membership.objects.get(team=team, user=user).role == Role.ADMIN
    assert browser.session["_auth_user_id"] == str(user.pk)
    assert [message.to for message in mail.outbox] == [["ann@example.com"]]


def test_a_sign_up_that_breaks_off_leaves_nothing(
    browser: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr("allauth.account.forms.setup_user_email", broken)
    with pytest.raises(RuntimeError, match="power cut"):
        browser.post(URL, SIGN_UP)
    assert (User.objects.count(), Team.objects.count(), len(mail.outbox)) == (0, 0, 0)
    monkeypatch.undo()

    assert browser.post(URL, SIGN_UP).status_code == 302
    assert (User.objects.count(), Team.objects.count()) == (1, 1)


def test_a_sign_up_sent_twice_makes_one_user_and_one_team(browser: Client) -> None:
    browser.post(URL, SIGN_UP)
    other = Client()

    response = other.post(URL, SIGN_UP | {"password1": "another long one"})

    assert (User.objects.count(), Team.objects.count()) == (1, 1)
    assert response.status_code == 200
    assert "already registered" in response.content.decode()
    assert "_auth_user_id" not in other.session


def test_a_mail_server_that_is_down_stops_no_sign_up(
    browser: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks,
) -> None:
    def down(message: object) -> None:
        raise ConnectionRefusedError("no mail server")

    monkeypatch.setattr("django.core.mail.EmailMessage.send", down)

    with django_capture_on_commit_callbacks(execute=True):
        assert browser.post(URL, SIGN_UP).status_code == 302

    assert User.objects.count() == 1
    assert "no mail server" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "required"),
        ({"email": "ann"}, "valid email"),
        ({"password1": "short"}, "too short"),
        ({"password1": "password123"}, "too common"),
    ],
)
def test_what_is_wrong_stands_beside_its_field(
    browser: Client, changes: dict[str, str], words: str
) -> None:
    response = browser.post(URL, SIGN_UP | changes)

    assert response.status_code == 200
    assert words in response.content.decode()
    assert not User.objects.exists()


def test_one_signs_in_and_out(browser: Client, alice_user: User, alices_team: Team) -> None:
    response = browser.post(LOGIN, {"login": "ALICE@example.com", "password": PASSWORD})
    assert response.status_code == 302
    assert response["Location"] == reverse("sandbox-list")
    assert AuditEvent.objects.get(action="user.sign_in").source_ip == "127.0.0.1"

    assert browser.get("/accounts/logout/").status_code == 200, "a GET signs nobody out"
    assert "_auth_user_id" in browser.session
    browser.post("/accounts/logout/")
    assert "_auth_user_id" not in browser.session


def test_it_is_never_told_which_of_the_two_is_wrong(browser: Client, alice_user: User) -> None:
    wrong_password = browser.post(LOGIN, {"login": alice_user.email, "password": "x"})
    wrong_email = browser.post(LOGIN, {"login": "eve@example.com", "password": "x"})

    said = [
        re.findall(r'role="alert">(.*?)<', answer.content.decode())
        for answer in (wrong_password, wrong_email)
    ]
    assert said[0] == said[1]
    assert said[0]


def test_a_closed_account_does_not_get_in(browser: Client, alice_user: User) -> None:
    User.objects.filter(pk=alice_user.pk).update(is_active=False)

    browser.post(LOGIN, {"login": alice_user.email, "password": PASSWORD})

    assert "_auth_user_id" not in browser.session


def test_too_many_failures_say_when_to_try_again(browser: Client, alice_user: User) -> None:
    wrong = {"login": alice_user.email, "password": "x"}
    with time_machine.travel(timezone.now(), tick=False) as clock:
        for _ in range(5):
            browser.post(LOGIN, wrong)
        clock.shift(timedelta(seconds=60))

        right = browser.post(LOGIN, wrong | {"password": PASSWORD})

        assert "Try again in 4 minutes" in right.content.decode()
        assert "_auth_user_id" not in browser.session
        clock.shift(timedelta(minutes=5))
        assert browser.post(LOGIN, wrong | {"password": PASSWORD}).status_code == 302


def test_too_many_sign_ups_from_one_address_say_when_to_try_again(browser: Client) -> None:
    for number in range(20):
        browser.post(URL, SIGN_UP | {"email": f"{number}@example.com", "name": ""})

    response = browser.post(URL, SIGN_UP)

    assert response.status_code == 429
    assert 0 < int(response["Retry-After"]) <= 60
    assert "Try again in" in response.content.decode()
    assert not User.objects.exists()


def test_signing_in_changes_the_session(browser: Client, alice_user: User) -> None:
    session = browser.session
    session["planted"] = True
    session.save()
    planted = session.session_key or ""
    browser.cookies["sessionid"] = planted

    browser.post(LOGIN, {"login": alice_user.email, "password": PASSWORD})

    assert browser.session.session_key != planted
    stranger = Client()
    stranger.cookies["sessionid"] = planted
    assert stranger.get("/keys").status_code == 302


def test_one_is_not_led_off_the_site(browser: Client, alice_user: User) -> None:
    response = browser.post(
        f"{LOGIN}?next=https://evil.example/",
        {"login": alice_user.email, "password": PASSWORD, "next": "https://evil.example/"},
    )

    assert response["Location"] == reverse("sandbox-list")


def test_a_form_without_its_token_is_refused(alice_user: User) -> None:
    browser = Client(enforce_csrf_checks=True)

    response = browser.post(LOGIN, {"login": alice_user.email, "password": PASSWORD})

    assert response.status_code == 403


def test_a_link_in_the_mail_confirms_the_address(
    browser: Client, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        browser.post(URL, SIGN_UP)
    link = _link("/accounts/confirm-email/")

    assert "ann@example.com" in browser.get(link).content.decode()
    assert not EmailAddress.objects.get().verified, "a mail scanner that follows links"
    browser.post(link)

    assert EmailAddress.objects.get().verified


def test_a_link_in_the_mail_sets_a_new_password(
    browser: Client,
    alice_user: User,
    django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks,
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        browser.post("/accounts/password/reset/", {"email": alice_user.email})
    link = _link("/accounts/password/reset/key/")

    form = browser.get(link, follow=True)
    assert form.status_code == 200
    url = form.redirect_chain[-1][0]
    new = {"password1": "a new and long one", "password2": "a new and long one"}
    assert browser.post(url, new).status_code == 302

    alice_user.refresh_from_db()
    assert alice_user.check_password("a new and long one")
    used = Client().get(link, follow=True)
    assert "does not work any more" in used.content.decode()


def test_a_reset_does_not_tell_whether_there_is_an_account(
    browser: Client,
    alice_user: User,
    django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks,
) -> None:
    answers = []
    for email in (alice_user.email, "nobody@example.com"):
        with django_capture_on_commit_callbacks(execute=True):
            answer = browser.post("/accounts/password/reset/", {"email": email}, follow=True)
        answers.append((answer.status_code, answer.redirect_chain))

    assert answers[0] == answers[1]


def test_who_was_made_by_an_operator_gets_a_team_when_they_sign_in(browser: Client) -> None:
    user = User.objects.create_superuser("root@example.com", PASSWORD)

    browser.post(LOGIN, {"login": user.email, "password": PASSWORD})

    assert [team.name for team in user.teams.all()] == ["root's team"]
    assert user.check_password(PASSWORD)


def test_a_race_for_an_address_is_answered_like_an_address_in_use(
    browser: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def first_loses(request: object) -> str:
        calls.append(1)
        if len(calls) == 1:
            User.objects.create_user("ann@example.com")
            User.objects.create_user("ANN@example.com")
        return "answered"

    monkeypatch.setattr("accounts.web.signup.allauth_views.signup", first_loses)

    assert signup(object()) == "answered"  # type: ignore[arg-type, comparison-overlap]
    assert len(calls) == 2
    assert not User.objects.exists()


@pytest.mark.parametrize(
    "path",
    [
        "login/",
        "signup/",
        "password/reset/",
        "password/reset/done/",
        "password/reset/key/done/",
        "password/reset/key/1-x/",
        "confirm-email/",
        "confirm-email/nonsense/",
        "inactive/",
    ],
)
def test_each_page_for_strangers_is_in_the_consoles_style(browser: Client, path: str) -> None:
    response = browser.get(f"/accounts/{path}")

    assert response.status_code == 200
    page = response.content.decode()
    assert 'class="plain"' in page
    assert "<h1" in page


@pytest.mark.parametrize("path", ["logout/", "email/", "password/change/", "reauthenticate/"])
def test_each_page_of_ones_account_is_in_the_consoles_style(
    alices_browser: Client, path: str
) -> None:
    response = alices_browser.get(f"/accounts/{path}")

    assert response.status_code == 200
    assert 'class="plain"' in response.content.decode()
