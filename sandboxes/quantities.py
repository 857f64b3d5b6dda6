"""Amounts of memory as clients write them: Kubernetes quantities."""

import re

from common.units import GiB, KiB, MiB, TiB

MIN_MEMORY_BYTES = 128 * MiB
MAX_MEMORY_BYTES = 16 * GiB

# Source: Kubernetes, "Resource Management for Pods and Containers", memory units.
_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": KiB,
    "Mi": MiB,
    "Gi": GiB,
    "Ti": TiB,
}
_QUANTITY = re.compile(
    r"(?P<number>[0-9]{1,18})(?:\.(?P<part>[0-9]{1,9}))?(?P<unit>[kMGT]i?|Ki|)"
)


class NotAQuantity(ValueError):
    """The text is no amount of memory that a sandbox can have; the message says why."""


def parse_memory(text: str) -> int:
    """Return the bytes that a quantity such as `512Mi`, `2Gi` or `1.5G` names.

    Raises:
        NotAQuantity: it is no quantity, or no whole number of MiB.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or found["unit"] == "ki":
        raise NotAQuantity("Write memory as a number and a unit, such as 512Mi or 2Gi.")
    part = found["part"] or ""
    scaled, rest = divmod(
        int(found["number"] + part) * _UNITS[found["unit"]], int(10 ** len(part))
    )
    if rest or scaled % MiB:
        raise NotAQuantity("Memory must be a whole number of MiB, such as 512Mi or 2Gi.")
    return scaled


def parse_sandbox_memory(text: str) -> int:
    """Return the bytes of a quantity that a sandbox can have.

    Raises:
        NotAQuantity: it is no quantity, or is outside of what is offered.
    """
    memory_bytes = parse_memory(text)
    if not MIN_MEMORY_BYTES <= memory_bytes <= MAX_MEMORY_BYTES:
        low, high = format_memory(MIN_MEMORY_BYTES), format_memory(MAX_MEMORY_BYTES)
        raise NotAQuantity(f"Memory must be from {low} to {high}.")
    return memory_bytes


def format_memory(memory_bytes: int) -> str:
    """Return the shortest exact quantity in binary units, such as `1536Mi` or `2Gi`."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if memory_bytes and memory_bytes % _UNITS[unit] == 0:
            return f"{memory_bytes // _UNITS[unit]}{unit}"
    return str(memory_bytes)
