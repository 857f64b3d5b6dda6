"""The one shape of every answer of the API.

Source: wire contract, "Envelope and errors".
"""

from typing import Any

from django.http import JsonResponse
from rest_framework.response import Response


def ok(data: Any, status: int = 200, *, headers: dict[str, str] | None = None) -> Response:
    """Return an answer that carries `data`, which must not be None: clients read into it."""
    return Response({"success": True, "data": data}, status=status, headers=headers)


def failure(code: str, message: str, details: Any = None) -> dict[str, Any]:
    """Return the body of a refusal: a stable code, and a sentence for a person."""
    error = {"code": code, "message": message}
    if details is not None:
        error["details"] = details
    return {"success": False, "error": error}


def plain_failure(status: int, code: str, message: str) -> JsonResponse:
    """Return a refusal made where DRF does not reach, such as an unknown path."""
    return JsonResponse(failure(code, message), status=status)
