"""Names of files as text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.filenames import to_bytes, to_text


@given(st.binary(max_size=255))
def test_any_name_comes_back_as_it_was(name: bytes) -> None:
    assert to_bytes(to_text(name)) == name


@given(st.binary(max_size=255))
def test_the_text_of_any_name_can_be_sent_as_json(name: bytes) -> None:
    sent = json.dumps(to_text(name), ensure_ascii=False).encode()

    assert to_bytes(json.loads(sent)) == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"a b#?%&+;", "a b#?%&+;"),
        ("aé😀漢".encode(), "aé😀漢"),
        (b"a\xff", "a\uf7ff"),
        ("\uf7ff".encode(), "\uf7ef\uf79f\uf7bf"),
        (b"\xc3", "\uf7c3"),
        (b"line\nbreak", "line\nbreak"),
    ],
)
def test_names_are_shown_as_the_module_draws_them(name: bytes, text: str) -> None:
    assert to_text(name) == text


def test_raw_bytes_of_a_query_are_understood_too() -> None:
    assert to_bytes("a\udcff") == b"a\xff"


def test_a_surrogate_that_is_no_byte_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        to_bytes("\ud800")
