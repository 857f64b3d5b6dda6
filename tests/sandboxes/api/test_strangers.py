"""Who may not: another team's key on every route, and each role where it lacks permission.

The table is checked against the URL configuration, so that a new route cannot be forgotten.
"""

import re
from typing import Any

import pytest
from rest_framework.test import APIClient

from accounts.models import Role, Team, User
from accounts.permissions import BY_ROLE
from sandboxes.api import urls
from sandboxes.models import Sandbox, Template
from tests.conftest import client_with, make_key

BASE = "/api/v1"
FILE = "?path=/etc/hostname"
CMD = {"type": "cmd", "cmd": {"command": ["true"]}, "wait_until_done": True}

REBASE = {"target_base_artifact_digest": "sha256:0"}
FROM_SANDBOX = {"template_id": "mine", "sandbox_id": "rs-c1-nosuch-abcde"}
SNAPSHOT = "sandbox-rootfs-snapshots/rootfs-snapshot-aaaaaaaaaaaaaaaaaaaa"

# Route, methods with a body where one is needed, the permission that each wants.
SANDBOX_ROUTES: list[tuple[str, str, Any, str]] = [
    ("sandboxes/{id}", "get", None, "sandbox:read"),
    ("sandboxes/{id}", "put", {"config": {"ttl": 5}}, "sandbox:write"),
    ("sandboxes/{id}", "delete", None, "sandbox:delete"),
    ("sandboxes/{id}/status", "get", None, "sandbox:read"),
    ("sandboxes/{id}/pause", "post", {}, "sandbox:write"),
    ("sandboxes/{id}/resume", "post", {}, "sandbox:write"),
    ("sandboxes/{id}/refresh", "post", {}, "sandbox:write"),
    ("sandboxes/{id}/contexts", "get", None, "sandbox:read"),
    ("sandboxes/{id}/contexts", "post", CMD, "sandbox:write"),
    ("sandboxes/{id}/contexts/ctx-1", "get", None, "sandbox:read"),
    ("sandboxes/{id}/contexts/ctx-1", "delete", None, "sandbox:write"),
    ("sandboxes/{id}/contexts/ctx-1/input", "post", {"data": "x"}, "sandbox:write"),
    ("sandboxes/{id}/contexts/ctx-1/resize", "post", {"rows": 1, "cols": 1}, "sandbox:write"),
    ("sandboxes/{id}/contexts/ctx-1/signal", "post", {"signal": "INT"}, "sandbox:write"),
    ("sandboxes/{id}/contexts/ctx-1/exec", "post", {"data": "x"}, "sandbox:write"),
    ("sandboxes/{id}/contexts/ctx-1/restart", "post", {}, "sandbox:write"),
    (f"sandboxes/{{id}}/files{FILE}", "get", None, "sandbox:read"),
    (f"sandboxes/{{id}}/files{FILE}", "post", None, "sandbox:write"),
    (f"sandboxes/{{id}}/files{FILE}", "delete", None, "sandbox:write"),
    (f"sandboxes/{{id}}/files/stat{FILE}", "get", None, "sandbox:read"),
    (f"sandboxes/{{id}}/files/list{FILE}", "get", None, "sandbox:read"),
    (
        "sandboxes/{id}/files/move",
        "post",
        {"source": "/a", "destination": "/b"},
        "sandbox:write",
    ),
    ("sandboxes/{id}/snapshots", "get", None, "sandbox:read"),
    ("sandboxes/{id}/snapshots", "post", {}, "sandbox:write"),
    ("sandboxes/{id}/rootfs/restore", "post", {"generation": 0}, "sandbox:write"),
    ("sandboxes/{id}/rootfs/rebase", "put", REBASE, "sandbox:write"),
    ("sandboxes/{id}/fork", "post", {}, "sandbox:create"),
    ("sandboxes/{id}/history", "get", None, "sandbox:read"),
    ("sandboxes/{id}/export.qcow2", "get", None, "sandbox:read"),
]
OTHER_ROUTES: list[tuple[str, str, Any, str]] = [
    ("sandboxes", "get", None, "sandbox:read"),
    ("sandboxes", "post", {"template": "default"}, "sandbox:create"),
    ("templates", "get", None, "template:read"),
    ("templates/default", "get", None, "template:read"),
    ("templates/nosuch", "delete", None, "template:delete"),
    ("templates/import?template_id=x", "post", None, "template:create"),
    ("templates/from-sandbox", "post", FROM_SANDBOX, "template:create"),
    (SNAPSHOT, "get", None, "sandbox:read"),
    (SNAPSHOT, "delete", None, "sandbox:write"),
    (f"{SNAPSHOT}/export.qcow2", "get", None, "sandbox:read"),
    ("quotas", "get", None, "quota:read"),
    ("quotas/active_sandboxes", "get", None, "quota:read"),
]

MALFORMED = ["..", "%2e%2e%2f", "a%00b", "RS-C1-X", "x" * 300, "%F0%9F%98%80", "'--", "1"]


def ask(client: APIClient, route: str, method: str, body: Any, sandbox_id: str = "") -> Any:
    url = f"{BASE}/{route.format(id=sandbox_id)}"
    if body is None:
        return getattr(client, method)(url)
    return getattr(client, method)(url, body, format="json")


def test_the_table_has_every_route() -> None:
    tabled = {
        (
            re.sub(r"\?.*", "", route)
            .replace("nosuch", "default")
            .format(id="ID")
            .replace("ctx-1", "CTX"),
            method.upper(),
        )
        for route, method, _, _ in SANDBOX_ROUTES + OTHER_ROUTES
    }
    served = set()
    for pattern in urls.urlpatterns:
        route = str(pattern.pattern)
        for part, name in (
            ("<str:sandbox_id>", "ID"),
            ("<str:context_id>", "CTX"),
            ("<str:template_id>", "default"),
            ("<str:snapshot_id>", SNAPSHOT.partition("/")[2]),
            ("<str:dimension>", "active_sandboxes"),
        ):
            route = route.replace(part, name)
        view = getattr(pattern.callback, "cls")  # noqa: B009  (DRF's as_view sets it)
        served |= {(route, method) for method in view.required_permission}

    assert tabled == served


@pytest.mark.parametrize(("route", "method", "body", "_"), SANDBOX_ROUTES)
def test_another_teams_sandbox_is_not_found(
    mallory: APIClient, running: Sandbox, route: str, method: str, body: Any, _: str
) -> None:
    response = ask(mallory, route, method, body, running.id)

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    running.refresh_from_db()
    assert running.state == Sandbox.State.RUNNING


@pytest.mark.parametrize("sandbox_id", MALFORMED)
def test_a_malformed_id_is_not_found(
    alice: APIClient, alices_team: Team, sandbox_id: str
) -> None:
    for route, method, body, _ in SANDBOX_ROUTES:
        response = ask(alice, route, method, body, sandbox_id)

        assert response.status_code == 404, (route, method)
        assert response.json()["success"] is False


@pytest.mark.parametrize("role", list(Role))
def test_each_role_is_kept_to_its_permissions(
    alices_team: Team, alice_user: User, template: Template, role: Role
) -> None:
    client = client_with(make_key(alices_team, alice_user, role)[1])
    for route, method, body, permission in SANDBOX_ROUTES + OTHER_ROUTES:
        response = ask(client, route, method, body, "rs-c1-nosuch-abcde")

        refused = response.status_code == 403
        assert refused == (permission not in BY_ROLE[role]), (route, method, role)


def test_nobody_gets_in_without_a_key(nobody: APIClient, running: Sandbox) -> None:
    for route, method, body, _ in SANDBOX_ROUTES + OTHER_ROUTES:
        response = ask(nobody, route, method, body, running.id)

        assert response.status_code == 401, (route, method)


@pytest.mark.parametrize("path", ["nosuch", "sandboxes/", "sandboxes/x/nosuch", "volumes"])
def test_a_path_that_nothing_serves_is_404_in_the_envelope(alice: APIClient, path: str) -> None:
    response = alice.get(f"{BASE}/{path}")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_a_method_that_a_route_lacks_is_405_in_the_envelope(alice: APIClient) -> None:
    response = alice.patch(f"{BASE}/sandboxes", {}, format="json")

    assert response.status_code == 405
    assert response.json()["success"] is False
