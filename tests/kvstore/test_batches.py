"""No message is longer work than one batch, whatever its sender puts into it; too long an answer is refused."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from forebay.ipc.framing import FrameBuffer
from forebay.kvstore.core import Client
from forebay.kvstore.limits import Limits
from forebay.kvstore.protocol import (
    BATCH_ITEMS_MAX,
    REPLIES,
    REQUESTS,
    Abort,
    Commit,
    Damaged,
    Hello,
    List,
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
from tests.kvstore.running import Store

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
