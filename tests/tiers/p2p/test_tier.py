"""What the daemon sees of a p2p tier beside the conformance suite: queues, forgetting, and what it doesn't do."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from forebay.testing.conformance import Pool, make_chunk, numbered
from forebay.tiers.base import ClearScope
from forebay.tiers.p2p import tier as tier_module
from tests.tiers.p2p.rig import Asker, Host

CHUNK = make_chunk(granule=4096)


@pytest.fixture
def host(open_all: ExitStack) -> Host:
    made = open_all.enter_context(closing(Host("peer", bulk="frames")))
    made.source.put(CHUNK)
    return made


def seen(open_all: ExitStack, pool: Pool, host: Host, **options: object) -> Asker:
    made = open_all.enter_context(closing(Asker(pool, host.address, bulk="frames", stall_s=10.0, **options)))
    made.sees("peer")
    return made


def test_a_full_load_queue_drops_at_once_and_counts(open_all: ExitStack, pool: Pool, host: Host) -> None:
    asker = seen(open_all, pool, host, load_queue_bytes=3 * len(CHUNK.payload))
    assert asker.driver.has(CHUNK)
    host.source.gate.clear()
    jobs = [asker.driver.load_job(CHUNK) for _ in range(5)]
    asker.driver.engine.begin(jobs)
    asker.until(lambda: len(asker.driver.results) == 2, "what is over the bound")
    assert {result.reason for result in asker.driver.results} == {"dropped"}
    assert asker.value("load_queue_bytes") == 3 * len(CHUNK.payload)
    assert asker.value("jobs_dropped") == 2
    host.source.gate.set()
    assert sum(result.ok for result in asker.driver.results_of(jobs).values()) == 3
    assert asker.value("load_queue_bytes") == 0


def test_without_a_peer_to_push_to_stores_are_dropped_and_counted(
    open_all: ExitStack, pool: Pool, host: Host
) -> None:
    asker = seen(open_all, pool, host)
    result = asker.driver.store(numbered(1))
    assert (result.ok, result.reason) == (False, "dropped") and asker.value("not_pushed") == 1


def test_a_clear_says_that_it_cannot_reach_what_peers_have(open_all: ExitStack, pool: Pool, host: Host) -> None:
    asker = seen(open_all, pool, host, hit_s=60.0)
    assert asker.driver.has(CHUNK) and asker.value("answers_known") == 1
    assert asker.tier.clear_scope(ClearScope(CHUNK.header.namespace)) is None
    assert asker.value("answers_known") == 0
    assert asker.driver.has(CHUNK), "it is still there"


def test_what_is_forgotten_is_asked_for_anew(open_all: ExitStack, pool: Pool, host: Host) -> None:
    asker = seen(open_all, pool, host, hit_s=60.0, miss_s=0.0)
    assert asker.driver.has(CHUNK)
    del host.source.chunks[CHUNK.id]
    assert asker.driver.has(CHUNK), "it is remembered"
    asker.driver.engine.forget([CHUNK.id], "corrupt")
    assert not asker.driver.has(CHUNK)


def test_namespaces_have_a_cap_and_a_chunk_of_an_unknown_one_is_not_taken(
    open_all: ExitStack, pool: Pool, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "NAMESPACES_MAX", 2)
    asker = seen(open_all, pool, host)
    assert asker.driver.serves(CHUNK)
    for number in range(3):
        asker.tier.note_namespace(bytes([number]) * 32, b"")
    assert asker.value("namespaces") == 2
    assert asker.driver.load(CHUNK).result.reason == "corrupt"


def test_each_load_comes_from_a_peer_that_has_it_though_another_is_asked_first(
    open_all: ExitStack, pool: Pool, host: Host
) -> None:
    other = open_all.enter_context(closing(Host("other", bulk="frames")))
    elsewhere = numbered(5)
    other.source.put(elsewhere)
    peers = f"{host.address},{other.address}"
    asker = open_all.enter_context(closing(Asker(pool, peers, bulk="frames")))
    asker.sees("peer", "other")
    for chunk in (CHUNK, elsewhere):
        assert asker.driver.serves(chunk), "nobody was asked before"
        assert asker.driver.has(chunk) and asker.driver.serves(chunk)
