"""The published schema: names of operations, and the envelope around every answer."""

from typing import Any

from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import OpenApiResponse, inline_serializer
from rest_framework import serializers

_envelopes: dict[str, tuple[str, serializers.Serializer[Any]]] = {}


class ApiSchema(AutoSchema):
    """Names an operation by its view and method, which no two share: `api_keys_get`."""

    def get_operation_id(self) -> str:
        view = type(self.view).__name__
        words = "".join(f"_{c.lower()}" if c.isupper() else c for c in view).strip("_")
        return f"{words}_{self.method.lower()}"


def enveloped(name: str, data: Any, description: str = "") -> OpenApiResponse:
    """Return the documented answer whose `data` has this shape.

    A name stands for one shape, however often it is asked for.
    """
    shape = repr(data)
    if name not in _envelopes:
        fields = {"success": serializers.BooleanField(default=True), "data": data}
        _envelopes[name] = shape, inline_serializer(f"{name}Envelope", fields)
    known, envelope = _envelopes[name]
    if known != shape:
        raise ValueError(f"two shapes are named {name}")
    return OpenApiResponse(envelope, description)
