"""Pins and retention: what they keep, for how long, within which budgets; and a store that is full of them."""

from __future__ import annotations

import pytest

from forebay.errors import RequestRefused
from forebay.kvstore.core import Client
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState
from forebay.kvstore.limits import Limits
from forebay.kvstore.lookup import match
from forebay.kvstore.pins import Owner
from tests.kvstore.support import SmallStore

OPS = Owner("soft", "ops")
HARD = Owner("hard", "ops")


def held(entries: list[Entry]) -> bool:
    return all(entry.state is SlotState.COMMITTED for entry in entries)


def stored(store: SmallStore, tokens: list[int], tenant: str = "", retain_s: float = 0.0) -> list[Entry]:
    """Store a prompt; its entries."""
    for chunk in store.chunks(tokens):
        slot = store.core.reserve(store.client, store.namespace_id, tenant, chunk, retain_s=retain_s)
        if slot.status == "reserved":
            store.write_and_commit(store.client, slot, chunk)
    found = (store.core.table.get(chunk.group, chunk.key) for chunk in store.chunks(tokens))
    return [entry for entry in found if entry is not None]


def press(store: SmallStore, prompts: int = 60) -> None:
    """Store so much that everything unpinned goes, several times over."""
    for number in range(prompts):
        store.store_prompt([10_000 + number] * 64)


def test_a_soft_pin_outlives_pressure_and_ends_with_its_time() -> None:
    store = SmallStore(extents=2)
    kept = stored(store, [1] * 64)
    store.core.keep(kept, OPS, 60)
    press(store)
    assert held(kept)
    store.now = 61.5
    store.core.tick()
    press(store)
    assert not held(kept) and len(store.core.pins) == 0 and store.core.pins.totals == {}


def test_a_soft_pin_goes_when_everything_that_nobody_keeps_is_gone() -> None:
    store = SmallStore(extents=1)
    kept: list[Entry] = []
    for number in range(40):
        more = stored(store, [number] * 64)
        if more:
            store.core.keep(more, OPS, 60)
            kept += more
    assert held(kept[-4:]) and not held(kept), "the oldest of them made room"
    assert store.core.counters.values.get("store.refused_full", 0) == 0
    assert len(store.core.pins) == sum(entry.state is SlotState.COMMITTED for entry in kept)


def test_a_hard_pin_stays_where_a_soft_one_goes() -> None:
    store = SmallStore(extents=2)
    hard = stored(store, [1] * 64)
    store.core.keep(hard, HARD, 60)
    for number in range(2, 60):
        store.core.keep(stored(store, [number] * 64), OPS, 60)
    assert held(hard)
    assert store.core.pins.hard_bytes == sum(entry.slot_bytes for entry in hard)


def test_hard_pins_beyond_their_budget_are_refused_and_none_is_set() -> None:
    store = SmallStore(extents=2)
    first, second = stored(store, [1] * 64), stored(store, [2] * 128)
    store.core.keep(first, HARD, 60)
    with pytest.raises(RequestRefused, match="--pin-budget") as refused:
        store.core.keep(second, HARD, 60)
    assert refused.value.code == "budget"
    assert all(not store.core.pins.of(entry) for entry in second)
    store.core.keep(first, Owner("hard", "somebody else"), 60)  # costs nothing more
    assert store.core.pins.hard_bytes == sum(entry.slot_bytes for entry in first)
    assert store.core.pins.unpin(first, "ops") == len(first)
    assert held(first) and store.core.pins.hard_bytes > 0, "somebody else still has them pinned"
    store.core.pins.unpin(first, "somebody else")
    assert store.core.pins.hard_bytes == 0
    store.core.keep(second[:2], HARD, 60)


def test_retention_has_a_budget_for_each_tenant_and_is_no_obstacle_beyond_it() -> None:
    store = SmallStore(extents=4, limits=Limits(retain_share=0.2))
    budget = store.core.pins.retain_budget
    for number in range(30):
        stored(store, [number] * 64, "acme", 600)
        assert store.core.pins.totals[Owner("retained", "acme")].bytes <= budget
    assert store.core.counters.values["pins.retain_refused"] > 0
    mine = stored(store, [99] * 64, "other", 600)
    press(store)
    assert held(mine), "another tenant's budget is its own"
    assert store.core.counters.values.get("store.refused_full", 0) == 0


def test_what_is_there_already_is_retained_as_well_and_never_for_a_shorter_time() -> None:
    store = SmallStore(extents=2, limits=Limits(retain_share=0.5))
    entries = stored(store, [1] * 64)
    assert stored(store, [1] * 64, "acme", 100) == entries
    stored(store, [1] * 64, "acme", 10)
    store.now = 50
    store.core.tick()
    press(store)
    assert held(entries)
    store.now = 102
    store.core.tick()
    press(store)
    assert not held(entries)


def test_a_tails_keep_goes_over_to_the_chunk_that_replaces_it() -> None:
    store = SmallStore(extents=2, limits=Limits(retain_share=0.5))
    tails = stored(store, [1] * 16, "acme", 600)
    store.core.keep(tails, OPS, 600)
    full = stored(store, [1] * 32)
    assert all(tail.state is SlotState.FREE for tail in tails)
    assert {keep.owner for entry in full for keep in store.core.pins.of(entry)} == {OPS, Owner("retained", "acme")}
    assert sum(total.chunks for total in store.core.pins.totals.values()) == 2 * len(full)


def test_a_tail_that_is_pinned_hard_stays_beside_the_fuller_chunk() -> None:
    store = SmallStore()
    tails = stored(store, [1] * 16)
    store.core.keep(tails, HARD, 600)
    stored(store, [1] * 32)
    assert held(tails) and match(store.core, store.prompt([1] * 32)).hit() == 32


def test_pins_of_what_is_cleared_or_corrupt_end_and_their_bytes_are_free() -> None:
    store = SmallStore()
    entries = stored(store, [1] * 64)
    store.core.keep(entries, HARD, 60)
    store.core.keep(entries, OPS, 60)
    for entry in entries:
        store.core.damaged(entry)
        assert entry.state is SlotState.FREE
    assert store.core.pins.hard_bytes == len(store.core.pins) == store.core.place.slots.used_bytes == 0


def test_a_touched_chunk_is_the_last_to_go() -> None:
    store = SmallStore(extents=1)
    old, young = stored(store, [1] * 32), stored(store, [2] * 32)
    store.core.touch(old)
    while held(young):
        store.store_prompt([len(store.facts) + 100] * 32)
    assert held(old[:1])


def test_keeps_and_their_owners_are_capped() -> None:
    store = SmallStore(limits=Limits(keeps=3, keep_owners=1))
    entries = stored(store, [1] * 64)
    with pytest.raises(RequestRefused, match="pinned already"):
        store.core.keep(entries, OPS, 60)
    store.core.keep(entries[:3], OPS, 60)
    store.core.keep(entries[:3], OPS, 90)
    with pytest.raises(RequestRefused):
        store.core.keep(entries[:1], Owner("soft", "another"), 60)
    store.core.retain(entries[3], "acme", 60)
    assert len(store.core.pins) == 3 and len(store.core.pins.totals) == 1


# --- everything full and pinned ----------------------------------------------------------------------------


def full_store() -> tuple[SmallStore, Client]:
    """A pool of which every byte is pinned by somebody."""
    store = SmallStore(extents=2)
    reader = Client(b"r" * 16)
    for number in range(40):
        for chunk in store.chunks([number] * 64):
            entry = store.store(chunk)
            if entry is not None:
                store.core.lease(reader, [entry])
    return store, reader


def test_stores_into_a_full_pool_are_refused_and_counted_and_what_is_there_is_served() -> None:
    store, _ = full_store()
    refused = store.core.counters.values["store.refused_full"]
    for chunk in store.chunks([99] * 64):
        assert store.core.reserve(store.client, store.namespace_id, "", chunk).status == "full"
    assert store.core.counters.values["store.refused_full"] == refused + 4
    assert match(store.core, store.prompt([0] * 64)).hit() == 64
    assert not store.core.tick(), "nothing waits"


def test_a_promotion_that_finds_no_room_is_a_miss_and_the_next_one_finds_some() -> None:
    store, reader = full_store()
    chunk = store.chunks([99] * 32)[0]
    assert store.core.reserve_promotion(store.namespace_id, chunk, b"t" * 16) is None
    store.core.drop_client(reader, writing=False)
    while store.core.tick(steps=4):
        pass
    assert store.core.reserve_promotion(store.namespace_id, chunk, b"t" * 16) is not None
