"""The blocking client, for tools, benchmarks and scripts: the async one on a private event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from forebay.kvstore.client.aio import AsyncStoreClient
from forebay.kvstore.identity import Namespace
from forebay.kvstore.layout import Shard
from forebay.kvstore.protocol import (
    Aside,
    Checked,
    ChunkRead,
    Cleared,
    Committed,
    Explained,
    Fetched,
    Foreseen,
    Found,
    Held,
    Joined,
    Kept,
    NewChunk,
    Reserved,
    Rows,
    Slot,
    Stats,
    Surveyed,
    Warmed,
    Written,
)
from forebay.tiers.base import Query

R = TypeVar("R")


class StoreClient:
    """A blocking connection to a store; a context manager. Use it from one thread.

        with StoreClient("unix:///run/forebay/store.sock") as store:
            print(store.stats().values["host.chunks"])

    Without `maps` the store's memory, which takes a while if it is large, is mapped only for the first promised chunk.
    """

    def __init__(
        self,
        address: str,
        *,
        kind: str = "tool",
        timeout_s: float = 5.0,
        group: bytes = b"",
        tenant: str | None = None,
        maps: bool = True,
    ) -> None:
        self._client = AsyncStoreClient(
            address, kind=kind, timeout_s=timeout_s, group=group, tenant=tenant, maps=maps
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> StoreClient:
        try:
            self._run(self._client.connect())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: Coroutine[Any, Any, R]) -> R:
        return self._loop.run_until_complete(call)

    def close(self) -> None:
        """End the connection."""
        if not self._loop.is_closed():
            self._run(self._client.close())
            self._run(self._loop.shutdown_default_executor())
            self._loop.close()

    @property
    def boot(self) -> bytes:
        """Boot id of the store."""
        return self._client.boot

    def register(self, namespace: Namespace, label: str = "", *, shard: Shard | None = None) -> bytes:
        """As AsyncStoreClient.register."""
        return self._run(self._client.register(namespace, label, shard=shard))

    def lookup(
        self,
        namespace_id: bytes,
        root: bytes,
        tokens: bytes,
        keys: bytes,
        *,
        limit: int,
        deadline_ms: int = 0,
        extra: bytes = b"",
        lease_ms: int = 0,
        tenant: str = "",
    ) -> Found:
        """As AsyncStoreClient.lookup."""
        return self._run(
            self._client.lookup(
                namespace_id,
                root,
                tokens,
                keys,
                limit=limit,
                deadline_ms=deadline_ms,
                extra=extra,
                lease_ms=lease_ms,
                tenant=tenant,
            )
        )

    def warm(
        self,
        namespace_id: bytes,
        root: bytes,
        keys: bytes,
        *,
        deadline_ms: int,
        extra: bytes = b"",
        tenant: str = "",
    ) -> Warmed:
        """As AsyncStoreClient.warm."""
        warming = self._client.warm(
            namespace_id, root, keys, deadline_ms=deadline_ms, extra=extra, tenant=tenant
        )  # fmt: skip
        return self._run(warming)

    def survey(
        self, namespace_id: bytes, root: bytes, tokens: bytes, keys: bytes, *, limit: int, deadline_ms: int,
        extra: bytes = b"",
    ) -> Surveyed:  # fmt: skip
        """As AsyncStoreClient.survey."""
        return self._run(
            self._client.survey(namespace_id, root, tokens, keys, limit=limit, deadline_ms=deadline_ms, extra=extra)
        )

    def fetch(
        self, namespace_id: bytes, root: bytes, tokens: bytes, keys: bytes, *, limit: int,
        wanted: Sequence[tuple[int, int]], deadline_ms: int, extra: bytes = b"", tenant: str = "",
        tokens_from: int = 0, aside: int = 0,
    ) -> Fetched:  # fmt: skip
        """As AsyncStoreClient.fetch."""
        return self._run(
            self._client.fetch(
                namespace_id, root, tokens, keys, limit=limit, wanted=wanted, deadline_ms=deadline_ms, extra=extra,
                tenant=tenant, tokens_from=tokens_from, aside=aside,
            )
        )  # fmt: skip

    def join(self, leases: Sequence[int], *, lease_ms: int = 0) -> Joined:
        """As AsyncStoreClient.join."""
        return self._run(self._client.join(leases, lease_ms=lease_ms))

    def hold(self, queries: Sequence[Query], *, lease_ms: int) -> Held:
        """As AsyncStoreClient.hold."""
        return self._run(self._client.hold(queries, lease_ms=lease_ms))

    def set_aside(
        self, namespace_id: bytes, tenant: str, group: int, chunks: int, *, extra: int = 0, lease_ms: int = 0,
        for_tiers: int = 0,
    ) -> Aside:  # fmt: skip
        """As AsyncStoreClient.set_aside."""
        return self._run(
            self._client.set_aside(
                namespace_id, tenant, group, chunks, extra=extra, lease_ms=lease_ms, for_tiers=for_tiers
            )
        )

    def release(self, leases: Sequence[int]) -> None:
        """Give leases back."""
        self._client.release(leases)

    def release_chunks(self, lease: int, chunks: Sequence[int]) -> None:
        """Give chunks of a lease back."""
        self._client.release_chunks(lease, chunks)

    def reserve(
        self,
        namespace_id: bytes,
        tenant: str,
        chunks: Sequence[NewChunk],
        *,
        retain_s: float = 0.0,
        writers: int = 1,
        aside: int = 0,
    ) -> Reserved:
        """As AsyncStoreClient.reserve."""
        return self._run(
            self._client.reserve(namespace_id, tenant, chunks, retain_s=retain_s, writers=writers, aside=aside)
        )

    def commit(self, chunks: Sequence[Written]) -> Committed:
        """As AsyncStoreClient.commit."""
        return self._run(self._client.commit(chunks))

    def abort(self, reservations: Sequence[int]) -> None:
        """Give reservations back unwritten."""
        self._client.abort(reservations)

    def damaged(self, chunks: Sequence[tuple[int, bytes]]) -> None:
        """Report chunks whose bytes are wrong."""
        self._client.damaged(chunks)

    def payload(self, chunk: ChunkRead) -> memoryview:
        """Whole payload of a pinned chunk."""
        return self._client.payload(chunk)

    def checksums(self, chunk: ChunkRead) -> bytes:
        """As AsyncStoreClient.checksums."""
        return self._client.checksums(chunk)

    def room(self, slot: Slot, length: int) -> memoryview:
        """Writable payload of a reserved slot."""
        return self._client.room(slot, length)

    def intact(self, chunk: ChunkRead) -> bool:
        """Is the slot still of the promised generation? Ask after the copy."""
        return self._client.intact(chunk)

    def pin(
        self, chunks: Sequence[tuple[int, bytes]], *, kind: Literal["soft", "hard"], by: str, ttl_s: float
    ) -> Kept:
        """As AsyncStoreClient.pin."""
        return self._run(self._client.pin(chunks, kind=kind, by=by, ttl_s=ttl_s))

    def unpin(self, chunks: Sequence[tuple[int, bytes]], *, by: str) -> Kept:
        """As AsyncStoreClient.unpin."""
        return self._run(self._client.unpin(chunks, by=by))

    def touch(self, chunks: Sequence[tuple[int, bytes]], *, tenant: str = "", retain_s: float = 0.0) -> Kept:
        """As AsyncStoreClient.touch."""
        return self._run(self._client.touch(chunks, tenant=tenant, retain_s=retain_s))

    def stats(self) -> Stats:
        """Present figures."""
        return self._run(self._client.stats())

    def what_if(self, budget: int) -> Foreseen:
        """As AsyncStoreClient.what_if."""
        return self._run(self._client.what_if(budget))

    def list_chunks(self, *, cursor: int = 0, limit: int = 500, namespace: bytes = b"") -> Rows:
        """One page of what is held."""
        return self._run(self._client.list_chunks(cursor=cursor, limit=limit, namespace=namespace))

    def explain(self, namespace_id: bytes, root: bytes, tokens: bytes, extra: bytes = b"") -> Explained:
        """Why a prompt's prefix ends where it does."""
        return self._run(self._client.explain(namespace_id, root, tokens, extra))

    def check(self, *, repair: bool = False) -> Checked:
        """Verify every chunk of the pool."""
        return self._run(self._client.check(repair=repair))

    def clear(
        self,
        namespace: bytes = b"",
        *,
        tenant: str | None = None,
        root: bytes = b"",
        tokens: bytes = b"",
        extra: bytes = b"",
    ) -> Cleared:
        """As AsyncStoreClient.clear."""
        return self._run(self._client.clear(namespace, tenant=tenant, root=root, tokens=tokens, extra=extra))
