"""Requests of those who write: room set aside, slots reserved, chunks committed or given back.

A batch is worked off a few chunks at a time: all of it at a stretch would keep everybody else waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from forebay.errors import RequestRefused
from forebay.kvstore.core import Client, StoreCore
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import TENANT_BYTES_MAX
from forebay.kvstore.identity import KEY_BYTES, MATCH_UNIT, Namespace, chunk_key
from forebay.kvstore.promises import check_batch, checked_retention
from forebay.kvstore.protocol import (
    EXTRA_BYTES_MAX,
    WRITERS_MAX,
    Abort,
    Aside,
    Commit,
    Committed,
    NewChunk,
    Reserve,
    Reserved,
    SetAside,
    Slot,
    Written,
)
from forebay.kvstore.slots import slot_bytes_for

C = TypeVar("C", NewChunk, Written)

WritingRequest = Reserve | Commit | Abort | SetAside
AT_ONCE = 32


@dataclass(slots=True)
class Outcome:
    """What has become of a Commit so far: `committed` chunks are visible, those of `to_hash` wait for their sums."""

    committed: int = 0
    to_hash: list[int] = field(default_factory=list)


class Writing:
    """Answers these requests for one store. Lives on the daemon's loop. `published` is called with each chunk that has
    become visible, which is pinned for so long."""

    def __init__(self, core: StoreCore, boot: bytes, published: Callable[[Entry], None]) -> None:
        self._core, self._boot, self._published = core, boot, published

    def handle(self, client: Client, request: WritingRequest) -> object | Coroutine[Any, Any, object] | None:
        """The reply to a request of this kind, a coroutine that gives one, or None where there is none."""
        match request:
            case Reserve():
                return self.reserve(client, request)
            case Commit():
                return self.commit(client, request)
            case SetAside():
                return self.set_aside(client, request)
            case Abort():
                check_batch(len(request.reservations))
                for reservation in request.reservations:
                    self._core.abort(client, reservation)
                return None

    # --- setting aside ---------------------------------------------------------------------------------

    async def set_aside(self, client: Client, request: SetAside) -> Aside:
        """All of the room, or none. It is taken a few slots at a time."""
        namespace, room = self._namespace(request), self._core.aside
        if not (0 <= request.group < len(namespace.groups) and 0 < request.chunks <= self._core.limits.pins_per_lease):
            raise RequestRefused("limits", f"{request.chunks} chunks of group {request.group} are none that can be")
        if not 0 <= request.for_tiers <= request.chunks:
            raise RequestRefused("limits", f"{request.for_tiers} of {request.chunks} chunks can't be for tiers")
        if not 0 <= request.extra <= EXTRA_BYTES_MAX or len(request.tenant.encode()) > TENANT_BYTES_MAX:
            most = f"{EXTRA_BYTES_MAX} bytes, and a tenant's id {TENANT_BYTES_MAX}"
            raise RequestRefused("limits", f"`extra` has at most {most}")
        size = namespace.chunk_tokens
        slot_bytes = slot_bytes_for(namespace.groups[request.group], size, size, request.extra)
        ever = room.ever(request.tenant, slot_bytes, request.chunks)
        lease, lease_s = 0, request.lease_ms / 1000
        if ever and room.now(slot_bytes, request.chunks):
            lease = await self._set_aside_in_slices(client, request, slot_bytes, lease_s)
        self._core.counters.add("store.set_aside" if lease else "store.set_aside_refused")
        return Aside(
            rid=request.rid, boot=self._boot, lease=lease, lease_ms=int(self._core.lease_seconds(lease_s) * 1000),
            ever=ever,
        )  # fmt: skip

    async def _set_aside_in_slices(
        self, client: Client, request: SetAside, slot_bytes: int, lease_s: float
    ) -> int:
        """The lease, or 0."""
        if client.gone:
            raise RequestRefused("busy", "the connection has ended")
        about = request.namespace, request.tenant, request.group, slot_bytes
        hold = self._core.aside.open(client, *about, lease_s, request.for_tiers)
        if hold is None:
            return 0
        left = request.chunks
        while left:
            some = min(AT_ONCE, left)
            left -= some
            if not self._core.aside.add(hold, some):
                self._core.release(client, [hold.lease])
                return 0
            if left:
                await asyncio.sleep(0)
        return hold.lease

    # --- reserving -------------------------------------------------------------------------------------

    def reserve(self, client: Client, request: Reserve) -> Reserved | Coroutine[Any, Any, Reserved]:
        """Room for chunks, all of which must be possible."""
        namespace = self._namespace(request)
        check_batch(len(request.chunks))
        if len(request.tenant.encode()) > TENANT_BYTES_MAX:
            raise RequestRefused("limits", f"a tenant's id has at most {TENANT_BYTES_MAX} bytes")
        for chunk in request.chunks:
            _check_chunk(namespace.chunk_tokens, len(namespace.groups), chunk)
        checked_retention(request.retain_s)
        if not 1 <= request.writers <= (WRITERS_MAX if client.group else 1):
            limits = f"a chunk has 1 to {WRITERS_MAX} writers, several only of one group"
            raise RequestRefused("limits", limits)
        if len(request.chunks) > AT_ONCE:
            return self._reserve_in_slices(client, request)
        return Reserved(rid=request.rid, boot=self._boot, slots=self._reserve_some(client, request, request.chunks))

    async def _reserve_in_slices(self, client: Client, request: Reserve) -> Reserved:
        slots: list[Slot] = []
        for some in _slices(request.chunks):
            self._namespace(request)  # it may have been forgotten meanwhile
            if client.gone:
                raise RequestRefused("busy", "the connection has ended")
            slots += self._reserve_some(client, request, some)
            await asyncio.sleep(0)
        return Reserved(rid=request.rid, boot=self._boot, slots=slots)

    def _reserve_some(self, client: Client, request: Reserve, chunks: Sequence[NewChunk]) -> list[Slot]:
        namespace, tenant, retain_s = request.namespace, request.tenant, request.retain_s
        return [
            self._core.reserve(
                client, namespace, tenant, chunk, retain_s=retain_s, writers=request.writers, aside=request.aside
            )
            for chunk in chunks
        ]

    def _namespace(self, request: Reserve | SetAside) -> Namespace:
        return known_namespace(self._core, request.namespace)

    # --- committing ------------------------------------------------------------------------------------

    def commit(self, client: Client, request: Commit) -> Committed | Coroutine[Any, Any, Committed]:
        """Make what is written visible."""
        check_batch(len(request.chunks))
        if len(request.chunks) > AT_ONCE:
            return self._commit_in_slices(client, request)
        outcome = Outcome()
        self._commit_some(client, request.chunks, outcome)
        return self._committed(request, outcome)

    async def _commit_in_slices(self, client: Client, request: Commit) -> Committed:
        outcome = Outcome()
        for some in _slices(request.chunks):
            self._commit_some(client, some, outcome)
            await asyncio.sleep(0)
        return self._committed(request, outcome)

    def _committed(self, request: Commit, outcome: Outcome) -> Committed:
        return Committed(rid=request.rid, boot=self._boot, committed=outcome.committed, to_hash=outcome.to_hash)

    def _commit_some(self, client: Client, chunks: Sequence[Written], outcome: Outcome) -> None:
        for written in chunks:
            if not written.checksums:
                if self._core.reservations.part_written(client, written.reservation):
                    outcome.to_hash.append(written.reservation)
                continue
            entry = self._core.commit(client, written.reservation, written.checksums)
            if entry is not None:
                outcome.committed += 1
                self._published(entry)
                self._core.unpin(entry)


def known_namespace(core: StoreCore, namespace_id: bytes) -> Namespace:
    """The namespace of this id. Raises RequestRefused if it isn't registered."""
    namespace = core.namespaces.get(namespace_id)
    if namespace is None:
        raise RequestRefused("namespace", f"namespace {namespace_id.hex()[:16]} isn't registered here")
    return namespace


def _slices(chunks: Sequence[C]) -> Iterator[Sequence[C]]:
    return (chunks[at : at + AT_ONCE] for at in range(0, len(chunks), AT_ONCE))


def _check_chunk(chunk_tokens: int, groups: int, chunk: NewChunk) -> None:
    tokens = len(chunk.tokens) // 4
    where = f"[{chunk.start}, {chunk.start + tokens}) of group {chunk.group}"
    if (
        not 0 <= chunk.group < groups
        or len(chunk.key) != KEY_BYTES
        or len(chunk.parent) != KEY_BYTES
        or chunk.start < 0
        or chunk.start % chunk_tokens
        or not 0 < tokens <= chunk_tokens
        or len(chunk.tokens) % (4 * MATCH_UNIT)
        or len(chunk.extra) > EXTRA_BYTES_MAX
    ):
        raise RequestRefused("limits", f"chunk {where} isn't one of its namespace")
    if chunk_key(chunk.parent, chunk.tokens, chunk.extra) != chunk.key:
        raise RequestRefused("limits", f"the key of chunk {where} doesn't follow from its parent and tokens")
