"""Prices, and what an amount of usage costs. Pure: no database, no clock.

Costs are exact decimals in dollars. They are rounded where they are shown or invoiced, and
summed before that, since rounded parts do not add up to the rounded whole.
"""

from decimal import ROUND_HALF_EVEN, Decimal

from common.units import HOUR

DOLLARS_PER_GIB_HOUR = Decimal("0.015")
DOLLARS_PER_GIB_MONTH = Decimal("0.02")

MIB_PER_GIB = 1024
MILLISECONDS_PER_HOUR = HOUR * 1000
# A month of storage is 730 hours (a twelfth of a year), whatever the calendar says.
HOURS_PER_MONTH = 730
BYTES_PER_GIB = 1024**3


def memory_cost(mib_milliseconds: int | Decimal) -> Decimal:
    """Return the price in dollars of configured memory held for a time."""
    return (
        Decimal(mib_milliseconds) * DOLLARS_PER_GIB_HOUR / (MIB_PER_GIB * MILLISECONDS_PER_HOUR)
    )


def storage_cost(byte_hours: int | Decimal) -> Decimal:
    """Return the price in dollars of retained incremental data."""
    return Decimal(byte_hours) * DOLLARS_PER_GIB_MONTH / (BYTES_PER_GIB * HOURS_PER_MONTH)


def storage_cost_of(byte_milliseconds: int | Decimal) -> Decimal:
    """Return the price in dollars of data that was stored for a time."""
    return storage_cost(Decimal(byte_milliseconds) / MILLISECONDS_PER_HOUR)


def memory_price_per_hour(memory_mib: int) -> Decimal:
    """Return what an hour of running costs, in dollars."""
    return memory_cost(memory_mib * MILLISECONDS_PER_HOUR)


def to_cents(dollars: Decimal) -> int:
    """Round an amount to whole cents, half to even."""
    return int((dollars * 100).to_integral_value(ROUND_HALF_EVEN))
