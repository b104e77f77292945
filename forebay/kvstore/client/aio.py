"""The async client. Replies may come in any order; each call waits for its own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from forebay.errors import ForebayError, ProtocolError, StoreUnavailable
from forebay.ipc.framing import FrameBuffer
from forebay.ipc.sockets import connect, receive_with_descriptors, socket_path
from forebay.kvstore.client.promises import PromiseCalls
from forebay.kvstore.client.session import Session, expect
from forebay.kvstore.identity import Namespace
from forebay.kvstore.layout import Shard
from forebay.kvstore.protocol import (
    REPLIES,
    REQUESTS,
    Abort,
    Aside,
    Check,
    Checked,
    ChunkRead,
    Commit,
    Committed,
    Damaged,
    Explain,
    Explained,
    Extents,
    Fetched,
    Foreseen,
    Found,
    GetExtents,
    GetStats,
    Held,
    List,
    Lookup,
    NewChunk,
    Registered,
    Reply,
    Reserve,
    Reserved,
    Rows,
    Slot,
    Stats,
    Welcome,
    WhatIf,
    Written,
)

R = TypeVar("R")
SEND_BYTES_MAX = 64 << 20
RECEIVE_BYTES = 1 << 18


class AsyncStoreClient(PromiseCalls):
    """A connection to a store, used from one event loop.

    Any call on a lost connection raises StoreUnavailable; `connect` may then be called again. After that
    all leases and reservations from before are gone, and views into the old mapping must not be written.
    Clients that are given the same `group` (16 bytes or so that nobody else guesses) share leases. One that is given a
    `tenant` ("" too) can only list, explain and count what that tenant has, and maps no memory. One without `maps`
    maps it only when it is first promised a chunk: for questions, since a large pool takes a while.
    """

    def __init__(
        self,
        address: str,
        *,
        kind: str = "worker",
        timeout_s: float = 5.0,
        group: bytes = b"",
        tenant: str | None = None,
        maps: bool = True,
    ) -> None:
        self._path = socket_path(address)
        self._maps = maps and tenant is None
        self._timeout_s = timeout_s
        self._session = Session(kind, group, tenant)
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, asyncio.Future[tuple[Reply, list[int]]]] = {}
        self._descriptors: deque[int] = deque()
        self._buffer: FrameBuffer[Reply] = FrameBuffer(REPLIES)
        self._unsent = bytearray()

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def boot(self) -> bytes:
        """Boot id of the store that was last connected to."""
        return self._session.boot

    @property
    def extents(self) -> Collection[int]:
        """Ids of the extents that are mapped."""
        return self._session.pool.views.keys()

    def extent(self, extent: int) -> memoryview:
        """All bytes of a mapped extent, which stay mapped as long as somebody has this."""
        return self._session.pool.views[extent]

    async def connect(self) -> None:
        """Connect, be welcomed, and map the pool. Raises StoreUnavailable or ProtocolError."""
        assert self._socket is None, "already connected"
        self._loop = asyncio.get_running_loop()
        connection = self._dial()
        connection.setblocking(False)
        self._socket = connection
        self._buffer, self._unsent = FrameBuffer(REPLIES), bytearray()
        self._loop.add_reader(connection.fileno(), self._readable)
        try:
            hello = self._session.hello()
            welcome, descriptors = await asyncio.wait_for(self._ask(hello.rid, hello), self._timeout_s)
            self._session.welcome(expect(welcome, Welcome), descriptors)
            if self._maps:
                await self.map_extents()
        except TimeoutError as error:
            await self.close()
            raise StoreUnavailable(f"the store on {self._path} doesn't answer; is it hung?") from error
        except BaseException:
            await self.close()
            raise

    async def map_extents(self) -> None:
        """Map the extents that this client doesn't have yet. Page tables are filled on another thread."""
        pool, after, more = self._session.pool, 0, True
        after = max(pool.views, default=-1) + 1
        while more:
            rid = self._session.rid()
            reply, descriptors = await self._ask(rid, GetExtents(rid=rid, after=after))
            extents = expect(reply, Extents)
            left = deque(zip(extents.extents, descriptors, strict=True))
            try:
                while left:
                    extent, descriptor = left.popleft()
                    await asyncio.to_thread(pool.add, extent, descriptor)
                    after = extent + 1
            finally:
                for _, descriptor in left:
                    os.close(descriptor)
            more = extents.more

    async def close(self) -> None:
        """End the connection; the store takes back what it had lent."""
        self._lost(StoreUnavailable("the connection to the store was closed"))
        self._session.forget_pool()

    async def register(self, namespace: Namespace, label: str = "", *, shard: Shard | None = None) -> bytes:
        """Make a namespace known; returns its id. Raises RequestRefused if it can't be served, or not to this rank."""
        request = self._session.register(namespace, label, shard)
        return (await self._call(request.rid, request, Registered)).namespace

    async def lookup(
        self,
        namespace_id: bytes,
        root: bytes,
        tokens: bytes,
        keys: bytes,
        *,
        limit: int,
        deadline_ms: int,
        extra: bytes = b"",
        lease_ms: int = 0,
        tenant: str = "",
    ) -> Found:
        """Find and pin the longest prefix of `tokens` (u32 LE) that the store can serve.

        `keys` are `identity.chunk_keys` of the tokens, which are sent only as far as the answer depends on them. The
        pins end with `release`, after `lease_ms` (0: what is usual) at the latest. `tenant` is for whom.
        """
        begin = self._session.last_chunk(namespace_id, len(tokens) // 4)
        while True:
            rid = self._session.rid()
            message = Lookup(
                rid=rid, namespace=namespace_id, root=root, tokens=tokens[4 * begin :], keys=keys, limit=limit,
                deadline_ms=deadline_ms, extra=extra, lease_ms=lease_ms, tenant=tenant, tokens_from=begin,
            )  # fmt: skip
            found = await self._call(rid, message, Found)
            if not 0 <= found.wants < begin:
                break
            begin = found.wants
        await self._mapped(found.lease, found.chunks)
        return found

    async def reserve(
        self,
        namespace_id: bytes,
        tenant: str,
        chunks: Sequence[NewChunk],
        *,
        retain_s: float = 0.0,
        writers: int = 1,
        aside: int = 0,
    ) -> Reserved:
        """Ask for room for chunks, parents first; with `retain_s` they are kept so long for their tenant. It is taken
        from what was set `aside` under that lease, if it fits.

        With several `writers` so many clients of this one's group ask for the same chunks, get the same room, and each
        writes its part. Who is told `to_hash` by `commit` hashes the whole and commits again.
        """
        rid = self._session.rid()
        message = Reserve(
            rid=rid, namespace=namespace_id, tenant=tenant, chunks=list(chunks), retain_s=retain_s, writers=writers,
            aside=aside,
        )  # fmt: skip
        reserved = await self._call(rid, message, Reserved)
        known = self._session.pool.views
        if any(slot.generation and slot.extent not in known for slot in reserved.slots):
            await self.map_extents()
        return reserved

    async def commit(self, chunks: Sequence[Written]) -> Committed:
        """Make written chunks visible; without checksums, tell that this client's part of a shared one is written."""
        rid = self._session.rid()
        return await self._call(rid, Commit(rid=rid, chunks=list(chunks)), Committed)

    def abort(self, reservations: Sequence[int]) -> None:
        """Give reservations back unwritten."""
        self._tell(Abort(reservations=list(reservations)))

    def damaged(self, chunks: Sequence[tuple[int, bytes]]) -> None:
        """Report (group, key) of chunks whose bytes don't match their checksums."""
        self._tell(Damaged(chunks=list(chunks)))

    def payload(self, chunk: ChunkRead) -> memoryview:
        """Whole payload of a pinned chunk, in the mapped pool. Valid until its lease is released."""
        return self._session.payload(chunk)

    def checksums(self, chunk: ChunkRead) -> bytes:
        """One xxh3_64 (u64 LE) a granule of a pinned chunk. Raises CorruptChunk if its header isn't right."""
        return self._session.pool.checksums(chunk)

    def room(self, slot: Slot, length: int) -> memoryview:
        """Writable payload of a reserved slot. Valid until commit or abort."""
        return self._session.pool.room(slot, length)

    def intact(self, chunk: ChunkRead) -> bool:
        """Ask after the copy: is the slot still of the generation that was promised?"""
        return self._session.pool.intact(chunk)

    def witness(self, chunk: ChunkRead) -> Callable[[], bool]:
        """`intact` as a question that can still be asked after this connection has ended, while `payload` is kept."""
        return self._session.pool.witness(chunk)

    async def stats(self) -> Stats:
        """Present figures."""
        rid = self._session.rid()
        return await self._call(rid, GetStats(rid=rid), Stats)

    async def what_if(self, budget: int) -> Foreseen:
        """What each tenant's hit rate would be if the pool had `budget` bytes."""
        rid = self._session.rid()
        return await self._call(rid, WhatIf(rid=rid, budget=budget), Foreseen)

    async def list_chunks(self, *, cursor: int = 0, limit: int = 500, namespace: bytes = b"") -> Rows:
        """One page of what is held."""
        rid = self._session.rid()
        return await self._call(rid, List(rid=rid, cursor=cursor, limit=limit, namespace=namespace), Rows)

    async def explain(self, namespace_id: bytes, root: bytes, tokens: bytes, extra: bytes = b"") -> Explained:
        """Why a prompt's prefix ends where it does."""
        rid = self._session.rid()
        message = Explain(rid=rid, namespace=namespace_id, root=root, tokens=tokens, extra=extra)
        return await self._call(rid, message, Explained)

    async def check(self, *, repair: bool = False) -> Checked:
        """Verify every chunk of the pool."""
        rid = self._session.rid()
        return await self._call(rid, Check(rid=rid, repair=repair), Checked)

    # --- the I/O line ----------------------------------------------------------------------------------

    def _dial(self) -> socket.socket:
        """A connected socket; overridden where there is another transport."""
        return connect(self._path, self._timeout_s)

    async def _call(self, rid: int, message: object, kind: type[R]) -> R:
        reply, _ = await self._ask(rid, message)
        return expect(reply, kind)

    async def _ask(self, rid: int, message: object) -> tuple[Reply, list[int]]:
        assert self._loop is not None or self._socket is None
        if self._socket is None or self._loop is None:
            raise StoreUnavailable(f"not connected to the store on {self._path}")
        answer: asyncio.Future[tuple[Reply, list[int]]] = self._loop.create_future()
        self._waiting[rid] = answer
        try:
            self._send(REQUESTS.encode(message))
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._unwanted(*answer.result())
            raise
        finally:
            self._waiting.pop(rid, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen: a failed send has raised already

    def _tell(self, message: object) -> None:
        """Send what has no answer. On a connection that is lost, or found to be, it has no object any more."""
        if self._socket is not None:
            with suppress(StoreUnavailable):
                self._send(REQUESTS.encode(message))

    def _send(self, frame: bytes) -> None:
        if self._socket is None or self._loop is None:
            raise StoreUnavailable(f"not connected to the store on {self._path}")
        if len(self._unsent) + len(frame) > SEND_BYTES_MAX:
            self._lost(StoreUnavailable("the store has stopped reading"))
            raise StoreUnavailable("the store has stopped reading")
        if self._unsent:
            self._unsent += frame
            return
        sent = self._try_send(frame)
        if sent < len(frame) and self._socket is not None:
            self._unsent += frame[sent:]
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def _try_send(self, data: bytes | bytearray) -> int:
        assert self._socket is not None
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._lost(StoreUnavailable(f"the store on {self._path} is gone ({error.strerror})"))
            raise StoreUnavailable(f"the store on {self._path} is gone ({error.strerror})") from error

    def _writable(self) -> None:
        try:
            del self._unsent[: self._try_send(self._unsent)]
        except StoreUnavailable:
            return  # every waiting call has been told
        if not self._unsent and self._loop is not None and self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data, descriptors = receive_with_descriptors(self._socket, RECEIVE_BYTES)
        except BlockingIOError:
            return
        except (OSError, ForebayError) as error:
            self._lost(StoreUnavailable(f"the store on {self._path} is gone ({error})"))
            return
        self._descriptors.extend(descriptors)
        if not data:
            self._lost(StoreUnavailable(f"the store on {self._path} closed the connection"))
            return
        try:
            for reply in self._buffer.feed(data):
                self._answer(reply)
        except ProtocolError as error:
            self._lost(error)

    def _answer(self, reply: Reply) -> None:
        expected = 1 if isinstance(reply, Welcome) else len(reply.extents) if isinstance(reply, Extents) else 0
        if len(self._descriptors) < expected:
            raise ProtocolError("the store announced descriptors that did not come")
        descriptors = [self._descriptors.popleft() for _ in range(expected)]
        waiting = self._waiting.get(reply.rid)
        if waiting is not None and not waiting.done():
            waiting.set_result((reply, descriptors))
            return
        self._unwanted(reply, descriptors)

    def _unwanted(self, reply: Reply, descriptors: Sequence[int]) -> None:
        """Whoever asked has been cancelled: nobody else would let go of what the answer promises, or close what came
        with it."""
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(reply, Found | Fetched | Held | Aside) and reply.lease:
            self.release([reply.lease])

    def _lost(self, error: ForebayError) -> None:
        connection, self._socket = self._socket, None
        if connection is None or self._loop is None:
            return
        self._loop.remove_reader(connection.fileno())
        self._loop.remove_writer(connection.fileno())
        connection.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
