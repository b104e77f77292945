"""Tokens that are chosen where the logits are: of those rows that need nothing but temperature, top-k and top-p.

Such a row comes back from the device as its token, any other one as its logits, which `sampling.py` takes. So it does
where the kernel doesn't run, and where a model has overflowed: then there is a reason to be told.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.kernels.choose import Choices
from forebay.kernels.dispatch import dispatch
from forebay.scheduler.plan import Work
from forebay.workers.adjusting import Logits
from forebay.workers.generation import Generation
from forebay.workers.sampling import uniform

Row = Logits | int
"""Logits [vocab] of a position, or the token that was chosen from them."""


def choose_rows(logits: Tensor, works: Sequence[Work], generations: Sequence[Generation]) -> list[Row]:
    """A row for each position that is scored or sampled, in order. `logits` [n, vocab]; `generations` are those of
    `works`. Blocks until they are computed."""
    plain = _plain(works, generations)
    due = sum(work.samples for work in works)
    if plain and dispatch().choose("choose", logits, logits) == "triton":
        dispatch().ran("choose", "torch", due - len(plain))
        return _mixed(logits, plain)
    dispatch().ran("choose", "torch", due - bool(plain))
    return list(logits.cpu().numpy())


def _plain(works: Sequence[Work], generations: Sequence[Generation]) -> dict[int, Generation]:
    """By row, those whose token the kernel can choose."""
    found, row = {}, 0
    for work, generation in zip(works, generations, strict=True):
        row += len(work.scored)
        if work.samples:
            sampling = generation.ask.sampling
            if generation.adjustment is None and sampling.logprobs is None and sampling.min_p == 0:
                found[row] = generation
            row += 1
    return found


def _mixed(logits: Tensor, plain: dict[int, Generation]) -> list[Row]:
    from forebay.kernels import forms

    rows = torch.tensor(list(plain), device=logits.device)
    mine = logits.index_select(0, rows)
    tokens = forms.choose(mine, _choices(list(plain.values()), logits.device)).tolist()
    sound = mine.amax(dim=1).isfinite().tolist()
    chosen = {row: token for row, token, good in zip(plain, tokens, sound, strict=True) if good}
    others = [row for row in range(len(logits)) if row not in chosen]
    told = logits.index_select(0, torch.tensor(others, dtype=torch.int64, device=logits.device)).cpu().numpy()
    whole: dict[int, Row] = chosen | dict(zip(others, told, strict=True))
    return [whole[row] for row in range(len(logits))]


def _choices(generations: Sequence[Generation], device: torch.device) -> Choices:
    asked = [generation.ask.sampling for generation in generations]
    drawn = [
        uniform(sampling.seed, sampling.choice, len(generation.request.tokens)) if sampling.temperature else 0.0
        for sampling, generation in zip(asked, generations, strict=True)
    ]

    def exact(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    return Choices(
        exact([sampling.temperature for sampling in asked]),
        torch.tensor([sampling.top_k for sampling in asked], dtype=torch.int32, device=device),
        exact([sampling.top_p for sampling in asked]), exact(drawn),
    )  # fmt: skip
