"""One pull: look up and pin, copy what the device lacks, verify it, let go.

What host memory has is copied at once. Of what tiers have beyond that, `cutting` loads as much as is worth it, last
piece first, while the engine computes from the front.

Whatever is wrong with a chunk makes the hit shorter, never the answer: the chunk is reported and the store is
asked again, which then knows one chunk less.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forebay.errors import RequestRefused, StoreError
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.layout import needed_from
from forebay.kvstore.protocol import BATCH_ITEMS_MAX, Found, Surveyed
from forebay.workers.config import Prefixes
from forebay.workers.copying import Copier
from forebay.workers.counters import Counters
from forebay.workers.cutting import Cutter
from forebay.workers.hot.bringing import ATTEMPTS_MAX, HotPuller
from forebay.workers.hot.fetching import Fetcher
from forebay.workers.hot.promising import PATIENCE_S
from forebay.workers.hot.rows import RowFetcher
from forebay.workers.moves import DEVICE, HOST, Opened, Pull, Pulled, RowsCame
from forebay.workers.prefix import GroupShape, missing_runs, open_unit
from forebay.workers.rates import Rates
from forebay.workers.reading import Copy, Reading

GRACE_S = 1.0
"""How much longer than the store's own deadline a lookup may take before its store counts as hung."""

log = logging.getLogger(__name__)

__all__ = ["DEVICE", "HOST", "Copy", "Puller", "missing_runs", "plan_copies", "sources_of"]


@dataclass(frozen=True, slots=True)
class PullRules:
    """`deadline_ms` is how long tiers may take; `prefixes` what is done with what they have."""

    deadline_ms: int
    prefixes: Prefixes = "cut"


class Puller:
    """Serves pulls from one loop. `deliver` tells the engine of cuts that it may begin with."""

    def __init__(
        self,
        client: AsyncStoreClient,
        shapes: Sequence[GroupShape],
        copiers: Sequence[Copier],
        rules: PullRules,
        counters: Counters,
        rates: Rates,
        deliver: Callable[[Opened | RowsCame], None],
        renewed: set[int],
    ) -> None:
        self._client = client
        self._shapes = tuple(shapes)
        self._rules = rules
        self._counters = counters
        self._reading = Reading(client, copiers, counters)
        self.cutter = Cutter(client, self._reading, shapes, rates, counters, deliver, rules.deadline_ms)
        self.rows = RowFetcher(client, shapes, counters, deliver)
        self._hot = HotPuller(
            client, shapes, counters, rules.deadline_ms, self._lookup, self._survey, self._copy_found,
            Fetcher(client, shapes, self._reading), self._release_soon, renewed,
        )  # fmt: skip

    async def pull(self, namespace_id: bytes, pull: Pull) -> Pulled:
        """Never raises for what a store may do: a failed pull brings nothing."""
        try:
            if pull.hosted:
                return await self._hot.pull(namespace_id, pull)
            if self._rules.prefixes == "compute":
                return self._nothing(pull)
            if self._rules.prefixes == "load" or self.cutter.busy:
                return await self._pull_found(namespace_id, pull, self._rules.deadline_ms)
            return await self._pull_cut(namespace_id, pull)
        except TimeoutError:
            self._counters.add("loads.timeouts")
        except StoreError as error:
            self._counters.add("loads.failed")
            log.debug("a pull failed: %s", error)
        if not pull.hosted:
            return self._nothing(pull)
        await asyncio.sleep(PATIENCE_S)  # it will ask again at once
        return replace(self._nothing(pull), refused="now")

    async def _pull_cut(self, namespace_id: bytes, pull: Pull) -> Pulled:
        """What host memory has, at once; of what tiers have beyond, what is worth it."""
        part = await self._pull_found(namespace_id, pull, 0)
        have = max(part.hit, pull.device_hit)
        if have >= pull.limit:
            return part
        surveyed = await self._survey(namespace_id, pull)
        # What tiers have needn't be stored again, even where it isn't loaded.
        part = replace(part, stored=None if surveyed is None else max(part.hit, surveyed.reach))
        if surveyed is None or surveyed.reach <= have:
            return part
        return await self.cutter.load(namespace_id, pull, part, surveyed.reach, surveyed.places)

    async def _survey(self, namespace_id: bytes, pull: Pull) -> Surveyed | None:
        """How far tiers reach; None if the store doesn't know or say."""
        deadline_ms = self._rules.deadline_ms
        if deadline_ms == 0:
            return None
        try:
            async with asyncio.timeout(deadline_ms / 1000 + GRACE_S):
                return await self._client.survey(
                    namespace_id, pull.root, pull.tokens, pull.keys, limit=pull.limit, deadline_ms=deadline_ms
                )
        except TimeoutError:
            self._counters.add("loads.timeouts")
        except RequestRefused as error:
            log.warning("the store doesn't say how far its tiers reach: %s", error)
        return None

    async def _pull_found(self, namespace_id: bytes, pull: Pull, deadline_ms: int) -> Pulled:
        """Copy the longest prefix that a lookup finds within its deadline."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_ms / 1000
        for _ in range(ATTEMPTS_MAX):
            left_ms = max(0, int((end - loop.time()) * 1000))
            found = await self._lookup(namespace_id, pull, left_ms)
            pulled = None
            try:
                pulled = await self._copy_found(pull, found)
            finally:
                if found.lease:
                    self._release_soon(found.lease)
            if pulled is not None:
                return pulled
        return self._nothing(pull)

    def _release_soon(self, lease: int) -> None:
        """Not now: the request that waits comes first."""
        asyncio.get_running_loop().call_soon(self.cutter.release, lease)

    def _nothing(self, pull: Pull, stored: int | None = None) -> Pulled:
        return Pulled(pull.request, 0, tuple({} for _ in self._shapes), stored=stored)

    def _retain(self, pull: Pull, found: Found) -> None:
        """What the request goes on from is kept as long as what it adds."""
        if pull.retain_s > 0:
            chunks = [(chunk.group, chunk.key) for chunk in found.chunks]
            for at in range(0, len(chunks), BATCH_ITEMS_MAX):
                some = chunks[at : at + BATCH_ITEMS_MAX]
                self._client.touch_soon(some, tenant=pull.tenant, retain_s=pull.retain_s)

    async def _lookup(self, namespace_id: bytes, pull: Pull, deadline_ms: int) -> Found:
        self._counters.add("lookups")
        async with asyncio.timeout(deadline_ms / 1000 + GRACE_S):
            found = await self._client.lookup(
                namespace_id, pull.root, pull.tokens, pull.keys, limit=pull.limit, deadline_ms=deadline_ms,
                tenant=pull.tenant,
            )  # fmt: skip
        self._retain(pull, found)
        return found

    async def _copy_found(self, pull: Pull, found: Found) -> Pulled | None:
        """None: something was damaged, ask again."""
        stored = None if found.pending else found.hit
        if found.hit <= pull.device_hit:
            return self._nothing(pull, stored)
        copies = plan_copies(self._shapes, pull, found)
        if copies is None:
            self._counters.add("loads.unusable")
            return self._nothing(pull, stored)
        if await self._reading.copy(copies):
            return None
        hosted = await self._hot.host(pull, found)
        if hosted is None:
            return None
        placed: tuple[dict[int, int], ...] = tuple({} for _ in self._shapes)
        for copy in copies:
            placed[copy.chunk.group].update(zip(copy.units, copy.blocks, strict=True))
        inside = [c for c in found.chunks if c.group in pull.hosted]
        copies += [Copy(c, 0, range(c.start // MATCH_UNIT, (c.start + c.tokens) // MATCH_UNIT), ()) for c in inside]
        sources = sources_of(pull, found.hit, copies)
        return Pulled(pull.request, found.hit, placed, sources, stored=found.hit, hosted=hosted)


def plan_copies(shapes: Sequence[GroupShape], pull: Pull, found: Found) -> list[Copy] | None:
    """What to copy where, or None if `found` doesn't cover its own hit or there is no room for it.

    Chunks of one group must not overlap: how much of a chunk the prompt shares is told by the next one's
    start and by the hit alone.
    """
    copies: list[Copy] = []
    last = found.hit // MATCH_UNIT
    for group, (shape, room) in enumerate(zip(shapes, pull.rooms, strict=True)):
        first = shape.first_unit(found.hit)
        # The open chunk would like more than a query needs; only the latter is a must.
        needed = needed_from(shape.geometry, found.hit) // MATCH_UNIT
        if group in pull.hosted:
            first = needed = open_unit(shape, len(room.spare), found.hit)
        missing = missing_runs(room.have, first, last)
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


def _cut(run: range, first: int, last: int) -> range:
    """The part of `run` in [first, last); may be empty."""
    start = max(run.start, first)
    return range(start, max(start, min(run.stop, last)))
