"""Requests about promises: leases joined and released, chunks pinned, touched, and forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from forebay.errors import RequestRefused
from forebay.kvstore.cascade import Cascade
from forebay.kvstore.clearing import Prefix, Scope
from forebay.kvstore.core import Client, StoreCore
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState
from forebay.kvstore.identity import KEY_BYTES, MATCH_UNIT, chain, chunk_keys
from forebay.kvstore.layout import round_down
from forebay.kvstore.pins import Owner
from forebay.kvstore.protocol import (
    BATCH_ITEMS_MAX,
    EXTRA_BYTES_MAX,
    LOOKUP_TOKENS_MAX,
    ChunkRead,
    Clear,
    Cleared,
    Held,
    Hold,
    Join,
    Joined,
    Kept,
    KeptBy,
    Pin,
    Release,
    Shared,
    Touch,
    Unpin,
)
from forebay.tiers.base import ClearScope, Query

PromiseRequest = Hold | Join | Release | Pin | Unpin | Touch | Clear
NAME_BYTES_MAX = 128
JOIN_LEASES_MAX = 64
GROUPS_MAX = 256
CLEAR_TIER_S = 30.0
CLEAR_STORES_S = 15.0
"""So long a clear waits for what was on its way to a tier. A tier that hangs is replaced sooner."""
LOOK_S = 0.02


class ClearableTier(Protocol):
    """What a clear needs of a tier's process; `forebay.tiers.host.TierHost` is the real one."""

    async def clear_scope(self, scope: ClearScope, timeout_s: float) -> int | None:
        """Remove what the scope covers; None if that isn't known in time, or the tier can't tell what is meant."""

    @property
    def forgetting(self) -> int:
        """Chunks that it was told to forget and that may still be there."""


class Promises:
    """Answers these requests for one store. Lives on the daemon's loop."""

    def __init__(self, core: StoreCore, cascade: Cascade, tiers: Mapping[str, ClearableTier], boot: bytes) -> None:
        self._core, self._cascade, self._tiers, self._boot = core, cascade, tiers, boot

    def handle(self, client: Client, request: PromiseRequest) -> object | Coroutine[Any, Any, object] | None:
        """The reply to a request of this kind, a coroutine that gives one, or None where there is none."""
        match request:
            case Hold():
                return self.hold(client, request)
            case Join():
                return self.join(client, request)
            case Release():
                self.release(client, request)
                return None
            case Pin():
                return self.pin(request)
            case Unpin():
                return self.unpin(request)
            case Touch():
                return self.touch(request)
            case Clear():
                return self.clear(request)

    # --- leases ----------------------------------------------------------------------------------------

    def hold(self, client: Client, request: Hold) -> Held:
        """Pin the best chunk that memory has for each query, under one lease."""
        check_batch(len(request.queries))
        if any(not 0 <= q.group < GROUPS_MAX or len(q.parent) != KEY_BYTES for q in request.queries):
            raise RequestRefused("limits", f"a query has a parent of {KEY_BYTES} bytes, and a group below {GROUPS_MAX}")
        found = [self._best(query) for query in request.queries]
        self._core.take_out_suspects()
        entries = list(dict.fromkeys(e for e in found if e is not None and e.state is SlotState.COMMITTED))
        lease = self._core.lease(client, entries, lease_s=request.lease_ms / 1000)
        place = {entry: at for at, entry in enumerate(entries)} if lease else {}
        return Held(
            rid=request.rid, boot=self._boot, lease=lease, chunks=[chunk_read(entry) for entry in place],
            places=[-1 if entry is None else place.get(entry, -1) for entry in found],
        )  # fmt: skip

    def _best(self, query: Query) -> Entry | None:
        """The chunk of this key; else, on a chain without `extra`, the sibling that shares the most tokens with it."""
        table = self._core.table
        best = table.get(query.group, query.key)
        if best is None or best.state is not SlotState.COMMITTED:
            best = None
            unit = query.tokens[: 4 * MATCH_UNIT]
            if len(unit) == 4 * MATCH_UNIT and query.first == chain(query.parent, unit, b"")[0]:
                if query.whole:
                    fronts = table.fronts(query.group, query.parent, query.tokens, b"")
                    best = fronts[-1] if fronts else None
                else:
                    best, _ = table.best_child(query.group, query.parent, query.tokens, b"")
        return best if best is not None and best.verified else None

    def join(self, client: Client, request: Join) -> Joined:
        """Let a connection hold leases of its group, or renew its own."""
        if len(request.leases) > JOIN_LEASES_MAX:
            raise RequestRefused("limits", f"at most {JOIN_LEASES_MAX} leases a batch")
        seconds = request.lease_ms / 1000
        shared = []
        for lease in dict.fromkeys(request.leases):
            hold = self._core.join(client, lease, lease_s=seconds)
            if hold is not None:
                chunks = [chunk_read(entry) for entry in hold.entries if entry is not None]
                shared.append(Shared(lease, hold.hit, chunks))
        granted = int(self._core.lease_seconds(seconds) * 1000)
        return Joined(rid=request.rid, boot=self._boot, leases=shared, lease_ms=granted)

    def release(self, client: Client, request: Release) -> None:
        """End leases, and let go of parts of others."""
        check_batch(len(request.leases))
        check_batch(len(request.parts))
        check_batch(sum(len(part.chunks) for part in request.parts), self._core.limits.pins_per_lease)
        self._core.release(client, request.leases)
        for part in request.parts:
            self._core.leases.release_chunks(client, part.lease, part.chunks)

    # --- keeping ---------------------------------------------------------------------------------------

    def pin(self, request: Pin) -> Kept:
        """Pin softly or hard."""
        seconds_max = self._core.limits.pin_s_max
        if not 0 < request.ttl_s <= seconds_max:
            raise RequestRefused("limits", f"a pin lasts at most {seconds_max:.0f} seconds, and more than none")
        entries = self._known(request.chunks)
        self._core.keep(entries, Owner(request.kind, _name(request.by)), request.ttl_s)
        return self._kept(request.rid, entries)

    def unpin(self, request: Unpin) -> Kept:
        """End an owner's pins."""
        by = _name(request.by)
        entries = [e for e in self._known(request.chunks) if self._core.pins.unpin([e], by)]
        return self._kept(request.rid, entries)

    def touch(self, request: Touch) -> Kept | None:
        """Count as used; retain."""
        entries = self._known(request.chunks)
        tenant, seconds = _name(request.tenant), checked_retention(request.retain_s)
        self._core.touch(entries)
        self._cascade.touched(entries)
        for entry in entries:
            self._core.retain(entry, tenant, seconds)
        return self._kept(request.rid, entries) if request.rid else None

    def _known(self, chunks: Sequence[tuple[int, bytes]]) -> list[Entry]:
        check_batch(len(chunks))
        found = (self._core.table.get(group, key) for group, key in dict.fromkeys(chunks))
        return [entry for entry in found if entry is not None and entry.state is SlotState.COMMITTED]

    def _kept(self, rid: int, entries: Sequence[Entry]) -> Kept:
        size = sum(entry.slot_bytes for entry in entries)
        return Kept(rid=rid, boot=self._boot, chunks=len(entries), size=size)

    def kept_by(self, entry: Entry) -> list[KeptBy]:
        """Who keeps a chunk, for listings."""
        now = self._core.clock()
        return [KeptBy(k.owner.kind, k.owner.by, round(max(k.until - now, 0), 1)) for k in self._core.pins.of(entry)]

    def owners(self) -> list[dict[str, str]]:
        """Who keeps how much, for people."""
        now, wall = self._core.clock(), time.time()
        budgets = {"hard": self._core.pins.hard_budget, "retained": self._core.pins.retain_budget}
        return [
            {
                "kind": owner.kind,
                "by": owner.by,
                "chunks": str(total.chunks),
                "bytes": str(total.bytes),
                "budget": str(budgets.get(owner.kind, "")),
                "until": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wall + total.until - now)),
            }
            for owner, total in self._core.pins.totals.items()
        ]

    # --- forgetting ------------------------------------------------------------------------------------

    async def clear(self, request: Clear) -> Cleared:
        """Forget, in memory and then in every tier. Returns when nothing of it is found any more."""
        scope = self._scope(request)
        if len(self._cascade.clearing) >= self._core.limits.clears:
            raise RequestRefused("busy", f"{self._core.limits.clears} clears are under way; try again later")
        # From now until the tiers have forgotten too, nothing of it is brought back.
        with self._cascade.clearing_of(scope):
            ended = asyncio.Event()
            clearing = self._core.clear(scope, ended.set)
            await ended.wait()
            if not clearing.done:
                raise RequestRefused("internal", "the clear failed half way; the store's log has the details")
            coming = self._cascade.on_their_way(scope)
            asked = (self._clear_tier(name, scope, coming.get(name, set())) for name in self._tiers)
            counts = await asyncio.gather(*asked)
        told = {name: -1 if count is None else count for name, count in zip(self._tiers, counts, strict=True)}
        return Cleared(rid=request.rid, chunks=clearing.chunks, tiers=told)

    async def _clear_tier(self, name: str, scope: Scope, coming: set[int]) -> int | None:
        """Remove it there, and wait until what was `coming` has been forgotten too: only then does nothing bring it
        back, whoever is killed. None if that takes too long."""
        tier, traffic = self._tiers[name], self._cascade.tiers.get(name)
        count = await tier.clear_scope(tier_scope(scope), CLEAR_TIER_S)
        until = self._core.clock() + CLEAR_STORES_S
        while coming and traffic is not None and (tier.forgetting or not coming.isdisjoint(traffic.stores)):
            if self._core.clock() > until:
                return None
            await asyncio.sleep(LOOK_S)
        return count

    def _scope(self, request: Clear) -> Scope:
        if not request.root:
            return Scope(request.namespace, request.tenant)
        namespace = self._core.namespaces.get(request.namespace)
        if namespace is None:
            raise RequestRefused("namespace", f"namespace {request.namespace.hex()[:16]} isn't registered here")
        if len(request.root) != KEY_BYTES or len(request.extra) > EXTRA_BYTES_MAX:
            raise RequestRefused("limits", f"a chain begins at a key of {KEY_BYTES} bytes")
        if len(request.tokens) > 4 * LOOKUP_TOKENS_MAX:
            raise RequestRefused("limits", f"a prefix has at most {LOOKUP_TOKENS_MAX} tokens")
        whole = round_down(len(request.tokens) // 4, MATCH_UNIT)
        start = round_down(max(whole - 1, 0), namespace.chunk_tokens)
        before = request.tokens[: 4 * start]
        keys = chunk_keys(request.root, before, namespace.chunk_tokens, request.extra)
        parent = keys[-KEY_BYTES:] if start else request.root
        tokens = request.tokens[4 * start : 4 * whole]
        prefix = Prefix(len(namespace.groups), parent, max(request.start, 0) + start, tokens, request.extra)
        return Scope(request.namespace, request.tenant, prefix)


def tier_scope(scope: Scope) -> ClearScope:
    """The same as a tier is told it."""
    if scope.prefix is None:
        return ClearScope(scope.namespace, scope.tenant)
    at = scope.prefix
    return ClearScope(scope.namespace, scope.tenant, at.groups, at.parent, at.start, at.tokens, at.extra)


def chunk_read(entry: Entry, promoted: str = "") -> ChunkRead:
    """Where a pinned chunk is, as clients are told it."""
    return ChunkRead(
        entry.group, entry.start, entry.token_count, entry.slot.extent, entry.slot.offset, entry.payload_offset,
        entry.payload_length, entry.generation, entry.key, promoted,
    )  # fmt: skip


def check_batch(items: int, most: int = BATCH_ITEMS_MAX) -> None:
    """Raises RequestRefused for more items than one message may have: they are worked off at a stretch."""
    if items > most:
        raise RequestRefused("limits", f"at most {most} items a batch")


def checked_retention(seconds: float) -> float:
    """Seconds of retention that a request asks for. Raises RequestRefused for what is no time."""
    if not 0 <= seconds < 1e9:
        raise RequestRefused("limits", f"retain_s is {seconds}; it takes seconds, 0 for none")
    return seconds


def _name(name: str) -> str:
    """A tenant's or owner's name. Raises RequestRefused for one that can't be shown or stored."""
    if len(name.encode()) > NAME_BYTES_MAX or not name.isprintable():
        raise RequestRefused("limits", f"names have at most {NAME_BYTES_MAX} bytes, all of them printable")
    return name
