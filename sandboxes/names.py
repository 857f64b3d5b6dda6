"""What people may call their snapshots and templates."""

import unicodedata

from django.core.exceptions import ValidationError

_REFUSED = frozenset({"Cc", "Zl", "Zp"})
"""Control characters, and what ends a line or a paragraph."""


def check_name(name: str) -> None:
    """Refuse a name that is not one line of text, as a form's or a serializer's validator.

    Raises:
        ValidationError: it is none.
    """
    if any(unicodedata.category(mark) in _REFUSED for mark in name):
        raise ValidationError("A name is one line, without control characters.")
