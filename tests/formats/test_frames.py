"""Frames of the control protocol, the tiers' channel and the workers' protocol, every message of each."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.errors import ProtocolError
from forebay.ipc.framing import FRAME_BYTES_MAX, HEAD_BYTES, Codec, FrameBuffer, frame
from forebay.kvstore import protocol as store
from forebay.tiers import messages as tiers
from forebay.workers import protocol as workers
from tests.formats.mutations import cuts, flips, messages

PROTOCOLS: dict[str, tuple[Any, Codec[Any]]] = {
    "requests": (store.Request, store.REQUESTS),
    "replies": (store.Reply, store.REPLIES),
    "to tier": (tiers.ToTier, tiers.to_tier_codec()),
    "from tier": (tiers.FromTier, tiers.from_tier_codec()),
    "to worker": (workers.ToWorker, workers.TO_WORKER),
    "from worker": (workers.FromWorker, workers.FROM_WORKER),
}
SAMPLES = [
    pytest.param(message, codec, id=f"{name}: {type(message).__name__}")
    for name, (union, codec) in PROTOCOLS.items()
    for message in messages(union)
]


def received(codec: Codec[Any], data: bytes) -> list[Any]:
    return list(FrameBuffer(codec).feed(data))


@pytest.mark.parametrize(("message", "codec"), SAMPLES)
def test_a_frame_with_any_byte_changed_is_a_protocol_error(message: Any, codec: Codec[Any]) -> None:
    whole = codec.encode(message)
    assert received(codec, whole) == [message]
    for at, changed in flips(whole):
        try:
            found = received(codec, changed)
        except ProtocolError:
            continue
        raise AssertionError(f"byte {at}: {found}")


@pytest.mark.parametrize(("message", "codec"), SAMPLES)
def test_a_frame_cut_short_is_no_message_and_the_rest_completes_it(message: Any, codec: Codec[Any]) -> None:
    whole = codec.encode(message)
    for beginning in cuts(whole):
        buffer = FrameBuffer(codec)
        assert list(buffer.feed(beginning)) == []
        assert list(buffer.feed(whole[len(beginning) :])) == [message]


@pytest.mark.parametrize(("message", "codec"), SAMPLES)
def test_a_body_that_was_written_otherwise_is_a_message_or_a_protocol_error(message: Any, codec: Codec[Any]) -> None:
    """Checksums are right here: this is a peer that is wrong, not a wire."""
    body = codec.encode(message)[HEAD_BYTES:]
    known = tuple({type(other) for union, c in PROTOCOLS.values() if c is codec for other in messages(union)})
    for changed in (*(data for _, data in flips(body, patterns=(0x01, 0xFF))), *cuts(body)):
        try:
            (found,) = received(codec, frame(changed))
        except ProtocolError:
            continue
        assert isinstance(found, known)


@pytest.mark.parametrize("codec", [codec for _, codec in PROTOCOLS.values()])
def test_bodies_that_nest_without_end_and_lengths_beyond_the_cap_are_protocol_errors(codec: Codec[Any]) -> None:
    nested = b"\x82\xa1x" + b"\x91" * 200_000 + b"\xc0" + b"\xa4type\xa8GetStats"
    for data in (frame(nested), (FRAME_BYTES_MAX + 1).to_bytes(4, "little")):
        with pytest.raises(ProtocolError):
            received(codec, data)
