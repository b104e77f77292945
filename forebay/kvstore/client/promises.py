"""The async client's calls about promises: leases shared and given back, chunks pinned, touched and forgotten."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeVar

from forebay.kvstore.client.session import Session
from forebay.kvstore.protocol import (
    Aside,
    ChunkRead,
    Clear,
    Cleared,
    Fetch,
    Fetched,
    Held,
    Hold,
    Join,
    Joined,
    Kept,
    Part,
    Pin,
    Release,
    SetAside,
    Survey,
    Surveyed,
    Touch,
    Unpin,
    Warm,
    Warmed,
)
from forebay.tiers.base import Query

R = TypeVar("R")


class PromiseCalls(ABC):
    """What `AsyncStoreClient` has from here. Chunks are named (group, key), as lookups answer them."""

    _session: Session

    @abstractmethod
    async def _call(self, rid: int, message: object, kind: type[R]) -> R: ...

    @abstractmethod
    def _tell(self, message: object) -> None: ...

    @abstractmethod
    async def map_extents(self) -> None:
        """Map the extents that this client doesn't have yet."""

    async def _mapped(self, lease: int, chunks: Sequence[ChunkRead]) -> None:
        """Have the extents of what was just pinned; if that fails, or nobody waits for it any more, let go of it."""
        if any(chunk.extent not in self._session.pool.views for chunk in chunks):
            try:
                await self.map_extents()
            except BaseException:
                self.release([lease])
                raise

    async def join(self, leases: Sequence[int], *, lease_ms: int = 0) -> Joined:
        """Hold leases of this client's group as well, or renew one's own. Those that have ended are left out."""
        rid = self._session.rid()
        joined = await self._call(rid, Join(rid=rid, leases=list(leases), lease_ms=lease_ms), Joined)
        known = self._session.pool.views
        if any(chunk.extent not in known for shared in joined.leases for chunk in shared.chunks):
            await self.map_extents()
        return joined

    async def hold(self, queries: Sequence[Query], *, lease_ms: int) -> Held:
        """Pin single chunks that memory has, as a tier is asked for them; see `protocol.Hold`."""
        rid = self._session.rid()
        held = await self._call(rid, Hold(rid=rid, queries=list(queries), lease_ms=lease_ms), Held)
        await self._mapped(held.lease, held.chunks)
        return held

    async def set_aside(
        self, namespace_id: bytes, tenant: str, group: int, chunks: int, *, extra: int = 0, lease_ms: int = 0,
        for_tiers: int = 0,
    ) -> Aside:  # fmt: skip
        """Ask for room for so many whole chunks of a group: all of it under one lease, which `reserve` then draws on,
        and `fetch` for up to `for_tiers` at a time; or none. The rest of it ends with `release`; `join` renews it."""
        rid = self._session.rid()
        message = SetAside(
            rid=rid, namespace=namespace_id, tenant=tenant, group=group, chunks=chunks, extra=extra, lease_ms=lease_ms,
            for_tiers=for_tiers,
        )  # fmt: skip
        return await self._call(rid, message, Aside)

    def release(self, leases: Sequence[int]) -> None:
        """Give leases back. Silent on a lost connection: they ended with it."""
        self._tell(Release(leases=list(leases)))

    def release_chunks(self, lease: int, chunks: Sequence[int]) -> None:
        """Give chunks of a lease back, by their places in the answer that gave it; the rest stays promised."""
        self._tell(Release(leases=[], parts=[Part(lease, list(chunks))]))

    async def warm(
        self,
        namespace_id: bytes,
        root: bytes,
        keys: bytes,
        *,
        deadline_ms: int,
        extra: bytes = b"",
        tenant: str = "",
    ) -> Warmed:
        """Bring whole chunks of a chain, by their `keys` (`identity.chunk_keys`), from tiers into memory."""
        rid = self._session.rid()
        message = Warm(
            rid=rid, namespace=namespace_id, root=root, keys=keys, deadline_ms=deadline_ms, extra=extra, tenant=tenant
        )  # fmt: skip
        return await self._call(rid, message, Warmed)

    async def survey(
        self, namespace_id: bytes, root: bytes, tokens: bytes, keys: bytes, *, limit: int, deadline_ms: int,
        extra: bytes = b"",
    ) -> Surveyed:  # fmt: skip
        """How far tiers would reach with a prompt, and what they would have to bring. Nothing is brought."""
        rid = self._session.rid()
        message = Survey(
            rid=rid, namespace=namespace_id, root=root, tokens=tokens, keys=keys, limit=limit, deadline_ms=deadline_ms,
            extra=extra,
        )  # fmt: skip
        return await self._call(rid, message, Surveyed)

    async def fetch(
        self, namespace_id: bytes, root: bytes, tokens: bytes, keys: bytes, *, limit: int,
        wanted: Sequence[tuple[int, int]], deadline_ms: int, extra: bytes = b"", tenant: str = "",
        tokens_from: int = 0, aside: int = 0,
    ) -> Fetched:  # fmt: skip
        """Bring places (group, chunk position) of a prompt from tiers, into what was set `aside` if that is for them,
        and pin what is there. The pins end with `release`."""
        rid = self._session.rid()
        message = Fetch(
            rid=rid, namespace=namespace_id, root=root, tokens=tokens, keys=keys, limit=limit, wanted=list(wanted),
            deadline_ms=deadline_ms, extra=extra, tenant=tenant, tokens_from=tokens_from, aside=aside,
        )  # fmt: skip
        fetched = await self._call(rid, message, Fetched)
        await self._mapped(fetched.lease, fetched.chunks)
        return fetched

    async def pin(
        self, chunks: Sequence[tuple[int, bytes]], *, kind: Literal["soft", "hard"], by: str, ttl_s: float
    ) -> Kept:
        """Keep chunks in memory for a while, whoever uses them. Raises RequestRefused (`budget`) for hard pins beyond
        theirs; nothing is pinned then."""
        rid = self._session.rid()
        return await self._call(rid, Pin(rid=rid, chunks=list(chunks), kind=kind, by=by, ttl_s=ttl_s), Kept)

    async def unpin(self, chunks: Sequence[tuple[int, bytes]], *, by: str) -> Kept:
        """End the pins that `by` has on chunks."""
        rid = self._session.rid()
        return await self._call(rid, Unpin(rid=rid, chunks=list(chunks), by=by), Kept)

    async def touch(self, chunks: Sequence[tuple[int, bytes]], *, tenant: str = "", retain_s: float = 0.0) -> Kept:
        """Count chunks as just used; with `retain_s` keep them so long for a tenant, within its budget."""
        rid = self._session.rid()
        return await self._call(rid, Touch(rid=rid, chunks=list(chunks), tenant=tenant, retain_s=retain_s), Kept)

    def touch_soon(self, chunks: Sequence[tuple[int, bytes]], *, tenant: str = "", retain_s: float = 0.0) -> None:
        """As `touch`, without waiting for anything. Silent on a lost connection."""
        self._tell(Touch(rid=0, chunks=list(chunks), tenant=tenant, retain_s=retain_s))

    async def clear(
        self,
        namespace: bytes = b"",
        *,
        tenant: str | None = None,
        root: bytes = b"",
        tokens: bytes = b"",
        extra: bytes = b"",
        start: int = 0,
    ) -> Cleared:
        """Forget chunks, in every tier: of a namespace (all if empty), of a tenant, and with a `root` those that hold
        the end of `tokens` (u32 LE) or go on from there. `start` is the token where a `root` other than the chain's
        is."""
        rid = self._session.rid()
        message = Clear(rid=rid, namespace=namespace, tenant=tenant, root=root, tokens=tokens, extra=extra, start=start)
        return await self._call(rid, message, Cleared)
