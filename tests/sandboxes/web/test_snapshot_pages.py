"""Snapshots, the history, forks and templates made from a sandbox, in the console."""

import json
import re
from html import unescape
from typing import Any

import pytest
from django.test import Client

from accounts.models import Team
from hosts.models import Generation, Volume
from hosts.services import publish_generation
from sandboxes.models import Sandbox, Snapshot, Template
from tests.fakes.host import FakeHost

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("at_once")]

HTMX = {"HX-Request": "true"}


def text_of(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200, response.content
    return unescape(response.content.decode())


def said(response: Any) -> str:
    text: str = json.loads(response["HX-Trigger"])["toast"]["text"]
    return text


def write(machine: FakeHost, sandbox: Sandbox) -> None:
    machine.disks.disks[sandbox.volume_id].writes += 1


def head_of(sandbox: Sandbox) -> Generation:
    head = Volume.objects.select_related("head").get(pk=sandbox.volume_id).head
    assert head is not None
    return head


def take(client: Client, sandbox: Sandbox, **fields: object) -> Any:
    form = {"name": "", "description": "", "kept_s": 0} | fields
    return client.post(f"/sandboxes/{sandbox.id}/snapshots/new/", form, headers=HTMX)


def test_a_sandbox_without_snapshots_says_what_they_are(
    running: Sandbox, alices_browser: Client
) -> None:
    page = text_of(alices_browser, f"/sandboxes/{running.id}/snapshots/")

    assert "No snapshots" in page
    assert "Take a snapshot" in page


def test_a_name_with_control_characters_is_refused(
    at_once: FakeHost, running: Sandbox, alices_browser: Client
) -> None:
    response = take(alices_browser, running, name="a\x1b[2Jb")

    assert response.status_code == 422
    assert "without control characters" in response.content.decode()
    assert not Snapshot.objects.exists()


def test_a_snapshot_is_taken_listed_and_deleted(
    at_once: FakeHost, running: Sandbox, alices_browser: Client
) -> None:
    write(at_once, running)

    response = take(alices_browser, running, name="before <b>", kept_s=86_400)

    assert said(response) == "Snapshot before <b> is stored."
    snapshot = Snapshot.objects.get()
    assert snapshot.expires_at is not None
    assert snapshot.created_by is not None
    assert b"before &lt;b&gt;" in response.content
    for path in (f"/sandboxes/{running.id}/snapshots/", "/templates/"):
        assert snapshot.id in text_of(alices_browser, path)
    response = alices_browser.post(f"/snapshots/{snapshot.id}/delete/", headers=HTMX)
    assert "is deleted" in said(response)
    assert snapshot.id not in text_of(alices_browser, "/templates/")


def test_one_that_cannot_be_made_is_said_in_words(
    at_once: FakeHost, running: Sandbox, alices_browser: Client
) -> None:
    at_once.silent.add(running.uuid)

    response = take(alices_browser, running)

    assert response.status_code == 503
    assert "did not answer" in response.content.decode()


def test_a_fork_leads_to_its_page(running: Sandbox, alices_browser: Client) -> None:
    response = alices_browser.post(f"/sandboxes/{running.id}/fork/", headers=HTMX)

    child = running.forks.get()
    assert response["HX-Redirect"] == f"/sandboxes/{child.id}/"
    assert running.id in text_of(alices_browser, f"/sandboxes/{child.id}/files/")


def test_a_moment_is_restored_or_forked(
    at_once: FakeHost, running: Sandbox, alices_browser: Client
) -> None:
    write(at_once, running)
    take(alices_browser, running)
    first = head_of(running)
    write(at_once, running)
    alices_browser.post(f"/sandboxes/{running.id}/pause/")
    form = {"generation": first.number}

    response = alices_browser.post(f"/sandboxes/{running.id}/restore/", form, headers=HTMX)
    alices_browser.post(f"/sandboxes/{running.id}/fork/", form, headers=HTMX)

    assert "is as it was then" in said(response)
    assert head_of(running).root_key == first.root_key
    assert head_of(running.forks.get()) == first


@pytest.mark.parametrize(
    "form", [{}, {"generation": "x"}, {"generation": 1, "snapshot_id": "y"}]
)
def test_a_restore_says_what_to(
    paused: Sandbox, alices_browser: Client, form: dict[str, object]
) -> None:
    before = head_of(paused)

    response = alices_browser.post(f"/sandboxes/{paused.id}/restore/", form, headers=HTMX)

    assert response.status_code == 400
    assert head_of(paused) == before


def test_the_timeline_has_every_moment_for_the_slider(
    at_once: FakeHost, running: Sandbox, alices_browser: Client
) -> None:
    for name in ("one", "two"):
        write(at_once, running)
        take(alices_browser, running, name=name)

    page = alices_browser.get(f"/sandboxes/{running.id}/history/").content.decode()

    found = re.search(r'<script id="timeline-data"[^>]*>(.*?)</script>', page)
    assert found is not None
    points = json.loads(found[1])
    assert [one["snapshots"] for one in points] == [["one"], ["two"]]
    assert [one["is_current"] for one in points] == [False, True]
    assert points[0]["changed"] == "64 KiB"
    assert 'type="range"' in page


def test_a_history_without_moments_says_so(running: Sandbox, alices_browser: Client) -> None:
    page = text_of(alices_browser, f"/sandboxes/{running.id}/history/")

    assert "Nothing saved yet" in page
    assert "timeline-data" not in page


def test_a_thousand_moments_take_as_many_queries_as_one(
    paused: Sandbox,
    alices_browser: Client,
    django_assert_max_num_queries: Any,
) -> None:
    volume = Volume.objects.get(pk=paused.volume_id)
    Generation.objects.bulk_create(
        Generation(
            volume=volume,
            number=10 + number,
            epoch=1,
            kind=Generation.Kind.BACKGROUND,
            root_key="r",
            size_bytes=1,
        )
        for number in range(1_000)
    )

    with django_assert_max_num_queries(16):
        alices_browser.get(f"/sandboxes/{paused.id}/history/")


def test_a_template_is_made_of_a_sandbox_and_deleted(
    paused: Sandbox, alices_browser: Client
) -> None:
    form = {"template_id": "Mine", "display_name": "My own", "description": ""}

    response = alices_browser.post(f"/sandboxes/{paused.id}/template/", form, headers=HTMX)

    assert response["HX-Redirect"] == "/templates/"
    assert Template.objects.get(template_id="mine").is_ready
    assert "My own" in text_of(alices_browser, "/templates/")
    alices_browser.post("/templates/mine/delete/", headers=HTMX)
    assert not Template.objects.filter(template_id="mine").exists()


def test_a_template_form_says_what_is_wrong(paused: Sandbox, alices_browser: Client) -> None:
    form = {"template_id": "a b", "display_name": "", "description": ""}

    response = alices_browser.post(f"/sandboxes/{paused.id}/template/", form, headers=HTMX)

    assert response.status_code == 422
    assert "Letters, digits" in response.content.decode()


def test_one_that_failed_says_why(
    at_once: FakeHost, running: Sandbox, alices_browser: Client
) -> None:
    at_once.silent.add(running.uuid)
    form = {"template_id": "mine", "display_name": "", "description": ""}
    alices_browser.post(f"/sandboxes/{running.id}/template/", form, headers=HTMX)

    assert "did not answer" in text_of(alices_browser, "/templates/")


def test_a_public_template_or_a_strangers_is_not_deleted(
    paused: Sandbox, template: Template, alices_browser: Client, mallorys_browser: Client
) -> None:
    alices_browser.post(
        f"/sandboxes/{paused.id}/template/",
        {"template_id": "mine", "display_name": "", "description": ""},
    )

    for browser, name in ((alices_browser, "default"), (mallorys_browser, "mine")):
        assert browser.post(f"/templates/{name}/delete/").status_code == 404

    assert Template.objects.count() == 2


def test_a_stranger_finds_no_snapshot(
    paused: Sandbox, alices_browser: Client, mallorys_browser: Client, mallorys_team: Team
) -> None:
    take(alices_browser, paused)
    snapshot = Snapshot.objects.get()

    assert mallorys_browser.post(f"/snapshots/{snapshot.id}/delete/").status_code == 404
    form = {"template_id": "default", "memory_bytes": 1 << 29, "snapshot_id": snapshot.id}
    response = mallorys_browser.post("/sandboxes/claim/", form, headers=HTMX)
    assert response.status_code == 422
    assert "No such snapshot" in response.content.decode()


def test_a_claim_begins_with_a_snapshot(
    at_once: FakeHost, running: Sandbox, alices_browser: Client
) -> None:
    write(at_once, running)
    take(alices_browser, running)
    snapshot = Snapshot.objects.get()

    page = text_of(alices_browser, f"/sandboxes/claim/?snapshot={snapshot.id}&template=default")
    assert f'value="{snapshot.id}"' in page
    form = {"template_id": "default", "memory_bytes": 1 << 29, "snapshot_id": snapshot.id}
    alices_browser.post("/sandboxes/claim/", form, headers=HTMX)

    claimed = Sandbox.objects.exclude(pk=running.pk).get()
    assert claimed.snapshot == snapshot
    assert head_of(claimed) == snapshot.generation


def test_a_viewer_sees_them_and_no_buttons(
    paused: Sandbox, alices_browser: Client, bobs_browser: Client
) -> None:
    take(alices_browser, paused, name="seen")
    snapshot = Snapshot.objects.get()

    for path in (f"/sandboxes/{paused.id}/snapshots/", "/templates/"):
        page = text_of(bobs_browser, path)
        assert "seen" in page
        assert "Delete snapshot" not in page
        assert "Take a snapshot" not in page
    page = text_of(bobs_browser, f"/sandboxes/{paused.id}/history/")
    assert "Restore it" not in page
    assert bobs_browser.post(f"/snapshots/{snapshot.id}/delete/").status_code == 403


def test_the_files_of_a_moment_can_be_read_and_not_changed(
    paused: Sandbox, alices_browser: Client
) -> None:
    number = publish_generation(
        paused.volume_id,
        epoch=Volume.objects.get(pk=paused.volume_id).epoch,
        kind=Generation.Kind.CHECKPOINT,
        root_key="roots/x",
        size_bytes=1 << 40,
    ).number
    base = f"/sandboxes/{paused.id}/files/"

    page = text_of(alices_browser, f"{base}?path=/etc&generation={number}")

    assert f"list/?path=/etc&generation={number}" in page
    for act in ("write", "mkdir", "move", "delete"):
        response = alices_browser.post(f"{base}{act}/?path=/x&generation={number}")
        assert response.status_code == 400
        assert "the past" in response.content.decode()
    response = alices_browser.get(f"{base}list/?path=/&generation=nonsense")
    assert "number from the sandbox" in unescape(response.content.decode())
