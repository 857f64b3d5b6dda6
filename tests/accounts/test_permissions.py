"""Which role may do what, and that every route asks."""

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from django.urls import URLPattern, URLResolver, get_resolver
from rest_framework.test import APIClient

from accounts.api.views import METHODS, TeamView
from accounts.models import Role, Team, User
from accounts.permissions import ANY_MEMBER, PERMISSIONS, may, within
from common.api.routing import is_api_path
from tests.conftest import client_with, make_key

OPEN_PATHS = {"healthz", "readyz", "metadata"}
READS = {"quota:read", "sandbox:read", "team:read", "template:read", "usage:read"}
SANDBOX_ACTS = {"sandbox:create", "sandbox:delete", "sandbox:write"}


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.ADMIN, set(PERMISSIONS)),
        (Role.DEVELOPER, READS | SANDBOX_ACTS),
        (Role.BUILDER, {"team:read", "template:read"}),
        (Role.VIEWER, READS),
    ],
)
def test_each_role_may_do_what_the_table_says(role: Role, allowed: set[str]) -> None:
    assert {name for name in PERMISSIONS if may([role], name)} == allowed


def test_roles_add_up() -> None:
    assert within(["builder", "viewer"], ["developer"])
    assert not within(["builder", "admin"], ["developer", "viewer", "builder"])


def test_a_permission_that_does_not_exist_is_a_bug() -> None:
    with pytest.raises(ValueError, match="no permission"):
        may(["admin"], "sandbox:fly")


def test_a_view_must_say_what_it_requires() -> None:
    with pytest.raises(TypeError, match="no required_permission"):

        class Forgetful(TeamView):
            def get(self, request: Any) -> None: ...

    with pytest.raises(TypeError, match="no permission"):

        class Misspelled(TeamView):
            required_permission = {"GET": "sandbox:fly"}  # noqa: RUF012

            def get(self, request: Any) -> None: ...


def _routes(
    patterns: list[URLPattern | URLResolver], before: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (path, view class or function) of every route, converters still in it."""
    for pattern in patterns:
        path = before + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from _routes(pattern.url_patterns, path)
        else:
            yield path, getattr(pattern.callback, "cls", pattern.callback)


def _api_routes() -> list[tuple[str, Any]]:
    found = _routes(get_resolver().url_patterns)
    return [(path, view) for path, view in found if is_api_path(f"/{path}")]


def _concrete(path: str) -> str:
    filled = ""
    for part in path.split("<"):
        converter, closing, rest = part.partition(">")
        if not closing:
            filled += part
            continue
        kind = converter.partition(":")[0]
        filled += (str(UUID(int=1)) if kind == "uuid" else "1" if kind == "int" else "x") + rest
    return f"/{filled}"


def test_every_route_of_the_api_belongs_to_a_team_or_is_meant_to_be_open() -> None:
    routes = _api_routes()

    assert len(routes) > len(OPEN_PATHS)
    strays = [
        path
        for path, view in routes
        if path not in OPEN_PATHS
        and not (isinstance(view, type) and issubclass(view, TeamView))
    ]
    assert strays == []


@pytest.mark.parametrize("role", Role.values)
def test_every_route_refuses_the_roles_that_lack_its_permission(
    role: str, alices_team: Team, alice_user: User
) -> None:
    client = client_with(make_key(alices_team, alice_user, Role(role))[1])

    wrong = []
    for path, view in _api_routes():
        if path in OPEN_PATHS:
            continue
        for method in METHODS:
            wanted = view.required_permission.get(method)
            if wanted is None or wanted == ANY_MEMBER or may([role], wanted):
                continue
            answer = client.generic(method, _concrete(path), "{}", "application/json")
            if answer.status_code != 403 or answer.json()["error"]["code"] != "forbidden":
                wrong.append((method, path, answer.status_code))
    assert wrong == []


def test_no_route_answers_without_a_key(nobody: APIClient, db: None) -> None:
    answered = [
        (method, path)
        for path, view in _api_routes()
        if path not in OPEN_PATHS
        for method in METHODS
        if nobody.generic(method, _concrete(path), "{}", "application/json").status_code != 401
    ]

    assert answered == []
