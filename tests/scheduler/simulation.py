"""One worker without torch: the real scheduler and block pool, and a pretence of compute, loads and pushes.

Every block remembers which unit key was written into it, so that a step that would read wrong KV, or write
where others read, fails at once. Time is a count of turns; all chance comes from one `random.Random`.

The worker sleeps as the real one does: after a turn in which nothing was computed it makes no plan until somebody
tells it something. So a wake-up that is missing shows as a deadlock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.kvstore.identity import MATCH_UNIT, Chain, GroupGeometry, root_key, unpack_tokens
from forebay.kvstore.layout import needed_from
from forebay.scheduler.batch import BatchScheduler
from forebay.scheduler.memory import Growth
from forebay.scheduler.plan import Limits, Plan, Work
from forebay.scheduler.request import Request, RequestState
from forebay.workers.block_pool import NO_BLOCK
from forebay.workers.holdings import Holdings
from forebay.workers.moves import Pull, Pulled, Push, Pushed
from forebay.workers.prefix import GroupShape
from forebay.workers.sealing import DeviceMemory
from tests.scheduler.simulated_cuts import Cuts

ROOT = root_key(bytes(32))


def geometry(name: str, window: int | None = None) -> GroupGeometry:
    """A group as small as groups get."""
    kind = "full" if window is None else "window"
    return GroupGeometry(name, kind, (0,), 1, 2, "float32", window)


class Log:
    """A listener that keeps what it is told, and checks that the device never contradicts itself."""

    def __init__(self) -> None:
        self.held: dict[int, set[bytes]] = {}
        self.stored_tokens: dict[bytes, tuple[int, ...]] = {}

    def stored(self, group: int, parent: bytes | None, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        assert len(tokens) == len(keys) * MATCH_UNIT
        for index, key in enumerate(keys):
            assert key not in self.held.setdefault(group, set()), "announced twice"
            self.held[group].add(key)
            self.stored_tokens[key] = tuple(tokens[index * MATCH_UNIT : (index + 1) * MATCH_UNIT])

    def removed(self, group: int, key: bytes) -> None:
        self.held[group].remove(key)


@dataclass
class Arrival:
    """A request to come: at which turn, with what, for how long, and when its client gives up."""

    turn: int
    prompt: list[int]
    output: int
    priority: int = 0
    cancel_after: int | None = None
    fresh: bool = False


@dataclass
class Worker:
    """The simulated worker."""

    shapes: Sequence[GroupShape]
    blocks: Sequence[int]
    limits: Limits
    chance: random.Random
    chunk_tokens: int
    load_turns: int = 3
    load_fails: float = 0.3
    push_turns: int = 2
    store: bool = True
    cut_share: float = 0.0
    cut_holes: float = 0.1
    log: Log = field(default_factory=Log)

    def __post_init__(self) -> None:
        self.holdings = Holdings(self.shapes, self.blocks, self.log)
        self.holdings.ask_store = self.store
        self.memory = DeviceMemory(self.holdings, self.chunk_tokens, self._queue_push)
        self.scheduler = BatchScheduler(self.limits, self.memory, lambda: float(self.turn))
        self.contents: list[dict[int, bytes]] = [{} for _ in self.blocks]
        self.turn = 0
        self.loads: list[tuple[int, Pull]] = []
        self.pushes: list[tuple[int, Push]] = []
        self.pushed: list[Push] = []
        self.done: dict[object, str] = {}
        self.output: dict[object, int] = {}
        self.preempted = self.gained = self.drained = self.failed = self.cancelled = self.slept = 0
        self.awake = True
        self.due: dict[object, Request] = {}
        self.cuts = Cuts(self, self.cut_share, self.cut_holes)
        self._grow = self.memory.grow
        self.memory.grow = self._watch_growth  # type: ignore[method-assign]

    # --- the world ---------------------------------------------------------------------------------------

    def submit(self, key: object, arrival: Arrival) -> None:
        self.awake = True
        request = Request(
            key, list(arrival.prompt), len(arrival.prompt), priority=arrival.priority, fresh=arrival.fresh
        )
        assert self.holdings.fits(len(arrival.prompt) + arrival.output)
        self.holdings.expect(request, ROOT, "")
        self.output[key] = arrival.output
        self.scheduler.submit(request)

    def cancel(self, key: object) -> None:
        self.awake = True
        request = self.scheduler.cancel(key)
        if request is not None:
            self.cancelled += 1
            self.done[key] = "cancelled"
            if not self.holdings.holding(request).holds:
                self.holdings.forget(key)

    def step(self) -> Plan | None:
        """One turn: what has ended ends, then one plan is made and carried out, unless the worker sleeps."""
        self.turn += 1
        self._end_pushes()
        self.cuts.turn()
        self._end_loads()
        if not self.awake:
            self.slept += 1
            return None
        before, waited = self.scheduler.active(), self._waiting()
        plan = self.scheduler.plan()
        self._check_plan(plan, before, waited)
        for request in plan.loads:
            pull = self.holdings.pull(request)
            self.loads.append((self.turn + self.chance.randint(1, self.load_turns), pull))
        if plan.draining and not plan.works:
            self._shed()
        self.awake = bool(plan.works or plan.preempted) or (plan.draining and not plan.works)
        for work in plan.works:
            self._compute(work)
        return plan

    @property
    def under_way(self) -> bool:
        """Will something happen by itself?"""
        return bool(self.loads or self.pushes or self.cuts.open)

    def _waiting(self) -> list[Request]:
        return list(self.scheduler._waiting._ranked)

    def _end_loads(self) -> None:
        due = [pull for turn, pull in self.loads if turn <= self.turn]
        self.loads = [(turn, pull) for turn, pull in self.loads if turn > self.turn]
        for pull in due:
            self.awake = True
            if self.cuts.begin(pull):
                continue
            request = self.scheduler.find(pull.request)
            assert request is not None
            if request.state is not RequestState.FINISHED:
                self.holdings.settle(request, self._load(pull))
            if self.scheduler.load_ended(pull.request) is None:
                self.holdings.forget(pull.request)
            else:
                self.due[request.key] = request

    def _load(self, pull: Pull) -> Pulled:
        hit = self.chance.randrange(0, pull.limit + 1, MATCH_UNIT)
        if self.chance.random() < self.load_fails:
            self.failed += 1
            return Pulled(pull.request, 0, tuple({} for _ in self.shapes))
        return self.place(pull, hit)

    def place(self, pull: Pull, hit: int) -> Pulled:
        """Write what a hit of this length lacks into the spare blocks."""
        nothing: tuple[dict[int, int], ...] = tuple({} for _ in self.shapes)
        if hit <= pull.device_hit:
            return Pulled(pull.request, 0, nothing, stored=hit)
        keys = Chain(pull.root, unpack_tokens(pull.tokens), chunk_tokens=self.chunk_tokens).keys
        placed: list[dict[int, int]] = []
        for group, (shape, room) in enumerate(zip(self.shapes, pull.rooms, strict=True)):
            missing = [
                u for u in range(shape.first_unit(hit), hit // MATCH_UNIT) if not any(u in run for run in room.have)
            ]
            if len(missing) > len(room.spare):
                return Pulled(pull.request, 0, nothing, stored=hit)
            placed.append(dict(zip(missing, room.spare, strict=False)))
            for unit, block in placed[-1].items():
                self.contents[group][block] = keys[unit]
        self.gained += 1
        return Pulled(pull.request, hit, tuple(placed), {"host": hit}, stored=hit)

    def _queue_push(self, push: Push) -> bool:
        if self.chance.random() < 0.1:
            return False
        self.pushes.append((self.turn + self.chance.randint(0, self.push_turns), push))
        return True

    def _end_pushes(self) -> None:
        due = [push for turn, push in self.pushes if turn <= self.turn]
        self.pushes = [(turn, push) for turn, push in self.pushes if turn > self.turn]
        for push in due:
            self.awake = True
            self._check_push(push)
            self.memory.pushed(Pushed(push, lost=self.chance.random() < 0.1))

    def _shed(self) -> None:
        for _, push in self.pushes:
            self.memory.pushed(Pushed(push))
        self.pushes.clear()

    # --- compute -----------------------------------------------------------------------------------------

    def _compute(self, work: Work) -> None:
        request = work.request
        holding = self.holdings.holding(request)
        for group, shape in enumerate(self.shapes):
            self._check_reads(group, shape, work)
            table = holding.tables[group]
            for unit in range(work.start // MATCH_UNIT, -(-work.end // MATCH_UNIT)):
                pool = self.holdings.pools[group]
                assert not pool.sealed(table[unit]), "a shared block would be overwritten"
                keys = holding.chain.keys
                self.contents[group][table[unit]] = keys[unit] if unit < len(keys) else b"open"
        samples = work.samples
        request.computed = work.end
        request.fresh = request.fresh and work.end < request.prompt_tokens
        if samples:
            token = self.chance.randrange(4)
            request.tokens.append(token)
            holding.chain.extend([token])
            # The open unit gets its final key when it is full: the last write above named it too early.
            for group in range(len(self.shapes)):
                unit = (work.end - 1) // MATCH_UNIT
                if work.end % MATCH_UNIT == 0:
                    self.contents[group][holding.tables[group][unit]] = holding.chain.keys[unit]
        self.memory.advance(request)
        if len(request.tokens) - request.prompt_tokens >= self.output[request.key]:
            self.scheduler.finish(request)
            if not holding.holds:  # else its load has not ended
                self.holdings.forget(request.key)
            self.done[request.key] = "finished"

    def _check_reads(self, group: int, shape: GroupShape, work: Work) -> None:
        holding = self.holdings.holding(work.request)
        first = needed_from(shape.geometry, work.start) // MATCH_UNIT
        for unit in range(first, work.start // MATCH_UNIT):
            block = holding.tables[group][unit]
            assert block != NO_BLOCK, f"unit {unit} is needed at {work.start} and gone"
            assert self.contents[group][block] == holding.chain.keys[unit], "wrong KV would be read"

    def _check_push(self, push: Push) -> None:
        contents = self.contents[push.chunk.group]
        assert contents[push.blocks[-1]] == push.chunk.key, "wrong KV would be stored"
        assert len(push.blocks) * MATCH_UNIT * 4 == len(push.chunk.tokens)
        self.pushed.append(push)

    def _watch_growth(self, request: Request, upto: int) -> Growth:
        growth = self._grow(request, upto)
        assert growth is not Growth.SHORT or request.remaining == 1, "a prefill ran out of blocks"
        return growth

    # --- invariants --------------------------------------------------------------------------------------

    def _check_plan(self, plan: Plan, before: list[Request], waited: list[Request]) -> None:
        self._check_first_in_rank(plan, before, waited)
        self._check_reserved(plan)
        self._check_ended_loads(plan)
        assert sum(work.count for work in plan.works) <= self.limits.batch_tokens
        assert sum(work.count for work in plan.works if work.request.fresh) <= self.limits.fresh_tokens
        assert len({work.request.key for work in plan.works}) == len(plan.works)
        assert self.scheduler.holding <= self.limits.running
        assert all(work.request.state is RequestState.RUNNING for work in plan.works)
        admitted = [r for r in (*plan.started, *plan.loads) if r not in before]
        left_out = [r for r in before if r.state is RequestState.RUNNING and not plan.includes(r)]
        if (admitted and plan.budget > 0) or any(map(plan.includes, admitted)):
            assert not left_out, "a request that holds blocks waits behind one that held none"
        self.preempted += len(plan.preempted)
        self.drained += plan.draining

    def _check_first_in_rank(self, plan: Plan, before: list[Request], waited: list[Request]) -> None:
        """Nobody is starved: the queue is left in rank order, and the first of all who run is never preempted."""
        left = self._waiting()
        admitted = [r for r in waited if r not in left]
        if admitted and left:
            came_before = [r for r in left if r not in plan.preempted]
            assert all(max(r.rank for r in admitted) < r.rank for r in came_before), "the queue was jumped"
        if before:
            assert min(before, key=lambda r: r.rank) not in plan.preempted, "the first in rank was preempted"

    def _check_reserved(self, plan: Plan) -> None:
        """I2: whoever was admitted has its whole footprint, held or promised."""
        for request in plan.loads:
            holding = self.holdings.holding(request)
            for group, shape in enumerate(self.shapes):
                mine = len(holding.tables[group]) - holding.trimmed[group]
                mine += holding.credit[group] + len(holding.spare[group])
                assert mine == shape.footprint(len(request.tokens)), "less than the footprint was reserved"

    def _check_ended_loads(self, plan: Plan) -> None:
        """I3, I4: a load that ended, well or not, makes its request runnable at once, and it is computed as soon as
        there is budget."""
        due, self.due = self.due, {}
        for key, request in due.items():
            if request.state is RequestState.FINISHED:
                continue  # cancelled between the end of its load and the plan
            assert request in plan.started, f"{key}: its load has ended and it doesn't run"
            served = plan.includes(request) or request in plan.preempted
            assert served or plan.budget == 0 or plan.blocked, f"{key}: its load has ended and nothing is computed"

    def check_books(self) -> None:
        for pool in self.holdings.pools:
            pool.check()
        for group, pool in enumerate(self.holdings.pools):
            assert pool.cached == len(self.log.held.get(group, ()))

    def check_empty(self) -> None:
        """Nobody is left and no block is lost."""
        self.check_books()
        for pool in self.holdings.pools:
            assert pool.available == pool.takeable == pool.blocks
        assert self.scheduler.holding == self.scheduler.waiting == 0
