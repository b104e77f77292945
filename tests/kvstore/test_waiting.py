"""Lookups that wait for a tier, and what becomes of them when nobody waits for their answer any more."""

from __future__ import annotations

import os
import signal
import time

from forebay.kvstore.client import StoreClient
from forebay.kvstore.protocol import Row
from tests.kvstore.running import prompt_of
from tests.kvstore.support import CHUNK, namespace
from tests.kvstore.test_daemon_tiers import CHUNKS, ODD, TOKENS, TierStore, evict_all, store

__all__ = ["store"]


def test_a_client_that_is_killed_while_it_waits_for_a_tier_holds_nothing_any_more(store: TierStore) -> None:
    store.start(f'[tiers.theirs]\nkind = "{ODD}NeverBrings"\n')
    store.fill(TOKENS)
    store.until(lambda v: v["tier.theirs.chunks"] == CHUNKS)
    evict_all(store)
    store.fill(TOKENS[:CHUNK])
    store.until(lambda v: v["tier.theirs.stores_running"] == 0)
    prompt = prompt_of(namespace(), TOKENS)
    child = os.fork()
    if child == 0:
        client = StoreClient(store.address, timeout_s=60).__enter__()
        client.register(namespace())
        deadline_ms = 1 << 62
        client.lookup(
            namespace().id, prompt.root, prompt.tokens, prompt.keys, limit=len(TOKENS), deadline_ms=deadline_ms
        )
        os._exit(0)
    try:
        store.until(lambda v: v["tier.theirs.loads_running"] > 0)
        assert sum(row.pins for row in front_rows(store)) == 1, "what it is to be served with has to stay"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    until = time.monotonic() + 30
    while [row.pins for row in front_rows(store)] != [0, 0]:
        assert time.monotonic() < until, "nobody waits, and its pins are still there"
        time.sleep(0.01)


def front_rows(store: TierStore) -> list[Row]:
    """What memory has of the first chunk of every group."""
    first = prompt_of(namespace(), TOKENS).key_at(CHUNK)
    rows, cursor = [], 0
    with StoreClient(store.address) as client:
        while True:
            page = client.list_chunks(cursor=cursor)
            rows += [row for row in page.rows if row.key == first]
            if not (cursor := page.cursor):
                return rows
