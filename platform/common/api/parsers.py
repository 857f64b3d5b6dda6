"""Request bodies: JSON, and no more of it than fits."""

import io
from collections.abc import Mapping
from typing import IO, Any

from django.conf import settings
from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser

from common.api.errors import PayloadTooLarge


class JsonParser(JSONParser):
    """Reads JSON of at most DATA_UPLOAD_MAX_MEMORY_SIZE bytes.

    DRF's own reads a body of any size, and fails on one nested a thousand deep.
    """

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        limit_bytes = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        assert limit_bytes is not None
        body = stream.read(limit_bytes + 1)
        if len(body) > limit_bytes:
            raise PayloadTooLarge(limit_bytes)
        try:
            parsed = super().parse(io.BytesIO(body), media_type, parser_context)
        except RecursionError:
            raise ParseError("JSON parse error - nested too deep") from None
        if not isinstance(parsed, dict):
            raise ParseError("The request body must be a JSON object.")
        return parsed
