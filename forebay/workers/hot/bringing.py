"""A pull for a request that reads rows in the store's pool: they stay there, pinned and verified; all else is copied.

    [ host memory has it      | tiers have it                     | nobody ]
      rows pinned, keys copied  keys brought, rows stay cold         computed

Room for whatever the request will put there besides is set aside first, for its cold rows too: one that can't have it
doesn't begin. Where all of it could never be had, there is room for what the request adds, and for some of its cold
rows at a time; then none of its prefix stays pinned.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.protocol import BATCH_ITEMS_MAX, Found, Surveyed
from forebay.workers.counters import Counters
from forebay.workers.hot.fetching import Fetcher, Indexed
from forebay.workers.hot.keeping import host_chunk, verified
from forebay.workers.hot.mirror import HostChunk
from forebay.workers.hot.promising import PATIENCE_S, set_aside
from forebay.workers.moves import HOST, Pull, Pulled
from forebay.workers.prefix import GroupShape, open_unit

ATTEMPTS_MAX = 3
"""Lookups of one pull, when chunks turn out to be damaged."""

SHARES = (2, 4, 8, 16, 32)
"""Where not all of a cold prefix fits: such parts of it are tried, one after the other."""

Lookup = Callable[[bytes, Pull, int], Awaitable[Found]]
Survey = Callable[[bytes, Pull], Awaitable[Surveyed | None]]
Copying = Callable[[Pull, Found], Awaitable[Pulled | None]]


@dataclass(frozen=True, slots=True)
class Room:
    """What is set aside under `lease`; of a cold prefix, for `most` chunks at a time (None: for all)."""

    lease: int
    most: int | None = None


Refusal = Literal["now", "ever"]


class HotPuller:
    """Serves such pulls from one loop. `look_up` finds and pins, `survey` says how far tiers reach (None: not at all),
    `copy` copies what isn't read in place (None: something was damaged), `release` gives a lease back soon. `renewed`
    are the leases that the worker renews."""

    def __init__(
        self,
        client: AsyncStoreClient,
        shapes: Sequence[GroupShape],
        counters: Counters,
        deadline_ms: int,
        look_up: Lookup,
        survey: Survey,
        copy: Copying,
        fetcher: Fetcher,
        release: Callable[[int], None],
        renewed: set[int],
    ) -> None:
        self._client, self._shapes, self._counters, self._deadline_ms = client, tuple(shapes), counters, deadline_ms
        self._look_up, self._survey, self._copy, self._release = look_up, survey, copy, release
        self._fetcher, self._renewed = fetcher, renewed

    async def pull(self, namespace_id: bytes, pull: Pull) -> Pulled:
        """Raises StoreError and TimeoutError, and nothing is pinned then."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline_ms / 1000
        for _ in range(ATTEMPTS_MAX if pull.limit else 0):
            # What may not stay cold has to be brought now.
            patience_ms = 0 if pull.cold else max(0, int((end - loop.time()) * 1000))
            found = await self._look_up(namespace_id, pull, patience_ms)
            pulled = None
            try:
                reach = await self._reach(namespace_id, pull, found.hit)
                if reach > found.hit:
                    pulled = await self._begun_cold(namespace_id, pull, found, reach)
                else:
                    pulled = await self._promised(namespace_id, pull, found)
            finally:
                if found.lease and pulled is not None and pulled.hosted:
                    self._keep_hosted(pull, found)
                elif found.lease:
                    self._renewed.discard(found.lease)
                    self._release(found.lease)
            if pulled is not None:
                return pulled
        return await self._promised_nothing(namespace_id, pull)

    async def _reach(self, namespace_id: bytes, pull: Pull, hit: int) -> int:
        """How far what memory and tiers have reaches, as far as that may stay cold."""
        if min(pull.cold, pull.limit) <= hit:
            return hit
        surveyed = await self._survey(namespace_id, pull)
        return hit if surveyed is None else max(hit, min(surveyed.reach, pull.cold))

    # --- all of it is in host memory -------------------------------------------------------------------

    async def _promised(self, namespace_id: bytes, pull: Pull, found: Found) -> Pulled | None:
        """What was found, and room for the rest. None: something was damaged, ask again."""
        room = await self._set_aside(namespace_id, pull, self._beyond(pull, found.hit))
        if not isinstance(room, int):
            return self._refused(pull, room)
        pulled, useful = None, False
        try:
            pulled = await self._copy(pull, found)
            useful = pulled is not None and pulled.hit == found.hit
        finally:
            if not useful:
                self._client.release([room])
        if pulled is None or useful:
            return None if pulled is None else replace(pulled, aside=room)
        return await self._promised_nothing(namespace_id, pull)  # more will have to be stored than it looked

    async def _promised_nothing(self, namespace_id: bytes, pull: Pull) -> Pulled:
        room = await self._set_aside(namespace_id, pull, self._beyond(pull, 0))
        if not isinstance(room, int):
            return self._refused(pull, room)
        return replace(self._nothing(pull), aside=room, stored=0)

    # --- a part of it is cold --------------------------------------------------------------------------

    async def _begun_cold(self, namespace_id: bytes, pull: Pull, found: Found, reach: int) -> Pulled | None:
        """What was found, the index keys of what tiers have behind it, and room for what will be read of their rows and
        for the rest. None: something was damaged, ask again."""
        room = await self._room(namespace_id, pull, found.hit, reach)
        if not isinstance(room, Room):
            return self._refused(pull, room)
        lease = room.lease
        # Many chunks of index keys may take longer than a lease lasts.
        self._renewed |= {found.lease, lease} - {0}
        try:
            front = await self._copy(pull, found)
            if front is None:
                return None
            indexed = await self._fetcher.index(namespace_id, pull, front, reach, self._deadline_ms)
            counted = found.hit if room.most is None else reach
            if indexed.hit < counted:  # more will have to be stored than it looked
                self._let_go(lease)
                lease = 0
                room = await self._room(namespace_id, pull, front.hit, indexed.hit)
                if not isinstance(room, Room):
                    return self._refused(pull, room)
                lease = room.lease
            pulled = self._joined(pull, front, indexed, room)
            lease = 0
            return pulled
        finally:
            if lease:
                self._let_go(lease)

    def _let_go(self, lease: int) -> None:
        self._renewed.discard(lease)
        self._client.release([lease])

    def _joined(self, pull: Pull, front: Pulled, indexed: Indexed, room: Room) -> Pulled:
        hit, first = indexed.hit, 0 if room.most is not None else front.hit // self._size(pull)
        placed = tuple(mine | more for mine, more in zip(front.placed, indexed.placed, strict=True))
        names = Counter(indexed.sources.get(unit, HOST) for unit in range(front.hit // MATCH_UNIT, hit // MATCH_UNIT))
        sources = Counter(front.sources) + Counter({name: units * MATCH_UNIT for name, units in names.items()})
        if hit > front.hit:
            self._counters.add("hosted.begun_cold")
        return replace(
            front, hit=hit, placed=placed, sources=dict(sources), stored=hit, aside=room.lease, most=room.most,
            hosted=front.hosted if room.most is None else (), cold=range(first, -(-hit // self._size(pull))),
        )  # fmt: skip

    async def _room(self, namespace_id: bytes, pull: Pull, hit: int, reach: int) -> Room | Refusal:
        """For all that memory doesn't have up to `hit`; where that could never be had, for what nobody has, and for a
        part of what reaches to `reach`."""
        own, prefix = self._beyond(pull, reach), -(-reach // self._size(pull))
        missing = self._beyond(pull, hit)
        whole = await self._set_aside(namespace_id, pull, missing, missing - own)
        if whole != "ever":
            return Room(whole) if isinstance(whole, int) else whole
        for most in dict.fromkeys(max(1, prefix // share) for share in SHARES):
            part = await self._set_aside(namespace_id, pull, own + most, most)
            if part != "ever":
                return Room(part, most) if isinstance(part, int) else part
        return "ever"

    # --- small steps -----------------------------------------------------------------------------------

    def _size(self, pull: Pull) -> int:
        (group,) = pull.hosted
        return self._shapes[group].chunk_tokens

    def _beyond(self, pull: Pull, hit: int) -> int:
        """Whole chunks that the request can come to have behind a hit."""
        return max(1, pull.chunks - hit // self._size(pull))

    async def _set_aside(self, namespace_id: bytes, pull: Pull, chunks: int, for_tiers: int = 0) -> int | Refusal:
        """The lease, or when there isn't room."""
        (group,) = pull.hosted
        aside = await set_aside(self._client, namespace_id, pull.tenant, group, chunks, PATIENCE_S, for_tiers)
        if aside.lease:
            return aside.lease
        return "now" if aside.ever else "ever"

    def _nothing(self, pull: Pull) -> Pulled:
        return Pulled(pull.request, 0, tuple({} for _ in self._shapes))

    def _refused(self, pull: Pull, when: Refusal) -> Pulled:
        self._counters.add("hosted.room_refused")
        return replace(self._nothing(pull), refused=when)

    async def host(self, pull: Pull, found: Found) -> tuple[HostChunk, ...] | None:
        """What is to be read in place, verified. None: something was damaged, ask again."""
        chunks = [found.chunks[at] for at in self._in_place(pull, found)]
        for chunk in chunks:
            if not await verified(self._client, chunk, self._shapes[chunk.group].geometry.granule_bytes):
                self._counters.add("loads.corrupt")
                return None
            self._counters.add(f"hosted.{chunk.promoted or HOST}.chunks")
        return tuple(host_chunk(self._client, chunk, found.lease, len(chunks), found.hit) for chunk in chunks)

    def _in_place(self, pull: Pull, found: Found) -> list[int]:
        """Which chunks, by their places in the answer, are read where they are."""
        if not pull.hosted:
            return []
        (group,) = pull.hosted
        end = open_unit(self._shapes[group], len(pull.rooms[group].spare), found.hit) * MATCH_UNIT
        return [at for at, chunk in enumerate(found.chunks) if chunk.group == group and chunk.start < end]

    def _keep_hosted(self, pull: Pull, found: Found) -> None:
        """What was copied is let go of; the rest stays promised."""
        copied = sorted(set(range(len(found.chunks))).difference(self._in_place(pull, found)))
        for at in range(0, len(copied), BATCH_ITEMS_MAX):
            self._client.release_chunks(found.lease, copied[at : at + BATCH_ITEMS_MAX])
