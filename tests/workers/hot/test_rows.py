"""Rows on their way: what an answer pins is told of, or let go of, whenever whoever asked is cancelled."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from forebay.kvstore.identity import GroupGeometry
from forebay.kvstore.protocol import ChunkRead, Fetched
from forebay.workers.counters import Counters
from forebay.workers.hot import rows
from forebay.workers.hot.rows import TOGETHER, RowFetcher
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


class Hanging:
    """`hung` positions never come; all others at once, as a look shows."""

    def __init__(self, hung: set[int]) -> None:
        self.hung, self.lease = hung, 0

    async def fetch(self, *args: Any, wanted: Sequence[tuple[int, int]], deadline_ms: int, **named: Any) -> Fetched:
        there = [at for _, at in wanted if at not in self.hung]
        if deadline_ms and len(there) < len(wanted):
            await asyncio.Event().wait()
        self.lease += 1
        chunks = [ChunkRead(0, at * CHUNK, CHUNK, 0, 0, 0, 64, 1, bytes([at]) * 32) for at in there]
        return Fetched(rid=0, boot=b"", lease=self.lease, chunks=chunks)

    def release(self, leases: Sequence[int]) -> None:
        """Nothing counts them."""


@pytest.mark.parametrize("hung", [1, TOGETHER // 2 + 2])
def test_those_that_hang_hold_up_nobody_who_is_asked_for_later(monkeypatch: pytest.MonkeyPatch, hung: int) -> None:
    """More chunks than one message asks for."""
    count = TOGETHER + 40
    ask = dataclasses.replace(ASK, hit=count * CHUNK, positions=tuple(range(count)))

    async def usable(fetcher: RowFetcher, chunk: ChunkRead, hit: int) -> bool:
        return True

    monkeypatch.setattr(RowFetcher, "_usable", usable)
    monkeypatch.setattr(rows, "host_chunk", lambda client, chunk, lease, shares, hit: chunk)

    async def run() -> None:
        told = list[RowsCame]()
        fetcher = RowFetcher(Hanging(set(range(hung))), [SHAPE], Counters(), told.append)  # type: ignore[arg-type]
        bringing = asyncio.create_task(fetcher.bring(b"n" * 32, ask))
        while sum(len(came.hosted) for came in told) < count - hung:
            assert not bringing.done()
            await asyncio.sleep(0.01)
        bringing.cancel()
        await asyncio.gather(bringing, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 8))


def test_an_answer_that_comes_in_the_moment_of_a_cancellation_is_let_go_of() -> None:
    async def run() -> None:
        client, told = Client(), list[RowsCame]()
        fetcher = RowFetcher(client, [SHAPE], Counters(), told.append)  # type: ignore[arg-type]
        bringing = asyncio.create_task(fetcher.bring(b"n" * 32, ASK))
        await client.looks.wait()
        client.answer.set()
        await asyncio.sleep(0.01)
        bringing.cancel()
        await asyncio.gather(bringing, return_exceptions=True)
        assert client.released == [LEASE] and not told

    asyncio.run(asyncio.wait_for(run(), 20))
