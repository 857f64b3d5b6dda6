"""Two stacks in one site: pages with sessions, and an API with bearer tokens.

Under ASGI a path under API_PREFIXES goes to `ApiHandler`, past everything that pages need.
Whatever such a path answers, also an unknown one or a bug, is in the envelope.
"""

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.handlers.exception import convert_exception_to_response
from django.core.signals import request_started
from django.db import close_old_connections, reset_queries
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware
from django.utils.module_loading import import_string

from common.api.bodies import StreamingHandler, is_streamed
from common.api.envelope import plain_failure
from common.api.errors import CODES
from common.api.sockets import Application, Message, Receive, Scope, Send
from common.units import MiB

# The largest file that one request may write, and room for a form around it. Django keeps
# a body in a temporary file before any view sees it, so the limit has to be out here. A view
# that reads a streamed body has a limit of its own.
BODY_LIMIT_BYTES = 104 * MiB

SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
MESSAGES = {
    400: "The request could not be read.",
    404: "No such resource.",
    500: "Something went wrong on our side. It is recorded as request {request_id}.",
}


def is_api_path(path: str) -> bool:
    """Say whether a path belongs to the API."""
    return path.startswith(settings.API_PREFIXES)


class ApiHandler(StreamingHandler):
    """Django's handler with API_MIDDLEWARE alone, which must be async and without hooks.

    A request that waits in an async view then holds no thread.
    """

    def load_middleware(self, is_async: bool = False) -> None:
        self._view_middleware: list[Any] = []
        self._template_response_middleware: list[Any] = []
        self._exception_middleware: list[Any] = []
        handler = convert_exception_to_response(
            self._get_response_async  # type: ignore[attr-defined]
        )
        for path in reversed(settings.API_MIDDLEWARE):
            handler = convert_exception_to_response(import_string(path)(handler))
        self._middleware_chain = handler


def hold_no_thread() -> None:
    """Keep Django from starting a thread for a request before it needs one.

    It does so to call receivers of `request_started` that are not async, and the thread lives
    as long as the request. Neither of these two has work under ASGI: each request's threads
    are new, and so are their connections.
    """
    request_started.disconnect(reset_queries)
    request_started.disconnect(close_old_connections)


@sync_and_async_middleware
def request_id(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Give each answer of the API its id and headers, and put it in the envelope."""
    if not iscoroutinefunction(get_response):

        def in_turn(request: HttpRequest) -> HttpResponseBase:
            response: HttpResponseBase = get_response(request)
            return _finish(response) if is_api_path(request.path_info) else response

        return in_turn

    async def at_once(request: HttpRequest) -> HttpResponseBase:
        response: HttpResponseBase = await get_response(request)
        return _finish(response) if is_api_path(request.path_info) else response

    return at_once


def _finish(response: HttpResponseBase) -> HttpResponseBase:
    identity = uuid.uuid4().hex
    is_page = response.headers.get("Content-Type", "").startswith("text/html")
    if is_page and response.status_code in MESSAGES:
        # Made by Django itself: no view serves the path, or one raised. With DEBUG its page
        # would tell internals; the traceback is in the log.
        status = response.status_code
        message = MESSAGES[status].format(request_id=identity)
        response = plain_failure(status, CODES.get(status, "internal_error"), message)
    for name, value in SECURITY_HEADERS.items():
        response.headers[name] = value
    if settings.SECURE_HSTS_SECONDS:
        age_s = settings.SECURE_HSTS_SECONDS
        response.headers["Strict-Transport-Security"] = f"max-age={age_s}"
    response.headers["X-Request-Id"] = identity
    return response


class _BodyTooLarge(Exception):
    pass


def limit_bodies(application: Application, limit_bytes: int = BODY_LIMIT_BYTES) -> Application:
    """Wrap an ASGI application so that a body over the limit is answered with 413."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        if is_streamed(scope):
            await application(scope, receive, send)
            return
        if _content_length(scope["headers"]) > limit_bytes:
            await _refuse_body(send, limit_bytes)
            return
        received_bytes = 0

        async def counted() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > limit_bytes:
                raise _BodyTooLarge
            return message

        try:
            await application(scope, counted, send)
        except _BodyTooLarge:
            # Django reads a whole body before it answers, so nothing has been sent yet.
            await _refuse_body(send, limit_bytes)

    return limited


def _content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    digits = dict(headers).get(b"content-length", b"")
    return int(digits) if digits.isdigit() else 0


async def _refuse_body(send: Send, limit_bytes: int) -> None:
    message = f"A request body may have at most {limit_bytes} bytes."
    response = plain_failure(413, "payload_too_large", message)
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": response.content})
