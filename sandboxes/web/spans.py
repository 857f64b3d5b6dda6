"""Spans of time as people type them: `30m`, `2h`, `1d 12h`."""

import re

from common.units import DAY, HOUR, MINUTE

_UNITS = {"s": 1, "m": MINUTE, "min": MINUTE, "h": HOUR, "d": DAY}
_PART = re.compile(r"(\d{1,9})\s*(min|[smhd])?\s*")
MAX_SPAN_S = 365 * DAY
MAX_CHARS = 60


class NotASpan(ValueError):
    """The text is no span of time; the message says what one looks like."""


def parse_span(text: str) -> int:
    """Return the seconds that a span such as `1d 12h` names; nothing, or 0, is 0.

    A bare number is in seconds.

    Raises:
        NotASpan: it is no span, or longer than a year.
    """
    if len(text) > MAX_CHARS:
        raise NotASpan(f"Write it in at most {MAX_CHARS} characters.")
    text = text.strip().lower()
    seconds = at = 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            raise NotASpan("Write a time such as 30m, 2h or 1d 12h; leave it empty for none.")
        seconds += int(part[1]) * _UNITS[part[2] or "s"]
        at = part.end()
    if seconds > MAX_SPAN_S:
        raise NotASpan("The longest time is 365d.")
    return seconds


def format_span(seconds: int) -> str:
    """Return what `parse_span` reads as this many seconds; empty for 0."""
    parts = []
    for unit, length in (("d", DAY), ("h", HOUR), ("m", MINUTE), ("s", 1)):
        whole, seconds = divmod(seconds, length)
        if whole:
            parts.append(f"{whole}{unit}")
    return " ".join(parts)
