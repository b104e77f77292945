from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.codec import decode_batch, encode_batch, encode_event
from forebay.events.errors import EventDecodeError, EventEncodeError
from forebay.events.schema import (
    CPU,
    GPU,
    LOCAL,
    MEDIA,
    REASONS,
    REMOTE,
    STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    WireProfile,
    is_known,
    low64,
)
from tests.events.support import keys_of, stored

# A batch as vLLM 0.32 sent it.
CAPTURED = bytes.fromhex(
    "93cb41dac30d7633a7b59184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573"
    "91cfb8986267ee494a83a66d656469756da3475055a967726f75705f6964780000"
)
ARRAY = WireProfile(encoding="array")

u64 = st.integers(0, 2**64 - 1)
texts = st.none() | st.text(max_size=8)
media = st.sampled_from([None, *MEDIA])
localities = st.sampled_from([None, LOCAL, REMOTE])


@st.composite
def stored_events(draw: st.DrawFn, remote: bool = True) -> BlockStored:
    blocks = draw(st.lists(u64, min_size=1, max_size=4))
    size = draw(st.sampled_from([1, 16]))
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(blocks) * size, max_size=len(blocks) * size))
    return BlockStored(
        block_hashes=list(blocks),
        parent_block_hash=draw(st.none() | u64),
        token_ids=tokens,
        block_size=size,
        lora_id=draw(st.none() | st.integers(0, 9)),
        medium=draw(media),
        lora_name=draw(texts),
        extra_keys=draw(st.none() | st.just([["tenant"], None])),
        group_idx=draw(st.none() | st.integers(0, 9)),
        kv_cache_spec_kind=draw(texts),
        kv_cache_spec_sliding_window=draw(st.none() | st.integers(0, 4096)),
        locality=draw(localities if remote else st.just(None)),
        session_id=draw(texts) if remote else None,
        epoch=draw(texts) if remote else None,
    )


@st.composite
def removed_events(draw: st.DrawFn, remote: bool = True) -> BlockRemoved:
    return BlockRemoved(
        draw(st.lists(u64, max_size=4)),
        draw(media),
        draw(st.none() | st.integers(0, 9)),
        draw(localities if remote else st.just(None)),
        epoch=draw(texts) if remote else None,
        reason=draw(st.sampled_from([None, *sorted(REASONS)])) if remote else None,
    )


def batches(remote: bool = True) -> st.SearchStrategy[list[Any]]:
    cleared = st.just(AllBlocksCleared())
    return st.lists(stored_events(remote) | removed_events(remote) | cleared, max_size=5)


def plain(event: KVEvent) -> dict[str, Any]:
    """An event as any msgpack decoder sees it."""
    decoded = msgspec.msgpack.decode(encode_batch(0.0, [event]).payload)
    result: dict[str, Any] = decoded[1][0]
    return result


def test_a_captured_removal_is_understood() -> None:
    batch = decode_batch(CAPTURED)
    assert batch.events == (BlockRemoved([0xB8986267EE494A83], GPU, group_idx=0),)
    assert (batch.ts, batch.dp_rank, batch.undecodable) == (1795962328.807111, 0, 0)


def test_the_same_removal_gives_the_captured_bytes() -> None:
    event = BlockRemoved([b"\0" * 24 + bytes.fromhex("b8986267ee494a83")], GPU, group_idx=0)
    assert encode_batch(1795962328.807111, [event], 0).payload == CAPTURED


def test_a_stored_event_has_vllms_keys_in_vllms_order_and_ours_behind() -> None:
    event = BlockStored([1], None, list(range(16)), 16, medium=CPU, locality=LOCAL, epoch="e")
    assert list(plain(event)) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "locality", "epoch",
    ]  # fmt: skip
    assert plain(event)["parent_block_hash"] is None


def test_optional_keys_are_left_out_when_they_are_none() -> None:
    assert list(plain(BlockRemoved([1], CPU))) == ["type", "block_hashes", "medium"]
    assert list(plain(AllBlocksCleared())) == ["type"]


def test_every_optional_key_keeps_vllms_place() -> None:
    event = BlockStored(
        [1],
        2,
        list(range(16)),
        16,
        3,
        CPU,
        "lora",
        [["x"]],
        0,
        "full",
        512,
        LOCAL,
        "me",
        "s",
        "e",
        "snapshot",
    )
    assert list(plain(event))[8:] == [
        "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
        "ownership", "session_id", "epoch", "reason",
    ]  # fmt: skip


def test_an_array_event_has_vllms_older_positions() -> None:
    event = BlockStored([7], 6, list(range(16)), 16, medium=CPU, locality=LOCAL, epoch="e")
    row = msgspec.msgpack.decode(encode_event(event, ARRAY))
    assert row == [
        "BlockStored",
        [7],
        6,
        list(range(16)),
        16,
        None,
        CPU,
        None,
        None,
        None,
        None,
        None,
    ]
    assert msgspec.msgpack.decode(encode_event(BlockRemoved([7], CPU), ARRAY)) == [
        "BlockRemoved",
        [7],
        CPU,
        None,
    ]


def test_a_remote_event_is_not_put_into_an_array_that_could_not_say_so() -> None:
    with pytest.raises(EventEncodeError, match="REMOTE"):
        encode_event(BlockRemoved([7], STORAGE, locality=REMOTE), ARRAY)


@given(batches(), st.floats(0, 2e9), st.none() | st.integers(0, 8))
def test_maps_come_back_as_they_went(events: list[KVEvent], ts: float, rank: int | None) -> None:
    batch = decode_batch(encode_batch(ts, events, rank).payload)
    assert (batch.events, batch.ts, batch.dp_rank) == (tuple(events), ts, rank)


@given(batches(remote=False), st.floats(0, 2e9))
def test_arrays_come_back_as_they_went(events: list[KVEvent], ts: float) -> None:
    assert decode_batch(encode_batch(ts, events, 0, ARRAY).payload).events == tuple(events)


def test_shorter_arrays_of_older_publishers_are_understood() -> None:
    payload = msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, list(range(16)), 16], ["BlockRemoved", [1]]]])
    batch = decode_batch(payload)
    assert batch.events == (BlockStored([1], None, list(range(16)), 16), BlockRemoved([1]))
    assert batch.dp_rank is None


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": "BlockStored", "block_hashes": [1]},
        {"type": "BlockRemoved", "block_hashes": ["text"]},
        {
            "type": "BlockStored",
            "block_hashes": [1],
            "parent_block_hash": None,
            "token_ids": [1],
            "block_size": 16,
        },
        ["Unknown", 1],
        [],
        {},
        7,
        None,
        "BlockStored",
    ],
)
def test_an_undecodable_event_costs_only_itself(bad: object) -> None:
    good = msgspec.to_builtins(BlockRemoved([1], CPU))
    batch = decode_batch(msgspec.msgpack.encode([1.0, [good, bad, good], 0]))
    assert batch.events == (BlockRemoved([1], CPU), BlockRemoved([1], CPU))
    assert batch.undecodable == 1


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode({"a": 1}), b"\x90", b"\xff" * 9])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(EventDecodeError):
        decode_batch(payload)


@given(st.binary(max_size=64))
def test_no_bytes_at_all_raise_anything_else(payload: bytes) -> None:
    for data in (payload, CAPTURED[: len(payload)] + payload, CAPTURED[:10] + payload):
        with contextlib.suppress(EventDecodeError):
            decode_batch(data)


def test_deep_nesting_is_refused_not_followed() -> None:
    with pytest.raises(EventDecodeError):
        decode_batch(b"\x91" * 100_000)


def test_an_unknown_medium_or_locality_is_kept_but_is_not_usable() -> None:
    known = BlockRemoved([1], CPU, locality=LOCAL)
    tape, moon = BlockRemoved([2], "TAPE"), BlockRemoved([3], CPU, locality="MOON")
    batch = decode_batch(encode_batch(0.0, [tape, known, moon]).payload)
    assert batch.events == (tape, known, moon)
    assert batch.unknown == {0, 2}
    assert batch.usable == (known,)
    assert is_known(known) and not is_known(tape)


def test_hashes_are_the_low_64_bits_of_the_key_unsigned() -> None:
    key = bytes(range(24)) + b"\xff" * 8
    assert low64(key) == 2**64 - 1
    assert plain(BlockRemoved([key], CPU))["block_hashes"] == [2**64 - 1]


def test_a_profile_of_32_byte_hashes_sends_all_of_the_key() -> None:
    keys = keys_of(2)
    event = BlockStored([keys[1]], keys[0], list(range(16)), 16, medium=CPU)
    payload = encode_batch(0.0, [event], 0, WireProfile(hash_format="bytes32")).payload
    assert decode_batch(payload).events == (event,)


def test_a_profile_of_32_byte_hashes_refuses_a_shorter_one_and_sends_the_rest() -> None:
    batch = encode_batch(0.0, [BlockRemoved([7], CPU), stored()], 0, WireProfile(hash_format="bytes32"))
    assert batch.refused == 1 and "32-byte" in batch.first_error
    assert decode_batch(batch.payload).events == (stored(),)


def test_signed_hashes_of_other_publishers_become_unsigned() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [-1], "medium": CPU}
    assert decode_batch(msgspec.msgpack.encode([0.0, [event], 0])).events == (BlockRemoved([2**64 - 1], CPU),)


def test_keys_that_vllm_has_not_can_be_left_out() -> None:
    told = [
        BlockStored([1], None, list(range(16)), 16, medium="CPU", epoch="ab", reason="snapshot"),
        BlockRemoved([1], "CPU", locality="LOCAL", epoch="ab", reason="evicted"),
        AllBlocksCleared(epoch="ab", reason="snapshot"),
    ]
    payload = encode_batch(0.0, told, 0, WireProfile(extensions=False)).payload
    keys = [set(event) for event in msgspec.msgpack.decode(payload)[1]]
    assert not any(key & {"epoch", "reason"} for key in keys) and "locality" in keys[1]


def test_tokens_can_be_withheld() -> None:
    payload = encode_batch(0.0, [stored(2)], 0, WireProfile(tokens=False)).payload
    event = decode_batch(payload).events[0]
    assert isinstance(event, BlockStored)
    assert event.token_ids == [] and len(event.block_hashes) == 2 and event.block_size == 16


def test_an_event_whose_tokens_dont_fit_its_blocks_is_refused() -> None:
    wrong = BlockStored([1, 2], None, list(range(16)), 16, medium=CPU)
    assert encode_batch(0.0, [wrong]).refused == 1


def test_unknown_keys_of_newer_publishers_are_ignored() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": CPU, "temperature": 3}
    assert decode_batch(msgspec.msgpack.encode([0.0, [event], 0])).events == (BlockRemoved([1], CPU),)


def test_the_epoch_of_a_batch_is_what_its_last_event_says() -> None:
    events = [
        BlockRemoved([1], CPU, epoch="a"),
        BlockRemoved([1], CPU, epoch="b"),
        BlockRemoved([1], CPU),
    ]
    assert decode_batch(encode_batch(0.0, events).payload).epoch == "b"
