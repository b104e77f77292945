"""One connection that this host has dialled: requests and their answers, pieces of chunks, pings.

A link that has failed once stays failed; its keeper (`peer.py`) makes another. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import zmq

from forebay.errors import ProtocolError
from forebay.tiers.base import ClearScope, LookupResult, Query
from forebay.tiers.p2p.errors import NoAnswer, PeerLost, PeerRefused
from forebay.tiers.p2p.sockets import Socket, send_now
from forebay.tiers.p2p.wire import (
    DIALER,
    VERSION,
    Answer,
    Ask,
    Bye,
    Bytes,
    Clear,
    Cleared,
    GetNixl,
    Hello,
    Message,
    Nixl,
    Ping,
    Pong,
    Refused,
    Taken,
    ToDialer,
    Welcome,
    encode,
)

PING_S = 1.0
SILENT_S = 4.0
"""A peer that says nothing for so long, though it is pinged, is lost."""
INBOX_MAX = 64

A = TypeVar("A", bound=Message)


class Inbox:
    """Answers to one request, with the pieces that came along."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[tuple[ToDialer, memoryview | None] | PeerLost] = asyncio.Queue(INBOX_MAX)

    def put(self, item: tuple[ToDialer, memoryview | None] | PeerLost) -> None:
        """Deliver. Who sends more than it was asked for loses the rest."""
        if not self.waiting.full():
            self.waiting.put_nowait(item)

    async def next(self, timeout_s: float) -> tuple[ToDialer, memoryview | None]:
        """The next answer. Raises PeerLost after the timeout, or when the link has failed; PeerRefused."""
        try:
            item = await asyncio.wait_for(self.waiting.get(), max(timeout_s, 0.0))
        except TimeoutError:
            raise NoAnswer("no answer in time") from None
        if isinstance(item, PeerLost):
            raise item
        if isinstance(item[0], Refused):
            raise PeerRefused(item[0].why)
        return item

    async def expect(self, kind: type[A], timeout_s: float) -> A:
        """The next answer, which is of this kind. Raises PeerLost if it is another."""
        message, _ = await self.next(timeout_s)
        if not isinstance(message, kind):
            raise PeerLost(f"{type(message).__name__} came instead of {kind.__name__}")
        return message


class Link:
    """See the module's text. `on_nixl` is told of metadata that have changed since Welcome."""

    def __init__(self, socket: Socket, clock: Callable[[], float], on_nixl: Callable[[Nixl], None]) -> None:
        self._socket = socket
        self._on_nixl = on_nixl
        self._clock = clock
        self._rid = 0
        self._inboxes: dict[int, Inbox] = {}
        self._hello: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.welcome: Welcome | None = None
        self.nixl_epoch = 0
        self.heard_at = self.moved_at = clock()
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def open(self) -> bool:
        """Has it been welcomed, and not failed?"""
        return self.welcome is not None and not self.failed.done()

    async def greet(self, name: str, boot: bytes, keeper: bytes, timeout_s: float, *, nixl: bool) -> Welcome:
        """Say Hello. Raises PeerLost if nobody answers in time, or not as this protocol wants it."""
        hello = Hello(VERSION, name, boot, nixl, keeper)
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart([encode(hello)])
                self.welcome = await asyncio.shield(self._hello)
        except TimeoutError:
            raise PeerLost("nobody answers Hello") from None
        if self.welcome.version != VERSION:
            raise PeerLost(f"the peer speaks version {self.welcome.version}, this host {VERSION}")
        self.nixl_epoch = self.welcome.nixl_epoch
        return self.welcome

    async def receive(self) -> None:
        """Deliver what comes until the link fails."""
        try:
            while True:
                frames = await self._socket.recv_multipart(copy=False)
                if not 1 <= len(frames) <= 2:
                    raise ProtocolError(f"a message of {len(frames)} frames")
                self.heard_at = self._clock()
                self._deliver(DIALER.decode(frames[0].buffer), frames[1].buffer if len(frames) == 2 else None)
        except (ProtocolError, zmq.ZMQError) as error:
            self.fail(str(error))

    def _deliver(self, message: ToDialer, piece: memoryview | None) -> None:
        if isinstance(message, Pong):
            if message.nixl_epoch > self.nixl_epoch:
                self.nixl_epoch = message.nixl_epoch
                self.send(GetNixl())
        elif isinstance(message, Nixl):
            self._on_nixl(message)
        elif isinstance(message, Welcome):
            if not self._hello.done():
                self._hello.set_result(message)
        elif isinstance(message, Refused) and message.rid == 0:
            self.fail(message.why[:200])
        else:
            if isinstance(message, Bytes | Taken):
                self.moved_at = self._clock()
            inbox = self._inboxes.get(message.rid)
            if inbox is not None:  # else nobody waits for it any more
                inbox.put((message, piece))

    async def ping(self) -> None:
        """Ping, again and again, until the peer is silent for too long."""
        while not self.failed.done():
            await asyncio.sleep(PING_S)
            if self._clock() - self.heard_at > SILENT_S:
                self.fail("the peer doesn't answer")
            else:
                self.send(Ping())

    def send(self, message: Message, piece: memoryview | None = None) -> bool:
        """Hand a message to ZMQ; False if it takes no more at the moment. Never waits."""
        frames: list[Any] = [encode(message)] if piece is None else [encode(message), piece]
        return send_now(self._socket, frames, copy=piece is None) is None

    @contextmanager
    def request(self) -> Iterator[tuple[int, Inbox]]:
        """A request id and where its answers go. Afterwards they are thrown away. Raises PeerLost on a failed link."""
        if self.failed.done():
            raise PeerLost(self.failed.result())
        self._rid += 1
        rid = self._rid
        inbox = self._inboxes[rid] = Inbox()
        try:
            yield rid, inbox
        finally:
            del self._inboxes[rid]

    async def next(self, inbox: Inbox, timeout_s: float, stall_s: float) -> tuple[ToDialer, memoryview | None]:
        """The next answer, within `timeout_s`, as long as bytes of whatever chunk move on this link every `stall_s`.

        Chunks wait for each other here, so one of them may get nothing for longer than that. Raises as Inbox.next.
        """
        until = self._clock() + timeout_s
        while True:
            left = until - self._clock()
            try:
                return await inbox.next(min(left, stall_s))
            except NoAnswer:
                if left <= stall_s or self._clock() - self.moved_at > stall_s:
                    raise

    async def ask(self, queries: Sequence[Query], timeout_s: float) -> list[LookupResult]:
        """What the peer has of these. Raises PeerLost, PeerRefused."""
        with self.request() as (rid, inbox):
            if not self.send(Ask(rid, list(queries))):
                raise PeerLost("the peer takes nothing")
            answer = await inbox.expect(Answer, timeout_s)
        if len(answer.results) != len(queries):
            raise PeerLost(f"{len(answer.results)} answers to {len(queries)} queries")
        return answer.results

    async def clear(self, scope: ClearScope, timeout_s: float) -> int:
        """Have the peer clear; how many chunks its memory lost. Raises PeerLost, PeerRefused."""
        with self.request() as (rid, inbox):
            if not self.send(Clear(rid, scope)):
                raise PeerLost("the peer takes nothing")
            return (await inbox.expect(Cleared, timeout_s)).chunks

    def fail(self, why: str) -> None:
        """Nothing more comes: whoever waits is told."""
        if self.failed.done():
            return
        self.failed.set_result(why)
        if not self._hello.done():
            self._hello.set_exception(PeerLost(why))
            self._hello.exception()  # somebody may be waiting for it, or nobody
        for inbox in self._inboxes.values():
            while inbox.waiting.full():
                inbox.waiting.get_nowait()
            inbox.put(PeerLost(why))

    def close(self) -> None:
        """Close the socket. What was said just before is still sent, if it can be at once."""
        if self.open:
            self.send(Bye())
        self.fail("closed")
        self._socket.close()
