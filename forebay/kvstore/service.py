"""The store as a service: requests of clients, jobs of tiers, and what happens when either disappears."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from forebay.errors import RequestRefused
from forebay.ipc.sockets import DESCRIPTORS_MAX
from forebay.kvstore import report, tenant_report
from forebay.kvstore.announce import Announcer
from forebay.kvstore.cascade import Cascade, Jobs
from forebay.kvstore.core import Client, StoreCore
from forebay.kvstore.demand import Demand
from forebay.kvstore.entry import Entry
from forebay.kvstore.extents import ClientLocks, PoolFiles
from forebay.kvstore.header import TENANT_BYTES_MAX, SlotState
from forebay.kvstore.identity import (
    KEY_BYTES,
    Namespace,
    chunk_keys,
    decode_namespace,
    encode_namespace,
)
from forebay.kvstore.intake import Intake
from forebay.kvstore.layout import check_shard
from forebay.kvstore.lookup import Prompt, match
from forebay.kvstore.promises import Promises, check_batch
from forebay.kvstore.protocol import (
    BATCH_ITEMS_MAX,
    DEADLINE_S_MAX,
    EXTRA_BYTES_MAX,
    LOOKUP_CHUNKS_MAX,
    LOOKUP_TOKENS_MAX,
    Abort,
    Check,
    Checked,
    ChunkRead,
    Clear,
    Commit,
    Damaged,
    Explain,
    Explained,
    Extents,
    Fetch,
    Fetched,
    Foreseen,
    Found,
    GetExtents,
    GetStats,
    Hello,
    Hold,
    Join,
    List,
    Lookup,
    Pin,
    Place,
    Register,
    Registered,
    Release,
    Request,
    Reserve,
    Rows,
    SetAside,
    Stats,
    Survey,
    Surveyed,
    Touch,
    Unpin,
    Warm,
    Warmed,
    Welcome,
    WhatIf,
)
from forebay.kvstore.reader import Brought, Reader
from forebay.kvstore.readopt import is_intact
from forebay.kvstore.server import Answer, Connection
from forebay.kvstore.writers import Writers
from forebay.kvstore.writing import Writing, known_namespace
from forebay.tiers.base import JobResult, LookupResult, StoreJob, TierChange

if TYPE_CHECKING:
    from forebay.tiers.host import TierHost

log = logging.getLogger(__name__)

EXPLAIN_TIER_S = 2.0
TIER_FIGURES_MAX = 512
"""Figures of one tier that are passed on; somebody else's may have any number."""
LABEL_CHARACTERS_MAX = 128
WAITING_MAX = 64
"""Connections beyond the limit that are told so, at their Hello."""
VIEWS = (GetStats, WhatIf, List, Explain)
"""What a view of one tenant may ask."""


@dataclass
class StoreService:
    """Wires core, pool, tiers and connections together. One a daemon, on its loop."""

    core: StoreCore
    pool: PoolFiles
    locks: ClientLocks
    boot: bytes
    announcer: Announcer
    info: dict[str, str] = field(default_factory=dict)
    tiers: dict[str, TierHost] = field(default_factory=dict)
    connections: set[Connection] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.cascade = Cascade(self.core)
        self.reader = Reader(self.core, self.cascade, self.tiers, lambda entry: is_intact(self.pool, entry))
        self.promises = Promises(self.core, self.cascade, self.tiers, self.boot)
        self.writing = Writing(self.core, self.boot, self._published)
        self.writers = Writers(self.core, self.locks, self._end_connection)
        self.core.chores.wake = self._work_soon
        self.demand = Demand(self.core)
        self.intake = Intake(self.core.limits.intake_bytes)
        self.core.on_forgotten = self._namespace_forgotten
        self._working = self._stopped = False

    # --- connections -----------------------------------------------------------------------------------

    def welcome(self, hello: Hello) -> tuple[Welcome, list[int], Client]:
        """Take a client in. It writes nothing from before any more, so its quarantine ends."""
        if len(self.connections) > self.core.limits.connections:
            raise RequestRefused("busy", f"{self.core.limits.connections} clients are connected already")
        client, lock = self.writers.welcome(hello)
        return Welcome(rid=hello.rid, boot=self.boot, extent_bytes=self.pool.extent_bytes), [lock], client

    def crowded(self) -> bool:
        """Are there so many connections that another one isn't even listened to?"""
        return len(self.connections) > self.core.limits.connections + WAITING_MAX

    def gone(self, connection: Connection) -> None:
        """A connection has ended: its promises end now, slots once nobody can be writing into them."""
        self.connections.discard(connection)
        if connection.client is not None:
            self.writers.gone(connection.client)

    def _end_connection(self, client: Client) -> None:
        for connection in [c for c in self.connections if c.client is client]:
            connection.abort()

    # --- time ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a second: quarantined writers may have died, promises have come to their end."""
        self.writers.check_all()
        self.demand.fade(asyncio.get_running_loop().time())
        self._work_soon()

    def _work_soon(self) -> None:
        """Go on with the core's long work between other things: a slice in each turn of the loop."""
        if not self._working:
            self._working = True
            asyncio.get_running_loop().call_soon(self._work)

    def stop(self) -> None:
        """The pool is about to be unmapped: long work that is left stays undone."""
        self._stopped = True

    def _work(self) -> None:
        self._working = False
        if self._stopped:
            return
        try:
            more = self.core.tick()
        except Exception:
            # That chore is lost, which is a bug to be told; the others must go on.
            self.core.counters.add("store.background_failures")
            log.exception("long work of the store has failed")
            more = True
        if more:
            self._work_soon()

    # --- requests --------------------------------------------------------------------------------------

    def handle(self, connection: Connection, request: Request) -> Answer:
        """Dispatch one request."""
        client = connection.client
        assert client is not None
        if client.tenant is not None and not isinstance(request, VIEWS):
            raise RequestRefused("tenant", f"a view of one tenant takes no {type(request).__name__}")
        match request:
            case Lookup():
                return self._lookup(connection, client, request)
            case Warm():
                return self._warm(connection, client, request)
            case Survey():
                return self._survey(request)
            case Fetch():
                return self._fetch(connection, client, request)
            case Reserve() | Commit() | Abort() | SetAside():
                return self.writing.handle(client, request)
            case Hold() | Join() | Release() | Pin() | Unpin() | Touch() | Clear():
                return self.promises.handle(client, request)
            case Damaged():
                self._damaged(request)
                return None
            case Register():
                return self._register(client, request)
            case GetExtents():
                self._extents(connection, request)
                return None
            case _:
                return self._watch(client.tenant, request)

    def _watch(self, tenant: str | None, request: Request) -> Answer:
        match request:
            case GetStats():
                return self._stats(tenant, request)
            case WhatIf():
                return self._what_if(tenant, request)
            case List():
                return self._list(tenant, request)
            case Explain():
                return self._explain(tenant, request)
            case Check():
                return self._check(request)
            case _:
                raise RequestRefused("unknown", f"{type(request).__name__} is not expected here")

    def _register(self, client: Client, request: Register) -> Registered:
        try:
            namespace = decode_namespace(request.namespace)
            most = self.core.limits.namespaces_per_client
            if namespace.id not in client.namespaces and len(client.namespaces) >= most:
                raise RequestRefused("limits", f"one client uses at most {most} namespaces; connect once more")
            why = check_shard(namespace, request.shard) if request.shard else None
            if why:
                raise RequestRefused("namespace", why)
            namespace_id = self.core.register(namespace, _plain(request.label), client)
        except ValueError as error:
            raise RequestRefused("namespace", str(error)) from error
        encoded = encode_namespace(namespace)
        self.pool.save_namespace(namespace_id, encoded)
        for tier in self.tiers.values():
            tier.note_namespace(namespace_id, encoded)
        self.announcer.register(namespace_id)
        return Registered(rid=request.rid, namespace=namespace_id)

    def _namespace_forgotten(self, namespace_id: bytes) -> None:
        self.pool.forget_namespace(namespace_id)
        self.announcer.forget(namespace_id)

    def _extents(self, connection: Connection, request: GetExtents) -> None:
        wanted = sorted(e for e in self.core.place.slots.extents if e >= request.after)
        batch = wanted[:DESCRIPTORS_MAX]
        descriptors: list[int] = []
        try:
            descriptors.extend(os.dup(self.pool.descriptors[extent]) for extent in batch)
        except OSError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        reply = Extents(rid=request.rid, extents=batch, more=len(wanted) > len(batch))
        connection.send(reply, descriptors)

    def _prompt(self, request: Lookup | Explain | Survey | Fetch, limit: int) -> Prompt:
        """The question of a request, checked. Raises RequestRefused."""
        namespace = known_namespace(self.core, request.namespace)
        most = _tokens_max(namespace)
        if len(request.tokens) > 4 * most or len(request.extra) > EXTRA_BYTES_MAX:
            raise RequestRefused("limits", f"a lookup has at most {most} tokens, in chunks of {namespace.chunk_tokens}")
        tenant = request.tenant if isinstance(request, Lookup | Fetch) else ""
        if len(tenant.encode()) > TENANT_BYTES_MAX:
            raise RequestRefused("limits", f"a tenant's id has at most {TENANT_BYTES_MAX} bytes")
        if len(request.root) != KEY_BYTES:
            raise RequestRefused("limits", f"a chain begins at a key of {KEY_BYTES} bytes")
        if isinstance(request, Explain):
            keys = chunk_keys(request.root, request.tokens, namespace.chunk_tokens, request.extra)
        else:
            keys = request.keys
        lease_s = request.lease_ms / 1000 if isinstance(request, Lookup) else 0.0
        prompt = Prompt(
            request.namespace, namespace, request.root, request.tokens, keys, limit, request.extra, lease_s, tenant,
            request.tokens_from if isinstance(request, Lookup | Fetch) else 0,
        )  # fmt: skip
        if not 0 <= prompt.tokens_from <= most or prompt.tokens_from % namespace.chunk_tokens:
            raise RequestRefused("limits", f"tokens from {prompt.tokens_from} on don't begin where a chunk does")
        if len(keys) != -(-prompt.whole // namespace.chunk_tokens) * KEY_BYTES:
            raise RequestRefused("limits", "a lookup has one 32-byte key for each chunk that its whole units touch")
        return prompt

    def _lookup(self, connection: Connection, client: Client, request: Lookup) -> Answer:
        prompt = self._prompt(request, request.limit)
        pinned = self.reader.at_once(client, prompt, request.deadline_ms)
        self.core.take_out_suspects()
        if pinned is not None and pinned.wants >= 0:
            return Found(rid=request.rid, boot=self.boot, lease=0, hit=0, chunks=[], from_tier={}, wants=pinned.wants)
        self.core.counters.add("store.lookups")
        if pinned is not None:
            return self._found(request, prompt, Brought(pinned, {}))
        return self._lookup_slowly(connection, client, request, prompt)

    async def _lookup_slowly(self, connection: Connection, client: Client, request: Lookup, prompt: Prompt) -> Found:
        brought = await self.reader.lookup(client, prompt, _patience_ms(request), lambda: not connection.closed)
        return self._found(request, prompt, brought)

    async def _survey(self, request: Survey) -> Surveyed:
        prompt = self._prompt(request, request.limit)
        found = await self.reader.survey(prompt, _patience_ms(request))
        reach = found.hit_with_offers()
        lacking = [place for place in found.needed(reach) if not found.has(*place, reach)]
        places = [Place(*place, found.offers[place].tier, found.offers[place].length) for place in lacking]
        return Surveyed(rid=request.rid, boot=self.boot, hit=found.hit(), reach=reach, places=places)

    async def _fetch(self, connection: Connection, client: Client, request: Fetch) -> Fetched:
        prompt = self._prompt(request, request.limit)
        size, groups = prompt.namespace.chunk_tokens, len(prompt.namespace.groups)
        check_batch(len(request.wanted))
        for group, position in request.wanted:
            known = prompt.tokens_from <= position * size and position < prompt.positions
            if not (0 <= group < groups and known):
                raise RequestRefused("limits", f"position {position} of group {group} is no place of this prompt")
        places = list(dict.fromkeys(request.wanted))
        brought = await self.reader.fetch(
            client, prompt, places, _patience_ms(request), lambda: not connection.closed, request.aside
        )
        self.core.counters.add("store.fetches")
        pinned = brought.pinned
        if self.cascade.counts_hits:
            asyncio.get_running_loop().call_soon(self._hit, pinned.entries)
        return Fetched(
            rid=request.rid, boot=self.boot, lease=pinned.lease, chunks=_reads(pinned.entries, brought.origins),
            pending=brought.pending, gone=list(brought.gone),
        )  # fmt: skip

    async def _warm(self, connection: Connection, client: Client, request: Warm) -> Warmed:
        namespace = known_namespace(self.core, request.namespace)
        tokens = len(request.keys) // KEY_BYTES * namespace.chunk_tokens
        if len(request.keys) % KEY_BYTES or tokens > _tokens_max(namespace) or len(request.extra) > EXTRA_BYTES_MAX:
            limits = f"a chain to warm has 32-byte keys, of at most {_tokens_max(namespace)} tokens in all"
            raise RequestRefused("limits", limits)
        if len(request.root) != KEY_BYTES or len(request.tenant.encode()) > TENANT_BYTES_MAX:
            raise RequestRefused("limits", f"a chain begins at a key of {KEY_BYTES} bytes")
        # What the tokens are isn't known, so tiers answer for the exact keys alone.
        prompt = Prompt(
            request.namespace, namespace, request.root, bytes(4 * tokens), request.keys, tokens, request.extra,
            tenant=request.tenant,
        )  # fmt: skip
        brought = await self.reader.lookup(client, prompt, _patience_ms(request), lambda: not connection.closed)
        self.core.release(client, [brought.pinned.lease])
        self.core.counters.add("store.warms")
        return Warmed(
            rid=request.rid, boot=self.boot, hit=brought.pinned.hit, from_tier=_tokens_by_tier(prompt, brought),
            pending=brought.pending,
        )  # fmt: skip

    def _found(self, request: Lookup, prompt: Prompt, brought: Brought) -> Found:
        pinned = brought.pinned
        self.core.counters.add("store.hit_tokens", pinned.hit)
        # After the answer has gone: who asks shouldn't wait for our bookkeeping.
        asyncio.get_running_loop().call_soon(self.demand.looked_up, request.tenant, prompt, pinned.hit)
        if self.core.policies.observes:
            size, now = prompt.namespace.chunk_tokens, self.core.clock()
            asyncio.get_running_loop().call_soon(self.core.policies.looked_up, prompt.keys, pinned.entries, now, size)
        if self.cascade.counts_hits:
            asyncio.get_running_loop().call_soon(self._hit, pinned.entries)
        return Found(
            rid=request.rid, boot=self.boot, lease=pinned.lease, hit=pinned.hit,
            chunks=_reads(pinned.entries, brought.origins), from_tier=_tokens_by_tier(prompt, brought),
            pending=brought.pending, lease_ms=int(self.core.lease_seconds(prompt.lease_s) * 1000),
        )  # fmt: skip

    def _published(self, entry: Entry) -> None:
        self.demand.stored(entry)
        self.spread(entry)

    def spread(self, entry: Entry) -> None:
        """Copy a committed chunk to the tiers that want it now, and what it may displace to those that want that."""
        self._give(self.cascade.store_jobs(entry))
        self._give(self.cascade.copy_ahead())

    def _give(self, jobs: Jobs) -> None:
        batches: dict[str, list[StoreJob]] = {}
        for name, job in jobs:
            batches.setdefault(name, []).append(job)
        for name, batch in batches.items():
            self.tiers[name].store(batch)

    def _hit(self, entries: Sequence[Entry]) -> None:
        self._give(self.cascade.hit(entries))

    def _damaged(self, request: Damaged) -> None:
        check_batch(len(request.chunks))
        for group, key in request.chunks:
            entry = self.core.table.get(group, key)
            if entry is not None and entry.state is SlotState.COMMITTED:
                self.reader.doubt(entry)

    # --- watching --------------------------------------------------------------------------------------

    async def _stats(self, tenant: str | None, request: GetStats) -> Stats:
        tenants = tenant_report.tenant_rows(self.core, tenant)
        if tenant is not None:
            return Stats(
                rid=request.rid, boot=self.boot, pid=os.getpid(), values={}, info={},
                namespaces=report.namespace_rows(self.core, counts=False), tiers=[], tenants=tenants,
                pins=[row for row in self.promises.owners() if (row["kind"], row["by"]) == ("retained", tenant)],
            )  # fmt: skip
        values, tiers = await self.figures()
        return Stats(
            rid=request.rid, boot=self.boot, pid=os.getpid(), values=values, info=self.info | self.announcer.places(),
            namespaces=report.namespace_rows(self.core), tiers=tiers, pins=self.promises.owners(), tenants=tenants,
        )  # fmt: skip

    def _what_if(self, tenant: str | None, request: WhatIf) -> Foreseen:
        now = self.core.place.slots.total_bytes
        if not 0 < request.budget < 1 << 62:
            raise RequestRefused("limits", f"a budget of {request.budget} bytes is none")
        sizes = tenant_report.curve_sizes(request.budget, now)
        told = tenant_report.foresee(self.core, self.demand.curves, request.budget, tenant)
        return Foreseen(rid=request.rid, budget_now=now, budget=request.budget, sizes=sizes, tenants=told)

    async def figures(self) -> tuple[dict[str, float], list[dict[str, str]]]:
        """All counters and gauges by dotted name, and a description of each tier."""
        values = report.gauges(self.core, self.cascade) | self.reader.figures() | self.announcer.figures()
        values["store.connections"] = len(self.connections)
        values["store.intake_bytes"], values["store.intake_refused"] = self.intake.bytes, self.intake.refused
        values["host.retired_ever"] = self.pool.retired()
        values["store.tenants"] = len(self.core.place.accounts)
        values["curves.tenants"] = len(self.demand.curves)
        values["curves.keys"] = self.demand.curves.keys
        tiers = []
        for name, tier in self.tiers.items():
            stats = await tier.stats()
            told = islice(stats.values.items(), TIER_FIGURES_MAX)
            values.update({f"tier.{name}.{key}": value for key, value in told})
            tiers.append({"name": name, **stats.info})
        return values, tiers

    def _list(self, tenant: str | None, request: List) -> Rows:
        limit = max(1, min(request.limit, BATCH_ITEMS_MAX))
        if not 0 <= request.cursor < 1 << 62:
            raise RequestRefused("limits", f"cursor {request.cursor} is none that an earlier page gave")
        page = self.core.place.page(request.cursor, limit)
        wanted = (
            entry
            for entry in page.entries
            if request.namespace in (b"", entry.namespace) and tenant in (None, entry.tenant)
        )
        rows = [report.row(entry, self.promises.kept_by(entry)) for entry in wanted]
        return Rows(rid=request.rid, rows=rows, cursor=page.cursor)

    async def _explain(self, tenant: str | None, request: Explain) -> Explained:
        prompt = self._prompt(request, len(request.tokens) // 4)
        found = match(self.core, prompt)
        results: dict[str, list[list[LookupResult]]] = {}
        for name, tier in self.tiers.items():
            results[name] = []
            for group in range(len(prompt.namespace.groups)):
                asked = [prompt.query(group, position) for position in range(prompt.positions)]
                results[name].append(await tier.lookup(asked, EXPLAIN_TIER_S))
        reaches = report.explain(self.core, found, results, others=tenant is None)
        return Explained(rid=request.rid, hit=found.hit(), reaches=reaches)

    async def _check(self, request: Check) -> Checked:
        chunks = read = 0
        damaged = []
        for entry in (entry for some in self.core.place.walk() for entry in some):
            if entry.state is not SlotState.COMMITTED:
                continue
            self.core.pin(entry)
            try:
                intact = await asyncio.to_thread(is_intact, self.pool, entry)
            finally:
                self.core.unpin(entry)
            chunks, read = chunks + 1, read + entry.payload_length
            if not intact:
                damaged.append(f"group {entry.group} tokens [{entry.start}, {entry.end}) key {entry.key.hex()}")
                if request.repair and entry.state is SlotState.COMMITTED:
                    self.core.damaged(entry)
        return Checked(rid=request.rid, chunks=chunks, bytes=read, damaged=damaged)

    # --- tiers -----------------------------------------------------------------------------------------

    def finished(self, tier: str, results: Sequence[JobResult]) -> None:
        """A tier reports jobs as finished: it doesn't touch their slots any more."""
        for result in results:
            late = self.cascade.came_too_late(tier, result)
            if late is not None:
                self.tiers[tier].forget([late], "cleared")
            load = self.cascade.finished(tier, result)
            if load is not None:
                self.reader.arrived(load)
                if load.ok:
                    self.spread(load.entry)

    def changed(self, tier: str, changes: Sequence[TierChange]) -> None:
        """Chunks came into a tier or left it."""
        for change in changes:
            entry = self.core.table.get(change.chunk.group, change.chunk.key)
            if entry is not None and change.stored:
                self.core.in_tier(entry, tier)
            elif entry is not None:
                self.cascade.left(entry, tier)
            self.announcer.tier(tier, change)

    async def read_adopted(self) -> None:
        """After a restart: read every adopted chunk in the background, so that it may be announced."""
        for entry in (entry for some in self.core.place.walk() for entry in some):
            if not entry.verified and entry.state is SlotState.COMMITTED:
                await self.reader.check(entry)
                if entry.verified and entry.state is SlotState.COMMITTED:
                    self.spread(entry)

    async def drain(self, timeout_s: float) -> None:
        """Wait until what is being copied to tiers has arrived there."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while self.cascade.storing and loop.time() < until:
            await asyncio.sleep(0.02)


def _tokens_max(namespace: Namespace) -> int:
    return min(LOOKUP_TOKENS_MAX, LOOKUP_CHUNKS_MAX * namespace.chunk_tokens)


def _reads(entries: Sequence[Entry], origins: Mapping[Entry, str]) -> list[ChunkRead]:
    """Pinned chunks as a client reads them."""
    return [
        ChunkRead(
            entry.group, entry.start, entry.token_count, entry.slot.extent, entry.slot.offset,
            entry.payload_offset, entry.payload_length, entry.generation, entry.key, origins.get(entry, ""),
        )
        for entry in entries
    ]  # fmt: skip


def _tokens_by_tier(prompt: Prompt, brought: Brought) -> dict[str, int]:
    """Tokens of a hit that tiers had to bring, by tier; a position that several groups lacked counts once."""
    from_tier: dict[str, int] = {}
    pinned, origins = brought.pinned, brought.origins
    if not origins:
        return from_tier
    counted: set[int] = set()
    for entry in pinned.entries:
        if entry in origins and entry.start not in counted:
            counted.add(entry.start)
            tokens = min(prompt.namespace.chunk_tokens, pinned.hit - entry.start)
            from_tier[origins[entry]] = from_tier.get(origins[entry], 0) + tokens
    return from_tier


def _patience_ms(request: Lookup | Warm | Survey | Fetch) -> int:
    return min(request.deadline_ms, int(DEADLINE_S_MAX * 1000))


def _plain(label: str) -> str:
    """A label as it may go to terminals and topics: printable, and not endless."""
    return "".join(character if character.isprintable() else "?" for character in label[:LABEL_CHARACTERS_MAX])
