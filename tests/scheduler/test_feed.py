"""What the index believes after events is what the events say, and nothing that stopped being so."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.events.holdings import Holdings
from forebay.events.schema import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from forebay.scheduler.feed import Trust
from forebay.scheduler.orphans import Orphans
from forebay.scheduler.places import Tier, tier_of
from tests.scheduler.feeding import SIZE, Cluster, received, removed, stored, tokens_of

pytestmark = pytest.mark.usefixtures("form")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_engines_with_hashes_of_their_own_meet_in_the_same_prefix(cluster: Cluster) -> None:
    cluster.feed("a").event(stored([1, 2, 3], engine=1))
    cluster.feed("b").event(stored([1, 2], engine=2))
    assert [cluster.length([1, 2, 3, 4], owner) for owner in ("a", "b")] == [3, 2]
    assert len(cluster.index) == 3, "a block that two hold is kept once"


def test_a_restarted_publisher_has_nothing_before_its_first_new_event(cluster: Cluster) -> None:
    feed = cluster.feed()
    for seq in range(10):
        feed.apply(received(stored([seq]), seq=seq))
    feed.apply(received(stored([50]), seq=0, restart="sequence"))
    assert [cluster.length([block]) for block in (0, 9, 50)] == [0, 0, 1]
    assert len(cluster.index) == 1 and feed.trust is Trust.EXACT and feed.counters.fences == 1


def test_a_gap_that_nobody_fills_ends_all_belief_in_the_owner_and_says_so(cluster: Cluster) -> None:
    feed, other = cluster.feed("a"), cluster.feed("b")
    other.apply(received(stored([1])))
    feed.apply(received(stored([1]), seq=1))
    assert feed.trust is Trust.EXACT
    feed.apply(received(stored([2]), seq=5, missed=3))
    assert (cluster.length([1], "a"), cluster.length([2], "a"), cluster.length([1], "b")) == (0, 1, 1)
    assert feed.trust is Trust.DEGRADED and feed.counters.lost_batches == 3
    feed.apply(received(stored([3]), seq=0, restart="epoch"))
    assert feed.trust is Trust.EXACT


def test_a_gap_that_a_replay_filled_costs_nothing(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.apply(received(stored([1, 2]), seq=1))
    feed.apply(received(stored([1, 2, 3], 2), seq=2, replayed=True))
    feed.apply(received(stored([1, 2, 3, 4], 3), seq=3))
    assert cluster.length([1, 2, 3, 4]) == 4 and feed.counters.fences == 0


def test_a_stream_that_is_down_is_believed_in_nothing(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.apply(received(stored([1])))
    feed.down()
    assert len(cluster.index) == 0 and feed.trust is Trust.FALLBACK
    feed.apply(received(stored([1]), seq=1))
    assert feed.trust is Trust.EXACT


def test_blocks_of_an_unknown_parent_wait_for_it(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.event(stored([1, 2, 3, 4], 3))
    feed.event(stored([1, 2, 3], 1))
    assert cluster.length([1, 2, 3, 4]) == 0 and feed.orphans.blocks == 3
    feed.event(stored([1]))
    assert cluster.length([1, 2, 3, 4]) == 4 and feed.orphans.blocks == 0


def test_a_block_that_is_removed_while_it_waits_does_not_come_back(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.event(stored([1, 2, 3, 4, 5], 1))
    feed.event(removed([1, 2, 3], 2))
    feed.event(stored([1]))
    assert cluster.length([1, 2, 3, 4, 5]) == 2
    feed.event(stored([1, 2, 3], 2))
    assert cluster.length([1, 2, 3, 4, 5]) == 5, "what followed it had stayed"


def test_waiting_blocks_are_bounded_and_those_given_up_are_counted_in_blocks(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.orphans = Orphans(max_blocks=10)
    for chain in range(5):
        feed.event(stored([chain, 2, 3, 4, 5], 1))
    assert feed.orphans.blocks == 8 and feed.orphans.given_up == 12
    feed.event(stored([4]))
    assert cluster.length([4, 2, 3, 4, 5]) == 5
    feed.event(stored([0]))
    assert cluster.length([0, 2, 3, 4, 5]) == 1, "the oldest were given up"


def test_what_is_stored_twice_is_held_once_and_counted(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.event(stored([1, 2]))
    feed.event(stored([1, 2]))
    assert feed.counters.duplicates == 2 and cluster.index.stats().entries == 2
    feed.event(removed([1, 2]))
    assert len(cluster.index) == 0 and len(feed.names) == 0


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        ("GPU", None, Tier.DEVICE), ("GPU", "LOCAL", Tier.DEVICE), ("GPU", "REMOTE", None), (None, None, Tier.DEVICE),
        ("CPU", None, Tier.HOST), ("CPU", "LOCAL", Tier.HOST), ("CPU", "REMOTE", Tier.REMOTE),
        ("STORAGE", "LOCAL", Tier.DISK), ("STORAGE", "REMOTE", Tier.REMOTE), ("STORAGE", None, Tier.REMOTE),
        ("FS", None, None), ("gpu2", "LOCAL", None), ("CPU", "NEARBY", None), ("", None, None),
    ],
)  # fmt: skip
def test_every_medium_has_its_tier_and_unknown_ones_have_none(
    cluster: Cluster, medium: str | None, locality: str | None, tier: Tier | None
) -> None:
    assert tier_of(medium, locality) is tier
    feed = cluster.feed()
    feed.apply(received(stored([1, 2], medium=medium, locality=locality), stored([9])))
    held = {each: cluster.length([1, 2], tier=each) for each in Tier}
    assert held == {each: 2 if each is tier else 0 for each in Tier}
    assert feed.counters.unknown_medium == (2 if tier is None else 0)
    assert cluster.length([9]) == 1, "the others of its batch count"


def test_tiers_come_and_go_by_themselves_and_the_name_stays_while_one_has_the_block(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.event(stored([1, 2]))
    feed.event(stored([1, 2], medium="CPU"))
    feed.event(removed([1, 2]))
    assert (cluster.length([1, 2]), cluster.length([1, 2], tier=Tier.HOST)) == (0, 2)
    feed.event(stored([1, 2, 3], 2, medium="CPU"))
    assert cluster.length([1, 2, 3], tier=Tier.HOST) == 3
    feed.event(removed([1, 2, 3], medium="CPU"))
    assert len(cluster.index) == 0 and len(feed.names) == 0


def test_a_clear_takes_all_tiers_of_its_owner_and_of_no_other(cluster: Cluster) -> None:
    for owner in ("a", "b"):
        cluster.feed(owner).event(stored([1]))
        cluster.feed(owner).event(stored([1], medium="CPU"))
    cluster.feed("a").event(AllBlocksCleared())
    held = {(owner, tier): cluster.length([1], owner, tier) for owner in "ab" for tier in (Tier.DEVICE, Tier.HOST)}
    assert held == {(owner, tier): int(owner == "b") for owner, tier in held}


def test_events_without_their_tokens_or_of_a_window_alone_are_counted_and_left_out(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.event(stored([1]))
    for odd in (
        stored([1, 2], 1, kv_cache_spec_sliding_window=4096),
        type(stored([2]))([5], None, [], SIZE, medium="CPU"),
        type(stored([2]))([5], None, [0] * 32, 32, medium="GPU"),
        type(stored([2]))([5], None, [], 0, medium="GPU"),
    ):
        feed.event(odd)
    assert len(cluster.index) == 1 and feed.counters.unusable == 4


def test_salt_and_adapter_each_make_another_prefix(cluster: Cluster) -> None:
    cluster.feed("plain").event(stored([1, 2], engine=1))
    cluster.feed("salted").event(stored([1, 2], engine=2, extra_keys=[["tenant"], None]))
    cluster.feed("adapted").event(stored([1, 2], engine=3, lora_name="l"))
    assert cluster.length([1, 2], "plain") == 2
    assert cluster.length([1, 2], "salted") == 0 and cluster.length([1, 2], "adapted") == 0
    assert cluster.length([1, 2], "salted", salt="tenant") == 2
    assert len(cluster.index) == 6


def test_late_events_show_their_lag(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.apply(received(stored([1]), ts=100.0), now=100.25)
    assert feed.counters.lag_s == 0.25


def test_after_any_history_belief_is_what_is_held() -> None:
    rng = random.Random(11)
    cluster, held = Cluster(), {}
    feed = cluster.feed()
    for _ in range(800):
        chain = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
        medium = rng.choice(["GPU", "CPU"])
        blocks = held.setdefault(medium, set())
        if rng.random() < 0.6:
            skip = next((at for at in range(len(chain)) if tuple(chain[: at + 1]) not in held.get(medium, ())), None)
            if skip is None:
                continue
            feed.event(stored(chain, skip, medium=medium))
            blocks |= {tuple(chain[: at + 1]) for at in range(skip, len(chain))}
        else:
            feed.event(removed(chain, len(chain) - 1, medium=medium))
            blocks.discard(tuple(chain))
    for medium, tier in (("GPU", Tier.DEVICE), ("CPU", Tier.HOST)):
        for prefix in held[medium]:
            if not all(_somewhere(prefix[: end + 1], held) for end in range(len(prefix))):
                continue
            leading = next((at for at in range(len(prefix)) if prefix[: at + 1] not in held[medium]), len(prefix))
            assert cluster.length(prefix, tier=tier) == leading, prefix


def _somewhere(prefix: tuple[int, ...], held: dict[str, set[tuple[int, ...]]]) -> bool:
    return any(prefix in blocks for blocks in held.values())


def test_a_cluster_of_churn_returns_to_its_baseline(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.event(stored([1, 2, 3]))
    before = cluster.index.stats().blocks, len(feed.names), feed.names.nbytes
    for chain in range(1500):
        feed.event(stored([1, 2, 1000 + chain, 4], 2))
    for chain in range(1500):
        feed.event(removed([1, 2, 1000 + chain, 4], 2))
    assert (cluster.index.stats().blocks, len(feed.names), feed.names.nbytes) == before


def test_a_name_that_comes_to_stand_for_another_block_leaves_nothing_of_the_first(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.event(BlockStored([7], None, [1] * SIZE, SIZE, medium="GPU"))
    feed.event(BlockStored([7], None, [1] * SIZE, SIZE, medium="CPU", locality="LOCAL"))
    feed.event(BlockStored([7], None, [2] * SIZE, SIZE, medium="CPU", locality="LOCAL"))
    held = {(block, tier): cluster.length([block], tier=tier) for block in (1, 2) for tier in (Tier.DEVICE, Tier.HOST)}
    assert held == {key: int(key == (2, Tier.HOST)) for key in held}
    assert feed.counters.replaced == 2
    feed.event(BlockRemoved([7], "GPU"))
    assert cluster.length([2], tier=Tier.HOST) == 1, "this one was never on the device"
    feed.event(BlockRemoved([7], "CPU", locality="LOCAL"))
    assert len(cluster.index) == 0 and len(feed.names) == 0


@pytest.mark.parametrize(
    ("hashes", "unusable"),
    [([5, 5], 2), ([b"x" * 32, b"x" * 32], 2), ([b"a" * 24 + b"12345678", int.from_bytes(b"12345678", "big")], 2),
     ([5, b"x" * 32], 0), ([b"x" * 32, 5], 0)],
)  # fmt: skip
@pytest.mark.parametrize("parent", [None, 99])
def test_one_name_for_two_blocks_costs_its_event_and_names_of_both_kinds_do_not(
    cluster: Cluster, hashes: list[BlockHash], unusable: int, parent: int | None
) -> None:
    feed = cluster.feed()
    odd = BlockStored(hashes, parent, tokens_of([1, 2]), SIZE, medium="GPU")
    feed.apply(received(odd, BlockRemoved(hashes, "GPU"), stored([8, 9])))
    assert feed.counters.unusable == unusable and cluster.length([8, 9]) == 2
    assert len(cluster.index) == 2 and feed.orphans.blocks == 0


def test_tokens_that_no_tokeniser_gives_cost_nothing_else(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.apply(received(BlockStored([5], None, [-1] * SIZE, SIZE, medium="GPU"), stored([8, 9])))
    assert cluster.length([8, 9]) == 2
    feed.event(BlockRemoved([5], "GPU"))
    assert len(cluster.index) == 2


def test_an_event_that_cannot_be_read_leaves_belief_less_than_exact(cluster: Cluster) -> None:
    feed = cluster.feed()
    feed.apply(received(stored([1]), undecodable=1))
    assert feed.trust is Trust.DEGRADED and cluster.length([1]) == 1 and feed.counters.undecodable_events == 1
    feed.apply(received(stored([2]), seq=1))
    assert feed.trust is Trust.DEGRADED
    feed.apply(received(stored([2]), seq=0, restart="epoch"))
    assert feed.trust is Trust.EXACT


def test_of_a_block_that_waits_in_two_places_one_medium_a_removal_takes_one(cluster: Cluster) -> None:
    feed = cluster.feed()
    for locality in ("LOCAL", "REMOTE"):
        feed.event(stored([1, 2], 1, medium="CPU", locality=locality))
    feed.event(removed([1, 2], 1, medium="CPU", locality="REMOTE"))
    feed.event(stored([1], medium="CPU", locality="LOCAL"))
    feed.event(stored([1], medium="CPU", locality="REMOTE"))
    assert [cluster.length([1, 2], tier=tier) for tier in (Tier.HOST, Tier.REMOTE)] == [2, 1]


NAMES = list(range(6))
PLACES = [("GPU", None), ("CPU", "LOCAL"), ("CPU", "REMOTE"), ("STORAGE", "LOCAL"), ("FS", None)]
anything = st.one_of(
    st.builds(
        lambda names, parent, word, place, short: BlockStored(
            names, parent, [word] * (SIZE * len(names) - short), SIZE, medium=place[0], locality=place[1]
        ),
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), st.sampled_from([None, *NAMES]),
        st.integers(0, 2), st.sampled_from(PLACES), st.sampled_from([0, 0, 0, 1]),
    ),
    st.builds(
        lambda names, place: BlockRemoved(names, place[0], locality=place[1]),
        st.lists(st.sampled_from(NAMES), max_size=4), st.sampled_from(PLACES),
    ),
    st.just(AllBlocksCleared()),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("abc"), anything), max_size=40), st.sampled_from(["remove", "down"]))
def test_whatever_owners_say_nothing_is_left_once_they_take_it_back_or_go(
    script: list[tuple[str, KVEvent]], end: str
) -> None:
    cluster = Cluster()
    for owner, event in script:
        cluster.feed(owner).event(event)
    for feed in cluster.feeds.values():
        if end == "down":
            feed.down()
        else:
            for medium, locality in reversed(PLACES):
                feed.event(BlockRemoved(NAMES, medium, locality=locality))
        assert len(feed.names) == 0 and feed.orphans.blocks == 0
        assert not feed.orphans._events and not feed.orphans._waiting and not feed.orphans._where
    stats = cluster.index.stats()
    assert (stats.blocks, stats.entries, stats.sets) == (0, 0, 0)


CHAINS = [w for n in (1, 2, 3, 4) for w in itertools.product((1, 2), repeat=n)]
honest = st.tuples(st.sampled_from(CHAINS), st.integers(0, 3), st.sampled_from(["GPU", "CPU"]), st.booleans())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(honest, max_size=40), st.lists(honest, max_size=10))
def test_who_joins_by_a_snapshot_believes_what_those_do_who_heard_it_all(
    before: list[tuple[tuple[int, ...], int, str, bool]], after: list[tuple[tuple[int, ...], int, str, bool]]
) -> None:
    cluster, held = Cluster(), Holdings()
    early, late = cluster.feed("early"), cluster.feed("late")
    for event in map(_honest, before):
        early.event(event)
        held.apply_events([event])
    for event in held.snapshot():
        late.event(event)
    for event in [None, *map(_honest, after)]:
        for feed in (early, late) if event is not None else ():
            feed.event(event)
        for chain, tier in itertools.product(CHAINS[-16:], (Tier.DEVICE, Tier.HOST)):  # the longest say it of all
            believed = [cluster.length(chain, owner, tier) for owner in ("early", "late")]
            assert believed[0] == believed[1], (chain, tier)


def _honest(step: tuple[tuple[int, ...], int, str, bool]) -> KVEvent:
    chain, skip, medium, comes = step
    told = stored if comes else removed
    return told(chain, min(skip, len(chain) - 1), medium=medium)
