"""The batch scheduler's decisions, one at a time, on a memory that counts blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from forebay.scheduler.batch import BatchScheduler
from forebay.scheduler.memory import Admission, Growth
from forebay.scheduler.plan import Limits, Plan
from forebay.scheduler.request import Request, RequestState
from forebay.scheduler.waiting import QueueFull

UNIT = 16


@dataclass
class CountingMemory:
    """Blocks without numbers: a request needs one for every 16 tokens."""

    blocks: int = 1000
    load: bool = False
    hit: int = 0
    draining: bool = False
    claims: list[int] = field(default_factory=list)
    held: dict[object, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.blocks - sum(self.held.values())

    def admit(self, request: Request, leave: int) -> Admission | None:
        need = -(-len(request.tokens) // UNIT) + 1
        if need + leave > self.free:
            return None
        self.held[request.key] = need
        request.computed = min(self.hit, len(request.tokens) - 1)
        return Admission(self.load)

    def grow(self, request: Request, upto: int) -> Growth:
        if self.draining:
            return Growth.DRAINING
        need = -(-upto // UNIT) - self.held[request.key]
        if need > self.free:
            return Growth.SHORT
        self.held[request.key] += max(0, need)
        return Growth.READY

    def claim(self, request: Request, count: int) -> int:
        return min(count, self.claims.pop(0)) if self.claims else 0

    def release(self, request: Request) -> None:
        del self.held[request.key]


def scheduler(memory: CountingMemory | None = None, **limits: int) -> tuple[BatchScheduler, CountingMemory]:
    memory = memory or CountingMemory()
    limits = {"batch_tokens": 64, "running": 4, "waiting": 8} | limits
    return BatchScheduler(Limits(**limits), memory, lambda: 0.0), memory


def request(key: str, tokens: int, priority: int = 0) -> Request:
    return Request(key, [1] * tokens, tokens, priority)


def carry_out(plan: Plan) -> dict[object, int]:
    """Pretend that the step was computed; returns tokens fed by request."""
    for work in plan.works:
        samples = work.samples
        work.request.computed = work.end
        if samples:
            work.request.tokens.append(2)
    return {work.request.key: work.count for work in plan.works}


def test_a_long_prompt_is_fed_in_pieces_within_the_budget() -> None:
    s, _ = scheduler()
    s.submit(request("a", 150))
    assert [carry_out(s.plan()) for _ in range(4)] == [{"a": 64}, {"a": 64}, {"a": 22}, {"a": 1}]


def test_decodes_go_before_prefills() -> None:
    s, _ = scheduler()
    s.submit(request("a", 10))
    carry_out(s.plan())
    s.submit(request("b", 200))
    assert carry_out(s.plan()) == {"a": 1, "b": 63}
    assert carry_out(s.plan()) == {"a": 1, "b": 63}


def test_first_come_first_served_within_a_priority() -> None:
    s, _ = scheduler(running=1)
    for key, priority in (("a", 1), ("b", 1), ("c", 0)):
        s.submit(request(key, 5, priority))
    order = []
    while s.holding or s.waiting:
        plan = s.plan()
        carry_out(plan)
        for work in plan.works:
            order.append(work.request.key)
            s.finish(work.request)
    assert order == ["c", "a", "b"]


def test_who_has_waited_elsewhere_stands_before_those_who_came_since() -> None:
    s, _ = scheduler(running=1)
    s.submit(request("here", 5))
    s.submit(request("carried over", 5), waited_s=3.0)
    assert [r.key for r in s.plan().started] == ["carried over"]


def test_a_request_waits_until_its_whole_prompt_fits() -> None:
    s, memory = scheduler(CountingMemory(blocks=10))
    s.submit(request("a", 100))
    s.submit(request("b", 60))
    plan = s.plan()
    assert [r.key for r in plan.started] == ["a"] and s.waiting == 1
    s.finish(plan.works[0].request)
    assert [r.key for r in s.plan().started] == ["b"]
    assert memory.held.keys() == {"b"}


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    s, _ = scheduler(CountingMemory(blocks=10))
    s.submit(request("a", 80))
    s.plan()
    s.submit(request("large", 100))
    s.submit(request("small", 1))
    assert s.plan().started == []


def test_growth_preempts_the_youngest_which_comes_back_before_later_arrivals() -> None:
    s, memory = scheduler(CountingMemory(blocks=6))
    old, young = request("old", 15), request("young", 15)
    s.submit(old)
    s.submit(young)
    carry_out(s.plan())
    s.submit(request("later", 1))
    preempted: list[object] = []
    for _ in range(80):
        plan = s.plan()
        preempted += [r.key for r in plan.preempted]
        carry_out(plan)
        if preempted:
            break
    assert preempted == ["young"]
    assert young.state is RequestState.WAITING and young.computed == 0 and len(young.tokens) > 15
    assert plan.includes(old), "the older one got its block"
    s.finish(old)
    assert [r.key for r in s.plan().started][:1] == ["young"]
    assert s.preemptions == 1 and "old" not in memory.held


def test_nobody_is_admitted_while_somebody_who_holds_blocks_cannot_go_on() -> None:
    s, memory = scheduler()
    s.submit(request("a", 10))
    carry_out(s.plan())
    memory.draining = True
    s.submit(request("b", 10))
    plan = s.plan()
    assert plan.blocked and plan.draining and not plan.started and not plan.works
    memory.draining = False
    assert {r.key for r in s.plan().started} == {"b"}


def test_a_load_holds_blocks_and_takes_no_budget_until_it_has_ended() -> None:
    memory = CountingMemory(load=True)
    s, _ = scheduler(memory)
    s.submit(request("a", 100))
    plan = s.plan()
    assert [r.key for r in plan.loads] == ["a"] and not plan.works and s.loading == 1
    assert not s.plan().works
    loaded = s.load_ended("a")
    assert loaded is not None
    loaded.computed = 96
    plan = s.plan()
    assert plan.started == [loaded] and [w.count for w in plan.works] == [4]


def test_a_failed_load_becomes_compute() -> None:
    s, _ = scheduler(CountingMemory(load=True))
    s.submit(request("a", 40))
    s.plan()
    s.load_ended("a")
    assert carry_out(s.plan()) == {"a": 40}


def test_cancelling_during_a_load_keeps_the_blocks_until_it_has_ended() -> None:
    s, memory = scheduler(CountingMemory(load=True))
    s.submit(request("a", 40))
    s.plan()
    assert s.cancel("a") is not None and "a" in memory.held
    assert s.cancel("a") is None
    assert s.load_ended("a") is None and not memory.held


def test_cancelling_a_ready_request_does_not_lose_the_others() -> None:
    s, memory = scheduler(CountingMemory(load=True))
    for key in ("a", "b"):
        s.submit(request(key, 40))
    s.plan()
    s.load_ended("a")
    s.load_ended("b")
    assert s.cancel("a") is not None
    assert [r.key for r in s.plan().started] == ["b"] and memory.held.keys() == {"b"}


def test_the_queue_is_bounded_and_a_refused_request_leaves_no_trace() -> None:
    s, _ = scheduler(running=1, waiting=2)
    for key in ("a", "b"):
        s.submit(request(key, 5))
    with pytest.raises(QueueFull):
        s.submit(request("c", 5))
    assert s.waiting == 2 and s.find("c") is None


def cut(s: BatchScheduler, memory: CountingMemory, key: str, tokens: int) -> Request:
    """A request that is being loaded, and has something to compute meanwhile."""
    memory.load = True
    made = request(key, tokens)
    s.submit(made)
    assert s.plan().loads == [made]
    memory.load, made.cut = False, True
    s.load_opened(key)
    return made


def test_a_request_with_a_cut_computes_what_its_memory_lets_it_and_waits_for_the_rest() -> None:
    s, memory = scheduler()
    made = cut(s, memory, "a", 100)
    memory.claims = [40, 10]
    assert [carry_out(s.plan()) for _ in range(3)] == [{"a": 40}, {"a": 10}, {}]
    assert made.state is RequestState.LOADING and s.loading == 1
    s.load_opened("a")
    memory.claims = [20]
    assert carry_out(s.plan()) == {"a": 20}
    made.cut = False
    assert s.load_ended("a") is made
    assert carry_out(s.plan()) == {"a": 30}


def test_others_are_admitted_while_it_waits() -> None:
    s, memory = scheduler()
    cut(s, memory, "a", 100)
    s.submit(request("b", 30))
    assert carry_out(s.plan()) == {"b": 30}


def test_who_is_being_loaded_is_not_preempted_though_it_computes() -> None:
    s, memory = scheduler(CountingMemory(blocks=12))
    s.submit(request("old", 31))
    s.plan().works[0].request.computed = 31
    s.find("old").tokens.append(2)  # type: ignore[union-attr]
    made = cut(s, memory, "new", 80)
    memory.blocks, memory.claims = sum(memory.held.values()), [16] * 8
    for _ in range(20):
        plan = s.plan()
        assert not plan.preempted
        carry_out(plan)
    assert made.state is not RequestState.WAITING
    made.cut = False
    s.load_ended("new")
    while not (plan := s.plan()).preempted:
        carry_out(plan)
    assert plan.preempted == [made], "now it may be"


def test_one_that_finishes_while_it_is_being_loaded_keeps_its_blocks_until_that_has_ended() -> None:
    s, memory = scheduler()
    made = cut(s, memory, "a", 20)
    memory.claims = [20]
    carry_out(s.plan())
    s.finish(made)
    assert "a" in memory.held and s.find("a") is made
    assert s.load_ended("a") is None
    assert "a" not in memory.held and s.find("a") is None


def test_one_that_is_cancelled_while_it_is_being_loaded_does_too() -> None:
    s, memory = scheduler()
    cut(s, memory, "a", 20)
    assert s.cancel("a") is not None and s.cancel("a") is None
    assert "a" in memory.held
    assert s.load_ended("a") is None
    assert "a" not in memory.held
