"""What a consumer of ours believes: orphans, duplicates, unknown media, fences, and bounds."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.events.codec import decode_batch, encode_batch
from forebay.events.holdings import HeldIn, Holdings
from forebay.events.schema import (
    CPU,
    GPU,
    LOCAL,
    REMOTE,
    STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    WireProfile,
)
from forebay.events.subscriber import Received, Restart
from tests.events.support import keys_of, tokens_of

HERE = HeldIn(CPU, LOCAL)
FILES = HeldIn(STORAGE, LOCAL)
KEYS = keys_of(8)
TOKENS = tokens_of(8)
WHOLE_KEYS = WireProfile(hash_format="bytes32")
Step = tuple[bool, int, int, HeldIn]


def run(first: int, end: int, place: HeldIn = HERE) -> BlockStored:
    """Blocks [first, end) of one chain."""
    parent = KEYS[first - 1] if first else None
    return BlockStored(
        list(KEYS[first:end]), parent, TOKENS[16 * first : 16 * end], 16, medium=place.medium, locality=place.locality
    )


def gone(first: int, end: int, place: HeldIn = HERE) -> BlockRemoved:
    return BlockRemoved(list(KEYS[first:end]), place.medium, locality=place.locality)


def told(*events: KVEvent, **limits: int) -> Holdings:
    holdings = Holdings(**limits)
    holdings.apply_events(events)
    return holdings


def delivered(
    events: Sequence[KVEvent], *, restart: Restart | None = None, missed: int = 0
) -> Received:
    batch = decode_batch(encode_batch(0.0, events, 0, WHOLE_KEYS).payload)
    return Received("kv@host@model", 0, batch, missed=missed, restart=restart)


def test_a_chain_is_held_and_matched_by_its_tokens() -> None:
    holdings = told(run(0, 3), run(0, 2, FILES))
    assert holdings.held(HERE) == set(KEYS[:3]) and holdings.held(FILES) == set(KEYS[:2])
    assert holdings.match(TOKENS, 16) == [{HERE, FILES}, {HERE, FILES}, {HERE}]
    assert holdings.match(tokens_of(8, first=1), 16) == []


def test_a_removal_takes_its_own_tier_alone() -> None:
    holdings = told(run(0, 2), run(0, 2, FILES), gone(0, 2))
    assert holdings.held(HERE) == set() and holdings.match(TOKENS, 16) == [{FILES}, {FILES}]


def test_blocks_without_their_parent_wait_for_it_and_then_all_come_at_once() -> None:
    holdings = told(run(4, 6), run(2, 4))
    assert holdings.parked == 4 and len(holdings) == 0 and holdings.match(TOKENS, 16) == []
    assert holdings.held(HERE) == set(KEYS[2:6]), "they were announced, whatever can be made of them"
    holdings.apply_events([run(0, 2)])
    assert holdings.parked == 0 and len(holdings.match(TOKENS, 16)) == 6
    assert holdings.counters.parked == holdings.counters.unparked == 4, "blocks are counted, not events"


def test_a_parent_in_another_tier_is_a_parent() -> None:
    holdings = told(run(0, 2, FILES), run(2, 4))
    assert holdings.parked == 0 and holdings.match(TOKENS, 16) == [{FILES}, {FILES}, {HERE}, {HERE}]


def test_parked_blocks_are_bounded_and_what_is_dropped_is_counted_in_blocks() -> None:
    holdings = told(run(2, 8), max_parked=4)
    assert holdings.parked == 4 and holdings.counters.orphans_dropped == 2 and holdings.trust == "degraded"
    holdings.apply_events([run(0, 2)])
    assert holdings.held(HERE) == {*KEYS[:2], *KEYS[4:]}, "the oldest two went"


def test_an_orphan_that_is_removed_no_longer_waits() -> None:
    holdings = told(run(2, 4), gone(3, 4), run(0, 2))
    assert holdings.held(HERE) == set(KEYS[:3])


def test_what_is_told_twice_is_held_once_and_one_removal_is_enough() -> None:
    holdings = told(run(0, 2), run(0, 2), run(4, 5), run(4, 5))
    assert holdings.counters.duplicates == 3 and len(holdings) == 2 and holdings.parked == 1
    holdings.apply_events([gone(0, 2), gone(4, 5)])
    assert not holdings.places()


def test_an_unknown_medium_or_locality_is_counted_and_not_held() -> None:
    strange = [run(0, 2, HeldIn("FS", LOCAL)), run(0, 3, HeldIn(CPU, "NEAR")), gone(0, 1, HeldIn("HBM4", None))]
    holdings = told(run(0, 1), *strange)
    assert holdings.counters.unknown_media == 2 + 3 + 1
    assert holdings.places() == {HERE} and holdings.held(HERE) == {KEYS[0]}


def test_local_remote_and_unsaid_are_three_places() -> None:
    remote, unsaid = HeldIn(STORAGE, REMOTE), HeldIn(STORAGE, None)
    holdings = told(run(0, 1, FILES), run(0, 2, remote), run(0, 3, unsaid), gone(0, 1, remote))
    assert holdings.match(TOKENS, 16) == [{FILES, unsaid}, {remote, unsaid}, {unsaid}]


def test_a_clear_takes_every_tier() -> None:
    assert not told(run(0, 2), run(0, 2, HeldIn(GPU, LOCAL)), run(4, 5), AllBlocksCleared()).places()


def test_a_restart_fences_what_was_known_before_the_batch_is_applied() -> None:
    holdings = told(run(0, 4))
    holdings.apply(delivered([run(0, 1)], restart="sequence"))
    assert len(holdings) == 1 and holdings.counters.fences == 1 and holdings.trust == "exact"


def test_missed_batches_degrade_the_belief_until_the_next_fence() -> None:
    holdings = told(run(0, 4))
    holdings.apply(delivered([run(0, 1)], missed=3))
    assert holdings.trust == "degraded" and holdings.counters.missed == 3 and len(holdings) == 4
    holdings.apply(delivered([run(0, 1)], restart="snapshot"))
    assert holdings.trust == "exact" and len(holdings) == 1


def test_the_number_of_blocks_is_bounded() -> None:
    holdings = told(run(0, 2), run(3, 8), run(2, 3), max_blocks=4)
    assert len(holdings) == 4 and holdings.counters.refused > 0 and holdings.trust == "degraded"


def test_a_salted_chain_is_another_than_the_plain_one_with_its_tokens() -> None:
    salted = BlockStored([b"s" * 32], None, TOKENS[:16], 16, medium=CPU, locality=LOCAL, extra_keys=[["salt:1"]])
    lora = BlockStored([b"l" * 32], None, TOKENS[:16], 16, medium=CPU, locality=LOCAL, lora_name="adapter")
    holdings = told(salted, lora)
    assert holdings.match(TOKENS, 16) == []
    assert len(holdings.match(TOKENS, 16, extra=["salt:1"])) == len(holdings.match(TOKENS, 16, lora="adapter")) == 1


Steps = st.lists(
    st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 4), st.sampled_from([HERE, FILES])), max_size=40
)


@settings(max_examples=150, deadline=None)
@given(Steps)
def test_it_holds_what_was_announced_and_not_removed_whatever_the_order(steps: list[Step]) -> None:
    holdings, truth = Holdings(), set[tuple[HeldIn, bytes]]()
    for is_stored, first, count, place in steps:
        end = min(first + count, 8)
        keys = {(place, key) for key in KEYS[first:end]}
        truth = truth | keys if is_stored else truth - keys
        holdings.apply_events([run(first, end, place) if is_stored else gone(first, end, place)])
    assert {(place, block) for place in holdings.places() for block in holdings.held(place)} == truth
    matched = holdings.match(TOKENS, 16)
    for at, places in enumerate(matched):
        assert places <= {place for place, key in truth if key == KEYS[at]}
    holdings.apply_events([gone(0, 8), gone(0, 8, FILES)])
    assert not holdings.places() and len(holdings) == holdings.parked == 0
    assert not holdings._children and not holdings._waiting, "nothing is left behind"
