"""Rows that a request has chosen, and that only tiers have: chunks of them are promoted, into the room that was set
aside for them, verified, and pinned for as long as the request reads them.

One message asks for many, whose answer comes when all have been brought or time is up. So meanwhile it is looked at
what has come: a chunk that hangs holds up none of the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.errors import RequestRefused
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.protocol import ChunkRead, Fetched
from forebay.workers.counters import Counters
from forebay.workers.hot.fetching import GRACE_S, fetch_places
from forebay.workers.hot.keeping import host_chunk, verified
from forebay.workers.hot.wanted import Wanted
from forebay.workers.moves import HOST, AskRows, RowsCame
from forebay.workers.prefix import GroupShape

TOGETHER = 64
"""So many chunks of one ask are under way at a time."""

APART = 16
"""The same where each has a lease, and so a message, of its own."""

LOOK_S, LOOK_MAX_S = 0.25, 4.0
"""When it is looked for the first time at what has come of a message, and how seldom it gets to be."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One ask, until when there is time for it, and what is left of it."""

    namespace_id: bytes
    ask: AskRows
    end: float
    left: Wanted


class RowFetcher:
    """Serves from one loop. `deliver` tells the engine of rows that have come, and of those that never will."""

    def __init__(
        self,
        client: AsyncStoreClient,
        shapes: Sequence[GroupShape],
        counters: Counters,
        deliver: Callable[[RowsCame], None],
    ) -> None:
        self._client, self._shapes, self._counters, self._deliver = client, tuple(shapes), counters, deliver
        self._size = self._shapes[0].chunk_tokens

    async def bring(self, namespace_id: bytes, ask: AskRows) -> None:
        """Tell of rows as they come; returns when all have or are lost, or the deadline has passed. Raises StoreError
        and TimeoutError: nothing more will come, either. When it is cancelled nothing stays pinned that it hasn't
        told of."""
        left = Wanted(ask.positions, APART if ask.apart else TOGETHER, apart=ask.apart)
        asked = _Asked(namespace_id, ask, asyncio.get_running_loop().time() + ask.deadline_s, left)
        running: dict[asyncio.Task[Sequence[int]], list[int]] = {}
        try:
            while await self._go_on(asked, running):
                pass
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _go_on(self, asked: _Asked, running: dict[asyncio.Task[Sequence[int]], list[int]]) -> bool:
        """Send what may be sent, wait for what comes first; whether there is more to do."""
        loop, left = asyncio.get_running_loop(), asked.left
        now = loop.time()
        while now < asked.end and (positions := left.take(now)):
            running[loop.create_task(self._message(asked, positions))] = positions
        if now >= asked.end + GRACE_S or (not running and (left.over or now >= asked.end)):
            return False
        until = asked.end + (GRACE_S if now >= asked.end else 0.0)
        seconds = min(until, left.next_at(now) or until) - now
        if left.ready(now) and now < asked.end:
            seconds = min(seconds, LOOK_S)  # looks make room as well, and don't say so
        if not running:
            await asyncio.sleep(seconds)
            return True
        done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            positions = running.pop(task)
            if lost := left.ended(positions, task.result(), loop.time()):
                self._deliver(RowsCame(asked.ask, lost=tuple(lost)))
        return True

    async def _message(self, asked: _Asked, positions: Sequence[int]) -> Sequence[int]:
        """Ask for some, and tell of those that come. Returns those that nobody has."""
        loop = asyncio.get_running_loop()
        answer = loop.create_task(self._fetch(asked, positions, asked.end - loop.time()))
        pause = LOOK_S
        try:
            while len(positions) > 1 and not (await asyncio.wait((answer,), timeout=pause))[0]:
                await self._look(asked, positions)
                pause = min(2 * pause, LOOK_MAX_S)
            fetched = await answer
        except BaseException as error:
            self._unwanted(answer)
            if not isinstance(error, RequestRefused):  # busy, say: that passes
                raise
            log.debug("rows weren't brought: %s", error)
            return ()
        await self._take(asked, fetched)
        for chunk in fetched.chunks:  # a look doesn't know where one has come from
            if not asked.left.under_way(chunk.start // self._size):
                self._counters.add(f"hosted.{chunk.promoted or HOST}.chunks")
        return [position for _, position in fetched.gone]

    def _unwanted(self, answer: asyncio.Task[Fetched]) -> None:
        """Nobody waits for it any more. The client lets go of what comes too late; what has come nobody has told of."""
        answer.cancel()
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self._client.release([answer.result().lease])

    async def _look(self, asked: _Asked, positions: Sequence[int]) -> None:
        """Tell of what has come of a message that isn't answered yet."""
        missing = [position for position in positions if asked.left.under_way(position)]
        try:
            if missing:
                await self._take(asked, await self._fetch(asked, missing, None))
        except TimeoutError as error:
            log.debug("the store doesn't say what has come: %s", error)

    async def _fetch(self, asked: _Asked, positions: Sequence[int], seconds: float | None) -> Fetched:
        (group,) = asked.ask.pull.hosted
        wanted = [(group, position) for position in positions]
        return await fetch_places(
            self._client, asked.namespace_id, asked.ask.pull, asked.ask.hit, self._size, wanted, seconds,
            asked.ask.aside,
        )  # fmt: skip

    async def _take(self, asked: _Asked, fetched: Fetched) -> None:
        """Tell of what an answer has pinned and is still wanted; let go of the rest."""
        lease, hit = fetched.lease, asked.ask.hit
        good: list[int] = []
        try:
            for at, chunk in enumerate(fetched.chunks):
                if asked.left.under_way(chunk.start // self._size) and await self._usable(chunk, hit):
                    good.append(at)
            chunks = [fetched.chunks[at] for at in good]
            hosted = tuple(host_chunk(self._client, chunk, lease, len(chunks), hit) for chunk in chunks)
        except BaseException:
            self._client.release([lease])
            raise
        surplus = sorted(set(range(len(fetched.chunks))).difference(good))
        if lease and not good:
            self._client.release([lease])
        elif surplus:
            self._client.release_chunks(lease, surplus)
        if hosted:
            asked.left.came(chunk.start // self._size for chunk in chunks)
            self._deliver(RowsCame(asked.ask, hosted))

    async def _usable(self, chunk: ChunkRead, hit: int) -> bool:
        """Is it long enough, and its bytes what its header says?"""
        if chunk.start + chunk.tokens < min(hit, chunk.start + self._size):
            return False
        if not await verified(self._client, chunk, self._shapes[chunk.group].geometry.granule_bytes):
            self._counters.add("loads.corrupt")
            return False
        return True
