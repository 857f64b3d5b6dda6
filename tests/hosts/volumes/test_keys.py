"""Sealing: deterministic, bound to volume and kind, and of no use to other volumes."""

import threading
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hosts.volumes.blocks import (
    BLOCK_BYTES,
    MAX_STORED_BYTES,
    block_digest,
    decode_block,
    encode_block,
)
from hosts.volumes.errors import Corrupt, KeyMissing
from hosts.volumes.keys import SEAL_BYTES, GivenKeys, Keyring, Sealer, keys_from_hex
from hosts.volumes.naming import content_digest
from tests.hosts.volumes.given_keys import KeyForEach

VOLUME = UUID(int=7).bytes
SEALER = Sealer(bytes(range(32)), VOLUME)


@given(st.binary(max_size=300))
def test_what_is_sealed_opens_again_and_equal_contents_seal_equally(data: bytes) -> None:
    sealed = SEALER.seal("packs", data)

    assert SEALER.open("packs", sealed) == data
    assert SEALER.seal("packs", data) == sealed
    assert len(sealed) == len(data) + SEAL_BYTES


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_changed_bit_is_refused(data: bytes, draw: st.DataObject) -> None:
    sealed = bytearray(SEALER.seal("leaves", data))
    at = draw.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= 1 << draw.draw(st.integers(0, 7))

    with pytest.raises(Corrupt):
        SEALER.open("leaves", bytes(sealed))


def test_different_contents_have_different_nonces() -> None:
    nonces = {SEALER.seal("packs", number.to_bytes(4, "big"))[:12] for number in range(4096)}

    assert len(nonces) == 4096


def test_another_kind_volume_or_key_does_not_open_it() -> None:
    sealed = SEALER.seal("packs", b"secret")

    with pytest.raises(Corrupt):
        SEALER.open("leaves", sealed)
    with pytest.raises(Corrupt):
        Sealer(bytes(range(32)), uuid4().bytes).open("packs", sealed)
    with pytest.raises(Corrupt):
        Sealer(bytes(32), VOLUME).open("packs", sealed)


def test_what_is_too_short_to_be_sealed_is_refused() -> None:
    with pytest.raises(Corrupt):
        SEALER.open("packs", b"x" * (SEAL_BYTES - 1))


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Sealer(b"short", VOLUME)


@pytest.mark.parametrize("sealer", [None, SEALER])
@pytest.mark.parametrize("is_random", [True, False])
def test_a_block_comes_back_whether_it_could_be_compressed_or_not(
    sealer: Sealer | None, is_random: bool
) -> None:
    block = b"".join(
        content_digest(bytes([is_random]) * number) if is_random else bytes(16)
        for number in range(BLOCK_BYTES // 16)
    )
    stored = encode_block(block, sealer)

    assert (len(stored) >= BLOCK_BYTES) is is_random
    assert len(stored) <= MAX_STORED_BYTES
    digest = block_digest(block, is_sealed=sealer is not None)
    assert decode_block(stored, digest, sealer) == block


def test_a_sealed_block_is_known_by_either_hash_and_a_plain_one_by_its_own_alone() -> None:
    block = bytes(range(256)) * (BLOCK_BYTES // 256)
    sealed, plain = encode_block(block, SEALER), encode_block(block, None)
    new, old = block_digest(block, is_sealed=True), block_digest(block, is_sealed=False)

    assert new != old
    assert decode_block(sealed, old, SEALER) == decode_block(sealed, new, SEALER) == block
    assert decode_block(plain, old, None) == block
    with pytest.raises(Corrupt):
        decode_block(plain, new, None)
    with pytest.raises(Corrupt):
        decode_block(sealed, bytes(len(new)), SEALER)


def test_many_threads_seal_and_open_with_one_sealer() -> None:
    wrong = []

    def work(mark: int) -> None:
        data = bytes([mark]) * 5000
        for _ in range(300):
            if SEALER.open("packs", SEALER.seal("packs", data)) != data:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


def test_a_keyring_asks_once_for_all_and_refuses_what_is_not_known() -> None:
    asked: list[set[UUID]] = []
    one, two, plain = uuid4(), uuid4(), uuid4()

    class Source(GivenKeys):
        def keys_of(self, volumes):  # type: ignore[no-untyped-def]
            asked.append(set(volumes))
            return super().keys_of(volumes)

    keyring = Keyring(Source({one: bytes(32), two: bytes([1]) * 32, plain: None}))
    keyring.learn([one.bytes, two.bytes, plain.bytes])
    keyring.learn([one.bytes])

    assert asked == [{one, two, plain}]
    assert keyring.open("packs", plain.bytes, b"as it is") == b"as it is"
    assert keyring.seal("packs", one.bytes, b"a") != keyring.seal("packs", two.bytes, b"a")
    with pytest.raises(KeyMissing):
        keyring.sealer(uuid4().bytes)


def test_keys_reach_an_export_in_hex_and_no_more_than_were_learned() -> None:
    volume, other = uuid4(), uuid4()
    keyring = Keyring(KeyForEach())
    keyring.learn([volume.bytes])
    export = Keyring(keys_from_hex(keyring.in_hex()))

    assert export.open("leaves", volume.bytes, keyring.seal("leaves", volume.bytes, b"x")) == (
        b"x"
    )
    with pytest.raises(KeyMissing):
        export.sealer(other.bytes)
