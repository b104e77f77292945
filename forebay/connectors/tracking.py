"""Requests from their lookup to their end, as the engine's scheduler goes through them. Pure: no I/O, no clock.

    new --ask--> asking --answer--> answered --blocks given--> loading --ranks done--> running --> finished
     ^                                 |                         |                       |
     |                                 `-- no hit --> running    `-- failed --> new      |
     `------------------------------------ preempted ------------------------------------'

The engine asks again each step until it gets a number; the question is the same one as long as it is open. What a
lookup has pinned is given back when the ranks have answered, when the engine has no use for it, when the request ends,
or when it has waited for blocks for too long: pins of a request that isn't served must not hold memory up.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from forebay.connectors.blocks import covered, cut, holds
from forebay.connectors.keys import RequestKeys
from forebay.connectors.orders import Load, Orders, Span, Tables
from forebay.connectors.questions import Answer, Question
from forebay.kvstore.geometry import MATCH_UNIT
from forebay.kvstore.identity import Namespace, pack_tokens
from forebay.kvstore.layout import needed_from, round_down

STALE_S = 20.0
"""An answer whose request has had no blocks for so long is given back, and asked for anew."""

OFFERED_S, OFFERED_MAX = 60.0, 1 << 16
"""How long, and of how many chunks, it is remembered that they were offered: what the device finds by itself again and
again needn't be offered each time."""

FAILURES_MAX = 2
"""Loads of one request that may fail before it is computed without asking again."""

UNSTORED = 1 << 62
"""As many tokens as no request has: nothing more of it is stored."""


class EngineRequest(Protocol):
    """What is read of an engine's request."""

    request_id: str
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: prompt and answer."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """They themselves."""
        ...


class Store(Protocol):
    """The scheduler's connection, from another thread."""

    def boot(self) -> bytes:
        """Boot id of the store that is connected; empty if there is none."""
        ...

    def ask(self, question: Question) -> None:
        """Answered by `Question.give`, whatever happens."""
        ...

    def release(self, boot: bytes, lease: int) -> None:
        """Give a lease of that store back."""
        ...


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One of the engine's groups: tokens in a block, and which of our groups its layers belong to."""

    block_tokens: int
    serves: tuple[int, ...]


class Stage(Enum):
    """Where a request is."""

    NEW = "new"
    ASKING = "asking"
    ANSWERED = "answered"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Offer:
    """When a chunk was offered, and for which of our groups."""

    at: float
    groups: tuple[int, ...]


@dataclass(slots=True)
class Tracked:
    """One request. `stored` tokens have been offered to the store, or are known to be there. `answered_at` is when it
    was asked about, until that is answered."""

    request: EngineRequest
    keys: RequestKeys
    stage: Stage = Stage.NEW
    question: Question | None = None
    answer: Answer | None = None
    answered_at: float = 0.0
    promised_from: int = 0
    stored: int = 0
    failures: int = 0
    ended: bool = False


@dataclass(slots=True)
class Tracker:
    """All requests that are followed. `clock` is in seconds; fewer than `load_min` tokens are computed, not loaded, and
    after `ask_s` nobody waits for an answer any more."""

    namespace: Namespace
    groups: tuple[EngineGroup, ...]
    store: Store
    clock: Callable[[], float]
    requests_max: int
    tenant: str = ""
    load_min: int = 1
    ask_s: float = 30.0
    counters: Counter[str] = field(default_factory=Counter)
    hits: dict[str, dict[str, int]] = field(default_factory=dict)
    requests: dict[str, Tracked] = field(default_factory=dict)
    tails: dict[str, int] = field(default_factory=dict)
    orders: Orders = field(default_factory=Orders)
    offered: OrderedDict[bytes, Offer] = field(default_factory=OrderedDict)
    offered_to: bytes = b""

    # --- a request comes -------------------------------------------------------------------------------

    def add(self, request: EngineRequest, keys: RequestKeys) -> bool:
        """Follow a request; False if too many are followed already: it is then served without the store."""
        if len(self.requests) >= self.requests_max:
            self.counters["requests.untracked"] += 1
            return False
        self.requests[request.request_id] = Tracked(request, keys)
        return True

    def matched(self, request_id: str, computed: int, wait: Callable[[Question], None]) -> int | None:
        """How many tokens beyond `computed` can be loaded; None: not known yet. `wait` may block a moment for it.

        Changes nothing that a second call would not find the same.
        """
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.failures >= FAILURES_MAX:
            return 0
        if tracked.stage is Stage.ASKING:
            self._hear(tracked, wait)
        if tracked.stage is Stage.ANSWERED and self._stale(tracked):
            self._give_back(tracked)
            tracked.stage = Stage.NEW
        if tracked.stage in (Stage.NEW, Stage.RUNNING):
            self._ask(tracked, computed)
            if tracked.stage is Stage.ASKING:
                self._hear(tracked, wait)
        if tracked.stage is Stage.ASKING:
            return None
        tracked.promised_from = computed
        gained = tracked.answer.hit - computed if tracked.answer is not None else 0
        if gained < self.load_min:
            return 0
        if not self._fills_blocks(tracked.answer, computed):
            self.counters["lookups.uneven"] += 1
            return 0
        return gained

    def _fills_blocks(self, answer: Answer | None, computed: int) -> bool:
        """Do the chunks fill each block that the engine will have for the hit? It takes a block for whole, also where
        the window begins in its middle."""
        assert answer is not None
        for group, geometry in enumerate(self.namespace.groups):
            sizes = [engine.block_tokens for engine in self.groups if group in engine.serves]
            start = max(computed, min(round_down(needed_from(geometry, answer.hit), size) for size in sizes))
            spans = ((chunk.start, chunk.start + chunk.tokens) for chunk in answer.chunks if chunk.group == group)
            if covered(start, spans) < answer.hit:
                return False
        return True

    def _stale(self, tracked: Tracked) -> bool:
        """Don't promise what may be gone, nor hold what isn't served."""
        gone = tracked.answer is not None and tracked.answer.boot != self.store.boot()
        return gone or self.clock() - tracked.answered_at >= STALE_S

    def _ask(self, tracked: Tracked, computed: int) -> None:
        limit = round_down(tracked.request.num_tokens - 1, MATCH_UNIT)
        tracked.stage, tracked.answered_at, tracked.stored = Stage.ANSWERED, self.clock(), 0
        if limit - computed < self.load_min or not self.store.boot():
            return
        prefix = tracked.keys.prefix(tracked.request.all_token_ids, limit)
        tracked.question = Question(prefix, self.tenant)
        tracked.stage = Stage.ASKING
        self.counters["lookups"] += 1
        self.counters["lookups.tokens"] += limit
        self.store.ask(tracked.question)

    def _hear(self, tracked: Tracked, wait: Callable[[Question], None]) -> None:
        question = tracked.question
        assert question is not None
        if not question.answered:
            wait(question)
        if not question.answered:
            if self.clock() - tracked.answered_at >= self.ask_s:
                self._give_back(tracked)
                self._heard(tracked, None)
            return
        answer = question.take()
        tracked.question, tracked.answer = None, answer if answer is not None and answer.lease else None
        if answer is not None and (not 0 <= answer.hit <= question.prefix.limit or answer.hit % MATCH_UNIT):
            self._give_back(tracked)
            answer = None
        self._heard(tracked, answer)

    def _heard(self, tracked: Tracked, answer: Answer | None) -> None:
        """This is what the store has said; None: nothing of use."""
        tracked.stage, tracked.answered_at = Stage.ANSWERED, self.clock()
        if answer is None:
            self.counters["lookups.failed"] += 1
        else:
            tracked.stored = round_down(answer.hit, self.namespace.chunk_tokens)

    def allocated(self, request_id: str, tables: Tables, external: int) -> None:
        """The engine has given blocks; `external` tokens after those that it has are to be loaded."""
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.stage is Stage.LOADING:
            return
        if external <= 0:
            self._give_back(tracked)
            tracked.stage = Stage.RUNNING
            return
        if tracked.answer is None:
            # Never promised, and yet the engine waits for it: the ranks say that it has failed.
            tracked.stage = Stage.LOADING
            self.orders.loads.append(Load(request_id, b"", 0, external, (), tables))
            return
        answer, first = tracked.answer, tracked.promised_from
        tracked.stage = Stage.LOADING
        self.hits[request_id] = answer.sources(first, first + external)
        self.counters["loads"] += 1
        self.counters["loads.tokens"] += external
        self.orders.loads.append(Load(request_id, answer.boot, first, first + external, answer.chunks, tables))

    def received(self, request_ids: Sequence[str], failed: Sequence[str]) -> None:
        """All ranks have answered these loads."""
        for request_id in request_ids:
            tracked = self.requests.get(request_id)
            if tracked is None or tracked.stage is not Stage.LOADING:
                continue
            self._give_back(tracked)
            tracked.stage = Stage.RUNNING
            if request_id in failed:
                tracked.stage = Stage.NEW
                tracked.failures += 1
                if tracked.stored != UNSTORED:
                    tracked.stored = 0  # what is computed now may be better than what is there
                self.counters["loads.failed"] += 1
            if tracked.ended:
                del self.requests[request_id]

    # --- it is computed ----------------------------------------------------------------------------------

    def step(self, request_id: str, scheduled: int, read_tables: Callable[[], Tables | None]) -> None:
        """In this step the request gets `scheduled` tokens: order stores of the chunks that it fills."""
        tracked = self.requests.get(request_id)
        if tracked is None:
            return
        if tracked.stage is not Stage.LOADING:
            self._give_back(tracked)
            tracked.stage = Stage.RUNNING
        request, size = tracked.request, self.namespace.chunk_tokens
        end = round_down(min(request.num_computed_tokens + scheduled, request.num_tokens), size)
        if end <= tracked.stored or not self.store.boot():
            return
        tables = read_tables()
        if tables is None:
            return
        while tracked.stored < end:
            start = round_down(tracked.stored, size)
            self._order(self.orders.spans, tracked, start, start + size, tables)
            tracked.stored = start + size

    def _order(self, spans: list[Span], tracked: Tracked, start: int, end: int, tables: Tables) -> None:
        tokens, keys = tracked.request.all_token_ids, tracked.keys
        parent = keys.parent(start, lambda first, last: tokens[first:last])
        packed = pack_tokens(tokens[start:end])
        key = keys.key(parent, packed)
        before = self._just_offered(key)
        if len(before) == len(self.namespace.groups):
            return
        new = tuple(group for group in self._whole_groups(start, end, tables) if group not in before)
        if new or not before:
            self.counters["stores.incomplete"] += len(self.namespace.groups) - len(before) - len(new)
        if not new:
            return
        self._note_offered(key, (*before, *new))
        cuts = tuple(cut(start, end, g.block_tokens, t) for g, t in zip(self.groups, tables, strict=True))
        request_id = tracked.request.request_id
        spans.append(Span(request_id, self.tenant, start, end, key, parent, packed, keys.extra, new, cuts))

    def _just_offered(self, key: bytes) -> frozenset[int]:
        """For which groups this chunk was offered to this store a moment ago."""
        boot = self.store.boot()
        if boot != self.offered_to:
            self.offered.clear()
            self.offered_to = boot
        offer = self.offered.get(key)
        return frozenset(offer.groups) if offer is not None and self.clock() - offer.at < OFFERED_S else frozenset()

    def _note_offered(self, key: bytes, groups: tuple[int, ...]) -> None:
        self.offered[key] = Offer(self.clock(), groups)
        self.offered.move_to_end(key)
        while len(self.offered) > OFFERED_MAX:
            self.offered.popitem(last=False)

    def _whole_groups(self, start: int, end: int, tables: Tables) -> list[int]:
        """Our groups of which every token of [start, end) is in blocks."""
        lacking = {
            group
            for engine, table in zip(self.groups, tables, strict=True)
            for group in engine.serves
            if not holds(start, end, engine.block_tokens, table)
        }
        return [group for group in range(len(self.namespace.groups)) if group not in lacking]

    # --- it ends -----------------------------------------------------------------------------------------

    def finished(self, request_id: str, tables: Tables) -> bool:
        """The request has ended, however. True: its blocks are still needed, until its tail is reported as sent."""
        tracked = self.requests.get(request_id)
        self.drop(request_id)
        # While a load is under way the ranks still write, and what they read stays pinned until they have answered.
        if tracked is None or tracked.ended or not self.store.boot():
            return False
        return self._order_tail(tracked, tables)

    def _order_tail(self, tracked: Tracked, tables: Tables) -> bool:
        request, size = tracked.request, self.namespace.chunk_tokens
        end = round_down(min(request.num_computed_tokens, request.num_tokens - 1), MATCH_UNIT)
        spans: list[Span] = []
        while tracked.stored < end:
            start = round_down(tracked.stored, size)
            stop = min(start + size, end)
            self._order(spans, tracked, start, stop, tables)
            tracked.stored = stop
        if spans:
            # All or nothing: the engine must not hear of a tail of which it was not told to keep the blocks.
            self.orders.tails += spans
            self.tails[request.request_id] = len(spans)
        return bool(spans)

    def drop(self, request_id: str) -> None:
        """Follow a request no longer; it is served without the store."""
        tracked = self.requests.get(request_id)
        if tracked is None:
            return
        self.hits.pop(request_id, None)
        if tracked.stage is Stage.LOADING:
            tracked.ended = True
            return
        self._give_back(tracked)
        del self.requests[request_id]

    def sent(self, request_ids: Sequence[str]) -> None:
        """All ranks are done with these requests' tails."""
        for request_id in request_ids:
            self.tails.pop(request_id, None)

    def take_orders(self) -> Orders:
        """What the ranks are to do in this step."""
        orders, self.orders = self.orders, Orders()
        return orders

    def forget_all(self, namespace: Namespace, rekey: Callable[[Tracked], RequestKeys]) -> None:
        """From now on another namespace holds: nothing that was found or computed until now belongs to it."""
        self.namespace = namespace
        for tracked in self.requests.values():
            if tracked.stage is not Stage.LOADING:
                self._give_back(tracked)
                tracked.stage = Stage.RUNNING
            tracked.keys = rekey(tracked)
            tracked.failures, tracked.stored = FAILURES_MAX, UNSTORED  # what it has computed is of the old weights
        self.orders = Orders(loads=self.orders.loads)

    # --- pins --------------------------------------------------------------------------------------------

    def _give_back(self, tracked: Tracked) -> None:
        """Let go of whatever the request holds or has asked for."""
        if tracked.question is not None:
            late = tracked.question.drop()
            tracked.question = None
            if late is not None and late.lease:
                self.store.release(late.boot, late.lease)
        if tracked.answer is not None:
            self.store.release(tracked.answer.boot, tracked.answer.lease)
            tracked.answer = None

    def gauges(self) -> dict[str, int]:
        """Present figures."""
        stages = Counter(tracked.stage for tracked in self.requests.values())
        return {
            "requests.tracked": len(self.requests),
            "requests.asking": stages[Stage.ASKING],
            "requests.answered": stages[Stage.ANSWERED],
            "requests.loading": stages[Stage.LOADING],
            "requests.tails": len(self.tails),
            "chunks.offered": len(self.offered),
        }
