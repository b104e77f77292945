"""What the endpoints do, apart from HTTP: texts to tokens, requests to calls, calls to answers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from forebay.errors import ForebayError
from forebay.kvstore.identity import pack_tokens
from forebay.models.chat import ChatTemplate
from forebay.models.errors import NoChatTemplate
from forebay.models.tokenizer import Tokenizer
from forebay.workers.api.bodies import (
    ChatBody,
    Common,
    CompletionBody,
    choices_of,
    prompts_of,
    refuse_chat,
    refuse_completion,
    sampling_of,
    stops_of,
)
from forebay.workers.api.deltas import Choice, Delta
from forebay.workers.api.errors import ApiError, bad, unavailable
from forebay.workers.api.keys import Tenant
from forebay.workers.api.link import WorkerLink
from forebay.workers.api.metrics import Metrics
from forebay.workers.api.shapes import DONE, ChatShape, CompletionShape, Frame, Gathered, Shape, Usage, sse
from forebay.workers.protocol import Description, Sampling

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that doesn't say (OpenAI's default)."""
INLINE_CHARACTERS = 2000
"""Longer texts are tokenised on a thread, so that other streams go on."""


@dataclass
class Generation:
    """One request: its choices under way, and the shape of its answer."""

    choices: list[Choice]
    shape: Shape
    prompt_tokens: int
    metrics: Metrics
    started: float
    include_usage: bool

    def usage(self) -> Usage:
        """Counts so far. A prompt that several choices share is counted once, as it was computed once."""
        cached = max((choice.call.cached_tokens for choice in self.choices), default=0)
        return Usage(self.prompt_tokens, sum(choice.produced for choice in self.choices), cached)

    async def whole(self) -> dict[str, object]:
        """The answer once all choices are done."""
        gathered = [Gathered() for _ in self.choices]

        async def gather(choice: Choice) -> None:
            async for delta in choice.deltas():
                self._first_token()
                gathered[choice.index].add(delta)

        tasks = [asyncio.ensure_future(gather(choice)) for choice in self.choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._done()
        return self.shape.whole(gathered, self.usage())

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events. A failure in mid-stream is told as an error event; the stream ends there."""
        queue: asyncio.Queue[tuple[int, Delta] | ApiError | None] = asyncio.Queue(maxsize=256)
        tasks = [asyncio.ensure_future(self._feed(choice, queue)) for choice in self.choices]
        try:
            for choice in self.choices:
                opening = self.shape.opening(choice.index)
                if opening is not None:
                    yield sse(opening)
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, ApiError):
                    yield sse(item.body())
                    return
                if item is None:
                    running -= 1
                    continue
                self._first_token()
                index, delta = item
                if delta.text or delta.finish or delta.tokens:
                    yield sse(self.shape.chunk(index, delta))
            if self.include_usage:
                yield sse(self.shape.usage_chunk(self.usage()))
            yield DONE
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._done()

    @staticmethod
    async def _feed(choice: Choice, queue: asyncio.Queue[tuple[int, Delta] | ApiError | None]) -> None:
        try:
            async for delta in choice.deltas():
                await queue.put((choice.index, delta))
            await queue.put(None)
        except ApiError as error:
            await queue.put(error)

    def _first_token(self) -> None:
        if self.started:
            self.metrics.ttft.observe(time.perf_counter() - self.started)
            self.started = 0.0

    def _done(self) -> None:
        usage = self.usage()
        self.metrics.prompt_tokens.inc(usage.prompt)
        self.metrics.output_tokens.inc(usage.completion)
        for choice in self.choices[:1]:
            for source, tokens in (choice.call.cached or {}).items():
                self.metrics.cached_tokens.labels(source).inc(tokens)


@dataclass
class ApiService:
    """One model behind one worker."""

    link: WorkerLink
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    metrics: Metrics
    model: str

    @property
    def worker(self) -> Description:
        """The worker's description. Raises ApiError 503 before there was one."""
        if self.link.description is None:
            raise unavailable("no worker is ready yet; try again in a moment")
        return self.link.description

    async def completion(self, body: CompletionBody, tenant: Tenant) -> Generation:
        """Start a completion. Raises ApiError."""
        started = time.perf_counter()
        self._check_model(body)
        refuse_completion(body)
        prompts = [await self._ids(prompt) for prompt in prompts_of(body)]
        sampling = sampling_of(
            body, max_tokens=body.max_tokens, default_tokens=COMPLETION_TOKENS, logprobs=body.logprobs
        )
        shape = CompletionShape(self._frame("cmpl", body, body.logprobs))
        return self._start(body, prompts, sampling, tenant, shape, started)

    async def chat_completion(self, body: ChatBody, tenant: Tenant) -> Generation:
        """Start a chat completion. Raises ApiError; a base model has no chat template and says so."""
        started = time.perf_counter()
        self._check_model(body)
        refuse_chat(body)
        prompt = await self._ids(self._render(body), special=False)
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        left = max(1, self.worker.max_context - len(prompt))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = sampling_of(body, max_tokens=wanted, default_tokens=left, logprobs=logprobs)
        shape = ChatShape(self._frame("chatcmpl", body, logprobs))
        return self._start(body, [prompt], sampling, tenant, shape, started)

    def _render(self, body: ChatBody) -> str:
        if not body.messages:
            raise bad("messages is empty; it takes at least one", "messages")
        if self.chat is None:
            raise bad(str(NoChatTemplate(self.model)), "messages")
        messages = [{"role": message.role, "content": _text_of(message.content)} for message in body.messages]
        try:
            return self.chat.render(messages, add_generation_prompt=True)
        except ForebayError as error:
            raise bad(str(error), "messages") from error

    def _start(
        self, body: Common, prompts: Sequence[list[int]], sampling: Sampling, tenant: Tenant, shape: Shape, started: float
    ) -> Generation:
        n, stops, salt = choices_of(body), stops_of(body), tenant.salt(body.cache_salt)
        for prompt in prompts:
            self._check_prompt(prompt, sampling)
        choices: list[Choice] = []
        try:
            for prompt in prompts:
                packed = pack_tokens(prompt)
                for number in range(n):
                    call = self.link.start(packed, replace_choice(sampling, number), salt, tenant.id)
                    eos = frozenset(self.worker.eos_ids)
                    choices.append(Choice(len(choices), call, self.link, self.tokenizer, stops, eos))
        except ApiError:
            for choice in choices:
                self.link.stop(choice.call)
            raise
        usage = body.stream_options is not None and body.stream_options.include_usage
        total = sum(map(len, prompts))
        return Generation(choices, shape, total, self.metrics, started, usage)

    def _check_prompt(self, prompt: list[int], sampling: Sampling) -> None:
        worker = self.worker
        if not prompt:
            raise bad("prompt has no tokens; it takes at least one", "prompt")
        if min(prompt) < 0 or max(prompt) >= worker.vocab_size:
            raise bad(f"prompt has token ids outside of 0 to {worker.vocab_size - 1}", "prompt")
        if len(prompt) >= worker.max_context:
            raise ApiError(
                400, f"the prompt has {len(prompt)} tokens; the context holds {worker.max_context}, one of them for the "
                "answer", param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        if len(prompt) + sampling.max_tokens > worker.max_context:
            raise ApiError(
                400, f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} are over the context of "
                f"{worker.max_context}; ask for at most {worker.max_context - len(prompt)}", param="max_tokens",
                code="context_length_exceeded",
            )  # fmt: skip

    async def _ids(self, prompt: str | list[int], *, special: bool = True) -> list[int]:
        if isinstance(prompt, list):
            if not all(isinstance(token, int) for token in prompt):
                raise bad("prompt mixes token ids with something else", "prompt")
            return prompt
        return await self.encode(prompt, special)

    async def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of a text, with a beginning-of-sequence token if `special`."""
        if len(text) <= INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_bos=special)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_bos=special)

    def _frame(self, prefix: str, body: Common, logprobs: int | None) -> Frame:
        name = f"{prefix}-{secrets.token_hex(12)}"
        return Frame(name, self.model, self.tokenizer, logprobs, body.return_token_ids)

    def _check_model(self, body: Common) -> None:
        if body.model is not None and body.model != self.model:
            raise ApiError(
                404, f"there is no model {body.model!r} here; there is {self.model!r}", param="model", code="model_not_found"
            )


def replace_choice(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of choice number `choice`: the same seed, another stream of random numbers."""
    return msgspec.structs.replace(sampling, choice=choice)


def _text_of(content: str | list[dict[str, object]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad("messages: content takes text, or parts of type text", "messages")
        parts.append(str(part["text"]))
    return "".join(parts)
