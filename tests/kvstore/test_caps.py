"""Every table of the store has a cap; these tests fill them."""

from __future__ import annotations

import pytest

from forebay.kvstore.core import Client
from forebay.kvstore.entry import EntryId
from forebay.kvstore.identity import GroupGeometry, Namespace, chunk_key, root_key
from forebay.kvstore.limits import Limits
from forebay.kvstore.lookup import match, pin
from forebay.kvstore.protocol import NewChunk
from forebay.kvstore.slots import EXTENT_HEADER_BYTES, slot_bytes_for
from tests.kvstore.support import CHUNK, FakeMemory, SmallStore, namespace


def small(limits: Limits) -> SmallStore:
    return SmallStore(extents=2, limits=limits)


def test_namespaces_are_capped_and_a_known_one_is_always_welcome() -> None:
    store = small(Limits(namespaces=2))
    store.core.register(store.namespace, client=store.client)
    store.core.register(namespace(weights=b"a" * 32), client=store.client)
    with pytest.raises(ValueError, match="namespaces are registered"):
        store.core.register(namespace(weights=b"b" * 32))
    store.core.register(store.namespace)


def test_a_client_holds_so_many_leases_and_no_more() -> None:
    store = small(Limits(leases_per_client=3))
    store.store_prompt(list(range(CHUNK)))
    prompt = store.prompt(list(range(CHUNK)))
    leases = [pin(store.core, store.client, match(store.core, prompt)) for _ in range(4)]
    assert [bool(pinned.lease) for pinned in leases] == [True, True, True, False]
    assert leases[3].hit == 0, "what isn't pinned isn't promised"
    store.core.release(store.client, [leases[0].lease])
    assert pin(store.core, store.client, match(store.core, prompt)).lease


def test_a_client_reserves_so_much_and_no_more() -> None:
    store = small(Limits(reservations_per_client=2))
    statuses = [
        store.core.reserve(store.client, store.namespace_id, "", chunk).status
        for chunk in store.chunks(list(range(2 * CHUNK)))
    ]
    assert statuses == ["reserved", "reserved", "full", "full"]
    other = store.core.reserve(Client(b"o" * 16), store.namespace_id, "", store.chunks([9] * CHUNK)[0])
    assert other.status == "reserved", "another client isn't starved"


def test_stores_and_promotions_have_shares_of_their_own() -> None:
    store = small(Limits(reserved_share=0.25, promoting_share=0.25))
    chunks = [chunk for seed in range(40) for chunk in store.chunks([seed] * CHUNK)]
    slots = [store.core.reserve(store.client, store.namespace_id, "", chunk) for chunk in chunks[:40]]
    reserved = sum(slot.status == "reserved" for slot in slots)
    total = store.core.place.slots.total_bytes
    assert 0 < store.core.reserved_bytes <= total / 4 and reserved < 40
    promoted = [store.core.reserve_promotion(store.namespace_id, c, b"t" * 16) for c in chunks[40:]]
    assert any(promoted), "a flood of stores leaves promotions their share"
    assert store.core.promoting_bytes <= total / 4 and not all(promoted)


def test_what_was_removed_is_remembered_up_to_a_cap() -> None:
    store = small(Limits(removed_remembered=10))
    last = None
    for seed in range(30):
        last = store.store(store.chunks([seed] * CHUNK)[0])
        assert last is not None
        store.core.retire(last, "evicted")
    assert len(store.core.removed) == 10
    assert last is not None and store.core.removed[EntryId(last.group, last.key)] == "evicted"


def test_a_lookup_that_would_pin_too_much_is_a_miss() -> None:
    store = small(Limits(pins_per_lease=3))
    store.store_prompt(list(range(4 * CHUNK)))
    assert pin(store.core, store.client, match(store.core, store.prompt(list(range(4 * CHUNK))))).hit == 0
    assert store.core.counters.values["store.refused_pins"] == 1


def test_extents_are_all_there_is() -> None:
    store = SmallStore(extents=1, memory=FakeMemory(1 << 16))
    for seed in range(100):
        store.store_prompt([seed] * 48)
        assert store.core.place.slots.used_bytes <= 1 << 16


def test_asking_for_chunks_of_unheard_of_groups_leaves_nothing_behind() -> None:
    store = small(Limits())
    table = store.core.table
    for group in range(2, 1000):
        assert table.get(group, b"k" * 32) is None and not table.of_group(group)
        assert not table.has_children(group, b"k" * 32) and table.children(group, b"k" * 32) == []
        assert table.best_child(group, b"k" * 32, bytes(64), b"") == (None, 0)
        assert table.fronts(group, b"k" * 32, bytes(64), b"") == []
    store.store_prompt(list(range(CHUNK)))
    assert len(table._entries) == len(table._children) == 2


def test_a_chunk_whose_extra_makes_it_too_long_for_an_extent_is_refused() -> None:
    store = small(Limits())
    store.store_prompt(list(range(CHUNK)))
    group = GroupGeometry("full", "full", (0,), 1, 448, "float32")
    spec = Namespace(weights=b"w" * 32, groups=(group,), chunk_tokens=16)
    assert slot_bytes_for(group, 16, 16) == store.memory.extent_bytes - EXTENT_HEADER_BYTES, "one just fits"
    namespace_id = store.core.register(spec)
    root = root_key(namespace_id)

    def reserve(extra: bytes) -> str:
        chunk = NewChunk(0, chunk_key(root, bytes(64), extra), root, 0, bytes(64), extra)
        return store.core.reserve(store.client, namespace_id, "", chunk).status

    assert reserve(b"x" * 4096) == "full"
    assert len(store.core.table) == 2, "nothing goes for what can't come"
    assert reserve(b"") == "reserved"
