"""Chunks that only tiers have, of a request that has begun or is about to: its index keys, and rows that it has chosen.

Index keys are a group of their own, so they come without the rows: through ordinary room of the pool, a few chunks at a
time, onto the device. Rows stay in their tiers until they are asked for; then a chunk of them is promoted, into the
room that was set aside for it, verified, and pinned for as long as the request reads it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forebay.errors import StoreError
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.protocol import ChunkRead, Fetched
from forebay.workers.counters import Counters
from forebay.workers.hot.keeping import host_chunk, verified
from forebay.workers.hot.mirror import HostChunk
from forebay.workers.moves import HOST, AskRows, Pull, Pulled, RowsCame
from forebay.workers.prefix import GroupShape, missing_runs, open_unit
from forebay.workers.reading import Copy, Reading

INDEX_CHUNKS = 32
"""So many chunks of index keys of each group are in host memory at a time on their way to the device."""

ROW_CHUNKS = 64
"""So many chunks of rows are asked for with one message."""

APART = 16
"""The same where each has a lease of its own."""

ATTEMPTS_MAX, PAUSE_S = 5, 0.05
"""So often in a row nothing comes, with such pauses and longer ones, before what is asked for counts as lost, even if
its deadline is later: of a damaged chunk there may be another copy, a tier that has lost one won't find it. Where it
may be room that is lacking, only the deadline counts."""

GRACE_S = 1.0
"""How much longer than its deadline an answer may take before its store counts as hung."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Indexed:
    """`hit` tokens of a prefix are on the device but for their rows: `placed[g]` says which spare block got which unit,
    `sources` which tier had to bring a unit, where one had."""

    hit: int
    placed: tuple[dict[int, int], ...]
    sources: Mapping[int, str]


class Fetcher:
    """Serves from one loop. `deliver` tells the engine of rows that have come."""

    def __init__(
        self,
        client: AsyncStoreClient,
        shapes: Sequence[GroupShape],
        reading: Reading,
        counters: Counters,
        deliver: Callable[[RowsCame], None],
    ) -> None:
        self._client, self._shapes, self._reading = client, tuple(shapes), reading
        self._counters, self._deliver = counters, deliver
        self._size = self._shapes[0].chunk_tokens

    # --- index keys ------------------------------------------------------------------------------------

    async def index(self, namespace_id: bytes, pull: Pull, front: Pulled, reach: int, deadline_ms: int) -> Indexed:
        """Load the groups that aren't read in place from where the `front` ends, as far as they come, but not beyond
        `reach`; and of the others the chunk that this ends inside of. Tiers have `deadline_ms` for each few chunks.
        Raises StoreError and TimeoutError."""
        targets: list[dict[int, int]] = []
        for group, (shape, room) in enumerate(zip(self._shapes, pull.rooms, strict=True)):
            spare, first = room.spare[len(front.placed[group]) :], front.hit // MATCH_UNIT
            if group in pull.hosted:
                first = max(first, open_unit(shape, len(spare), reach))
            units = [unit for run in missing_runs(room.have, first, reach // MATCH_UNIT) for unit in run]
            targets.append(dict(zip(units, spare, strict=False)))
            if len(targets[group]) < len(units):
                reach = units[len(targets[group])] * MATCH_UNIT
        hit, sources = front.hit, dict[int, str]()
        while hit < reach:
            stop = min(reach, (hit // self._size + INDEX_CHUNKS) * self._size)
            came = await self._index_some(namespace_id, pull, (hit, stop, reach), targets, deadline_ms, sources)
            hit = max(hit, came)
            if came < stop:
                break
        placed = tuple({u: b for u, b in units.items() if u < hit // MATCH_UNIT} for units in targets)
        return Indexed(hit, placed, sources)

    async def _index_some(
        self, namespace_id: bytes, pull: Pull, bounds: tuple[int, int, int], targets: Sequence[Mapping[int, int]],
        deadline_ms: int, sources: dict[int, str],
    ) -> int:  # fmt: skip
        """Tokens [start, stop) of a prefix that reaches further; how far that has come."""
        start, stop, reach = bounds
        positions = range(start // self._size, -(-stop // self._size))
        wanted = [
            (group, position)
            for position in positions
            for group, mine in enumerate(targets)
            if any(unit in mine for unit in self._units(position, start, stop))
        ]
        if not wanted:
            return stop
        fetched = await self._fetch(namespace_id, pull, reach, wanted, deadline_ms / 1000)
        there = {(chunk.group, chunk.start // self._size): chunk for chunk in fetched.chunks}
        try:
            for position in positions:
                end = min(stop, (position + 1) * self._size)
                for group, blocks in enumerate(targets):
                    chunk, units = there.get((group, position)), self._units(position, start, stop)
                    mine = [unit for unit in units if unit in blocks]
                    if mine and (chunk is None or not await self._copy(chunk, mine, end, blocks)):
                        return max(start, position * self._size)
                    if mine and chunk is not None and chunk.promoted:
                        sources.update(dict.fromkeys(mine, chunk.promoted))
            return stop
        finally:
            if fetched.lease:
                self._client.release([fetched.lease])

    def _units(self, position: int, start: int, stop: int) -> range:
        """Of one chunk position, those in tokens [start, stop)."""
        first = max(start, position * self._size)
        return range(first // MATCH_UNIT, min(stop, (position + 1) * self._size) // MATCH_UNIT)

    async def _copy(self, chunk: ChunkRead, units: Sequence[int], end: int, blocks: Mapping[int, int]) -> bool:
        """Copy units of a chunk, and verify them; False if it is too short or damaged."""
        if chunk.start + chunk.tokens < end:
            return False
        runs: list[range] = []
        for unit in units:  # what the device has anyway leaves gaps
            joins = bool(runs) and runs[-1].stop == unit
            runs.append(range(runs.pop().start if joins else unit, unit + 1))
        first = chunk.start // MATCH_UNIT
        copies = [Copy(chunk, run.start - first, run, tuple(blocks[unit] for unit in run)) for run in runs]
        return not await self._reading.copy(copies)

    # --- rows ------------------------------------------------------------------------------------------

    async def bring(self, namespace_id: bytes, ask: AskRows) -> None:
        """Tell of rows as they come; returns when all have, or nothing more will. Raises StoreError and TimeoutError:
        nothing more will, either."""
        loop = asyncio.get_running_loop()
        end, left, fruitless = loop.time() + ask.deadline_s, list(ask.positions), 0
        while left and (ask.apart or fruitless < ATTEMPTS_MAX) and loop.time() < end:
            came = await self._rows(namespace_id, ask, left, end - loop.time())
            left = [position for position in left if position not in came]
            fruitless = 0 if came else fruitless + 1
            if came:
                self._deliver(RowsCame(ask, tuple(came.values())))
            else:
                await asyncio.sleep(min(PAUSE_S * min(fruitless, ATTEMPTS_MAX), max(0.0, end - loop.time())))

    async def _rows(
        self, namespace_id: bytes, ask: AskRows, positions: Sequence[int], seconds: float
    ) -> dict[int, HostChunk]:
        """Some of the first of them, by position."""
        if not ask.apart:
            return await self._rows_together(namespace_id, ask, positions[:ROW_CHUNKS], seconds)
        each = [self._rows_together(namespace_id, ask, [position], seconds) for position in positions[:APART]]
        came: dict[int, HostChunk] = {}
        for answer in await asyncio.gather(*each, return_exceptions=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, StoreError | TimeoutError):
                    raise answer
                log.debug("rows didn't come: %s", answer)
            else:
                came |= answer
        return came

    async def _rows_together(
        self, namespace_id: bytes, ask: AskRows, positions: Sequence[int], seconds: float
    ) -> dict[int, HostChunk]:
        """The same under one lease."""
        (group,) = ask.pull.hosted
        wanted = [(group, position) for position in positions]
        fetched = await self._fetch(namespace_id, ask.pull, ask.hit, wanted, seconds, ask.aside)
        good: list[ChunkRead] = []
        try:
            for chunk in fetched.chunks:
                if await self._usable(chunk, ask.hit):
                    good.append(chunk)
        finally:
            if fetched.lease and not good:
                self._client.release([fetched.lease])
        return {
            chunk.start // self._size: host_chunk(self._client, chunk, fetched.lease, len(good), ask.hit)
            for chunk in good
        }

    async def _usable(self, chunk: ChunkRead, hit: int) -> bool:
        """Is it long enough, and its bytes what its header says?"""
        if chunk.start + chunk.tokens < min(hit, chunk.start + self._size):
            return False
        if not await verified(self._client, chunk, self._shapes[chunk.group].geometry.granule_bytes):
            self._counters.add("loads.corrupt")
            return False
        self._counters.add(f"hosted.{chunk.promoted or HOST}.chunks")
        return True

    async def _fetch(
        self, namespace_id: bytes, pull: Pull, limit: int, wanted: Sequence[tuple[int, int]], seconds: float,
        aside: int = 0,
    ) -> Fetched:  # fmt: skip
        begin = min(position for _, position in wanted) * self._size
        async with asyncio.timeout(seconds + GRACE_S):
            fetched = await self._client.fetch(
                namespace_id, pull.root, pull.tokens[4 * begin :], pull.keys, limit=limit, wanted=wanted,
                deadline_ms=max(1, int(seconds * 1000)), tenant=pull.tenant, tokens_from=begin, aside=aside,
            )  # fmt: skip
        if pull.retain_s > 0 and fetched.chunks:
            chunks = [(chunk.group, chunk.key) for chunk in fetched.chunks]
            self._client.touch_soon(chunks, tenant=pull.tenant, retain_s=pull.retain_s)
        return fetched
