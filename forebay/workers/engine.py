"""The engine: one thread that plans, computes, samples, answers, and hands finished KV on.

It waits for nothing but its inbox. What a step produced goes to the clients before anything is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from forebay.kvstore.identity import root_key
from forebay.scheduler.batch import BatchScheduler
from forebay.scheduler.plan import Plan, Work
from forebay.scheduler.request import Request, RequestState
from forebay.scheduler.waiting import QueueFull
from forebay.workers.counters import Counters
from forebay.workers.generation import Bounds, Generation, RequestKey, begin
from forebay.workers.guiding import Compiled, Compiler
from forebay.workers.inbox import Inbox
from forebay.workers.messages import CancelRequest, Disconnected, Message, Stop, Submit
from forebay.workers.moves import DEVICE, Opened, Pulled, Pushed, RoomGiven, RowsCame, StoreChanged
from forebay.workers.outbox import Outbox
from forebay.workers.protocol import BUSY, FinishReason, Generate
from forebay.workers.pulse import Pulse
from forebay.workers.rates import PrefillRate
from forebay.workers.sealing import DeviceMemory
from forebay.workers.stepping import Stepped, Stepper
from forebay.workers.tracing import NO_TRACE, Trace
from forebay.workers.transfer import Transfer

DRAINING_PATIENCE_S = 0.05
"""How long a request that lacks blocks waits for copies to the store; then the queued ones are dropped."""

PUT_OFF_MAX = 3
"""So often a request is computed anew because host memory lacks room for it; then it is given up."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of. `flush_events` is called after every turn; without a `compiler` no grammar is
    taken."""

    stepper: Stepper
    namespace_id: bytes
    bounds: Bounds
    memory: DeviceMemory
    scheduler: BatchScheduler
    inbox: Inbox[Message]
    outbox: Outbox
    counters: Counters
    transfer: Transfer | None
    flush_events: Callable[[], None]
    compiler: Compiler | None = None
    trace: Trace = field(default=NO_TRACE)
    pulse: Pulse = field(default_factory=Pulse)


class Engine:
    """Owns scheduler, blocks and generations. `run` is the thread's body; all else is called from it, except
    `step_seconds`. `unsealed` is set while clients have been told more than was offered to the store."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._generations: dict[Hashable, Generation] = {}
        self._compiling: dict[Hashable, Generation] = {}
        self._cutting: dict[Hashable, Request] = {}
        self._settling: dict[Hashable, tuple[RequestKey, FinishReason]] = {}
        self._stopping = False
        self.unsealed = False
        self._step_began: float | None = None
        self._starved_since: float | None = None

    @property
    def compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    @property
    def settling(self) -> int:
        """Requests whose end is told when the store has them."""
        return len(self._settling)

    def step_seconds(self) -> float:
        """How long the present step has been running; 0 between steps. Callable from any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def run(self) -> None:
        """Serve until `Stop`. An exception here is a bug: it ends the worker, whose supervisor starts another."""
        busy = False
        patience: float | None = None
        self._parts.pulse.begin()
        while not self._stopping:
            self._parts.pulse.rest()
            messages = self._parts.inbox.take_all(0 if busy else patience)
            self._parts.pulse.turn()
            for message in messages:
                self._handle(message)
            if self._stopping:
                break
            busy, patience = self._turn()
        self._drain()

    def _turn(self) -> tuple[bool, float | None]:
        """One plan, carried out. Returns whether to go on at once, else how long to wait for news."""
        self._give_up(self._parts.memory.holdings.overdue())
        with self._parts.trace.span("schedule") as seen:
            plan = self._parts.scheduler.plan()
            seen["works"], seen["waiting"] = len(plan.works), self._parts.scheduler.waiting
        for request in plan.loads:
            self._load(request)
        for ask in self._parts.memory.holdings.room_asks():
            assert self._parts.transfer is not None
            self._parts.transfer.ask_room(ask)
        for rows in self._parts.memory.holdings.row_asks():
            assert self._parts.transfer is not None
            self._parts.transfer.ask_rows(rows)
        for key, admission in self._parts.memory.holdings.rows_unwanted():
            assert self._parts.transfer is not None
            self._parts.transfer.drop_rows(key, admission)
        for request in plan.started:
            self._announce(request)
        for request in [request for request in self._cutting.values() if not request.cut]:
            del self._cutting[request.key]
            self._announce_cut(request)
        for request in plan.preempted:
            log.info("request %s was preempted at %d tokens", request.key, len(request.tokens))
            self._parts.trace.phase(request.key, "waiting", preempted=True)
        self._parts.counters.add("preemptions", len(plan.preempted))
        if plan.works:
            self._step(plan)
        else:
            self._parts.outbox.flush()
        self._parts.flush_events()
        return bool(plan.works or plan.preempted), self._relieve(plan)

    def _relieve(self, plan: Plan) -> float | None:
        """Somebody lacks blocks that queued pushes hold: give those a moment, then drop them."""
        if not plan.draining:
            self._starved_since = None
            return None
        now = time.monotonic()
        self._starved_since = self._starved_since or now
        left = self._starved_since + DRAINING_PATIENCE_S - now
        if left <= 0 and self._parts.transfer is not None:
            self._parts.transfer.shed()
            self._starved_since = None
        return max(left, 0.001)

    # --- messages ----------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        match message:
            case Submit():
                self._submit(message.key, message.ask)
            case CancelRequest():
                self._cancel(message.key, move=message.move)
            case Disconnected():
                everybody = (*self._generations.values(), *self._compiling.values())
                theirs = [g.key for g in everybody if g.key.connection == message.connection]
                for key in theirs:
                    self._cancel(key)
            case Compiled():
                self._compiled(message)
            case Opened():
                self._opened(message)
            case Pulled():
                self._loaded(message)
            case Pushed():
                self._parts.memory.pushed(message)
                self._tell_settled(message.push.request)
            case RoomGiven():
                self._parts.memory.holdings.room_given(message)
            case RowsCame():
                late = self._parts.memory.holdings.rows_came(message)
                self._put_off(late, "rows that it reads didn't come from their tier")
            case StoreChanged():
                self._store_changed(message.connected)
            case Stop():
                self._stopping = True

    def _store_changed(self, connected: bool) -> None:
        holdings = self._parts.memory.holdings
        holdings.ask_store = connected
        if connected:
            holdings.store_back()
        else:
            self._put_off(holdings.store_lost(), "the store went away with rows that it reads there")

    def _put_off(self, keys: Sequence[Hashable], why: str) -> None:
        """These can't go on with what they have: they are computed anew."""
        for key in keys:
            request = self._parts.scheduler.put_off(key)
            if request is not None:
                log.info("request %s is computed anew at %d tokens: %s", key, len(request.tokens), why)
                self._parts.counters.add("hot.put_off")
                self._parts.trace.phase(key, "waiting", preempted=True)

    def _give_up(self, overdue: Sequence[Hashable]) -> None:
        """Host memory hasn't taken their pages in time: they are computed anew, but not for ever."""
        for key in overdue:
            generation = self._generations.get(key)
            if generation is None:  # it has ended, and waits for a load
                continue
            generation.put_off += 1
            if generation.put_off < PUT_OFF_MAX:
                self._put_off([key], "host memory didn't take its pages in time")
                continue
            self._end_hot(generation)

    def _end_hot(self, generation: Generation) -> None:
        """Its rows don't fit into host memory."""
        del self._generations[generation.key]
        self._parts.scheduler.cancel(generation.key)
        self._forget(generation.request)
        self._parts.counters.add("hot.given_up")
        self._parts.trace.end(generation.key, "error")
        self._parts.outbox.finished(
            generation.key, "error", "the store's pool doesn't take the rows of this request, prompt and output: raise "
            "the store's --memory, or the worker's --device-memory or --hot-buffer-host-tokens, or lower max_tokens",
        )  # fmt: skip

    def _submit(self, key: RequestKey, ask: Generate) -> None:
        outbox = self._parts.outbox
        if key in self._generations or key in self._compiling or self._parts.scheduler.find(key) is not None:
            outbox.finished(key, "error", f"a request {key.id!r}, attempt {key.attempt}, is running already")
            return
        generation = begin(key, ask, self._parts.bounds)
        if isinstance(generation, str):
            self._refuse(key, generation)
            return
        self._parts.counters.add("requests.received")
        self._parts.trace.phase(key, "waiting", prompt=generation.request.prompt_tokens)
        if ask.sampling.grammar:
            self._compile(generation)
        else:
            generation.adjust()
            self._queue(generation)

    def _refuse(self, key: RequestKey, why: str) -> None:
        log.info("request %s was refused: %s", key, why)
        self._parts.counters.add("requests.refused")
        self._parts.outbox.finished(key, "error", why)
        self._parts.trace.end(key, "refused")

    def _compile(self, generation: Generation) -> None:
        key, request, compiler = generation.key, generation.request, self._parts.compiler
        if compiler is None:
            self._refuse(key, "this worker was started without structured_outputs")
        elif compiler.offer(key, generation.ask.sampling.grammar, request.tokens[request.prompt_tokens :]):
            self._compiling[key] = generation
        else:
            self._turn_away(key)

    def _compiled(self, compiled: Compiled) -> None:
        generation = self._compiling.pop(compiled.request, None)
        if generation is None:  # cancelled meanwhile
            return
        if compiled.guide is None:
            self._refuse(generation.key, compiled.error)
        else:
            generation.adjust(compiled.guide)
            self._queue(generation)

    def _queue(self, generation: Generation) -> None:
        key, ask, outbox = generation.key, generation.ask, self._parts.outbox
        end = generation.end() if generation.emitted else None
        if end is not None:  # the predecessor died between its last token and its goodbye
            outbox.finished(key, end, generation.failure)
            self._parts.trace.end(key, end)
            return
        try:
            self._parts.scheduler.submit(generation.request, ask.waited_s)
        except QueueFull:
            self._turn_away(key)
            return
        root = root_key(self._parts.namespace_id, ask.salt)
        self._parts.memory.holdings.expect(generation.request, root, ask.tenant, ask.retain_s)
        self._generations[key] = generation

    def _turn_away(self, key: RequestKey) -> None:
        self._parts.counters.add("requests.busy")
        self._parts.outbox.finished(key, "error", BUSY)
        self._parts.trace.end(key, "busy")

    def _cancel(self, key: RequestKey, *, move: bool = False) -> None:
        generation = self._generations.pop(key, None)
        if generation is not None:
            cancelled = self._parts.scheduler.cancel(key)
            assert cancelled is generation.request
            self._cutting.pop(key, None)
            self._forget(generation.request)
        elif self._compiling.pop(key, None) is None:
            return
        reason: FinishReason = "moved" if move else "cancelled"
        log.debug("request %s was %s", key, reason)
        self._parts.trace.end(key, reason)
        self._parts.counters.add(f"requests.{reason}")
        if move:
            self._settling[key] = key, reason
            self._tell_settled(key)
        else:
            self._parts.outbox.finished(key, reason)

    def _forget(self, request: Request) -> None:
        """Unless a load is still writing into its blocks: then `_loaded` does it."""
        if not self._parts.memory.holdings.holding(request).holds:
            self._parts.memory.holdings.forget(request.key)

    # --- loads -------------------------------------------------------------------------------------------

    def _load(self, request: Request) -> None:
        assert self._parts.transfer is not None
        self._parts.trace.phase(request.key, "loading", on_device=request.computed)
        self._parts.transfer.pull(self._parts.memory.holdings.pull(request))

    def _loaded(self, pulled: Pulled) -> None:
        request = self._parts.scheduler.find(pulled.request)
        assert request is not None, pulled.request
        if request.state is not RequestState.FINISHED:
            before = request.computed
            self._parts.memory.holdings.settle(request, pulled)
            if request.computed > before:
                self._generations[request.key].sources = pulled.sources
        else:
            self._parts.memory.holdings.refuse(pulled)
        if self._parts.scheduler.load_ended(pulled.request) is None:
            self._forget(request)
            self._tell_settled(pulled.request)
        elif pulled.refused == "ever" and not self._parts.memory.holdings.never_hot(request.key):
            self._end_hot(self._generations[request.key])
        elif pulled.refused:  # it waits for room, in the store or on the device
            self._parts.scheduler.put_off(request.key)

    def _opened(self, opened: Opened) -> None:
        """A request's prefix is being loaded from its back: it may be worth computing its front meanwhile."""
        request = self._parts.scheduler.find(opened.request)
        assert request is not None, opened.request
        if request.state is RequestState.FINISHED:
            opened.cut.close()
            return
        if opened.part is not None:
            self._parts.memory.holdings.open(request, opened.cut, opened.part)
            self._cutting[request.key] = request
        if opened.part is None or opened.cut.wakes():
            self._parts.scheduler.load_opened(opened.request)

    def _announce(self, request: Request) -> None:
        """Say once how much of the prompt came from where; count it every time."""
        generation = self._generations.get(request.key)
        assert generation is not None, request.key
        if request.key in self._cutting:  # how much is told when its two ends have met
            self._parts.trace.phase(request.key, "prefill", loading=request.loading)
            return
        if request.state is not RequestState.RUNNING:  # preempted before it ever ran: its turn comes again
            generation.sources = {}
            return
        sources = generation.sources or ({DEVICE: request.computed} if request.computed else {})
        generation.sources = {}
        assert sum(sources.values()) == request.computed, (sources, request.computed)
        self._tell_cached(generation, sources)

    def _announce_cut(self, request: Request) -> None:
        """The same where a part of the prefix was computed while the rest was loaded."""
        generation = self._generations[request.key]
        if request.state is not RequestState.RUNNING:
            return
        holding = self._parts.memory.holdings.holding(request)
        assert sum(holding.cached.values()) + holding.recomputed >= request.computed, (holding.cached, request.computed)
        self._parts.counters.add("cut.joined")
        self._parts.counters.add("tokens.computed_though_stored", holding.recomputed)
        self._tell_cached(generation, holding.cached)

    def _tell_cached(self, generation: Generation, sources: Mapping[str, int]) -> None:
        cached = sum(sources.values())
        self._parts.trace.phase(generation.key, "prefill", cached=cached)
        for name, tokens in sources.items():
            self._parts.counters.add(f"cached.{name}", tokens)
        self._parts.counters.add("tokens.loaded", cached - sources.get(DEVICE, 0))
        if not generation.started:
            generation.started = True
            self._parts.outbox.started(generation.key, cached, sources)

    # --- a step ------------------------------------------------------------------------------------------

    def _step(self, plan: Plan) -> None:
        self._step_began = began = time.monotonic()
        works, counters, trace = plan.works, self._parts.counters, self._parts.trace
        decoded = sum(work.count == 1 and work.start >= work.request.prompt_tokens for work in works)
        prefilled = sum(work.count for work in works) - decoded
        with trace.span("step", decoded=decoded, prefilled=prefilled, requests=len(works)):
            with trace.span("forward"):
                rows = self._parts.stepper.forward(works, [self._generations[work.request.key] for work in works])
            with trace.span("sample"):
                ended = self._choose(plan, rows)
            self.unsealed = True
            self._parts.outbox.flush()
            with trace.span("push"):
                for work in works:
                    if work.request.key not in rows.void:
                        self._parts.memory.advance(work.request)
                for generation in ended:
                    self._parts.scheduler.finish(generation.request)
                    self._forget(generation.request)
                    self._tell_settled(generation.key)
        self._put_off(rows.lost, "rows that it read in host memory had gone")
        self.unsealed = False
        self._step_began = None
        counters.add("steps")
        counters.add("step.seconds", time.monotonic() - began)
        if self._parts.transfer is not None:
            _measure(self._parts.transfer.rates.prefill, works, time.monotonic() - began)
        counters.add("tokens.decoded", decoded)
        counters.add("tokens.prefilled", prefilled)

    def _choose(self, plan: Plan, stepped: Stepped) -> list[Generation]:
        """Append one token to each sequence that is due; returns those that end with it."""
        ended: list[Generation] = []
        rows = iter(stepped.rows)
        for work in plan.works:
            generation = self._generations[work.request.key]
            if work.request.key in stepped.void:
                for _ in range(len(work.scored) + work.samples):
                    next(rows)
                continue
            if not self._parts.stepper.choose(work, generation, rows):
                continue
            self._parts.trace.phase(generation.key, "decode")
            reason = generation.end()
            if reason is not None:
                self._end(generation, reason)
                ended.append(generation)
        return ended

    def _end(self, generation: Generation, reason: FinishReason) -> None:
        del self._generations[generation.key]
        self._parts.counters.add(f"requests.finished.{reason}")
        self._parts.trace.end(generation.key, reason)
        log.debug("request %s ended (%s) after %d tokens", generation.key, reason, generation.emitted)
        if generation.failure:
            self._parts.outbox.finished(generation.key, "error", generation.failure)
        elif generation.ask.settled or reason == "moved":
            self._settling[generation.key] = generation.key, reason
        else:
            self._parts.outbox.finished(generation.key, reason)

    def _tell_settled(self, key: Hashable) -> None:
        """Its last push is answered (each is, in bounded time), and nothing is loaded for it any more: now the end may
        be told."""
        held = key in self._settling and self._parts.scheduler.find(key) is not None
        if key in self._settling and not held and not self._parts.memory.unanswered[key]:
            self._parts.outbox.finished(*self._settling.pop(key))

    # --- the end -----------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Hand the tails of whoever runs to the store. Clients hear nothing: their front end goes on
        elsewhere."""
        for request in self._parts.scheduler.active():
            self._parts.memory.store(request, tail=True)
        self._parts.flush_events()


def _measure(rate: PrefillRate, works: Sequence[Work], seconds: float) -> None:
    """Tell what a step took. Several requests count as one at their mean position."""
    fed = sum(work.count for work in works)
    middle = sum(work.count * (work.start + work.end) for work in works) / (2 * fed)
    rate.step(max(0.0, middle - fed / 2), fed, seconds)
