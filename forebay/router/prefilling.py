"""Prefill apart from decoding: long prompts of which little is cached are computed by workers that do nothing else.

    router --prompt, one token, kv_transfer_params--> prefill worker       its store has the KV when it answers
       |  <------------------ where that KV is -----------
       +---the request itself, and that----> the worker that was chosen    its store fetches the KV by its keys

What is chosen between is one prefill more and the decodes beside it: a long prefill delays those. Whatever fails on the
way, the worker that decodes computes the prompt itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from forebay.router.client import Answer, BackendFailed, ask
from forebay.router.metrics import RouterMetrics
from forebay.router.settings import RouterConfig
from forebay.router.upstream import Upstream, Upstreams
from forebay.scheduler.routing import Decision, Prompt
from forebay.tiers.p2p.transfer_params import prefill_request

log = logging.getLogger(__name__)

ALONE = ("kv_transfer_params", "resume_token_ids", "prompt_logprobs", "echo")
"""Fields of requests that are never split: an orchestrator has decided already, or every position must be computed."""
PASSED_ON = ("cache_salt", "retain_s", "cache_control", "priority")

Noting = Callable[[int, str | None], AbstractContextManager[Callable[[Answer], None]]]


class Prefiller:
    """Decides for one router, and asks. `noting` tells the router of an answer that ends if its worker goes down."""

    def __init__(self, config: RouterConfig, upstreams: Upstreams, metrics: RouterMetrics, noting: Noting) -> None:
        self._config, self._upstreams, self._metrics, self._noting = config, upstreams, metrics, noting

    def may(self, body: Mapping[str, Any], prompt: Prompt) -> bool:
        """Is this prompt long enough, and is any worker for that?"""
        long = prompt.tokens is not None and prompt.length >= self._config.split_at
        return long and splittable(body) and any(upstream.backend.prefill for upstream in self._upstreams.all)

    async def before(
        self, body: dict[str, Any], headers: Mapping[str, str], model: str | None, decision: Decision
    ) -> None:
        """Have a prompt that `may` be split computed elsewhere, if that is worth it before it goes to where `decision`
        says, and tell of it in `body`. Never fails."""
        counts = self._metrics.split
        if decision.prompt.length - decision.cached < self._config.split_at:
            counts.labels("cached").inc()
            return
        number = self._somebody(model)
        if number is None or self._upstreams.all[decision.worker].backend.prefill:
            counts.labels("alone").inc()
            return
        told = await self._prefill(number, body, headers, model, decision)
        if told is not None:
            body["kv_transfer_params"] = told
        counts.labels("failed" if told is None else "prefilled").inc()

    def _somebody(self, model: str | None) -> int | None:
        """The prefill worker with the least to do, if one has room."""
        open_now = self._upstreams.prefills(model)
        able = [number for number in open_now if self._running(number) < self._config.per_worker]
        return min(able, key=self._running, default=None)

    def _running(self, number: int) -> int:
        return self._upstreams.all[number].prefilling

    async def _prefill(
        self, number: int, body: Mapping[str, Any], headers: Mapping[str, str], model: str | None, decision: Decision
    ) -> dict[str, Any] | None:
        """What the prefill worker says of the KV, once its store has it; None if that came to nothing."""
        upstream = self._upstreams.all[number]
        breaker = upstream.breaker
        breaker.sent(time.monotonic())
        upstream.prefilling += 1
        known = False
        try:
            told = await self._ask(upstream, number, _question(body, model, decision), headers, model)
            known = True
            breaker.succeeded()
            return told
        except (BackendFailed, msgspec.MsgspecError) as error:
            known = True
            breaker.failed(time.monotonic())
            log.info("prefill worker %s: %s", upstream.backend.name, error)
            return None
        finally:
            upstream.prefilling -= 1
            if not known:
                breaker.gave_up()

    async def _ask(
        self, upstream: Upstream, number: int, question: bytes, headers: Mapping[str, str], model: str | None
    ) -> dict[str, Any] | None:
        backend, config = upstream.backend, self._config
        with self._noting(number, model) as opened:
            answer = await ask(
                backend.host, backend.port, "POST", "/v1/completions", body=question,
                headers={**headers, "content-type": "application/json"},
                connect_s=config.connect_s, silence_s=config.answer_s, opened=opened,
            )  # fmt: skip
            async with answer:
                data = await answer.whole()
                if answer.status >= 500:
                    raise BackendFailed(f"it says {answer.status}")
                if answer.status != 200:
                    log.info("prefill worker %s says %d: %s", backend.name, answer.status, data[:200])
                    return None
        told = msgspec.json.decode(data, type=dict[str, Any]).get("kv_transfer_params")
        if not isinstance(told, dict):
            log.warning("prefill worker %s doesn't say where its KV is; its front end needs --kv-address", backend.name)
            return None
        return told


def splittable(body: Mapping[str, Any]) -> bool:
    """May this request's prompt be computed before it? Not where there are several, or nothing is decoded."""
    prompt, wanted = body.get("prompt"), body.get("max_completion_tokens") or body.get("max_tokens")
    several = isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], list | str)
    return not several and wanted != 1 and not any(body.get(name) for name in ALONE)


def _question(body: Mapping[str, Any], model: str | None, decision: Decision) -> bytes:
    tokens = decision.prompt.tokens
    assert tokens is not None
    asked = {"prompt": tokens.tolist(), "max_tokens": 1, "temperature": 0, "kv_transfer_params": prefill_request()}
    asked |= {name: body[name] for name in PASSED_ON if body.get(name) is not None}
    return msgspec.json.encode(asked if model is None else asked | {"model": model})
