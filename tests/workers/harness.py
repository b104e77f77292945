"""One worker in this process: the real engine, transfer and block pool around a fake model and a fake store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.kvstore.identity import pack_tokens
from forebay.workers import assembly
from forebay.workers.assembly import Assembled, assemble
from forebay.workers.config import WorkerConfig
from forebay.workers.generation import RequestKey
from forebay.workers.guiding import Guides
from forebay.workers.messages import CancelRequest, Disconnected, Stop, Submit
from forebay.workers.outbox import Batch
from forebay.workers.pool_events import PoolEvents
from forebay.workers.protocol import (
    Finished,
    Generate,
    Outputs,
    PromptScores,
    Sampling,
    Started,
    TokenScore,
)
from forebay.workers.transfer import Transfer
from tests.workers.fake_model import VOCAB, FakeModel
from tests.workers.fake_store import FakeStore

CHUNK = 32


def wait_until(what: str, ready: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Poll until `ready`."""
    end = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < end, f"{what}: not within {timeout_s} s"
        time.sleep(0.002)


@dataclass
class Answer:
    """What one request heard."""

    tokens: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    scores: dict[int, TokenScore] = field(default_factory=dict)
    logprobs: list[float | None] = field(default_factory=list)

    @property
    def cached(self) -> int:
        assert self.started is not None
        return self.started.cached_tokens


@dataclass
class Halt:
    """Where the worker stands still: behind a step in which this request had a token and `ready` was true."""

    key: RequestKey
    ready: Callable[[], Any]
    stands: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)


class Harness:
    """A running worker and a front end that remembers everything."""

    def __init__(
        self, model: FakeModel, store: FakeStore | None, guides: Guides | None = None, **settings: Any
    ) -> None:
        self.guides = guides
        settings.setdefault("max_tokens", 2048)
        settings.setdefault("chunk_tokens", CHUNK)
        settings.setdefault("max_num_batched_tokens", 64)
        settings.setdefault("max_num_seqs", 8)
        self.model = model
        self.store = store
        config = WorkerConfig(
            Path("fake"), "unused", store="unix:///nowhere" if store is not None else None, **settings
        )
        self.answers: dict[RequestKey, Answer] = {}
        self.ended: list[RequestKey] = []
        self._heard = threading.Condition()
        self._halt: Halt | None = None
        self._count = 0
        events = PoolEvents(None, None, "", "")
        self.parts: Assembled = self._assemble(config, events)
        self.thread = threading.Thread(target=self.parts.engine.run, daemon=True)

    def _assemble(self, config: WorkerConfig, events: PoolEvents) -> Assembled:
        original = assembly.Transfer
        store = self.store

        def with_fake(*args: Any, **kwargs: Any) -> Transfer:
            assert store is not None
            return original(*args, client=store.client(), **kwargs)  # type: ignore[arg-type]

        assembly.Transfer = with_fake  # type: ignore[assignment,misc]
        try:
            return assemble(self.model, b"w" * 32, config, events, events.flush, self._hear, self.guides)
        finally:
            assembly.Transfer = original  # type: ignore[misc]

    def start(self, *, connected: bool = True) -> None:
        if self.parts.transfer is not None:
            self.parts.transfer.start()
        self.thread.start()
        if self.store is not None and connected:
            wait_until("connected", lambda: self.parts.holdings.ask_store)

    def stop(self) -> None:
        self.parts.inbox.put(Stop())
        self.thread.join(20)
        assert not self.thread.is_alive()
        if self.parts.transfer is not None:
            self.parts.transfer.stop(5)

    def _hear(self, batch: Batch) -> None:
        with self._heard:
            for connection, messages in batch.items():
                for message in messages:
                    self._note(connection, message)
            self._heard.notify_all()
        halt = self._halt
        if halt is not None and self.answers[halt.key].tokens and halt.ready():
            self._halt = None
            halt.stands.set()
            halt.goes_on.wait(60)

    def _note(self, connection: int, message: Any) -> None:
        if isinstance(message, Outputs):
            for out in message.tokens:
                answer = self.answers[RequestKey(connection, out.id, out.attempt)]
                answer.tokens.append(out.token)
                answer.indices.append(out.index)
                answer.logprobs.append(out.logprob)
            return
        answer = self.answers[RequestKey(connection, message.id, message.attempt)]
        if isinstance(message, PromptScores):
            answer.scores.update(enumerate(message.scores, message.start))
        elif isinstance(message, Started):
            assert answer.started is None, "Started came twice"
            answer.started = message
        elif isinstance(message, Finished):
            assert answer.finished is None, "Finished came twice"
            answer.finished = message
            self.ended.append(RequestKey(connection, message.id, message.attempt))

    # --- what a front end does ---------------------------------------------------------------------------

    def submit(self, prompt: list[int], max_tokens: int = 4, **more: Any) -> RequestKey:
        self._count += 1
        connection = more.pop("connection", 1)
        key = RequestKey(connection, more.pop("id", f"r{self._count}"), more.pop("attempt", 1))
        emitted = pack_tokens(more.pop("emitted", []))
        salt, tenant = more.pop("salt", b""), more.pop("tenant", "")
        settled, priority = more.pop("settled", False), more.pop("priority", 0)
        more.setdefault("temperature", 0)
        more.setdefault("ignore_eos", True)
        sampling = Sampling(max_tokens=max_tokens, **more)
        ask = Generate(
            id=key.id, attempt=key.attempt, prompt=pack_tokens(prompt), sampling=sampling, emitted=emitted,
            salt=salt, tenant=tenant, settled=settled, priority=priority,
        )  # fmt: skip
        self.answers.setdefault(key, Answer())
        self.parts.inbox.put(Submit(key, ask))
        return key

    @contextmanager
    def in_its_midst(
        self, prompt: list[int], max_tokens: int, ready: Callable[[], Any] = lambda: True
    ) -> Iterator[RequestKey]:
        """Submit a request; the block runs while the worker stands still behind a step in which it had a token and
        `ready` was true. However busy the machine is, the request isn't over by then."""
        name = f"r{self._count + 1}"
        halt = self._halt = Halt(RequestKey(1, name, 1), ready)
        self.submit(prompt, max_tokens, id=name)
        assert halt.stands.wait(60), f"{name} didn't get there"
        try:
            yield halt.key
        finally:
            halt.goes_on.set()

    def cancel(self, key: RequestKey) -> None:
        self.parts.inbox.put(CancelRequest(key))

    def disconnect(self, connection: int) -> None:
        self.parts.inbox.put(Disconnected(connection))

    def wait(self, key: RequestKey, timeout_s: float = 60.0) -> Answer:
        with self._heard:
            assert self._heard.wait_for(lambda: self.answers[key].finished is not None, timeout_s), key
        return self.answers[key]

    def ask(self, prompt: list[int], max_tokens: int = 4, **more: Any) -> Answer:
        answer = self.wait(self.submit(prompt, max_tokens, **more))
        assert answer.finished is not None and answer.finished.reason != "error", answer.finished
        return answer

    def settle(self) -> None:
        """Wait until nothing is left to push and no request holds anything."""
        wait_until("settled", self.settled)

    def settled(self) -> bool:
        stats = self.parts.stats()
        quiet = stats["pushes.running"] == 0 and stats.get("push.queue.bytes", 0) == 0
        held = stats["requests.running"] + stats["requests.loading"]
        return quiet and held == 0 and len(self.parts.inbox) == 0

    def check_books(self) -> None:
        """Nobody runs: every block must be unused and every promise given back."""
        self.settle()
        wait_until("unpinned", lambda: all(p.draining == 0 for p in self.parts.holdings.pools))
        for pool in self.parts.holdings.pools:
            pool.check()
            assert pool.available == pool.blocks

    def stat(self, name: str) -> float:
        return self.parts.stats().get(name, 0.0)


@contextmanager
def worker(store: FakeStore | None = None, *, connected: bool = True, **settings: Any) -> Iterator[Harness]:
    """A running worker; its books are checked at the end."""
    window = settings.pop("window", 40)
    context = settings.pop("max_context", 2048)
    eos_ids = settings.pop("eos_ids", (VOCAB - 1,))
    harness = Harness(FakeModel(window, context, eos_ids), store, **settings)
    harness.start(connected=connected)
    try:
        yield harness
        harness.check_books()
    finally:
        harness.stop()
