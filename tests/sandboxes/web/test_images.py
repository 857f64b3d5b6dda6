"""Disks as files in the console, over a real server and from a real store."""

from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import AuditEvent
from hosts.models import Host
from sandboxes.models import Sandbox, Snapshot
from tests.fakes.host import FakeHost
from tests.sandboxes.api.conftest import _server, guest, url
from tests.sandboxes.api.test_exports import check, download, exports, gated, raw, s3, s3_server
from tests.sandboxes.web.test_files import session_of

__all__ = ["_server", "exports", "gated", "guest", "raw", "s3", "s3_server", "url"]

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
