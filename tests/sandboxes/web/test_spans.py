import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.units import DAY
from sandboxes.web.spans import MAX_SPAN_S, NotASpan, format_span, parse_span


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 0),
        ("0", 0),
        ("90", 90),
        ("90s", 90),
        ("30m", 1800),
        ("30 min", 1800),
        ("2H", 7200),
        (" 1d 12h ", 129_600),
        ("1d12h", 129_600),
        ("365d", 365 * DAY),
    ],
)
def test_spans_are_read_as_people_write_them(text: str, seconds: int) -> None:
    assert parse_span(text) == seconds


@pytest.mark.parametrize("text", ["soon", "1y", "-5m", "1.5h", "366d", "9" * 40, "h", "٣m!"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(NotASpan):
        parse_span(text)


@given(st.integers(0, MAX_SPAN_S))
def test_a_written_span_is_read_back(seconds: int) -> None:
    assert parse_span(format_span(seconds)) == seconds
