"""Figures and how they are shown. Pure."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

NONE = "-"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number, beside the one that it is compared with.

    Attributes:
        baseline: in the same unit; None where there is nothing to compare with.
        aim: the greatest ratio that is good enough.
        least: the smallest ratio that is good enough, where more is better.
    """

    bench: str
    name: str
    value: float
    unit: str
    baseline: float | None = None
    aim: float | None = None
    least: float | None = None

    @property
    def ratio(self) -> float | None:
        """The value in baselines; None where there is none, or it is zero."""
        return self.value / self.baseline if self.baseline else None

    @property
    def is_reached(self) -> bool | None:
        """Whether the ratio is within the aim; None where there is no aim."""
        if self.ratio is None or (self.aim is None and self.least is None):
            return None
        most = float("inf") if self.aim is None else self.aim
        return (self.least or 0.0) <= self.ratio <= most

    def json_line(self, *, command: str, at: datetime) -> str:
        """Return the figure for a program to read."""
        return json.dumps(
            {
                "bench": self.bench,
                "figure": self.name,
                "value": _rounded(self.value),
                "unit": self.unit,
                "baseline": _rounded(self.baseline),
                "ratio": _rounded(self.ratio),
                "command": command,
                "at": at.isoformat(timespec="seconds"),
            },
            ensure_ascii=False,
        )


def table(figures: Sequence[Figure]) -> str:
    """Return the figures for a person to read, columns aligned."""
    header = ("figure", "value", "baseline", "ratio", "aim")
    rows = [header, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])


def spread(times: Sequence[float]) -> str:
    """Return the median of some times in seconds, and the two that they lie between."""
    median, least, most = statistics.median(times), min(times), max(times)
    return f"{median:.3f} s ({least:.3f}-{most:.3f}, {len(times)} times)"


def _row(figure: Figure) -> tuple[str, ...]:
    ratio = NONE if figure.ratio is None else f"{figure.ratio:.4g}"
    aim = NONE if figure.aim is None else f"≤ {figure.aim:g}"
    if figure.least is not None:
        aim = f"≥ {figure.least:g}"
    if figure.is_reached is not None:
        aim += " ✓" if figure.is_reached else " ✗"
    baseline = _amount(figure.baseline, figure.unit)
    return (figure.name, _amount(figure.value, figure.unit), baseline, ratio, aim)


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return NONE
    number = f"{value:,.0f}" if unit == "bytes" else f"{value:,.2f}"
    return f"{number} {unit}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = (
        text.ljust(width) if column == 0 else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([name, *numbers]).rstrip()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
