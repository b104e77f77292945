"""Choosing tokens from rows of logits, as plain torch: the same rules as the workers' sampler, many rows at a time.

A row has one uniform number in [0, 1), drawn by its seed, choice and position, so a choice depends on nothing else.
Weights are fp64, cumulated in the order of the token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """One value a row [R]: `temperature` (0: the largest logit, the first of equal ones), `top_k` (0: all), `top_p`
    (1: all), `uniform` in [0, 1). fp64, `top_k` int32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


def choose(logits: Tensor, choices: Choices) -> Tensor:
    """Token ids int64 [R] for `logits` [R, vocab].

    Of the tokens, the `top_k` with the largest logits stay, of these the fewest whose share is at least `top_p`; of
    equal ones, those with the smaller id. Then the first one whose cumulated weight passes `uniform` of the total.
    """
    chosen = []
    for row in range(logits.shape[0]):
        scores = logits[row].double()
        temperature = float(choices.temperature[row])
        if temperature == 0:
            chosen.append(int((scores == scores.max()).nonzero()[0]))
            continue
        weights = ((scores - scores.max()) / temperature).exp()
        order = scores.sort(descending=True, stable=True).indices
        if int(choices.top_k[row]):
            order = order[: int(choices.top_k[row])]
        if float(choices.top_p[row]) < 1:
            cumulated = weights[order].cumsum(0)
            count = int(torch.searchsorted(cumulated, float(choices.top_p[row]) * cumulated[-1])) + 1
            order = order[:count]
        kept = order.sort().values
        cumulated = weights[kept].cumsum(0)
        at = int(torch.searchsorted(cumulated, float(choices.uniform[row]) * cumulated[-1], right=True))
        chosen.append(int(kept[min(at, len(kept) - 1)]))
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device)
