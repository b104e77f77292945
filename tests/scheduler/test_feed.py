"""What the index believes after events is what the events say, and nothing that stopped being so."""

from __future__ import annotations

import random

import pytest

from forebay.events.schema import AllBlocksCleared
from forebay.scheduler.feed import Trust
from forebay.scheduler.orphans import Orphans
from forebay.scheduler.places import Tier, tier_of
from tests.scheduler.feeding import SIZE, Cluster, received, removed, stored

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
