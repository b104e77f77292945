"""Whatever a peer sends, a load gives the right bytes or fails in time, and others are asked after it."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

import pytest

from forebay.testing.conformance import Pool, make_chunk, numbered
from tests.tiers.p2p.liars import WAYS, Liar
from tests.tiers.p2p.rig import Asker, Host

CHUNK = make_chunk(granule=4096)
ENDS_WELL = "every piece a hundred times"
LIE = sorted(WAYS.keys() - {ENDS_WELL})


def asker(open_all: ExitStack, pool: Pool, liar: Liar, *more: Host) -> Asker:
    peers = ",".join([f"liar=127.0.0.1:{liar.port}", *(host.address for host in more)])
    made = open_all.enter_context(closing(Asker(pool, peers, stall_s=0.3)))
    made.sees("liar", *(host.name for host in more))
    return made


@pytest.mark.parametrize("way", LIE)
def test_a_lie_is_a_miss_in_time_and_another_peer_serves(open_all: ExitStack, pool: Pool, way: str) -> None:
    liar = open_all.enter_context(closing(Liar(CHUNK, way)))
    alone = asker(open_all, pool, liar)
    (told,) = alone.driver.lookup(CHUNK.query())
    assert told.outcome == "hit", "that is the lie"
    began = time.monotonic()
    loaded = alone.driver.load(CHUNK, deadline_s=2.0)
    assert not loaded.result.ok and time.monotonic() - began < 10
    assert liar.opened > 0
    honest = open_all.enter_context(closing(Host("honest")))
    honest.source.put(CHUNK)
    both = asker(open_all, pool, liar, honest)
    both.driver.lookup(CHUNK.query())
    loaded = both.driver.load(CHUNK, deadline_s=5.0)
    assert loaded.result.ok and loaded.payload == CHUNK.payload
    assert both.value("peer.honest.lies") == 0


def test_more_than_was_asked_for_is_thrown_away(open_all: ExitStack, pool: Pool) -> None:
    liar = open_all.enter_context(closing(Liar(CHUNK, ENDS_WELL)))
    made = asker(open_all, pool, liar)
    for _ in range(3):
        loaded = made.driver.load(CHUNK, deadline_s=5.0)
        assert loaded.result.ok and loaded.payload == CHUNK.payload


def test_who_has_lied_is_left_alone_for_longer_each_time(open_all: ExitStack, pool: Pool) -> None:
    liar = open_all.enter_context(closing(Liar(CHUNK, "another chunk")))
    made = asker(open_all, pool, liar)
    waits = []
    for lies in range(1, 4):
        made.sees("liar")
        assert made.driver.load(CHUNK).result.reason == "corrupt"
        made.until(lambda: not made.tier._engine.up, "the liar to be left alone")
        began = time.monotonic()
        made.sees("liar")
        waits.append(time.monotonic() - began)
        assert made.value("peer.liar.lies") == lies
    assert waits[2] > waits[0], waits
    backoff = made.tier._engine._peers["liar"]._backoff
    assert backoff.now_s >= 4 * backoff.first_s


def test_promises_that_are_not_kept_cost_a_peer_its_place(open_all: ExitStack, pool: Pool) -> None:
    liar = open_all.enter_context(closing(Liar(CHUNK, "not there after all")))
    made = asker(open_all, pool, liar)
    for number in range(3):
        chunk = numbered(number)
        made.driver.lookup(chunk.query())
        assert made.driver.load(chunk).result.reason == "missing"
    made.until(lambda: made.value("peer.liar.downs") >= 1, "the peer to be left alone")
