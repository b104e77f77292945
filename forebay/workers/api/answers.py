"""One request under way: its choices, merged into one answer, whole or streamed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from forebay.kvstore.identity import unpack_tokens
from forebay.workers.api.deltas import Choice, Delta
from forebay.workers.api.errors import ApiError
from forebay.workers.api.metrics import Metrics
from forebay.workers.api.shapes import DONE, Gathered, Shape, Usage, sse

log = logging.getLogger(__name__)

MERGED_MAX = 256
"""Deltas that wait for a slow client before its generations are no longer read."""

Merged = tuple[int, Delta]


@dataclass
class Answer:
    """The answer to one request. Use `whole` or `stream`, once. `name` is its id, `started` when the request arrived,
    `transfer` what a whole answer says of where its KV is to be had. `told` of every `candidates` choices of a prompt
    are told, those whose tokens were the likeliest on average."""

    choices: list[Choice]
    shape: Shape
    prompt_tokens: int
    metrics: Metrics
    include_usage: bool
    name: str = ""
    candidates: int = 1
    told: int = 1
    started: float = field(default_factory=time.perf_counter)
    transfer: dict[str, object] | None = None
    _first_after_s: float | None = None

    def usage(self) -> Usage:
        """Counts so far. A prompt that several choices share is counted once: it is computed once."""
        cached = sum(choice.call.cached_tokens for choice in self.choices if choice.leads)
        return Usage(self.prompt_tokens, sum(choice.produced for choice in self.choices), cached)

    async def whole(self) -> dict[str, object]:
        """The answer once all choices are done. Raises ApiError."""
        prompts = [unpack_tokens(choice.call.prompt) for choice in self.choices]
        gathered = [Gathered(prompt=prompt) for prompt in prompts]
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                gathered[index].add(delta)
        for got, choice in zip(gathered, self.choices, strict=True):
            got.scores = [score for _, score in sorted(choice.leader.scores.items())]
        if self.told < self.candidates:
            gathered = self._best(gathered)
        body = self.shape.whole(gathered, self.usage())
        return body if self.transfer is None else body | {"kv_transfer_params": self.transfer}

    def _best(self, gathered: list[Gathered]) -> list[Gathered]:
        best: list[Gathered] = []
        for at in range(0, len(gathered), self.candidates):
            ranked = sorted(gathered[at : at + self.candidates], key=lambda got: -got.likelihood)
            best += ranked[: self.told]
        return best

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises ApiError only before the first one; a later failure is an event itself."""
        opened: set[int] = set()
        try:
            async with aclosing(self._deltas()) as deltas:
                async for index, delta in deltas:
                    if index not in opened:
                        opened.add(index)
                        opening = self.shape.opening(index)
                        if opening is not None and not delta.silent:
                            yield sse(opening)
                    chunk = self.shape.chunk(index, delta)
                    if not delta.silent:
                        yield sse(chunk)
        except ApiError as error:
            if not opened:
                raise
            yield sse(error.body())
            return
        if self.include_usage:
            yield sse(self.shape.usage_chunk(self.usage()))
        yield DONE

    async def _deltas(self) -> AsyncGenerator[Merged, None]:
        """Deltas of all choices as they come. Raises the first ApiError; ends all calls on every way out."""
        try:
            async with aclosing(self._merged()) as merged:
                async for item in merged:
                    if self._first_after_s is None:
                        self._first_after_s = time.perf_counter() - self.started
                        self.metrics.ttft.observe(self._first_after_s)
                    yield item
        finally:
            for choice in self.choices:
                choice.fleet.stop(choice.call)
            self._count()

    async def _merged(self) -> AsyncGenerator[Merged, None]:
        if len(self.choices) == 1:
            async with aclosing(self.choices[0].deltas()) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        queue: asyncio.Queue[Merged | Exception | None] = asyncio.Queue(MERGED_MAX)
        tasks = [asyncio.ensure_future(_feed(choice, queue)) for choice in self.choices]
        running = len(tasks)
        try:
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _count(self) -> None:
        usage = self.usage()
        log.info(
            "%s: %d prompt tokens (%d cached), %d output tokens in %.3f s, the first after %.3f s", self.name,
            usage.prompt, usage.cached, usage.completion, time.perf_counter() - self.started,
            -1 if self._first_after_s is None else self._first_after_s,
        )  # fmt: skip
        self.metrics.prompt_tokens.inc(usage.prompt)
        self.metrics.output_tokens.inc(usage.completion)
        for choice in self.choices:
            if choice.leads:
                for source, tokens in (choice.call.cached or {}).items():
                    self.metrics.cached_tokens.labels(source).inc(tokens)


async def _feed(choice: Choice, queue: asyncio.Queue[Merged | Exception | None]) -> None:
    try:
        async with aclosing(choice.deltas()) as deltas:
            async for delta in deltas:
                await queue.put((choice.index, delta))
        await queue.put(None)
    except Exception as error:  # whatever it is, the reader must hear of it: else it waits for ever
        await queue.put(error)
