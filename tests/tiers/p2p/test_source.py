"""This host's store as peers read it: what they are told of is pinned for a while, what they read until it is read."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import encode_namespace
from forebay.testing.conformance import make_chunk
from forebay.tiers.base import ChunkId, Query
from forebay.tiers.chunks import stored_header, verify_payload
from forebay.tiers.p2p.answers import Answers
from forebay.tiers.p2p.source import NoRoom, Room, StoreSource
from tests.kvstore.running import Store, prompt_of, put
from tests.kvstore.support import CHUNK, namespace

TOKENS = list(range(1, 4 * CHUNK + 1))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    running = Store(tmp_path)
    running.start()
    with StoreClient(running.address) as client:
        client.register(namespace())
        put(client, namespace(), TOKENS)
    yield running
    if running.process is not None and running.process.poll() is None:
        assert running.stop() == 0


@asynccontextmanager
async def source_of(store: Store, lend_s: float = 0.2, lend_bytes: int = 1 << 20) -> AsyncIterator[StoreSource]:
    """A source that reads through its own client's mappings; a tier has the daemon's."""
    extents: dict[int, memoryview] = {}
    namespaces = {namespace().id: encode_namespace(namespace())}
    source = StoreSource(store.address, extents, namespaces, lend_s, lend_bytes)
    keeping = asyncio.create_task(source.keep_connected())
    try:
        async with asyncio.timeout(20):
            while not source.connected:
                await asyncio.sleep(0.01)
        extents.update(source._client._session.pool.views)
        yield source
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        await source.close()


def queries() -> list[Query]:
    prompt = prompt_of(namespace(), TOKENS)
    return [prompt.query(group, position) for position in range(4) for group in (0, 1)]


async def leases(source: StoreSource) -> float:
    return (await source._client.stats()).values["store.leases"]


def test_what_was_told_is_pinned_for_a_while_and_lent_without_asking_the_store_again(store: Store) -> None:
    async def run() -> None:
        async with source_of(store) as source:
            found = await source.find(queries())
            assert [result.outcome for result in found] == ["hit"] * 8
            assert await leases(source) == 1
            loan = source.lend_at_once(ChunkId(0, queries()[0].key))
            assert loan is not None
            header = stored_header(loan.block)
            verify_payload(header, loan.payload)
            await asyncio.sleep(0.6)  # its time is over, but somebody reads it
            assert source.figures()["source.lent_leases"] == 0
            assert await leases(source) == 1
            loan.give_back()
            while await leases(source):
                await asyncio.sleep(0.01)
            assert source.lend_at_once(ChunkId(0, queries()[0].key)) is None

    asyncio.run(asyncio.wait_for(run(), 30))


def test_one_whose_store_is_away_does_not_say_that_it_has_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        source = StoreSource(str(tmp_path / "nobody"), {}, {}, 0.2, 1 << 20)
        answers, asked, peers = Answers(5.0, 5.0, time.monotonic), queries(), frozenset({"near"})
        answers.look(asked, peers)
        answers.heard("near", asked, await source.find(asked))
        assert {result.outcome for result in answers.look(asked, peers).results} == {"away"}

    asyncio.run(run())


def test_what_nobody_comes_for_is_let_go_of(store: Store) -> None:
    async def run() -> None:
        async with source_of(store) as source:
            await source.find(queries())
            while await leases(source):
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_what_is_pinned_for_peers_has_a_cap(store: Store) -> None:
    async def run() -> None:
        async with source_of(store, lend_s=30.0, lend_bytes=5_000) as source:
            for query in queries():
                assert (await source.find([query]))[0].outcome == "hit"
            figures = source.figures()
            assert 0 < figures["source.lent_bytes"] <= 5_000
            assert figures["source.lent_no_pin"] > 0
            assert await leases(source) == figures["source.lent_leases"] == 2, figures
            loan = await source.lend(ChunkId(0, queries()[-2].key))
            assert loan is not None, "what isn't pinned any more is asked for"
            loan.give_back()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_room_of_a_store_that_is_gone_is_not_written_any_more(store: Store) -> None:
    prompt = prompt_of(namespace(), [77] * CHUNK)
    new = prompt.chunk(0, 0)
    size = namespace().groups[0].granule_bytes
    made = make_chunk([77] * CHUNK, granule=size, parent=new.parent, namespace=namespace().id)
    assert made.header.key == new.key

    async def run() -> None:
        async with source_of(store) as source:
            room = await source.reserve(made.header, b"")
            assert isinstance(room, Room) and source.writable(room)
            assert isinstance(await source.reserve(made.header, b""), NoRoom), "somebody is writing it"
            store.stop(signal.SIGKILL)
            while source.writable(room):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(store.start)
            while not source.connected:
                await asyncio.sleep(0.01)
            assert not source.writable(room)
            assert not await source.commit(room, made.header.checksums)
            source.abort(room)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_chunks_of_unknown_or_wrong_namespaces_get_no_room(store: Store) -> None:
    async def run() -> None:
        async with source_of(store) as source:
            stranger = make_chunk(namespace=b"z" * 32).header
            for encoded in (b"", b"nonsense", encode_namespace(namespace())):
                assert await source.reserve(stranger, encoded) == NoRoom("namespace")

    asyncio.run(asyncio.wait_for(run(), 30))
