"""The engine: one thread that plans, computes, samples, answers, and hands finished KV on.

It waits for nothing but its inbox. What a step produced goes to the clients before anything is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kvstore.identity import root_key
from forebay.models.base import CausalLM
from forebay.scheduler.batch import BatchScheduler
from forebay.scheduler.plan import Plan, Work
from forebay.scheduler.request import Request, RequestState
from forebay.scheduler.waiting import QueueFull
from forebay.workers.batching import build_batch
from forebay.workers.counters import Counters
from forebay.workers.generation import Bounds, Generation, RequestKey, begin
from forebay.workers.inbox import Inbox
from forebay.workers.moves import Pulled, Pushed, StoreChanged
from forebay.workers.outbox import Outbox
from forebay.workers.protocol import FinishReason, Generate
from forebay.workers.pulling import DEVICE
from forebay.workers.sampling import Logits, sample
from forebay.workers.sealing import DeviceMemory
from forebay.workers.transfer import Transfer

DRAINING_PATIENCE_S = 0.05
"""How long a request that lacks blocks waits for copies to the store; then the queued ones are dropped."""

BUSY = "busy"
"""The whole error of a request that the bounded queue has no room for: a front end makes 429 of it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    """A front end asks for a generation."""

    key: RequestKey
    ask: Generate


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A front end has lost interest in one request."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A front end is gone: so are its requests."""

    connection: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop, after the tails of all running requests have been handed to the store."""


Message = Submit | CancelRequest | Disconnected | Stop | Pulled | Pushed | StoreChanged


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of. `flush_events` is called after every turn."""

    model: CausalLM
    pools: Mapping[str, Tensor]
    namespace_id: bytes
    bounds: Bounds
    memory: DeviceMemory
    scheduler: BatchScheduler
    inbox: Inbox[Message]
    outbox: Outbox
    counters: Counters
    transfer: Transfer | None
    flush_events: Callable[[], None]


class Engine:
    """Owns scheduler, blocks and generations. `run` is the thread's body; all else is called from it, except
    `step_seconds`. `unsealed` is set while clients have been told more than was offered to the store."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._generations: dict[Hashable, Generation] = {}
        self._settling: dict[Hashable, tuple[RequestKey, FinishReason]] = {}
        self._stopping = False
        self.unsealed = False
        self._step_began: float | None = None
        self._starved_since: float | None = None

    @property
    def pools(self) -> Mapping[str, Tensor]:
        """The KV pools, by group."""
        return self._parts.pools

    def step_seconds(self) -> float:
        """How long the present step has been running; 0 between steps. Callable from any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def run(self) -> None:
        """Serve until `Stop`. An exception here is a bug: it ends the worker, whose supervisor starts another."""
        busy = False
        patience: float | None = None
        while not self._stopping:
            for message in self._parts.inbox.take_all(0 if busy else patience):
                self._handle(message)
            if self._stopping:
                break
            busy, patience = self._turn()
        self._drain()

    def _turn(self) -> tuple[bool, float | None]:
        """One plan, carried out. Returns whether to go on at once, else how long to wait for news."""
        plan = self._parts.scheduler.plan()
        for request in plan.loads:
            self._load(request)
        for request in plan.started:
            self._announce(request)
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
                self._cancel(message.key)
            case Disconnected():
                theirs = [g.key for g in self._generations.values() if g.key.connection == message.connection]
                for key in theirs:
                    self._cancel(key)
            case Pulled():
                self._loaded(message)
            case Pushed():
                self._parts.memory.pushed(message)
                self._tell_settled(message.push.request)
            case StoreChanged():
                self._parts.memory.holdings.ask_store = message.connected
            case Stop():
                self._stopping = True

    def _submit(self, key: RequestKey, ask: Generate) -> None:
        outbox = self._parts.outbox
        if key in self._generations or self._parts.scheduler.find(key) is not None:
            outbox.finished(key, "error", f"a request {key.id!r}, attempt {key.attempt}, is running already")
            return
        generation = begin(key, ask, self._parts.bounds)
        if isinstance(generation, str):
            self._parts.counters.add("requests.refused")
            outbox.finished(key, "error", generation)
            return
        self._parts.counters.add("requests.received")
        end = generation.end() if generation.emitted else None
        if end is not None:  # the predecessor died between its last token and its goodbye
            outbox.finished(key, end)
            return
        try:
            self._parts.scheduler.submit(generation.request)
        except QueueFull:
            self._parts.counters.add("requests.busy")
            outbox.finished(key, "error", BUSY)
            return
        root = root_key(self._parts.namespace_id, ask.salt)
        self._parts.memory.holdings.expect(generation.request, root, ask.tenant, ask.retain_s)
        self._generations[key] = generation

    def _cancel(self, key: RequestKey) -> None:
        generation = self._generations.pop(key, None)
        if generation is None:
            return
        cancelled = self._parts.scheduler.cancel(key)
        assert cancelled is generation.request
        self._forget(generation.request)
        self._parts.counters.add("requests.cancelled")
        self._parts.outbox.finished(key, "cancelled")

    def _forget(self, request: Request) -> None:
        """Unless a load is still writing into its blocks: then `_loaded` does it."""
        if not self._parts.memory.holdings.holding(request).holds:
            self._parts.memory.holdings.forget(request.key)

    # --- loads -------------------------------------------------------------------------------------------

    def _load(self, request: Request) -> None:
        assert self._parts.transfer is not None
        self._parts.transfer.pull(self._parts.memory.holdings.pull(request))

    def _loaded(self, pulled: Pulled) -> None:
        request = self._parts.scheduler.find(pulled.request)
        assert request is not None, pulled.request
        if request.state is not RequestState.FINISHED:
            before = request.computed
            self._parts.memory.holdings.settle(request, pulled)
            if request.computed > before:
                self._generations[request.key].sources = pulled.sources
        if self._parts.scheduler.load_ended(pulled.request) is None:
            self._forget(request)

    def _announce(self, request: Request) -> None:
        """Say once how much of the prompt came from where; count it every time."""
        generation = self._generations.get(request.key)
        assert generation is not None, request.key
        if request.state is not RequestState.RUNNING:  # preempted before it ever ran: its turn comes again
            generation.sources = {}
            return
        sources = generation.sources or ({DEVICE: request.computed} if request.computed else {})
        generation.sources = {}
        assert sum(sources.values()) == request.computed, (sources, request.computed)
        for name, tokens in sources.items():
            self._parts.counters.add(f"cached.{name}", tokens)
        if not generation.started:
            generation.started = True
            self._parts.outbox.started(generation.key, request.computed, sources)

    # --- a step ------------------------------------------------------------------------------------------

    def _step(self, plan: Plan) -> None:
        self._step_began = began = time.monotonic()
        works, counters = plan.works, self._parts.counters
        ended = self._sample(works, self._forward(works))
        self.unsealed = True
        self._parts.outbox.flush()
        for work in works:
            self._parts.memory.advance(work.request)
        for generation in ended:
            self._parts.scheduler.finish(generation.request)
            self._forget(generation.request)
            self._tell_settled(generation.key)
        self.unsealed = False
        self._step_began = None
        counters.add("steps")
        counters.add("step.seconds", time.monotonic() - began)
        decoded = sum(work.count == 1 and work.start >= work.request.prompt_tokens for work in works)
        counters.add("tokens.decoded", decoded)
        counters.add("tokens.prefilled", sum(work.count for work in works) - decoded)

    def _forward(self, works: Sequence[Work]) -> Logits:
        parts = self._parts
        batch = build_batch(works, parts.memory.holdings, parts.model.device)
        with torch.inference_mode():
            logits = parts.model.forward(batch, parts.pools)
            # On an accelerator this is where the step is waited for; its blocks are complete after it.
            rows: Logits = logits.cpu().numpy()
        if parts.model.device.type == "cuda" and not len(rows):
            torch.cuda.synchronize(parts.model.device)
        return rows

    def _sample(self, works: Sequence[Work], logits: Logits) -> list[Generation]:
        """Append one token to each sequence that is due; returns those that end with it."""
        ended: list[Generation] = []
        rows = iter(logits)
        for work in works:
            request = work.request
            due = work.samples
            request.computed = work.end
            if not due:
                continue
            generation = self._generations[request.key]
            chosen = sample(next(rows), generation.ask.sampling, len(request.tokens))
            request.tokens.append(chosen.token)
            self._parts.memory.holdings.holding(request).chain.extend([chosen.token])
            self._parts.outbox.token(generation.key, generation.emitted - 1, chosen)
            reason = generation.end()
            if reason is not None:
                self._end(generation, reason)
                ended.append(generation)
        return ended

    def _end(self, generation: Generation, reason: FinishReason) -> None:
        del self._generations[generation.key]
        self._parts.counters.add(f"requests.finished.{reason}")
        if generation.ask.settled:
            self._settling[generation.key] = generation.key, reason
        else:
            self._parts.outbox.finished(generation.key, reason)

    def _tell_settled(self, key: Hashable) -> None:
        """Its last push is answered (each is, in bounded time): now the end may be told."""
        if key in self._settling and not self._parts.memory.unanswered[key]:
            self._parts.outbox.finished(*self._settling.pop(key))

    # --- the end -----------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Hand the tails of whoever runs to the store. Clients hear nothing: their front end goes on
        elsewhere."""
        for request in self._parts.scheduler.active():
            self._parts.memory.store(request, tail=True)
        self._parts.flush_events()
