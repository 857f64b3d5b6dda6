"""The Files tab over a real server: uvicorn, the application, and a paused disk's SFTP."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from django.test import Client
from django.utils import timezone

from hosts.models import Host, Volume
from sandboxes.filenames import to_text
from sandboxes.models import Sandbox
from tests.fakes.guest_link import LocalGuest
from tests.sandboxes.api.conftest import (  # noqa: F401  (fixtures)
    _server,
    gated_host,
    guest,
    make_sandbox,
    url,
)

ODD_NAMES = [
    "with space",
    "#?%&+;=",
    "%2F",
    "emoji 😀",
    "e\u0301 and é",
    "new\nline",
    "-rf",
    "'\"<b>",
    "x" * 255,
    b"\xff\xfe not utf-8".decode("utf-8", "surrogateescape"),
]


@pytest.fixture
def asleep(
    url: str,  # noqa: F811  (first: the server outlives the guest that it is connected to)
    make_sandbox: Callable[..., Sandbox],  # noqa: F811
    gated_host: Host,  # noqa: F811
    guest: LocalGuest,  # noqa: F811
) -> Iterator[Sandbox]:
    """A paused sandbox whose files its host has opened; they are this machine's."""
    sandbox = make_sandbox(Sandbox.State.PAUSED)
    Volume.objects.filter(pk=sandbox.volume_id).update(
        attached_host=gated_host,
        attached_for=Volume.Purpose.FILES,
        files_ready_at=timezone.now(),
    )
    guest.serve_paused_files(sandbox.volume_id.hex)
    yield sandbox
    guest.drop_paused_files(sandbox.volume_id.hex)


def session_of(browser: Client, base_url: str) -> httpx.Client:
    """Return a client with the browser's session and the token that its pages carry."""
    client = httpx.Client(base_url=base_url, timeout=60, follow_redirects=False)
    client.cookies.set("sessionid", browser.cookies["sessionid"].value)
    page = client.get("/sandboxes/")
    client.headers["X-CSRFToken"] = page.text.split('"X-CSRFToken": "')[1].split('"')[0]
    return client


@pytest.fixture
def files(
    asleep: Sandbox,
    url: str,  # noqa: F811
    alices_browser: Client,
) -> Iterator[Callable[..., httpx.Response]]:
    """Call a path of the tab: `files("post", "mkdir", "/tmp/x")`."""
    with closing(session_of(alices_browser, url)) as client:

        def call(method: str, act: str, path: str, **kwargs: object) -> httpx.Response:
            # As the pages write it: a byte that is no UTF-8 has a character of its own.
            where = quote(to_text(os.fsencode(path)), safe="")
            extra = kwargs.pop("query", "")
            target = f"/sandboxes/{asleep.id}/files/{act}/?path={where}{extra}"
            return client.request(method, target, **kwargs)  # type: ignore[arg-type]

        yield call


def test_a_directory_is_listed_and_a_file_shown(
    files: Callable[..., httpx.Response], tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "hello.py").write_text("print('<b>')\n")

    listing = files("get", "list", str(tmp_path))
    page = files("get", "view", str(tmp_path / "hello.py"))

    assert listing.status_code == 200
    assert "Asleep: its saved disk" in listing.text
    assert listing.text.index(">sub<") < listing.text.index(">hello.py<")
    assert "print(&#x27;&lt;b&gt;&#x27;)" in page.text
    assert "mode/python/python.js" in page.text


@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_odd_names_are_listed_downloaded_and_deleted(
    files: Callable[..., httpx.Response], tmp_path: Path, name: str
) -> None:
    target = tmp_path / name
    target.write_bytes(b"content")

    listing = files("get", "list", str(tmp_path))
    raw = files("get", "raw", str(target))
    gone = files("post", "delete", str(target))

    assert listing.status_code == 200
    assert raw.content == b"content"
    assert raw.headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
    assert gone.status_code == 204
    assert not target.exists()


def test_bytes_go_up_and_come_down_as_they_are(
    files: Callable[..., httpx.Response], tmp_path: Path
) -> None:
    content = bytes(range(256)) * 20_000
    target = tmp_path / "blob"

    up = files("post", "write", str(target), content=content)
    down = files("get", "raw", str(target))

    assert up.status_code == 200
    assert target.read_bytes() == content
    assert down.content == content


def test_what_a_file_holds_can_run_nothing(
    files: Callable[..., httpx.Response], tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text("<script>alert(1)</script>")
    (tmp_path / "image.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")

    page = files("get", "raw", str(tmp_path / "page.html"))
    image = files("get", "raw", str(tmp_path / "image.svg"))

    assert page.headers["content-type"] == "application/octet-stream"
    assert page.headers["content-disposition"].startswith("attachment")
    assert image.headers["content-type"] == "image/svg+xml"
    for response in (page, image):
        assert response.headers["content-security-policy"].startswith("sandbox;")
        assert response.headers["x-content-type-options"] == "nosniff"


def test_an_edit_does_not_bury_what_was_written_meanwhile(
    files: Callable[..., httpx.Response], tmp_path: Path
) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("one")
    version = files("get", "view", str(target)).text.split('data-version="')[1].split('"')[0]
    saved = files("post", "write", str(target), content=b"two!", query=f"&was={version}")
    target.write_text("by a program")

    late = files("post", "write", str(target), content=b"x", query=f"&was={saved.text}")

    assert saved.status_code == 200
    assert late.status_code == 409
    assert target.read_text() == "by a program"


def test_a_new_file_or_a_move_replaces_nothing(
    files: Callable[..., httpx.Response], tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")

    new = files("post", "write", str(tmp_path / "a"), content=b"", query="&new=1")
    move = files("post", "move", str(tmp_path / "a"), data={"to": str(tmp_path / "b")})
    moved = files("post", "move", str(tmp_path / "a"), data={"to": str(tmp_path / "d" / "c")})

    assert (new.status_code, move.status_code, moved.status_code) == (409, 409, 204)
    assert (tmp_path / "b").read_text() == "b"
    assert (tmp_path / "d" / "c").read_text() == "a"


def test_a_directory_is_made_once(files: Callable[..., httpx.Response], tmp_path: Path) -> None:
    first = files("post", "mkdir", str(tmp_path / "made"))
    again = files("post", "mkdir", str(tmp_path / "made"))

    assert (first.status_code, again.status_code) == (204, 409)
    assert (tmp_path / "made").is_dir()


def test_a_large_directory_is_paged(
    files: Callable[..., httpx.Response], tmp_path: Path
) -> None:
    for number in range(501):
        (tmp_path / f"f{number:03}").touch()

    first = files("get", "list", str(tmp_path))
    second = files("get", "list", str(tmp_path), query="&from=500")

    assert first.text.count("data-entry=") == 500
    assert second.text.count("data-entry=") == 1


@pytest.mark.parametrize("act", ["list", "view"])
def test_what_is_not_there_is_said(
    files: Callable[..., httpx.Response], tmp_path: Path, act: str
) -> None:
    response = files("get", act, str(tmp_path / "nope"))

    assert "It cannot be shown" in response.text


@pytest.mark.parametrize(
    ("content", "is_shown"), [(b"a\r\nb\r\n", True), (b"a\0b", False), (b"\xff\xfe", False)]
)
def test_only_text_is_put_into_the_editor(
    files: Callable[..., httpx.Response], tmp_path: Path, content: bytes, *, is_shown: bool
) -> None:
    (tmp_path / "file").write_bytes(content)

    page = files("get", "view", str(tmp_path / "file"))

    assert ('id="editor"' in page.text) is is_shown
