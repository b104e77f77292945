"""The core's promises, one by one."""

from __future__ import annotations

import msgspec

from forebay.kvstore.core import Client
from forebay.kvstore.header import SlotState
from forebay.kvstore.lookup import match, pin
from tests.kvstore.support import CHUNK, SmallStore


def hit(store: SmallStore, tokens: list[int], **kwargs: object) -> int:
    return match(store.core, store.prompt(tokens, **kwargs)).hit()  # type: ignore[arg-type]


def test_what_was_stored_is_found_to_the_unit() -> None:
    store = SmallStore()
    store.store_prompt(list(range(100)))
    assert hit(store, list(range(100))) == 96
    assert hit(store, list(range(96)) + [7] * 40) == 96
    assert hit(store, list(range(90)) + [7] * 40) == 80
    assert hit(store, list(range(100)), limit=95) == 80
    assert hit(store, [5] * 100) == 0


def test_a_reserved_chunk_is_not_visible_before_its_commit() -> None:
    store = SmallStore()
    chunk = store.chunks(list(range(CHUNK)))[0]
    slot = store.core.reserve(store.client, store.namespace_id, "", chunk)
    assert slot.status == "reserved"
    assert hit(store, list(range(CHUNK))) == 0
    assert store.core.reserve(Client(b"d" * 16), store.namespace_id, "", chunk).status == "busy"


def test_salts_share_nothing_and_the_same_salt_hits() -> None:
    store = SmallStore()
    store.store_prompt(list(range(64)), salt=b"a")
    assert hit(store, list(range(64)), salt=b"a") == 64
    assert hit(store, list(range(64)), salt=b"b") == 0
    assert hit(store, list(range(64))) == 0


def test_the_same_tokens_with_another_extra_are_another_chunk() -> None:
    """An image's or adapter's content is part of the key: neither hit, nor cover, nor replace one another."""
    store, tokens = SmallStore(), list(range(CHUNK))
    for name in (b"imgA", b"imgB", b""):
        prompt = store.prompt(tokens, extra=name)
        assert match(store.core, prompt).hit() == 0
        for group in (0, 1):
            chunk = msgspec.structs.replace(prompt.chunk(group, 0), extra=name)
            assert store.store(chunk) is not None
        assert match(store.core, prompt).hit() == CHUNK
        longer = store.prompt([*tokens[:16], *[999] * 32], extra=name)
        assert match(store.core, longer).hit() == 16
    assert len(store.core.table) == 6


def test_a_fuller_chunk_replaces_a_tail_once_nobody_reads_it() -> None:
    store = SmallStore()
    store.store_prompt(list(range(16)))
    pinned = pin(store.core, store.client, match(store.core, store.prompt(list(range(16)))))
    assert pinned.hit == 16
    old = pinned.entries[0]
    before = store.bytes_of(old)
    store.store_prompt(list(range(32)))
    assert hit(store, list(range(32))) == 32
    assert old.state is SlotState.RETIRED and store.bytes_of(old) == before
    used = store.core.place.slots.used_bytes
    store.core.release(store.client, [pinned.lease])
    assert old.state is SlotState.FREE and store.core.place.slots.used_bytes < used


def test_a_shorter_chunk_of_the_same_beginning_is_not_stored_again() -> None:
    store = SmallStore()
    store.store_prompt(list(range(32)))
    shorter = store.chunks(list(range(16)))[0]
    assert store.core.reserve(store.client, store.namespace_id, "", shorter).status == "exists"


def test_what_is_pinned_survives_any_pressure() -> None:
    store = SmallStore(extents=1)
    store.store_prompt(list(range(64)))
    pinned = pin(store.core, store.client, match(store.core, store.prompt(list(range(64)))))
    before = [store.bytes_of(entry) for entry in pinned.entries]
    for seed in range(50):
        store.store_prompt([1000 + seed] * 64)
    assert [store.bytes_of(entry) for entry in pinned.entries] == before
    assert all(entry.state is SlotState.COMMITTED for entry in pinned.entries)


def test_a_full_pool_refuses_and_never_grows() -> None:
    store = SmallStore(extents=1)
    for seed in range(40):
        for chunk in store.chunks([seed] * 64):
            entry = store.store(chunk)
            if entry is not None:
                store.core.lease(store.client, [entry])
    assert store.core.counters.values["store.refused_full"] > 0
    assert store.core.place.slots.used_bytes <= store.core.place.slots.total_bytes == 1 << 16


def test_a_dead_client_frees_its_slots_and_a_living_one_keeps_them_quarantined() -> None:
    store = SmallStore()
    chunks = store.chunks(list(range(64)))
    for client, writing in ((Client(b"dead" * 4), False), (Client(b"live" * 4), True)):
        used = store.core.place.slots.used_bytes
        assert store.core.reserve(client, store.namespace_id, "", chunks[0]).status == "reserved"
        store.core.drop_client(client, writing=writing)
        store.core.chores.finish()
        assert len(store.core.quarantine) == (1 if writing else 0)
        assert (store.core.place.slots.used_bytes > used) is writing
    # The chunk itself is free for others at once; only the slot waits.
    assert store.store(chunks[0]) is not None
    assert store.core.end_quarantine(b"live" * 4) == 1
    store.core.chores.finish()
    assert len(store.core.quarantine) == store.core.quarantined_bytes == 0


def test_a_freed_slot_has_another_generation() -> None:
    store = SmallStore()
    entry = store.store(store.chunks(list(range(CHUNK)))[0])
    assert entry is not None
    slot, generation = entry.slot, entry.generation
    store.core.retire(entry, "evicted")
    found = int.from_bytes(store.memory.extents[slot.extent][slot.offset + 16 : slot.offset + 24], "little")
    assert found > generation


def test_window_chunks_that_the_frontier_has_passed_go_first() -> None:
    store = SmallStore(extents=2)
    tokens = list(range(1, 8 * CHUNK + 1))
    store.store_prompt(tokens)
    seed = 0
    while store.core.counters.values.get("host.removed_evicted", 0) < 6:
        seed += 1
        store.store_prompt([10_000 + seed] * CHUNK)
    gone = [fact.entry for fact in store.facts if not fact.stored][:6]
    assert {entry.group for entry in gone} == {1}, "only window chunks are evicted at first"
    assert max(entry.end for entry in gone) <= 8 * CHUNK - 39
    assert hit(store, tokens) == 8 * CHUNK, "the frontier can still be resumed"


def test_facts_alternate_and_describe_what_is_held() -> None:
    store = SmallStore(extents=1)
    for seed in range(60):
        store.store_prompt([seed % 17] * 48)
    held: set[tuple[int, bytes]] = set()
    for fact in store.facts:
        if fact.stored:
            assert fact.entry.id not in held
            held.add(fact.entry.id)
        else:
            held.remove(fact.entry.id)
    assert held == {entry.id for entry in store.core.table}
