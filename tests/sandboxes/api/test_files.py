"""`…/files`, through the unmodified SDK and plain HTTP, of a sandbox that runs."""

import hashlib
import itertools
import json
import os
import socket
import stat
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
import sandbox0
from sandbox0.errors import APIError

from accounts.models import ApiKey
from common.units import MiB
from sandboxes import files, listings
from sandboxes.models import Sandbox
from tests.fakes.guest_link import wait_until

ODD_NAMES = [
    b"with space",
    b"#?%&+;=",
    b"%2F",
    "é😀漢".encode(),
    b"e\xcc\x81",
    b"new\nline",
    b"-rf",
    b"x" * 255,
    b"\xff\xfe",
    b"half\xc3",
    "\uf7ff".encode(),
    b"quote'\"`$(id)",
]

Files = Callable[..., httpx.Response]


@pytest.fixture
def ask(http: httpx.Client, sandbox: Sandbox) -> Files:
    """Send a plain request about the sandbox's files."""

    def send(method: str, rest: str = "", **options: Any) -> httpx.Response:
        return http.request(method, f"/sandboxes/{sandbox.id}/files{rest}", **options)

    return send


def names_in(folder: Path) -> list[str]:
    return sorted(os.fsdecode(path.name) for path in folder.iterdir())


@pytest.mark.parametrize("size_bytes", [0, 1, 16383, 65537, 5 * 1024 * 1024 + 1])
def test_what_is_written_is_there_and_is_read_back(
    box: sandbox0.Sandbox, folder: Path, size_bytes: int
) -> None:
    data = os.urandom(size_bytes)

    box.write_file(f"{folder}/new/deep/file", data)

    assert (folder / "new/deep/file").read_bytes() == data
    assert box.read_file(f"{folder}/new/deep/file") == data
    assert names_in(folder / "new/deep") == ["file"]


def test_a_file_of_the_limit_can_be_written_and_no_larger_one(
    ask: Files, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1_000_000)
    data = b"\0" * 1_000_000

    written = ask("POST", params={"path": f"{folder}/big"}, content=data)
    refused = ask("POST", params={"path": f"{folder}/big"}, content=data + b"x")

    assert written.status_code == 200
    assert refused.status_code == 413
    assert refused.json()["success"] is False
    assert (folder / "big").stat().st_size == len(data)


def test_a_file_that_is_replaced_keeps_its_mode_and_owner(
    box: sandbox0.Sandbox, folder: Path
) -> None:
    file = folder / "script"
    file.write_text("old")
    file.chmod(0o4750)
    os.chown(file, 1234, 4321)
    file.chmod(0o4750)

    box.write_file(str(file), b"new")

    found = file.stat()
    assert file.read_text() == "new"
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o4750, 1234, 4321)


def test_a_write_goes_through_a_link(box: sandbox0.Sandbox, folder: Path) -> None:
    (folder / "real").write_text("old")
    (folder / "link").symlink_to("real")

    box.write_file(f"{folder}/link", b"new")

    assert (folder / "real").read_text() == "new"
    assert (folder / "link").is_symlink()


def test_a_broken_upload_leaves_the_old_content(
    url: str, alices_key: tuple[ApiKey, str], sandbox: Sandbox, folder: Path
) -> None:
    (folder / "file").write_text("old")
    where = urlsplit(url)
    path = f"/api/v1/sandboxes/{sandbox.id}/files?path={quote(str(folder / 'file'))}"
    with socket.create_connection((where.hostname, where.port)) as client:
        client.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {alices_key[1]}\r\n"
            f"Content-Length: 1000000\r\n\r\n".encode()
            + b"x" * 500_000
        )

    # The rest was on its way to a name beside it when the client went.
    wait_until(lambda: names_in(folder) == ["file"])
    assert (folder / "file").read_text() == "old"


def test_a_file_larger_than_other_bodies_may_be_is_written_as_it_comes(
    ask: Files, folder: Path
) -> None:
    piece, count = os.urandom(MiB), 108

    def pieces() -> Iterator[bytes]:
        for _ in range(count):
            yield piece

    response = ask("POST", params={"path": f"{folder}/large"}, content=pieces())

    assert response.status_code == 200
    assert (folder / "large").stat().st_size == count * MiB
    with (folder / "large").open("rb") as file:
        file.seek((count - 1) * MiB)
        assert file.read() == piece


def test_a_write_that_fails_leaves_nothing(
    ask: Files, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("old")
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1_000)

    def pieces() -> Any:
        yield b"x" * 900
        yield b"x" * 900

    # Chunked: its length is not announced.
    response = ask("POST", params={"path": f"{folder}/file"}, content=pieces())

    assert response.status_code == 413
    assert response.json()["error"]["code"] == "file_too_large"
    assert (folder / "file").read_text() == "old"
    assert names_in(folder) == ["file"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_name_can_be_listed_and_used(ask: Files, folder: Path, name: bytes) -> None:
    raw = os.fsencode(folder) + b"/" + name
    with open(raw, "wb") as file:  # noqa: PTH123
        file.write(b"content")

    listed = ask("GET", "/list", params={"path": str(folder)}).json()["data"]["entries"]
    path = listed[0]["path"]
    by_text = ask("GET", params={"path": path})
    # A character of the private block means a byte, so its own bytes are written as listed.
    same = raw if name != "\uf7ff".encode() else path.encode()
    by_bytes = ask("GET", f"?path={quote(same)}")
    shown = ask("GET", "/stat", params={"path": path}).json()["data"]
    moved = ask("POST", "/move", json={"source": path, "destination": path[:-1] + "Z"})
    deleted = ask("DELETE", params={"path": path[:-1] + "Z"})

    assert by_text.content == by_bytes.content == b"content"
    assert shown == listed[0]
    assert moved.status_code == deleted.status_code == 200
    assert names_in(folder) == []


def test_a_name_written_by_the_sdk_is_the_one_on_disk(
    box: sandbox0.Sandbox, folder: Path
) -> None:
    for name in ("a b+c%20", "é😀", "%2F"):
        box.write_file(f"{folder}/{name}", b"x")
        box.read_file(f"{folder}/{name}")

    assert names_in(folder) == sorted(["a b+c%20", "é😀", "%2F"])


def test_the_sdk_reads_all_kinds_of_files(box: sandbox0.Sandbox, folder: Path) -> None:
    (folder / "dir").mkdir(mode=0o750)
    (folder / "file").write_bytes(b"12345")
    (folder / "file").chmod(0o640)
    (folder / "link").symlink_to("/nowhere/é")
    os.mkfifo(folder / "pipe")

    entries = {str(one.name): one for one in box.list_files(str(folder))}

    assert list(entries) == ["dir", "file", "link", "pipe"]
    assert [str(one.type_) for one in entries.values()] == ["dir", "file", "symlink", "file"]
    assert (entries["file"].size, entries["file"].mode) == (5, "0640")
    assert entries["dir"].mode == "0750"
    assert (entries["link"].is_link, entries["link"].link_target) == (True, "/nowhere/é")
    assert box.stat_file(f"{folder}/link").type_ == "symlink"
    assert box.stat_file("/").name == "/"


def test_files_of_proc_are_read_to_their_end(box: sandbox0.Sandbox) -> None:
    assert b"Linux" in box.read_file("/proc/version")


def test_relative_paths_start_at_the_root(box: sandbox0.Sandbox, folder: Path) -> None:
    (folder / "f").write_text("x")

    assert box.read_file(str(folder / "f").lstrip("/")) == b"x"
    assert box.stat_file(f"{folder}/../{folder.name}/./f").path == str(folder / "f")


def test_json_is_answered_only_where_it_is_asked_for(ask: Files, folder: Path) -> None:
    (folder / "f").write_bytes(b"\xff\x00")

    plain = ask("GET", params={"path": f"{folder}/f"})
    asked = ask("GET", params={"path": f"{folder}/f"}, headers={"Accept": "application/json"})

    assert plain.headers["content-type"] == "application/octet-stream"
    assert plain.content == b"\xff\x00"
    assert plain.headers["content-length"] == "2"
    assert asked.json()["data"] == {"content": "/wA=", "encoding": "base64"}


def test_directories_are_made(box: sandbox0.Sandbox, folder: Path) -> None:
    box.mkdir(f"{folder}/a")
    box.mkdir(f"{folder}/b/c/d", recursive=True)
    box.mkdir(f"{folder}/b/c/d", recursive=True)

    assert (folder / "a").is_dir()
    assert (folder / "b/c/d").is_dir()
    for path, status in ((f"{folder}/a", 409), (f"{folder}/x/y", 404)):
        with pytest.raises(APIError) as caught:
            box.mkdir(path)
        assert caught.value.status_code == status


def test_files_are_moved(box: sandbox0.Sandbox, folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    (folder / "dir/sub").mkdir(parents=True)

    box.move_file(f"{folder}/a", f"{folder}/b")
    box.move_file(f"{folder}/b", f"{folder}/new/place/c")
    box.move_file(f"{folder}/dir", f"{folder}/dir2")

    assert (folder / "new/place/c").read_text() == "a"
    assert names_in(folder) == ["dir2", "new"]


def test_a_file_is_moved_to_another_file_system(box: sandbox0.Sandbox, folder: Path) -> None:
    other = Path("/dev/shm") / f"sandkeep-test-{os.getpid()}"
    (folder / "a").write_bytes(b"x" * 1_500_000)
    (folder / "a").chmod(0o711)
    try:
        box.move_file(f"{folder}/a", str(other))

        assert other.stat().st_size == 1_500_000
        assert stat.S_IMODE(other.stat().st_mode) == 0o711
        assert names_in(folder) == []
    finally:
        other.unlink(missing_ok=True)


def test_a_tree_is_deleted_without_following_links(box: sandbox0.Sandbox, folder: Path) -> None:
    (folder / "keep").mkdir()
    (folder / "keep/precious").write_text("x")
    (folder / "tree/a/b").mkdir(parents=True)
    (folder / "tree/a/link").symlink_to(folder / "keep")
    for number in range(100):
        (folder / f"tree/a/b/{number}").write_text("x")

    box.delete_file(f"{folder}/tree")

    assert names_in(folder) == ["keep"]
    assert (folder / "keep/precious").exists()


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (("GET", "?path={}/nosuch", {}), (404, "file_not_found")),
        (("GET", "/stat?path={}/nosuch", {}), (404, "file_not_found")),
        (("GET", "/list?path={}/nosuch", {}), (404, "directory_not_found")),
        (("GET", "/list?path={}/file", {}), (409, "path_not_directory")),
        (("GET", "?path={}/dir", {}), (409, "path_not_file")),
        (("GET", "?path={}/pipe", {}), (409, "path_not_file")),
        (("POST", "?path={}/dir", {"content": b"x"}), (409, "path_not_file")),
        (("POST", "?path={}/pipe", {"content": b"x"}), (409, "path_not_file")),
        (("POST", "?path={}/file/x", {"content": b"x"}), (409, "path_not_directory")),
        (("POST", "?path={}/file&mkdir=true", {}), (409, "path_not_directory")),
        (("DELETE", "?path={}/nosuch", {}), (404, "file_not_found")),
        (("DELETE", "?path=/", {}), (400, "bad_request")),
        (("DELETE", "?path=/..//", {}), (400, "bad_request")),
        (("GET", "?path=", {}), (400, "bad_request")),
        (("GET", "", {}), (400, "bad_request")),
        (("GET", "?path=a%00b", {}), (400, "bad_request")),
        (("GET", "?path=" + "x/" * 2500, {}), (400, "bad_request")),
        (("GET", "?path=" + "x" * 256, {}), (400, "bad_request")),
        (("POST", "?path={}/x&mkdir=perhaps", {}), (400, "bad_request")),
    ],
)
def test_what_cannot_be_done_is_refused(
    ask: Files, folder: Path, request_: tuple[str, str, Any], answer: tuple[int, str]
) -> None:
    method, rest, options = request_
    (folder / "dir").mkdir()
    (folder / "file").write_text("x")
    os.mkfifo(folder / "pipe")

    response = ask(method, rest.replace("{}", str(folder)), **options)

    assert (response.status_code, response.json()["error"]["code"]) == answer


@pytest.mark.parametrize(
    ("source", "destination", "status"),
    [
        ("nosuch", "x", 404),
        ("dir", "dir/inside", 409),
        ("file", "dir", 409),
        ("dir", "file", 409),
        ("file", "file2/x", 409),
    ],
)
def test_a_move_that_makes_no_sense_is_refused(
    ask: Files, folder: Path, source: str, destination: str, status: int
) -> None:
    (folder / "dir").mkdir()
    (folder / "file").write_text("x")
    (folder / "file2").write_text("x")

    body = {"source": f"{folder}/{source}", "destination": f"{folder}/{destination}"}
    response = ask("POST", "/move", json=body)

    assert response.status_code == status
    assert names_in(folder) == ["dir", "file", "file2"]


def test_writers_at_once_leave_one_whole_file(ask: Files, folder: Path) -> None:
    bodies = [bytes([number]) * 1_000_000 for number in range(8)]

    def write(body: bytes) -> None:
        assert ask("POST", params={"path": f"{folder}/f"}, content=body).status_code == 200

    threads = [threading.Thread(target=write, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (folder / "f").read_bytes() in bodies
    assert names_in(folder) == ["f"]


def test_a_listing_that_is_too_long_says_so(
    ask: Files, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_ENTRIES", 5)
    for number in range(8):
        (folder / str(number)).touch()

    data = ask("GET", "/list", params={"path": str(folder)}).json()["data"]

    assert len(data["entries"]) == 5
    assert data["truncated"] is True


def test_a_directory_is_listed_page_by_page(ask: Files, folder: Path) -> None:
    for number in range(25):
        (folder / f"{number:02}").touch()
    os.mkdir(os.fsencode(folder) + b"/\xff")  # noqa: PTH102
    (folder / "00-link").symlink_to("00")
    pages: list[list[dict[str, Any]]] = []
    query = {"path": str(folder), "limit": "10"}

    while True:
        data = ask("GET", "/list", params=query).json()["data"]
        pages.append(data["entries"])
        if "next_cursor" not in data:
            break
        query["cursor"] = data["next_cursor"]
        # What goes away between two pages makes none of the rest go missing.
        os.unlink(os.fsencode(folder) + b"/" + pages[-1][-1]["name"].encode())  # noqa: PTH108

    names = [entry["name"] for page in pages for entry in page]
    assert [len(page) for page in pages] == [10, 10, 7]
    assert names == sorted(names)
    assert names[:3] == ["00", "00-link", "01"]
    assert pages[0][1]["link_target"] == "00"
    assert pages[2][-1]["type"] == "dir"


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The directories that were read whole; those of five names count as large."""
    read: list[bytes] = []
    entries = files._entries

    def noted(sftp: Any, path: bytes) -> Any:
        read.append(path)
        return entries(sftp, path)

    monkeypatch.setattr(files, "_entries", noted)
    monkeypatch.setattr(listings, "MIN_ENTRIES", 5)
    monkeypatch.setattr(listings, "RUN_ENTRIES", 7)
    return read


def paged(ask: Files, folder: Path, between: Callable[[int], object]) -> list[str]:
    """Page through a directory three names at a time."""
    names: list[str] = []
    query = {"path": str(folder), "limit": "3"}
    for number in itertools.count():
        data = ask("GET", "/list", params=query).json()["data"]
        names += [entry["name"] for entry in data["entries"]]
        if "next_cursor" not in data:
            return names
        query["cursor"] = data["next_cursor"]
        between(number)
    raise AssertionError


def test_a_large_directory_is_read_once_for_all_of_its_pages(
    ask: Files, folder: Path, readings: list[bytes]
) -> None:
    for number in range(40):
        (folder / f"{number:02}").touch()
    (folder / "link").symlink_to("00")

    names = paged(ask, folder, lambda number: None)

    assert names == [f"{number:02}" for number in range(40)] + ["link"]
    assert len(readings) == 1


def test_pages_neither_miss_nor_repeat_what_is_there_all_along(
    ask: Files, folder: Path, readings: list[bytes]
) -> None:
    stays = [f"{number:02}" for number in range(1, 40, 2)]
    for number in range(40):
        (folder / f"{number:02}").touch()

    def change(page: int) -> None:
        (folder / f"{2 * page:02}").unlink()
        (folder / f"{3 * page:02}-new").touch()
        if page % 4 == 3:
            files._shelf.keep_none()

    names = paged(ask, folder, change)

    assert names == sorted(set(names))
    assert [name for name in names if name in stays] == stays
    assert 1 < len(readings) <= 6


def test_the_first_page_shows_what_is_there_now(
    ask: Files, folder: Path, readings: list[bytes]
) -> None:
    for number in range(10):
        (folder / f"{number:02}").touch()
    query = {"path": str(folder), "limit": "3"}
    ask("GET", "/list", params=query)
    (folder / "00").unlink()

    again = ask("GET", "/list", params=query).json()["data"]["entries"]

    assert [entry["name"] for entry in again] == ["01", "02", "03"]
    assert len(readings) == 2


def test_a_listing_serves_no_other_directory(
    ask: Files, folder: Path, readings: list[bytes]
) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(10):
            (folder / f"{name}/{name}{number}").touch()
    first = ask("GET", "/list", params={"path": f"{folder}/a", "limit": "3"}).json()["data"]

    other = ask(
        "GET", "/list", params={"path": f"{folder}/b", "cursor": first["next_cursor"]}
    ).json()["data"]

    assert [entry["name"] for entry in other["entries"]] == [f"b{n}" for n in range(10)]


def test_a_page_may_be_the_whole(ask: Files, folder: Path) -> None:
    for number in range(5):
        (folder / str(number)).touch()

    data = ask("GET", "/list", params={"path": str(folder), "limit": "5"}).json()["data"]
    all_of_it = ask("GET", "/list", params={"path": str(folder)}).json()["data"]
    beyond = ask(
        "GET", "/list", params={"path": str(folder), "cursor": b64encode(b"zzz").decode()}
    ).json()["data"]

    assert data == all_of_it
    assert beyond == {"entries": []}


@pytest.mark.parametrize(
    "query",
    [{"limit": text} for text in ("0", "-1", "10001", "x", "1e3", "٣", "9" * 30)]
    + [{"cursor": text} for text in ("!", "é", "Lg", "AA==", "Lw==", "YWE" * 200)],
)
def test_a_page_that_is_none_is_refused(
    ask: Files, folder: Path, query: dict[str, str]
) -> None:
    response = ask("GET", "/list", params={"path": str(folder)} | query)

    assert response.status_code == 400
    assert next(iter(query)) in response.text


def test_the_hash_is_right_right_after_the_write(box: sandbox0.Sandbox, folder: Path) -> None:
    data = os.urandom(300_000)
    box.write_file(f"{folder}/f", data)

    printed = box.cmd(f"sha256sum {folder}/f").stdout.split()[0]

    assert printed == hashlib.sha256(data).hexdigest()


def test_watching_is_not_served(ask: Files) -> None:
    response = ask("GET", "/watch")

    assert response.status_code == 404
    assert json.loads(response.content)["success"] is False
