"""`manage.py create_api_key`, which `bin/demo` and operators use."""

import re
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from accounts.models import ApiKey, Role, Team, User
from tests.conftest import client_with

pytestmark = pytest.mark.django_db


def _run(*arguments: str) -> str:
    out = StringIO()
    call_command("create_api_key", *arguments, stdout=out)
    return out.getvalue()


def test_it_prints_a_key_alone_and_makes_what_is_missing() -> None:
    printed = _run("--email", "Dev@Example.com", "--team", "Tools")

    assert re.fullmatch(r"s0_local_[0-9a-f]{48}\n", printed)
    assert client_with(printed.strip()).get("/users/me").json()["data"]["email"] == (
        "dev@example.com"
    )
    assert ApiKey.objects.get().roles == [Role.DEVELOPER]


def test_it_finds_what_is_there() -> None:
    _run("--email", "dev@example.com", "--team", "Tools")
    _run("--email", "DEV@example.com", "--team", "Tools", "--role", "admin")

    assert (User.objects.count(), Team.objects.count(), ApiKey.objects.count()) == (1, 1, 2)


def test_it_does_not_enter_a_team_of_others_with_the_same_name() -> None:
    _run("--email", "a@example.com", "--team", "Tools")
    _run("--email", "b@example.com", "--team", "Tools")

    assert Team.objects.filter(name="Tools").count() == 2


def test_it_refuses_what_is_no_address() -> None:
    with pytest.raises(CommandError, match="not an e-mail address"):
        _run("--email", "dev", "--team", "Tools")
    assert not User.objects.exists()
