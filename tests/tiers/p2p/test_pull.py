"""What one store has, another serves: pulled over the network, every byte compared.

Three stores for all tests, each of which has tokens of its own: `a` and `b` are each other's peers, `c` has both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kvstore.support import CHUNK
from tests.tiers.p2p.stores import PeerStore

LENGTH = 4 * CHUNK


@dataclass(frozen=True)
class Trio:
    a: PeerStore
    b: PeerStore
    c: PeerStore


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    a, b, c = (PeerStore(tmp_path_factory.mktemp(name), name) for name in "abc")
    try:
        a.begin(a.tier(b.peer, 'bulk = "frames"\nlend_s = "200ms"'))
        b.begin(b.tier(a.peer, 'bulk = "frames"'))
        c.begin(c.tier(f"{a.peer}, {b.peer}", 'miss_s = "10ms"'))
        for store, peers in ((a, "b"), (b, "a"), (c, "ab")):
            store.serving()
            store.sees(*peers)
        yield Trio(a, b, c)
    finally:
        for store in (a, b, c):
            store.end()


def tokens(serial: int) -> list[int]:
    return list(range(serial * 1000 + 1, serial * 1000 + LENGTH + 1))


@pytest.mark.parametrize("puller", ["b", "c"])
def test_what_one_store_has_another_pulls(trio: Trio, puller: str) -> None:
    store: PeerStore = getattr(trio, puller)
    wanted = tokens(1 if puller == "b" else 2)
    before = store.value("loads_ok")
    trio.a.fill(wanted)
    found = store.lookup(wanted)
    assert (found.hit, found.from_tier) == (LENGTH, {"p2p": LENGTH})
    loads = store.until_tier(lambda v: v["loads_running"] == 0)["loads_ok"]
    assert loads > before
    assert store.lookup(wanted).from_tier == {}, "it is here now, and peers aren't asked for what is here"
    assert store.value("loads_ok") == loads


def test_bytes_come_by_the_way_that_both_sides_take(trio: Trio) -> None:
    trio.a.fill(tokens(3))
    trio.b.fill(tokens(4))
    assert trio.b.lookup(tokens(3)).hit == LENGTH
    assert trio.c.lookup(tokens(3)).hit == LENGTH
    assert trio.b.value("loads_by_frames") > 0 and trio.b.value("loads_by_stream") == 0
    assert trio.c.value("loads_by_frames") > 0, "a and b serve nothing else"


def test_chunks_of_one_prompt_come_from_several_peers(trio: Trio) -> None:
    wanted = tokens(5)
    trio.a.fill_some(wanted, [0, 1])
    trio.b.fill_some(wanted, [2, 3])
    found = trio.c.lookup(wanted)
    assert (found.hit, found.from_tier) == (LENGTH, {"p2p": LENGTH})


def test_stores_that_are_each_others_peers_do_not_ask_in_circles(trio: Trio) -> None:
    asked_a, asked_b = trio.a.value("source.asked"), trio.b.value("source.asked")
    assert trio.b.lookup(tokens(6)).hit == 0
    assert trio.a.value("source.asked") > asked_a, "a was asked"
    assert trio.b.value("source.asked") == asked_b, "and asked nobody in turn"


def test_a_prompt_that_ends_inside_a_peers_chunk_hits_to_the_unit(trio: Trio) -> None:
    trio.a.fill(tokens(7))
    hit = 3 * CHUNK + 16
    found = trio.b.lookup([*tokens(7)[:hit], *[9] * 16])
    assert (found.hit, found.from_tier) == (hit, {"p2p": hit})


def test_nothing_stays_pinned_at_the_source(trio: Trio) -> None:
    trio.a.fill(tokens(8))
    assert trio.c.lookup(tokens(8)).hit == LENGTH
    trio.a.until(lambda v: v["store.leases"] == 0)


def test_a_chunk_that_is_damaged_at_the_source_is_no_hit_and_looked_at_there(trio: Trio) -> None:
    wanted = tokens(9)
    trio.a.fill(wanted)
    trio.a.damage(wanted, position=2)
    found = trio.b.lookup(wanted)
    assert found.hit == 2 * CHUNK
    trio.a.until(lambda v: v["host.corrupt"] > 0)


def test_a_chunk_is_visible_to_peers_while_the_next_one_is_still_being_computed(trio: Trio) -> None:
    """Prefill in chunks: each is pulled as soon as it is committed."""
    wanted = tokens(10)
    with trio.a.filling(wanted) as commit_next:
        for done in range(1, 5):
            commit_next()
            # A miss is remembered for a moment, so the very next lookup may not know of it yet.
            trio.c.until(lambda v, due=done * CHUNK: trio.c.lookup(wanted).hit == due)
    assert trio.c.lookup(wanted).hit == LENGTH
