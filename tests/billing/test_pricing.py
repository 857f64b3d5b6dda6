"""`billing.pricing`: the four examples that the price list gives, and rounding."""

from decimal import Decimal

import pytest

from billing.pricing import memory_cost, memory_price_per_hour, storage_cost, to_cents
from common.units import HOUR, GiB

MIB_PER_GIB = 1024


@pytest.mark.parametrize(
    ("gib", "hours", "dollars"),
    [
        (4, 100, Decimal("6.00")),
        (2, 720, Decimal("21.60")),
        (2, 30, Decimal("0.90")),
        (Decimal("0.5"), 1, Decimal("0.0075")),
        (4, 0, Decimal(0)),
    ],
)
def test_memory_is_priced_by_the_gib_hour(
    gib: Decimal, hours: Decimal, dollars: Decimal
) -> None:
    assert memory_cost(int(gib * MIB_PER_GIB * hours * HOUR * 1000)) == dollars


def test_storage_is_priced_by_the_gib_month() -> None:
    assert storage_cost(20 * GiB * 730) == Decimal("0.40")


def test_a_second_of_a_gib_costs_what_the_price_list_says() -> None:
    a_second = memory_cost(MIB_PER_GIB * 1000)

    assert round(a_second, 9) == Decimal("0.000004167")


def test_an_hour_of_the_smallest_sandbox_is_exact() -> None:
    assert memory_price_per_hour(128) == Decimal("0.001875")


@pytest.mark.parametrize(
    ("dollars", "cents"),
    [("0.005", 0), ("0.015", 2), ("0.0150001", 2), ("0.0249", 2), ("6.00", 600)],
)
def test_cents_are_rounded_half_to_even(dollars: str, cents: int) -> None:
    assert to_cents(Decimal(dollars)) == cents
