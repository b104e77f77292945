"""Who holds which blocks: the scheduler's `Memory`, kept in one `GroupPool` a cache group.

A request's *table* lists, for each group, the block of every unit from 0 on; `NO_BLOCK` where a window group
has let go. Its *credit* is what it has reserved and not yet taken. In a window group held + credit is the
request's footprint from admission on, whatever others do (see `block_pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from forebay.kvstore.identity import MATCH_UNIT, Chain, GroupGeometry, pack_tokens
from forebay.scheduler.memory import Admission, Growth
from forebay.scheduler.request import Request
from forebay.workers.block_pool import NO_BLOCK, GroupPool
from forebay.workers.cut import ALONE, MET, Cut
from forebay.workers.moves import DEVICE, AskRoom, AskRows, GroupRoom, Pull, Pulled, Pushed, RoomGiven, RowsCame
from forebay.workers.prefix import DevicePrefix, GroupShape, device_prefix, units_of


class PoolListener(Protocol):
    """Told what the device can be found to hold; keys are unit keys."""

    def stored(self, group: int, parent: bytes | None, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        """Consecutive units are findable, under `parent` (None: from the first on); `tokens` are theirs."""
        ...

    def removed(self, group: int, key: bytes) -> None:
        """A unit has been evicted."""
        ...


@dataclass(slots=True, eq=False)
class Holding:
    """Blocks and keys of one request. `stored` is how far its tokens are known to be with the store (or
    on their way); `spare` and `extra` exist while a load is under way, the latter until a `cut` is joined.
    `cached` says where what wasn't computed came from, `recomputed` how many stored tokens a cut computed.
    `retain_s` is how long the store is to keep its chunks. `hot`, `never_hot`, `cold`: see
    `forebay.workers.hot.holdings`."""

    chain: Chain
    tenant: str
    retain_s: float = 0.0
    tables: list[list[int]] = field(default_factory=list)
    credit: list[int] = field(default_factory=list)
    spare: list[list[int]] = field(default_factory=list)
    extra: list[dict[int, int]] = field(default_factory=list)
    trimmed: list[int] = field(default_factory=list)
    cut: Cut | None = None
    cached: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0
    sealed_units: int = 0
    stored: int = 0
    hot: bool = False
    never_hot: bool = False
    cold: int | None = None

    @property
    def holds(self) -> bool:
        return bool(self.tables)


@dataclass(frozen=True, slots=True)
class _Bid:
    """What an admission would take: blocks to share by unit, and how many to reserve, by group."""

    prefix: DevicePrefix
    shared: list[dict[int, int]]
    extra: list[dict[int, int]]
    spare: list[int]
    reserve: list[int]


class Holdings:
    """All requests' blocks. Owned by the engine's thread; no call blocks."""

    def __init__(self, shapes: Sequence[GroupShape], blocks: Sequence[int], listener: PoolListener) -> None:
        self.shapes = tuple(shapes)
        self.listener = listener
        self.ask_store = False
        self._held: dict[Hashable, Holding] = {}
        self.pools = tuple(
            GroupPool(count, sharers_pay=shape.windowed, on_evicted=self._told(group))
            for group, (shape, count) in enumerate(zip(shapes, blocks, strict=True))
        )

    @property
    def geometries(self) -> tuple[GroupGeometry, ...]:
        return tuple(shape.geometry for shape in self.shapes)

    @property
    def announced_group(self) -> int:
        """The group whose units decide how far a prefix reaches: the first with full attention, if any."""
        return next((g for g, shape in enumerate(self.shapes) if not shape.windowed), 0)

    def fits(self, tokens: int) -> bool:
        """Whether a request of that many tokens could ever be held, alone on the device."""
        return all(shape.footprint(tokens) <= pool.blocks for shape, pool in self._groups())

    def capacity(self) -> int:
        """The most tokens that one request can have."""
        most = min((p.blocks for s, p in self._groups() if not s.windowed), default=2**31) - 1
        return most * MATCH_UNIT if self.fits(most * MATCH_UNIT) else 0

    # --- a request comes -------------------------------------------------------------------------------

    def expect(self, request: Request, root: bytes, tenant: str, retain_s: float = 0.0) -> None:
        """Make `request` known; hashes its tokens, once."""
        assert request.key not in self._held, request.key
        self._held[request.key] = Holding(self._chain(root, request.tokens), tenant, retain_s)

    def _chain(self, root: bytes, tokens: Sequence[int]) -> Chain:
        return Chain(root, tokens, chunk_tokens=self.shapes[0].chunk_tokens)

    def forget(self, key: Hashable) -> None:
        """`key` will not come back. It must hold nothing."""
        assert not self._held[key].holds, key
        del self._held[key]

    def mark_lost(self, key: Hashable, position: int) -> None:
        """What `key` had stored from `position` on is gone, or never arrived."""
        holding = self._held.get(key)
        if holding is not None:
            holding.stored = min(holding.stored, position)

    def holding(self, request: Request) -> Holding:
        """The books of one request."""
        return self._held[request.key]

    def admit(self, request: Request, leave: int) -> Admission | None:
        """See `Memory.admit`."""
        holding = self._held[request.key]
        assert not holding.holds
        limit = 0 if request.fresh else (len(request.tokens) - 1) // MATCH_UNIT
        keys = holding.chain.keys[:limit]
        prefix = device_prefix(self.shapes, self.pools, keys)
        load = self.ask_store and prefix.units < limit
        bid = self._bid(request, keys, prefix, load)
        prices = [self._price(group, bid.shared[group].values()) for group in range(len(self.pools))]
        room = [p.available - price - n for p, price, n in zip(self.pools, prices, bid.reserve, strict=True)]
        if min(room) < leave:
            return None
        self._take(request, holding, bid)
        if load:
            self._take_spares(holding, bid, room, leave)
        holding.sealed_units = prefix.units
        holding.stored = prefix.units * MATCH_UNIT
        request.computed = prefix.units * MATCH_UNIT
        return Admission(load)

    def _bid(self, request: Request, keys: Sequence[bytes], prefix: DevicePrefix, load: bool) -> _Bid:
        position, limit = prefix.units * MATCH_UNIT, len(keys)
        shared: list[dict[int, int]] = []
        extra: list[dict[int, int]] = []
        spare: list[int] = []
        reserve: list[int] = []
        for group, (shape, pool) in enumerate(self._groups()):
            mine = _found(pool, keys, shape.first_unit(position), prefix.units)
            assert len(mine) == prefix.units - shape.first_unit(position)
            missing = limit - prefix.units if load else 0
            more: dict[int, int] = {}
            if load and shape.windowed:
                missing = min(missing, shape.units_behind)
                more = _found(pool, keys, max(prefix.units, shape.first_unit(limit * MATCH_UNIT)), limit)
            elif load:
                more = _found(pool, keys, prefix.units, prefix.runs[group])
            shared.append(mine)
            extra.append(more)
            spare.append(missing)
            reserve.append(shape.footprint(len(request.tokens)) - len(mine))
            assert missing <= reserve[-1], "what a load may place is part of the footprint"
        return _Bid(prefix, shared, extra, spare, reserve)

    def _take(self, request: Request, holding: Holding, bid: _Bid) -> None:
        holding.tables, holding.trimmed, holding.credit = [], [], list(bid.reserve)
        for group, (shape, pool) in enumerate(self._groups()):
            mine = bid.shared[group]
            for block in mine.values():
                pool.share(block)
            reserved = pool.reserve(bid.reserve[group])
            assert reserved, "admission counted wrongly"
            first = shape.first_unit(bid.prefix.units * MATCH_UNIT)
            holding.trimmed.append(first)
            holding.tables.append([NO_BLOCK] * first + [mine[unit] for unit in range(first, bid.prefix.units)])

    def _take_spares(self, holding: Holding, bid: _Bid, room: list[int], leave: int) -> None:
        """Blocks to load into; and, if that takes nothing from anybody, blocks that save a copy."""
        holding.spare, holding.extra = [], []
        for group, pool in enumerate(self.pools):
            extra = bid.extra[group]
            if self._price(group, extra.values()) > room[group] - leave:
                extra = {}
            for block in extra.values():
                pool.share(block)
            holding.extra.append(extra)
            count = min(bid.spare[group], pool.takeable)
            holding.spare.append([self._spend(holding, group) for _ in range(count)])

    # --- a load ----------------------------------------------------------------------------------------

    def pull(self, request: Request) -> Pull:
        """What the transfer thread needs to know to load for `request`, just admitted."""
        holding = self._held[request.key]
        limit = (len(request.tokens) - 1) // MATCH_UNIT
        rooms = []
        for group in range(len(self.pools)):
            table = holding.tables[group]
            held = range(holding.trimmed[group], len(table))
            extra = (range(*run) for run in _runs(list(holding.extra[group])))
            have = tuple(run for run in (held, *extra) if run)
            rooms.append(GroupRoom(have, tuple(holding.spare[group])))
        return Pull(
            request=request.key,
            root=holding.chain.root,
            tokens=pack_tokens(request.tokens[: limit * MATCH_UNIT]),
            keys=holding.chain.chunk_keys(limit),
            limit=limit * MATCH_UNIT,
            device_hit=request.computed,
            rooms=tuple(rooms),
            tenant=holding.tenant,
            retain_s=holding.retain_s,
        )

    def settle(self, request: Request, pulled: Pulled) -> None:
        """Adopt what a load brought; gives back what it did not use.

        What was loaded becomes findable with the request's first step, after its client has been answered.
        """
        holding = self._held[request.key]
        if holding.cut is None:
            self._take_over(request, holding, pulled)
        self._give_back_all(holding, len(request.tokens))

    def open(self, request: Request, cut: Cut, part: Pulled) -> None:
        """Adopt what host memory had, and set blocks aside for what will be loaded from the back."""
        holding = self._held[request.key]
        self._take_over(request, holding, part)
        assert request.computed == cut.start, (request.computed, cut.start)
        for group, (shape, pool) in enumerate(self._groups()):
            if shape.windowed:  # what the window of `part` took of them is made up for
                wanted = sum(piece.units(group) for piece in cut.pieces) - len(holding.spare[group])
                # The front's window, and what a step adds to it, stay promised.
                held = len(holding.tables[group]) - holding.trimmed[group]
                kept = max(0, shape.units_behind + units_of(shape.step_tokens) + 2 - held)
                count = min(wanted, pool.takeable, holding.credit[group] - kept)
                holding.spare[group] += [self._spend(holding, group) for _ in range(max(0, count))]
        cut.open(holding.spare)
        holding.cut, holding.recomputed, request.cut = cut, 0, True
        on_device = {DEVICE: cut.start} if cut.start else {}
        holding.cached = dict(part.sources) if part.hit == cut.start else on_device

    def claim(self, request: Request, count: int) -> int:
        """See `Memory.claim`."""
        holding = self._held[request.key]
        assert holding.cut is not None
        claimed = holding.cut.claim(request.computed, count)
        if claimed == MET:
            self._join(request, holding, holding.cut)
        elif claimed == ALONE:
            holding.recomputed = holding.cut.end - holding.cut.start
            self._end_cut(request, holding)
        return claimed if claimed >= 0 else min(count, request.remaining)

    def _join(self, request: Request, holding: Holding, cut: Cut) -> None:
        """The ends have met: what was loaded follows what was computed."""
        landed = cut.close()
        units = cut.end // MATCH_UNIT
        for group in range(len(self.pools)):
            self._lengthen(holding, group, units, landed.placed[group])
            assert self.shapes[group].windowed or NO_BLOCK not in holding.tables[group], "the ends have not met"
        for name, tokens in landed.sources().items():
            holding.cached[name] = holding.cached.get(name, 0) + tokens
        holding.recomputed = request.computed - cut.start
        if request.computed < cut.end:
            holding.stored = cut.end
        request.computed = cut.end
        self._end_cut(request, holding)

    def _end_cut(self, request: Request, holding: Holding) -> None:
        holding.cut, request.cut = None, False
        self._give_back_all(holding, len(request.tokens))

    def _take_over(self, request: Request, holding: Holding, pulled: Pulled) -> None:
        """Lengthen the tables by what a pull brought, if it gained anything."""
        gained = pulled.hit > request.computed
        units = (pulled.hit if gained else request.computed) // MATCH_UNIT
        for group in range(len(self.pools)):
            if gained:
                self._adopt(holding, group, units, pulled.placed[group])
        if gained:
            request.computed = pulled.hit
            holding.stored = pulled.hit
        elif pulled.stored is not None:
            holding.stored = min(pulled.stored, request.computed)

    def _adopt(self, holding: Holding, group: int, units: int, placed: dict[int, int]) -> None:
        """Take what was loaded out of the spare blocks, into the table."""
        spare = holding.spare[group]
        assert list(placed.values()) == spare[: len(placed)], "spare blocks are taken in order"
        del spare[: len(placed)]
        self._lengthen(holding, group, units, placed)

    def _lengthen(self, holding: Holding, group: int, units: int, placed: Mapping[int, int]) -> None:
        """Lengthen a table to `units`, with what was loaded and what the device had anyway."""
        table, extra = holding.tables[group], holding.extra[group]
        first = self.shapes[group].first_unit(units * MATCH_UNIT)
        for unit in range(len(table), units):
            if unit in placed:
                table.append(placed[unit])
            else:
                table.append(extra.pop(unit, NO_BLOCK) if unit >= first else NO_BLOCK)
        # A gap can only lie before the window, in what the open chunk would like to keep. It then won't be
        # stored in this group, and what lies before the gap is of no use.
        start = units
        while start > first and table[start - 1] != NO_BLOCK:
            start -= 1
        self._let_go_until(holding, group, start)

    def _give_back_all(self, holding: Holding, tokens: int) -> None:
        """Nobody writes into spare blocks any more: they are promises again. What the device had anyway is kept for as
        long as a cut may use it."""
        for group in range(len(self.pools)):
            self._give_back(holding, group, tokens)
        holding.spare = []
        if holding.cut is None:
            holding.extra = []

    def _give_back(self, holding: Holding, group: int, tokens: int) -> None:
        pool = self.pools[group]
        if holding.cut is None and holding.extra:
            for block in holding.extra[group].values():
                pool.drop(block)
        for block in holding.spare[group] if holding.spare else ():
            self._let_go(holding, group, block)
        held = len(holding.tables[group]) - holding.trimmed[group]
        if holding.cut is not None:
            held += len(holding.cut.close().placed[group])
        excess = held + holding.credit[group] - self.shapes[group].footprint(tokens)
        excess = min(max(excess, 0), holding.credit[group])
        pool.unreserve(excess)
        holding.credit[group] -= excess

    # --- a request goes on -----------------------------------------------------------------------------

    def grow(self, request: Request, upto: int) -> Growth:
        """See `Memory.grow`."""
        holding = self._held[request.key]
        if holding.cut is not None and holding.spare:
            return self._grow_in_cut(holding, holding.cut, upto)
        wanted = []
        for group, pool in enumerate(self.pools):
            count = units_of(upto) - len(holding.tables[group])
            short = max(0, count - holding.credit[group])
            if short > pool.available + pool.draining:
                return Growth.SHORT
            if short > pool.available or count > pool.takeable:
                return Growth.DRAINING
            wanted.append((count, short))
        for group, (count, short) in enumerate(wanted):
            if short:
                self.pools[group].reserve(short)
                holding.credit[group] += short
            for _ in range(count):
                holding.tables[group].append(self._spend(holding, group))
        return Growth.READY

    def _grow_in_cut(self, holding: Holding, cut: Cut, upto: int) -> Growth:
        """The same while blocks are set aside for the back: who claims a unit uses the block that was meant for it. All
        of it was reserved at admission."""
        counts = [max(0, units_of(upto) - len(table)) for table in holding.tables]
        taken: list[list[int]] = []
        for group, (shape, count) in enumerate(zip(self.shapes, counts, strict=True)):
            # A window's spare blocks are for the other window, as long as there are others.
            own = min(count, holding.credit[group], max(0, self.pools[group].takeable)) if shape.windowed else 0
            taken.append(cut.spend(group, count - own))
        missing = [count - len(mine) for count, mine in zip(counts, taken, strict=True)]
        if any(lack > min(c, p.takeable) for lack, c, p in zip(missing, holding.credit, self.pools, strict=True)):
            for group, mine in enumerate(taken):
                cut.refund(group, mine)
            assert all(lack <= c for lack, c in zip(missing, holding.credit, strict=True)), "a prefill is short"
            return Growth.DRAINING
        for group, mine in enumerate(taken):
            holding.tables[group] += mine + [self._spend(holding, group) for _ in range(missing[group])]
        return Growth.READY

    def register(self, request: Request) -> None:
        """Make all units findable that `request` has completed."""
        self._register(request, self._held[request.key], request.computed // MATCH_UNIT)

    def trim(self, request: Request) -> None:
        """Let go of blocks that left the window. What is to be stored of them must be pinned by now."""
        holding = self._held[request.key]
        for group, shape in enumerate(self.shapes):
            self._let_go_until(holding, group, shape.first_unit(request.computed))

    def drop_all(self, request: Request) -> None:
        """Let go of everything; ends of prefixes are evicted before their beginnings."""
        holding = self._held[request.key]
        landed = None if holding.cut is None else holding.cut.close()
        for group, pool in enumerate(self.pools):
            spare = holding.spare[group] if holding.spare else []
            extra = holding.extra[group].values() if holding.extra else ()
            for block in (
                *spare,
                *extra,
                *(landed.placed[group].values() if landed is not None else ()),
                *reversed(holding.tables[group][holding.trimmed[group] :]),
            ):
                pool.drop(block)
            pool.unreserve(holding.credit[group])
        holding.tables, holding.credit, holding.trimmed = [], [], []
        holding.spare, holding.extra = [], []
        holding.cut, request.cut = None, False
        holding.sealed_units = 0

    # --- what is read in host memory: see `forebay.workers.hot.holdings` --------------------------------

    def admission(self, key: Hashable, group: int) -> int:
        """A number for this stay of a request if its chunks of `group` are to stay in host memory, else 0."""
        return 0

    def aside(self, key: Hashable) -> int:
        """The lease under which the store has room for a request's chunks, or 0."""
        return 0

    def room_asks(self) -> list[AskRoom]:
        """Room that is to be asked for. Told once."""
        return []

    def room_given(self, given: RoomGiven) -> None:
        """An answer to that."""

    def row_asks(self) -> list[AskRows]:
        """Rows that tiers have and that are to be brought into host memory. Told once."""
        return []

    def rows_unwanted(self) -> list[tuple[Hashable, int]]:
        """Stays of requests, by their admission, that have ended while rows were on their way to them. Told once."""
        return []

    def rows_came(self, came: RowsCame) -> list[Hashable]:
        """An answer to that. Requests that wait for what doesn't come."""
        return []

    def never_hot(self, key: Hashable) -> bool:
        """There will never be room in the store for all of a request. False if it doesn't fit without, either; else it
        waits for the device to have room for all of it."""
        return True

    def pushed(self, done: Pushed) -> None:
        """A chunk that was to stay in host memory is there, or isn't."""

    def offer_again(self, key: Hashable) -> None:
        """What host memory didn't take is to be offered to it once more."""

    def refuse(self, pulled: Pulled) -> None:
        """A load ended of which nothing is wanted any more."""

    def overdue(self) -> list[Hashable]:
        """Requests that have lacked something for too long."""
        return []

    def store_lost(self) -> list[Hashable]:
        """The store has gone. Requests of which something is nowhere now."""
        return []

    def store_back(self) -> None:
        """The store is there again."""

    # --- small steps -----------------------------------------------------------------------------------

    def _register(self, request: Request, holding: Holding, units: int) -> None:
        before = holding.sealed_units
        keys = holding.chain.keys[before:units]
        for group, pool in enumerate(self.pools):
            table = holding.tables[group]
            fresh = [
                unit
                for unit in range(max(before, holding.trimmed[group]), units)
                if not pool.sealed(table[unit]) and pool.seal(table[unit], keys[unit - before])
            ]
            for first, last in _runs(fresh):
                self.listener.stored(
                    group,
                    holding.chain.key_at(first * MATCH_UNIT) if first else None,
                    keys[first - before : last - before],
                    request.tokens[first * MATCH_UNIT : last * MATCH_UNIT],
                )
        holding.sealed_units = max(before, units)

    def _spend(self, holding: Holding, group: int) -> int:
        assert holding.credit[group] > 0
        holding.credit[group] -= 1
        return self.pools[group].take()

    def _let_go_until(self, holding: Holding, group: int, first: int) -> None:
        table = holding.tables[group]
        for unit in range(holding.trimmed[group], first):
            if table[unit] != NO_BLOCK:
                self._let_go(holding, group, table[unit])
                table[unit] = NO_BLOCK
        holding.trimmed[group] = max(holding.trimmed[group], first)

    def _let_go(self, holding: Holding, group: int, block: int) -> None:
        """Drop a block and keep the right to another one."""
        self.pools[group].drop(block)
        self.pools[group].keep_promise()
        holding.credit[group] += 1

    def _price(self, group: int, blocks: Iterable[int]) -> int:
        return sum(self.pools[group].price(block) for block in blocks)

    def _groups(self) -> list[tuple[GroupShape, GroupPool]]:
        return list(zip(self.shapes, self.pools, strict=True))

    def _told(self, group: int) -> Callable[[bytes], None]:
        def evicted(key: bytes) -> None:
            self.listener.removed(group, key)

        return evicted


def _found(pool: GroupPool, keys: Sequence[bytes], first: int, last: int) -> dict[int, int]:
    """Blocks of the units in [first, last) that the pool holds."""
    found = ((unit, pool.find(keys[unit])) for unit in range(first, last))
    return {unit: block for unit, block in found if block is not None}


def _runs(units: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending units as half-open runs."""
    runs: list[tuple[int, int]] = []
    for unit in units:
        if runs and runs[-1][1] == unit:
            runs[-1] = (runs[-1][0], unit + 1)
        else:
            runs.append((unit, unit + 1))
    return runs
