from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.events.codec import decode_batch, encode_batch
from forebay.events.history import Batch, History, ReplayRing, Tombstones
from forebay.events.schema import (
    CPU,
    STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    WireProfile,
)
from tests.events.support import Held, apply, removed, stored


def block(number: int, medium: str = CPU) -> BlockStored:
    return BlockStored([number], None, list(range(16)), 16, medium=medium)


class Stream:
    """A history beside what is really held."""

    def __init__(
        self,
        *,
        ring: int = 4,
        ring_bytes: int = 1 << 20,
        tombstones: int = 64,
        snapshots: bool = True,
        first: int = 0,
        contiguous: bool = False,
    ):
        self.held: Held = set()
        self.log: list[list[KVEvent]] = []
        self.history = History(
            ReplayRing(ring, ring_bytes, first), WireProfile(),
            dp_rank=0, snapshot=self.present if snapshots else None, tombstones=tombstones,
            contiguous=contiguous,
        )  # fmt: skip

    def present(self) -> list[BlockStored]:
        return [block(number, medium or CPU) for medium, number in sorted(self.held) if isinstance(number, int)]

    def publish(self, *events: KVEvent) -> None:
        apply(self.held, events)
        self.log.append(list(events))
        self.history.append(events, encode_batch(0.0, events).payload)

    def lose(self, *events: KVEvent) -> None:
        """It became true, but the batch never got out. (Who is beyond it has learnt it by a replay.)"""
        apply(self.held, events)
        self.log.append(list(events))
        self.history.lose(1)

    def belief(self, start: int, replayed: list[Batch]) -> Held:
        """What a consumer that had taken in all before `start` believes after the replay."""
        believed: Held = set()
        for events in self.log[:start]:
            apply(believed, events)
        for batch in replayed:
            apply(believed, decode_batch(batch.payload).events)
        return believed

    def replay(self, start: int, ts: float = 0.0) -> list[Batch]:
        return [batch for batch in self.history.replay(start, ts, None) if batch is not None]

    def snapshot(self, ts: float = 0.0) -> list[Batch]:
        return [batch for batch in self.history.present(ts, None) if batch is not None]


def test_the_ring_keeps_the_last_batches_by_count() -> None:
    ring = ReplayRing(3, 1000)
    for number in range(5):
        assert ring.append(bytes([number])) == number
    assert list(ring.since(0, 99)) == [Batch(2, b"\2"), Batch(3, b"\3"), Batch(4, b"\4")]
    assert (ring.begin, ring.next, len(ring), ring.bytes) == (2, 5, 3, 3)


def test_the_ring_keeps_no_more_bytes_than_it_may() -> None:
    ring = ReplayRing(100, 10)
    for _ in range(9):
        ring.append(b"xxx")
    assert len(ring) == 3 and ring.bytes == 9


def test_a_batch_over_the_byte_limit_is_not_kept_and_its_number_is_used() -> None:
    ring = ReplayRing(100, 10)
    ring.append(b"x")
    assert ring.append(b"y" * 11) == 1
    assert (len(ring), ring.bytes, ring.begin, ring.next) == (0, 0, 2, 2)


def test_a_replay_survives_that_the_ring_moves_on_under_it() -> None:
    ring = ReplayRing(3, 1000)
    for number in range(3):
        ring.append(bytes([number]))
    replay = ring.since(0, 6)
    assert next(replay).seq == 0
    for number in range(3, 6):
        ring.append(bytes([number]))
    assert [batch.seq for batch in replay] == [3, 4, 5]


def test_a_replay_within_the_ring_is_what_was_sent() -> None:
    stream = Stream(ring=4)
    for number in range(6):
        stream.publish(block(number))
    assert [batch.seq for batch in stream.replay(3)] == [3, 4, 5]
    assert decode_batch(stream.replay(5)[0].payload).events == (block(5),)
    assert stream.history.compactions == 0


def test_a_replay_from_before_the_ring_is_the_present_state_under_the_last_numbers() -> None:
    stream = Stream(ring=2)
    for number in range(6):
        stream.publish(block(number))
    stream.publish(BlockRemoved([2], CPU))
    batches = stream.replay(0)
    assert batches[-1].seq == 6
    assert [batch.seq for batch in batches] == list(range(7 - len(batches), 7))
    assert stream.belief(0, batches) == stream.held
    assert all(event.reason == "snapshot" for batch in batches for event in decode_batch(batch.payload).events)


def test_without_a_snapshot_a_late_replay_is_what_the_ring_has() -> None:
    stream = Stream(ring=2, snapshots=False)
    for number in range(6):
        stream.publish(block(number))
    assert [batch.seq for batch in stream.replay(0)] == [4, 5]


def test_a_consumer_that_fell_far_behind_is_told_the_removals_that_it_missed() -> None:
    stream = Stream(ring=1)
    stream.publish(block(1), block(2))
    stream.publish(BlockRemoved([1], CPU))
    stream.publish(block(3))
    batches = stream.replay(1)
    assert stream.belief(1, batches) == stream.held == {(CPU, 2), (CPU, 3)}
    events = [event for batch in batches for event in decode_batch(batch.payload).events]
    assert not any(isinstance(event, AllBlocksCleared) for event in events)


def test_when_removals_are_forgotten_the_consumer_is_told_to_clear() -> None:
    stream = Stream(ring=1, tombstones=1)
    stream.publish(block(1), block(2), block(3))
    stream.publish(BlockRemoved([1, 2], CPU))
    stream.publish(block(4))
    batches = stream.replay(1)
    assert decode_batch(batches[0].payload).events[0] == AllBlocksCleared(reason="snapshot")
    assert stream.belief(1, batches) == stream.held


def test_without_tombstones_a_consumer_from_before_the_ring_clears_and_is_told_everything() -> None:
    stream = Stream(ring=1, tombstones=0)
    for number in range(6):
        stream.publish(block(number))
    stream.publish(BlockRemoved([3], CPU))
    batches = stream.replay(4)
    assert isinstance(decode_batch(batches[0].payload).events[0], AllBlocksCleared)
    assert stream.belief(4, batches) == stream.held


def test_tombstones_are_bounded() -> None:
    tombstones = Tombstones(10)
    for seq in range(100):
        tombstones.note(seq, [BlockRemoved([seq], CPU)])
    assert len(tombstones) == 10 and tombstones.horizon == 90


def test_a_block_that_was_stored_again_has_no_tombstone() -> None:
    tombstones = Tombstones(10)
    tombstones.note(0, [removed(), removed(medium=STORAGE)])
    tombstones.note(1, [stored()])
    assert [event.medium for event in tombstones.since(0) if isinstance(event, BlockRemoved)] == [STORAGE]


def test_lost_batches_leave_a_gap_and_the_state_heals_from_the_snapshot() -> None:
    stream = Stream(ring=8)
    stream.publish(block(1))
    stream.lose(BlockRemoved([1], CPU))
    stream.publish(block(2))
    assert stream.history.ring.next == 3
    assert stream.belief(1, stream.replay(1)) == stream.held == {(CPU, 2)}


def test_after_a_restart_at_a_higher_number_an_old_consumer_is_told_to_clear_and_a_new_one_is_not() -> None:
    stream = Stream(first=1_000_000)
    stream.publish(block(1))
    old, new = stream.replay(17), stream.replay(0)
    assert decode_batch(old[0].payload).events[0] == AllBlocksCleared(reason="snapshot")
    assert [batch.seq for batch in old] == [batch.seq for batch in new] == [1_000_000]
    assert decode_batch(new[0].payload).events == (msgspec.structs.replace(block(1), reason="snapshot"),)


def test_a_restart_that_holds_nothing_says_so() -> None:
    stream = Stream(first=1_000_000)
    [batch] = stream.replay(17)
    assert batch.seq == 999_999
    assert decode_batch(batch.payload).events == (AllBlocksCleared(reason="snapshot"),)


def test_one_snapshot_serves_many_requests_and_is_let_go() -> None:
    stream = Stream(ring=4)
    for number in range(9):
        stream.publish(block(number))
    made = 0

    def counting() -> list[BlockStored]:
        nonlocal made
        made += 1
        return stream.present()

    stream.history._source = counting
    stream.replay(0, ts=100.0)
    stream.publish(block(77))
    batches = stream.replay(0, ts=101.0)
    assert made == 1 and batches[-1].seq == 9
    assert stream.belief(0, batches) == stream.held
    assert stream.history.snapshot_bytes > 0
    stream.history.tick(200.0)
    assert stream.history.snapshot_bytes == 0


def test_a_contiguous_history_has_every_number_that_was_asked_for() -> None:
    stream = Stream(ring=2, contiguous=True)
    for number in range(20):
        stream.publish(block(number))
    for start in (0, 7, 17):
        batches = stream.replay(start)
        assert [batch.seq for batch in batches] == list(range(start, 20))
        assert stream.belief(start, batches) == stream.held


def test_a_snapshot_is_one_number_and_then_what_came_after_it() -> None:
    stream = Stream(ring=50)
    stream.publish(*(block(number) for number in range(3000)))
    parts = stream.snapshot(ts=100.0)
    assert [batch.seq for batch in parts] == [0] * len(parts) and len(parts) > 2
    stream.publish(BlockRemoved([7], CPU))
    stream.publish(block(5000))
    again = stream.snapshot(ts=101.0)
    assert [batch.seq for batch in again] == [0] * len(parts) + [1, 2], "the kept one, and what it lacks"
    assert stream.belief(0, again) == stream.held


def test_there_is_no_snapshot_before_the_first_batch_or_without_a_source() -> None:
    assert Stream().snapshot() == []
    silent = Stream(snapshots=False)
    silent.publish(block(1))
    assert silent.snapshot() == []


def test_a_snapshot_of_nothing_says_so() -> None:
    stream = Stream()
    stream.publish(block(1))
    stream.publish(BlockRemoved([1], CPU))
    [only] = stream.snapshot()
    assert only.seq == 1 and decode_batch(only.payload).events == ()


def test_a_large_state_goes_out_in_batches_that_fit_into_the_free_numbers() -> None:
    stream = Stream(ring=1)
    stream.publish(*(block(number) for number in range(5000)))
    for _ in range(3):
        stream.publish(block(1))
    batches = stream.replay(0)
    assert [batch.seq for batch in batches] == [0, 1, 2, 3]
    assert stream.belief(0, batches) == stream.held


steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear", "lose", "ask"]),
        st.integers(0, 9),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 6), st.integers(1, 12), st.integers(0, 60))
def test_whoever_replays_from_anywhere_ends_with_the_present_state(
    script: list[tuple[str, int, bool]], ring: int, tombstones: int, where: int
) -> None:
    stream = Stream(ring=ring, tombstones=tombstones)
    for step, number, storage in script:
        medium = STORAGE if storage else CPU
        if step == "store":
            stream.publish(block(number, medium))
        elif step == "remove":
            stream.publish(BlockRemoved([number], medium))
        elif step == "clear":
            stream.publish(AllBlocksCleared())
        elif step == "lose":
            stream.lose(block(number, medium))
        else:
            stream.replay(number)
    told = stream.snapshot()
    assert stream.belief(0, told) == stream.held, "a snapshot needs nothing from before"
    assert not told or told[-1].seq == stream.history.ring.next - 1
    start = min(where, len(stream.log))
    batches = stream.replay(start)
    numbers = [batch.seq for batch in batches]
    assert numbers == sorted(set(numbers))
    assert not numbers or (start <= numbers[0] and numbers[-1] == stream.history.ring.next - 1)
    assert stream.belief(start, batches) == stream.held
