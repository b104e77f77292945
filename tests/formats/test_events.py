"""KV event payloads and the frames of live and replayed batches: decoded, counted as lost, or refused; never more."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from forebay.events.codec import DecodedBatch, decode_batch, encode_batch
from forebay.events.errors import EventDecodeError
from forebay.events.publisher import EventPublisher
from forebay.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, WireProfile
from forebay.events.subscriber import EventSubscriber
from tests.formats.mutations import cuts, flips

EVENTS: list[KVEvent] = [
    BlockStored(
        block_hashes=[b"h" * 32, b"i" * 32],
        parent_block_hash=b"p" * 32,
        token_ids=list(range(32)),
        block_size=16,
        medium="CPU",
        extra_keys=[["salt:01"], None],
        epoch="ab" * 16,
    ),
    BlockRemoved([b"h" * 32], "CPU", reason="evicted", epoch="ab" * 16),
    AllBlocksCleared(),
]
PROFILES = [
    WireProfile(encoding=encoding, hash_format=form)
    for encoding in ("map", "array") for form in ("u64", "bytes32")
]  # fmt: skip


def decoded(payload: bytes) -> DecodedBatch | None:
    """None if it is refused."""
    try:
        return decode_batch(payload)
    except EventDecodeError:
        return None


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: f"{profile.encoding} {profile.hash_format}")
def test_a_damaged_payload_is_refused_or_loses_events_or_says_something_well_formed(profile: WireProfile) -> None:
    payload = encode_batch(1.5, EVENTS, 0, profile).payload
    whole = decode_batch(payload)
    assert len(whole.events) == len(EVENTS)
    for _, changed in flips(payload):
        batch = decoded(changed)
        for event in batch.events if batch else ():
            if isinstance(event, BlockStored) and event.token_ids:
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
    for beginning in cuts(payload):
        assert decoded(beginning) is None, "a part of a batch is no batch"


@pytest.fixture
def subscriber() -> Iterator[EventSubscriber]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = EventSubscriber(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        yield found
        found.close()


def test_damaged_frames_of_a_live_batch_are_delivered_counted_or_passed_over(subscriber: EventSubscriber) -> None:
    payload = encode_batch(1.5, EVENTS, 0, PROFILES[0]).payload
    frames = [b"kv@store@model", (7).to_bytes(8, "big"), payload]
    looked_at = 0
    for place in range(len(frames)):
        for damaged in (*(data for _, data in flips(frames[place], patterns=(0x01, 0xFF))), *cuts(frames[place])):
            subscriber._take([*frames[:place], damaged, *frames[place + 1 :]])
            subscriber._ready.clear()
            looked_at += 1
    for wrong in ([], frames[:1], frames[:2], [*frames, b""], [b""] * 3):
        subscriber._take(wrong)
        looked_at += 1
    counters = subscriber.counters
    assert counters.malformed > len(payload), "every cut of the payload is one"
    assert counters.malformed + counters.batches + counters.duplicates == looked_at


def test_a_replay_request_that_is_none_is_counted_and_nobody_is_answered() -> None:
    publisher = EventPublisher("tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0")
    try:
        publisher.publish(EVENTS, 1.0)
        request = [b"me", b"", (0).to_bytes(8, "big")]
        for damaged in cuts(request[2]):
            publisher._request([request[0], request[1], damaged])
        for wrong in ([], request[:1], request[:2], [*request, b""], [b"me", b"x", request[2]]):
            publisher._request(wrong)
        assert publisher.stats().replay_garbage == 8 + 5 and publisher.stats().replays_active == 0
        for _, changed in flips(request[2]):  # any number is one to replay from
            publisher._request([*request[:2], changed])
            assert publisher.stats().replays_active == 1
            while publisher.poll_replay():
                pass  # to a consumer that has gone
        assert publisher.stats().replays_active == 0
    finally:
        publisher.close()
