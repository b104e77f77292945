"""The store's events, told again by an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.connectors.relay import Relay, Stream, stream_of
from forebay.events.schema import BlockRemoved, BlockStored, KVEvent, low64
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import Chain, root_key
from forebay.testing.cluster import Cluster, wait_for
from forebay.testing.ports import free_port
from tests.connectors.test_copying import CHUNK, fill
from tests.connectors.test_moving import TOKENS, Rank, rank

ROW = {"id": "aa" * 32, "label": "tiny"}
OTHER = {"id": "bb" * 32, "label": ""}
PLACES = {
    "events kv@host@tiny": "tcp://127.0.0.1:1, replay tcp://127.0.0.1:2",
    f"events kv@host@{'bb' * 8}": "tcp://127.0.0.1:3, replay off",
    "pid": "3",
}


def test_a_namespaces_stream_is_found_by_its_label_or_without_one_by_its_id() -> None:
    rows = [ROW, OTHER]
    assert stream_of(b"\xaa" * 32, rows, PLACES) == Stream("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    assert stream_of(b"\xbb" * 32, rows, PLACES) == Stream("tcp://127.0.0.1:3", None)


def test_a_stream_that_could_be_anothers_is_not_taken() -> None:
    assert stream_of(b"\xaa" * 32, [ROW, OTHER | {"label": "tiny"}], PLACES) is None
    assert stream_of(b"\xcc" * 32, [ROW], PLACES) is None
    assert stream_of(b"\xaa" * 32, [ROW], {}) is None


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, tmp_path / "no-model", memory="64MiB")
    cluster.start_store(events=f"tcp://127.0.0.1:{free_port()}", replay=f"tcp://127.0.0.1:{free_port()}")
    yield cluster
    cluster.stop()


def told(relay: Relay, wanted: type[KVEvent], medium: str) -> KVEvent:
    found: list[KVEvent] = []

    def some() -> bool:
        found.extend(e for e in relay.take() if isinstance(e, wanted) and getattr(e, "medium", None) == medium)
        return bool(found)

    wait_for(wanted.__name__, some, 30)
    return found[0]


def test_what_the_store_gains_and_loses_is_told(cluster: Cluster) -> None:
    ranks: list[Rank] = []
    relay = Relay()
    try:
        one = rank(cluster, ranks)
        with StoreClient(cluster.store_address) as client:
            stats = client.stats()
            relay.listen(stream_of(one.namespace.id, stats.namespaces, stats.info))
            fill(one.engine, range(CHUNK))
            one.step(one.orders(spans=[one.span("w", 0, CHUNK)]))
            stored = told(relay, BlockStored, "CPU")
            chain = Chain(root_key(one.namespace.id), TOKENS[:CHUNK], chunk_tokens=CHUNK)
            assert isinstance(stored, BlockStored)
            assert list(stored.block_hashes) == [low64(key) for key in chain.keys]
            assert tuple(stored.token_ids) == TOKENS[:CHUNK] and stored.block_size == 16
            client.clear(one.namespace.id)
        removed = told(relay, BlockRemoved, "CPU")
        assert isinstance(removed, BlockRemoved)
        assert set(removed.block_hashes) <= set(stored.block_hashes) and relay.lost == 0
    finally:
        for made in ranks:
            made.mover.close()
        relay.close()


def test_events_that_wait_for_the_engine_are_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.connectors.relay.EVENTS_MAX", 1)
    ranks: list[Rank] = []
    relay = Relay()
    try:
        one = rank(cluster, ranks)
        with StoreClient(cluster.store_address) as client:
            stats = client.stats()
        relay.listen(stream_of(one.namespace.id, stats.namespaces, stats.info))
        fill(one.engine, range(2 * CHUNK))
        one.step(one.orders(spans=[one.span("w", 0, CHUNK)]))
        one.step(one.orders(spans=[one.span("w", CHUNK, 2 * CHUNK)]))
        wait_for("a loss", lambda: relay.lost, 30)
        assert len(relay) == 1
    finally:
        for made in ranks:
            made.mover.close()
        relay.close()
