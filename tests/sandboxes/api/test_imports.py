"""Templates of uploaded images, through a gate, to a real store."""

import json
import os
import socket
import subprocess
from contextlib import closing
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from django.utils import timezone

from accounts.models import ApiKey, Team
from common.api.routing import BODY_LIMIT_BYTES
from common.units import MiB
from hosts import local
from hosts.image_exports import ImageExports
from hosts.models import Host
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.image_stream import open_stream
from sandboxes import images, importing, templates
from sandboxes.models import Sandbox, Template
from tests.fakes.guest_link import wait_until
from tests.sandboxes.api.test_exports import exports, gated, s3, s3_server

__all__ = ["exports", "gated", "s3", "s3_server"]

pytestmark = pytest.mark.django_db(transaction=True)

URL = "/templates/import"


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A file system with a file on it."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root/hello").write_bytes(b"hello" * 100_000)
    path = tmp_path / "image.raw"
    command = ["mkfs.ext4", "-q", "-d", str(tmp_path / "root"), str(path), "32M"]
    subprocess.run(command, check=True, capture_output=True)
    return path


def qcow2(raw: Path, *options: str) -> Path:
    path = raw.with_suffix(".qcow2")
    command = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", *options, str(raw), str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def upload(http: httpx.Client, image: Path, **query: Any) -> httpx.Response:
    return http.post(URL, params={"template_id": "mine"} | query, content=image.read_bytes())


def left(exports: ImageExports) -> list[Path]:
    folder = exports._config.intake_dir
    return list(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("kind", ["raw", "qcow2", "compressed"])
def test_an_image_becomes_a_template(
    http: httpx.Client, exports: ImageExports, raw: Path, kind: str, alices_team: Team
) -> None:
    options = {"raw": None, "qcow2": [], "compressed": ["-c"]}[kind]
    image = raw if options is None else qcow2(raw, *options)

    response = upload(http, image, displayName="My own")

    assert response.status_code == 202, response.text
    template = Template.objects.select_related("generation").get(template_id="mine")
    assert template.creation == "ready"
    assert template.team == alices_team
    assert template.spec["displayName"] == "My own"
    assert template.generation is not None
    assert not left(exports)
    content = raw.read_bytes()
    key = template.generation.root_key
    stream = open_stream(key, local.object_store(), local.keyring())
    blocks = sum(stream.plan.counts.values())
    pieces = (content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES))
    assert blocks == sum(1 for piece in pieces if piece.strip(b"\0"))
    answer = http.post("/sandboxes", json={"template": "mine"})
    assert answer.status_code == 201
    sandbox = Sandbox.objects.select_related("volume").get(template=template)
    assert sandbox.volume.head_id == template.generation_id


def test_an_image_may_be_larger_than_other_bodies(
    http: httpx.Client, exports: ImageExports, raw: Path
) -> None:
    with raw.open("r+b") as file:
        # Room after the file system, with nothing in it.
        file.truncate(BODY_LIMIT_BYTES + 4 * MiB)
        response = http.post(URL, params={"template_id": "mine"}, content=file)

    assert response.status_code == 202, response.text
    assert Template.objects.get(template_id="mine").creation == "ready"
    assert not left(exports)


def test_one_over_the_limit_is_refused_before_it_is_sent(
    url: str, alices_key: tuple[ApiKey, str], settings: Any
) -> None:
    settings.IMPORT_MAX_BYTES = MiB
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=20)) as client:
        client.putrequest("POST", f"/api/v1{URL}?template_id=mine")
        client.putheader("Authorization", f"Bearer {alices_key[1]}")
        client.putheader("Content-Length", str(MiB + 1))
        client.endheaders()  # and nothing of the image
        response = client.getresponse()
        body = json.load(response)

    assert response.status == 413
    assert body["success"] is False
    assert body["error"]["code"] == "file_too_large"
    assert not Template.objects.exists()


def test_one_whose_sender_goes_away_leaves_nothing(
    url: str, alices_key: tuple[ApiKey, str], exports: ImageExports
) -> None:
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port)) as client:
        client.sendall(
            f"POST /api/v1{URL}?template_id=mine HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {alices_key[1]}\r\n"
            f"Content-Length: {64 * MiB}\r\n\r\n".encode()
        )
        client.sendall(b"x" * MiB)
        wait_until(lambda: bool(exports._running))
        assert Template.objects.get().creation == "creating"

    wait_until(lambda: not Template.objects.exists())
    wait_until(lambda: not left(exports))


def test_one_that_is_refused_says_why_and_leaves_nothing(
    http: httpx.Client, exports: ImageExports, tmp_path: Path
) -> None:
    image = tmp_path / "backed.qcow2"
    command = ["qemu-img", "create", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw"]
    subprocess.run([*command, image, "64M"], check=True, capture_output=True)

    response = upload(http, image)

    assert response.status_code == 400
    assert "backing file" in response.json()["error"]["message"]
    assert not Template.objects.filter(template_id="mine").exists()
    assert not left(exports)


def test_an_id_that_is_taken_is_refused_before_the_image_is_sent(
    http: httpx.Client, exports: ImageExports, raw: Path, alices_team: Team
) -> None:
    Template.objects.create(team=alices_team, template_id="mine", spec={})

    assert upload(http, raw).status_code == 409
    assert not exports._running


@pytest.mark.parametrize(
    ("query", "content", "status"),
    [
        ({}, b"x", 400),
        ({"template_id": "a/b"}, b"x", 400),
        ({"template_id": "import"}, b"x", 400),
        ({"template_id": "mine"}, b"", 400),
        ({"template_id": "mine"}, b"x" * 2 * MiB, 413),
    ],
)
def test_a_wrong_request_makes_nothing(
    http: httpx.Client,
    settings: Any,
    query: dict[str, str],
    content: bytes,
    status: int,
) -> None:
    settings.IMPORT_MAX_BYTES = MiB

    assert http.post(URL, params=query, content=content).status_code == status
    assert not Template.objects.exists()


def test_a_host_that_takes_nothing_in_is_said_in_time(
    http: httpx.Client,
    exports: ImageExports,
    raw: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(exports, "take_in", lambda *_: None)

    response = upload(http, raw)

    assert response.status_code == 503
    assert not Template.objects.filter(template_id="mine").exists()


def test_one_that_was_given_up_half_way_fails_and_its_file_goes(
    http: httpx.Client, exports: ImageExports, alices_team: Team
) -> None:
    template = Template.objects.create(
        team=alices_team,
        template_id="mine",
        spec={},
        creation="creating",
        created_at=timezone.now() - timedelta(days=1),
    )
    path = exports.taken(importing.image_id(template.pk))
    path.parent.mkdir()
    path.write_bytes(b"x")
    os.utime(path, (0, 0))

    templates.fail_stuck_imports()
    importing.drop_left_over_images()

    template.refresh_from_db()
    assert template.creation == "failed"
    assert not left(exports)


@pytest.mark.parametrize("suffix", [".part", ".raw"])
@pytest.mark.parametrize("has_come", [False, True])
def test_what_an_intake_left_goes_soon_unless_it_is_to_be_imported(
    http: httpx.Client, exports: ImageExports, alices_team: Team, suffix: str, has_come: bool
) -> None:
    template = Template.objects.create(
        team=alices_team,
        template_id="mine",
        spec={},
        creation="creating",
        captured_at=timezone.now() if has_come else None,
    )
    path = exports.taken(importing.image_id(template.pk)).with_suffix(suffix)
    path.parent.mkdir()
    path.write_bytes(b"x")
    importing.drop_left_over_images()
    assert left(exports) == [path]
    an_hour_ago = timezone.now().timestamp() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    with local.guest_lock(importing.image_id(template.pk)):
        importing.drop_left_over_images()
    assert left(exports) == [path]

    importing.drop_left_over_images()

    assert left(exports) == ([path] if has_come and suffix == ".raw" else [])


def test_a_file_system_that_no_guest_could_mount_is_refused(
    http: httpx.Client, exports: ImageExports, raw: Path
) -> None:
    with raw.open("r+b") as file:
        file.truncate(20 * MiB)

    response = upload(http, raw)

    assert response.status_code == 400
    assert "cut short" in response.json()["error"]["message"]
    assert not Template.objects.filter(template_id="mine").exists()
    assert not left(exports)


def test_an_id_of_the_platforms_is_as_free_here_as_for_a_template_of_a_sandbox(
    http: httpx.Client, exports: ImageExports, raw: Path, paused: Sandbox
) -> None:
    assert Template.objects.filter(team=None, template_id="default").exists()
    imported = upload(http, raw, template_id="default")
    body = {"template_id": "default", "sandbox_id": paused.id}
    assert http.post("/templates/from-sandbox", json=body).status_code == 409
    Template.objects.filter(template_id="default").exclude(team=None).delete()
    made = http.post("/templates/from-sandbox", json=body)
    assert imported.status_code == made.status_code == 202


def test_without_a_host_nothing_is_left(http: httpx.Client, raw: Path) -> None:
    assert not Host.objects.exists()

    assert upload(http, raw).status_code == 503
    assert not Template.objects.exists()
