"""One request as the engine sees it: what was asked, what has been said, and when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from forebay.scheduler.request import Request
from forebay.workers.adjusting import Adjustment, wanted
from forebay.workers.guiding import Guide
from forebay.workers.protocol import FinishReason, Generate, Sampling
from forebay.workers.sampling import check_sampling

WAITED_S_MAX = 1e6


class RequestKey(NamedTuple):
    """Front ends choose their ids alone, so a key names the connection too."""

    connection: int
    id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.id}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What every request must keep to. `capacity` is the most tokens that the block pool can hold of one."""

    vocab_size: int
    max_context: int
    capacity: int
    eos_ids: frozenset[int]

    @property
    def tokens_max(self) -> int:
        """Prompt and output together."""
        return min(self.max_context, self.capacity)


@dataclass(slots=True, eq=False)
class Generation:
    """A request under way. `sources` say where its cached prefix came from; `adjustment` is set if its parameters
    adjust logits; `broken` says why it can't go on, in words for the client. `put_off` counts how often it was computed
    anew because host memory lacked room."""

    key: RequestKey
    ask: Generate
    request: Request
    tokens_max: int
    eos_ids: frozenset[int]
    adjustment: Adjustment | None = None
    started: bool = False
    sources: dict[str, int] = field(default_factory=dict)
    broken: str = ""
    put_off: int = 0

    @property
    def emitted(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.request.tokens) - self.request.prompt_tokens

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end this answer."""
        return ends_of(self.ask.sampling, self.eos_ids)

    @property
    def failure(self) -> str:
        """Why it had to end, in words for the client; empty if it ended well."""
        if self.broken:
            return self.broken
        guide = None if self.adjustment is None else self.adjustment.guide
        return f"the grammar can't be followed: {guide.error}" if guide is not None and guide.error else ""

    def adjust(self, guide: Guide | None = None) -> None:
        """Set up what its parameters change of the logits, for the tokens so far."""
        if wanted(self.ask.sampling):
            tokens, prompt = self.request.tokens, self.request.prompt_tokens
            self.adjustment = Adjustment(self.ask.sampling, tokens[:prompt], tokens[prompt:], self.ends, guide)

    def end(self) -> FinishReason | None:
        """Why this is over, now that a token has been appended (or was given), or None."""
        tokens, sampling = self.request.tokens, self.ask.sampling
        if self.broken:
            return "error"
        if self.emitted and tokens[-1] in self.ends:
            return "stop"
        guide = None if self.adjustment is None else self.adjustment.guide
        if guide is not None and guide.complete:
            return "error" if guide.error else "stop"
        if self.emitted >= sampling.max_tokens or len(tokens) >= self.tokens_max:
            return "length"
        return "moved" if self.ask.hand_over and self.emitted > len(self.ask.emitted) // 4 else None


def begin(key: RequestKey, ask: Generate, bounds: Bounds) -> Generation | str:
    """A generation, or what is wrong with the request, in words for the client."""
    if not ask.prompt or len(ask.prompt) % 4 or len(ask.emitted) % 4:
        return "the prompt is empty; it needs at least one token"
    wrong = check_sampling(ask.sampling)
    if not 0 <= ask.waited_s < WAITED_S_MAX:
        wrong = f"waited_s is {ask.waited_s}; it must lie between 0 and {WAITED_S_MAX:.0f}"
    if wrong:
        return wrong
    tokens = np.frombuffer(ask.prompt + ask.emitted, dtype="<u4")
    named = (*ask.sampling.logit_bias, *ask.sampling.stop_token_ids)
    prompt_tokens, highest = len(ask.prompt) // 4, max((int(tokens.max()), *named))
    if min(named, default=0) < 0:
        return f"token id {min(named)} is out of range; ids begin at 0"
    if highest >= bounds.vocab_size:
        return f"token id {highest} is out of range; the model's vocabulary has {bounds.vocab_size} tokens"
    if prompt_tokens >= bounds.tokens_max:
        return _too_long(prompt_tokens, bounds)
    fresh = ask.sampling.prompt_logprobs is not None
    most = min(prompt_tokens + ask.sampling.max_tokens, bounds.tokens_max)
    request = Request(key, tokens.tolist(), prompt_tokens, ask.priority, fresh, most=most)
    return Generation(key, ask, request, bounds.tokens_max, bounds.eos_ids)


def ends_of(sampling: Sampling, eos_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end an answer: the model's, unless they are ignored, and the request's own."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)


def _too_long(length: int, bounds: Bounds) -> str:
    if bounds.capacity < bounds.max_context:
        return (
            f"the prompt has {length} tokens; this worker's block pool holds {bounds.capacity}, prompt and output "
            "together (shorten it, or start the worker with more device memory)"
        )
    return f"the prompt has {length} tokens; the model's context is {bounds.max_context}, prompt and output together"
