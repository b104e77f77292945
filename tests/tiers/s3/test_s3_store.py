"""A whole store with a bucket behind it, as its command takes it from a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kvstore.client import StoreClient
from forebay.testing.buckets import Server
from tests.kvstore.support import CHUNK
from tests.kvstore.test_daemon_tiers import CHUNKS, TOKENS, TierStore
from tests.tiers.s3.rig import BUCKET


def bucket(server: Server, prefix: str, more: str = "") -> str:
    return (
        f'[tiers.bucket]\nkind = "s3"\nbucket = "{BUCKET}"\nprefix = "{prefix}"\nendpoint_url = "{server.endpoint}"\n'
        f'addressing = "path"\npack_wait_s = "100ms"\nrefresh_s = "200ms"\nmissing_s = "300ms"\n{more}\n'
    )


@pytest.fixture
def store(tmp_path: Path, seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierStore]:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    running = TierStore(tmp_path)
    yield running
    if running.process is not None and running.process.poll() is None:
        assert running.stop() == 0
    assert not running.pool.exists()


@pytest.mark.parametrize(
    ("more", "remembered"), [("", True), ("", False), ("pack_below_bytes = 0", False)],
    ids=["packed and remembered", "packed", "an object a chunk"],
)  # fmt: skip
def test_a_restarted_store_takes_everything_from_the_bucket(
    store: TierStore, seaweed: Server, prefix: str, tmp_path: Path, more: str, remembered: bool
) -> None:
    state = f'state_dir = "{tmp_path / "state"}"\n' if remembered else ""
    tiers = bucket(seaweed, prefix, state + more)
    store.start(tiers)
    store.fill(TOKENS)
    values = store.until(lambda v: v["tier.bucket.chunks"] == CHUNKS)
    assert (values.get("tier.bucket.chunks_packed", 0) > 0) == (not more)
    store.forget()
    store.start(tiers)
    if not remembered:
        store.until(lambda v: bool(more) or v.get("tier.bucket.chunks_learned", 0) == CHUNKS)
    assert store.until(lambda v: True)["host.bytes_used"] == 0
    found = store.lookup(TOKENS)  # every byte is compared
    assert (found.hit, found.from_tier) == (len(TOKENS), {"bucket": len(TOKENS)})
    values = store.until(lambda v: v["tier.bucket.promoted"] == v["tier.bucket.loads_ok"])
    full, window = CHUNKS // 2, 2  # of a window's group, what the next token sees
    assert values["tier.bucket.loads_ok"] == full + window and values["tier.bucket.bytes_received"] > 0
    assert values.get("tier.bucket.loads_corrupt", 0) == 0


def test_a_store_goes_on_while_its_bucket_stands_still_and_uses_it_again(
    store: TierStore, seaweed: Server, prefix: str
) -> None:
    impatient = 'timeout_s = "1s"\nconnect_timeout_s = "1s"\nopen_s = "200ms"\nfailures_max = 2'
    store.start(bucket(seaweed, prefix, impatient))
    store.fill(TOKENS)
    store.until(lambda v: v["tier.bucket.chunks"] == CHUNKS)
    seaweed.stop_it()
    try:
        store.fill([7] * CHUNK)
        assert store.lookup([7] * CHUNK, deadline_ms=500).hit == CHUNK, "from memory"
        assert store.lookup([8] * CHUNK, deadline_ms=500).hit == 0
        store.until(lambda v: v["tier.bucket.breaker_state"] > 0)
    finally:
        seaweed.continue_it()
    store.until(lambda v: v["tier.bucket.breaker_state"] == 0)
    store.fill([9] * CHUNK)
    values = store.until(lambda v: v["tier.bucket.chunks"] > CHUNKS)
    assert values.get("tier.bucket.host.deaths", 0) == 0, "nothing hung"


def test_a_clear_of_the_store_empties_the_bucket(store: TierStore, seaweed: Server, prefix: str) -> None:
    store.start(bucket(seaweed, prefix))
    store.fill(TOKENS)
    store.until(lambda v: v["tier.bucket.chunks"] == CHUNKS)
    with StoreClient(store.address) as client:
        client.clear()
    store.until(lambda v: v["tier.bucket.bytes"] == 0 and v["tier.bucket.clears_open"] == 0)
    left = seaweed.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
    assert left == []
