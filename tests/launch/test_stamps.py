"""The judge of the crash tests: what it must let pass, and what it must not."""

from collections.abc import Callable

import pytest

from launch.bench.stamps import Inconsistent, Ledger, stamp

ZEROS = bytes(512)


def read_from(device: dict[int, bytes]) -> Callable[[int], bytes]:
    return lambda sector: device.get(sector, ZEROS)


def two_writes_in_flight() -> Ledger:
    """1 is answered, then 2 and 3 are sent; nothing else happens."""
    ledger = Ledger()
    first = ledger.send(0, 2, is_zeros=False)
    ledger.answer(first)
    ledger.send(0, 1, is_zeros=False)
    ledger.send(1, 1, is_zeros=False)
    return ledger


@pytest.mark.parametrize(("one", "two"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_any_part_of_what_is_in_flight_may_be_there(one: int, two: int) -> None:
    device = {0: stamp(0, one), 1: stamp(1, two)}
    two_writes_in_flight().check_instant(read_from(device), since=2)


def test_a_write_that_was_answered_must_be_there_at_that_instant() -> None:
    ledger = two_writes_in_flight()
    ledger.check_instant(read_from({}), since=0)
    with pytest.raises(Inconsistent):
        ledger.check_instant(read_from({}), since=2)


def test_a_later_write_is_not_there_without_an_earlier_one() -> None:
    ledger = Ledger()
    for sector in (0, 1):
        ledger.answer(ledger.send(sector, 1, is_zeros=False))
    ledger.check_instant(read_from({0: stamp(0, 1)}), since=0)
    with pytest.raises(Inconsistent):
        ledger.check_instant(read_from({1: stamp(1, 2)}), since=0)


def test_zeros_may_be_those_of_any_time_but_only_of_one() -> None:
    ledger = Ledger()
    for sector, is_zeros in ((0, False), (1, False), (0, True), (1, True)):
        ledger.answer(ledger.send(sector, 1, is_zeros=is_zeros))
    ledger.check_instant(read_from({}), since=0)
    ledger.check_instant(read_from({1: stamp(1, 2)}), since=5)
    with pytest.raises(Inconsistent):
        ledger.check_instant(read_from({0: stamp(0, 1)}), since=5)


def test_what_nobody_wrote_is_noticed() -> None:
    ledger = two_writes_in_flight()
    torn = stamp(0, 1)[:256] + stamp(0, 2)[256:]
    elsewhere = stamp(1, 1)
    for content in (torn, elsewhere, b"\1" * 512):
        with pytest.raises(Inconsistent, match="nobody wrote"):
            ledger.check_instant(read_from({0: content, 1: stamp(1, 1)}), since=0)


def test_only_what_was_not_flushed_may_be_lost() -> None:
    ledger = Ledger()
    ledger.answer(ledger.send(0, 1, is_zeros=False))
    ledger.answer(ledger.send(0, 1, is_zeros=False))
    ledger.flushed(ledger.position)
    ledger.answer(ledger.send(0, 1, is_zeros=False))
    for number in (2, 3):
        ledger.check_kept(read_from({0: stamp(0, number)}))
    with pytest.raises(Inconsistent):
        ledger.check_kept(read_from({0: stamp(0, 1)}))


def test_a_write_that_was_lost_does_not_come_back() -> None:
    ledger = Ledger()
    ledger.answer(ledger.send(0, 1, is_zeros=False))
    ledger.answer(ledger.send(0, 1, is_zeros=False))
    ledger.settle(read_from({0: stamp(0, 1)}))
    ledger.check_instant(read_from({0: stamp(0, 1)}), since=ledger.position)
    with pytest.raises(Inconsistent, match="nobody wrote"):
        ledger.check_instant(read_from({0: stamp(0, 2)}), since=0)


def test_what_was_trimmed_and_not_flushed_may_hold_data_of_another_place() -> None:
    ledger = Ledger()
    ledger.answer(ledger.send(0, 1, is_zeros=False))
    ledger.answer(ledger.send(7, 1, is_zeros=False))
    ledger.flushed(ledger.position)
    ledger.answer(ledger.send(0, 1, is_zeros=True))
    foreign = read_from({0: stamp(7, 2), 7: stamp(7, 2)})
    ledger.check_kept(foreign)
    ledger.settle(foreign)
    ledger.check_instant(foreign, since=ledger.position)
    for other in (read_from({7: stamp(7, 2)}), read_from({0: stamp(0, 1), 7: stamp(7, 2)})):
        with pytest.raises(Inconsistent):
            ledger.check_instant(other, since=ledger.position)


@pytest.mark.parametrize(
    "content",
    [b"secret".ljust(512), stamp(9, 1), stamp(7, 5), stamp(7, 1)[:256] + bytes(256)],
    ids=["no stamp", "a sector never written", "a write never sent", "half a stamp"],
)
def test_what_was_trimmed_and_not_flushed_never_holds_data_of_another_disk(
    content: bytes,
) -> None:
    ledger = Ledger()
    ledger.answer(ledger.send(7, 1, is_zeros=False))
    ledger.answer(ledger.send(0, 1, is_zeros=True))
    with pytest.raises(Inconsistent, match="another's data"):
        ledger.settle(read_from({0: content, 7: stamp(7, 1)}))
