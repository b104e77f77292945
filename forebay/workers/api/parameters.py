"""From a body's fields to the worker's sampling parameters; every value is checked here, and refused by name."""

from __future__ import annotations

import secrets
from typing import Any

from forebay.workers.api.bodies import MAX_TOP_LOGPROBS, Common, within
from forebay.workers.api.errors import bad
from forebay.workers.protocol import Sampling
from forebay.workers.sampling import BIAS_MAX, BIASED_MAX, REPETITION_MAX, REPETITION_MIN, STOP_IDS_MAX

SEED_BITS = 63
PRIORITY_MAX = 100


def sampling_of(
    body: Common, *, wanted: int | None, default_tokens: int, logprobs: int | None, vocab: int, grammar: str = ""
) -> Sampling:
    """Sampling of choice 0. The seed is drawn here if the request has none, so that a successor of a dead
    worker draws the same tokens. Raises ApiError 400."""
    if wanted is not None and not 1 <= wanted < 1 << 31:
        raise bad(f"max_tokens is {wanted}; it takes at least 1, and no more than the context holds", "max_tokens")
    if body.seed is not None:
        within("seed", body.seed, -(2**63), 2**63 - 1)
    max_tokens = default_tokens if wanted is None else wanted
    return Sampling(
        max_tokens=max_tokens, seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed % 2**SEED_BITS,
        ignore_eos=body.ignore_eos, logprobs=_count("logprobs", logprobs), grammar=grammar,
        prompt_logprobs=_prompt_logprobs(body), stop_token_ids=_stop_ids(body, vocab),
        **_distribution(body), **_adjustments(body, max_tokens, vocab),
    )  # fmt: skip


def priority_of(body: Common, tenant: str) -> int:
    """Who goes first; smaller goes first. Where several tenants share a server none may go before the others."""
    priority = body.priority or 0
    within("priority", priority, 0 if tenant else -PRIORITY_MAX, PRIORITY_MAX)
    return priority


def _distribution(body: Common) -> dict[str, Any]:
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    top_k = 0 if body.top_k is None or body.top_k == -1 else body.top_k
    min_p = 0.0 if body.min_p is None else body.min_p
    within("temperature", temperature, 0, 100)
    within("top_p", top_p, 0, 1)
    if top_p == 0:
        raise bad("top_p is 0; it takes more than 0 and at most 1", "top_p")
    within("top_k", top_k, 0, 1 << 30)
    within("min_p", min_p, 0, 1)
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}


def _adjustments(body: Common, max_tokens: int, vocab: int) -> dict[str, Any]:
    presence, frequency = body.presence_penalty or 0.0, body.frequency_penalty or 0.0
    repetition = 1.0 if body.repetition_penalty is None else body.repetition_penalty
    least = body.min_tokens or 0
    within("presence_penalty", presence, -2, 2)
    within("frequency_penalty", frequency, -2, 2)
    within("repetition_penalty", repetition, REPETITION_MIN, REPETITION_MAX)
    within("min_tokens", least, 0, max_tokens)
    return {
        "presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition,
        "min_tokens": least, "logit_bias": _bias(body, vocab),
    }  # fmt: skip


def _bias(body: Common, vocab: int) -> dict[int, float]:
    given = body.logit_bias or {}
    if len(given) > BIASED_MAX:
        raise bad(f"logit_bias has {len(given)} tokens; it takes up to {BIASED_MAX}", "logit_bias")
    bias: dict[int, float] = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 11 and int(name) < vocab):
            raise bad(f"logit_bias names {name[:40]!r}; it takes token ids from 0 to {vocab - 1}", "logit_bias")
        within("logit_bias", value, -BIAS_MAX, BIAS_MAX)
        bias[int(name)] = value
    return bias


def _stop_ids(body: Common, vocab: int) -> list[int]:
    ids = body.stop_token_ids or []
    if len(ids) > STOP_IDS_MAX or max(ids, default=0) >= vocab:
        raise bad(f"stop_token_ids takes up to {STOP_IDS_MAX} ids from 0 to {vocab - 1}", "stop_token_ids")
    return ids


def _prompt_logprobs(body: Common) -> int | None:
    if body.prompt_logprobs is not None and body.stream:
        raise bad("prompt_logprobs takes stream: false: they are told with the whole answer", "prompt_logprobs")
    return _count("prompt_logprobs", body.prompt_logprobs)


def _count(name: str, wanted: int | None) -> int | None:
    if wanted is not None:
        within(name, wanted, 0, MAX_TOP_LOGPROBS)
    return wanted
