import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hosts.guest import protocol
from hosts.guest.protocol import Decoder, Frame, ProtocolError

frames = st.builds(Frame, st.sampled_from(sorted(protocol.KINDS)), st.binary(max_size=300))


@given(st.lists(frames, max_size=12), st.data())
def test_frames_survive_any_cutting_of_their_stream(
    sent: list[Frame], data: st.DataObject
) -> None:
    stream = b"".join(protocol.encode(frame.kind, frame.payload) for frame in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    decoder = Decoder()

    received: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[start:end])

    assert received == sent
    assert decoder.pending_bytes == 0


@given(st.binary(max_size=100))
def test_garbage_is_refused_or_waited_for_but_never_a_crash(garbage: bytes) -> None:
    decoder = Decoder()
    try:
        decoder.feed(garbage)
    except ProtocolError:
        return
    assert decoder.pending_bytes <= len(garbage)


def test_a_frame_longer_than_the_bound_is_refused_before_it_arrives() -> None:
    header = protocol.JSON + (protocol.MAX_PAYLOAD_BYTES + 1).to_bytes(4, "big")

    with pytest.raises(ProtocolError):
        Decoder().feed(header)
    with pytest.raises(ValueError, match="holds"):
        protocol.encode(protocol.JSON, bytes(protocol.MAX_PAYLOAD_BYTES + 1))


def test_a_long_stream_is_cut_into_frames_of_at_most_the_bound() -> None:
    data = bytes(range(256)) * 10_000

    cut = Decoder().feed(b"".join(protocol.encode_stream(protocol.INPUT, data)))

    assert b"".join(frame.payload for frame in cut) == data
    assert max(len(frame.payload) for frame in cut) == protocol.MAX_PAYLOAD_BYTES


@pytest.mark.parametrize(
    "payload", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000, json.dumps("op").encode()]
)
def test_what_is_no_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        Frame(protocol.JSON, payload).document()


def test_a_document_comes_back_as_it_was_sent() -> None:
    document = {"op": "ping", "text": "é😀\x00\n"}

    [frame] = Decoder().feed(protocol.encode_document(document))

    assert frame.document() == document
