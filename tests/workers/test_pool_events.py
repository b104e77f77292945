"""KV events of the device pool, as a subscriber sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq

from forebay.events.codec import decode_batch
from forebay.events.publisher import SNAPSHOT_REQUEST, restart_safe_seq
from forebay.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, low64
from forebay.workers.pool_events import PoolEvents

KEYS = [bytes([i]) * 32 for i in range(1, 5)]


START_S = 5.0


def replayed(events: PoolEvents, start: int = restart_safe_seq(START_S)) -> list[KVEvent]:
    """All that the replay socket gives from this number on."""
    return [event for _, batch in batches(events, start) for event in batch]


def batches(events: PoolEvents, start: int) -> list[tuple[int, Sequence[KVEvent]]]:
    """The same, with each batch's number."""
    context = zmq.Context.instance()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.rcvtimeo = 5000
    assert events.replay_endpoint is not None
    dealer.connect(events.replay_endpoint)
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    found: list[tuple[int, Sequence[KVEvent]]] = []
    while True:
        _, _, seq, payload = dealer.recv_multipart()
        if seq == b"\xff" * 8:
            dealer.close()
            return found
        found.append((int.from_bytes(seq, "big"), decode_batch(payload).events))


def play(group: int) -> list[KVEvent]:
    """What is published of one small history in `group`; group 0 is the announced one."""

    async def run() -> list[KVEvent]:
        events = PoolEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "ab" * 8, "model", lambda: START_S)
        events.attach(asyncio.get_running_loop())
        events.stored(group, None, KEYS[:2], list(range(32)))
        events.stored(group, KEYS[1], KEYS[2:3], list(range(16)))
        events.removed(group, KEYS[2])
        events.flush()
        await asyncio.sleep(0)
        found = await asyncio.to_thread(replayed, events)
        assert events.stats()["events.events"] == len(found)
        events.close()
        return found

    return asyncio.run(run())


def test_what_is_stored_and_evicted_is_published_with_tokens_and_parents() -> None:
    cleared, first, second, removed = play(0)
    assert isinstance(cleared, AllBlocksCleared), "a worker that starts holds nothing"
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored) and isinstance(removed, BlockRemoved)
    assert first.block_hashes == [low64(key) for key in KEYS[:2]] and first.parent_block_hash is None
    assert (first.block_size, first.medium, first.token_ids) == (16, "GPU", list(range(32)))
    assert second.parent_block_hash == low64(KEYS[1])
    assert removed.block_hashes == [low64(KEYS[2])] and removed.medium == "GPU"
    assert first.epoch == "ab" * 8


def test_a_worker_that_starts_again_numbers_its_batches_above_its_predecessors_and_clears_first() -> None:
    async def life(started: float, asked: int) -> list[tuple[int, Sequence[KVEvent]]]:
        events = PoolEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", f"{started}", "model", lambda: started)
        events.attach(asyncio.get_running_loop())
        events.stored(0, None, KEYS[:1], list(range(16)))
        events.flush()
        await asyncio.sleep(0)
        found = await asyncio.to_thread(batches, events, asked)
        events.close()
        return found

    first = asyncio.run(life(100.0, 0))
    last = first[-1][0]
    second = asyncio.run(life(100.5, last + 1))
    assert min(seq for seq, _ in second) > last, "none of them looks like one that was seen"
    told = [event for _, batch in second for event in batch]
    assert isinstance(told[0], AllBlocksCleared), "what the first one had is gone, however late somebody asks"
    assert isinstance(told[-1], BlockStored) and told[-1].block_hashes == [low64(KEYS[0])]


def test_a_window_group_is_not_announced() -> None:
    assert [type(event) for event in play(1)] == [AllBlocksCleared]


def test_without_an_endpoint_nothing_is_kept() -> None:
    events = PoolEvents(None, None, "", "")
    events.stored(0, None, KEYS[:1], list(range(16)))
    events.flush()
    assert events.stats() == {} and events.endpoint is None


def test_the_mirror_for_snapshots_is_bounded_and_what_it_lacks_is_counted() -> None:
    async def run() -> tuple[dict[str, float], list[KVEvent]]:
        events = PoolEvents(
            "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "ab" * 8, "model", lambda: START_S, held_max=2
        )  # fmt: skip
        events.attach(asyncio.get_running_loop())
        events.stored(0, None, KEYS[:2], list(range(32)))
        events.stored(0, KEYS[1], KEYS[2:4], list(range(32)))
        events.flush()
        await asyncio.sleep(0)
        full = events.stats()
        told = await asyncio.to_thread(replayed, events, SNAPSHOT_REQUEST)
        for key in KEYS:
            events.removed(0, key)
        events.flush()
        await asyncio.sleep(0)
        assert events.stats()["events.held"] == 0
        events.close()
        return full, told

    full, told = asyncio.run(run())
    assert (full["events.held"], full["events.held_max"], full["events.untold"]) == (2, 2, 2)
    assert [hash_ for event in told if isinstance(event, BlockStored) for hash_ in event.block_hashes] == [
        low64(key) for key in KEYS[:2]
    ]
