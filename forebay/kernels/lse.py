"""The log-sum-exp of attention scores, typed by its base, and the merge of attention over parts of the keys.

Kernels differ in whether they give the natural logarithm or that to base 2, and a merge with the wrong one is wrong by
a few percent only. So the base goes with the values, and who merges asks for the one that they need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Base = Literal["e", "2"]


@dataclass(frozen=True, slots=True, eq=False)
class Lse:
    """`values` [...], in fp32 or better: the logarithm to `base` of the sum of e^score; -inf where nothing was seen."""

    values: Tensor
    base: Base

    def to(self, base: Base) -> Lse:
        """The same to another base."""
        if base == self.base:
            return self
        return Lse(self.values * (math.log2(math.e) if base == "2" else math.log(2.0)), base)


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Attention over some of the keys: `out` [..., dim], normalised over these, and the `lse` [...] of their scores."""

    out: Tensor
    lse: Lse


def merge_parts(parts: Sequence[Partial]) -> Partial:
    """Attention over all keys from that over disjoint parts, in fp32 or better; the LSE to base e.

    A part whose LSE is -inf, +inf or no number has seen nothing: its output doesn't count, whatever it holds. Where no
    part has seen anything the result is 0 with an LSE of -inf.
    """
    found = torch.stack([part.lse.to("e").values for part in parts])
    seen = torch.where(found.isnan() | (found == math.inf), -math.inf, found)
    highest = seen.amax(dim=0)
    weights = (seen - highest.masked_fill(highest == -math.inf, 0.0)).exp()
    total = weights.sum(dim=0)
    outs = torch.stack([part.out.to(found.dtype) for part in parts])
    # Not by a product alone: 0 * nan is nan.
    outs = outs.masked_fill(weights[..., None] == 0, 0.0) * weights[..., None]
    out = outs.sum(dim=0) / total.masked_fill(total == 0, 1.0)[..., None]
    return Partial(out, Lse(highest + total.log(), "e"))
