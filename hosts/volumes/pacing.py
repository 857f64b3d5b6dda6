"""How fast a guest may write, from how full its log is. Pure.

    log bytes   0 ─────────── A QUARTER ───────────────────────── SOFT (7/8) ── budget
    limits         none         rate ≤ left / 10 s, smoothly less     a trickle   a stop

The log is what overlays take on the local disk until it is stored. Two limits work together,
since a write of 512 bytes may cost a cluster at either end and tables: one on bytes, one on
the number of writes. Either is a bucket that holds for half of what is left, so **the budget
holds even when limits are never set again**; whoever sets them again in time (`Keeper`, twice
a second) makes of that a rate which falls smoothly.

Nothing is ever refused: a write waits.
"""

from dataclasses import dataclass
from typing import Any

from common.units import GiB, KiB, MiB

DEFAULT_BUDGET_BYTES = 2 * GiB

SOON_SHARE = 0.125
"""A log with more than this share of its budget is stored without waiting."""

FREE_SHARE = 0.25
"""Below this share of the budget nothing is limited."""

SOFT_SHARE = 0.875
"""The rest is for the trickle, so that it lasts for hours."""

HORIZON_S = 10
"""At the rate that is allowed, what is left would last so long."""

WRITE_COST_BYTES = 192 * KiB
"""The most that one small write takes: a cluster, one more at the other end, tables."""

TRICKLE_BYTES_PER_S = 16 * KiB
TRICKLE_WRITES_PER_S = 1


@dataclass(frozen=True)
class Limits:
    """What QEMU's throttle is told. Zero is no limit."""

    bytes_per_s: int = 0
    """In the long run."""
    burst_bytes_per_s: int = 0
    """At first, for `burst_s`."""
    burst_s: int = 1
    writes_per_s: int = 0
    burst_writes: int = 0
    """At first, as fast as they come."""

    @property
    def rate_bytes_per_s(self) -> int | None:
        """The rate that large writes see while limits are set anew in time; None: no limit."""
        return self.burst_bytes_per_s or self.bytes_per_s or None

    def as_qemu(self) -> dict[str, Any]:
        """Spell them out for the throttle group; a field left out would stay as it was."""
        return {
            "bps-write": self.bytes_per_s,
            "bps-write-max": self.burst_bytes_per_s,
            "bps-write-max-length": self.burst_s,
            "iops-write": self.writes_per_s,
            "iops-write-max": self.burst_writes,
            "iops-write-max-length": 1,
        }


NO_LIMITS = Limits()

STOP = Limits(bytes_per_s=1)
"""A write passes now and then: rates of nothing do not exist."""

TRICKLE = Limits(bytes_per_s=TRICKLE_BYTES_PER_S, writes_per_s=TRICKLE_WRITES_PER_S)


def limits_for(log_bytes: int, budget_bytes: int) -> Limits:
    """Say how fast a guest may write whose log has so many bytes."""
    if log_bytes < FREE_SHARE * budget_bytes:
        return NO_LIMITS
    if log_bytes >= budget_bytes:
        return STOP
    left_bytes = int(SOFT_SHARE * budget_bytes) - log_bytes
    rate = left_bytes // HORIZON_S
    writes = left_bytes // 2 // WRITE_COST_BYTES
    if rate <= TRICKLE_BYTES_PER_S or writes <= TRICKLE_WRITES_PER_S:
        return TRICKLE
    return Limits(
        bytes_per_s=TRICKLE_BYTES_PER_S,
        burst_bytes_per_s=rate,
        burst_s=HORIZON_S // 2,
        writes_per_s=TRICKLE_WRITES_PER_S,
        burst_writes=writes,
    )


def describe_bytes(count: int) -> str:
    """Write an amount as people read it."""
    for unit, size in (("GiB", GiB), ("MiB", MiB)):
        if count >= size:
            number = count / size
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"  # noqa: PLR2004
    return f"{count // KiB} KiB"
