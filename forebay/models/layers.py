"""Layers that the model families share: plain functions and prepared weights, for inference only.

Norms, rotations and residual sums are computed in fp32 (fp64 where the model runs in it); products of
matrices in the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels.attention import paged_attention
from forebay.kernels.batch import Batch
from forebay.kernels.cache import slot_rows, write_rows
from forebay.models.base import CausalLM, KVGroup, ModelInfo, RopeValue

PACK_ROWS = 16
"""Batch size that packed weights are laid out for. Measured: good from 1 row to 1,024."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What norms, angles and logits are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- products ------------------------------------------------------------------------------------------------


class Linear:
    """y = x @ weight.T + bias, for x [T, in].

    On the CPU the weight is packed once into the layout that oneDNN multiplies fastest: plain weights are
    unpacked again at every call, which makes a decode's step two to three times slower.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self._weight = _pack(weight) if self._packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            return _packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


class GatedMLP:
    """down(act(gate(x)) * up(x)), with act "silu" or "gelu_tanh". `gate_up` gives both, side by side."""

    def __init__(self, gate_up: Linear, down: Linear, act: Literal["silu", "gelu_tanh"]) -> None:
        self._gate_up, self._down, self._act = gate_up, down, act

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        active = F.silu(gate) if self._act == "silu" else F.gelu(gate, approximate="tanh")
        return self._down(active.mul_(up))


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU multiply with packed weights of `dtype`."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    try:
        weight = torch.eye(32, dtype=dtype)
        found = _packed_linear(weight, _pack(weight), None)
    except (RuntimeError, AttributeError):
        return False
    return torch.equal(found, weight)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    return packed


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


# --- norms ---------------------------------------------------------------------------------------------------


def normalise(x: Tensor, eps: Tensor) -> Tensor:
    """x / rms(x) along the last axis, a new tensor. `eps` [] has the dtype of `x`, fp32 or fp64."""
    squares = (x * x).sum(dim=-1, keepdim=True)
    return x * torch.add(eps, squares, alpha=1 / x.shape[-1]).rsqrt_()


class RMSNorm:
    """x / rms(x) * weight, from any dtype to the accumulation dtype. `weight` is in that dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, torch.full_like(weight[0], eps)

    def __call__(self, x: Tensor) -> Tensor:
        return normalise(x.to(self._weight.dtype), self._eps).mul_(self._weight)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden += norm(x), in place."""
        return hidden.addcmul_(normalise(x.to(self._weight.dtype), self._eps), self._weight)


# --- rotary positions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the slow frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Rope:
    """One set of rotary frequencies. `linear` divides all of them, `factors` each by its own."""

    theta: float
    dim: int
    linear: float = 1.0
    llama3: Llama3Scaling | None = None
    factors: tuple[float, ...] = ()

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[dim / 2], in radians a token."""
        steps = torch.arange(0, self.dim, 2, dtype=torch.int64).to(dtype) / self.dim
        frequencies = 1.0 / (self.theta**steps)
        if self.llama3 is not None:
            frequencies = _stretch(frequencies, self.llama3)
        if self.factors:
            frequencies = frequencies / torch.tensor(self.factors, dtype=dtype)
        return (frequencies / self.linear).to(device)

    def describe(self, name: str) -> dict[str, RopeValue]:
        """Everything that changes the rotated keys, as plain values under `name`."""
        found: dict[str, RopeValue] = {f"{name}.theta": self.theta, f"{name}.dim": self.dim}
        if self.linear != 1.0:
            found[f"{name}.linear"] = self.linear
        if self.llama3 is not None:
            found[f"{name}.llama3"] = repr(self.llama3)
        if self.factors:
            found[f"{name}.factors"] = repr(self.factors)
        return found

    def angles(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos [T, 1, dim] and sin [T, 1, dim / 2] of the batch's positions, once a batch."""
        return batch.once(("rope", self, dtype), lambda: self._angles(batch.positions, dtype))

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = torch.outer(positions.to(dtype), self.frequencies(dtype, positions.device))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((cos, cos), dim=-1), sin


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + dim / 2) of x [T, heads, dim], a new tensor of the same dtype."""
    out = x * cos
    (left, right), (out_left, out_right) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    out_left.addcmul_(right, sin, value=-1)
    out_right.addcmul_(left, sin)
    return out


# --- attention -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of every query and key head. `weight` [heads + kv_heads, head_dim]; `eps` []."""

    weight: Tensor
    eps: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, heads: int, kv_heads: int, eps: float) -> HeadNorm:
        """From the weights [head_dim] of all query heads and of all key heads."""
        weight = torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1)))
        return cls(weight, torch.full_like(q[0], eps))


class Attention:
    """Projections, rotation, cache write and attention of one layer.

    `qkv` maps hidden to [q heads, k heads, v heads] in one product.
    """

    def __init__(
        self,
        *,
        qkv: Linear,
        out: Linear,
        heads: int,
        group: KVGroup,
        layer: int,
        rope: Rope,
        scale: float,
        head_norm: HeadNorm | None = None,
    ) -> None:
        self._qkv, self._out = qkv, out
        self._heads, self._group = heads, group
        self._layer_in_group = group.layers.index(layer)
        self._rope, self._scale, self._head_norm = rope, scale, head_norm

    def __call__(self, x: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden], or only the rows `keep`. Writes this layer's K and V into the pool."""
        group, heads = self._group, self._heads
        rotated = heads + group.kv_heads
        qkv = self._qkv(x).view(x.shape[0], -1, group.head_dim)
        exact = accumulate_dtype(x.dtype)
        turning = qkv[:, :rotated].to(exact)
        if self._head_norm is not None:
            turning = normalise(turning, self._head_norm.eps).mul_(self._head_norm.weight)
        # In place of the unrotated vectors: so K and V stay side by side for one write.
        qkv[:, :rotated].copy_(rotate(turning, *self._rope.angles(batch, exact)))
        pool = kv[group.name]
        rows = batch.once(("rows", group.name), lambda: slot_rows(pool, batch.groups[group.name].slots))
        write_rows(pool, self._layer_in_group, rows, qkv[:, heads:])
        if keep is not None and not len(keep):
            return x[:0]
        mixed = paged_attention(
            qkv[:, :heads],
            pool,
            self._layer_in_group,
            batch,
            group.name,
            scale=self._scale,
            window=group.window,
        )
        mixed = mixed.view(x.shape[0], -1)
        return self._out(mixed if keep is None else mixed.index_select(0, keep))


# --- the whole decoder ---------------------------------------------------------------------------------------


class Layer(Protocol):
    """One decoder layer. `hidden` [T, hidden_size] in the accumulation dtype is the layer's to overwrite.

    With `keep`, only these rows are wanted of the result (K and V of all are written all the same).
    """

    def __call__(self, hidden: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None) -> Tensor: ...


class Decoder(CausalLM):
    """Embedding, layers, norm, head. `embed_scale` multiplies embeddings, `logit_cap` bends logits."""

    def __init__(
        self,
        info: ModelInfo,
        *,
        embedding: Tensor,
        layers: Sequence[Layer],
        norm: RMSNorm,
        head: Linear,
        embed_scale: float = 1.0,
        logit_cap: float | None = None,
    ) -> None:
        self.info = info
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        self._embed_scale, self._logit_cap = embed_scale, logit_cap

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Mapping[str, Tensor]) -> Tensor:
        exact = accumulate_dtype(self.dtype)
        hidden = F.embedding(batch.token_ids, self._embedding).to(exact)
        if self._embed_scale != 1.0:
            hidden.mul_(self._embed_scale)
        for layer in self._layers[:-1]:
            hidden = layer(hidden, batch, kv, None)
        hidden = self._layers[-1](hidden, batch, kv, batch.logits_rows)
        if not len(hidden):
            return hidden.new_zeros(0, self.info.vocab_size)
        logits = self._head(self._norm(hidden).to(self.dtype)).to(exact)
        if self._logit_cap is not None:
            logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)
        return logits
