from datetime import timedelta
from decimal import Decimal

import pytest
from django.utils import timezone

from common.units import GiB, KiB, MiB
from sandboxes.templatetags.console import ago, duration, exact_money, money, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1 KiB"),
        (1536, "1.5 KiB"),
        (512 * MiB, "512 MiB"),
        (3 * GiB // 2, "1.5 GiB"),
        (2**60, "1024 PiB"),
        (None, "–"),
    ],
)
def test_sizes_are_in_binary_units(count: int | None, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (250, "4 min 10 s"),
        (timedelta(days=2, hours=3, minutes=4), "2 d 3 h"),
        (-5, "0 s"),
    ],
)
def test_spans_show_their_two_largest_units(span: float, text: str) -> None:
    assert duration(span) == text


@pytest.mark.parametrize(
    ("dollars", "text", "exact"),
    [
        ("0", "$0.00", "$0.00"),
        ("0.0049", "&lt; $0.01", "$0.0049"),
        ("0.005", "$0.01", "$0.005"),
        ("1234.5", "$1,234.50", "$1234.50"),
        ("0.000000001", "&lt; $0.01", "$0.000000001"),
    ],
)
def test_money_shows_cents_and_keeps_the_exact_figure(
    dollars: str, text: str, exact: str
) -> None:
    shown = str(money(Decimal(dollars)))

    assert text in shown
    assert f'title="{exact}"' in shown
    assert exact_money(Decimal(dollars)) == exact


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "just now"), (200, "3 min ago"), (90_000, "1 d ago")]
)
def test_instants_are_relative_with_the_exact_one_beside(seconds: int, text: str) -> None:
    at = timezone.now() - timedelta(seconds=seconds)

    shown = ago(at)

    assert f">{text}<" in shown
    assert at.isoformat() in shown
