"""Work between host memory and tiers: which chunk is being copied where, and who waits for it. Pure.

A store job pins its chunk until the tier reports it finished, up to a cap in bytes a tier: beyond that the
copy is dropped and counted, so that a hung tier can't fill the pool.

What tiers want that take chunks when they are evicted is copied a little before that:

    coldest, not copied | being copied | copied, first to go | free
                         <------------- the reserve -------------->
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forebay.errors import CorruptChunk
from forebay.kvstore.clearing import Scope
from forebay.kvstore.core import StoreCore
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import ChunkHeader, SlotState, decode_header, header_bytes
from forebay.kvstore.layout import granule_count
from forebay.kvstore.lookup import Promotion
from forebay.tiers.base import ChunkId, JobResult, LoadJob, StoreJob
from forebay.tiers.rules import EVICT, SECOND_HIT, WRITE_THROUGH

AHEAD_SHARE = 1 / 16
"""Of the pool: the reserve that is free, or can be without a loss to any tier. It is made up again at half of that."""

AHEAD_CHUNKS = 512
"""No more than these are in the reserve, or on their way there: looking through them is work between two requests."""

REST_S = 0.25
"""So long nothing is copied ahead to a tier that could not take a copy: it is down, or has enough to do."""

FAILURES = ("missing", "corrupt", "full", "quota", "io", "late", "dropped")
"""Reasons that are counted each by its name. What else a tier says is counted as a failure."""

LOST = ("missing", "corrupt")
"""Of these, those that won't be otherwise the next time."""

Jobs = list[tuple[str, StoreJob]]


@dataclass(eq=False)
class Load:
    """A promotion under way. `waiters` lookups want it; each gets a pin of its own when it is there. What
    `clears` cover that were under way meanwhile isn't wanted any more when it comes. `lost`: the tier hasn't got that
    chunk, or not as it was."""

    entry: Entry
    tier: str
    waiters: int = 0
    clears: list[Scope] = field(default_factory=list)
    done: bool = False
    ok: bool = False
    lost: bool = False


@dataclass
class TierTraffic:
    """Jobs of one tier, by job id. `owner` is the lock that its process holds while it may write. `copy` is when chunks
    go there (`TierRule`), `pinned_share` of the pool what that may pin (None: as the store's limits say). `unwanted`
    stores began before a clear that covers them. Until `rests_until` nothing is copied there ahead of its eviction."""

    name: str
    owner: bytes
    copy: str = WRITE_THROUGH
    pinned_share: float | None = None
    stores: dict[int, Entry] = field(default_factory=dict)
    loads: dict[int, Load] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)
    store_bytes: int = 0
    storing: set[Entry] = field(default_factory=set)
    rests_until: float = 0.0


@dataclass
class _Ahead:
    """A chunk that is copied because it may be evicted soon: how often it had been hit before, its jobs under way."""

    hits: int
    jobs: int


class Cascade:
    """Plans and accounts for all tiers' jobs. The daemon carries the jobs to the tiers' processes."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core
        self._job = 0
        self.tiers: dict[str, TierTraffic] = {}
        self.loading: dict[Entry, Load] = {}
        self.clearing: list[Scope] = []
        self._ahead: dict[Entry, _Ahead] = {}
        self._clean: set[Entry] = set()
        self._clean_bytes = self._ahead_bytes = 0
        core.on_retired = self._retired

    # --- from host memory to tiers ---------------------------------------------------------------------

    def store_jobs(self, entry: Entry, moment: str = WRITE_THROUGH) -> Jobs:
        """Jobs that copy a committed chunk to every tier that wants it at this moment and may not have it yet. Pins it
        once for each."""
        assert entry.state is SlotState.COMMITTED
        jobs: Jobs = []
        for tier in self.tiers.values():
            if tier.copy != moment or tier.name in entry.tiers or entry in tier.storing:
                continue
            length = entry.payload_offset - entry.slot.offset + entry.payload_length
            if tier.store_bytes + length > self._cap(tier, length):
                self._core.counters.add(f"tier.{tier.name}.dropped")
                continue
            self._core.pin(entry)
            tier.storing.add(entry)
            tier.store_bytes += length
            tier.stores[self._next()] = entry
            chunk = ChunkId(entry.group, entry.key)
            job = StoreJob(self._job, chunk, entry.parent, entry.slot.extent, entry.slot.offset, length, entry.replaces)
            jobs.append((tier.name, job))
        return jobs

    def _cap(self, tier: TierTraffic, length: int) -> float:
        share = self._core.limits.cascade_share if tier.pinned_share is None else tier.pinned_share
        return max(share * self._core.place.slots.total_bytes, length)

    @property
    def counts_hits(self) -> bool:
        """Does any tier want to be told of hits? If not, nobody needs to."""
        return any(tier.copy != WRITE_THROUGH for tier in self.tiers.values())

    def hit(self, entries: Sequence[Entry]) -> Jobs:
        """A lookup has hit these: jobs of tiers that want what is hit twice."""
        jobs: Jobs = []
        for entry in entries:
            entry.hits += 1
            self._not_clean(entry)
            if entry.hits >= 2 and entry.state is SlotState.COMMITTED:
                jobs += self.store_jobs(entry, SECOND_HIT)
        return jobs

    def copy_ahead(self) -> Jobs:
        """Jobs that make the reserve up again, coldest chunks first, for tiers that want what is evicted."""
        now = self._core.clock()
        wanting = [t.name for t in self.tiers.values() if t.copy == EVICT and t.rests_until <= now]
        chunks = len(self._clean) + len(self._ahead)
        if not wanting or chunks >= AHEAD_CHUNKS / 2:
            return []
        slots = self._core.place.slots
        reserve = AHEAD_SHARE * slots.total_bytes
        spare = slots.free_bytes + self._clean_bytes + self._ahead_bytes
        if spare >= reserve / 2:
            return []
        jobs: Jobs = []
        aside: list[Entry] = []
        while spare < reserve and chunks < AHEAD_CHUNKS and (entry := self._core.place.coldest()) is not None:
            self._core.pin(entry)  # out of the order for now, so that the next one shows
            aside.append(entry)
            if entry in self._clean:
                continue
            if not entry.tiers.issuperset(wanting):
                new = self.store_jobs(entry, EVICT)
                if not new:  # more than that may not be pinned
                    self._rest(wanting)
                    break
                self._ahead[entry] = _Ahead(entry.hits, len(new))
                self._ahead_bytes += entry.slot_bytes
                jobs += new
            else:
                self._now_clean(entry)
            spare, chunks = spare + entry.slot_bytes, chunks + 1
        self._back_in_order(aside)
        return jobs

    def _back_in_order(self, entries: Iterable[Entry]) -> None:
        """Let go of entries that are the first to go, the one that was used the longest ago before the others."""
        for entry in sorted(entries, key=lambda entry: entry.stamp, reverse=True):
            self._core.give_back(entry)

    def _rest(self, tiers: Iterable[str]) -> None:
        for name in tiers:
            self.tiers[name].rests_until = self._core.clock() + REST_S

    def touched(self, entries: Iterable[Entry]) -> None:
        """These were used otherwise than by a lookup: they aren't the next to go any more."""
        for entry in entries:
            self._not_clean(entry)

    def left(self, entry: Entry, tier_name: str) -> None:
        """A tier has lost its copy of a chunk."""
        self._core.not_in_tier(entry, tier_name)
        tier = self.tiers.get(tier_name)
        if tier is not None and tier.copy == EVICT:
            self._not_clean(entry)

    def _now_clean(self, entry: Entry) -> None:
        self._clean.add(entry)
        self._clean_bytes += entry.slot_bytes

    def _not_clean(self, entry: Entry) -> None:
        if entry in self._clean:
            self._clean.remove(entry)
            self._clean_bytes -= entry.slot_bytes

    def _retired(self, entry: Entry, reason: str) -> None:
        self._not_clean(entry)
        if reason not in ("evicted", "quota"):
            return
        for tier in self.tiers.values():
            if tier.copy == EVICT and tier.name not in entry.tiers:
                self._core.counters.add(f"tier.{tier.name}.missed")

    # --- from tiers to host memory ---------------------------------------------------------------------

    def load_job(self, promotion: Promotion, deadline_s: float) -> tuple[str, LoadJob]:
        """The job that fills a reserved promotion."""
        entry, tier = promotion.entry, self.tiers[promotion.offer.tier]
        load = Load(entry, tier.name, clears=list(self.clearing))
        tier.loads[self._next()] = load
        self.loading[entry] = load
        capacity = entry.slot.offset + entry.slot_bytes - entry.payload_offset
        chunk = ChunkId(entry.group, entry.key)
        return tier.name, LoadJob(
            self._job, chunk, entry.slot.extent, entry.payload_offset, capacity, max(deadline_s, 0.001)
        )

    def _next(self) -> int:
        self._job += 1
        return self._job

    def finished(self, tier_name: str, result: JobResult) -> Load | None:
        """Account for a finished job; the load it was, if it was one, so that its waiters can be woken."""
        tier = self.tiers[tier_name]
        entry = tier.stores.pop(result.id, None)
        tier.unwanted.discard(result.id)
        if entry is not None:
            self._stored(tier, entry, result)
            return None
        load = tier.loads.pop(result.id, None)
        if load is None:
            return None
        del self.loading[load.entry]
        load.done = True
        header = self._acceptable(load.entry, result)
        if header is None or any(scope.covers(header) for scope in load.clears):
            self._core.counters.add(f"tier.{tier_name}.load_failed")
            self._core.promotion_failed(load.entry)
            # What a clear covers by its prefix the tier may have for good: that can't be told from the chunk alone.
            load.lost = header is None and (result.ok or result.reason in LOST)
            return load
        load.ok = True
        self._core.promoted(load.entry, header, tier_name)
        for _ in range(load.waiters):
            self._core.pin(load.entry)
        self._core.unpin(load.entry)
        return load

    def _stored(self, tier: TierTraffic, entry: Entry, result: JobResult) -> None:
        tier.store_bytes -= entry.payload_offset - entry.slot.offset + entry.payload_length
        tier.storing.discard(entry)
        if result.ok:
            self._core.in_tier(entry, tier.name)
            self._core.counters.add(f"tier.{tier.name}.stored")
        else:
            reason = result.reason if result.reason in FAILURES else "failed"
            self._core.counters.add(f"tier.{tier.name}.store_{reason}")
            self._rest([tier.name])
        if tier.copy == EVICT and self._copied_ahead(tier, entry):
            self._core.give_back(entry)
            if not self._ahead:
                self._order_clean()
        else:
            self._core.unpin(entry)

    def _order_clean(self) -> None:
        """Each copied chunk went before those that were copied before it: set that right, once for all of them."""
        free = [entry for entry in self._clean if not entry.pins]
        for entry in free:
            self._core.pin(entry)
        self._back_in_order(free)

    def _copied_ahead(self, tier: TierTraffic, entry: Entry) -> bool:
        """Account for a copy that was made ahead; False if the chunk was used meanwhile, and isn't cold any more."""
        ahead = self._ahead[entry]
        ahead.jobs -= 1
        if not ahead.jobs:
            del self._ahead[entry]
            self._ahead_bytes -= entry.slot_bytes
        if ahead.hits != entry.hits:
            return False
        if not ahead.jobs and tier.name in entry.tiers and entry.state is SlotState.COMMITTED:
            self._now_clean(entry)
        return True

    def _acceptable(self, entry: Entry, result: JobResult) -> ChunkHeader | None:
        """The loaded chunk's header, if it is exactly the chunk that was asked for."""
        if not result.ok:
            return None
        try:
            header = decode_header(result.header)
        except CorruptChunk:
            return None
        group = self._core.namespaces[entry.namespace].groups[entry.group]
        same = (
            (header.namespace, header.group, header.key, header.parent, header.start, header.end)
            == (entry.namespace, entry.group, entry.key, entry.parent, entry.start, entry.end)
            and header.payload_length == entry.payload_length
            and len(header.checksums) == 8 * granule_count(group, header.token_count)
            and header_bytes(header.token_count, len(header.extra)) == entry.payload_offset - entry.slot.offset
        )
        return header if same else None

    @contextmanager
    def clearing_of(self, scope: Scope) -> Iterator[None]:
        """While this is open, what tiers bring of a scope isn't published: they may not have forgotten it yet.

        What they were being given before is forgotten when it has arrived, also if it had left the pool already.
        """
        for tier in self.tiers.values():
            tier.unwanted.update(job for job, entry in tier.stores.items() if scope.covers(entry))
        for load in self.loading.values():
            load.clears.append(scope)
        self.clearing.append(scope)
        try:
            yield
        finally:
            self.clearing.remove(scope)

    def came_too_late(self, tier_name: str, result: JobResult) -> ChunkId | None:
        """A chunk that was cleared, or found damaged, while it was being stored: the tier must forget it too.

        Ask before `finished`.
        """
        tier = self.tiers[tier_name]
        entry = tier.stores.get(result.id)
        if entry is None or entry.state is SlotState.COMMITTED or not (result.ok or result.reason == "io"):
            return None  # after an error, or with a lost process, the chunk may be there all the same
        # A reason that isn't remembered any more may have been one of them.
        gone = result.id in tier.unwanted or self._core.removed.get(entry.id, "cleared") in ("cleared", "corrupt")
        return ChunkId(entry.group, entry.key) if gone else None

    def on_their_way(self, scope: Scope) -> dict[str, set[int]]:
        """Stores under way, by tier, of chunks that this clear has taken from the pool: they get there only later."""
        def gone(entry: Entry) -> bool:
            return entry.state is not SlotState.COMMITTED and scope.covers(entry)

        return {
            tier.name: {job for job, entry in tier.stores.items() if gone(entry)} for tier in self.tiers.values()
        }

    @property
    def storing(self) -> bool:
        """Is any tier being given something?"""
        return any(tier.stores for tier in self.tiers.values())

    @property
    def busy(self) -> bool:
        """Is any job under way?"""
        return any(tier.stores or tier.loads for tier in self.tiers.values())
