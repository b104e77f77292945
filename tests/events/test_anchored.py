"""What a consumer is told that drops blocks whose parent it doesn't know."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.events.anchored import Anchored
from forebay.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from tests.events.test_holdings import FILES, HERE, KEYS, Step, Steps, gone, run


class Dropping:
    """A consumer that never forgets a parent, and drops a block at whose parent it hasn't been. Fails if it has to."""

    def __init__(self) -> None:
        self.known: set[object] = {None}
        self.held: set[tuple[str | None, object]] = set()

    def take(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                assert event.parent_block_hash in self.known, "a block before its parent"
                self.known.update(event.block_hashes)
                self.held.update((event.medium, block) for block in event.block_hashes)
            elif isinstance(event, BlockRemoved):
                gone_now = {(event.medium, block) for block in event.block_hashes}
                assert gone_now <= self.held, "removed without having been told"
                self.held -= gone_now
            else:
                self.held.clear()


def blocks(events: list[KVEvent]) -> list[object]:
    return [block for event in events if not isinstance(event, AllBlocksCleared) for block in event.block_hashes]


def test_a_block_is_held_back_until_its_chain_is_whole_in_whatever_tiers() -> None:
    anchored = Anchored()
    assert anchored.take([run(2, 4)]) == [] == anchored.take([run(1, 2, FILES)])
    told = anchored.take([run(0, 1)])
    assert blocks(told) == list(KEYS[:4])
    assert [event.medium for event in told if isinstance(event, BlockStored)] == ["CPU", "STORAGE", "CPU"]


def test_what_loses_its_chain_is_told_as_removed_and_comes_back_with_it() -> None:
    anchored = Anchored()
    anchored.take([run(0, 4), run(2, 4, FILES)])
    removed = anchored.take([gone(1, 2)])
    assert set(blocks(removed)) == set(KEYS[1:4])
    assert set(blocks(anchored.take([run(1, 2)]))) == set(KEYS[1:4])


def test_a_parent_that_stays_in_another_tier_keeps_its_children() -> None:
    anchored = Anchored()
    anchored.take([run(0, 4), run(0, 2, FILES)])
    assert blocks(anchored.take([gone(0, 2)])) == list(KEYS[:2])
    assert anchored.take([run(0, 1, FILES)]) == [], "it is there already"


def test_blocks_beyond_the_cap_are_not_told_and_counted() -> None:
    anchored = Anchored(max_blocks=3)
    told = anchored.take([run(0, 4)])
    assert blocks(told) == list(KEYS[:3]) and anchored.refused == 1 and len(anchored) == 3


@settings(max_examples=150, deadline=None)
@given(Steps, st.integers(0, 40))
def test_such_a_consumer_never_drops_anything_and_knows_every_whole_chain(steps: list[Step], joined_at: int) -> None:
    anchored, early, truth = Anchored(), Dropping(), set[tuple[str | None, bytes]]()
    late: Dropping | None = None
    for number, (is_stored, first, count, place) in enumerate(steps):
        if number == joined_at:
            late = Dropping()
            late.take(list(anchored.snapshot()))
        end = min(first + count, 8)
        keys = {(place.medium, key) for key in KEYS[first:end]}
        truth = truth | keys if is_stored else truth - keys
        told = anchored.take([run(first, end, place) if is_stored else gone(first, end, place)])
        for consumer in (early, late):
            if consumer is not None:
                consumer.take(told)
    whole = 0
    while whole < 8 and any(key == KEYS[whole] for _, key in truth):
        whole += 1
    expected = {(medium, key) for medium, key in truth if key in KEYS[:whole]}
    assert early.held == expected
    assert late is None or late.held == expected
    anchored.take([gone(0, 8), gone(0, 8, FILES), gone(0, 8, HERE)])
    assert len(anchored) == 0 and not anchored._children
