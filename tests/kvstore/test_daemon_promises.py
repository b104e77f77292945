"""Promises over the wire: groups, parts, deadlines, keeps and clears of a real daemon."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import msgspec
import pytest

from forebay.errors import RequestRefused
from forebay.kvstore.client import StoreClient
from tests.kvstore.running import Store, get, prompt_of, put
from tests.kvstore.support import CHUNK, namespace

SPEC = namespace()
TOKENS = list(range(4 * CHUNK))


def until(store: Store, true: Callable[[dict[str, float]], bool]) -> None:
    """Wait until the store's figures say so."""
    end = time.monotonic() + 60
    with StoreClient(store.address) as client:
        while not true(client.stats().values):
            assert time.monotonic() < end, "the store never came so far"
            time.sleep(0.01)


@pytest.fixture
def stored(store: Store) -> Store:
    with StoreClient(store.address) as client:
        client.register(SPEC)
        assert put(client, SPEC, TOKENS) == 8
    return store


def test_ranks_join_a_schedulers_lease_and_keep_it_when_it_dies(stored: Store) -> None:
    group = os.urandom(16)
    scheduler = StoreClient(stored.address, group=group).__enter__()
    found = get(scheduler, SPEC, TOKENS)
    with StoreClient(stored.address, group=group) as rank, StoreClient(stored.address) as stranger:
        (shared,) = rank.join([found.lease, found.lease + 1], lease_ms=5000).leases
        assert shared.hit == found.hit and shared.chunks == [
            msgspec.structs.replace(chunk, promoted="") for chunk in found.chunks
        ]
        assert stranger.join([found.lease]).leases == []
        with pytest.raises(RequestRefused, match="64 leases"):
            rank.join(range(65))
        scheduler.close()
        until(stored, lambda values: values["store.leases"] == 1)
        assert all(rank.intact(chunk) for chunk in shared.chunks)
        rank.release_chunks(found.lease, range(4))
        until(stored, lambda values: values["host.entries"] - values["host.evictable"] == len(found.chunks) - 4)
        rank.release_chunks(found.lease, range(100))
        until(stored, lambda values: values["store.leases"] == 0)


def test_what_the_last_connection_of_an_engine_held_is_free_after_its_sigkill(stored: Store) -> None:
    group = os.urandom(16)
    children = []
    for _ in range(2):
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            client = StoreClient(stored.address, group=group).__enter__()
            get(client, SPEC, TOKENS)
            prompt = prompt_of(SPEC, [os.getpid()] * CHUNK)
            client.reserve(SPEC.id, "", [prompt.chunk(0, 0)])
            os.write(send, b"x")
            signal.pause()
        os.read(receive, 1)
        children.append(child)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    until(
        stored,
        lambda values: (
            values["host.evictable"] == values["host.entries"] == 8
            and values["host.reserved_bytes"] == values["host.quarantined_slots"] == values["store.leases"] == 0
        ),
    )


def test_a_client_that_comes_back_before_its_end_was_noticed_leaves_nothing_behind(stored: Store) -> None:
    with StoreClient(stored.address) as client:
        session = client._client._session
        for number in range(20):
            chunk = prompt_of(SPEC, [100 + number] * CHUNK).chunk(0, 0)
            assert client.reserve(SPEC.id, "", [chunk]).slots[0].status == "reserved"
            client._run(client._client.close())
            assert session.lock == -1
            client._run(client._client.connect())
        until(stored, lambda values: values["host.quarantined_slots"] == values["host.reserved_bytes"] == 0)


def test_pins_are_refused_beyond_their_budget_and_shown_with_their_owner(stored: Store) -> None:
    with StoreClient(stored.address) as client:
        chunks = [(chunk.group, chunk.key) for chunk in get(client, SPEC, TOKENS).chunks]
        assert client.pin(chunks, kind="soft", by="ops", ttl_s=60).chunks == len(chunks)
        assert client.touch([*chunks, (0, bytes(32))], tenant="acme", retain_s=60).chunks == len(chunks)
        rows = [row for row in client.list_chunks().rows if row.kept]
        assert len(rows) == len(chunks)
        assert {(kept.kind, kept.by) for row in rows for kept in row.kept} == {("soft", "ops"), ("retained", "acme")}
        kinds = {pin["kind"]: pin["chunks"] for pin in client.stats().pins}
        assert kinds == {"soft": str(len(chunks)), "retained": str(len(chunks))}
        assert client.unpin(chunks, by="nobody").chunks == 0
        assert client.unpin(chunks, by="ops").chunks == len(chunks)
        for wrong in (0.0, -1.0, 1e12, float("nan")):
            with pytest.raises(RequestRefused, match="a pin lasts"):
                client.pin(chunks, kind="soft", by="ops", ttl_s=wrong)
        with pytest.raises(RequestRefused, match="names have"):
            client.pin(chunks, kind="soft", by="x\x1b[0m", ttl_s=1)


def test_hard_pins_beyond_their_budget_are_refused_with_a_code_of_their_own(store: Store) -> None:
    with StoreClient(store.address) as client:
        client.register(SPEC)
        keys = []
        with pytest.raises(RequestRefused) as refused:  # noqa: PT012
            for number in range(2000):
                put(client, SPEC, [number] * CHUNK)
                found = get(client, SPEC, [number] * CHUNK)
                client.release([found.lease])
                keys = [(chunk.group, chunk.key) for chunk in found.chunks]
                client.pin(keys, kind="hard", by="ops", ttl_s=60)
        assert refused.value.code == "budget"
        values = client.stats().values
        assert 0 < values["pins.hard_bytes"] <= values["pins.hard_bytes_budget"]
        assert put(client, SPEC, [7] * 96) > 0, "the rest of the pool goes on"


def test_a_clear_of_a_prefix_and_of_a_tenant(stored: Store) -> None:
    with StoreClient(stored.address) as client:
        prompt = prompt_of(SPEC, TOKENS)
        behind = client.clear(SPEC.id, root=prompt.root, tokens=prompt.tokens[: 4 * 3 * CHUNK])
        assert behind.chunks == 4 and behind.tiers == {}
        assert get(client, SPEC, TOKENS).hit == 2 * CHUNK
        assert client.clear(tenant="nobody").chunks == 0
        assert client.clear(tenant="").chunks == 4
        with pytest.raises(RequestRefused, match="isn't registered"):
            client.clear(b"n" * 32, root=prompt.root)
        with pytest.raises(RequestRefused, match="32 bytes"):
            client.clear(SPEC.id, root=b"short")


def test_stats_say_how_much_is_kept_in_one_line_of_json(stored: Store) -> None:
    from forebay.cli.stat import as_json, as_text

    with StoreClient(stored.address) as client:
        chunks = [(chunk.group, chunk.key) for chunk in get(client, SPEC, TOKENS).chunks]
        client.pin(chunks, kind="hard", by="ops", ttl_s=60)
        stats = client.stats()
        assert json.loads(as_json(stats))["pins"][0]["by"] == "ops" and "ops" in as_text(stats)
