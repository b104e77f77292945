"""Where prompts go: by what it costs there, never all to one, and with nothing forgotten of what is under way."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.scheduler.fleet import Fleet, Rates, Worker
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.learning import learn_prefill
from forebay.scheduler.load import Load
from forebay.scheduler.places import Holders, Tier
from forebay.scheduler.policies import POLICIES
from forebay.scheduler.predicted import Predicted
from forebay.scheduler.prefix_keys import as_tokens
from forebay.scheduler.routing import Prompt, Routing

pytestmark = pytest.mark.usefixtures("form")

RATES = Rates(prefill_s=0.001, load_s=(0.0, 0.00001, 0.0001, 0.0002), move_s=0.0001, latency_s=0.0)


class World:
    """Some workers, two to a store."""

    def __init__(self, workers: int, policy: str = "ttft", predict_s: float = 5.0, **rates: Any) -> None:
        self.holders, self.index = Holders(), PrefixIndex()
        rate = Rates(**{name: getattr(RATES, name) for name in RATES.__slots__} | rates)
        made = [Worker(f"w{n}", f"s{n // 2}", 16, rate) for n in range(workers)]
        self.fleet = Fleet(made, self.holders)
        self.routing = Routing.of(self.fleet, self.index, POLICIES[policy](random.Random(1)), predict_s=predict_s)
        self.open = np.ones(workers, np.bool_)

    def hold(self, owner: str, tier: Tier, prompt: Prompt, blocks: int) -> None:
        self.index.stored(self.holders.number(owner, tier), prompt.keys(16)[:blocks])

    def send(self, prompt: Prompt, now: float = 0.0) -> int:
        decision = self.routing.decide(prompt, now, self.open)
        self.routing.sent(decision, now)
        return decision.worker


def prompt(seed: int = 0, blocks: int = 64, session: str | None = None) -> Prompt:
    rng = random.Random(seed)
    return Prompt("m", as_tokens([rng.randrange(1000) for _ in range(16 * blocks)]), 16 * blocks, session=session)


def test_what_a_worker_reaches_is_its_own_and_its_stores() -> None:
    world, asked = World(4), prompt()
    world.hold("w0", Tier.DEVICE, asked, 10)
    world.hold("s0", Tier.HOST, asked, 30)
    world.hold("s0", Tier.DISK, asked, 20)
    world.hold("s1", Tier.DISK, asked, 40)
    reach = world.routing.decide(asked, 0.0, world.open).reach
    assert reach.device.tolist() == [160, 0, 0, 0]
    assert reach.near.tolist() == [480, 480, 640, 640]
    assert reach.far.tolist() == [640, 640, 640, 640]
    assert [world.fleet.stores[at] if at >= 0 else None for at in reach.source] == ["s1", "s1", None, None]
    host, disk = RATES.load_s[1], RATES.load_s[2]
    assert reach.load_s.tolist() == pytest.approx([320 * host, 480 * host, 640 * disk, 640 * disk])


def test_a_hole_ends_a_prefix_but_another_tier_fills_it() -> None:
    world, asked = World(2), prompt()
    keys = asked.keys(16)
    world.index.stored(world.holders.number("w0", Tier.DEVICE), keys[:10])
    world.index.stored(world.holders.number("w0", Tier.DEVICE), keys[12:30])
    world.index.stored(world.holders.number("s0", Tier.DISK), keys[5:11])
    assert world.routing.decide(asked, 0.0, world.open).reach.near.tolist() == [11 * 16, 0]
    world.index.stored(world.holders.number("s0", Tier.HOST), keys[11:12])
    reach = world.routing.decide(asked, 0.0, world.open).reach
    assert (reach.device.tolist(), reach.near.tolist()) == ([160, 0], [480, 0])


@given(st.integers(0, 2**32))
def test_reach_is_what_walking_the_blocks_one_by_one_finds(seed: int) -> None:
    rng, world, asked = random.Random(seed), World(6), prompt(blocks=24)
    keys = asked.keys(16)
    held: dict[str, dict[Tier, set[int]]] = {}
    for owner in [*(f"w{n}" for n in range(6)), *(f"s{n}" for n in range(3))]:
        for tier in Tier:
            blocks = set(rng.sample(range(24), rng.randrange(25))) if rng.random() < 0.6 else set(range(20))
            held.setdefault(owner, {})[tier] = blocks
            world.index.stored(world.holders.number(owner, tier), keys[sorted(blocks)])
    reach = world.routing.decide(asked, 0.0, world.open).reach
    for number in range(6):
        own, store = held[f"w{number}"], held[f"s{number // 2}"]
        tiers = [next((t for t in Tier if block in own[t] or block in store[t]), None) for block in range(24)]
        near = tiers.index(None) if None in tiers else 24
        device = next((at for at, tier in enumerate(tiers) if tier is not Tier.DEVICE), 24)
        assert reach.near[number] == min(16 * near, 16 * 24 - 1)
        assert reach.device[number] == min(16 * device, 16 * 24 - 1)
        load = sum(RATES.load_s[tiers[at] or 0] * 16 for at in range(device, near))
        assert reach.load_s[number] == pytest.approx(load)


def test_the_cut_is_where_computing_and_loading_meet() -> None:
    world, asked = World(2), prompt(blocks=100)
    world.hold("s0", Tier.DISK, asked, 80)
    costs = world.routing.decide(asked, 0.0, world.open).estimate
    compute, load, rest = 1280 * 0.001, 1280 * 0.0001, 320 * 0.001
    assert costs.cut_s[0] == pytest.approx(compute * load / (compute + load))
    assert costs.ttft_s[0] == pytest.approx(costs.cut_s[0] + rest)
    assert costs.cached[0] == pytest.approx(1280 * compute / (compute + load), abs=1)
    both = World(2, overlaps=False)
    both.hold("s0", Tier.DISK, asked, 80)
    assert both.routing.decide(asked, 0.0, both.open).estimate.cut_s[0] == pytest.approx(min(compute, load))


def test_a_cached_prefix_that_is_dearer_to_load_than_to_compute_is_computed() -> None:
    world, asked = World(2, load_s=(0.0, 1.0, 1.0, 1.0), overlaps=False), prompt()
    world.hold("s0", Tier.HOST, asked, 60)
    decision = world.routing.decide(asked, 0.0, world.open)
    assert decision.cached == 0 and decision.estimate.ttft_s[0] == pytest.approx(1024 * 0.001)


def test_a_queue_hides_loads() -> None:
    world, asked, other = World(2), prompt(1), prompt(2)
    world.hold("s0", Tier.DISK, asked, 60)
    world.open[1] = False
    alone = world.routing.decide(asked, 0.0, world.open).estimate
    world.send(other)
    behind = world.routing.decide(asked, 0.0, world.open).estimate
    assert alone.cut_s[0] > 0 and behind.cut_s[0] == 0
    assert behind.wait_s[0] == pytest.approx(1024 * 0.001)


def test_a_prefix_is_moved_when_its_holder_is_busy_and_followed_when_it_is_not() -> None:
    world, asked = World(4), prompt(blocks=200)
    world.hold("s0", Tier.HOST, asked, 190)
    assert world.send(asked) in (0, 1)
    world = World(4, predict_s=0.0)
    world.hold("s0", Tier.HOST, asked, 190)
    for number in range(6):
        world.open[:] = [True, True, False, False]
        world.send(prompt(50 + number, 400))
    world.open[:] = True
    decision = world.routing.decide(asked, 0.0, world.open)
    assert decision.worker in (2, 3) and decision.reason == "move" and decision.source == "s0"


@pytest.mark.parametrize("policy", ["ttft", "cache-aware", "least-load", "power-of-two", "round-robin"])
def test_a_prefix_that_everybody_shares_does_not_draw_everybody_to_one_worker(policy: str) -> None:
    world = World(8, policy)
    shared = prompt(0, 4)
    world.hold("w3", Tier.DEVICE, shared, 4)
    sent = Counter(world.send(_after(shared, number)) for number in range(400))
    assert max(sent.values()) / (400 / 8) < 1.3 and len(sent) == 8


def test_following_the_longest_prefix_does_draw_everybody_to_one_worker() -> None:
    world = World(8, "longest-prefix")
    shared = prompt(0, 4)
    world.hold("w3", Tier.DEVICE, shared, 4)
    assert {world.send(_after(shared, number)) for number in range(50)} == {3}


def _after(shared: Prompt, number: int, blocks: int = 12) -> Prompt:
    assert shared.tokens is not None
    own = prompt(1000 + number, blocks)
    assert own.tokens is not None
    tokens = np.concatenate([shared.tokens, own.tokens])
    return Prompt("m", tokens, tokens.size)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_counts_every_request_and_forgets_it_when_it_ends(policy: str) -> None:
    rng, world = random.Random(3), World(6, policy)
    tickets = []
    for number in range(300):
        decision = world.routing.decide(prompt(rng.randrange(5), 8), float(number), world.open)
        tickets.append(world.routing.sent(decision, float(number)))
        if rng.random() < 0.7:
            world.routing.first_token(tickets[-1], number + 0.1)
        if rng.random() < 0.5:
            world.routing.ended(tickets.pop(rng.randrange(len(tickets))), number + 0.2)
        assert world.routing.load.stats().in_flight == world.routing.load.requests.sum() == len(tickets)
    for ticket in tickets:
        world.routing.ended(ticket, 400.0)
        world.routing.ended(ticket, 400.0)
    load = world.routing.load
    assert not load.requests.any() and not load.tokens.any() and not load.decoding.any()
    assert not load.wait_s(1000.0).any()


def test_a_miss_goes_to_the_least_loaded_and_not_to_the_emptiest_cache() -> None:
    for policy in ("ttft", "cache-aware", "least-load"):
        world = World(4, policy)
        for number in (0, 0, 1, 2):
            world.open[:] = [at == number for at in range(4)]
            world.send(prompt(60 + number))
        world.open[:] = True
        world.hold("w3", Tier.DEVICE, prompt(99, 400), 400)
        assert world.send(prompt(7)) == 3


def test_between_two_polls_of_nothing_two_choices_still_spread() -> None:
    world = World(16, "power-of-two")
    sent = Counter(world.send(prompt(number, 4)) for number in range(320))
    assert max(sent.values()) <= 23, "load is what was sent, not what was last heard"


@pytest.mark.parametrize("lag", [0, 1, 16])
def test_siblings_of_a_burst_meet_at_few_workers_however_late_events_are(lag: int) -> None:
    world, shared = World(8), prompt(0, 256)
    told: list[tuple[int, Prompt]] = []
    chosen = []
    for number in range(16):
        sibling = _after(shared, number, 2)
        worker = world.send(sibling, 0.001 * number)
        chosen.append(worker)
        told.append((worker, sibling))
        if len(told) > lag:
            holder, kept = told.pop(0)
            world.hold(f"w{holder}", Tier.DEVICE, kept, 258)
    assert len(set(chosen)) <= 3, chosen
    blind = World(8, predict_s=0.0)
    scattered = {blind.send(_after(shared, number, 2), 0.001 * number) for number in range(16)}
    assert len(scattered) == 8, "without predictions, before any event"


def test_predictions_end() -> None:
    predicted, keys = Predicted(3, ttl_s=5.0), prompt().keys(16)
    predicted.add(1, keys, 0.0)
    assert predicted.leading(keys, 4.0).tolist() == [0, 64, 0]
    assert predicted.leading(keys, 9.0).tolist() == [0, 64, 0]
    assert predicted.leading(keys, 15.1).tolist() == [0, 0, 0] and predicted.blocks == 0


def test_predictions_are_bounded_and_end_with_their_worker() -> None:
    predicted = Predicted(2, max_blocks=100)
    for number in range(20):
        predicted.add(0, prompt(number, 30).keys(16), 0.0)
        assert predicted.blocks <= 200
    last = prompt(19, 30).keys(16)
    assert predicted.leading(last, 0.0).tolist() == [30, 0]
    predicted.forget(0)
    assert predicted.blocks == 0


def test_a_session_decides_between_equals_and_nothing_else() -> None:
    world = World(8)
    first = world.send(prompt(1, session="a"))
    world.routing.ended(0, 0.1)
    assert world.send(prompt(2, session="a"), 20.0) == first
    world = World(2)
    world.hold("w1", Tier.DEVICE, prompt(3, 200), 200)
    world.open[:] = [True, False]
    assert world.send(prompt(1, 4, session="a")) == 0
    world.open[:] = True
    assert world.send(prompt(3, 200, session="a"), 20.0) == 1


def test_remembered_sessions_are_bounded_and_the_last_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.scheduler.routing.SESSIONS_MAX", 3)
    world = World(8)
    sent = [world.send(prompt(number, session=f"s{number}"), 30.0 * number) for number in range(5)]
    assert world.routing.sessions == 3
    assert [world.routing._sessions.get(f"s{number}") for number in range(5)] == [None, None, *sent[2:]]


def test_an_adapter_and_a_salt_find_nothing_of_the_plain_prompt() -> None:
    world, plain = World(2), prompt()
    world.hold("w0", Tier.DEVICE, plain, 64)
    for other in (
        Prompt("m", plain.tokens, plain.length, extra=7), Prompt("m", plain.tokens, plain.length, lora="l"),
        Prompt("other", plain.tokens, plain.length),
    ):  # fmt: skip
        assert not world.routing.decide(other, 0.0, world.open).reach.device.any()


def test_workers_with_blocks_of_other_sizes_are_compared_in_tokens() -> None:
    holders, index = Holders(), PrefixIndex()
    fleet = Fleet([Worker("a", None, 16, RATES), Worker("b", None, 64, RATES)], holders)
    routing = Routing.of(fleet, index, POLICIES["ttft"](random.Random(1)))
    asked = prompt(blocks=64)
    index.stored(holders.number("a", Tier.DEVICE), asked.keys(16)[:10])
    index.stored(holders.number("b", Tier.DEVICE), asked.keys(64)[:4])
    decision = routing.decide(asked, 0.0, np.ones(2, np.bool_))
    assert decision.reach.device.tolist() == [160, 256] and decision.worker == 1


def test_a_prompt_knows_its_own_keys_alone() -> None:
    asked = prompt()
    keys = asked.keys(16)
    assert asked.keys(16) is keys and len(asked.keys(64)) == len(keys) // 4
    assert replace(asked, model="other").keys(16)[0] != keys[0]


def test_rates_may_be_whole_numbers() -> None:
    world, asked = World(2, prefill_s=1, load_s=(0, 1, 2, 3), move_s=1, latency_s=0, attention_tokens=30_000), prompt()
    world.hold("s0", Tier.HOST, asked, 10)
    assert world.routing.decide(asked, 0.0, world.open).estimate.load_s.tolist() == [160.0, 160.0]


def test_the_load_is_capped() -> None:
    load = Load(2, max_in_flight=3)
    tickets = [load.routed(0, 0.0, work_s=1.0, load_s=0.0, tokens=10) for _ in range(3)]
    assert load.full and load.stats().in_flight == 3 and load.wait_s(0.5)[0] == pytest.approx(2.5)
    assert load.wait_s(9.0)[0] == pytest.approx(2.0), "of the one that is computed, no more than it has can be done"
    load.first_token(tickets[0], 9.0)
    assert load.wait_s(9.5)[0] == pytest.approx(1.5) and load.decoding[0] == 1
    load.ended(tickets[0], 10.0)
    assert not load.full


def test_prefill_rates_are_learned_from_what_was_measured() -> None:
    fleet = Fleet([Worker("a", None, 16, Rates(prefill_s=0.01)), Worker("b")], Holders())
    for _ in range(40):
        assert learn_prefill(fleet, 0, 2000, 1000, 0.5)
    assert fleet.prefill_s[0] == pytest.approx(0.0005, rel=0.02)
    assert not learn_prefill(fleet, 1, 300, 290, 0.5), "too short to tell"


def test_a_worker_that_was_held_up_once_is_not_shunned_for_ever() -> None:
    fleet = Fleet([Worker("a", None, 16, Rates(prefill_s=0.001)), Worker("b", None, 16, Rates(prefill_s=0))], Holders())
    assert learn_prefill(fleet, 0, 2000, 0, 600.0)
    assert fleet.prefill_s[0] <= 0.0016
    for _ in range(40):
        learn_prefill(fleet, 0, 2000, 0, 200.0)
        learn_prefill(fleet, 1, 2000, 0, 200.0)
    assert fleet.prefill_s.tolist() == pytest.approx([0.1, 0.1], rel=0.02), "one that is slow is known to be"
