"""Choosing tokens. A choice depends on the logits, the parameters, (seed, choice, position) and, where penalties or
a grammar ask for it, the ids so far; on nothing else.

So a request gets the same answer in any batch, and a successor worker draws what its predecessor would have
drawn. All arithmetic on probabilities is float64, row by row: what else is in the batch can't change it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ForebayError
from forebay.workers.adjusting import Adjustment, Logits
from forebay.workers.guiding import GRAMMAR_CHARACTERS_MAX
from forebay.workers.protocol import NO_NUMBER, Sampling, TokenScore

Weights = NDArray[np.float64]
Tokens = NDArray[np.intp]

LOGPROBS_MAX = 20
BIAS_MAX = 100.0
REPETITION_MIN, REPETITION_MAX = 0.01, 100.0
"""Far smaller ones would make logits infinite."""
BIASED_MAX = 1024
STOP_IDS_MAX = 128
_NEGLIGIBLE = 45.0
"""exp(-45) is 3e-20: below what a float64 sum over any vocabulary can show."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token. `logprob` and `top` are of the raw distribution, before adjustments, temperature and cuts."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


class NoToken(ForebayError):
    """No token can be chosen from these logits."""


def check_sampling(sampling: Sampling) -> str | None:
    """Why these parameters can't be used, in words for the client, or None."""
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}; it must be at least 1"
    if not 0 <= sampling.temperature <= 100:
        return f"temperature is {sampling.temperature}; it must lie between 0 and 100"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}; it must be 0 (no limit) or more"
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= LOGPROBS_MAX:
            return f"{name} is {count}; it must lie between 0 and {LOGPROBS_MAX}"
    if sampling.choice < 0:
        return f"choice is {sampling.choice}; it must be 0 or more"
    return _check_adjustments(sampling)


def _check_adjustments(sampling: Sampling) -> str | None:
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}; it must lie between 0 and 1"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return f"min_tokens is {sampling.min_tokens}; it must lie between 0 and max_tokens ({sampling.max_tokens})"
    if not REPETITION_MIN <= sampling.repetition_penalty <= REPETITION_MAX:
        told = f"it must lie between {REPETITION_MIN} and {REPETITION_MAX:.0f}"
        return f"repetition_penalty is {sampling.repetition_penalty}; {told}"
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(sampling, name) <= 2:
            return f"{name} is {getattr(sampling, name)}; it must lie between -2 and 2"
    if len(sampling.logit_bias) > BIASED_MAX or not all(abs(b) <= BIAS_MAX for b in sampling.logit_bias.values()):
        return f"logit_bias takes up to {BIASED_MAX} token ids with a bias between -100 and 100"
    if len(sampling.stop_token_ids) > STOP_IDS_MAX:
        return f"stop_token_ids has {len(sampling.stop_token_ids)} ids; it takes up to {STOP_IDS_MAX}"
    if len(sampling.grammar) > GRAMMAR_CHARACTERS_MAX:
        return f"the grammar has {len(sampling.grammar)} characters; it takes up to {GRAMMAR_CHARACTERS_MAX}"
    return None


def sample(logits: Logits, sampling: Sampling, position: int, adjustment: Adjustment | None = None) -> Sampled:
    """Choose the token at `position` (counted over prompt and output) from one row of logits [vocab]. Raises NoToken if
    a model has overflowed."""
    adjusted = logits if adjustment is None else adjustment.apply(logits)
    if sampling.temperature == 0:
        token = int(np.argmax(adjusted))
        _finite(float(adjusted[token]))
    else:
        token = _draw(adjusted, sampling, uniform(sampling.seed, sampling.choice, position))
    if sampling.logprobs is None:
        return Sampled(token)
    return _with_logprobs(logits, token, sampling.logprobs)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that belongs to this seed, choice and position."""
    key = np.array([seed % 2**64, choice], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def _draw(logits: Logits, sampling: Sampling, u: float) -> int:
    """Inverse transform: one number, and the cumulated weights in the order of the token ids."""
    tokens, weights = candidates(logits, sampling)
    cumulated = np.cumsum(weights)
    at = int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))
    return int(tokens[min(at, len(tokens) - 1)])


def candidates(logits: Logits, sampling: Sampling) -> tuple[Tokens, Weights]:
    """What is drawn from, at a temperature above 0: token ids in ascending order, and what each weighs."""
    tokens, weights = _weights(logits, sampling.temperature)
    if sampling.min_p > 0:
        kept = weights >= sampling.min_p  # the heaviest weighs 1
        tokens, weights = tokens[kept], weights[kept]
    if 0 < sampling.top_k < len(tokens):
        tokens, weights = _top_k(tokens, weights, sampling.top_k)
    if sampling.top_p < 1:
        tokens, weights = _top_p(tokens, weights, sampling.top_p)
    return tokens, weights


def _weights(logits: Logits, temperature: float) -> tuple[Tokens, Weights]:
    """Tokens whose weight is not negligible, in ascending order, and their weights, the largest being 1."""
    highest = _finite(float(logits.max()))
    heavy = logits >= highest - _NEGLIGIBLE * temperature
    if 2 * int(np.count_nonzero(heavy)) > len(logits):  # then choosing costs more than it saves
        return np.arange(len(logits)), np.exp((logits.astype(np.float64) - highest) / temperature)
    tokens = np.flatnonzero(heavy)
    return tokens, np.exp((logits[tokens].astype(np.float64) - highest) / temperature)


def _finite(highest: float) -> float:
    """The highest logit of a row; of a row with NaN it is NaN."""
    if not math.isfinite(highest):
        raise NoToken(f"{NO_NUMBER} ({highest}): nothing can be chosen from it")
    return highest


def heaviest(values: Weights, count: int) -> Tokens:
    """Indices of the `count` largest values, largest first; of equals, those with the smaller index first."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= threshold)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _top_k(tokens: Tokens, weights: Weights, k: int) -> tuple[Tokens, Weights]:
    kept = np.sort(heaviest(weights, k))
    return tokens[kept], weights[kept]


def _top_p(tokens: Tokens, weights: Weights, p: float) -> tuple[Tokens, Weights]:
    """The fewest of the heaviest whose share is at least p; at least one."""
    wanted = p * float(weights.sum())
    for few in (256, 4096, len(weights)):  # a full sort is rarely needed, and costs ten times as much
        order = heaviest(weights, few)
        cumulated = np.cumsum(weights[order])
        if cumulated[-1] >= wanted or few >= len(weights):
            break
    count = int(np.searchsorted(cumulated, wanted, side="left")) + 1
    kept = np.sort(order[:count])
    return tokens[kept], weights[kept]


def _with_logprobs(logits: Logits, token: int, count: int) -> Sampled:
    wide = logits.astype(np.float64)
    highest = float(wide.max())
    total = highest + float(np.log(np.exp(wide - highest).sum()))
    best = heaviest(wide, count) if count else ()
    return Sampled(token, float(wide[token]) - total, [(int(i), float(wide[i]) - total) for i in best])


def score(logits: Logits, token: int, count: int) -> TokenScore:
    """How likely `token` was by this row, its rank among all (1: the likeliest), and the `count` likeliest. Raises
    NoToken if a model has overflowed."""
    _finite(float(logits.max()))
    told = _with_logprobs(logits, token, count)
    assert told.logprob is not None, token
    _finite(told.logprob)
    return TokenScore(told.logprob, 1 + int(np.count_nonzero(logits > logits[token])), told.top)
