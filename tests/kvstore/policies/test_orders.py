"""Each policy against a dumb model of itself, and the promises that all of them make."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.arc import Arc
from forebay.kvstore.policies.base import EvictionPolicy, Lineage, NaiveLru
from forebay.kvstore.policies.lru import Lru
from forebay.kvstore.policies.order import Order
from forebay.kvstore.policies.registry import POLICY_NAMES, make_policy
from forebay.kvstore.policies.s3fifo import S3Fifo
from tests.kvstore.policies.family import SIZES, Family, SmallStore, make_entry
from tests.kvstore.policies.naive import NaiveArc, NaiveS3Fifo
from tests.kvstore.support import bare_entry

MODELS: dict[str, tuple[Callable[[Lineage], EvictionPolicy], Callable[[Lineage], EvictionPolicy]]] = {
    "lru": (Lru, NaiveLru),
    "arc": (Arc, NaiveArc),
    "s3fifo": (S3Fifo, NaiveS3Fifo),
}

NUMBER = st.integers(0, 2**16)
STEP = st.one_of(
    st.tuples(st.sampled_from(["store", "store", "use", "use", "pin", "unpin", "demote", "lose"]), NUMBER, NUMBER),
    st.tuples(st.sampled_from(["evict", "evict", "evict"]), NUMBER, NUMBER),
    st.tuples(st.just("again"), NUMBER, NUMBER),
)


class Driver:
    """Random operations on a small store. `gone` are evicted chunks that may be stored again."""

    def __init__(self, store: SmallStore) -> None:
        self.store, self.gone = store, []

    def step(self, name: str, which: int, size: int) -> None:
        store, entries = self.store, self.store.family.entries
        chosen = entries[which % len(entries)] if entries else None
        if name == "store":
            parent = entries[-1 - which % len(entries)] if entries and which % 4 else None
            store.store(parent if parent is not None and parent.start < 640 else None, SIZES[size % 3 == 0])
        elif name == "again" and self.gone:
            old = self.gone.pop(which % len(self.gone))
            if old.parent == b"root" or any(e.key == old.parent for e in entries):
                store.take_in(make_entry(old.key, old.parent, old.start, old.slot_bytes))
        elif name == "evict":
            self.evict(SIZES[size % 2])
        elif chosen is None:
            return
        elif name == "use":
            store.use(chosen)
        elif name == "pin":
            store.pin(chosen)
        elif name == "unpin" and store.pins[chosen]:
            store.unpin(chosen)
        elif name == "demote":
            store.demote(chosen)
        elif name == "lose" and not store.pins[chosen] and not store.family.dependents(chosen):
            store.lose(chosen)

    def evict(self, size: int) -> None:
        store = self.store
        first, *others = store.victims(size)
        assert all(other is first for other in others)
        if first is None:
            return
        assert first.slot_bytes == size and not store.pins[first]
        assert not store.pinned_below(first)
        assert all(e.slot_bytes != size for e in store.family.dependents(first))
        assert store.victims(size)[0] is first, "asking changes nothing"
        self.gone.append(first)
        store.evict(first)

    def check(self) -> None:
        free = [entry for entry, pins in self.store.pins.items() if not pins]
        for policy in self.store.policies:
            assert len(policy) == len(free)
            assert sorted(map(id, policy)) == sorted(map(id, free))


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(steps=st.lists(STEP, max_size=70))
def test_a_policy_decides_as_its_dumb_model_does(name: str, steps: list[tuple[str, int, int]]) -> None:
    family = Family()
    real, model = MODELS[name]
    driver = Driver(SmallStore(family, [real(family), model(family)]))
    for step in steps:
        driver.step(*step)
        driver.check()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(12))
def test_a_full_store_is_managed_as_by_the_dumb_model(name: str, seed: int) -> None:
    rng, family = random.Random(seed), Family()
    real, model = MODELS[name]
    driver = Driver(SmallStore(family, [real(family), model(family)]))
    steps = ["store", "store", "again", "again", "use", "use", "use", "pin", "unpin", "unpin", "demote"]
    for _ in range(500):
        driver.step(rng.choice(steps[: 6 if seed % 3 else None]), rng.randrange(2**16), rng.randrange(2**16))
        while len(family.entries) > 24 and any(driver.store.victims(size)[0] for size in SIZES):
            driver.evict(SIZES[rng.random() < 0.2])
    driver.check()


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(steps=st.lists(STEP, max_size=70))
def test_a_prefix_outlives_what_needs_it_and_pins_are_kept(name: str, steps: list[tuple[str, int, int]]) -> None:
    family = Family()
    driver = Driver(SmallStore(family, [make_policy(name, family)]))
    for step in steps:
        driver.step(*step)
        driver.check()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_everything_unpinned_can_be_evicted_tails_first(name: str) -> None:
    family = Family()
    store = SmallStore(family, [make_policy(name, family)])
    for _ in range(3):
        entry = None
        for _ in range(6):
            entry = store.store(entry, SIZES[0])
        store.store(entry, SIZES[1])
    seen = []
    while (victim := store.victims(SIZES[0])[0]) is not None:
        seen.append(victim)
        store.evict(victim)
    assert len(seen) == 18 and not family.entries
    for depth, entry in enumerate(seen[:6]):
        assert entry.start == seen[0].start - depth * 64, "one chain after the other, from its end"


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_a_pinned_chunk_needs_stays_and_goes_once_it_may(name: str) -> None:
    family = Family()
    store = SmallStore(family, [make_policy(name, family)])
    head = store.store(None, SIZES[0])
    tail = store.store(head, SIZES[1])
    store.pin(tail)
    assert store.victims(SIZES[0]) == [None]
    store.unpin(tail)
    assert store.victims(SIZES[0]) == [head]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_demoted_chunk_goes_first(name: str) -> None:
    family = Family()
    store = SmallStore(family, [make_policy(name, family)])
    entries = [store.store(None, SIZES[0]) for _ in range(5)]
    store.demote(entries[3])
    assert store.victims(SIZES[0]) == [entries[3]]


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name != "foresight"])
def test_what_goes_along_must_not_lead_to_a_pinned_chunk(name: str) -> None:
    family = Family()
    store = SmallStore(family, [make_policy(name, family)])
    head = store.store(None, SIZES[0])
    middle = store.store(head, SIZES[1])
    end = store.store(middle, SIZES[1])
    store.pin(end)
    assert store.victims(SIZES[0]) == [None]
    store.unpin(end)
    assert store.victims(SIZES[0]) == [head]


@pytest.mark.parametrize("policy", [Arc, S3Fifo])
def test_ghosts_are_bounded(policy: type[Arc] | type[S3Fifo]) -> None:
    family = Family()
    store = SmallStore(family, [policy(family, ghosts_max=10)])
    most = 0
    for turn in range(300):
        entry = store.store(None, SIZES[0])
        if turn % 2:
            store.use(entry)
        if turn > 100:
            victim = store.victims(SIZES[0])[0]
            assert victim is not None
            store.evict(victim)
            most = max(most, store.policies[0].gauges()["ghosts"])
    assert most == (10 if policy is S3Fifo else 20), "ARC has two lists"


def test_an_unknown_policy_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match="lru, arc, s3fifo, foresight"):
        make_policy("fifo")


def test_an_order_is_what_a_list_would_be() -> None:
    rng, order, model = random.Random(5), Order[Entry](), list[Entry]()
    items = [make_entry(bytes([i])) for i in range(12)]
    for _ in range(3000):
        item = rng.choice(items)
        if item not in model:
            if rng.random() < 0.5:
                order.append(item)
                model.append(item)
            else:
                order.push_first(item)
                model.insert(0, item)
        else:
            model.remove(item)
            if rng.random() < 0.4:
                order.move_last(item)
                model.append(item)
            elif rng.random() < 0.4:
                order.move_first(item)
                model.insert(0, item)
            else:
                assert order.discard(item) and not order.discard(item)
        assert list(order) == model and len(order) == len(model)
        assert order.first is (model[0] if model else None)
        assert all((item in order) == (item in model) for item in items)
    assert repr(items[0]).startswith("Entry("), "a chain of links is not printed"


def test_what_arc_gives_out_and_takes_back_unused_stands_where_it_stood() -> None:
    policy = Arc()
    entries = [bare_entry(key=bytes([number]) * 32) for number in range(8)]
    for entry in entries:
        policy.add(entry)
    for entry in entries[4:]:
        policy.remove(entry)
        policy.add(entry)  # used again
    before = list(policy)
    for entry in (entries[0], entries[4]):
        policy.remove(entry)
        policy.put_back(entry)
    assert list(policy) == before
    policy.evicted(entries[0])
    policy.forget(entries[0])
    again = bare_entry(key=entries[0].key)
    policy.add(again)
    assert policy._of(again.slot_bytes).target > 0, "it was evicted from those that were used once"
