"""The books under any order of events: chunks that arrive late, are refused or lost, requests that come and go, a store
that does. Nothing is computed: the real holdings and scheduler, and a store in a list."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from forebay.kvstore.identity import MATCH_UNIT, root_key
from forebay.models.base import KVGroup, ModelInfo, Sparsity
from forebay.scheduler.batch import BatchScheduler
from forebay.scheduler.plan import Limits
from forebay.scheduler.request import Request, RequestState
from forebay.workers.assembly import namespace_of
from forebay.workers.hot.holdings import HotHoldings
from forebay.workers.hot.mirror import HostChunk
from forebay.workers.hot.residency import Page
from forebay.workers.hot.settings import settings_for
from forebay.workers.moves import AskRoom, AskRows, Pull, Pulled, Push, Pushed, RoomGiven, RowsCame
from forebay.workers.prefix import GroupShape
from forebay.workers.sealing import DeviceMemory

SEEDS = int(os.environ.get("FOREBAY_HOT_SEEDS", "150")) // 5
CHUNK, STEP, GRANULE = 32, 48, 2 * 16 * 8 * 4


def info() -> ModelInfo:
    groups = (KVGroup("latent", "latent", (0, 1), 1, 8), KVGroup("index", "indexer", (0,), 1, 8))
    return ModelInfo("glm_moe_dsa", 64, 8, 2, 4096, groups, sparse=Sparsity("latent", 16, (0, 0)))


@dataclass
class House:
    """One worker's books, and everything that is under way."""

    seed: int
    pushes: list[Push] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    asks: list[AskRoom] = field(default_factory=list)
    rows: list[AskRows] = field(default_factory=list)
    room: set[int] = field(default_factory=set)
    released: list[int] = field(default_factory=list)
    granted: list[int] = field(default_factory=list)
    lost: bool = False
    now: float = 0.0
    counted: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        namespace = namespace_of(info(), "float32", b"w" * 32, CHUNK)
        shapes = [GroupShape(geometry, CHUNK, STEP) for geometry in namespace.groups]
        settings = settings_for(info(), 48, regions=3, chunk_tokens=CHUNK, deadline_s=5)
        self.holdings = HotHoldings(
            shapes, (self.rng.randrange(14, 34), 200), self, settings, 400, self.released.extend, lambda: self.now
        )
        self.memory = DeviceMemory(self.holdings, CHUNK, self._offer)
        self.scheduler = BatchScheduler(Limits(STEP, 4, 64), self.memory, lambda: self.now)
        self.holdings.ask_store = True

    def stored(self, group: int, parent: bytes | None, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        """See `PoolListener`."""

    def removed(self, group: int, key: bytes) -> None:
        """See `PoolListener`."""

    # --- events ----------------------------------------------------------------------------------------

    def submit(self) -> None:
        length = self.rng.choice([10, 40, 100, 200, 300])
        start = self.rng.randrange(3)  # some share their beginning
        request = Request(self.counted, [start] * length, length)
        self.counted += 1
        self.scheduler.submit(request)
        self.holdings.expect(request, root_key(b"n" * 32, b""), "")

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.pulls += [self.holdings.pull(request) for request in plan.loads]
        self.asks += self.holdings.room_asks()
        self.rows += self.holdings.row_asks()
        for work in plan.works:
            if not self._check_fed(work.request, work.end):
                continue
            work.request.computed = work.end
            if work.samples:
                work.request.tokens.append(7)
                self.holdings.holding(work.request).chain.extend([7])
            self.memory.advance(work.request)
        for work in plan.works:
            if work.request.state is RequestState.RUNNING and len(work.request.tokens) > work.request.prompt_tokens + 9:
                self.end(work.request)

    def _check_fed(self, request: Request, upto: int) -> bool:
        """What is fed has a block in every group, and what it may read is somewhere; False: it has chosen what only a
        tier has."""
        for group in range(2):
            table = self.holdings.holding(request).tables[group]
            for unit in range(request.computed // MATCH_UNIT, -(-upto // MATCH_UNIT)):
                assert table[unit] >= 0, (request.key, group, unit)
        book = self.holdings.book
        pages = book.follow(request.key, self.holdings.holding(request).tables[0])
        cold = book.of(request.key).cold
        if cold is None:
            assert pages.readable
            return True
        assert not cold.parked
        chosen = self.rng.sample(range(-(-len(pages) // 2)), 1)
        missing = [position for position in chosen if not book.brought(request.key, position)]
        nowhere = [p for p in range(-(-len(pages) // 2)) if not book.brought(request.key, p)]
        assert cold.cold.issuperset(nowhere), "what isn't cold can be read"
        book.named(request.key, chosen, missing)
        return not missing

    def end(self, request: Request) -> None:
        self.scheduler.finish(request)
        if not self.holdings.holding(request).holds:
            self.holdings.forget(request.key)

    def cancel(self) -> None:
        active = self.scheduler.active()
        if active:
            request = self.scheduler.cancel(self.rng.choice(active).key)
            assert request is not None
            if not self.holdings.holding(request).holds:
                self.holdings.forget(request.key)

    def answer_push(self) -> None:
        if not self.pushes:
            return
        push = self.pushes.pop(self.rng.randrange(len(self.pushes)))
        taken = self.holdings.ask_store and self.rng.random() < 0.8
        hosted = self._chunk(push.chunk.start, len(push.chunk.tokens) // 4) if taken and push.admission else None
        self.memory.pushed(Pushed(push, lost=not self.holdings.ask_store, hosted=hosted))

    def answer_pull(self) -> None:
        if not self.pulls:
            return
        pull = self.pulls.pop(self.rng.randrange(len(self.pulls)))
        hit = self.rng.choice([0, pull.limit, pull.limit // 2 // MATCH_UNIT * MATCH_UNIT])
        request = self.scheduler.find(pull.request)
        assert request is not None
        refused = bool(pull.hosted) and (not self.holdings.ask_store or self.rng.random() < 0.2)
        pulled = self._pulled(pull, hit if self.holdings.ask_store and hit > pull.device_hit and not refused else 0)
        if refused:
            pulled = replace(pulled, refused="now")
        elif pull.hosted:
            pulled = replace(pulled, aside=self._give_room())
        if request.state is RequestState.FINISHED:
            self.holdings.refuse(pulled)
        else:
            self.holdings.settle(request, pulled)
        if self.scheduler.load_ended(pull.request) is None:
            self.holdings.forget(pull.request)
        elif refused:
            self.scheduler.put_off(pull.request)

    def answer_ask(self) -> None:
        if self.asks:
            ask = self.asks.pop(self.rng.randrange(len(self.asks)))
            given = self.holdings.ask_store and self.rng.random() < 0.7
            self.holdings.room_given(RoomGiven(ask, self._give_room() if given else 0))

    def answer_rows(self) -> None:
        """Some of what was asked for comes, or all of it, or nothing more."""
        if not self.rows:
            return
        ask = self.rows.pop(self.rng.randrange(len(self.rows)))
        up = self.holdings.ask_store
        some = [position for position in ask.positions if up and self.rng.random() < 0.8]
        hosted = tuple(self._chunk(p * CHUNK, min(CHUNK, ask.hit - p * CHUNK)) for p in some)
        for key in self.holdings.rows_came(RowsCame(ask, hosted, done=True)):
            assert self.scheduler.put_off(key) is not None

    def _give_room(self) -> int:
        lease = 1_000_000 + len(self.room)
        self.room.add(lease)
        return lease

    def _pulled(self, pull: Pull, hit: int) -> Pulled:
        if not hit:
            return Pulled(pull.request, 0, ({}, {}), stored=0)
        placed: list[dict[int, int]] = []
        for group, room in enumerate(pull.rooms):
            have = {unit for run in room.have for unit in run}
            lacking = [unit for unit in range(hit // MATCH_UNIT) if unit not in have]
            if group in pull.hosted:
                open_units = range(hit // CHUNK * 2, hit // MATCH_UNIT)
                placed.append(dict(zip(open_units, room.spare, strict=False)) if len(room.spare) else {})
            elif len(lacking) > len(room.spare):
                return Pulled(pull.request, 0, ({}, {}), stored=0)
            else:
                placed.append(dict(zip(lacking, room.spare, strict=False)))
        warm = self.rng.choice([0, hit // 2 // CHUNK, hit // CHUNK]) if hit <= pull.cold else -(-hit // CHUNK)
        starts = range(0, hit, CHUNK)[:warm] if pull.hosted else ()
        chunks = [self._chunk(start, min(CHUNK, hit - start)) for start in starts]
        cold = range(warm, -(-hit // CHUNK)) if pull.hosted else range(0)
        most = self.rng.choice([None, 2]) if warm == 0 else None
        return Pulled(
            pull.request, hit, tuple(placed), {"host": hit}, hit, tuple(chunks), cold=cold, most=most
        )  # fmt: skip

    def _chunk(self, start: int, tokens: int) -> HostChunk:
        self.granted.append(len(self.granted) + 1)
        payload = memoryview(bytearray(tokens // MATCH_UNIT * GRANULE))
        return HostChunk(0, start, tokens, payload, self.granted[-1], 1, lambda: True)

    def store_changes(self) -> None:
        self.holdings.ask_store = not self.holdings.ask_store
        self.lost = True
        if self.holdings.ask_store:
            self.holdings.store_back()
            return
        while self.pushes:  # their connection has gone
            self.memory.pushed(Pushed(self.pushes.pop(), lost=True))
        for key in self.holdings.store_lost():
            self.scheduler.put_off(key)

    def time_passes(self) -> None:
        self.now += 2.0
        for key in self.holdings.overdue():
            self.scheduler.put_off(key)

    def _offer(self, push: Push) -> bool:
        if self.rng.random() < 0.05:
            return False
        self.pushes.append(push)
        return True

    # --- what always holds -----------------------------------------------------------------------------

    def check(self) -> None:
        book, used = self.holdings.book, set()
        for pool in self.holdings.pools:
            pool.check()
        for key, request in book.everybody():
            request.pages.check()
            table = self.holdings._held[key].tables[0]
            for page in range(len(request.pages)):
                held = request.pages.state(page) in (Page.DIRTY, Page.CLEAN)
                assert held == (table[page] >= 0), (key, page)
            assert request.hot == bool(request.blocks)
            # Nothing is hot without room for all of it, but for what lost that with its store.
            assert request.aside or not request.hot or not len(request.pages) or self.lost
            assert not used & set(request.blocks) and not set(request.blocks) & set(table)
            used |= set(request.blocks)
        lent = {(k, p) for k, r in book.everybody() for p in range(len(r.pages)) if r.pages.state(p) is Page.LENT}
        assert lent == {(k, p) for users in book._lent.values() for k, p in users.items()}

    def run_dry(self) -> None:
        """Everything comes to its end."""
        if not self.holdings.ask_store:
            self.store_changes()
        for _ in range(3000):
            under_way = self.pushes or self.pulls or self.asks or self.rows
            if not (under_way or self.scheduler.holding or self.scheduler.waiting):
                break
            self.now += 0.1
            while self.asks:
                self.answer_ask()
            while self.rows:
                self.answer_rows()
            while self.pulls:
                self.answer_pull()
            for _ in range(4):
                self.answer_push()
            self.step()
        assert not self.scheduler.holding and not self.scheduler.waiting, "somebody hangs"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_order_of_events_keeps_the_books_and_lets_everybody_end(seed: int) -> None:
    house = House(seed)
    deeds = [house.submit, house.cancel, house.store_changes, house.time_passes, house.answer_pull, house.answer_push]
    for _ in range(120):
        more = [house.answer_ask, house.answer_rows, house.step]
        deed = house.rng.choices([*deeds, *more], weights=[2, 0.4, 0.15, 0.2, 3, 4, 2, 2, 6])[0]
        if deed != house.submit or house.scheduler.waiting < 6:
            deed()
        house.check()
    house.run_dry()
    house.check()
    for pool in house.holdings.pools:
        assert pool.available == pool.blocks
    gauges = house.holdings.book.gauges()
    names = ("requests", "regions", "host_pages", "pages_lent", "leases", "promised")
    assert all(gauges[f"hot.{name}"] == 0 for name in names)
    assert house.room <= set(house.released) or house.lost, "room is given back"
