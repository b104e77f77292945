"""One request through the router: decide, send, pass on; and go elsewhere when a worker fails.

    nothing said yet     another worker, up to `attempts` in all (a refusal of the request itself goes to the client)
    in mid-stream        another of our workers, which is given what was said; while there is none, wait for one
    whole answers        another worker: the seed was drawn here, so it says the same

No request waits here for a worker to have time: with `per_worker` at every worker, it is told to come back (429), and
with no worker up, too (503).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.router.breaker import Breaker
from forebay.router.client import Answer, BackendFailed, ask
from forebay.router.metrics import RouterMetrics
from forebay.router.prefilling import Prefiller
from forebay.router.prompts import Asked, Prompts, passed_on
from forebay.router.settings import RouterConfig
from forebay.router.streams import Patience, Relay, SseParser, StreamBroken, count_of
from forebay.router.upstream import Upstream, Upstreams
from forebay.scheduler.learning import learn_prefill
from forebay.scheduler.routing import Decision, Routing
from forebay.workers.api.bodies import MAX_N, MAX_PROMPTS
from forebay.workers.api.errors import ApiError, bad, busy, unavailable

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
SEED_BITS = 62
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
FULL = frozenset({429, 503})
MID_STREAM_ATTEMPTS = 8
LOOK_AGAIN_S = 0.1


class StreamLost(Exception):
    """What was begun can't be gone on with."""


class Refused(Exception):
    """A worker answered with an error."""

    def __init__(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(str(status))
        self.status, self.data = status, data
        self.retry_after = headers.get("retry-after")


@dataclass
class Call:
    """One request under way. `body` is what goes to workers."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    asked: Asked
    model: str | None
    arrived: float
    tried: list[int] = field(default_factory=list)


@dataclass
class Sent:
    """One attempt. `breaker` is of the place that it goes to: a worker may be placed elsewhere meanwhile."""

    decision: Decision
    upstream: Upstream
    breaker: Breaker
    ticket: int
    alone: bool
    at: float
    known: bool = False


class Proxy:
    """All requests of one router. Lives on its loop."""

    def __init__(
        self, config: RouterConfig, routing: Routing, upstreams: Upstreams, prompts: Prompts, metrics: RouterMetrics,
        rng: random.Random,
    ) -> None:  # fmt: skip
        self.config, self.routing, self.upstreams = config, routing, upstreams
        self.prompts, self.metrics, self._rng = prompts, metrics, rng
        self._prefiller = Prefiller(config, upstreams, metrics, self._noting)
        self._answers: list[dict[Answer, str | None]] = [{} for _ in upstreams.all]

    def is_down(self, number: int) -> None:
        """A worker is down, or still is: what it was asked goes on elsewhere, as soon as there is somebody else for
        it. That it says nothing is no reason to believe that it will."""
        self.routing.predicted.forget(number)
        asked = self._answers[number]
        others = {model for model in set(asked.values()) if self.upstreams.open(model, [number]).any()}
        for answer, model in list(asked.items()):
            if model in others:
                answer.close()

    async def call(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Call:
        """Read a request. Raises ApiError."""
        arrived = time.monotonic()
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            raise bad("model takes a name", "model")
        open_now = self._open(model)
        if body.get("seed") is None:
            # Whoever goes on with this request must draw what another would have drawn.
            body["seed"] = self._rng.getrandbits(SEED_BITS)
        first = self.upstreams.all[int(np.flatnonzero(open_now)[0])]
        asked = await self.prompts.read(path, body, headers, first)
        if asked.replaces and asked.prompt.tokens is not None:
            body["prompt"] = asked.prompt.tokens.tolist()
        return Call(path, body, headers, asked, model, arrived)

    async def explain(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Decision:
        """Where a request would go, and why. Sends nothing. Raises ApiError."""
        call = await self.call(path, body, headers)
        return self.routing.decide(call.asked.prompt, time.monotonic(), self._open(call.model))

    async def whole(self, call: Call) -> bytes:
        """The whole answer. Raises ApiError or Refused."""
        await self._prefill(call)
        while True:
            with self._attempt(call) as sent:
                try:
                    async with self._answer(sent, call, call.body) as answer:
                        data = await answer.whole()
                except (BackendFailed, Refused) as error:
                    self._failed(sent, call, error)
                    continue
                self._learn_whole(sent, data)
                return data

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """The streamed answer. Raises ApiError or Refused before the first event; a later failure is an event."""
        await self._prefill(call)
        relay = self._relay(call)
        patience, full = Patience(MID_STREAM_ATTEMPTS, self.config.answer_s), False
        while not relay.done:
            try:
                with self._attempt(call, resuming=relay.begun) as sent:
                    try:
                        async with aclosing(self._events(sent, call, relay)) as events:
                            async for event in events:
                                yield event
                    except (BackendFailed, Refused, StreamBroken) as error:
                        self._failed(sent, call, error, mid_stream=relay.begun)
                        full = isinstance(error, Refused) and error.status in FULL
                        lasts = patience.lasts(relay.progress, time.monotonic(), full=full)
                        if relay.begun and not (relay.resumable and lasts):
                            raise StreamLost(f"the worker failed in mid-stream: {error}") from error
                if relay.begun and not relay.done and full:
                    await asyncio.sleep(LOOK_AGAIN_S)
            except (ApiError, Refused, StreamLost) as error:
                if not relay.begun:
                    raise
                if isinstance(error, ApiError) and error.status in FULL and await self._somebody(call, relay):
                    continue
                yield _error_event(error)
                return
            self.metrics.resumed.inc(relay.begun and not relay.done)

    async def _prefill(self, call: Call) -> None:
        """Let another worker compute the prompt first, if that is worth it. Raises ApiError if there is no worker."""
        if self._prefiller.may(call.body, call.asked.prompt):
            decision = self.routing.decide(call.asked.prompt, time.monotonic(), self._open(call.model))
            await self._prefiller.before(call.body, passed_on(call.headers), call.model, decision)

    # --- attempts ----------------------------------------------------------------------------------------

    @contextmanager
    def _attempt(self, call: Call, *, resuming: bool = False) -> Any:
        """A worker is chosen and counted until this is left. Raises ApiError if there is none."""
        if len(call.tried) >= self.config.attempts and not resuming:
            raise unavailable("no worker could answer; try again later")
        now = time.monotonic()
        without = call.tried[-1:] if resuming else call.tried
        mask = self._open(call.model, without, ours=resuming)
        decision = self.routing.decide(call.asked.prompt, now, mask)
        upstream = self.upstreams.all[decision.worker]
        alone = not self.routing.load.requests[decision.worker]
        ticket = self.routing.sent(decision, now)
        sent = Sent(decision, upstream, upstream.breaker, ticket, alone, now)
        sent.breaker.sent(now)
        call.tried.append(decision.worker)
        self.metrics.decided(decision, upstream.backend.name)
        try:
            yield sent
        finally:
            self.routing.ended(ticket, time.monotonic())
            if not sent.known:
                sent.breaker.gave_up()

    def _open(self, model: str | None, without: Any = (), *, ours: bool = False) -> npt.NDArray[np.bool_]:
        """Who may get a request now; at least one. Raises ApiError 404, 503 or 429. With `ours` it is for a stream that
        was begun, and that isn't refused: it waits."""
        mask = self.upstreams.open(model, without)
        if not mask.any() and len(without):
            mask = self.upstreams.open(model)  # better the same one again than nobody
        if ours:
            mask &= np.array([upstream.ours for upstream in self.upstreams.all])
        if not mask.any() and ours:
            raise unavailable("no worker is there to go on")
        if not mask.any():
            known = {name for upstream in self.upstreams.all for name in upstream.models}
            if model is not None and known and model not in known:
                told = ", ".join(sorted(known))
                raise ApiError(404, f"there is no model {model!r} here; there is {told}", code="model_not_found")
            self.metrics.rejected.labels("no_worker").inc()
            raise unavailable("no worker is ready; try again in a moment")
        mask &= self.routing.load.requests < self.config.per_worker
        if not mask.any() or self.routing.load.full:
            self.metrics.rejected.labels("full").inc(not ours)
            raise busy("every worker has as many requests as it may; try again later", RETRY_AFTER_S)
        return mask

    def _failed(self, sent: Sent, call: Call, error: Exception, *, mid_stream: bool = False) -> None:
        """An attempt failed. Raises Refused if it is for the client to hear: it was the request's own fault, or there
        was nobody else to ask."""
        refusal = error if isinstance(error, Refused) else None
        if refusal is not None and refusal.status < 500:
            self._knows(sent)
        else:
            sent.known = True
            sent.breaker.failed(time.monotonic())
        log.info("worker %s: %s", sent.upstream.backend.name, error)
        self.metrics.failures.labels(sent.upstream.backend.name, "mid_stream" if mid_stream else "before").inc()
        if refusal is not None and not mid_stream:
            last = len(call.tried) >= self.config.attempts or len(set(call.tried)) >= len(self.upstreams.all)
            if refusal.status not in RETRIED or last:
                if refusal.status == 429:
                    self.metrics.rejected.labels("workers_full").inc()
                raise refusal

    def _knows(self, sent: Sent) -> None:
        sent.known = True
        sent.breaker.succeeded()

    async def _somebody(self, call: Call, relay: Relay) -> bool:
        """Wait until somebody can go on with a stream, and has room for it; False if it takes too long."""
        until = time.monotonic() + self.config.answer_s
        load = self.routing.load
        while relay.resumable and time.monotonic() < until:
            mask = self.upstreams.open(call.model) & (load.requests < self.config.per_worker)
            if (mask & np.array([upstream.ours for upstream in self.upstreams.all])).any() and not load.full:
                return True
            await asyncio.sleep(LOOK_AGAIN_S)
        return False

    # --- answers -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _answer(self, sent: Sent, call: Call, body: dict[str, Any]) -> AsyncIterator[Answer]:
        """The answer once its head is there, a good one. From the start it ends if its worker goes down. Raises
        BackendFailed or Refused."""
        backend = sent.upstream.backend
        extra = passed_on(call.headers) | {"content-type": "application/json"}
        address = self.metrics.source_address(sent.decision.source)
        if address is not None:
            extra["x-kv-cache-source-host-port"] = address
        with self._noting(sent.decision.worker, call.model) as note:
            answer = await ask(
                backend.host, backend.port, "POST", call.path, body=msgspec.json.encode(body), headers=extra,
                connect_s=self.config.connect_s, silence_s=self.config.answer_s, opened=note,
            )  # fmt: skip
            async with answer:
                if answer.status != 200:
                    raise Refused(answer.status, await answer.whole(), answer.headers)
                yield answer

    @contextmanager
    def _noting(self, number: int, model: str | None) -> Iterator[Callable[[Answer], None]]:
        """Answers that are noted end when their worker goes down, unless it is the only one."""
        mine, opened = self._answers[number], list[Answer]()

        def note(answer: Answer) -> None:
            opened.append(answer)
            mine[answer] = model

        try:
            yield note
        finally:
            for answer in opened:
                del mine[answer]

    async def _events(self, sent: Sent, call: Call, relay: Relay) -> AsyncGenerator[bytes, None]:
        """What one worker adds to the client's stream. Raises BackendFailed, Refused or StreamBroken."""
        resumed, parser = relay.begun, SseParser()
        async with (
            self._answer(sent, call, self._stream_body(sent, call, relay)) as answer, aclosing(answer.body()) as body
        ):  # fmt: skip
            async for part in body:
                for data in parser.feed(part):
                    event = relay.pass_on(data)
                    if event is None:
                        continue
                    if not sent.known:
                        self._first(sent, call)
                    yield event
        if not relay.done:
            raise BackendFailed("the stream ended early")
        if not resumed and relay.cached is not None:
            self._realised(sent, relay.prompt_tokens, relay.cached)

    def _stream_body(self, sent: Sent, call: Call, relay: Relay) -> dict[str, Any]:
        body = call.body | {"stream_options": {"include_usage": True}}
        if sent.upstream.ours:
            body["return_token_ids"] = True
            if relay.begun:
                body["resume_token_ids"] = relay.emitted
        return body

    def _relay(self, call: Call) -> Relay:
        body = call.body
        prompt, n = body.get("prompt"), body.get("n")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str) else 1
        choices = prompts * (n if isinstance(n, int) and n > 0 else 1)
        options = body.get("stream_options")
        usage = bool(isinstance(options, dict) and options.get("include_usage"))
        return Relay(min(choices, MAX_N * MAX_PROMPTS), bool(body.get("return_token_ids")), usage)

    def _first(self, sent: Sent, call: Call) -> None:
        """Its first event is there."""
        now = time.monotonic()
        self._knows(sent)
        self.routing.first_token(sent.ticket, now)
        self.metrics.ttft.observe(now - call.arrived)
        sent.at = now - sent.at

    def _learn_whole(self, sent: Sent, data: bytes) -> None:
        self._knows(sent)
        try:
            usage = msgspec.json.decode(data).get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except (msgspec.MsgspecError, AttributeError):
            return
        if cached is not None:
            self.routing.belief.add(count_of(usage.get("prompt_tokens")), sent.decision.cached, count_of(cached))

    def _realised(self, sent: Sent, prompt_tokens: int, cached: int) -> None:
        """Compare what was believed with what was, and learn how fast the worker is from one that had it to itself."""
        self.routing.belief.add(prompt_tokens, sent.decision.cached, cached)
        if sent.alone:
            learn_prefill(self.routing.fleet, sent.decision.worker, prompt_tokens, cached, sent.at)


def _error_event(error: ApiError | Refused | StreamLost) -> bytes:
    told = error if isinstance(error, ApiError) else unavailable(str(error))
    return b"data: " + msgspec.json.encode(told.body()) + b"\n\n"
