"""One pull: look up and pin, copy what the device lacks, verify it, let go.

Whatever is wrong with a chunk makes the hit shorter, never the answer: the chunk is reported and the store is
asked again, which then knows one chunk less.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.errors import CorruptChunk, StoreError, StoreUnavailable
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.layout import needed_from
from forebay.kvstore.protocol import BATCH_ITEMS_MAX, ChunkRead, Found
from forebay.workers.copying import Copier
from forebay.workers.counters import Counters
from forebay.workers.moves import Pull, Pulled
from forebay.workers.prefix import GroupShape

ATTEMPTS_MAX = 3
"""Lookups of one pull, when chunks turn out to be damaged."""

GRACE_S = 1.0
"""How much longer than the store's own deadline a lookup may take before its store counts as hung."""

TURN_S = 0.001
"""A copy gives others their turn after this long."""

HOST = "host"
DEVICE = "device"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """Granules [first, first + len(blocks)) of one pinned chunk, and the blocks that they go into."""

    chunk: ChunkRead
    first: int
    units: range
    blocks: tuple[int, ...]


class Puller:
    """Serves pulls from one loop. Copies run on the loop's thread: a hand-over would cost more than most of
    them take; between chunks others get their turn."""

    def __init__(
        self,
        client: AsyncStoreClient,
        shapes: Sequence[GroupShape],
        copiers: Sequence[Copier],
        deadline_ms: int,
        counters: Counters,
    ) -> None:
        self._client = client
        self._shapes = tuple(shapes)
        self._copiers = tuple(copiers)
        self._deadline_ms = deadline_ms
        self._counters = counters

    async def pull(self, namespace_id: bytes, pull: Pull) -> Pulled:
        """Never raises for what a store may do: a failed pull brings nothing."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline_ms / 1000
        nothing = Pulled(pull.request, 0, tuple({} for _ in self._shapes))
        try:
            for _ in range(ATTEMPTS_MAX):
                left_ms = max(0, int((end - loop.time()) * 1000))
                found = await self._lookup(namespace_id, pull, left_ms)
                self._retain(pull, found)
                try:
                    pulled = await self._copy_found(pull, found)
                finally:
                    if found.lease:  # soon, not now: the request that waits comes first
                        loop.call_soon(self._let_go, found.lease)
                if pulled is not None:
                    return pulled
        except TimeoutError:
            self._counters.add("loads.timeouts")
        except StoreError as error:
            self._counters.add("loads.failed")
            log.debug("a pull failed: %s", error)
        return nothing

    def _retain(self, pull: Pull, found: Found) -> None:
        """What the request goes on from is kept as long as what it adds."""
        if pull.retain_s > 0:
            chunks = [(chunk.group, chunk.key) for chunk in found.chunks]
            for at in range(0, len(chunks), BATCH_ITEMS_MAX):
                some = chunks[at : at + BATCH_ITEMS_MAX]
                self._client.touch_soon(some, tenant=pull.tenant, retain_s=pull.retain_s)

    def _let_go(self, lease: int) -> None:
        try:
            self._client.release([lease])
        except StoreError as error:
            log.debug("a lease ended with its connection: %s", error)

    async def _lookup(self, namespace_id: bytes, pull: Pull, deadline_ms: int) -> Found:
        self._counters.add("lookups")
        async with asyncio.timeout(deadline_ms / 1000 + GRACE_S):
            return await self._client.lookup(
                namespace_id, pull.root, pull.tokens, pull.keys, limit=pull.limit, deadline_ms=deadline_ms,
                tenant=pull.tenant,
            )  # fmt: skip

    async def _copy_found(self, pull: Pull, found: Found) -> Pulled | None:
        """None: something was damaged, ask again."""
        nothing: tuple[dict[int, int], ...] = tuple({} for _ in self._shapes)
        stored = None if found.pending else found.hit
        if found.hit <= pull.device_hit:
            return Pulled(pull.request, 0, nothing, stored=stored)
        copies = plan_copies(self._shapes, pull, found)
        if copies is None:
            self._counters.add("loads.unusable")
            return Pulled(pull.request, 0, nothing, stored=stored)
        damaged = await self._copy(copies)
        if damaged:
            self._counters.add("loads.corrupt", len(damaged))
            self._client.damaged([(chunk.group, chunk.key) for chunk in damaged])
            return None
        placed: tuple[dict[int, int], ...] = tuple({} for _ in self._shapes)
        for copy in copies:
            placed[copy.chunk.group].update(zip(copy.units, copy.blocks, strict=True))
        return Pulled(pull.request, found.hit, placed, sources_of(pull, found.hit, copies), stored=found.hit)

    async def _copy(self, copies: Sequence[Copy]) -> list[ChunkRead]:
        """Carry out copies; returns chunks that are not what they should be, after the first of which it
        stops."""
        turn = time.monotonic()
        for copy in copies:
            chunk, copier = copy.chunk, self._copiers[copy.chunk.group]
            size = copier.granule_bytes
            source = self._client.payload(chunk)[copy.first * size : (copy.first + len(copy.blocks)) * size]
            good = self._load(copier, copy, source)
            # The generation is asked after the bytes were read: a slot that was given away meanwhile
            # has another one, whatever its checksums say.
            if not self._client.intact(chunk):
                raise StoreUnavailable("a pinned slot was given away: the store has restarted")
            if good < len(copy.blocks):
                return [chunk]
            source_name = chunk.promoted or HOST
            self._counters.add(f"loaded.{source_name}.bytes", len(source))
            self._counters.add(f"loaded.{source_name}.chunks")
            if time.monotonic() - turn > TURN_S:
                await asyncio.sleep(0)
                turn = time.monotonic()
                if not self._client.connected:
                    raise StoreUnavailable("the store went away during a copy")
        return []

    def _load(self, copier: Copier, copy: Copy, source: memoryview) -> int:
        """Copy and verify; how many granules are good."""
        try:
            checksums = self._client.checksums(copy.chunk)
        except CorruptChunk:
            return 0
        return copier.load(source, checksums[8 * copy.first : 8 * (copy.first + len(copy.blocks))], copy.blocks)


def plan_copies(shapes: Sequence[GroupShape], pull: Pull, found: Found) -> list[Copy] | None:
    """What to copy where, or None if `found` doesn't cover its own hit or there is no room for it.

    Chunks of one group must not overlap: how much of a chunk the prompt shares is told by the next one's
    start and by the hit alone.
    """
    copies: list[Copy] = []
    last = found.hit // MATCH_UNIT
    for group, (shape, room) in enumerate(zip(shapes, pull.rooms, strict=True)):
        missing = missing_runs(room.have, shape.first_unit(found.hit), last)
        # The open chunk would like more than a query needs; only the latter is a must.
        needed = needed_from(shape.geometry, found.hit) // MATCH_UNIT
        lacking = sum(len(_cut(run, needed, last)) for run in missing)
        used = end = 0
        for chunk in sorted((c for c in found.chunks if c.group == group), key=lambda c: c.start):
            begin = chunk.start // MATCH_UNIT
            if begin < end:
                return None
            end = begin + chunk.tokens // MATCH_UNIT
            for units in filter(None, (_cut(run, begin, end) for run in missing)):
                blocks = room.spare[used : used + len(units)]
                if len(blocks) < len(units):
                    return None
                copies.append(Copy(chunk, units.start - begin, units, blocks))
                used += len(units)
                lacking -= len(_cut(units, needed, last))
        if lacking:
            return None
    return copies


def sources_of(pull: Pull, hit: int, copies: Sequence[Copy]) -> dict[str, int]:
    """Tokens of the hit by where they came from, in all exactly `hit`. A unit that one group has on the
    device and another one doesn't was copied; one that a tier had to bring in any group is that tier's."""
    names = [HOST] * (hit // MATCH_UNIT)
    have = ((units, DEVICE) for room in pull.rooms for units in room.have)
    copied = sorted(((c.units, c.chunk.promoted or HOST) for c in copies), key=lambda item: item[1] != HOST)
    for run, name in (*have, *copied):
        units = _cut(run, 0, len(names))
        names[units.start : units.stop] = [name] * len(units)
    return {name: units * MATCH_UNIT for name, units in sorted(Counter(names).items())}


def missing_runs(have: Sequence[range], first: int, last: int) -> list[range]:
    """What [first, last) lacks, given ascending runs of what is there."""
    missing: list[range] = []
    for run in have:
        if first < min(run.start, last):
            missing.append(range(first, min(run.start, last)))
        first = max(first, run.stop)
    if first < last:
        missing.append(range(first, last))
    return missing


def _cut(run: range, first: int, last: int) -> range:
    """The part of `run` in [first, last); may be empty."""
    start = max(run.start, first)
    return range(start, max(start, min(run.stop, last)))
