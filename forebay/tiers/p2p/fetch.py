"""One chunk from one peer into a slot: over the control connection, over a stream, or by NIXL.

Each way ends before its function returns, or raises Unfenced: nothing is written into the slot afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from concurrent.futures import Executor
from dataclasses import dataclass

from forebay.errors import CorruptChunk
from forebay.kvstore.header import ChunkHeader
from forebay.tiers.base import LoadJob
from forebay.tiers.chunks import verify_payload
from forebay.tiers.p2p.checks import check_wanted, checked_header
from forebay.tiers.p2p.errors import Damaged, NotThere, PeerLost, PeerRefused, TooLate
from forebay.tiers.p2p.link import Inbox, Link
from forebay.tiers.p2p.nixl import NixlAgent
from forebay.tiers.p2p.streams import Streams
from forebay.tiers.p2p.verifier import Verifier
from forebay.tiers.p2p.wire import PIECE_BYTES, WINDOW, Bytes, Close, NotOpened, Open, Opened, Read


@dataclass(frozen=True, slots=True)
class Wanted:
    """A load: where its payload goes, and until when (the loop's time)."""

    job: LoadJob
    memory: memoryview
    due: float


@dataclass(frozen=True, slots=True)
class Ways:
    """How a peer's bytes may come. `streams` and `remote` (its NIXL agent) are None where that way isn't open."""

    link: Link
    streams: Streams | None = None
    remote: str | None = None
    remote_epoch: int = -1


@dataclass(frozen=True, slots=True)
class Arrived:
    """A chunk that is in its slot, all of it verified: its header block, its payload's length, which way it came."""

    block: bytes
    length: int
    way: str


@dataclass(frozen=True, slots=True)
class Fetcher:
    """What all fetches share. Verifying, and what blocks, runs on `threads`."""

    threads: Executor
    stall_s: float
    namespaces: Container[bytes] | None
    nixl: NixlAgent | None = None
    window: int = WINDOW

    async def fetch(self, wanted: Wanted, ways: Ways) -> Arrived:
        """Bring the chunk into its slot. Raises NotThere, PeerLost, PeerRefused, TooLate, CorruptChunk, Damaged,
        Unfenced."""
        if ways.streams is not None:
            return await self._by_stream(wanted, ways, ways.streams)
        with ways.link.request() as (rid, inbox):
            opened = await self._open(wanted, ways.link, rid, inbox)
            try:
                header = checked_header(opened.header, opened.length, self.namespaces)
                check_wanted(header, wanted.job.chunk, len(wanted.memory))
                memory = wanted.memory[: opened.length]
                way = "nixl" if await self._by_nixl(wanted, ways, opened, memory) else "frames"
                if way == "frames":
                    await self._by_frames(wanted, ways.link, rid, inbox, memory)
            finally:
                ways.link.send(Close(rid))
        await asyncio.get_running_loop().run_in_executor(self.threads, _verify, header, memory)
        return Arrived(opened.header, opened.length, way)

    async def _open(self, wanted: Wanted, link: Link, rid: int, inbox: Inbox) -> Opened:
        if not link.send(Open(rid, wanted.job.chunk, len(wanted.memory))):
            raise PeerLost("the peer takes nothing")
        message, _ = await link.next(inbox, self._left(wanted), self.stall_s)
        if isinstance(message, NotOpened):
            if message.reason == "busy":
                raise PeerRefused("busy")
            raise NotThere(message.reason)
        if not isinstance(message, Opened):
            raise PeerLost(f"{type(message).__name__} came instead of Opened")
        return message

    @staticmethod
    def _left(wanted: Wanted) -> float:
        left = wanted.due - asyncio.get_running_loop().time()
        if left <= 0:
            raise TooLate("the deadline has passed")
        return left

    async def _by_frames(self, wanted: Wanted, link: Link, rid: int, inbox: Inbox, memory: memoryview) -> None:
        """Pieces, the window ahead; each may come once, in order."""
        asked = have = 0
        while have < len(memory):
            while asked < len(memory) and asked - have < self.window * PIECE_BYTES:
                size = min(PIECE_BYTES, len(memory) - asked)
                if not link.send(Read(rid, asked, size)):
                    break
                asked += size
            message, piece = await link.next(inbox, self._left(wanted), self.stall_s)
            size = min(PIECE_BYTES, len(memory) - have)
            if not isinstance(message, Bytes) or piece is None or (message.offset, len(piece)) != (have, size):
                raise PeerLost("a piece came that wasn't asked for")
            memory[have : have + size] = piece
            have += size

    async def _by_stream(self, wanted: Wanted, ways: Ways, streams: Streams) -> Arrived:
        return await asyncio.get_running_loop().run_in_executor(self.threads, self.by_stream, wanted, ways, streams)

    def by_stream(self, wanted: Wanted, ways: Ways, streams: Streams) -> Arrived:
        """As `fetch`, on the calling thread; blocks."""
        if self.nixl is not None and ways.remote is not None and self.nixl.attached(wanted.job.extent):
            arrived = self._placed(wanted, ways.remote, ways.remote_epoch, self.nixl, streams)
            if arrived is not None:
                return arrived

        def check(block: bytes, length: int) -> Callable[[int], None]:
            header = checked_header(block, length, self.namespaces)
            check_wanted(header, wanted.job.chunk, len(wanted.memory))
            return Verifier(header, wanted.memory[:length]).came

        got = streams.fetch(wanted.job.chunk, wanted.memory, wanted.due, self.stall_s, check)
        return Arrived(got.block, got.length, streams.way)

    def _placed(
        self, wanted: Wanted, remote: str, epoch: int, nixl: NixlAgent, streams: Streams
    ) -> Arrived | None:
        """Ask over a stream where the chunk lies, and read it by NIXL. None if it is out of reach."""
        placed = streams.open(wanted.job.chunk, len(wanted.memory), wanted.due, self.stall_s)
        whole = False
        try:
            if not placed.address or placed.epoch != epoch:
                return None
            header = checked_header(placed.block, placed.length, self.namespaces)
            check_wanted(header, wanted.job.chunk, len(wanted.memory))
            memory = wanted.memory[: placed.length]
            self._read(nixl, remote, placed.address, header, memory, wanted.due)
            whole = True
        finally:
            if whole:
                placed.done()
            else:
                placed.drop()
        return Arrived(placed.block, placed.length, "nixl")

    def _read(
        self, nixl: NixlAgent, remote: str, address: int, header: ChunkHeader, memory: memoryview, due: float
    ) -> None:
        nixl.read_soon(remote, address, memory, due, self.stall_s).result()
        _verify(header, memory)  # on this thread, while the agent's reads the next

    async def _by_nixl(self, wanted: Wanted, ways: Ways, opened: Opened, memory: memoryview) -> bool:
        """Read by NIXL; False where that way isn't open."""
        nixl = self.nixl
        if nixl is None or ways.remote is None or not opened.address or opened.nixl_epoch != ways.remote_epoch:
            return False
        if not nixl.attached(wanted.job.extent):
            return False
        await asyncio.wrap_future(
            nixl.read_soon(ways.remote, opened.address, memory, wanted.due, self.stall_s)
        )
        return True


def _verify(header: ChunkHeader, payload: memoryview) -> None:
    try:
        verify_payload(header, payload)
    except CorruptChunk as error:
        raise Damaged(str(error)) from error
