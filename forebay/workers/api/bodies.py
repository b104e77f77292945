"""Request bodies: parsed by type, then checked by value. Every refusal names the field and what it takes.

A field that would change the answer and isn't supported is refused, unless it has the value that changes
nothing. A field that never changes the answer (`user`, `metadata`, ...) is taken and ignored. A field that
nobody has heard of is refused too: it may be a misspelt one.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, TypeVar

import msgspec

from forebay.tiers.p2p.transfer_params import TransferParams, read_params
from forebay.workers.api.errors import ApiError, bad
from forebay.workers.protocol import Sampling

MAX_N = 16
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_PROMPTS = 64
MAX_MESSAGES = 10_000
SEED_BITS = 63
CACHE_TTLS = {"5m": 300.0, "1h": 3600.0}
RETAIN_S_MAX = 7 * 86400

B = TypeVar("B")
T = TypeVar("T")
TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
Prompt = str | TokenIds

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
}
"""Fields that aren't supported, and the values with which they change nothing."""


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool = False


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`cache_control`: keep what this request computes, for `ttl`."""

    type: str
    ttl: str = "5m"


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None
    cache_control: CacheControl | None = None
    retain_s: float | None = None
    kv_transfer_params: Any = None
    return_token_ids: bool = False
    resume_token_ids: list[TokenIds] | None = None
    # Never change the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # See NEUTRAL.
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    min_tokens: Any = None
    logit_bias: Any = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`. `prompt` is read by `prompts_of`: JSON alone tells which of its forms it has."""

    prompt: msgspec.Raw
    logprobs: int | None = None
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. `content` is text, or parts of type `text`."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    reasoning_effort: Any = None


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /tokenize`: a text, or messages that the chat template turns into one."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    tokens: TokenIds
    model: str | None = None


def parse(data: bytes, kind: type[B]) -> B:
    """A body of this type. Raises ApiError 400 that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception, field: str | None = None) -> ApiError:
    told = str(error)
    unknown = re.search(r"unknown field `([^`]*)`", told)
    if unknown:
        return bad(f"unrecognised parameter {unknown[1]!r}; is it spelt right?", unknown[1])
    where = re.search(r"`\$\.?([^`\[.]*)", told)
    missing = re.search(r"required field `([^`]*)`", told)
    named = field or (missing[1] if missing else where[1] if where else None)
    return bad(f"{named or 'the body'} can't be used: {told}", named)


def prompts_of(body: CompletionBody) -> list[Prompt]:
    """The prompts, as texts or as token ids, one or more. Raises ApiError 400."""
    raw = bytes(body.prompt)
    inner = raw[1:].lstrip()[:1] if raw[:1] == b"[" else b""
    prompts: list[Prompt]
    if not inner:
        prompts = [_decode(raw, str)]
    elif inner == b'"':
        prompts = list(_decode(raw, list[str]))
    elif inner == b"[":
        prompts = list(_decode(raw, list[TokenIds]))
    else:
        prompts = [_decode(raw, TokenIds)]
    if len(prompts) > MAX_PROMPTS or not all(prompts):
        raise bad(f"prompt takes text or token ids, or 1 to {MAX_PROMPTS} of either; none may be empty", "prompt")
    return prompts


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(error, "prompt") from error


def stops_of(body: Common) -> list[str]:
    """Stop strings, checked."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise bad(f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return stops


def retention_of(body: Common) -> float:
    """For how many seconds the request's chunks are to be kept, 0 for no longer than others. Raises ApiError 400."""
    seconds = 0.0 if body.retain_s is None else body.retain_s
    _within("retain_s", seconds, 0, RETAIN_S_MAX)
    control = body.cache_control
    if control is not None:
        if control.type != "ephemeral" or control.ttl not in CACHE_TTLS:
            raise bad(f"cache_control takes type ephemeral and a ttl of {' or '.join(CACHE_TTLS)}", "cache_control")
        seconds = max(seconds, CACHE_TTLS[control.ttl])
    return seconds


def transfer_of(body: Common) -> TransferParams:
    """What an orchestrator says of the prompt's KV. Raises ApiError 400."""
    try:
        return read_params(body.kv_transfer_params)
    except ValueError as error:
        raise bad(str(error), "kv_transfer_params") from error


def choices_of(body: Common) -> int:
    """`n`, checked."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_N:
        raise bad(f"n is {n}; it takes 1 to {MAX_N}", "n")
    return n


def resumed_of(body: Common, choices: int, most: int) -> list[list[int]]:
    """What each choice has emitted elsewhere, before this request: the answer goes on after it. Raises ApiError 400."""
    if body.resume_token_ids is None:
        return [[] for _ in range(choices)]
    if not body.stream or len(body.resume_token_ids) != choices:
        raise bad("resume_token_ids takes a list of token ids for each choice, and stream: true", "resume_token_ids")
    if max(map(len, body.resume_token_ids)) > most:
        raise bad(f"resume_token_ids has more than max_tokens ({most})", "resume_token_ids")
    return body.resume_token_ids


def refuse_unsupported(body: Common) -> None:
    """Raise ApiError 400 for a field that would change the answer and isn't supported."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is None or value in neutral or (name == "best_of" and value == body.n):
            continue
        raise bad(f"{name} isn't supported; leave it out", name)


def sampling_of(body: Common, *, wanted: int | None, default_tokens: int, logprobs: int | None) -> Sampling:
    """Sampling of choice 0. The seed is drawn here if the request has none, so that a successor of a dead
    worker draws the same tokens."""
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    top_k = 0 if body.top_k is None or body.top_k == -1 else body.top_k
    _within("temperature", temperature, 0, 100)
    _within("top_p", top_p, 0, 1)
    if top_p == 0:
        raise bad("top_p is 0; it takes more than 0 and at most 1", "top_p")
    _within("top_k", top_k, 0, 1 << 30)
    if logprobs is not None:
        _within("logprobs", logprobs, 0, MAX_TOP_LOGPROBS)
    if wanted is not None and not 1 <= wanted < 1 << 31:
        raise bad(f"max_tokens is {wanted}; it takes at least 1, and no more than the context holds", "max_tokens")
    if body.seed is not None:
        _within("seed", body.seed, -(2**63), 2**63 - 1)
    return Sampling(
        max_tokens=default_tokens if wanted is None else wanted, temperature=temperature, top_p=top_p, top_k=top_k,
        seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed % 2**SEED_BITS,
        ignore_eos=body.ignore_eos, logprobs=logprobs,
    )  # fmt: skip


def _within(name: str, value: float, low: float, high: float) -> None:
    # NaN compares false with everything. An int may be too long to become a float, or to be printed.
    if not low <= value <= high:
        told = f"{value}" if isinstance(value, float) or value.bit_length() < 128 else "a number of many digits"
        raise bad(f"{name} is {told}; it takes {low} to {high}", name)


def chat_logprobs(body: ChatBody) -> int | None:
    """How many alternatives a token shows; None without `logprobs`. Raises ApiError 400."""
    if body.top_logprobs is not None:
        _within("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not body.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def texts_of(messages: list[ChatMessage] | None) -> list[dict[str, str]]:
    """Messages as a chat template takes them: role and text. Raises ApiError 400."""
    if not messages or len(messages) > MAX_MESSAGES:
        raise bad(f"messages has {len(messages or ())} entries; it takes 1 to {MAX_MESSAGES}", "messages")
    texts = []
    for number, message in enumerate(messages):
        if message.tool_calls or message.tool_call_id:
            raise bad(f"messages[{number}]: tools aren't supported", "messages")
        texts.append({"role": message.role, "content": _text_of(message.content, number)})
    return texts


def _text_of(content: str | list[dict[str, Any]] | None, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad(f"messages[{number}]: content takes text, or parts of type text", "messages")
        parts.append(part["text"])
    return "".join(parts)


def too_large(limit: int) -> ApiError:
    """413."""
    return ApiError(413, f"the body is over {limit >> 20} MiB; send less", code="body_too_large")
