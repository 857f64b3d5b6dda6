"""What `bin/test` makes of its arguments."""

import pytest

from launch.testing import NO_TESTS, parse, worst


def test_pytests_own_arguments_pass_through_in_order() -> None:
    wanted = parse(["tests/billing", "-k", "meter", "-x", "--maxfail=2", "-vv"])

    assert wanted.arguments == ["tests/billing", "-k", "meter", "-x", "--maxfail=2", "-vv"]
    assert not wanted.quick


def test_a_phase_narrows_the_marks_that_were_asked_for() -> None:
    wanted = parse(["-m", "browser or slow", "--quick"])

    assert wanted.quick
    assert wanted.arguments == []
    assert wanted.marked("not guest") == ["-m", "(browser or slow) and (not guest)"]
    assert parse([]).marked("not guest") == ["-m", "not guest"]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, NO_TESTS], 0),
        ([NO_TESTS, 1], 1),
        ([1, 0], 1),
        ([0, 2], 2),
        ([NO_TESTS], NO_TESTS),
    ],
)
def test_one_failed_phase_fails_the_run(codes: list[int], code: int) -> None:
    assert worst(codes) == code
