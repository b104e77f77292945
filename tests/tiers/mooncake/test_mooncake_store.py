"""A store with a Mooncake tier, as its command takes it from a file: what was stored comes back from other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.testing.mooncake import Master, Member
from tests.kvstore.test_daemon_tiers import CHUNKS, TOKENS, TierStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TierStore]:
    running = TierStore(tmp_path)
    yield running
    if running.process is not None and running.process.poll() is None:
        assert running.stop() == 0
    assert not running.pool.exists()


def tier(master: Master) -> str:
    return (
        f'[tiers.pool]\nkind = "mooncake"\nmaster = "{master.address}"\ntrusted_network = true\n'
        'segment_bytes = 0\nquota_bytes = "64MiB"\nrpc_timeout_s = "1s"\n'
    )


def test_a_store_that_is_started_again_is_served_from_the_pool(store: TierStore, master: Master) -> None:
    with Member(master, 64 << 20):
        store.start(tier(master))
        store.fill(TOKENS)
        store.until(lambda v: v["tier.pool.chunks"] == CHUNKS and v["tier.pool.stores_running"] == 0)
        store.forget()
        store.start(tier(master))
        found = store.lookup(TOKENS)
        assert (found.hit, found.from_tier) == (len(TOKENS), {"pool": len(TOKENS)})
        # Of the window's group a hit takes the last chunks only.
        store.until(lambda v: v["tier.pool.promoted"] == v["tier.pool.loads_ok"] >= CHUNKS // 2)


def test_a_store_serves_while_its_pool_is_away_and_joins_it_later(store: TierStore, master: Master) -> None:
    master.kill()
    store.start(tier(master))
    store.fill(TOKENS)
    assert store.lookup(TOKENS).hit == len(TOKENS)
    master.start()
    with Member(master, 64 << 20):
        store.until(lambda v: v.get("tier.pool.bytes_quota", 0) > 0)
        more = [token + 7000 for token in TOKENS]
        store.fill(more)
        store.until(lambda v: v["tier.pool.chunks"] >= CHUNKS)
