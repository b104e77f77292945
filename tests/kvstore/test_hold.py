"""Single chunks are pinned by their names, whether or not they add up to a hit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import RequestRefused
from forebay.kvstore.client import StoreClient
from forebay.tiers.base import Query
from tests.kvstore.running import Store, payload_of, prompt_of, put
from tests.kvstore.support import CHUNK, namespace

TOKENS = list(range(1, 3 * CHUNK + 1))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StoreClient]:
    store = Store(tmp_path)
    store.start()
    with StoreClient(store.address) as made:
        made.register(namespace())
        put(made, namespace(), TOKENS)
        yield made
    assert store.stop() == 0


def test_chunks_of_any_group_are_pinned_until_they_are_released(client: StoreClient) -> None:
    prompt = prompt_of(namespace(), TOKENS)
    queries = [prompt.query(1, 2), prompt.query(0, 0), Query(0, b"x" * 32, b"y" * 32, b"")]
    held = client.hold(queries, lease_ms=60_000)
    assert held.places == [0, 1, -1] and len(held.chunks) == 2
    for chunk, query in zip(held.chunks, queries, strict=False):
        assert (chunk.group, chunk.key) == (query.group, query.key)
        assert bytes(client.payload(chunk)) == payload_of(namespace(), chunk.group, chunk.key, chunk.tokens)
    assert client.stats().values["store.leases"] == 1
    client.release([held.lease])
    assert client.stats().values["store.leases"] == 0


def test_a_lease_ends_by_itself(client: StoreClient) -> None:
    held = client.hold([prompt_of(namespace(), TOKENS).query(0, 0)], lease_ms=1)
    assert held.lease
    while client.stats().values["store.leases"]:
        pass


def test_a_sibling_that_shares_tokens_serves_where_the_exact_chunk_is_missing(client: StoreClient) -> None:
    longer = prompt_of(namespace(), [*TOKENS[: 2 * CHUNK + 16], *[9] * 16])
    held = client.hold([longer.query(0, 2)], lease_ms=60_000)
    (chunk,) = held.chunks
    assert held.places == [0] and chunk.key == prompt_of(namespace(), TOKENS).query(0, 2).key


def test_nothing_is_held_of_what_is_not_there_or_no_group(client: StoreClient) -> None:
    missing = client.hold([prompt_of(namespace(), [7] * CHUNK).query(0, 0)], lease_ms=60_000)
    assert (missing.lease, missing.chunks, missing.places) == (0, [], [-1])
    for wrong in (Query(-1, b"x" * 32, b"y" * 32, b""), Query(0, b"x" * 32, b"y", bytes(64))):
        with pytest.raises(RequestRefused, match="a query has"):
            client.hold([wrong], lease_ms=60_000)
