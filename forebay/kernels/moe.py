"""A mixture of experts: which experts a token goes to, and the weighted sum of what they give.

As torch operations that run on any device. Deterministic: equal scores go to the lower expert, tokens keep their order
inside of an expert, and a token's sum is taken in the order of its choices, never by atomic additions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Expert = Callable[[int, Tensor], Tensor]
"""What expert e gives for rows x [n, hidden]: [n, hidden]. n is never 0."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's `top_k` experts and their weights follow from its scores.

    `score`: "softmax" over all experts, "sigmoid" of each, or "top_softmax": of the chosen ones only.
    `renormalise` divides the weights by their sum, `scale` multiplies them after that. With `groups` > 1 the experts
    are as many equal groups, and only those of the best `kept_groups` can be chosen; a group is worth its best
    expert ("max") or its best two together ("top2").
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "top_softmax"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_worth: Literal["max", "top2"] = "top2"


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """`experts` int64 [T, top_k], best first, and their `weights` [T, top_k]."""

    experts: Tensor
    weights: Tensor


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> Routes:
    """Choose experts by `logits` [T, experts] (fp32 or fp64).

    `bias` [experts] takes part in the choice, not in the weights.
    """
    if routing.score == "softmax":
        scores = logits.softmax(dim=-1)
    elif routing.score == "sigmoid":
        scores = logits.sigmoid()
    else:
        scores = logits
    worth = scores if bias is None else scores + bias
    if routing.groups > 1:
        worth = _in_best_groups(worth, routing)
    # A stable sort, where topk may choose either of two equal ones.
    experts = worth.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, experts)
    if routing.score == "top_softmax":
        weights = weights.softmax(dim=-1)
    if routing.renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return Routes(experts, weights * routing.scale)


def _in_best_groups(worth: Tensor, routing: Routing) -> Tensor:
    """-inf, not zero, for experts of the other groups: a worth may be negative."""
    grouped = worth.unflatten(1, (routing.groups, -1))
    best = grouped.topk(1 if routing.group_worth == "max" else 2, dim=-1).values.sum(dim=-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.kept_groups]
    hidden = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(hidden[..., None], -torch.inf).flatten(1)


def mix_experts(x: Tensor, routes: Routes, experts: int, expert: Expert) -> Tensor:
    """sum_k weight_k * expert_k(x) for x [T, hidden], in the dtype of the weights; an expert of -1 gives nothing.

    Every expert that has tokens is called once, with all of its tokens. Blocks until it is known which have.
    """
    given = give_experts(x, routes.experts, experts, expert)
    return (given * routes.weights[..., None]).sum(dim=1)


def give_experts(x: Tensor, chosen: Tensor, experts: int, expert: Expert) -> Tensor:
    """[T, top_k, hidden]: what the experts `chosen` [T, top_k] of x [T, hidden] give, by themselves; zeros for -1.
    Tokens keep their order inside of an expert. Blocks as `mix_experts` does."""
    top_k, flat = chosen.shape[1], chosen.flatten()
    order = flat.argsort(stable=True)
    away, *counts = (flat + 1).bincount(minlength=experts + 1).tolist()
    order = order[away:]
    rows = x.index_select(0, order // top_k)
    parts = [expert(index, part) for index, part in enumerate(rows.split(counts)) if len(part)]
    given = torch.empty_like(rows) if not parts else torch.cat(parts)
    placed = given.new_zeros(len(flat), x.shape[1]) if away else torch.empty_like(given)
    return placed.index_copy_(0, order, given).view(-1, top_k, x.shape[1])


def clamped_swiglu(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """gpt-oss's activation: (up + 1) * gate * sigmoid(alpha * gate), gate and up alternating in `gate_up` [n, 2i],
    gate clamped from above and up from both sides."""
    gate = gate_up[..., ::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)
