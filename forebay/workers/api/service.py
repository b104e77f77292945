"""What the endpoints do, apart from HTTP: texts to tokens, requests to calls, calls to answers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forebay.errors import ForebayError
from forebay.kvstore.identity import pack_tokens
from forebay.models.errors import NoChatTemplate
from forebay.tiers.p2p.options import Address
from forebay.tiers.p2p.transfer_params import TransferParams, prefilled
from forebay.workers.api.answers import Answer
from forebay.workers.api.bodies import (
    MAX_PROMPT_SCORES,
    ChatBody,
    Common,
    CompletionBody,
    Prompt,
    TokenizeBody,
    candidates_of,
    chat_logprobs,
    choices_of,
    prompts_of,
    refuse_unsupported,
    resumed_of,
    retention_of,
    stops_of,
    transfer_of,
)
from forebay.workers.api.conversation import described, messages_of
from forebay.workers.api.deltas import Choice
from forebay.workers.api.errors import ApiError, bad, unavailable
from forebay.workers.api.fleet import Fleet
from forebay.workers.api.keys import Tenant
from forebay.workers.api.metrics import Metrics
from forebay.workers.api.parameters import priority_of, sampling_of
from forebay.workers.api.shapes import ChatShape, CompletionShape, Frame, Shape
from forebay.workers.api.splitting import Splitter
from forebay.workers.api.structured import grammar_of
from forebay.workers.api.text import Chat, Codec
from forebay.workers.api.tool_formats import ToolFormat
from forebay.workers.api.tools import ForcedFinder, ToolFinder, ToolUse, tools_of
from forebay.workers.generation import ends_of
from forebay.workers.protocol import Description, Sampling

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that doesn't say (OpenAI's default)."""
INLINE_CHARACTERS = 2000
"""Longer texts are tokenised on a thread, so that other streams go on."""
CHARACTERS_A_TOKEN_MAX = 16
"""No text that fits has more, but for endless runs of one character."""


@dataclass
class ApiService:
    """One model behind its workers. `chat` is None for a base model; `label` "" takes the worker's name for it;
    `kv_address` is where other hosts get what this one's store has, None for nowhere. `tool_format` is how the model
    calls tools, None if it can't. `splitter` decides who prefills, None: always who decodes."""

    fleet: Fleet
    codec: Codec
    chat: Chat | None
    metrics: Metrics
    label: str
    kv_address: Address | None = None
    tool_format: ToolFormat | None = None
    splitter: Splitter | None = None

    def __post_init__(self) -> None:
        """Which special tokens have to be seen for tools to be found."""
        self._marks: dict[int, str] = {}
        for mark in self.tool_format.marks if self.tool_format is not None else ():
            ids = self.codec.encode(mark, add_bos=False)
            if len(ids) == 1 and not self.codec.decode(ids):
                self._marks[ids[0]] = mark

    @property
    def model(self) -> str:
        """The model's name in the API."""
        if self.label:
            return self.label
        return self.fleet.description.model if self.fleet.description is not None else ""

    @property
    def worker(self) -> Description:
        """The worker's description. Raises ApiError 503 before there was one."""
        if self.fleet.description is None:
            raise unavailable("no worker is ready yet; try again in a moment")
        return self.fleet.description

    async def completion(
        self, body: CompletionBody, tenant: Tenant, name: str = "", authorization: str | None = None
    ) -> Answer:
        """Start a completion; `name` is the request's, if its client gave it one, and `authorization` what another host
        would have to be told. Raises ApiError."""
        started = time.perf_counter()
        self.check_model(body.model)
        refuse_unsupported(body)
        if body.echo and body.stream:
            raise bad("echo takes stream: false", "echo")
        prompts = [await self._ids(prompt) for prompt in prompts_of(body)]
        left = max(1, self.worker.max_context - max(map(len, prompts)))
        ranked = candidates_of(body) > choices_of(body) and body.logprobs is None
        sampling = sampling_of(
            body, wanted=body.max_tokens, default_tokens=min(COMPLETION_TOKENS, left),
            logprobs=0 if ranked else body.logprobs, vocab=self.worker.vocab_size,
            grammar=await grammar_of(body, guided=self.worker.guided),
        )  # fmt: skip
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs)
        frame = self._frame("cmpl", body, body.logprobs, name)
        shape = CompletionShape(frame, bool(body.echo), body.prompt_logprobs is not None)
        splits = [await self._splits(body, prompt, sampling, tenant, authorization) for prompt in prompts]
        return self._start(body, prompts, sampling, tenant, shape, started, frame.id, splits)

    async def chat_completion(
        self, body: ChatBody, tenant: Tenant, name: str = "", authorization: str | None = None
    ) -> Answer:
        """Start a chat completion. Raises ApiError; a base model has no chat template and says so."""
        started = time.perf_counter()
        self.check_model(body.model)
        refuse_unsupported(body)
        use = tools_of(body, known=self.tool_format is not None)
        prompt = await self.encode(self.render(body, use), special=False)
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = chat_logprobs(body)
        left = max(1, self.worker.max_context - len(prompt))
        grammar = await grammar_of(body, guided=self.worker.guided, tool_schema=use.forced if use is not None else None)
        sampling = sampling_of(
            body, wanted=wanted, default_tokens=left, logprobs=logprobs, vocab=self.worker.vocab_size, grammar=grammar
        )
        frame = self._frame("chatcmpl", body, logprobs, name)
        shape = ChatShape(frame, body.prompt_logprobs is not None)
        splits = [await self._splits(body, prompt, sampling, tenant, authorization)]
        return self._start(body, [prompt], sampling, tenant, shape, started, frame.id, splits, use)

    async def _splits(
        self, body: Common, prompt: list[int], sampling: Sampling, tenant: Tenant, authorization: str | None
    ) -> bool:
        """Is this prompt to be prefilled by another worker than decodes it?"""
        asked = body.resume_token_ids or body.kv_transfer_params or sampling.prompt_logprobs is not None
        if self.splitter is None or asked or sampling.max_tokens < 2:
            return False
        self._check_prompt(prompt, sampling)
        salt = tenant.salt(body.cache_salt)
        return await self.splitter.local(prompt, salt, tenant.id, body.cache_salt, authorization)

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Token ids of a text or a conversation. Raises ApiError."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad("give prompt or messages, one of them", "prompt")
        if body.prompt is not None:
            return await self.encode(body.prompt, special=body.add_special_tokens)
        return await self.encode(self.render(body, None, body.add_generation_prompt), special=False)

    def render(
        self, body: ChatBody | TokenizeBody, use: ToolUse | None, add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation. Raises ApiError."""
        messages = messages_of(body.messages)
        shown = body.tools if body.tools and (use is None or use.shown) else ()
        try:
            if self.chat is None:
                raise NoChatTemplate(
                    f"{self.model} is a base model without a chat template; use /v1/completions, or serve an "
                    "instruction-tuned model"
                )
            return self.chat.render(
                messages, add_generation_prompt=add_generation_prompt, tools=described(shown)
            )
        except ForebayError as error:
            raise bad(str(error), "messages") from error

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text, with a beginning-of-sequence token if `special`.

        Raises ApiError for a text that can't fit: tokenising megabytes would keep the interpreter for seconds.
        """
        longest = CHARACTERS_A_TOKEN_MAX * self.worker.max_context
        if len(text) > longest:
            raise ApiError(
                400, f"the text has {len(text)} characters; a context of {self.worker.max_context} tokens can't hold "
                f"more than {longest}", param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        if len(text) <= INLINE_CHARACTERS:
            return self.codec.encode(text, add_bos=special)
        return await asyncio.to_thread(self.codec.encode, text, add_bos=special)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for another model than ours. No name means ours."""
        worker = self.worker
        if name is not None and name not in (self.model, worker.model):
            raise ApiError(
                404, f"there is no model {name!r} here; there is {self.model!r}", param="model", code="model_not_found"
            )

    def _start(
        self, body: Common, prompts: Sequence[list[int]], sampling: Sampling, tenant: Tenant, shape: Shape,
        started: float, name: str, splits: Sequence[bool], use: ToolUse | None = None,
    ) -> Answer:  # fmt: skip
        told, candidates, priority = choices_of(body), candidates_of(body), priority_of(body, tenant.id)
        stops, salt = stops_of(body), tenant.salt(body.cache_salt)
        retain_s, asked = retention_of(body), transfer_of(body)
        transfer = None if self.kv_address is None else prefilled(asked, self.kv_address)
        self._count(asked)
        for prompt in prompts:
            self._check_prompt(prompt, sampling)
        emitted = resumed_of(body, candidates * len(prompts), sampling.max_tokens)
        self._check_ids("resume_token_ids", max(map(max, filter(None, emitted)), default=0))
        ends = ends_of(sampling, frozenset(self.worker.eos_ids))
        choices: list[Choice] = []
        try:
            for prompt, split in zip(prompts, splits, strict=True):
                packed, leader = pack_tokens(prompt), None
                for number in range(candidates):
                    index = len(choices)
                    call = self.fleet.start(
                        packed, _nth(sampling, number), salt, tenant.id, name=f"{name}.{index}",
                        held=leader is not None, retain_s=retain_s, emitted=emitted[index], priority=priority,
                        settled=transfer is not None and leader is None, beside=leader,
                        split=split and leader is None,
                    )  # fmt: skip
                    leader = leader or call
                    choices.append(
                        Choice(
                            index, call, self.fleet, self.codec, stops, ends, leader, resumed=tuple(emitted[index]),
                            tools=self._finder(use), marks={} if use is None else self._marks,
                        )
                    )
        except ApiError:
            for choice in choices:
                self.fleet.stop(choice.call)
            raise
        return Answer(
            choices, shape, sum(map(len, prompts)), self.metrics, body.include_usage, name, candidates, told, started,
            transfer,
        )  # fmt: skip

    def _finder(self, use: ToolUse | None) -> ToolFinder | ForcedFinder | None:
        if use is None or not use.shown or self.tool_format is None:
            return None
        return ToolFinder(self.tool_format, use) if use.forced is None else ForcedFinder(use)

    def _count(self, asked: TransferParams) -> None:
        for party in ("decoder", "prefiller", "source"):
            if getattr(asked, party) is not None:
                self.metrics.transfers.labels(party).inc()

    def _check_prompt(self, prompt: list[int], sampling: Sampling) -> None:
        context = self.worker.max_context
        scores = len(prompt) * (1 + (sampling.prompt_logprobs or 0)) if sampling.prompt_logprobs is not None else 0
        if scores > MAX_PROMPT_SCORES:
            raise bad(
                f"prompt_logprobs {sampling.prompt_logprobs} of {len(prompt)} tokens is more than the "
                f"{MAX_PROMPT_SCORES} numbers that are told of one prompt; ask for fewer, or send less",
                "prompt_logprobs",
            )  # fmt: skip
        if not prompt:
            raise bad("prompt has no tokens; it takes at least one", "prompt")
        self._check_ids("prompt", max(prompt))
        if len(prompt) >= context:
            raise ApiError(
                400, f"the prompt has {len(prompt)} tokens; the context holds {context}, prompt and answer together",
                param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        if len(prompt) + sampling.max_tokens > context:
            raise ApiError(
                400, f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} are over the context of "
                f"{context}; ask for at most {context - len(prompt)}", param="max_tokens",
                code="context_length_exceeded",
            )  # fmt: skip

    def _check_ids(self, field: str, highest: int) -> None:
        vocab = self.worker.vocab_size
        if highest >= vocab:
            raise bad(f"{field} has token id {highest}; the model's ids end at {vocab - 1}", field)

    async def _ids(self, prompt: Prompt) -> list[int]:
        return prompt if isinstance(prompt, list) else await self.encode(prompt, special=True)

    def _frame(self, prefix: str, body: Common, logprobs: int | None, name: str) -> Frame:
        named = f"{prefix}-{name or secrets.token_hex(12)}"
        return Frame(named, self.model, self.codec, logprobs, body.return_token_ids)


def _nth(sampling: Sampling, number: int) -> Sampling:
    """The sampling of one of several choices. What is said of the prompt is said once."""
    if number == 0:
        return sampling
    return msgspec.structs.replace(sampling, choice=number, prompt_logprobs=None)
