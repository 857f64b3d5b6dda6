"""Bodies that are read while they arrive."""

from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import RequestDataTooBig

from common.api.bodies import BodyBroken, StreamedBody, is_streamed
from common.api.routing import limit_bodies


class Sender:
    """Sends pieces as it is asked, and counts how often it was."""

    def __init__(self, *pieces: bytes, goes_away: bool = False) -> None:
        self.messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": piece, "more_body": True} for piece in pieces
        ]
        if not goes_away:
            self.messages.append({"type": "http.request", "body": b"", "more_body": False})
        self.asked = 0

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        return self.messages.pop(0) if self.messages else {"type": "http.disconnect"}


async def test_no_more_is_taken_than_is_read() -> None:
    sender = Sender(b"a", b"", b"b", b"c")
    pieces = aiter(StreamedBody(sender.receive).pieces())

    assert sender.asked == 0
    assert await anext(pieces) == b"a"
    assert sender.asked == 1
    assert [piece async for piece in pieces] == [b"b", b"c"]


async def test_a_thread_reads_it_as_a_file() -> None:
    body = StreamedBody(Sender(b"abcd", b"ef", b"g\n\nh", b"i").receive)

    def read() -> list[bytes]:
        return [body.read(3), body.read(3), body.read(9), *iter(body.readline, b"")]

    assert await sync_to_async(read)() == [b"abc", b"d", b"ef", b"g\n", b"\n", b"h", b"i"]


async def test_all_of_a_small_one_is_read_at_once() -> None:
    body = StreamedBody(Sender(b"abcd", b"ef").receive)

    assert await sync_to_async(body.read)() == b"abcdef"


async def test_it_is_not_read_whole_where_it_is_large(settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 5
    body = StreamedBody(Sender(b"abcd", b"ef").receive)

    with pytest.raises(RequestDataTooBig):
        await sync_to_async(body.read)()


async def test_a_sender_that_goes_away_is_no_end() -> None:
    body = StreamedBody(Sender(b"a", goes_away=True).receive)
    pieces = aiter(body.pieces())

    assert await anext(pieces) == b"a"
    with pytest.raises(BodyBroken):
        await anext(pieces)


async def test_django_hears_of_the_end_when_all_was_read() -> None:
    body = StreamedBody(Sender(b"a").receive)

    assert await body.receive() == {"type": "http.request", "body": b"", "more_body": False}
    assert [piece async for piece in body.pieces()] == [b"a"]
    assert (await body.receive())["type"] == "http.disconnect"


@pytest.mark.parametrize(
    ("method", "path", "streamed"),
    [
        ("POST", "/api/v1/templates/import", True),
        ("POST", "/templates/import/", True),
        ("GET", "/templates/import/", False),
        ("POST", "/api/v1/templates/import/x", False),
        ("POST", "/api/v1/templates", False),
    ],
)
async def test_only_some_pass_the_limit(method: str, path: str, *, streamed: bool) -> None:
    scope = {"method": method, "path": path, "headers": [(b"content-length", b"11")]}
    passed, sent = [], []

    async def application(*_: Any) -> None:
        passed.append(path)

    async def send(message: Any) -> None:
        sent.append(message)

    await limit_bodies(application, limit_bytes=10)(scope, Sender().receive, send)

    assert is_streamed(scope) is bool(passed) is streamed
    assert bool(sent) is not streamed
