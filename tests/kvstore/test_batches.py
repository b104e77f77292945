"""No message is longer work than one batch, whatever its sender puts into it; too long an answer is refused."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from forebay.errors import RequestRefused, StoreUnavailable
from forebay.ipc.framing import FrameBuffer
from forebay.kvstore.client import AsyncStoreClient, StoreClient
from forebay.kvstore.core import Client
from forebay.kvstore.identity import Namespace
from forebay.kvstore.limits import Limits
from forebay.kvstore.protocol import (
    BATCH_ITEMS_MAX,
    LOOKUP_CHUNKS_MAX,
    REPLIES,
    REQUESTS,
    Abort,
    Commit,
    Damaged,
    Hello,
    List,
    NewChunk,
    Part,
    Refused,
    Release,
    Reply,
    Request,
    Rows,
    Stats,
    Welcome,
    Written,
)
from forebay.kvstore.server import Connection
from tests.faults.inprocess import SPEC, InProcessDaemon, config, started
from tests.kvstore.running import Store, prompt_of
from tests.kvstore.support import namespace

HELLO = Hello(rid=1, client=os.urandom(16), kind="raw")
MORE = BATCH_ITEMS_MAX + 1


def ask(connection: socket.socket, *requests: Request) -> Reply:
    """Send them; the first answer."""
    connection.settimeout(30)
    for request in requests:
        connection.sendall(REQUESTS.encode(request))
    buffer: FrameBuffer[Reply] = FrameBuffer(REPLIES)
    while True:
        data = connection.recv(1 << 16)
        assert data, "the store has hung up"
        for reply in buffer.feed(data):
            return reply


@pytest.mark.parametrize(
    "request_",
    [
        Commit(rid=7, chunks=[Written(1, b"")] * MORE),
        Abort(reservations=[1] * MORE),
        Damaged(chunks=[(0, b"k" * 32)] * MORE),
        Release(leases=[1] * MORE),
        Release(leases=[], parts=[Part(1, [])] * MORE),
        Release(leases=[], parts=[Part(1, [0] * (Limits().pins_per_lease + 1))]),
    ],
    ids=lambda request: type(request).__name__,
)
def test_more_than_a_batch_is_refused_and_the_connection_goes_on(store: Store, request_: Request) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(store.socket))
        assert isinstance(ask(raw, HELLO), Welcome)
        refused = ask(raw, request_)
        assert isinstance(refused, Refused) and refused.code == "limits"
        assert isinstance(ask(raw, List(rid=8)), Rows)


class Verbose:
    """A service that has too much to say."""

    def welcome(self, hello: Hello) -> tuple[object, list[int], Client]:
        return Welcome(rid=hello.rid, boot=b"b" * 16, extent_bytes=1), [], Client(hello.client)

    def handle(self, connection: Connection, request: Request) -> object:
        info = {"much": "x" * (17 << 20)}
        return Stats(rid=1, boot=b"b" * 16, pid=1, values={}, info=info, namespaces=[], tiers=[])

    def gone(self, connection: Connection) -> None:
        pass


class Plain(Connection):
    """It takes whoever is at the other end."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport


def test_an_answer_that_is_longer_than_a_frame_is_refused_in_words() -> None:
    async def talk() -> Reply:
        ours, theirs = socket.socketpair()
        connection = Plain(Verbose(), Limits(), lambda uid: True)
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, theirs)
        with ours:
            await asyncio.to_thread(ask, ours, HELLO)
            told = await asyncio.to_thread(ask, ours, List(rid=2))
        transport.abort()
        return told

    told = asyncio.run(talk())
    assert isinstance(told, Refused) and told.code == "limits" and "less in one batch" in told.message


def long_reserve(count: int = 2000) -> list[NewChunk]:
    return [prompt_of(SPEC, [serial] * 32).chunk(0, 0) for serial in range(count)]


def with_daemon(folder: Path, use: Callable[[InProcessDaemon, AsyncStoreClient], Awaitable[None]]) -> None:
    async def run() -> None:
        (folder / "pool").mkdir()
        daemon = InProcessDaemon(config(folder, files=False))
        ended = await started(daemon)
        client = AsyncStoreClient(f"unix://{daemon.config.socket}")
        await client.connect()
        await client.register(SPEC)
        await use(daemon, client)
        await client.close()
        daemon.stop()
        assert await ended == 0

    asyncio.run(run())


def test_others_are_answered_while_a_long_batch_is_worked_off(tmp_path: Path) -> None:
    async def use(daemon: InProcessDaemon, client: AsyncStoreClient) -> None:
        other = AsyncStoreClient(f"unix://{daemon.config.socket}")
        await other.connect()
        chunks = long_reserve()
        reserving, answers = asyncio.create_task(client.reserve(SPEC.id, "", chunks)), 0
        while not reserving.done():
            await other.list_chunks(limit=1)
            answers += 1
        assert answers > 5
        slots = (await reserving).slots
        assert len(slots) == len(chunks)
        given = [slot.reservation for slot in slots if slot.status == "reserved"]
        assert (await client.commit([Written(number, bytes(16)) for number in given])).committed == len(given) > 0
        await other.close()

    with_daemon(tmp_path, use)


def test_a_client_that_ends_within_its_batch_leaves_nothing_behind(tmp_path: Path) -> None:
    async def use(daemon: InProcessDaemon, client: AsyncStoreClient) -> None:
        leaving = AsyncStoreClient(f"unix://{daemon.config.socket}")
        await leaving.connect()
        reserving = asyncio.create_task(leaving.reserve(SPEC.id, "", long_reserve()))
        while not daemon.service.core.reservations.bytes:
            await asyncio.sleep(0)
        await leaving.close()
        with suppress(StoreUnavailable):
            await reserving
        values: dict[str, float] = {"store.chores": 1}
        while values["store.chores"] or values["store.connections"] > 1 or values["host.bytes_used"]:
            await asyncio.sleep(0.01)
            values = (await client.stats()).values
        assert values["host.reserved_bytes"] == values["host.quarantined_bytes"] == 0

    with_daemon(tmp_path, use)


def test_a_question_about_more_chunks_than_can_be_looked_at_is_refused(store: Store) -> None:
    spec = Namespace(weights=b"w" * 32, groups=namespace().groups, chunk_tokens=16)
    prompt = prompt_of(spec, [7] * (16 * (LOOKUP_CHUNKS_MAX + 1)))
    with StoreClient(store.address) as client:
        client.register(spec)
        with pytest.raises(RequestRefused, match="chunks of 16"):
            client.explain(spec.id, prompt.root, prompt.tokens)
        with pytest.raises(RequestRefused, match="a chain to warm"):
            client.warm(spec.id, prompt.root, prompt.keys, deadline_ms=0)
        most = prompt_of(spec, [7] * (16 * LOOKUP_CHUNKS_MAX))
        assert client.warm(spec.id, most.root, most.keys, deadline_ms=0).hit == 0
