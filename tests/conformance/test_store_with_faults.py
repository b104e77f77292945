"""A whole store over a tier that fails, dies, hangs and lies: what a reader takes is right, and the store stays up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kvstore.client import StoreClient
from forebay.kvstore.header import first_bad_granule
from forebay.testing.faults.dice import rates_text, read_log
from forebay.testing.faults.tier import LIES
from tests.kvstore.running import payload_of, prompt_of
from tests.kvstore.support import CHUNK, namespace
from tests.kvstore.test_daemon_tiers import TierStore

ROUNDS_MIN, ROUNDS_MAX, PROMPTS = 4, 16, 12
AT_REST = (
    "tier.flaky.stores_running", "tier.flaky.loads_running", "host.reserved_bytes", "host.promoting_bytes",
    "store.leases",
)  # fmt: skip
RATES = {"error": 0.03, "raise": 0.01, "delay": 0.05, "twice": 0.05, "stray": 0.02, "die": 0.002}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TierStore]:
    running = TierStore(tmp_path)
    yield running
    if running.process is not None and running.process.poll() is None:
        assert running.stop() == 0
    assert not running.pool.exists()


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1, 1000) for _ in range(CHUNK * rng.randrange(1, 5))] for _ in range(PROMPTS)]


def read(client: StoreClient, tokens: list[int]) -> Counter[str]:
    """Look a prompt up and read all of it as a worker does; what fails its checks is told to the store."""
    spec, prompt = namespace(), prompt_of(namespace(), tokens)
    found = client.lookup(spec.id, prompt.root, prompt.tokens, prompt.keys, limit=len(tokens), deadline_ms=500)
    seen: Counter[str] = Counter()
    for chunk in found.chunks:
        payload = bytes(client.payload(chunk))
        granule = spec.groups[chunk.group].granule_bytes
        bad = first_bad_granule(memoryview(payload), granule, client.checksums(chunk)) is not None
        if bad or not client.intact(chunk):
            seen["refused"] += 1
            client.damaged([(chunk.group, chunk.key)])
        else:
            assert payload == payload_of(spec, chunk.group, chunk.key, chunk.tokens), "wrong bytes were taken"
            seen["served"] += 1
    client.release([found.lease])
    return seen


def test_lies_and_failures_of_a_tier_cost_hits_and_nothing_else(store: TierStore, tmp_path: Path) -> None:
    rates = rates_text(RATES | dict.fromkeys(LIES, 0.04))
    tier = (
        f'[tiers.flaky]\nkind = "forebay.testing.faults.tier:FaultyTier"\nfault_kind = "fs"\nfault_seed = 3\n'
        f'fault_rates = "{rates}"\nfault_log = "{tmp_path / "faults"}"\n'
        f'directory = "{tmp_path / "files"}"\nquota_bytes = "64MiB"\n'
    )
    seen: Counter[str] = Counter()
    for number in range(ROUNDS_MAX):
        if number >= ROUNDS_MIN and seen["refused"]:
            break  # which lie strikes which chunk depends on who comes first
        store.start(tier)
        with StoreClient(store.address) as client:
            client.register(namespace())
            for tokens in prompts():
                seen += read(client, tokens)
        for tokens in prompts():
            store.fill(tokens)
        store.until(lambda figures: not any(figures[name] for name in AT_REST))
        store.forget()
    assert seen["served"] >= 10 and seen["refused"] >= 1, seen
    struck = read_log(tmp_path / "faults")
    assert sum(struck[lie] for lie in LIES) >= 5 and sum(struck[fault] for fault in RATES) >= 5, struck
