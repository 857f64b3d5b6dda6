"""What a client sends in small pieces is written in large ones."""

from collections.abc import AsyncIterator

import pytest

from common.units import KiB
from sandboxes.files import PIECE_BYTES, _gathered


async def sent(*sizes: int, fails: bool = False) -> AsyncIterator[bytes]:
    for number, size in enumerate(sizes):
        yield bytes([number % 256]) * size
    if fails:
        raise ConnectionError


@pytest.mark.parametrize(
    "sizes",
    [(), (0,), (1,), (64 * KiB,) * 50, (PIECE_BYTES,), (1, 40 * PIECE_BYTES, 1, 0, 7)],
)
async def test_pieces_are_joined_in_their_order_and_none_is_held_for_long(
    sizes: tuple[int, ...],
) -> None:
    whole = b"".join([piece async for piece in sent(*sizes)])

    written = [piece async for piece in _gathered(sent(*sizes))]

    assert b"".join(written) == whole
    assert all(len(piece) >= PIECE_BYTES for piece in written[:-1])
    assert max(map(len, written), default=0) < PIECE_BYTES + max(sizes, default=0) + 1


async def test_a_client_that_breaks_off_is_noticed() -> None:
    gathered = _gathered(sent(64 * KiB, fails=True))
    with pytest.raises(ConnectionError):
        await anext(gathered)
