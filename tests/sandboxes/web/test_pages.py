"""The pages of sandboxes: what they show, who may see them, and how many queries they take."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from html import unescape

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from dramatiq.brokers.stub import StubBroker

from accounts.models import Membership, Role, Team, User
from common.units import GiB, MiB
from hosts.models import Generation, Host, Volume
from sandboxes.models import Sandbox, Template
from sandboxes.web.rows import PAGE_SIZE
from tests.conftest import signed_in

LIST = "/sandboxes/"
HTMX = {"HX-Request": "true"}

# Every path below a sandbox, and whether it reads (GET) or acts (POST).
PATHS = [
    ("get", ""),
    ("get", "row/"),
    ("get", "head/"),
    ("get", "terminal/"),
    ("get", "history/"),
    ("get", "snapshots/"),
    ("get", "settings/"),
    ("get", "files/"),
    ("get", "files/list/?path=/"),
    ("get", "files/view/?path=/etc/hostname"),
    ("get", "files/raw/?path=/etc/hostname"),
    ("post", "pause/"),
    ("post", "resume/"),
    ("post", "checkpoint/"),
    ("post", "delete/"),
    ("post", "settings/"),
    ("post", "memory/"),
    ("post", "snapshots/new/"),
    ("post", "restore/"),
    ("post", "fork/"),
    ("post", "template/"),
    ("post", "files/write/?path=/tmp/x"),
    ("post", "files/mkdir/?path=/tmp/x"),
    ("post", "files/move/?path=/tmp/x"),
    ("post", "files/delete/?path=/tmp/x"),
]
ACTS = [path for method, path in PATHS if method == "post"]


def many_sandboxes(team: Team, template: Template, count: int) -> None:
    """Insert sleeping sandboxes, a minute apart, the last one the newest."""
    now = timezone.now()
    volumes = Volume.objects.bulk_create(
        [Volume(head=template.generation) for _ in range(count)]
    )
    Sandbox.objects.bulk_create(
        Sandbox(
            id=f"rs-c1-default-{number:05}",
            team=team,
            template=template,
            template_name=template.template_id,
            volume=volume,
            state=Sandbox.State.PAUSED,
            memory_bytes=512 * MiB,
            created_at=now - timedelta(minutes=count - number),
        )
        for number, volume in enumerate(volumes)
    )


def text_of(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200, response.content
    return unescape(response.content.decode())


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_a_stranger_finds_no_sandbox_at_any_path(
    running: Sandbox, mallorys_browser: Client, method: str, path: str
) -> None:
    response = getattr(mallorys_browser, method)(f"/sandboxes/{running.id}/{path}")

    assert response.status_code == 404
    running.refresh_from_db()
    assert running.state == Sandbox.State.RUNNING


@pytest.mark.parametrize("path", ["", "x/", "RS-C1/", "a%00b/head/", "x" * 300 + "/head/"])
def test_an_id_that_is_none_is_not_found(alices_browser: Client, path: str) -> None:
    assert alices_browser.get(f"/sandboxes/{path or 'nope/'}").status_code == 404


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_who_is_not_signed_in_is_sent_to_sign_in(
    running: Sandbox, method: str, path: str
) -> None:
    response = getattr(Client(), method)(f"/sandboxes/{running.id}/{path}")

    assert response.status_code == 302
    assert response["Location"].startswith("/accounts/login/")


@pytest.mark.parametrize("path", ACTS)
def test_a_viewer_may_not_act(running: Sandbox, bobs_browser: Client, path: str) -> None:
    response = bobs_browser.post(f"/sandboxes/{running.id}/{path}")

    assert response.status_code == 403
    running.refresh_from_db()
    assert running.state == Sandbox.State.RUNNING


@pytest.mark.parametrize("path", ACTS)
def test_an_act_needs_the_token_of_the_page(
    running: Sandbox, alice_user: User, path: str
) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(alice_user)

    assert client.post(f"/sandboxes/{running.id}/{path}").status_code == 403


@pytest.mark.parametrize("path", ["pause/", "resume/", "checkpoint/", "delete/"])
def test_an_act_is_a_post(running: Sandbox, alices_browser: Client, path: str) -> None:
    assert alices_browser.get(f"/sandboxes/{running.id}/{path}").status_code == 405


def test_a_viewer_sees_the_list_and_no_buttons(running: Sandbox, bobs_browser: Client) -> None:
    page = text_of(bobs_browser, LIST)

    assert running.id in page
    assert "data-claim" not in page
    assert f"/sandboxes/{running.id}/pause/" not in page


def test_the_first_visit_shows_three_ways_to_start(
    template: Template, alices_browser: Client
) -> None:
    page = text_of(alices_browser, LIST)

    assert "Claim a sandbox" in page
    assert 'client.sandboxes.claim("default")' in page
    assert "curl http" in page


def test_the_list_takes_as_many_queries_for_fifty_as_for_one(
    alices_team: Team, template: Template, alices_browser: Client
) -> None:
    many_sandboxes(alices_team, template, 1)
    alices_browser.get(LIST)
    with CaptureQueriesContext(
        connection,
    ) as one:
        alices_browser.get(LIST)
    Sandbox.objects.all().delete()
    many_sandboxes(alices_team, template, PAGE_SIZE)

    with CaptureQueriesContext(connection) as fifty:
        page = text_of(alices_browser, LIST)

    assert page.count("data-live=") == PAGE_SIZE
    assert len(fifty) == len(one)
    assert len(fifty) <= 8


def test_pages_follow_each_other_without_gap_or_repeat(
    alices_team: Team, template: Template, alices_browser: Client
) -> None:
    many_sandboxes(alices_team, template, 2 * PAGE_SIZE + 3)
    # Made in the same instant, so that only the id can part them at the end of a page.
    Sandbox.objects.update(created_at=timezone.now())
    seen: list[str] = []
    after = ""

    while True:
        response = alices_browser.get(LIST, {"after": after})
        page = response.context["page"]
        seen += [row.sandbox.id for row in page.rows]
        after = page.next
        if not after:
            break

    assert len(seen) == len(set(seen)) == 2 * PAGE_SIZE + 3
    assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize("after", ["nonsense", "2026-01-01~", "~x", "2026-99-01T00:00:00Z~x"])
def test_a_cursor_that_is_none_shows_the_first_page(
    running: Sandbox, alices_browser: Client, after: str
) -> None:
    assert running.id in text_of(alices_browser, f"{LIST}?after={after}")


@pytest.mark.parametrize(
    ("query", "is_found"),
    [
        ("q=00003", True),
        ("q=no-such", False),
        ("state=paused", True),
        ("state=running", False),
        ("state=bogus", True),
        ("template=default", True),
        ("template=other", False),
    ],
)
def test_filters_narrow_the_list(
    alices_team: Team, template: Template, alices_browser: Client, query: str, is_found: bool
) -> None:
    many_sandboxes(alices_team, template, 5)

    found = "rs-c1-default-00003" in text_of(alices_browser, f"{LIST}?{query}")

    assert found is is_found


def test_a_deleted_sandbox_is_in_no_list(paused: Sandbox, alices_browser: Client) -> None:
    alices_browser.post(f"/sandboxes/{paused.id}/delete/")

    paused.refresh_from_db()
    assert paused.state == Sandbox.State.DELETED
    assert paused.id not in text_of(alices_browser, LIST)
    assert alices_browser.get(f"/sandboxes/{paused.id}/").status_code == 404


def test_without_scripts_a_deletion_leads_to_the_list(
    alices_browser: Client, running: Sandbox
) -> None:
    response = alices_browser.post(f"/sandboxes/{running.id}/delete/")

    running.refresh_from_db()
    assert running.state == Sandbox.State.TERMINATING
    assert (response.status_code, response["Location"]) == (302, "/sandboxes/")


def test_the_list_shows_what_a_sandbox_has_cost_this_month(
    running: Sandbox, alices_browser: Client
) -> None:
    assert "< $0.01" in text_of(alices_browser, LIST)


def test_a_claim_starts_a_sandbox(
    host: Host, template: Template, alice_user: User, alices_browser: Client
) -> None:
    form = {
        "template_id": "default",
        "memory_bytes": GiB,
        "ttl_s": "1h 30m",
        "hard_ttl_s": "2d",
        "auto_resume": "on",
        "env_vars": "NAME=value = with = signs\n\nEMPTY=",
    }

    response = alices_browser.post("/sandboxes/claim/", form, headers=HTMX)

    sandbox = Sandbox.objects.get()
    assert response["HX-Redirect"] == f"/sandboxes/{sandbox.id}/terminal/"
    assert sandbox.created_by == alice_user
    assert sandbox.memory_bytes == GiB
    assert (sandbox.ttl_s, sandbox.hard_ttl_s) == (5400, 172_800)
    assert sandbox.auto_resume
    assert sandbox.env_vars == {"NAME": "value = with = signs", "EMPTY": ""}


@pytest.mark.usefixtures("host", "template")
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("template_id", "no-such", "not one of the available choices"),
        ("memory_bytes", "12345", "not one of the available choices"),
        ("ttl_s", "soon", "such as 30m"),
        ("ttl_s", "3d", "must not be longer"),
        ("hard_ttl_s", "400d", "longest time is 365d"),
        ("env_vars", "1NAME=x", "Line 1 is not NAME=value"),
        ("env_vars", "NAME", "Line 1 is not NAME=value"),
    ],
)
def test_a_claim_says_beside_the_field_what_is_wrong_with_it(
    alices_browser: Client, field: str, value: str, says: str
) -> None:
    form = {"template_id": "default", "memory_bytes": 512 * MiB, "hard_ttl_s": "2d"}

    response = alices_browser.post("/sandboxes/claim/", form | {field: value}, headers=HTMX)

    assert response.status_code == 422
    assert any(says in error for error in response.context["form"].errors[field])
    assert says in unescape(response.content.decode())
    assert not Sandbox.objects.exists()


def test_a_claim_over_the_quota_says_who_can_raise_it(
    running: Sandbox, alices_team: Team, alices_browser: Client
) -> None:
    alices_team.running_limit = 1
    alices_team.save()
    form = {"template_id": "default", "memory_bytes": 512 * MiB}

    response = alices_browser.post("/sandboxes/claim/", form, headers=HTMX)

    assert response.status_code == 422
    assert "operator of the platform can raise" in response.content.decode()
    assert Sandbox.objects.count() == 1


def test_a_running_sandbox_opens_on_its_terminal(
    running: Sandbox, alices_browser: Client
) -> None:
    response = alices_browser.get(f"/sandboxes/{running.id}/")

    assert response["Location"] == f"/sandboxes/{running.id}/terminal/"


def test_a_paused_sandbox_opens_on_its_files_and_says_what_waking_costs(
    paused: Sandbox, alices_browser: Client
) -> None:
    response = alices_browser.get(f"/sandboxes/{paused.id}/", follow=True)

    assert response.redirect_chain[-1][0] == f"/sandboxes/{paused.id}/files/"
    assert "Resume · $0.0075/h" in response.content.decode()


def test_a_viewer_opens_a_running_sandbox_on_its_files(
    running: Sandbox, bobs_browser: Client
) -> None:
    response = bobs_browser.get(f"/sandboxes/{running.id}/")

    assert response["Location"] == f"/sandboxes/{running.id}/files/"


def test_pausing_shows_its_steps_at_once(running: Sandbox, alices_browser: Client) -> None:
    response = alices_browser.post(f"/sandboxes/{running.id}/pause/", headers=HTMX)

    running.refresh_from_db()
    assert running.state == Sandbox.State.PAUSING
    assert "Changes are saved" in response.content.decode()
    assert "its bill has stopped" in response["HX-Trigger"]


def test_a_checkpoint_is_queued_and_said(
    running: Sandbox,
    alices_browser: Client,
    queue: StubBroker,
    django_capture_on_commit_callbacks: Callable[..., AbstractContextManager[object]],
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        response = alices_browser.post(f"/sandboxes/{running.id}/checkpoint/", headers=HTMX)

    assert response.status_code == 204
    assert "Saving its disk" in response["HX-Trigger"]
    queued = [json.loads(body) for name in queue.queues for body in queue.queues[name].queue]
    assert ["checkpoint_sandbox", [running.id]] in [
        [message["actor_name"], message["args"]] for message in queued
    ]


def test_only_a_running_sandbox_can_be_checkpointed(
    paused: Sandbox, alices_browser: Client
) -> None:
    response = alices_browser.post(f"/sandboxes/{paused.id}/checkpoint/", headers=HTMX)

    assert response.status_code == 409
    assert "Checkpoint now" not in text_of(alices_browser, f"/sandboxes/{paused.id}/history/")


def test_resuming_from_the_list_answers_with_its_row(
    paused: Sandbox, alices_browser: Client
) -> None:
    response = alices_browser.post(f"/sandboxes/{paused.id}/resume/?from=row", headers=HTMX)

    paused.refresh_from_db()
    assert paused.state == Sandbox.State.RESUMING
    assert response.content.decode().lstrip().startswith("<tr data-live=")


def test_what_cannot_be_done_is_said_in_words(
    claim: Callable[..., Sandbox], alices_browser: Client
) -> None:
    starting = claim()

    response = alices_browser.post(f"/sandboxes/{starting.id}/pause/", headers=HTMX)

    assert response.status_code == 409
    assert response["Content-Type"].startswith("text/plain")
    assert b"cannot become paused" in response.content


def test_the_head_of_a_sandbox_that_was_deleted_leads_back_to_the_list(
    paused: Sandbox, alices_browser: Client, mallorys_browser: Client
) -> None:
    alices_browser.post(f"/sandboxes/{paused.id}/delete/")
    path = f"/sandboxes/{paused.id}/head/"

    assert alices_browser.get(path, headers=HTMX)["HX-Redirect"] == LIST
    assert mallorys_browser.get(path, headers=HTMX).status_code == 404


def test_history_lists_the_saved_states_and_the_runs(
    paused: Sandbox, alices_browser: Client
) -> None:
    Generation.objects.create(
        volume=paused.volume,
        number=7,
        epoch=1,
        kind=Generation.Kind.PAUSE,
        root_key="roots/x",
        size_bytes=GiB,
        uploaded_bytes=3 * MiB,
        stored_bytes=40 * MiB,
    )

    page = text_of(alices_browser, f"/sandboxes/{paused.id}/history/")

    assert "#7" in page
    assert "3 MiB" in page
    assert "40 MiB" in page
    assert paused.runs.count() == 1


def test_settings_change_how_long_it_lives(running: Sandbox, alices_browser: Client) -> None:
    form = {"ttl_s": "10m", "hard_ttl_s": "1h"}

    response = alices_browser.post(f"/sandboxes/{running.id}/settings/", form)

    running.refresh_from_db()
    assert response.status_code == 302
    assert (running.ttl_s, running.hard_ttl_s, running.auto_resume) == (600, 3600, False)
    assert running.expires_at is not None


def test_settings_say_what_is_wrong(running: Sandbox, alices_browser: Client) -> None:
    form = {"ttl_s": "2h", "hard_ttl_s": "1h"}

    response = alices_browser.post(f"/sandboxes/{running.id}/settings/", form)

    assert response.status_code == 422
    assert "must not be longer" in response.content.decode()


def test_another_size_of_memory_restarts_a_running_sandbox(
    running: Sandbox, alices_browser: Client
) -> None:
    alices_browser.post(f"/sandboxes/{running.id}/memory/", {"memory_bytes": 2 * GiB})

    running.refresh_from_db()
    assert running.memory_bytes == 2 * GiB
    assert running.state == Sandbox.State.PAUSING
    assert running.resume_when_paused


def test_templates_show_the_public_ones_and_the_teams_own(
    template: Template, alices_team: Team, mallorys_team: Team, alices_browser: Client
) -> None:
    Template.objects.create(team=alices_team, template_id="ours", spec={})
    Template.objects.create(team=mallorys_team, template_id="theirs", spec={})

    page = text_of(alices_browser, "/templates/")

    assert "ours" in page
    assert "default" in page
    assert "theirs" not in page


def test_a_name_cannot_inject_markup(
    host: Host, alices_team: Team, template: Template, alices_browser: Client
) -> None:
    template.spec["displayName"] = "<script>alert(1)</script>"
    template.save()

    page = alices_browser.get("/sandboxes/claim/", headers=HTMX).content.decode()

    assert "<script>alert" not in page


def test_pages_allow_no_inline_script(running: Sandbox, alices_browser: Client) -> None:
    for path in (LIST, f"/sandboxes/{running.id}/terminal/", "/usage/", "/templates/"):
        response = alices_browser.get(path)
        policy = response["Content-Security-Policy"]
        script = next(part for part in policy.split(";") if "script-src" in part)

        assert "unsafe" not in script
        assert "'self'" in script
        page = response.content.decode()
        assert " onclick=" not in page
        assert "<script>" not in page


def test_staff_find_every_model_in_the_admin(
    running: Sandbox, alice_user: User, alices_browser: Client
) -> None:
    alice_user.is_staff = alice_user.is_superuser = True
    alice_user.save()

    for model in (
        "sandboxes/sandbox",
        "sandboxes/template",
        "sandboxes/run",
        "sandboxes/claimrecord",
        "sandboxes/snapshot",
        "sandboxes/cut",
        "sandboxes/fileview",
        "hosts/host",
        "hosts/placement",
        "hosts/volume",
        "hosts/generation",
        "billing/meterinterval",
    ):
        assert alices_browser.get(f"/admin/{model}/?q=x").status_code == 200
    assert (
        alices_browser.get(f"/admin/sandboxes/sandbox/{running.id}/change/").status_code == 200
    )
    assert (
        alices_browser.get(f"/admin/sandboxes/sandbox/{running.id}/delete/").status_code == 403
    )
    assert alices_browser.get("/admin/sandboxes/sandbox/add/").status_code == 403


def test_the_admin_can_close_a_host_and_change_nothing_else_of_it(
    host: Host, alice_user: User, alices_browser: Client
) -> None:
    alice_user.is_staff = alice_user.is_superuser = True
    alice_user.save()

    alices_browser.post(
        f"/admin/hosts/host/{host.pk}/change/", {"name": "stolen", "memory_bytes": 1}
    )

    host.refresh_from_db()
    assert not host.is_open
    assert host.name != "stolen"
    assert host.memory_bytes == 8 * GiB


def test_a_builder_may_see_no_sandboxes(alices_team: Team, running: Sandbox) -> None:
    builder = User.objects.create_user("builder@example.com", "x")
    Membership.objects.create(team=alices_team, user=builder, role=Role.BUILDER)

    assert signed_in(builder).get(LIST).status_code == 403
