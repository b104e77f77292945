"""Which requests have a hot region, what is on the device and in host memory of each, and who gives way.

A region is some blocks of the same pool as everybody's pages. So memory goes where it is needed: as long as there is
room every request is *full* and nothing is copied; when there isn't, requests get a region and let go of pages that
host memory has, one after the other.

The numbers of regions are the rows of the resolver's tables. Owned by the engine's thread; no call blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from forebay.kvstore.identity import MATCH_UNIT
from forebay.scheduler.request import Request
from forebay.workers.block_pool import GroupPool
from forebay.workers.counters import Counters
from forebay.workers.hot.buffers import Buffers
from forebay.workers.hot.cold import ColdRows
from forebay.workers.hot.mirror import HostChunk, HostPages
from forebay.workers.hot.residency import Page, Pages
from forebay.workers.hot.settings import HotSettings
from forebay.workers.hot.telling import Changes
from forebay.workers.prefix import units_of

NO_REGION = -1


@dataclass(slots=True, eq=False)
class HotRequest:
    """One admitted `request`. `admission` numbers it: what was set out for an earlier one comes to nothing. `region`
    has `blocks`; `chunks` are what host memory holds for it; `keys` the unit keys of lent pages. `failed`: from
    where on chunks are missing there; after so many `refusals` they are offered again at `offer_at`. `since`: when
    it began to lack something, or None. `aside` is the lease under which the store has room for the rest of its
    chunks, or 0; `asking` for it is under way, at `refused` it was refused last. `cold` are rows that tiers have;
    `named` the chunks, by position, whose rows have been chosen, the latest last."""

    request: Request
    admission: int
    pages: Pages = field(default_factory=Pages)
    region: int = NO_REGION
    blocks: list[int] = field(default_factory=list)
    chunks: list[HostChunk] = field(default_factory=list)
    keys: dict[bytes, int] = field(default_factory=dict)
    failed: int | None = None
    refusals: int = 0
    offer_at: float = 0.0
    since: float | None = None
    aside: int = 0
    asking: bool = False
    refused: float | None = None
    cold: ColdRows | None = None
    named: dict[int, None] = field(default_factory=dict)

    @property
    def hot(self) -> bool:
        """Has it a region?"""
        return self.region != NO_REGION


class HotBook:
    """The books of all requests with a sparse group. `release(leases)` gives leases back, later and elsewhere.

    `changes` is what other ranks are to be told, None if there are none."""

    def __init__(
        self,
        settings: HotSettings,
        pool: GroupPool,
        granule_bytes: int,
        host_pages: int,
        release: Callable[[Sequence[int]], None],
        device: torch.device | None = None,
    ) -> None:
        self.settings, self.pool = settings, pool
        self.buffers = Buffers(settings.sharers, settings.regions, settings.rows, device)
        self.host = HostPages(granule_bytes, host_pages, self._gone, self._new)
        self.changes: Changes | None = None
        self.counters = Counters()
        self._release = release
        self._requests: dict[Hashable, HotRequest] = {}
        self._free = list(range(settings.regions - 1, -1, -1))
        self._lent: dict[bytes, dict[Hashable, int]] = {}
        self._admissions = 0
        self._leases: dict[int, int] = {}

    # --- requests ----------------------------------------------------------------------------------------

    def of(self, key: Hashable) -> HotRequest:
        """The books of an admitted request."""
        return self._requests[key]

    def known(self, key: Hashable, admission: int) -> HotRequest | None:
        """The same if it is still admitted, for that same time."""
        found = self._requests.get(key)
        return found if found is not None and found.admission == admission else None

    def hot(self, key: Hashable) -> bool:
        """Has this request a region?"""
        found = self._requests.get(key)
        return found is not None and found.hot

    def everybody(self) -> Iterator[tuple[Hashable, HotRequest]]:
        """All admitted requests. Don't let any come or go meanwhile."""
        return iter(self._requests.items())

    def admit(self, request: Request) -> None:
        """A request has been admitted, full so far."""
        assert request.key not in self._requests, request.key
        self._admissions += 1
        self._requests[request.key] = HotRequest(request, self._admissions)

    def host_room(self, pages: int) -> bool:
        """Would so many more host pages fit, beside all that hot requests may come to need?"""
        promised = sum(max(0, units_of(r.request.most) - r.pages.hosted) for r in self._requests.values() if r.hot)
        return len(self.host) + promised + pages <= self.host.most

    def can_open(self) -> bool:
        """Is there another region to give?"""
        return bool(self._free)

    def open_region(self, key: Hashable, blocks: Sequence[int]) -> None:
        """Give a request a region in `blocks`, which it holds."""
        request = self._requests[key]
        assert not request.hot and len(blocks) == self.settings.blocks, (key, len(blocks))
        request.region, request.blocks = self._free.pop(), list(blocks)
        self.buffers.open(request.region, request.blocks)
        if self.changes is not None:
            self.changes.open(request.region, request.blocks)
        request.request.step_tokens = self.settings.step_tokens
        self.counters.add("hot.regions_opened")

    def close(self, key: Hashable) -> HotRequest:
        """The request holds nothing any more: not its region, nor anything in host memory. The blocks of its region are
        the caller's to drop."""
        request = self._requests.pop(key)
        if request.hot:
            self._free.append(request.region)
        for unit_key in list(request.keys):
            self._unlend(unit_key, key)
        self._let_go_of_host(request)
        if request.aside:
            self._release([request.aside])
            request.aside = 0
        return request

    # --- pages -------------------------------------------------------------------------------------------

    def follow(self, key: Hashable, table: Sequence[int]) -> Pages:
        """The pages of a request, whose table may have become longer."""
        request = self._requests[key]
        pages = request.pages
        for page in range(len(pages), len(table)):
            if table[page] >= 0:
                pages.append(table[page])
            else:
                pages.append_absent()
        return pages

    def hosted(self, key: Hashable, admission: int, chunk: HostChunk, table: Sequence[int]) -> None:
        """Host memory has a chunk that was set out at `admission`. If nobody wants it any more, its lease is given
        back."""
        if chunk.lease:
            self._leases.setdefault(chunk.lease, chunk.shares)
        request = self.known(key, admission)
        if request is None or not self._arrive(self.follow(key, table), chunk):
            self._unuse(chunk.lease)
            return
        request.chunks.append(chunk)
        request.since, request.refusals, request.offer_at = None, 0, 0.0
        self.counters.add("hot.chunks_held")

    def _arrive(self, pages: Pages, chunk: HostChunk) -> int:
        """How many pages have a place in host memory with this that had none."""
        first, arrived = chunk.start // MATCH_UNIT, 0
        for unit in range(chunk.tokens // MATCH_UNIT):
            page = first + unit
            if page < len(pages) and pages.host[page] < 0:
                number = self.host.add(chunk, unit)
                if number is None:
                    self.counters.add("hot.host_pages_refused")
                    break
                pages.arrive(page, number)
                arrived += 1
        return arrived

    def missing(self, key: Hashable, admission: int, start: int) -> None:
        """A chunk that was set out is not in host memory: it will have to be offered again."""
        request = self.known(key, admission)
        if request is not None:
            request.failed = start if request.failed is None else min(request.failed, start)
            self.counters.add("hot.chunks_refused")

    def lose_host(self) -> list[Hashable]:
        """The store has gone, and its promises with it. Returns requests of which something is nowhere now."""
        lost = []
        for key, request in self._requests.items():
            self.host.drop(int(page) for page in request.pages.host if page >= 0)
            absent = request.pages.forget_host()
            # What is lent may be reused at any moment, and then it would be nowhere.
            if absent or request.keys:
                lost.append(key)
            request.chunks.clear()
            request.aside = 0
        self._leases.clear()
        return lost

    # --- rows that tiers have ----------------------------------------------------------------------------

    def named(self, key: Hashable, chunks: Sequence[int], missing: Collection[int]) -> None:
        """A step has chosen rows of these chunks. If some were `missing`, it is void for this request."""
        request = self._requests[key]
        for position in chunks:
            request.named.pop(position, None)
            request.named[position] = None
        if request.cold is None:
            return
        if missing:
            request.cold.lack(missing, chunks)
            self.counters.add("hot.parked_steps")
            self.counters.add("hot.chunks_waited_for", len(missing))
        else:
            request.cold.read(chunks)

    def brought(self, key: Hashable, position: int) -> bool:
        """Has every page of a chunk a place on the device or in host memory?"""
        pages, of_chunk = self._requests[key].pages, self._pages_of(position)
        return bool(((pages.resident[of_chunk] >= 0) | (pages.host[of_chunk] >= 0)).all())

    def leave(self, key: Hashable, position: int) -> bool:
        """Let go of a chunk in host memory that a tier has. False: some of its pages are the request's own as well, and
        it stays."""
        request, pages = self._requests[key], self._requests[key].pages
        of_chunk = [p for p in range(len(pages))[self._pages_of(position)] if pages.host[p] >= 0]
        if any(pages.state(page) is not Page.ABSENT for page in of_chunk):
            return False
        self.host.drop([pages.leave(page) for page in of_chunk])
        start = position * self.settings.chunk_tokens
        for chunk in [chunk for chunk in request.chunks if chunk.start == start]:
            request.chunks.remove(chunk)
            self._unuse(chunk.lease)
        self.counters.add("hot.chunks_left")
        return True

    def _pages_of(self, position: int) -> slice:
        units = units_of(self.settings.chunk_tokens)
        return slice(position * units, (position + 1) * units)

    # --- room in the store -------------------------------------------------------------------------------

    def promised(self, key: Hashable, admission: int, aside: int) -> bool:
        """The store has set room aside for this stay of a request. What nobody wants any more is given back: False."""
        request = self.known(key, admission)
        if request is None or request.aside:
            self._release([aside])
            return False
        request.aside = aside
        return True

    def lacking(self, key: Hashable) -> int:
        """Of how many whole chunks that a request can come to have host memory has none."""
        request, size = self._requests[key], self.settings.chunk_tokens
        there = {chunk.start for chunk in request.chunks if chunk.tokens == size}
        return max(1, -(-request.request.most // size) - len(there))

    # --- release -----------------------------------------------------------------------------------------

    def clean(self, key: Hashable) -> int:
        """How many pages a request could let go of."""
        return sum(1 for _ in self._requests[key].pages.releasable())

    def let_go(self, key: Hashable, table: list[int], unit_keys: Sequence[bytes]) -> int:
        """Drop all clean pages before the tail; returns how many blocks that gave back: those that nobody else uses.
        Mutates `table`."""
        request, freed = self._requests[key], 0
        for page in list(request.pages.releasable()):
            findable = self.pool.sealed(table[page])
            freed += self.pool.sole(table[page])
            block = request.pages.release(page, findable=findable)
            assert block == table[page], (page, block, table[page])
            table[page] = -1
            if findable:
                self._lend(unit_keys[page], key, page)
            self.pool.drop(block)
            self.counters.add("hot.pages_released")
        return freed

    def reused(self, unit_key: bytes) -> None:
        """The pool has taken the block of a unit that nobody held. Called for every eviction."""
        for key, page in self._lent.pop(unit_key, {}).items():
            request = self._requests[key]
            del request.keys[unit_key]
            request.pages.reused(page)

    def _lend(self, unit_key: bytes, key: Hashable, page: int) -> None:
        self._lent.setdefault(unit_key, {})[key] = page
        self._requests[key].keys[unit_key] = page

    def _unlend(self, unit_key: bytes, key: Hashable) -> None:
        users = self._lent.get(unit_key, {})
        users.pop(key, None)
        if not users:
            self._lent.pop(unit_key, None)

    # --- host memory -------------------------------------------------------------------------------------

    def _gone(self, pages: Sequence[int]) -> None:
        self.buffers.forget(pages)
        if self.changes is not None:
            self.changes.end(pages)

    def _new(self, page: int, chunk: HostChunk, unit: int) -> None:
        if self.changes is not None:
            assert chunk.place is not None, "other ranks couldn't find it"
            self.changes.arrive(page, unit, chunk.place)

    def _let_go_of_host(self, request: HotRequest) -> None:
        self.host.drop(int(page) for page in request.pages.host if page >= 0)
        for chunk in request.chunks:
            self._unuse(chunk.lease)
        request.chunks.clear()

    def _unuse(self, lease: int) -> None:
        if lease not in self._leases:
            return  # it ended with its store
        self._leases[lease] -= 1
        if not self._leases[lease]:
            del self._leases[lease]
            self._release([lease])

    def leases(self) -> tuple[int, ...]:
        """All that are in use."""
        return tuple(self._leases)

    def _colds(self) -> list[ColdRows]:
        return [request.cold for request in list(self._requests.values()) if request.cold is not None]

    def gauges(self) -> dict[str, float]:
        """Present figures, and the caps. Callable from any thread."""
        hot = sum(request.hot for request in list(self._requests.values()))
        return self.counters.values() | {
            "hot.requests": len(self._requests),
            "hot.regions": hot,
            "hot.regions_max": self.settings.regions,
            "hot.rows_max": self.settings.rows,
            "hot.host_pages": len(self.host),
            "hot.host_pages_max": self.host.most,
            "hot.pages_lent": len(self._lent),
            "hot.leases": len(self._leases),
            "hot.promised": sum(request.aside > 0 for request in list(self._requests.values())),
            "hot.parked": sum(cold.parked for cold in self._colds()),
            "hot.chunks_cold": sum(len(cold.cold) for cold in self._colds()),
        }
