"""Disks as files in the console, over a real server and from a real store."""

import re
import subprocess
from contextlib import closing
from datetime import timedelta
from html import unescape
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import httpx
import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import AuditEvent, Team, User
from common.api.routing import BODY_LIMIT_BYTES
from common.units import MiB
from hosts.models import Host
from sandboxes.models import Sandbox, Snapshot, Template
from sandboxes.web import image_views
from tests.fakes.host import FakeHost
from tests.sandboxes.api.conftest import _server, guest, url
from tests.sandboxes.api.test_exports import check, download, exports, gated, raw, s3, s3_server
from tests.sandboxes.web.test_files import session_of

__all__ = ["_server", "exports", "gated", "guest", "raw", "s3", "s3_server", "url"]

IMPORT = "/templates/import/"

pytestmark = pytest.mark.django_db(transaction=True)


def take(browser: Client, sandbox: Sandbox) -> Snapshot:
    form = {"name": "", "description": "", "kept_s": 0}
    browser.post(f"/sandboxes/{sandbox.id}/snapshots/new/", form)
    return Snapshot.objects.get()


@pytest.mark.usefixtures("_server", "exports")  # the server outlives the guest
def test_disks_are_downloaded_from_their_pages(
    url: str,
    raw: Path,
    paused: Sandbox,
    alices_browser: Client,
    tmp_path: Path,
) -> None:
    snapshot = take(alices_browser, paused)
    page = alices_browser.get(f"/sandboxes/{paused.id}/snapshots/").content.decode()
    paths = [f"/sandboxes/{paused.id}/export.qcow2", f"/snapshots/{snapshot.id}/export.qcow2"]

    with closing(session_of(alices_browser, url)) as http:
        for path in paths:
            assert f'href="{path}"' in page
            check(download(http, path, tmp_path / "image"), raw)

    events = AuditEvent.objects.filter(action__endswith=".export", user__isnull=False)
    assert sorted(event.action for event in events) == ["sandbox.export", "snapshot.export"]


@pytest.mark.usefixtures("at_once")
def test_a_stranger_finds_neither(
    paused: Sandbox, alices_browser: Client, mallorys_browser: Client
) -> None:
    snapshot = take(alices_browser, paused)

    for path in (f"sandboxes/{paused.id}", f"snapshots/{snapshot.id}"):
        assert mallorys_browser.get(f"/{path}/export.qcow2").status_code == 404
        assert Client().get(f"/{path}/export.qcow2").status_code == 302

    assert not AuditEvent.objects.filter(action__endswith=".export").exists()


def test_why_there_is_no_file_is_said_in_words(
    at_once: FakeHost, paused: Sandbox, alices_browser: Client
) -> None:
    Host.objects.update(seen_at=timezone.now() - timedelta(days=1))

    response = alices_browser.get(f"/sandboxes/{paused.id}/export.qcow2")

    assert response.status_code == 503
    assert response["Content-Type"].startswith("text/plain")


@pytest.mark.usefixtures("at_once")
def test_a_fork_of_one_that_is_gone_names_it_and_leads_nowhere(
    running: Sandbox, alices_browser: Client
) -> None:
    alices_browser.post(f"/sandboxes/{running.id}/fork/")
    child = running.forks.get()
    link = f'href="/sandboxes/{running.id}/"'

    def page() -> str:
        return alices_browser.get(f"/sandboxes/{child.id}/head/").content.decode()

    assert link in page()
    Sandbox.objects.filter(pk=running.pk).update(state=Sandbox.State.DELETED)

    assert link not in page()
    assert running.id in page()


# -- imports ------------------------------------------------------------------------------


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image of a file system, with room after it."""
    path = tmp_path / "image.raw"
    subprocess.run(["mkfs.ext4", "-q", str(path), "16M"], check=True, capture_output=True)
    return path


def send(
    http: httpx.Client, image: Path, template_id: str = "mine", **headers: str
) -> httpx.Response:
    form = {"template_id": template_id, "display_name": "My own", "description": ""}
    with image.open("rb") as file:
        return http.post(IMPORT, data=form, files={"image": file}, headers=headers)


@pytest.mark.usefixtures("_server", "exports")
def test_an_image_is_imported_and_shown_with_the_templates(
    url: str, image: Path, alices_browser: Client
) -> None:
    assert f'href="{IMPORT}"' in alices_browser.get("/templates/").content.decode()
    with image.open("r+b") as file:
        file.truncate(BODY_LIMIT_BYTES + MiB)

    with closing(session_of(alices_browser, url)) as http:
        response = send(http, image, "Mine")

    assert response.status_code == 302, response.text
    assert response.headers["Location"] == "/templates/"
    assert Template.objects.get(template_id="mine").is_ready
    assert "My own" in alices_browser.get("/templates/").content.decode()


@pytest.mark.usefixtures("_server", "exports")
def test_what_is_wrong_is_said_beside_its_field(
    url: str, image: Path, tmp_path: Path, alices_team: Team, alices_browser: Client
) -> None:
    Template.objects.create(team=alices_team, template_id="taken", spec={})
    odd, empty = tmp_path / "odd", tmp_path / "empty"
    odd.write_bytes(b"no file system" * 1000)
    empty.touch()

    with closing(session_of(alices_browser, url)) as http:
        for given, name, said in (
            (image, "a b", "Letters, digits"),
            (image, "taken", "a template 'taken' already"),
            (empty, "mine", "The file is empty"),
            (odd, "mine", "ext4"),
        ):
            response = send(http, given, name, **{"HX-Request": "true"})
            assert response.status_code == 422
            errors = re.findall(r'class="invalid-feedback[^>]*>(.*?)<', response.text)
            assert len(errors) == 1
            assert said in unescape(errors[0])

    assert Template.objects.get().template_id == "taken"


def test_one_that_is_too_large_is_refused_as_soon_as_that_is_known(
    settings: Any, monkeypatch: pytest.MonkeyPatch, image: Path, alices_browser: Client
) -> None:
    monkeypatch.setattr(image_views, "FORM_BYTES", 64 * MiB)
    for limit_bytes in (16 * MiB - 1, 1 - 64 * MiB):
        # The first is seen while it comes, the second by the length that was announced.
        settings.IMPORT_MAX_BYTES = limit_bytes
        with image.open("rb") as file:
            response = alices_browser.post(IMPORT, {"template_id": "mine", "image": file})

        assert response.status_code == 422
        assert response.content.count(b"It is larger than") == 1
    assert not Template.objects.exists()


def test_only_so_many_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch, alices_browser: Client
) -> None:
    monkeypatch.setattr(image_views, "_uploads", BoundedSemaphore(1))
    for _ in range(2):  # each gives its place back
        assert alices_browser.post(IMPORT).status_code == 422
    image_views._uploads.acquire()

    response = alices_browser.post(IMPORT)

    assert response.status_code == 503
    assert "Try again" in response.content.decode()


def test_who_may_not_import_is_told_before_anything_is_read(
    image: Path, bobs_browser: Client, alice_user: User, alices_team: Team
) -> None:
    careful = Client(enforce_csrf_checks=True)
    careful.force_login(alice_user)

    for browser, status in ((bobs_browser, 403), (careful, 403), (Client(), 302)):
        with image.open("rb") as file:
            response = browser.post(IMPORT, {"template_id": "mine", "image": file})
        assert response.status_code == status

    assert IMPORT not in bobs_browser.get("/templates/").content.decode()
    assert not Template.objects.exists()


def test_a_stranger_does_not_see_what_was_imported(
    alices_team: Team, mallorys_browser: Client
) -> None:
    Template.objects.create(team=alices_team, template_id="hers", spec={})

    assert "hers" not in mallorys_browser.get("/templates/").content.decode()
    assert mallorys_browser.post("/templates/hers/delete/").status_code == 404
