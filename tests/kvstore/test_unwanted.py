"""Answers that nobody waits for any more: the client lets go of what they promise."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from forebay.errors import StoreUnavailable
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.protocol import Fetched, Written
from tests.faults.inprocess import InProcessDaemon
from tests.kvstore.running import prompt_of
from tests.kvstore.test_batches import SPEC, with_daemon

TOKENS = [7] * 32


async def put(client: AsyncStoreClient) -> None:
    [slot] = (await client.reserve(SPEC.id, "", [prompt_of(SPEC, TOKENS).chunk(0, 0)])).slots
    assert (await client.commit([Written(slot.reservation, bytes(16))])).committed == 1


def fetching(client: AsyncStoreClient) -> asyncio.Task[Fetched]:
    prompt = prompt_of(SPEC, TOKENS)
    coming = client.fetch(
        SPEC.id, prompt.root, prompt.tokens, prompt.keys, limit=len(TOKENS), wanted=[(0, 0)], deadline_ms=0
    )
    return asyncio.create_task(coming)


async def leases(client: AsyncStoreClient) -> float:
    return (await client.stats()).values["store.leases"]


@pytest.mark.parametrize("when", ["before it comes", "as it comes"])
def test_what_a_fetch_pins_that_was_cancelled_is_let_go_of(tmp_path: Path, when: str) -> None:
    async def use(daemon: InProcessDaemon, client: AsyncStoreClient) -> None:
        await put(client)
        kept = await fetching(client)
        assert kept.lease and await leases(client) == 1
        answer = fetching(client)
        await asyncio.sleep(0)
        while when == "as it comes" and not all(waiting.done() for waiting in client._waiting.values()):
            await asyncio.sleep(0)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await client.stats()
        assert await leases(client) == 1, "the other one's"
        client.release([kept.lease])
        assert await leases(client) == 0

    with_daemon(tmp_path, use)


def test_extents_that_come_for_one_that_was_cancelled_are_closed(tmp_path: Path) -> None:
    async def use(daemon: InProcessDaemon, client: AsyncStoreClient) -> None:
        await client.stats()
        before = len(os.listdir("/proc/self/fd"))
        client._session.pool.views.clear()
        mapping = asyncio.create_task(client.map_extents())
        await asyncio.sleep(0)
        while not all(waiting.done() for waiting in client._waiting.values()):
            await asyncio.sleep(0)
        mapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await mapping
        assert len(os.listdir("/proc/self/fd")) == before

    with_daemon(tmp_path, use)


def test_what_was_pinned_in_an_extent_that_cannot_be_mapped_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(client: AsyncStoreClient) -> None:
        raise StoreUnavailable("no memory")

    async def use(daemon: InProcessDaemon, client: AsyncStoreClient) -> None:
        await put(client)
        client._session.pool.views.clear()
        monkeypatch.setattr(AsyncStoreClient, "map_extents", failing)
        prompt = prompt_of(SPEC, TOKENS)
        asked = SPEC.id, prompt.root, prompt.tokens, prompt.keys
        for pinning in (
            fetching(client),
            client.hold([prompt.query(0, 0)], lease_ms=60_000),
            client.lookup(*asked, limit=len(TOKENS), deadline_ms=0),
        ):
            with pytest.raises(StoreUnavailable):
                await pinning
            assert await leases(client) == 0

    with_daemon(tmp_path, use)


def test_reading_what_was_pinned_before_the_store_went_says_so(tmp_path: Path) -> None:
    async def use(daemon: InProcessDaemon, client: AsyncStoreClient) -> None:
        await put(client)
        [chunk] = (await fetching(client)).chunks
        witness = client.witness(chunk)
        await client.close()
        for read in (client.payload, client.checksums, client.intact, client.witness):
            with pytest.raises(StoreUnavailable, match="isn't mapped"):
                read(chunk)
        assert witness()

    with_daemon(tmp_path, use)
