"""Calendar months (UTC), as the usage page pages through them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

_MONTH = re.compile(r"(20\d\d)-(0[1-9]|1[0-2])")


@dataclass(frozen=True, order=True, slots=True)
class Month:
    """A month of a year."""

    year: int
    number: int

    @classmethod
    def of(cls, at: datetime) -> Month:
        return cls(at.year, at.month)

    @classmethod
    def parse(cls, text: str) -> Month | None:
        """Read `2026-11`; None for what is no month."""
        found = _MONTH.fullmatch(text)
        return cls(int(found[1]), int(found[2])) if found else None

    def __str__(self) -> str:
        return f"{self.year}-{self.number:02}"

    @property
    def first_on(self) -> date:
        return date(self.year, self.number, 1)

    @property
    def begins_at(self) -> datetime:
        return datetime(self.year, self.number, 1, tzinfo=UTC)

    @property
    def ends_at(self) -> datetime:
        return self.next.begins_at

    @property
    def next(self) -> Month:
        return self._shifted(1)

    @property
    def previous(self) -> Month:
        return self._shifted(-1)

    def days(self) -> list[date]:
        """Return each day of the month."""
        length = (self.next.first_on - self.first_on).days
        return [self.first_on + timedelta(days=offset) for offset in range(length)]

    def _shifted(self, by: int) -> Month:
        year, number = divmod(self.year * 12 + self.number - 1 + by, 12)
        return Month(year, number + 1)
