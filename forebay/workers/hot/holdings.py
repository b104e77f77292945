"""`Holdings` of a model with sparse layers: a request that doesn't fit whole is held hot.

    full    all pages are on the device, as in any other group; nothing is copied
    hot     a region, the tail, and what isn't in host memory yet; the rest is read from there, row by row

A newcomer is admitted full if that fits, else hot. If there is no room for that either, full ones are *squeezed*: each
gets a region in exchange for its clean pages, those first that gain most. Of a full one, host memory holds what it has
stored; what it found there, it offers again as soon as somebody needs room, and holds it from then on.

A hot request's blocks are promised at admission, as in a window group: what it lets go of it may take again. So is room
in the store for all that it can come to have: without that nothing is held hot, be it a newcomer or one that others
would like to squeeze.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from forebay.kvstore.identity import MATCH_UNIT
from forebay.scheduler.memory import Admission, Growth
from forebay.scheduler.plan import Work
from forebay.scheduler.request import Request
from forebay.workers.holdings import Holding, Holdings, PoolListener
from forebay.workers.hot.book import HotBook, HotRequest
from forebay.workers.hot.cold import ColdRows
from forebay.workers.hot.naming import Naming
from forebay.workers.hot.recent import Recent
from forebay.workers.hot.resolving import Ended, Stay, StepResolver
from forebay.workers.hot.settings import HotSettings
from forebay.workers.hot.telling import Changes, HotShape
from forebay.workers.moves import AskRoom, AskRows, Pull, Pulled, Pushed, RoomGiven, RowsCame
from forebay.workers.prefix import DevicePrefix, GroupShape, device_prefix, units_of

ASK_AGAIN_S = 0.25
"""How long it isn't asked again for room that was refused."""

OFFER_S, OFFER_S_MAX = 0.05, 1.0
"""How long a chunk that was refused isn't offered again: so long at first, and twice as long each time."""


class HotHoldings(Holdings):
    """See `Holdings`. `clock` gives seconds; `release` gives leases back, later and elsewhere."""

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        blocks: Sequence[int],
        listener: PoolListener,
        settings: HotSettings,
        host_pages: int,
        release: Callable[[Sequence[int]], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(shapes, blocks, listener)
        self._sparse, self._clock = settings.group, clock
        self._asks: list[AskRoom] = []
        self._row_asks: list[AskRows] = []
        self._unwanted: list[tuple[Hashable, int]] = []
        self._pulls: dict[Hashable, Pull] = {}
        self.recent = Recent()
        geometry = shapes[settings.group].geometry
        self.book = HotBook(settings, self.pools[settings.group], geometry.granule_bytes, host_pages, release)

    def share(self) -> HotShape:
        """From now on note what other ranks are to be told. What they have to have for that."""
        self.book.changes = Changes()
        settings, geometry = self.book.settings, self.shapes[self._sparse].geometry
        return HotShape(geometry.name, settings.regions, settings.rows, dict(settings.sharers), geometry.granule_bytes)

    def fits(self, tokens: int) -> bool:
        """See `Holdings.fits`."""
        return all(
            shape.footprint(tokens) <= pool.blocks or (group == self._sparse and units_of(tokens) <= self._hot_units)
            for group, (shape, pool) in enumerate(zip(self.shapes, self.pools, strict=True))
        )

    @property
    def _hot_units(self) -> int:
        """The longest that a hot request can be: all of it may come to be read in host memory."""
        return self.book.host.most if self.book.settings.footprint <= self.pools[self._sparse].blocks else 0

    def capacity(self) -> int:
        """See `Holdings.capacity`."""
        rooms = [
            max(pool.blocks, self._hot_units + 1) if group == self._sparse else pool.blocks
            for group, (shape, pool) in enumerate(zip(self.shapes, self.pools, strict=True))
            if not shape.windowed
        ]
        most = min(rooms, default=2**31) - 1
        return most * MATCH_UNIT if self.fits(most * MATCH_UNIT) else 0

    # --- a request comes -------------------------------------------------------------------------------

    def admit(self, request: Request, leave: int) -> Admission | None:
        """See `Memory.admit`."""
        admission = super().admit(request, leave)
        if admission is not None:
            request.step_tokens = 0
            self.book.admit(request)
            # What it finds on the device, or loads, may be in host memory as well: it is asked when that matters.
            self.book.of(request.key).failed = 0
            return admission
        holding = self._held[request.key]
        if not self.ask_store or request.fresh or holding.never_hot or not self.book.can_open():
            return None
        admission = self._admit_hot(request, leave)
        if admission is None and self._squeeze(self.book.settings.footprint + leave, keep=None):
            admission = self._admit_hot(request, leave)
        return admission

    def _admit_hot(self, request: Request, leave: int) -> Admission | None:
        holding, settings = self._held[request.key], self.book.settings
        limit = (len(request.tokens) - 1) // MATCH_UNIT
        keys = holding.chain.keys[:limit]
        runs = list(device_prefix(self.shapes, self.pools, keys).runs)
        runs[self._sparse] = 0
        # Its own rows come from host memory: so the device's prefix counts for nothing, and saves copies only.
        bid = self._bid(request, keys, DevicePrefix(0, tuple(runs)), load=True)
        bid.shared[self._sparse], bid.extra[self._sparse] = {}, {}
        bid.spare[self._sparse] = units_of(settings.chunk_tokens) - 1  # the chunk that a hit may end inside of
        bid.reserve[self._sparse] = settings.footprint
        prices = [self._price(group, bid.shared[group].values()) for group in range(len(self.pools))]
        room = [p.available - price - n for p, price, n in zip(self.pools, prices, bid.reserve, strict=True)]
        if min(room) < leave or not self.book.host_room(units_of(request.most)):
            return None
        self._take(request, holding, bid)
        self._take_spares(holding, bid, room, leave)
        holding.sealed_units = holding.stored = request.computed = 0
        self.book.admit(request)
        self._open_region(request.key, holding)
        return Admission(load=True)  # there is always room to be asked for

    def _open_region(self, key: Hashable, holding: Holding) -> None:
        holding.hot = True
        blocks = [self._spend(holding, self._sparse) for _ in range(self.book.settings.blocks)]
        self.book.open_region(key, blocks)

    def pull(self, request: Request) -> Pull:
        """See `Holdings.pull`."""
        pull = super().pull(request)
        if not self.book.hot(request.key):
            return pull
        chunks = -(-request.most // self.book.settings.chunk_tokens)
        cold = self._held[request.key].cold
        cold = pull.limit if cold is None else min(cold, pull.limit)
        pull = replace(pull, hosted=frozenset({self._sparse}), chunks=chunks, cold=cold)
        self._pulls[request.key] = pull
        return pull

    def settle(self, request: Request, pulled: Pulled) -> None:
        """See `Holdings.settle`."""
        super().settle(request, pulled)
        table = self._held[request.key].tables[self._sparse]
        admission = self.book.of(request.key).admission
        if pulled.aside:
            self.book.promised(request.key, admission, pulled.aside)
        for chunk in pulled.hosted:
            self.book.hosted(request.key, admission, chunk, table)
        pages = self.book.follow(request.key, table)
        pull = self._pulls.pop(request.key, None)
        if pull is not None and pulled.cold:
            self._begin_cold(request.key, pull, pulled)
        assert pages.readable or self.book.of(request.key).cold is not None, "a load left pages nowhere"
        if len(pages) and pages.residency == "none":
            self.book.counters.add("hot.started_with_none")

    def refuse(self, pulled: Pulled) -> None:
        """See `Holdings.refuse`."""
        self._pulls.pop(pulled.request, None)
        for chunk in pulled.hosted:
            self.book.hosted(pulled.request, 0, chunk, ())
        if pulled.aside:
            self.book.promised(pulled.request, 0, pulled.aside)

    def _give_back(self, holding: Holding, group: int, tokens: int) -> None:
        if group != self._sparse or not holding.hot:
            super()._give_back(holding, group, tokens)
            return
        for block in holding.spare[group] if holding.spare else ():
            self._let_go(holding, group, block)

    # --- rows that tiers have --------------------------------------------------------------------------

    def _begin_cold(self, key: Hashable, pull: Pull, pulled: Pulled) -> None:
        """A request begins with a prefix whose rows aren't all in host memory. What was read last of the same chunks is
        brought ahead of need."""
        book = self.book.of(key)
        cold = {position for position in pulled.cold if not self.book.brought(key, position)}
        if cold:
            book.cold = ColdRows(pull, pulled.hit, cold, pulled.most)
            ahead = book.cold.ask(self.recent.among(pull.keys, cold))
            self.book.counters.add("hot.chunks_ahead", len(ahead))
            self._ask_rows(key, ahead)

    def row_asks(self) -> list[AskRows]:
        """See `Holdings.row_asks`."""
        for key, book in self.book.everybody():
            if book.cold is None or not book.cold.waits - book.cold.asked.keys():
                continue
            for position in book.cold.surplus():
                if self.book.leave(key, position):
                    book.cold.leave(position)
            self._ask_rows(key, book.cold.ask())
        asks, self._row_asks = self._row_asks, []
        return asks

    def _ask_rows(self, key: Hashable, positions: Sequence[int]) -> None:
        book = self.book.of(key)
        assert book.cold is not None
        if positions:
            self._row_asks.append(
                AskRows(
                    key, book.admission, book.cold.pull, book.cold.hit, tuple(positions), book.aside,
                    self.book.settings.deadline_s, apart=book.cold.most is not None,
                    number=book.cold.asks,
                )
            )  # fmt: skip

    def rows_unwanted(self) -> list[tuple[Hashable, int]]:
        """See `Holdings.rows_unwanted`."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def rows_came(self, came: RowsCame) -> list[Hashable]:
        """See `Holdings.rows_came`."""
        ask, size = came.ask, self.book.settings.chunk_tokens
        book = self.book.known(ask.request, ask.admission)
        table = () if book is None else self._held[ask.request].tables[self._sparse]
        for chunk in came.hosted:
            self.book.hosted(ask.request, ask.admission, chunk, table)
        if book is None or book.cold is None:
            return []
        for chunk in came.hosted:
            if self.book.brought(ask.request, chunk.start // size):
                book.cold.came(chunk.start // size)
                self.book.counters.add("hot.chunks_brought")
        late = book.cold.ended(ask.positions if came.done else came.lost, ask.number)
        self.book.counters.add("hot.chunks_lost", len(came.lost))
        if not late:
            return []
        # It is computed anew from there on; should that happen again, nothing of it stays cold.
        holding = self._held[ask.request]
        holding.cold = min(late) * size if holding.cold is None else 0
        self.book.counters.add("hot.chunks_late", len(late))
        return [ask.request]

    # --- a request goes on -----------------------------------------------------------------------------

    def grow(self, request: Request, upto: int) -> Growth:
        """See `Memory.grow`."""
        if self.book.hot(request.key):
            return self._grow_hot(request, upto)
        growth = super().grow(request, upto)
        if growth is not Growth.SHORT:
            return growth
        wanted = units_of(upto) - len(self._held[request.key].tables[self._sparse])
        self._squeeze(max(1, wanted), keep=request.key)
        growth = super().grow(request, upto)
        if growth is Growth.SHORT and self._squeeze_one(request.key):
            return Growth.DRAINING if upto - request.computed > request.step_tokens else self._grow_hot(request, upto)
        if growth is Growth.SHORT and self.book.of(request.key).asking:
            return Growth.DRAINING  # soon it may give way itself
        return growth

    def _grow_hot(self, request: Request, upto: int) -> Growth:
        holding, book = self._held[request.key], self.book.of(request.key)
        if book.cold is not None and book.cold.parked:
            return Growth.PARKED
        assert upto - request.computed <= request.step_tokens, (upto, request.computed, request.step_tokens)
        wanted = units_of(upto) - len(holding.tables[self._sparse])
        if wanted > holding.credit[self._sparse]:
            self._let_go_of_clean(request.key, holding)
        short = wanted - holding.credit[self._sparse]
        if short > 0 and self.pools[self._sparse].reserve(short):
            holding.credit[self._sparse] += short
        elif short > 0:
            # Its pages aren't in host memory yet: nobody else can help.
            book.since = self._clock() if book.since is None else book.since
            return Growth.DRAINING
        growth = super().grow(request, upto)
        if growth is Growth.READY:
            book.since = None
        return growth

    def trim(self, request: Request) -> None:
        """See `Holdings.trim`. A hot request lets go of what host memory has."""
        super().trim(request)
        holding = self._held[request.key]
        self.book.follow(request.key, holding.tables[self._sparse])
        if self.book.hot(request.key):
            self._let_go_of_clean(request.key, holding)

    def _let_go_of_clean(self, key: Hashable, holding: Holding) -> None:
        freed = self.book.let_go(key, holding.tables[self._sparse], holding.chain.keys)
        for _ in range(freed):
            self.pools[self._sparse].keep_promise()
        holding.credit[self._sparse] += freed
        # One that was squeezed with many dirty pages holds more than it needs to get on: that is for others now.
        settings, credit = self.book.settings, holding.credit[self._sparse]
        excess = self.book.of(key).pages.held + settings.blocks + credit - settings.footprint
        excess = min(max(excess, 0), credit)
        self.pools[self._sparse].unreserve(excess)
        holding.credit[self._sparse] -= excess

    def drop_all(self, request: Request) -> None:
        """See `Holdings.drop_all`."""
        holding = self._held[request.key]
        closed = self.book.close(request.key)
        if closed.named:
            self.recent.note(holding.chain.chunk_keys(len(holding.chain.keys)), closed.named)
        if closed.cold is not None and closed.cold.asked:
            self._unwanted.append((request.key, closed.admission))
        table = holding.tables[self._sparse][holding.trimmed[self._sparse] :]
        holding.tables[self._sparse] = [block for block in table if block >= 0]
        holding.trimmed[self._sparse] = 0
        for block in closed.blocks:
            self.pools[self._sparse].drop(block)
        holding.hot = False
        super().drop_all(request)

    def resolver(self, works: Sequence[Work], pools: Mapping[str, Tensor]) -> StepResolver | None:
        """For a step with these works; None if all they have is on the device."""
        if not any(self.book.hot(work.request.key) for work in works):
            return None
        stays: list[Stay] = []
        colds: dict[int, ColdRows | None] = {}
        for work in works:
            key = work.request.key
            pages = self.book.follow(key, self._held[key].tables[self._sparse])
            self.book.counters.add(f"hot.steps_{pages.residency}")
            book = self.book.of(key)
            if book.hot:
                colds[len(stays)] = book.cold
            stays.append(Stay(key, book.region, pages.resident, pages.host))
        self.book.counters.add("hot.steps")
        settings, pool = self.book.settings, pools[self.shapes[self._sparse].geometry.name]
        naming = Naming(colds, settings.chunk_tokens, max(settings.sharers))
        return StepResolver(self.book, stays, pool, self.book.changes, naming)

    def ended(self, resolver: StepResolver) -> Ended:
        """What became of that step's requests. Those that are parked wait until what they lack has come."""
        ended = resolver.end()
        for key, named in ended.named.items():
            self.book.named(key, list(named.chunks), named.missing)
        return ended

    # --- who gives way ---------------------------------------------------------------------------------

    def _squeeze(self, wanted: int, keep: Hashable) -> bool:
        """Have full requests exchange pages for a region, until `wanted` blocks are available. `keep` isn't asked.
        Whether that helped."""
        pool, before = self.pools[self._sparse], self.pools[self._sparse].available
        gains = []
        for key, book in self.book.everybody():
            self.book.follow(key, self._held[key].tables[self._sparse])
            if not book.hot:
                self.offer_again(key)  # so that more of it is clean the next time
            if not book.hot and key != keep:
                gains.append((book.aside > 0, self.book.clean(key), key))
        gains.sort(key=lambda one: one[:2], reverse=True)
        if gains:
            self._has_room(gains[0][-1])  # asked for before there is anything to gain: the answer takes a while
        for *_, key in gains:
            if pool.available >= wanted or not self._squeeze_one(key):
                break
        return pool.available > before

    def _squeeze_one(self, key: Hashable) -> bool:
        """Exchange a full request's clean pages for a region, if it gains by that."""
        holding, settings, pool = self._held[key], self.book.settings, self.pools[self._sparse]
        request = self.book.of(key)
        if holding.cut is not None or holding.spare or not self.book.can_open():
            return False
        self.book.follow(key, holding.tables[self._sparse])
        table, credit = holding.tables[self._sparse], holding.credit[self._sparse]
        clean = list(request.pages.releasable())
        held = request.pages.held - len(clean)
        # What it is promised from then on: its region, and what it needs to get on.
        promised = max(settings.footprint - held, settings.blocks + units_of(settings.step_tokens) + 1)
        if sum(pool.sole(table[page]) for page in clean) + credit <= promised or not self._has_room(key):
            return False
        pool.unreserve(credit)
        self.book.let_go(key, table, holding.chain.keys)
        reserved = pool.reserve(promised)
        assert reserved, "an exchange gains blocks"
        holding.credit[self._sparse] = promised
        self._open_region(key, holding)
        self.offer_again(key)
        self.book.counters.add("hot.squeezed")
        return True

    # --- room in the store -----------------------------------------------------------------------------

    def _has_room(self, key: Hashable) -> bool:
        """Is there room in the store for all of it? If not, that is asked for."""
        book = self.book.of(key)
        lately = book.refused is not None and self._clock() - book.refused < ASK_AGAIN_S
        if not book.aside and not book.asking and not lately:
            book.asking = True
            tenant = self._held[key].tenant
            self._asks.append(AskRoom(key, book.admission, self._sparse, self.book.lacking(key), tenant))
        return book.aside > 0

    def aside(self, key: Hashable) -> int:
        """See `Holdings.aside`."""
        return self.book.of(key).aside

    def room_asks(self) -> list[AskRoom]:
        """See `Holdings.room_asks`."""
        asks, self._asks = self._asks, []
        return asks

    def room_given(self, given: RoomGiven) -> None:
        """See `Holdings.room_given`."""
        if given.aside:
            self.book.promised(given.ask.request, given.ask.admission, given.aside)
        request = self.book.known(given.ask.request, given.ask.admission)
        if request is not None:
            request.asking = False
            request.refused = None if given.aside else self._clock()
            self.book.counters.add("hot.room_refused", not given.aside)

    def never_hot(self, key: Hashable) -> bool:
        """See `Holdings.never_hot`."""
        self._held[key].never_hot = True
        return super().fits(self.book.of(key).request.most)

    # --- host memory -----------------------------------------------------------------------------------

    def pushed(self, done: Pushed) -> None:
        """See `Holdings.pushed`."""
        push = done.push
        if done.hosted is not None:
            known = self.book.known(push.request, push.admission)
            table = () if known is None else self._held[push.request].tables[self._sparse]
            self.book.hosted(push.request, push.admission, done.hosted, table)
        elif push.admission:
            self.book.missing(push.request, push.admission, push.chunk.start)
            known = self.book.known(push.request, push.admission)
            if known is not None and done.refused:
                self._refused(push.request, known)

    def _refused(self, key: Hashable, request: HotRequest) -> None:
        """The store didn't take a chunk. Room that rows of its prefix take, and no step needs, is for that."""
        if self._clock() >= request.offer_at:  # the first one of those that were offered together
            request.refusals += 1
            request.offer_at = self._clock() + min(OFFER_S_MAX, OFFER_S * 2 ** min(request.refusals - 1, 10))
        if request.cold is not None:
            for position in request.cold.spare():
                if self.book.leave(key, position):
                    request.cold.leave(position)
                    break

    def offer_again(self, key: Hashable) -> None:
        """See `Holdings.offer_again`. What was refused is offered after a pause."""
        request = self.book.of(key)
        if request.failed is not None and self._clock() >= request.offer_at:
            self.mark_lost(key, request.failed)
            request.failed = None

    def overdue(self) -> list[Hashable]:
        """See `Holdings.overdue`."""
        now, most = self._clock(), self.book.settings.deadline_s
        return [key for key, book in self.book.everybody() if book.since is not None and now - book.since > most]

    def admission(self, key: Hashable, group: int) -> int:
        """See `Holdings.admission`."""
        return self.book.of(key).admission if group == self._sparse else 0

    def store_lost(self) -> list[Hashable]:
        """See `Holdings.store_lost`."""
        return self.book.lose_host()

    def store_back(self) -> None:
        """See `Holdings.store_back`. What it has is to be held again; what it lacks, to be stored again."""
        for key, request in self.book.everybody():
            request.failed, request.refusals, request.offer_at = 0, 0, 0.0
            self.offer_again(key)
            if request.hot:
                self._has_room(key)

    def _told(self, group: int) -> Callable[[bytes], None]:
        told = super()._told(group)

        def evicted(key: bytes) -> None:
            if group == self._sparse:
                self.book.reused(key)
            told(key)

        return evicted
