"""How the console writes sizes, spans of time, instants and money.

Built into every template (settings.TEMPLATES), so no page has to load it.
"""

from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from common.units import DAY, HOUR, MINUTE, KiB

register = template.Library()

CENT = Decimal("0.01")
NOTHING = "\N{EN DASH}"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@register.filter(name="bytes")
def size(count: int | None) -> str:
    """Write a size in binary units: `512 MiB`, `1.5 GiB`, `0 B`."""
    if count is None:
        return NOTHING
    value = float(count)
    for unit in _SIZES:
        if abs(value) < KiB or unit == _SIZES[-1]:
            break
        value /= KiB
    # One digit behind the point, and none where it would be a zero.
    text = f"{value:.1f}" if unit != "B" else f"{value:.0f}"
    return f"{text.removesuffix('.0')} {unit}"


@register.filter
def duration(span: float | timedelta | None) -> str:
    """Write a span of time with its two largest units: `2 d 3 h`, `4 min 10 s`, `0 s`."""
    if span is None:
        return NOTHING
    seconds = int(span.total_seconds() if isinstance(span, timedelta) else span)
    parts: list[tuple[int, str]] = []
    for unit, length in (("d", DAY), ("h", HOUR), ("min", MINUTE), ("s", 1)):
        whole, seconds = divmod(max(seconds, 0), length)
        if whole or parts:
            parts.append((whole, unit))
    shown = [f"{whole} {unit}" for whole, unit in parts[:2] if whole]
    return " ".join(shown) or "0 s"


@register.filter
def ago(at: datetime | None) -> SafeString | str:
    """Write an instant relative to now; the exact one shows on hover.

    The page's script keeps it true, and puts the exact instant in the reader's own zone.
    """
    if at is None:
        return NOTHING
    since = (timezone.now() - at).total_seconds()
    if abs(since) < MINUTE:
        text = "just now" if since >= 0 else "in a moment"
    else:
        largest = duration(abs(since)).split(" ")
        text = " ".join(largest[:2])
        text = f"{text} ago" if since > 0 else f"in {text}"
    return _time(at, text, relative=True)


@register.filter
def moment(at: datetime | None) -> SafeString | str:
    """Write an instant exactly; the page's script puts it in the reader's zone."""
    if at is None:
        return NOTHING
    return _time(at, f"{at:%Y-%m-%d %H:%M} UTC", relative=False)


def _time(at: datetime, text: str, *, relative: bool) -> SafeString:
    return format_html(
        '<time datetime="{}" title="{}" data-time="{}">{}</time>',
        at.isoformat(),
        f"{at:%Y-%m-%d %H:%M:%S} UTC",
        "relative" if relative else "exact",
        text,
    )


@register.filter
def exact_money(dollars: Decimal | None) -> str:
    """Write dollars with every digit that is not a trailing zero, and at least cents."""
    if dollars is None:
        return NOTHING
    text = f"{dollars.quantize(Decimal('1e-9')):f}".rstrip("0")
    whole, _, digits = text.partition(".")
    return f"${whole}.{digits.ljust(2, '0')}"


@register.filter
def money(dollars: Decimal | None) -> SafeString | str:
    """Write dollars to the cent; the exact figure shows on hover."""
    if dollars is None:
        return NOTHING
    cents = dollars.quantize(CENT, rounding=ROUND_HALF_UP)
    text = "< $0.01" if not cents and dollars > 0 else f"${cents:,f}"
    return format_html('<span class="money" title="{}">{}</span>', exact_money(dollars), text)


@register.filter
def under(path: str, prefix: str) -> bool:
    """Say whether a request's path lies under a prefix, for marking where one is."""
    return path.startswith(prefix)


@register.filter
def since(end: datetime, start: datetime) -> timedelta:
    """Return the time between two instants."""
    return end - start
