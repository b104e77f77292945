"""Request bodies: parsed by type, then checked by value. Every refusal names the field and what it takes.

A field that would change the answer and isn't supported is refused, unless it has the value that changes
nothing. A field that never changes the answer (`user`, `metadata`, ...) is taken and ignored. A field that
nobody has heard of is refused too: it may be a misspelt one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from forebay.tiers.p2p.transfer_params import TransferParams, read_params
from forebay.workers.api.errors import ApiError, bad

MAX_N = 16
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_SCORES = 1 << 18
"""Numbers that are told of one request's prompts: its tokens, times what is told of each."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_PROMPTS = 64
MAX_MESSAGES = 10_000
MAX_TOOLS = 128
CACHE_TTLS = {"5m": 300.0, "1h": 3600.0}
RETAIN_S_MAX = 7 * 86400

B = TypeVar("B")
T = TypeVar("T")
TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
Prompt = str | TokenIds

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    # What vllm-router and sglang-router put into every request.
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "return_hidden_states": (False,),
    "continue_final_message": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "include_reasoning": (True,),
}
"""Fields that aren't supported, and the values with which they change nothing."""


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool = False


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`cache_control`: keep what this request computes, for `ttl`."""

    type: str
    ttl: str = "5m"


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`structured_outputs`: what the answer must be, in one of these ways."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


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
    # What changes the logits, or who goes first.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    # Not supported: see NEUTRAL.
    no_stop_trim: Any = None
    skip_special_tokens: Any = None
    return_hidden_states: Any = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`. `prompt` is read by `prompts_of`: JSON alone tells which of its forms it has."""

    prompt: msgspec.Raw
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None
    best_of: int | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """What a message's tool call calls; `arguments` is a JSON text."""

    name: str
    arguments: str = "{}"


class CalledTool(msgspec.Struct, frozen=True):
    """A tool call in a message."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. `content` is text, or parts of type `text`; `tool_call_id` says which call a tool answers."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None


class Function(msgspec.Struct, frozen=True):
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool that a model may call."""

    type: str
    function: Function


class ChatBody(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    continue_final_message: Any = None
    separate_reasoning: Any = None
    stream_reasoning: Any = None
    include_reasoning: Any = None


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /tokenize`: a text, or messages that the chat template turns into one."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
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
    named = field or (where[1] if where and where[1] else missing[1] if missing else None)
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
    within("retain_s", seconds, 0, RETAIN_S_MAX)
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


def candidates_of(body: Common) -> int:
    """How many answers are generated for a prompt: `n`, or `best_of` of which the best n are told. Raises ApiError."""
    n, most = choices_of(body), body.best_of if isinstance(body, CompletionBody) else None
    if most is None or most == n:
        return n
    if not n <= most <= MAX_N:
        raise bad(f"best_of is {most}; it takes n ({n}) to {MAX_N}", "best_of")
    if body.stream:
        raise bad("best_of takes stream: false: which answers are the best is known at their end", "best_of")
    return most


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
        if value is None or value in neutral:
            continue
        raise bad(f"{name} isn't supported; leave it out", name)


def within(name: str, value: float, low: float, high: float) -> None:
    """Raise ApiError 400 for a number that does not lie there."""
    # NaN compares false with everything. An int may be too long to become a float, or to be printed.
    if not low <= value <= high:
        told = f"{value}" if isinstance(value, float) or value.bit_length() < 128 else "a number of many digits"
        raise bad(f"{name} is {told}; it takes {low} to {high}", name)


def chat_logprobs(body: ChatBody) -> int | None:
    """How many alternatives a token shows; None without `logprobs`. Raises ApiError 400."""
    if body.top_logprobs is not None:
        within("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not body.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def too_large(limit: int) -> ApiError:
    """413."""
    return ApiError(413, f"the body is over {limit >> 20} MiB; send less", code="body_too_large")
