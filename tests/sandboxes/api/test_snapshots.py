"""Snapshots, restore, fork and history, with the unmodified SDK and below it."""

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import sandbox0
from django.db import connections
from sandbox0 import APIError
from sandbox0.apispec.models.create_sandbox_root_fs_snapshot_request import (
    CreateSandboxRootFSSnapshotRequest as NewSnapshot,
)
from sandbox0.apispec.models.fork_sandbox_config import ForkSandboxConfig
from sandbox0.apispec.models.fork_sandbox_request import ForkSandboxRequest
from sandbox0.apispec.models.rebase_sandbox_root_fs_request import (
    RebaseSandboxRootFSRequest,
)
from sandbox0.apispec.models.restore_sandbox_root_fs_request import (
    RestoreSandboxRootFSRequest as Restore,
)
from sandbox0.apispec.models.template_from_sandbox_create_request import (
    TemplateFromSandboxCreateRequest as FromSandbox,
)
from sandbox0.client_templates import CreateTemplateFromSandboxOptions

from accounts.models import ApiKey, Role, Team, User
from hosts.models import Generation
from hosts.volumes.blocks import BLOCK_BYTES
from sandboxes import operations, services, snapshots
from sandboxes.models import Cut, Sandbox, Snapshot, Template
from tests.conftest import make_key
from tests.fakes.host import FakeHost

pytestmark = pytest.mark.django_db(transaction=True)


def write(machine: FakeHost, sandbox: Sandbox) -> None:
    machine.disks.disks[sandbox.volume_id].writes += 1


def test_the_sdk_takes_lists_shows_and_deletes_snapshots(
    url: str, sdk: sandbox0.Client, at_once: FakeHost, running: Sandbox
) -> None:
    write(at_once, running)
    expires_at = datetime.now(UTC) + timedelta(days=1)

    plain = sdk.sandboxes.create_rootfs_snapshot(running.id)
    named = sdk.sandboxes.create_rootfs_snapshot(
        running.id, NewSnapshot(name="v1", description="d", expires_at=expires_at)
    )

    assert plain.id.startswith("rootfs-snapshot-")
    assert plain.sandbox_id == running.id
    assert (named.name, named.description, named.expires_at) == ("v1", "d", expires_at)
    listed = sdk.sandboxes.list_rootfs_snapshots(running.id)
    assert [one.id for one in listed] == [named.id, plain.id]
    assert sdk.sandboxes.get_rootfs_snapshot(named.id).name == "v1"
    assert sdk.sandboxes.delete_rootfs_snapshot(plain.id).success is True
    with pytest.raises(APIError) as refused:
        sdk.sandboxes.get_rootfs_snapshot(plain.id)
    assert (refused.value.status_code, refused.value.code) == (404, "not_found")


def test_the_sdk_claims_from_a_snapshot(
    url: str, sdk: sandbox0.Client, at_once: FakeHost, running: Sandbox
) -> None:
    write(at_once, running)
    snapshot = sdk.sandboxes.create_rootfs_snapshot(running.id)
    sdk.sandboxes.delete(running.id)

    claimed = sdk.sandboxes.claim("default", snapshot_id=snapshot.id)

    detail = sdk.sandboxes.get(claimed.id)
    assert detail.status == "running"
    with pytest.raises(APIError) as refused:
        sdk.sandboxes.claim("default", snapshot_id="rootfs-snapshot-" + "a" * 20)
    assert refused.value.status_code == 404


def test_the_sdk_restores_a_paused_sandbox(
    url: str, sdk: sandbox0.Client, at_once: FakeHost, running: Sandbox
) -> None:
    snapshot = sdk.sandboxes.create_rootfs_snapshot(running.id)
    wish = Restore(snapshot_id=snapshot.id)
    with pytest.raises(APIError) as refused:
        sdk.sandboxes.restore_rootfs(running.id, wish)
    assert (refused.value.status_code, refused.value.code) == (409, "conflict")
    assert "that is running cannot be restored; pause it first" in str(refused.value)
    write(at_once, running)
    sdk.sandboxes.pause_and_wait(running.id)

    restored = sdk.sandboxes.restore_rootfs(running.id, wish)

    assert (restored.sandbox_id, restored.snapshot_id) == (running.id, snapshot.id)
    assert restored.status == "paused"


def test_the_sdk_forks(
    url: str, sdk: sandbox0.Client, at_once: FakeHost, running: Sandbox
) -> None:
    forked = sdk.sandboxes.fork(
        running.id,
        ForkSandboxRequest(config=ForkSandboxConfig(ttl=0, hard_ttl=600)),
        idempotency_key="once",
    )

    assert forked.source_sandbox_id == running.id
    child = forked.sandbox
    assert child.id != running.id
    assert (child.status, child.paused) == ("paused", True)
    assert child.hard_expires_at is not None
    resumed = sdk.sandboxes.resume_and_wait(child.id)
    assert resumed.runtime_generation == 1
    with pytest.raises(APIError) as refused:
        sdk.sandboxes.fork(
            running.id, ForkSandboxRequest(memory=True), idempotency_key="memory"
        )
    assert (refused.value.status_code, refused.value.code) == (400, "bad_request")


def test_the_sdk_waits_for_a_template_of_a_sandbox(
    url: str, sdk: sandbox0.Client, machine: FakeHost, running: Sandbox
) -> None:
    write(machine, running)
    options = CreateTemplateFromSandboxOptions(idempotency_key="t")
    request = FromSandbox(template_id="Mine", sandbox_id=running.id)

    template = sdk.create_template_from_sandbox(request, options)

    assert template.template_id == "mine"
    assert creation_of(template) == {"state": "creating", "stage": "capturing"}
    with pytest.raises(APIError) as refused:
        sdk.sandboxes.claim("mine")
    assert refused.value.code == "template_not_ready"
    threading.Timer(0.3, operations.cut, [running.id]).start()
    ready = sdk.wait_template_ready("mine", timeout_sec=20)
    assert creation_of(ready) == {"state": "ready", "stage": "publishing"}
    assert sdk.create_template_from_sandbox(request, options).template_id == "mine"
    with pytest.raises(APIError) as refused:
        sdk.create_template_from_sandbox(request)
    assert (refused.value.status_code, refused.value.code) == (409, "conflict")
    sdk.delete_template("mine")
    with pytest.raises(APIError) as refused:
        sdk.get_template("mine")
    assert refused.value.status_code == 404


def creation_of(template: Any) -> dict[str, str]:
    creation = template.status.creation
    return {"state": str(creation.state), "stage": str(creation.stage)}


def test_a_restore_to_nothing_is_refused_and_names_no_field_without_a_name(
    http: httpx.Client, at_once: FakeHost, running: Sandbox
) -> None:
    response = http.post(f"/sandboxes/{running.id}/rootfs/restore", json={})

    assert response.status_code == 400
    assert response.json()["error"] == {
        "code": "bad_request",
        "message": "Give either snapshot_id or generation.",
    }


def test_the_sdk_is_told_that_there_is_nothing_to_rebase_to(
    url: str, sdk: sandbox0.Client, machine: FakeHost, running: Sandbox
) -> None:
    with pytest.raises(APIError) as refused:
        sdk.sandboxes.rebase_rootfs(
            running.id, RebaseSandboxRootFSRequest(target_base_artifact_digest="sha256:0")
        )

    assert (refused.value.status_code, refused.value.code) == (409, "conflict")


def test_a_snapshot_that_cannot_be_made_is_503_and_says_why(
    http: httpx.Client, at_once: FakeHost, running: Sandbox
) -> None:
    at_once.silent.add(running.uuid)

    response = http.post(f"/sandboxes/{running.id}/snapshots", json={})

    assert response.status_code == 503
    assert response.headers["Retry-After"] == "1"
    assert "did not answer" in response.json()["error"]["message"]
    crash = {"consistency": "crash"}
    response = http.post(f"/sandboxes/{running.id}/snapshots", json=crash)
    assert response.status_code == 201
    response = http.post(f"/sandboxes/{running.id}/fork", json=crash)
    assert response.status_code == 201


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("snapshots", {"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ("snapshots", {"expires_at": "soon"}, "expires_at"),
        ("snapshots", {"name": "x" * 256}, "name"),
        ("snapshots", {"name": "a\0b"}, "name"),
        ("snapshots", {"name": "a\x1b[2Jb"}, "name"),
        ("snapshots", {"name": "a\nb"}, "name"),
        ("snapshots", {"name": "a\x85b"}, "name"),
        ("snapshots", {"consistency": "none"}, "consistency"),
        ("snapshots", {"size": 1}, "size"),
        ("fork", {"memory": True}, "memory"),
        ("fork", {"config": {"ttl": -1}}, "config.ttl"),
        ("fork", {"config": {"ttl": 9, "hard_ttl": 1}}, "config.ttl"),
        ("fork", {"generation": "1"}, "generation"),
        ("rootfs/restore", {}, "snapshot_id"),
        ("rootfs/restore", {"snapshot_id": "x", "generation": 1}, "snapshot_id"),
        ("rootfs/restore", {"generation": -1}, "generation"),
    ],
)
@pytest.mark.usefixtures("at_once")
def test_a_wrong_field_is_named_and_nothing_is_made(
    http: httpx.Client,
    paused: Sandbox,
    path: str,
    body: dict[str, Any],
    field: str,
) -> None:
    response = http.post(f"/sandboxes/{paused.id}/{path}", json=body)

    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]
    assert not Snapshot.objects.exists()
    assert Sandbox.objects.count() == 1


@pytest.mark.parametrize(
    "template_id", ["", "a/b", "a b", "-x", "from-sandbox", "import", "x" * 256, "é", "a\0"]
)
def test_a_template_has_an_id_that_fits_a_path(
    http: httpx.Client, at_once: FakeHost, paused: Sandbox, template_id: str
) -> None:
    body = {"template_id": template_id, "sandbox_id": paused.id}

    response = http.post("/templates/from-sandbox", json=body)

    assert response.status_code == 400
    assert "template_id" in response.json()["error"]["details"]


def test_a_list_of_snapshots_can_be_paged(
    http: httpx.Client, at_once: FakeHost, paused: Sandbox
) -> None:
    url = f"/sandboxes/{paused.id}/snapshots"
    made = [http.post(url, json={}).json()["data"]["id"] for _ in range(5)]

    seen: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        page = http.get(url, params=query).json()["data"]
        assert page["count"] == 5
        seen += [one["id"] for one in page["snapshots"]]
        if "next_cursor" not in page:
            break
        query["cursor"] = page["next_cursor"]

    assert seen == made[::-1]
    assert http.get(url, params={"cursor": "nonsense"}).status_code == 400


def test_the_history_is_listed_newest_first_and_paged(
    http: httpx.Client, at_once: FakeHost, running: Sandbox
) -> None:
    for _ in range(3):
        write(at_once, running)
        snapshot = http.post(f"/sandboxes/{running.id}/snapshots", json={}).json()["data"]

    url = f"/sandboxes/{running.id}/history"
    data = http.get(url).json()["data"]

    numbers = [one["generation"] for one in data["generations"]]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) == 3
    first = data["generations"][0]
    assert first["kind"] == "checkpoint"
    assert first["is_current"] is True
    assert first["snapshots"] == [snapshot["id"]]
    assert first["changed_bytes"] == BLOCK_BYTES
    assert "next_cursor" not in data
    page = http.get(url, params={"limit": 2}).json()["data"]
    rest = http.get(url, params={"cursor": page["next_cursor"]}).json()["data"]
    assert page["generations"] + rest["generations"] == data["generations"]


def test_a_sandbox_that_wrote_nothing_has_the_moment_it_began_with(
    http: httpx.Client, at_once: FakeHost, running: Sandbox, template: Template
) -> None:
    data = http.get(f"/sandboxes/{running.id}/history").json()["data"]

    assert [one["generation"] for one in data["generations"]] == [0]
    assert data["generations"][0]["kind"] == "base"


@pytest.fixture
def mallorys_http(
    url: str, mallorys_team: Team, mallory_user: User
) -> Callable[..., httpx.Response]:
    secret = make_key(mallorys_team, mallory_user, Role.ADMIN, Role.DEVELOPER)[1]
    headers = {"Authorization": f"Bearer {secret}"}

    def ask(method: str, path: str, **more: Any) -> httpx.Response:
        return httpx.request(method, f"{url}/api/v1{path}", headers=headers, **more)

    return ask


def test_a_stranger_finds_neither_snapshot_nor_sandbox(
    mallorys_http: Callable[..., httpx.Response],
    http: httpx.Client,
    at_once: FakeHost,
    paused: Sandbox,
) -> None:
    snapshot = http.post(f"/sandboxes/{paused.id}/snapshots", json={}).json()["data"]
    one = f"/sandbox-rootfs-snapshots/{snapshot['id']}"
    before = Generation.objects.count()

    from_sandbox = {"template_id": "mine", "sandbox_id": paused.id}
    claim = {"template": "default", "snapshot_id": snapshot["id"]}
    answers = [
        mallorys_http("GET", one),
        mallorys_http("DELETE", one),
        mallorys_http("GET", f"/sandboxes/{paused.id}/snapshots"),
        mallorys_http("GET", f"/sandboxes/{paused.id}/history"),
        mallorys_http("POST", f"/sandboxes/{paused.id}/fork", json={}),
        mallorys_http("POST", f"/sandboxes/{paused.id}/snapshots", json={}),
        mallorys_http("POST", "/templates/from-sandbox", json=from_sandbox),
        mallorys_http("POST", "/sandboxes", json=claim),
    ]

    assert [answer.status_code for answer in answers] == [404] * 8
    assert http.get(one).status_code == 200
    assert Generation.objects.count() == before
    assert Sandbox.objects.count() == 1


def test_a_public_template_cannot_be_deleted(
    http: httpx.Client, at_once: FakeHost, template: Template
) -> None:
    response = http.delete("/templates/default")

    assert response.status_code == 403
    assert Template.objects.filter(pk=template.pk).exists()


def test_a_viewers_key_of_the_team_cannot_make_a_template(
    url: str, at_once: FakeHost, paused: Sandbox, alices_team: Team, alice_user: User
) -> None:
    secret = make_key(alices_team, alice_user, Role.VIEWER)[1]

    response = httpx.post(
        f"{url}/api/v1/templates/from-sandbox",
        headers={"Authorization": f"Bearer {secret}"},
        json={"template_id": "mine", "sandbox_id": paused.id},
    )

    assert response.status_code == 403


def test_forty_snapshots_at_once_hold_no_thread(
    http: httpx.Client, machine: FakeHost, running: Sandbox, alices_key: tuple[ApiKey, str]
) -> None:
    """More requests wait for one host than the database has threads."""
    base, headers = http.base_url, http.headers

    async def ask_all() -> list[int]:
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(
            base_url=base, headers=headers, timeout=60, limits=limits
        ) as client:
            asked = [
                asyncio.create_task(client.post(f"/sandboxes/{running.id}/snapshots", json={}))
                for _ in range(40)
            ]
            while await asyncio.to_thread(_wanted) < 40:
                await asyncio.sleep(0.05)
            detail = await client.get(f"/sandboxes/{running.id}", timeout=10)
            assert detail.status_code == 200
            await asyncio.to_thread(operations.cut, running.id)
            return [response.status_code for response in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [201] * 40


def _wanted() -> int:
    try:
        return Cut.objects.filter(state="wanted").count()
    finally:
        connections.close_all()


def test_a_deleted_sandbox_leaves_its_snapshot(
    http: httpx.Client, at_once: FakeHost, paused: Sandbox
) -> None:
    snapshot = http.post(f"/sandboxes/{paused.id}/snapshots", json={"name": "kept"}).json()
    services.delete_sandbox(sandbox=paused)

    found = http.get(f"/sandbox-rootfs-snapshots/{snapshot['data']['id']}").json()["data"]

    assert found["name"] == "kept"
    assert found["sandbox_id"] == paused.id
    assert snapshots.find_snapshot(found["id"], paused.team)
