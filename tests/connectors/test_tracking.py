"""A request from its lookup to its end: nothing is promised that isn't pinned, nothing stays pinned that isn't used.

One file because all of it drives one tracker by the same few moves, which the state machine at its end mixes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.connectors.keys import RequestKeys
from forebay.connectors.orders import Tables
from forebay.connectors.questions import Answer, Question
from forebay.connectors.tracking import STALE_S, EngineGroup, Stage, Tracker
from forebay.kvstore.geometry import GroupGeometry
from forebay.kvstore.identity import Chain, Namespace, pack_tokens, root_key
from forebay.kvstore.layout import needed_from, round_down
from forebay.kvstore.protocol import ChunkRead

NAMESPACE = Namespace(
    weights=b"w" * 32,
    groups=(
        GroupGeometry("full", "full", (0,), 1, 32, "float32"),
        GroupGeometry("window", "window", (1, 2), 1, 32, "float32", 32),
    ),
    chunk_tokens=32,
)
GROUPS = (EngineGroup(16, (0,)), EngineGroup(16, (1,)), EngineGroup(16, (1,)))


@dataclass
class Request:
    """As much of an engine's request as is read."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Store:
    """Remembers questions and what was given back."""

    name: bytes = b"boot"
    questions: list[Question] = field(default_factory=list)
    released: Counter[int] = field(default_factory=Counter)
    leases: int = 0
    pinned: set[int] = field(default_factory=set)

    def boot(self) -> bytes:
        return self.name

    def ask(self, question: Question) -> None:
        self.questions.append(question)

    def release(self, boot: bytes, lease: int) -> None:
        self.released[lease] += 1

    def answer(self, question: Question, hit: int, tiers: dict[str, int] | None = None) -> int:
        """Answer as the link does; returns the lease, which is given back at once if nobody wants it."""
        self.leases += 1
        answer = Answer(self.name, self.leases if hit else 0, hit, tuple(pinned(hit)), tiers or {})
        if answer.lease:
            self.pinned.add(answer.lease)
        if not question.give(answer) and answer.lease:
            self.release(self.name, answer.lease)
        return answer.lease


def pinned(hit: int) -> list[ChunkRead]:
    """What a lookup pins for a hit: as much of each group as it needs, to the unit."""
    size = NAMESPACE.chunk_tokens
    return [
        ChunkRead(group, start, min(size, hit - start), 0, 0, 0, 0, 0, b"")
        for group, geometry in enumerate(NAMESPACE.groups)
        for start in range(round_down(needed_from(geometry, hit), size), hit, size)
    ]


class Clock:
    """Time that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def tracker(store: Store, clock: Clock | None = None, requests_max: int = 8) -> Tracker:
    return Tracker(NAMESPACE, GROUPS, store, clock or Clock(), requests_max)


def keys(salt: bytes = b"") -> RequestKeys:
    return RequestKeys(NAMESPACE, salt, b"")


def tables(tokens: int, hole: int = 0) -> Tables:
    """Blocks for so many tokens; the first `hole` are gone from the window groups."""
    blocks = -(-tokens // 16)
    window = tuple(0 if block < hole else block + 1 for block in range(blocks))
    return (tuple(range(1, blocks + 1)), window, window)


def impatient(question: Question) -> None:
    """Waits for nothing."""


def added(track: Tracker, tokens: int = 100, name: str = "r") -> Request:
    request = Request(name, list(range(tokens)))
    assert track.add(request, keys())
    return request


def test_the_engine_asks_each_step_and_the_store_is_asked_once() -> None:
    store = Store()
    track = tracker(store)
    added(track)
    assert [track.matched("r", 0, impatient) for _ in range(3)] == [None, None, None]
    assert len(store.questions) == 1 and store.questions[0].prefix.limit == 96
    store.answer(store.questions[0], 64)
    assert [track.matched("r", 0, impatient), track.matched("r", 16, impatient)] == [64, 48]
    assert len(store.questions) == 1 and not store.released


def test_an_answer_in_time_is_given_in_the_same_step() -> None:
    store = Store()
    track = tracker(store)
    added(track)
    assert track.matched("r", 0, lambda question: store.answer(question, 64) and None) == 64


def test_a_miss_is_not_asked_again_until_it_is_old() -> None:
    store, clock = Store(), Clock()
    track = tracker(store, clock)
    added(track)
    track.matched("r", 0, impatient)
    store.answer(store.questions[0], 0)
    assert [track.matched("r", 0, impatient) for _ in range(3)] == [0, 0, 0] and len(store.questions) == 1
    clock.now += STALE_S
    assert track.matched("r", 0, impatient) is None and len(store.questions) == 2


@pytest.mark.parametrize(("tokens", "limit"), [(96, 80), (97, 96), (112, 96)])
def test_one_token_is_left_to_compute(tokens: int, limit: int) -> None:
    store = Store()
    track = tracker(store)
    added(track, tokens)
    assert track.matched("r", 0, impatient) is None and store.questions[0].prefix.limit == limit


def test_a_request_that_was_preempted_is_asked_about_anew_with_its_answer() -> None:
    store = Store()
    track = tracker(store)
    request = added(track, 60)
    track.matched("r", 0, lambda question: store.answer(question, 48) and None)
    track.allocated("r", tables(48), 48)
    track.received(["r"], [])
    request.num_computed_tokens = 48
    track.step("r", 12, lambda: tables(60))
    request.all_token_ids += range(60)
    assert track.matched("r", 0, impatient) is None
    assert [question.prefix.limit for question in store.questions] == [48, 112]


def test_what_the_device_has_all_of_is_not_asked_for() -> None:
    store = Store()
    track = tracker(store)
    added(track)
    assert track.matched("r", 96, impatient) == 0 and not store.questions


def test_little_is_computed_rather_than_loaded() -> None:
    store = Store()
    track = tracker(store)
    track.load_min = 32
    added(track)
    assert track.matched("r", 80, impatient) == 0 and not store.questions
    added(track, name="s")
    assert track.matched("s", 48, lambda question: store.answer(question, 64) and None) == 0
    track.allocated("s", (), 0)
    assert store.released == {1: 1}


@pytest.mark.parametrize(("block", "promised"), [(16, 128), (32, 128), (64, 0)])
def test_a_hit_whose_window_begins_in_a_block_that_would_stay_half_empty_is_not_promised(
    block: int, promised: int
) -> None:
    """128 tokens need 97 and on of the window; blocks of 64 begin at 64, which no chunk that is pinned has."""
    store = Store()
    track = Tracker(NAMESPACE, (EngineGroup(16, (0,)), EngineGroup(block, (1,))), store, Clock(), 8)
    added(track, 140)
    assert track.matched("r", 0, impatient) is None
    store.answer(store.questions[0], 128)
    assert track.matched("r", 0, impatient) == promised
    assert track.counters["lookups.uneven"] == (promised == 0)
    track.drop("r")
    assert store.released == {1: 1}


@pytest.mark.parametrize(("computed", "promised"), [(0, 0), (128, 16)])
def test_what_the_device_has_of_a_block_need_not_be_brought(computed: int, promised: int) -> None:
    store = Store()
    track = Tracker(NAMESPACE, (EngineGroup(16, (0,)), EngineGroup(64, (1,))), store, Clock(), 8)
    added(track, 150)
    assert track.matched("r", computed, impatient) is None
    store.answer(store.questions[0], 144)
    assert track.matched("r", computed, impatient) == promised


def test_without_a_store_requests_are_computed_and_nothing_is_ordered() -> None:
    store = Store(name=b"")
    track = tracker(store)
    request = added(track)
    assert track.matched("r", 0, impatient) == 0 and not store.questions
    track.allocated("r", (), 0)
    track.step("r", 100, lambda: tables(100))
    request.num_computed_tokens = 100
    assert not track.finished("r", tables(100))
    orders = track.take_orders()
    assert not (orders.loads or orders.spans or orders.tails) and not track.requests


def test_a_load_is_ordered_with_what_is_pinned_and_released_when_all_ranks_have_answered() -> None:
    store = Store()
    track = tracker(store)
    added(track)
    track.matched("r", 16, lambda question: store.answer(question, 64, {"fs": 32}) and None)
    track.allocated("r", tables(64), 48)
    (load,) = track.take_orders().loads
    assert (load.first, load.hit, load.tables) == (16, 64, tables(64))
    assert track.hits["r"] == {"fs": 32, "host": 16} and not store.released
    track.allocated("r", tables(100), 0)  # the engine says it again when it goes on
    assert not track.take_orders().loads
    track.received(["r"], [])
    assert store.released == {1: 1} and track.requests["r"].stage is Stage.RUNNING


def test_a_failed_load_is_asked_for_once_more_and_then_computed() -> None:
    store = Store()
    track = tracker(store)
    added(track)
    for hit in (64, 32):
        assert track.matched("r", 0, lambda question, hit=hit: store.answer(question, hit) and None) == hit
        track.allocated("r", tables(hit), hit)
        track.received(["r"], ["r"])
    assert track.matched("r", 0, impatient) == 0 and len(store.questions) == 2
    assert store.released == {1: 1, 2: 1} and track.counters["loads.failed"] == 2


@pytest.mark.parametrize("phase", ["asked", "answered", "loading", "running"])
def test_whatever_a_request_is_doing_when_it_ends_no_pin_stays(phase: str) -> None:
    store = Store()
    track = tracker(store)
    added(track)
    track.matched("r", 0, impatient)
    if phase != "asked":
        store.answer(store.questions[0], 64)
        track.matched("r", 0, impatient)
    if phase in ("loading", "running"):
        track.allocated("r", tables(64), 64)
    if phase == "running":
        track.received(["r"], [])
    assert not track.finished("r", tables(64)) or phase == "running"
    if phase == "asked":
        assert store.answer(store.questions[0], 64) == 1  # it comes too late for anybody
    if phase == "loading":
        assert not store.released, "the ranks still read"
        track.received(["r"], [])
    assert store.released == {1: 1} and not track.requests and not track.hits


def test_what_is_never_answered_is_waited_for_no_longer_than_that() -> None:
    store, clock = Store(), Clock()
    track = tracker(store, clock)
    added(track)
    assert track.matched("r", 0, impatient) is None
    clock.now += track.ask_s
    assert track.matched("r", 0, impatient) == 0 and track.counters["lookups.failed"] == 1
    lease = store.answer(store.questions[0], 64)
    assert store.released == {lease: 1}, "it came too late for anybody"
    assert track.matched("r", 0, impatient) == 0 and len(store.questions) == 1


@pytest.mark.parametrize("hit", [112, 2048, -16, 63])
def test_an_answer_that_can_not_be_is_none_and_its_pins_are_given_back(hit: int) -> None:
    """100 tokens were asked for, so that 96 can be found: more would leave the engine nothing to compute."""
    store = Store()
    track = tracker(store)
    added(track)
    found = track.matched("r", 0, lambda question: store.answer(question, hit) and None)
    assert found == 0 and store.released == {1: 1} and track.counters["lookups.failed"] == 1


def test_what_the_engine_waits_for_though_it_was_not_promised_is_reported_as_failed() -> None:
    store = Store()
    track = tracker(store)
    added(track)
    assert track.matched("r", 0, lambda question: store.answer(question, 0) and None) == 0
    track.allocated("r", tables(64), 64)
    (load,) = track.take_orders().loads
    assert not load.boot and not load.chunks, "no rank can load it"
    track.received(["r"], ["r"])
    assert track.requests["r"].stage is Stage.NEW


def test_what_is_computed_after_failed_loads_is_offered_from_its_beginning() -> None:
    store = Store()
    track = tracker(store)
    added(track)
    for _ in range(2):
        track.matched("r", 0, lambda question: store.answer(question, 64) and None)
        track.allocated("r", tables(64), 64)
        track.received(["r"], ["r"])
        track.take_orders()
    assert track.matched("r", 0, impatient) == 0
    track.step("r", 100, lambda: tables(100))
    assert [span.start for span in track.take_orders().spans] == [0, 32, 64]


def test_an_answer_that_no_blocks_are_found_for_is_given_back_in_time() -> None:
    store, clock = Store(), Clock()
    track = tracker(store, clock)
    added(track)
    track.matched("r", 0, lambda question: store.answer(question, 64) and None)
    clock.now += STALE_S
    assert track.matched("r", 0, impatient) is None
    assert store.released == {1: 1} and len(store.questions) == 2


def test_what_a_store_promised_that_has_gone_meanwhile_is_not_promised() -> None:
    store = Store()
    track = tracker(store)
    added(track)
    assert track.matched("r", 0, impatient) is None
    lease = store.answer(store.questions[0], 96)
    store.name = b"another"
    assert track.matched("r", 0, impatient) is None
    assert store.released == {lease: 1} and len(store.questions) == 2


def test_what_another_store_promised_is_not_promised_on() -> None:
    store = Store()
    track = tracker(store)
    added(track)
    track.matched("r", 0, lambda question: store.answer(question, 64) and None)
    store.name = b"another"
    assert track.matched("r", 0, impatient) is None
    store.answer(store.questions[1], 32)
    assert track.matched("r", 0, impatient) == 32


def test_chunks_are_ordered_when_a_step_fills_them_with_the_keys_of_the_chain() -> None:
    store = Store()
    track = tracker(store)
    request = added(track, 80)
    track.matched("r", 0, lambda question: store.answer(question, 0) and None)
    chain = Chain(root_key(NAMESPACE.id), request.all_token_ids, chunk_tokens=32)
    for computed, scheduled, expected in ((0, 40, [(0, 32)]), (40, 20, []), (60, 20, [(32, 64)])):
        request.num_computed_tokens = computed
        track.step("r", scheduled, lambda: tables(80))
        spans = track.take_orders().spans
        assert [(span.start, span.end) for span in spans] == expected
        for span in spans:
            assert (span.parent, span.key) == (chain.key_at(span.start), chain.key_at(span.end))
            assert span.tokens == pack_tokens(request.all_token_ids[span.start : span.end])
            assert span.groups == (0, 1) and span.tables[0] == tuple(range(span.start // 16 + 1, span.end // 16 + 1))


def test_tokens_that_are_not_known_yet_are_not_stored() -> None:
    store = Store()
    track = tracker(store)
    added(track, 60)
    track.step("r", 70, lambda: tables(80))
    assert [span.end for span in track.take_orders().spans] == [32]


def test_a_group_whose_window_has_passed_is_left_out_and_counted() -> None:
    store = Store()
    track = tracker(store)
    added(track, 64)
    track.step("r", 64, lambda: tables(64, hole=1))
    first, second = track.take_orders().spans
    assert (first.groups, second.groups) == ((0,), (0, 1)) and track.counters["stores.incomplete"] == 1


def test_the_tail_is_stored_at_the_end_and_keeps_its_blocks_until_it_is_sent() -> None:
    store = Store()
    track = tracker(store)
    request = added(track, 60)
    track.step("r", 60, lambda: tables(60))
    request.num_computed_tokens = 60
    request.all_token_ids.append(7)
    assert track.finished("r", tables(60))
    (tail,) = track.take_orders().tails
    assert (tail.start, tail.end) == (32, 48) and track.gauges()["requests.tails"] == 1
    track.sent(["r"])
    assert track.gauges()["requests.tails"] == 0


def test_a_tail_ends_before_a_token_that_may_not_be_computed_yet() -> None:
    """An engine that schedules ahead counts what is under way as computed."""
    track = tracker(Store())
    request = added(track, 48)
    request.num_computed_tokens = 50
    assert track.finished("r", tables(48))
    assert [tail.end for tail in track.take_orders().tails] == [32]


def test_what_was_offered_a_moment_ago_is_not_offered_again_unless_the_store_is_another() -> None:
    store, clock = Store(), Clock()
    track = tracker(store, clock)
    offered = []
    for name, later, boot in (("a", 0, b"boot"), ("b", 1, b"boot"), ("c", 1, b"another"), ("d", 61, b"another")):
        clock.now += later
        store.name = boot
        added(track, 40, name)
        track.step(name, 40, lambda: tables(40))
        offered.append(len(track.take_orders().spans))
    assert offered == [1, 0, 1, 1]


def test_a_group_that_was_lacking_is_offered_when_it_is_there() -> None:
    track = tracker(Store())
    offered = []
    for name, hole in (("a", 2), ("b", 0), ("c", 0), ("d", 2)):
        added(track, 40, name)
        track.step(name, 40, lambda hole=hole: tables(40, hole=hole))
        offered.append([span.groups for span in track.take_orders().spans])
    assert offered == [[(0,)], [(1,)], [], []] and track.counters["stores.incomplete"] == 1


def test_a_tail_is_ordered_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine keeps a request's blocks only if it is told to, and must not hear of a tail that it gave away."""
    track = tracker(Store())
    request = added(track, 100)
    request.num_computed_tokens = 100
    made: list[int] = []

    def broken(tokens: list[int]) -> bytes:
        made.append(len(tokens))
        if len(made) > 2:
            raise OverflowError("not a token")
        return pack_tokens(tokens)

    monkeypatch.setattr("forebay.connectors.tracking.pack_tokens", broken)
    with pytest.raises(OverflowError):
        track.finished("r", tables(100))
    assert not track.take_orders().tails and not track.tails and not track.requests


def test_what_is_remembered_as_offered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.connectors.tracking.OFFERED_MAX", 3)
    track = tracker(Store())
    added(track, 320)
    track.step("r", 320, lambda: tables(320))
    assert len(track.take_orders().spans) == 10 and track.gauges()["chunks.offered"] == 3


def test_requests_beyond_the_cap_are_served_without_the_store() -> None:
    store = Store()
    track = tracker(store, requests_max=1)
    added(track)
    assert not track.add(Request("other", [1] * 50), keys())
    assert track.matched("other", 0, impatient) == 0 and track.counters["requests.untracked"] == 1
    track.allocated("other", (), 0)
    track.step("other", 50, lambda: tables(50))
    assert not track.finished("other", tables(50))


def test_after_new_weights_nothing_of_the_old_ones_is_stored_or_promised() -> None:
    store = Store()
    track = tracker(store)
    added(track)
    added(track, name="loading")
    track.matched("r", 0, lambda question: store.answer(question, 64) and None)
    track.matched("loading", 0, lambda question: store.answer(question, 64) and None)
    track.allocated("loading", tables(64), 64)
    added(track, name="computing")
    track.step("computing", 64, lambda: tables(64))
    assert len(track.orders.spans) == 2
    track.forget_all(NAMESPACE, lambda tracked: keys(b"new"))
    orders = track.take_orders()
    assert len(orders.loads) == 1 and not orders.spans
    assert store.released == {1: 1}
    track.received(["loading"], [])
    assert track.matched("r", 0, impatient) == 0
    track.step("r", 100, lambda: tables(100))
    assert not track.take_orders().spans


class Scheduling(RuleBasedStateMachine):
    """An engine that schedules, preempts and ends requests as it likes, and a store that answers when it likes."""

    @initialize()
    def begin(self) -> None:
        self.store, self.clock = Store(), Clock()
        self.track = tracker(self.store, self.clock, requests_max=3)
        self.live: dict[str, Request] = {}
        self.loading: set[str] = set()
        self.ended_loading: set[str] = set()
        self.count = 0

    @rule(tokens=st.integers(1, 120))
    def arrive(self, tokens: int) -> None:
        self.count += 1
        request = Request(f"r{self.count}", list(range(tokens)))
        self.track.add(request, keys())
        self.live[request.request_id] = request

    @rule(data=st.data(), place=st.booleans(), device=st.sampled_from([0, 16, 32]))
    def ask(self, data: st.DataObject, place: bool, device: int) -> None:
        waiting = sorted(self.live.keys() - self.loading)
        if not waiting:
            return
        name = data.draw(st.sampled_from(waiting))
        request = self.live[name]
        device = min(device, request.num_tokens - 1) // 16 * 16
        found = self.track.matched(name, device, impatient)
        again = self.track.matched(name, device, impatient)
        assert found == again, "asking again changes nothing"
        if found is not None and place:
            assert 0 <= device + found < request.num_tokens, "one token must be left to compute"
            self.track.allocated(name, tables(device + found), found)
            request.num_computed_tokens = device + found
            if found:
                self.loading.add(name)

    @rule(hit=st.integers(0, 8), data=st.data())
    def answer(self, hit: int, data: st.DataObject) -> None:
        unanswered = [question for question in self.store.questions if not question.answered]
        if unanswered:
            question = data.draw(st.sampled_from(unanswered))
            kind = data.draw(st.integers(0, 9))
            if kind == 0:
                question.give(None)
            elif kind == 1:
                self.store.answer(question, data.draw(st.sampled_from([question.prefix.limit + 16, -16, 7])))
            else:
                self.store.answer(question, min(16 * hit, question.prefix.limit))

    @rule(failed=st.booleans(), data=st.data())
    def receive(self, failed: bool, data: st.DataObject) -> None:
        under_way = sorted(self.loading | self.ended_loading)
        if under_way:
            name = data.draw(st.sampled_from(under_way))
            self.track.received([name], [name] if failed else [])
            self.loading.discard(name)
            self.ended_loading.discard(name)

    @rule(tokens=st.integers(1, 64), data=st.data())
    def step(self, tokens: int, data: st.DataObject) -> None:
        runnable = sorted(self.live.keys() - self.loading)
        if runnable:
            request = self.live[data.draw(st.sampled_from(runnable))]
            tokens = min(tokens, request.num_tokens - request.num_computed_tokens)
            if tokens > 0:
                self.track.step(request.request_id, tokens, lambda: tables(request.num_tokens))
                request.num_computed_tokens += tokens
            for span in self.track.take_orders().spans:
                assert span.end <= self.live[span.request].num_computed_tokens or span.request != request.request_id

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            request = self.live.pop(name)
            if self.track.finished(name, tables(request.num_tokens)):
                self.track.sent([name])
            if name in self.loading:
                self.loading.discard(name)
                self.ended_loading.add(name)

    @rule(seconds=st.sampled_from([1.0, STALE_S, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def restart(self) -> None:
        self.store.name = b"boot%d" % len(self.store.questions)

    @invariant()
    def no_lease_is_released_twice_nor_held_by_nobody(self) -> None:
        released = self.store.released
        assert all(count == 1 for count in released.values())
        held = {tracked.answer.lease for tracked in self.track.requests.values() if tracked.answer is not None}
        unheard = {question._answer.lease for question in self.store.questions if question._answer is not None}
        assert self.store.pinned - set(released) <= held | unheard
        assert not held & set(released)
        assert len(self.track.requests) <= 3

    def teardown(self) -> None:
        for name in sorted(self.live):
            self.track.finished(name, tables(self.live[name].num_tokens))
        self.track.received(sorted(self.loading | self.ended_loading), [])
        for question in self.store.questions:
            if not question.answered:
                self.store.answer(question, 16)  # late ones are given back by who brings them
        assert not self.track.requests and not self.track.hits
        assert set(self.store.released) == self.store.pinned, "every lease was given back"


Scheduling.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduling = Scheduling.TestCase
