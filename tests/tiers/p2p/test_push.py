"""Chunks are pushed to a peer as soon as they are committed, into room that it makes."""

from __future__ import annotations

from tests.kvstore.support import CHUNK
from tests.tiers.p2p.conftest import MakeStore
from tests.tiers.p2p.stores import CHUNKS, TOKENS


def test_what_is_committed_on_one_store_is_there_on_the_other_before_anybody_asks(make_store: MakeStore) -> None:
    a, b = make_store("a"), make_store("b")
    b.begin(b.tier(a.peer, "push_to = 'a'"))
    a.begin(a.tier(b.peer, "push_to = 'b'"))
    for store, peer in ((a, "b"), (b, "a")):
        store.serving()
        store.sees(peer)
    a.fill(TOKENS)
    b.until(lambda v: v["host.entries"] == CHUNKS)
    found = b.lookup(TOKENS, deadline_ms=0)
    assert (found.hit, found.from_tier) == (len(TOKENS), {}), "no tier was asked"
    assert a.until(lambda v: v["tier.p2p.stored"] == CHUNKS)["tier.p2p.pushed_bytes"] > 0
    # b pushes what it was given on to its own peer, which has it: that is the end of it.
    b.until(lambda v: v.get("tier.p2p.declined_have", 0) == CHUNKS)
    assert a.until(lambda v: True)["host.entries"] == CHUNKS
    assert b.value("serve.pushes_stored") == CHUNKS


def test_a_peer_that_is_away_or_full_costs_copies_and_nothing_else(make_store: MakeStore) -> None:
    a, b = make_store("a"), make_store("b", memory="2MiB")
    a.begin(a.tier(b.peer, "push_to = 'b'"))
    a.serving()
    a.fill(TOKENS)
    a.until(lambda v: v.get("tier.p2p.store_dropped", 0) == CHUNKS)
    assert a.lookup(TOKENS).hit == len(TOKENS)
    b.begin(b.tier())
    b.serving()
    a.sees("b")
    with b.full_of_reservations():
        a.fill([5] * CHUNK)
        a.until(lambda v: v.get("tier.p2p.store_full", 0) > 0)
    b.until(lambda v: v["host.reserved_bytes"] == v["host.quarantined_slots"] == 0)
    a.fill([6] * CHUNK)
    b.until(lambda v: v["host.entries"] > 0)
    assert b.lookup([6] * CHUNK, deadline_ms=0).hit == CHUNK
