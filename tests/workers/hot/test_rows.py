"""Rows on their way: what an answer pins is told of, or let go of, whenever whoever asked is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from forebay.kvstore.identity import GroupGeometry
from forebay.kvstore.protocol import ChunkRead, Fetched
from forebay.workers.counters import Counters
from forebay.workers.hot.rows import RowFetcher
from forebay.workers.moves import AskRows, GroupRoom, Pull, RowsCame
from forebay.workers.prefix import GroupShape

CHUNK, LEASE = 32, 7
SHAPE = GroupShape(GroupGeometry("full", "full", (0,), 1, 8, "float32"), CHUNK, 1)
PULL = Pull("r", b"r" * 32, b"\0" * 8 * CHUNK, b"", 2 * CHUNK, 0, (GroupRoom((), ()),), hosted=frozenset({0}))
ASK = AskRows("r", 1, PULL, 2 * CHUNK, (0, 1), 0, 30.0, apart=False, number=1)


class Client:
    """Its answer comes while it is looked at what has come already, which hangs."""

    def __init__(self) -> None:
        self.answer, self.looks, self.released = asyncio.Event(), asyncio.Event(), list[int]()

    async def fetch(self, *args: Any, deadline_ms: int, **named: Any) -> Fetched:
        if deadline_ms == 0:
            self.looks.set()
            await asyncio.Event().wait()
        await self.answer.wait()
        chunks = [ChunkRead(0, at * CHUNK, CHUNK, 0, 0, 0, 64, 1, bytes([at]) * 32) for at in (0, 1)]
        return Fetched(rid=0, boot=b"", lease=LEASE, chunks=chunks)

    def release(self, leases: Sequence[int]) -> None:
        self.released += leases


def test_an_answer_that_comes_in_the_moment_of_a_cancellation_is_let_go_of() -> None:
    async def run() -> None:
        client, told = Client(), list[RowsCame]()
        rows = RowFetcher(client, [SHAPE], Counters(), told.append)  # type: ignore[arg-type]
        bringing = asyncio.create_task(rows.bring(b"n" * 32, ASK))
        await client.looks.wait()
        client.answer.set()
        await asyncio.sleep(0.01)
        bringing.cancel()
        await asyncio.gather(bringing, return_exceptions=True)
        assert client.released == [LEASE] and not told

    asyncio.run(asyncio.wait_for(run(), 20))
