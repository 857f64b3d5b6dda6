"""One handler for every error that a view raises."""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db import OperationalError
from django.http import Http404
from rest_framework import exceptions, status
from rest_framework.response import Response

from common.api.envelope import failure
from common.errors import DomainError

log = logging.getLogger(__name__)

CODES = {
    status.HTTP_400_BAD_REQUEST: "bad_request",
    status.HTTP_401_UNAUTHORIZED: "unauthorized",
    status.HTTP_403_FORBIDDEN: "forbidden",
    status.HTTP_404_NOT_FOUND: "not_found",
    status.HTTP_405_METHOD_NOT_ALLOWED: "method_not_allowed",
    status.HTTP_406_NOT_ACCEPTABLE: "not_acceptable",
    status.HTTP_409_CONFLICT: "conflict",
    status.HTTP_413_REQUEST_ENTITY_TOO_LARGE: "payload_too_large",
    status.HTTP_415_UNSUPPORTED_MEDIA_TYPE: "unsupported_media_type",
    status.HTTP_429_TOO_MANY_REQUESTS: "rate_limited",
    status.HTTP_503_SERVICE_UNAVAILABLE: "unavailable",
}
"""The code of an error that has none of its own, by status."""


class PayloadTooLarge(exceptions.APIException):
    """A request body is over its limit, in bytes."""

    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE
    default_code = "payload_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes.")


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """Turn an exception raised in a view into an answer in the envelope.

    Returns None for a bug, which lets Django log it and answer 500.
    """
    if isinstance(error, DomainError):
        return _answer(
            error.status,
            error.code,
            str(error),
            retry_after_s=getattr(error, "retry_after_s", None),
        )
    if isinstance(error, exceptions.ValidationError):
        return _invalid(error)
    if isinstance(error, OperationalError):
        # Down, out of connections, or a lock or statement that took too long.
        log.error("the database gave no answer", exc_info=error)
        return _answer(503, "unavailable", "The database did not answer in time. Try again.")
    known = _as_api_exception(error)
    if known is None:
        return None
    response = _answer(
        known.status_code,
        CODES.get(known.status_code, "bad_request"),
        str(known.detail),
        retry_after_s=getattr(known, "wait", None),
    )
    if header := getattr(known, "auth_header", None):
        response["WWW-Authenticate"] = header
    return response


def _as_api_exception(error: Exception) -> exceptions.APIException | None:
    if isinstance(error, exceptions.APIException):
        return error
    if isinstance(error, Http404):
        return exceptions.NotFound()
    if isinstance(error, PermissionDenied):
        return exceptions.PermissionDenied()
    if isinstance(error, RequestDataTooBig):
        too_large = exceptions.APIException("The request body is too large.")
        too_large.status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE
        return too_large
    return None


def _answer(
    status_code: int,
    code: str,
    message: str,
    *,
    details: Any = None,
    retry_after_s: float | None = None,
) -> Response:
    response = Response(failure(code, message, details), status=status_code)
    if retry_after_s is not None:
        # Clients read whole seconds only.
        response["Retry-After"] = str(math.ceil(retry_after_s))
    return response


def _invalid(error: exceptions.ValidationError) -> Response:
    """Answer which fields are wrong, each by its path, and name the first in the message."""
    details: dict[str, list[str]] = {}
    for path, message in _flatten(error.detail):
        details.setdefault(path, []).append(message)
    path, messages = next(iter(details.items()), ("", ["The request is not valid."]))
    message = f"{path}: {messages[0]}" if path else messages[0]
    details.pop("", None)  # it is about the whole, and the message has it
    return _answer(400, "bad_request", message, details=details or None)


def _flatten(detail: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, message) of DRF's nested error details: `config.ttl`, `argv.0`."""
    if isinstance(detail, Mapping):
        for name, inner in detail.items():
            inside = path if name == "non_field_errors" else f"{path}.{name}".lstrip(".")
            yield from _flatten(inner, inside)
    elif isinstance(detail, list | tuple):
        for index, inner in enumerate(detail):
            nested = isinstance(inner, Mapping | list)
            yield from _flatten(inner, f"{path}.{index}".lstrip(".") if nested else path)
    else:
        yield path, str(detail)
