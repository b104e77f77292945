"""The worker process: load, listen, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import ForebayError
from forebay.ipc.sockets import listen, socket_path
from forebay.kvstore.identity import encode_namespace
from forebay.models.base import CausalLM
from forebay.workers.assembly import Assembled, assemble, warm_up
from forebay.workers.compute import ComputeThread
from forebay.workers.config import WorkerConfig
from forebay.workers.guiding import Guides, Vocabulary, load_library
from forebay.workers.messages import Stop
from forebay.workers.outbox import Batch
from forebay.workers.pool_events import PoolEvents
from forebay.workers.protocol import Description, WorkerStats
from forebay.workers.ranks.errors import RankLost
from forebay.workers.server import Answers, WorkerServer
from forebay.workers.tracing import NO_TRACE, Trace

if TYPE_CHECKING:
    from forebay.workers.ranks.leading import Shared

ENGINE_PATIENCE_S = 10.0
"""How long the end of the present step is waited for when the worker is told to stop."""

LOST_PATIENCE_S = 0.5
"""The same, when a rank is lost: the step may wait for it until its collective gives up."""

SWITCH_S = 0.0005

log = logging.getLogger(__name__)


class EngineFailed(ForebayError):
    """The engine's thread ended by an exception: a bug, whose traceback is in the log."""


Loader = Callable[[WorkerConfig], tuple[CausalLM, bytes]]
"""Gives a model and the fingerprint of its weights."""


def run_worker(
    config: WorkerConfig, load: Loader | None = None, vocabulary: Callable[[WorkerConfig], Vocabulary] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT; then store the tails and return.

    Raises ForebayError with what is wrong if the worker can't start, or if its engine fails.
    """
    config.check()
    if config.structured_outputs:
        load_library()
    # Three threads share the interpreter: none may keep it from the others for the usual 5 ms.
    sys.setswitchinterval(SWITCH_S)
    path = socket_path(config.listen)
    # Bound before the model is loaded: a second worker on this socket fails at once, and front ends that
    # come early wait in the backlog.
    listener = listen(path)
    try:
        compute = ComputeThread()
        with contextlib.ExitStack() as until_end:
            with _signals_exit():
                shared = _share(config, compute, path, until_end) if config.ranks > 1 else None
                if shared is None:
                    model, weights = compute.call(lambda: (load or _load_checkpoint)(config))
                else:
                    model, weights = shared.model, shared.weights
                guides = _guides(config, model, vocabulary or _load_vocabulary) if config.structured_outputs else None
                worker = Worker(config, model, weights, compute, guides, shared)
            asyncio.run(worker.serve(listener))
    finally:
        listener.close()
        path.unlink(missing_ok=True)


class Worker:
    """A loaded model with its engine, and the threads that run it. `compute` is the thread that loaded it, `shared` are
    the ranks that the model is shared with."""

    def __init__(
        self, config: WorkerConfig, model: CausalLM, weights: bytes, compute: ComputeThread,
        guides: Guides | None = None, shared: Shared | None = None,
    ) -> None:  # fmt: skip
        self._guides = guides
        self._shared = shared
        self._trace = NO_TRACE if config.trace is None else Trace()
        self.boot = secrets.token_hex(8)
        self._config = config
        self._model = model
        self._events = PoolEvents(
            config.events, config.events_replay, self.boot, config.model_label, keys=config.event_keys
        )
        self._server: WorkerServer | None = None
        self._failure: BaseException | None = None
        self._compute = compute
        self._weights = weights
        self.parts: Assembled = compute.call(self._assemble)
        self._events.group = self.parts.holdings.announced_group

    def _assemble(self) -> Assembled:
        parts = assemble(
            self._model, self._weights, self._config, self._events, self._events.flush, self._send,
            self._guides, self._trace, self._shared,
        )  # fmt: skip
        warm_up(self._model, parts.stepper.pools)
        return parts

    async def serve(self, listener: socket.socket) -> None:
        """Serve front ends until told to stop. Raises EngineFailed."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self._stop = stop
        self._loop = loop
        answers = Answers(
            self.boot, self._describe, self._stats, self.parts.engine.step_seconds, self.parts.stalled_seconds,
            self._overloaded, stop.set,
        )  # fmt: skip
        self._server = WorkerServer(self.parts.inbox.put, answers)
        self._events.attach(loop)
        if self.parts.transfer is not None:
            self.parts.transfer.start()
        if self._shared is not None:
            self._shared.crew.watch(self._fail)
        self._compute.start(self._run_engine)
        await self._server.start(listener)
        log.info("serving %s on %s", self._config.model_label, self._config.listen)
        await stop.wait()
        self._server.stop_accepting()
        await asyncio.to_thread(self._end)
        self._server.close()
        self._events.close()
        if self._shared is not None and self._shared.crew.lost:
            raise RankLost(self._shared.crew.lost) from self._failure
        if self._failure is not None:
            raise EngineFailed(f"the engine failed: {self._failure}") from self._failure

    def _end(self) -> None:
        """Stop the engine after its step, store what it left, close the rest. Blocks."""
        self.parts.inbox.put(Stop())
        # Without all ranks there is nothing to be saved: what the store doesn't have, nobody can put together.
        lost = self._shared is not None and self._shared.crew.lost
        self._compute.finish(LOST_PATIENCE_S if lost else ENGINE_PATIENCE_S)
        if self.parts.transfer is not None:
            self.parts.transfer.stop(0.0 if lost else self._config.drain_s)
        if self._config.trace is not None:
            self._write_trace(self._config.trace)

    def _write_trace(self, path: Path) -> None:
        try:
            self._trace.write(path)
        except OSError as error:  # the work is done; its picture is not worth a failure
            log.warning("can't write the trace to %s: %s", path, error.strerror)
        else:
            log.info("wrote the trace to %s: open it in chrome://tracing or ui.perfetto.dev", path)

    def _run_engine(self) -> None:
        try:
            self.parts.engine.run()
        except BaseException as error:
            if self._shared is None or not self._shared.crew.lost:
                log.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        """On the loop: end, for the first reason that there was. Callable from the transfer thread through the loop."""
        self._failure = self._failure or error
        self._stop.set()

    def _send(self, batch: Batch) -> None:
        assert self._server is not None
        self._server.send(batch)

    def _overloaded(self) -> bool:
        return len(self.parts.inbox) >= 2 * self._config.max_waiting

    def _describe(self) -> Description:
        return Description(
            boot=self.boot,
            pid=os.getpid(),
            model=self._config.model_label,
            vocab_size=self._model.info.vocab_size,
            max_context=self.parts.bounds.tokens_max,
            eos_ids=sorted(self._model.info.eos_ids),
            namespace=encode_namespace(self.parts.namespace),
            store=self.parts.store_state(),
            guided=self._guides is not None,
        )

    def _stats(self) -> WorkerStats:
        values = self.parts.stats()
        values["step.now_seconds"] = self.parts.engine.step_seconds()
        values.update(self._events.stats())
        if self._shared is not None:
            values["ranks"], values["ranks.orders"] = self._shared.crew.size, self._shared.crew.orders
            values.update(self._shared.traffic.figures())
        values["frontends"] = self._server.connections if self._server is not None else 0
        return WorkerStats(values=values, store=self.parts.store_state())


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """While loading, a signal ends the process at once, and cleanly: there is nothing to store yet."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(0)

    old = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _guides(config: WorkerConfig, model: CausalLM, load: Callable[[WorkerConfig], Vocabulary]) -> Guides:
    log.info("preparing the vocabulary for structured outputs")
    return Guides(load(config), model.info.vocab_size, model.info.eos_ids)


def _share(config: WorkerConfig, compute: ComputeThread, path: Path, until: contextlib.ExitStack) -> Shared:
    # Imported here: one process alone needs no collectives.
    from forebay.workers.ranks.leading import shared_model

    return until.enter_context(shared_model(config, compute, path))


def _load_vocabulary(config: WorkerConfig) -> Vocabulary:
    from forebay.models.loading import checkpoint_directory
    from forebay.models.tokenizer import Tokenizer

    return Tokenizer.load(checkpoint_directory(config.model, cache_dir=config.cache_dir))


def _load_checkpoint(config: WorkerConfig) -> tuple[CausalLM, bytes]:
    # Imported here: the models bring a lot along, and tests bring models of their own.
    from forebay.workers.checkpoint import load_checkpoint

    return load_checkpoint(config)
