"""Messages between a front end and a worker, over the worker's unix socket.

A request's state is its tokens: the front end sends the prompt and whatever was emitted already, so any
worker can go on with any request. `attempt` numbers the tries; output of a dead attempt is dropped.
"""

from __future__ import annotations

from typing import Literal, Union

import msgspec

from forebay.ipc.framing import Codec

WORKER_PROTOCOL_VERSION = 3

FinishReason = Literal["stop", "length", "cancelled", "error", "moved"]
"""`moved`: nothing is wrong, and the store has all that was computed; another worker is to go on."""

BUSY = "busy"
"""The whole error of a request that a full queue has no room for: a front end makes 429 of it."""
LEAVING = "leaving"
"""The whole error of a request that a draining worker doesn't take: a front end asks another one."""


NO_NUMBER = "the model's answer is no number"
"""The beginning of the error of a request whose logits overflowed, which is nobody's fault but the model's."""


class WorkerMessage(
    msgspec.Struct, frozen=True, tag=True, tag_field="type", forbid_unknown_fields=True, kw_only=True
):
    """Base of all messages: a map with `type` first."""


class Sampling(msgspec.Struct, frozen=True):
    """How to choose tokens. Randomness is a function of (seed, choice, position) alone, so that a successor
    draws what its predecessor would have drawn. `top_k` 0 and `top_p` 1 mean no limit; `logprobs` is how many
    alternatives to report for each token (None: not even the chosen one's), `prompt_logprobs` the same for the
    prompt's. Bias, penalties and `grammar` (llguidance's JSON form) change logits first, as `adjusting.py` says;
    `stop_token_ids` end an answer as the model's own do, also under `ignore_eos`."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: list[int] = []
    grammar: str = ""
    prompt_logprobs: int | None = None


class Generate(WorkerMessage, frozen=True):
    """Run one choice. `prompt` and `emitted` are u32 LE token ids; emitted ones are fed, never resampled,
    and count towards `max_tokens`. `salt` roots the cache chain; `tenant` goes into chunk headers. With `retain_s`
    the store keeps the request's chunks so long, within the tenant's budget. With `settled` the end is told only when
    the store has answered for every chunk of the request: somebody else will ask for them next. Of two that wait the
    one with the smaller `priority` goes first, unless the other has waited longer by enough; `waited_s` is how long it
    has been under way already, at a worker that is gone. With `hand_over` it is `moved` with its first new token, once
    the store has its KV: another worker decodes."""

    id: str
    attempt: int
    prompt: bytes
    sampling: Sampling
    emitted: bytes = b""
    salt: bytes = b""
    tenant: str = ""
    retain_s: float = 0.0
    settled: bool = False
    priority: int = 0
    waited_s: float = 0.0
    hand_over: bool = False


class Cancel(WorkerMessage, frozen=True):
    """Stop a request; its blocks are freed and its tail is stored. Answered by Finished if it still ran: `cancelled`
    at once, or with `move` `moved`, when the store has answered for all of it."""

    id: str
    attempt: int
    move: bool = False


class Drain(WorkerMessage, frozen=True):
    """Take no new requests (`on`), or take them again. Every front end hears it with the next `Alive`, at once."""

    on: bool


class Leave(WorkerMessage, frozen=True):
    """End, as SIGTERM ends a worker."""


class Describe(WorkerMessage, frozen=True):
    """Ask what the worker is. Answered by Description."""


class GetWorkerStats(WorkerMessage, frozen=True):
    """Answered by WorkerStats."""


class Started(WorkerMessage, frozen=True):
    """The prompt's cached prefix is known. `cached` says where its tokens came from: device, host, or a
    tier's name; their sum is `cached_tokens`."""

    id: str
    attempt: int
    cached_tokens: int
    cached: dict[str, int]


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """One new token of one request. `index` counts from 0 over all output, emitted ones included."""

    id: str
    attempt: int
    index: int
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """How likely one token of a prompt was: its logprob, its rank (1: the likeliest), and the likeliest ones."""

    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class PromptScores(WorkerMessage, frozen=True):
    """Scores of the prompt's tokens from position `start` on; the first token has none. What was told before may be
    told again."""

    id: str
    attempt: int
    start: int
    scores: list[TokenScore]


class Outputs(WorkerMessage, frozen=True):
    """What one step produced, for all requests of this front end."""

    tokens: list[TokenOut]


class Finished(WorkerMessage, frozen=True):
    """A request ended. `error` carries a message for the client."""

    id: str
    attempt: int
    reason: FinishReason
    error: str = ""


class Description(WorkerMessage, frozen=True):
    """`namespace` is the canonical encoding; `store` is `connected`, `down` or `none`; `boot` is new with
    every start of the process. `guided` workers take grammars, `draining` ones nothing new."""

    boot: str
    pid: int
    model: str
    vocab_size: int
    max_context: int
    eos_ids: list[int]
    namespace: bytes
    store: str
    guided: bool = False
    draining: bool = False
    version: int = WORKER_PROTOCOL_VERSION


class WorkerStats(WorkerMessage, frozen=True):
    """Counters and gauges by dotted name."""

    values: dict[str, float]
    store: str


class Alive(WorkerMessage, frozen=True):
    """Heartbeat, four times a second, sent from beside the engine's thread. `step_s` is how long the present step
    has been running (0 when idle): a long one is no hang. `stalled_s` is how long that thread has had work and not
    got on with it, as `pulse.py` defines it."""

    boot: str
    step_s: float
    stalled_s: float = 0.0
    draining: bool = False


ToWorker = Union[Generate, Cancel, Describe, GetWorkerStats, Drain, Leave]
FromWorker = Union[Started, PromptScores, Outputs, Finished, Description, WorkerStats, Alive]

TO_WORKER: Codec[ToWorker] = Codec(ToWorker)
FROM_WORKER: Codec[FromWorker] = Codec(FromWorker)
