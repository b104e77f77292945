"""Index keys of a prefix that only tiers have, of a request that is about to begin with it.

They are a group of their own, so they come without the rows: through ordinary room of the pool, a few chunks at a time,
onto the device. Rows stay in their tiers until they are asked for (`rows.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.protocol import ChunkRead, Fetched
from forebay.workers.moves import Pull, Pulled
from forebay.workers.prefix import GroupShape, missing_runs, open_unit
from forebay.workers.reading import Copy, Reading

INDEX_CHUNKS = 32
"""So many chunks of index keys of each group are in host memory at a time on their way to the device."""

GRACE_S = 1.0
"""How much longer than its deadline an answer may take before its store counts as hung."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """`hit` tokens of a prefix are on the device but for their rows: `placed[g]` says which spare block got which unit,
    `sources` which tier had to bring a unit, where one had."""

    hit: int
    placed: tuple[dict[int, int], ...]
    sources: Mapping[int, str]


class Fetcher:
    """Serves from one loop."""

    def __init__(self, client: AsyncStoreClient, shapes: Sequence[GroupShape], reading: Reading) -> None:
        self._client, self._shapes, self._reading = client, tuple(shapes), reading
        self._size = self._shapes[0].chunk_tokens

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
        fetched = await fetch_places(self._client, namespace_id, pull, reach, self._size, wanted, deadline_ms / 1000)
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


async def fetch_places(
    client: AsyncStoreClient, namespace_id: bytes, pull: Pull, limit: int, size: int, wanted: Sequence[tuple[int, int]],
    seconds: float | None, aside: int = 0,
) -> Fetched:  # fmt: skip
    """What is there of a prompt's places, which are of `size` tokens: tiers have so many `seconds`, None if they aren't
    to be asked. Raises StoreError and TimeoutError."""
    begin = min(position for _, position in wanted) * size
    deadline_ms = 0 if seconds is None else max(1, int(seconds * 1000))
    async with asyncio.timeout((seconds or 0.0) + GRACE_S):
        fetched = await client.fetch(
            namespace_id, pull.root, pull.tokens[4 * begin :], pull.keys, limit=limit, wanted=wanted,
            deadline_ms=deadline_ms, tenant=pull.tenant, tokens_from=begin, aside=aside,
        )  # fmt: skip
    if pull.retain_s > 0 and fetched.chunks:
        chunks = [(chunk.group, chunk.key) for chunk in fetched.chunks]
        client.touch_soon(chunks, tenant=pull.tenant, retain_s=pull.retain_s)
    return fetched
