"""Request bodies: parsed by type, then checked by value. Every refusal names the field and what it takes."""

from __future__ import annotations

import math
import secrets
from typing import Any, TypeVar

import msgspec

from forebay.workers.api.errors import ApiError, bad
from forebay.workers.protocol import Sampling

MAX_N = 16
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_PROMPTS = 64
SEED_BITS = 63

B = TypeVar("B")


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool = False


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat share. Fields that change nothing here are accepted and ignored."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None
    return_token_ids: bool = False
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class CompletionBody(Common, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. `content` is text, or parts of type `text`."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(Common, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """`POST /tokenize`."""

    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct, frozen=True):
    """`POST /detokenize`."""

    tokens: list[int]


def parse(data: bytes, kind: type[B]) -> B:
    """A body of this type. Raises ApiError 400."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise bad(f"the body can't be used: {error}") from error


def stops_of(body: Common) -> list[str]:
    """Stop strings, checked."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise bad(f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return stops


def choices_of(body: Common) -> int:
    """`n`, checked."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_N:
        raise bad(f"n is {n}; it takes 1 to {MAX_N}", "n")
    return n


def sampling_of(body: Common, *, max_tokens: int | None, default_tokens: int, logprobs: int | None) -> Sampling:
    """Sampling of choice 0. The seed is drawn here if the request has none, so that a successor of a dead
    worker draws the same tokens."""
    _refuse_unsupported(body)
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    top_k = 0 if body.top_k in (None, -1) else body.top_k
    _within("temperature", temperature, 0, 100)
    _within("top_p", top_p, 0, 1)
    if top_p == 0:
        raise bad("top_p is 0; it takes more than 0 and at most 1", "top_p")
    assert top_k is not None
    _within("top_k", top_k, 0, 1 << 30)
    if logprobs is not None:
        _within("logprobs", logprobs, 0, MAX_TOP_LOGPROBS)
    wanted = default_tokens if max_tokens is None else max_tokens
    if wanted < 1:
        raise bad(f"max_tokens is {wanted}; it takes at least 1", "max_tokens")
    if body.seed is not None:
        _within("seed", body.seed, -(2**63), 2**63 - 1)
    seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed % 2**SEED_BITS
    return Sampling(
        max_tokens=wanted, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
        ignore_eos=body.ignore_eos, logprobs=logprobs,
    )  # fmt: skip


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise bad(f"{name} is {value}; it takes {low} to {high}", name)


def _refuse_unsupported(body: Common) -> None:
    """What would change the answer and isn't implemented is refused, not ignored."""
    if body.presence_penalty or body.frequency_penalty:
        raise bad("presence_penalty and frequency_penalty aren't supported; leave them out", "presence_penalty")
    if body.logit_bias:
        raise bad("logit_bias isn't supported; leave it out", "logit_bias")


def refuse_completion(body: CompletionBody) -> None:
    """Completion fields that would change the answer and aren't implemented."""
    if body.echo:
        raise bad("echo isn't supported; prepend the prompt yourself", "echo")
    if body.suffix:
        raise bad("suffix isn't supported: these models don't fill in the middle", "suffix")
    if body.best_of not in (None, 1) and body.best_of != body.n:
        raise bad("best_of isn't supported; use n", "best_of")


def refuse_chat(body: ChatBody) -> None:
    """Chat fields that would change the answer and aren't implemented."""
    if body.tools:
        raise bad("tools aren't supported", "tools")
    if body.response_format and body.response_format.get("type", "text") != "text":
        raise bad("response_format takes only text", "response_format")


def prompts_of(body: CompletionBody) -> list[str] | list[list[int]]:
    """The prompts, as texts or as token ids, one or more. Raises ApiError 400."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad("prompt is empty; it takes text, token ids, or a list of either", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > MAX_PROMPTS:
        raise bad(f"prompt has {len(prompt)} entries; it takes up to {MAX_PROMPTS}", "prompt")
    return prompt  # type: ignore[return-value]


def too_large(limit: int) -> ApiError:
    """413."""
    return ApiError(413, f"the body is over {limit >> 20} MiB; send less", code="body_too_large")
