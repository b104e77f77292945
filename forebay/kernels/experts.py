"""What the kernels of a mixture of experts compute, as plain torch: rows sorted by expert, products of each expert's
weights, activations, and the sum over a token's choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels.dispatch import dispatch
from forebay.kernels.formats import unpack_mxfp4, unscale_fp8
from forebay.kernels.moe import Routes, clamped_swiglu


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """The weights of all experts: `values` [experts, n, k] in any float dtype; FP8 with `scales` [experts, n / 128,
    k / 128], rounded up; or MXFP4: `values` uint8 [experts, n, k / 2], `scales` uint8 [experts, n, k / 32]. `bias`
    [experts, n] is added."""

    values: Tensor
    form: Literal["plain", "fp8", "mxfp4"] = "plain"
    scales: Tensor | None = None
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        """n."""
        return self.values.shape[1]

    @property
    def in_features(self) -> int:
        """k."""
        return self.values.shape[2] * (2 if self.form == "mxfp4" else 1)

    def plain(self, expert: int) -> Tensor:
        """One expert's matrix [n, k], in fp32 or its own dtype."""
        values = self.values[expert]
        if self.form == "plain":
            return values
        assert self.scales is not None
        if self.form == "fp8":
            return unscale_fp8(values, self.scales[expert], (128, 128))
        return unpack_mxfp4(values.unflatten(1, (-1, 16)), self.scales[expert])


@dataclass(frozen=True, slots=True, eq=False)
class Sorted:
    """Choices (token * top_k + rank) in the order of their experts, each expert's run padded to whole blocks.

    `choices` int32 [blocks * block]: the pad is the number of choices. `experts` int32 [blocks]. Only what lies before
    `total` int32 [1] means anything.
    """

    choices: Tensor
    experts: Tensor
    total: Tensor
    block: int


def sort_choices(chosen: Tensor, experts: int, block: int) -> Sorted:
    """`chosen` int64 [T, top_k], -1 for an expert that is elsewhere: in no block. Stable: choices ascend in a run."""
    flat = chosen.flatten()
    runs, owners = [], []
    for expert in range(experts):
        run = (flat == expert).nonzero().flatten()
        blocks = -(-len(run) // block)
        runs.append(F.pad(run, (0, blocks * block - len(run)), value=len(flat)))
        owners += [expert] * blocks
    choices = torch.cat(runs)
    return Sorted(choices.int(), torch.tensor(owners, dtype=torch.int32), torch.tensor([len(choices)]).int(), block)


def expert_products(x: Tensor, stack: Stack, chosen: Tensor, weights: Tensor | None = None) -> Tensor:
    """[T * top_k, n] in the dtype of `x`: for every choice its expert's weights times x, plus bias, and then times its
    weight of `weights` [T, top_k]. `x` is [T, k], or [T * top_k, k] with a row for each choice; zeros for -1."""
    flat = chosen.flatten()
    out = torch.zeros(len(flat), stack.out_features, dtype=torch.float64)
    share = len(flat) // max(len(x), 1)
    for choice, expert in enumerate(flat.tolist()):
        if expert < 0:
            continue
        row = stack.plain(expert).double() @ x[choice // share].double()
        if stack.bias is not None:
            row = row + stack.bias[expert].double()
        out[choice] = row if weights is None else row * weights.flatten()[choice].double()
    return out.to(x.dtype)


Kind = Literal["swiglu", "clamped", "situ", "geglu"]


@dataclass(frozen=True, slots=True)
class Activation:
    """"swiglu": silu(gate) * up, "geglu" the same with gelu, by tanh. "clamped": gpt-oss's, gate and up alternating.
    "situ": both sides bent by tanh, at `beta` and `linear`. Otherwise gate and up lie side by side."""

    kind: Kind = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0
    beta: float = 4.0
    linear: float = 25.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[n, i] from `gate_up` [n, 2i]."""
        if self.kind == "clamped":
            return clamped_swiglu(gate_up, alpha=self.alpha, limit=self.limit)
        gate, up = gate_up.chunk(2, dim=-1)
        if self.kind == "swiglu":
            return F.silu(gate).mul_(up)
        if self.kind == "geglu":
            return F.gelu(gate, approximate="tanh").mul_(up)
        bent = self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate)
        return bent * self.linear * torch.tanh(up / self.linear)


def activate(gate_up: Tensor, act: Activation) -> Tensor:
    """`act(gate_up)`, by torch or by the kernel, as `forebay.kernels.dispatch` says."""
    if dispatch().choose("activate", gate_up, gate_up) == "triton":
        from forebay.kernels import forms

        return forms.activate(gate_up, act)
    return act(gate_up)


def with_shared(routes: Routes, experts: int, shared: int, weight: float = 1.0) -> Routes:
    """Every token also goes to the `shared` experts that are appended to the stack, with `weight`."""
    tokens = routes.experts.shape[0]
    slots = torch.arange(experts, experts + shared, device=routes.experts.device).expand(tokens, shared)
    return Routes(
        torch.cat((routes.experts, slots), dim=1),
        torch.cat((routes.weights, routes.weights.new_full((tokens, shared), weight)), dim=1),
    )


def mix(x: Tensor, routes: Routes, up: Stack, down: Stack, act: Activation) -> Tensor:
    """A whole mixture: sum over a token's choices of weight * down(act(up(x))), in fp32. `x` [T, k]."""
    tokens, top_k = routes.experts.shape
    active = act(expert_products(x, up, routes.experts))
    given = expert_products(active.double(), down, routes.experts, routes.weights)
    return given.view(tokens, top_k, -1).sum(dim=1).float()
