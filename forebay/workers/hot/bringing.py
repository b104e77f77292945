"""A pull for a request that reads rows in the store's pool: they stay there, pinned and verified; all else is copied.

Room for whatever the request will put there besides is set aside first: one that can't have it doesn't begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.protocol import BATCH_ITEMS_MAX, Found
from forebay.workers.counters import Counters
from forebay.workers.hot.keeping import host_chunk, verified
from forebay.workers.hot.mirror import HostChunk
from forebay.workers.hot.promising import PATIENCE_S, set_aside
from forebay.workers.moves import HOST, Pull, Pulled
from forebay.workers.prefix import GroupShape

ATTEMPTS_MAX = 3
"""Lookups of one pull, when chunks turn out to be damaged."""

Lookup = Callable[[bytes, Pull, int], Awaitable[Found]]
Copying = Callable[[Pull, Found], Awaitable[Pulled | None]]


class HotPuller:
    """Serves such pulls from one loop. `look_up` finds and pins, `copy` copies what isn't read in place (None:
    something was damaged), `release` gives a lease back soon."""

    def __init__(
        self,
        client: AsyncStoreClient,
        shapes: Sequence[GroupShape],
        counters: Counters,
        deadline_ms: int,
        look_up: Lookup,
        copy: Copying,
        release: Callable[[int], None],
    ) -> None:
        self._client, self._shapes, self._counters, self._deadline_ms = client, tuple(shapes), counters, deadline_ms
        self._look_up, self._copy, self._release = look_up, copy, release

    async def pull(self, namespace_id: bytes, pull: Pull) -> Pulled:
        """Raises StoreError and TimeoutError, and nothing is pinned then."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline_ms / 1000
        for _ in range(ATTEMPTS_MAX if pull.limit else 0):
            found = await self._look_up(namespace_id, pull, max(0, int((end - loop.time()) * 1000)))
            pulled = None
            try:
                pulled = await self._promised(namespace_id, pull, found)
            finally:
                if found.lease and pulled is not None and pulled.hosted:
                    self._keep_hosted(pull, found)
                elif found.lease:
                    self._release(found.lease)
            if pulled is not None:
                return pulled
        return await self._promised_nothing(namespace_id, pull)

    async def _promised(self, namespace_id: bytes, pull: Pull, found: Found) -> Pulled | None:
        """What was found, and room for the rest. None: something was damaged, ask again."""
        room = await self._set_aside(namespace_id, pull, found.hit)
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
        room = await self._set_aside(namespace_id, pull, 0)
        if not isinstance(room, int):
            return self._refused(pull, room)
        return replace(self._nothing(pull), aside=room, stored=0)

    async def _set_aside(self, namespace_id: bytes, pull: Pull, hit: int) -> int | Literal["now", "ever"]:
        """The lease, or when there isn't room."""
        (group,) = pull.hosted
        lacking = max(1, pull.chunks - hit // self._shapes[group].chunk_tokens)
        aside = await set_aside(self._client, namespace_id, pull.tenant, group, lacking, PATIENCE_S)
        if aside.lease:
            return aside.lease
        self._counters.add("hosted.room_refused")
        return "now" if aside.ever else "ever"

    def _nothing(self, pull: Pull) -> Pulled:
        return Pulled(pull.request, 0, tuple({} for _ in self._shapes))

    def _refused(self, pull: Pull, when: Literal["now", "ever"]) -> Pulled:
        return replace(self._nothing(pull), refused=when)

    async def host(self, pull: Pull, found: Found) -> tuple[HostChunk, ...] | None:
        """What is to be read in place, verified. None: something was damaged, ask again."""
        chunks = [chunk for chunk in found.chunks if chunk.group in pull.hosted]
        for chunk in chunks:
            if not await verified(self._client, chunk, self._shapes[chunk.group].geometry.granule_bytes):
                self._counters.add("loads.corrupt")
                return None
            self._counters.add(f"hosted.{chunk.promoted or HOST}.chunks")
        return tuple(host_chunk(self._client, chunk, found.lease, len(chunks), found.hit) for chunk in chunks)

    def _keep_hosted(self, pull: Pull, found: Found) -> None:
        """What was copied is let go of; the rest stays promised."""
        copied = [at for at, chunk in enumerate(found.chunks) if chunk.group not in pull.hosted]
        for at in range(0, len(copied), BATCH_ITEMS_MAX):
            self._client.release_chunks(found.lease, copied[at : at + BATCH_ITEMS_MAX])
