"""Layers that the model families share: plain functions and prepared weights, for inference only.

Norms, rotations and residual sums are computed in fp32 (fp64 where the model runs in it); products of
matrices in the model's dtype. Each operation runs as torch's form or as the Triton kernel, as
`forebay.kernels.dispatch` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels.attention import paged_attention
from forebay.kernels.batch import Batch
from forebay.kernels.cache import slot_rows, write_rows
from forebay.kernels.dispatch import dispatch
from forebay.kernels.experts import Activation, activate
from forebay.kernels.narrow import KvScales
from forebay.kernels.partial import Stored
from forebay.kernels.products import multiply
from forebay.kernels.rotary import HeadNorms
from forebay.models.base import CausalLM, KVGroup, ModelInfo
from forebay.models.context import Context, DealtAttention
from forebay.models.prompts import SpreadBatch, everyones, kept_slots, results, spread_batch
from forebay.models.ranks import ALONE, Embedding, Ranks, held_group
from forebay.models.rope import Rope, rotate

PACK_ROWS = 16
"""Batch size that packed weights are laid out for. Measured: good from 1 row to 1,024."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What norms, angles and logits are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- products ------------------------------------------------------------------------------------------------


class Linear:
    """y = x @ weight.T + bias, for x [T, in].

    On the CPU the weight is packed once into the layout that oneDNN multiplies fastest: plain weights are
    unpacked again at every call, which makes a decode's step two to three times slower. Where it can't multiply bf16
    at all, see `forebay.kernels.products`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self._weight = _pack(weight) if self._packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            return _packed_linear(x, self._weight, self._bias)
        return multiply(x, self._weight, self._bias)


class SummedLinear(Linear):
    """A product of which each rank has the part of some columns: the sum of all parts, on every rank."""

    def __init__(self, weight: Tensor, bias: Tensor | None, ranks: Ranks) -> None:
        super().__init__(weight, bias)
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.sum(super().__call__(x))


class GatedMLP:
    """down(act(gate(x)) * up(x)), with act "silu" or "gelu_tanh". `gate_up` gives both, side by side."""

    def __init__(self, gate_up: Linear, down: Linear, act: Literal["silu", "gelu_tanh"]) -> None:
        self._gate_up, self._down = gate_up, down
        self._act = Activation("swiglu" if act == "silu" else "geglu")

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(activate(self._gate_up(x), self._act))


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
    """x / rms(x) * weight, computed in the accumulation dtype, in which `weight` is."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._number = weight, torch.full_like(weight[0], eps), eps

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The norm of x [T, n], of any dtype, in `dtype` (None: the accumulation dtype)."""
        weight = self._weight
        if self._by_kernel():
            return self._kernel(x.to(weight.dtype).contiguous(), None, dtype)
        return _cast(normalise(x.to(weight.dtype), self._eps).mul_(weight), dtype)

    def of_sum(self, hidden: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        """hidden += x, in place, and then the norm of `hidden`, which is in the accumulation dtype, in `dtype`."""
        if self._by_kernel():
            return self._kernel(hidden, x.contiguous(), dtype)
        return _cast(normalise(hidden.add_(x), self._eps).mul_(self._weight), dtype)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden += norm(x), in place."""
        if self._by_kernel():
            return hidden.add_(self._kernel(x.to(self._weight.dtype).contiguous(), None, None))
        return hidden.addcmul_(normalise(x.to(self._weight.dtype), self._eps), self._weight)

    def _by_kernel(self) -> bool:
        return dispatch().choose("norm", self._weight, self._weight) == "triton"

    def _kernel(self, hidden: Tensor, x: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        from forebay.kernels import forms

        return forms.add_norm(hidden, x, self._weight, self._number, dtype or self._weight.dtype)


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


# --- attention -----------------------------------------------------------------------------------------------


class HeadNorm:
    """RMS norm of every query and key head by itself."""

    def __init__(self, q: Tensor, k: Tensor, heads: int, kv_heads: int, eps: float) -> None:
        """`q` and `k` [head_dim] are the weights of all query heads and of all key heads."""
        self._weight = torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1)))
        self._eps = torch.full_like(q[0], eps)
        self.norms = HeadNorms(q.contiguous(), k.contiguous(), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads + kv_heads, head_dim], query heads first."""
        return normalise(x, self._eps).mul_(self._weight)


class WholeNorm:
    """One RMS norm over all query heads together, and one over all key heads, wherever they are."""

    def __init__(self, q: Tensor, k: Tensor, heads: int, eps: float, ranks: Ranks = ALONE) -> None:
        """`q` [heads * head_dim] and `k` [kv_heads * head_dim] are the weights of this rank's heads."""
        self._q, self._k, self._heads = q, k, heads
        self._eps = torch.full_like(q[0], eps)
        self._ranks = ranks
        # A sum over all ranks has every value as often as ranks hold it, and so has the count of values.
        counts = (len(q) * ranks.size, len(k) * ranks.size)
        self._parts = torch.tensor([1 / count for count in counts], dtype=q.dtype, device=q.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads + kv_heads, head_dim], query heads first."""
        q, k = x[:, : self._heads].flatten(1), x[:, self._heads :].flatten(1)
        if self._ranks.size == 1:
            both = (normalise(q, self._eps).mul_(self._q), normalise(k, self._eps).mul_(self._k))
            return torch.cat(both, dim=1).view(x.shape)
        squares = torch.stack(((q * q).sum(dim=-1), (k * k).sum(dim=-1)), dim=1)
        scales = self._ranks.sum(squares).mul_(self._parts).add_(self._eps).rsqrt_()
        return torch.cat((q * scales[:, :1] * self._q, k * scales[:, 1:] * self._k), dim=1).view(x.shape)


class Attention:
    """Projections, rotation, cache write and attention of one layer.

    `qkv` maps hidden to [q heads, k heads, v heads] in one product. `qk_norm` takes and gives the query and key heads.
    `sinks` [heads] are scores of a position without a value. `kv_scales` are of a pool in FP8. `context` are the ranks
    that share out its positions, None if each has all of them.
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
        qk_norm: Callable[[Tensor], Tensor] | None = None,
        sinks: Tensor | None = None,
        context: Context | None = None,
        kv_scales: KvScales | None = None,
    ) -> None:
        self._qkv, self._out = qkv, out
        self._heads, self._group = heads, group
        self._layer_in_group = group.layers.index(layer)
        stored = Stored(self._layer_in_group, scales=kv_scales)
        self._dealt = None if context is None else DealtAttention(context, group, stored, scale)
        self._rope, self._scale, self._qk_norm, self._sinks = rope, scale, qk_norm, sinks
        self._kv_scales = kv_scales

    def __call__(self, x: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden], or only the rows `keep`. Writes this layer's K and V into the pool."""
        group, heads = self._group, self._heads
        qkv, pool = self._qkv(x).view(x.shape[0], -1, group.head_dim), kv[group.name]
        if self._dealt is not None:
            self._turn(qkv, batch)
            dispatch().ran("turn", "torch")  # the kernel would write all positions
            return self._mix_dealt(self._dealt, qkv, pool, batch, keep, x)
        if not isinstance(batch, SpreadBatch) and dispatch().choose("turn", qkv, pool) == "triton":
            self._turn_by_kernel(qkv, batch, pool)
        else:
            self._turn(qkv, batch)
            rows = batch.once(("rows", group.name), lambda: slot_rows(pool, kept_slots(batch, group.name)))
            write_rows(pool, self._layer_in_group, rows, everyones(batch, qkv[:, heads:]), self._kv_scales)
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
            sinks=self._sinks,
            scales=self._kv_scales,
        )
        mixed = mixed.view(x.shape[0], -1)
        return self._out(mixed if keep is None else mixed.index_select(0, keep))

    def _mix_dealt(
        self, dealt: DealtAttention, qkv: Tensor, pool: Tensor, batch: Batch, keep: Tensor | None, x: Tensor
    ) -> Tensor:
        """The rest of a call where ranks share out positions."""
        rows = qkv[:, self._heads :]
        dealt.write(pool, batch, rows)
        if keep is not None and not len(keep):
            return x[:0]
        mixed = dealt.attend(qkv[:, : self._heads], rows, pool, batch, self._sinks).flatten(1)
        return self._out(mixed if keep is None else mixed.index_select(0, keep))

    def _turn(self, qkv: Tensor, batch: Batch) -> None:
        """Norm and rotate query and key heads in place: so K and V stay side by side for one write."""
        rotated, exact = self._heads + self._group.kv_heads, accumulate_dtype(qkv.dtype)
        turning = qkv[:, :rotated].to(exact)
        if self._qk_norm is not None:
            turning = self._qk_norm(turning)
        qkv[:, :rotated].copy_(rotate(turning, *self._rope.angles(batch, exact)))

    def _turn_by_kernel(self, qkv: Tensor, batch: Batch, pool: Tensor) -> None:
        """The same and the write in one launch."""
        from forebay.kernels import forms

        norms, heads = None, self._heads
        if isinstance(self._qk_norm, HeadNorm):
            norms = self._qk_norm.norms
        elif self._qk_norm is not None:  # over all heads together, and perhaps over ranks: not a program's own head
            rotated = qkv[:, : heads + self._group.kv_heads]
            rotated.copy_(self._qk_norm(rotated.to(torch.float32)))
        slots, layer = batch.groups[self._group.name].slots, self._layer_in_group
        forms.norm_rotate_write(qkv, self._rope.turn(batch), norms, pool, layer, slots, heads, self._kv_scales)


# --- the whole decoder ---------------------------------------------------------------------------------------


class Layer(Protocol):
    """One decoder layer. `hidden` [T, hidden_size] in the accumulation dtype is the layer's to overwrite.

    With `keep`, only these rows are wanted of the result (K and V of all are written all the same).
    """

    def __call__(self, hidden: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None) -> Tensor: ...


class Mixer(Protocol):
    """What mixes positions: `Attention`, or another that is called like it."""

    def __call__(self, x: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None = None) -> Tensor: ...


class PreNormLayer:
    """hidden + attention(norm(hidden)), and then the same with the MLP: what most families do."""

    def __init__(
        self,
        *,
        attention_norm: RMSNorm,
        attention: Mixer,
        mlp_norm: RMSNorm,
        mlp: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        self._attention_norm, self._attention = attention_norm, attention
        self._mlp_norm, self._mlp = mlp_norm, mlp
        self._dtype = dtype

    def __call__(self, hidden: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None) -> Tensor:
        mixed = self._attention(self._attention_norm(hidden, self._dtype), batch, kv, keep)
        hidden = hidden if keep is None else hidden.index_select(0, keep)
        if not len(hidden):
            return hidden
        return hidden.add_(self._mlp(self._mlp_norm.of_sum(hidden, mixed, self._dtype)))


class Decoder(CausalLM):
    """Embedding, layers, norm, head. `embed_scale` multiplies embeddings, `logit_cap` bends logits.

    With several `ranks` the head gives each its part of the vocabulary, and only the first one has logits at the end.
    """

    def __init__(
        self,
        info: ModelInfo,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        norm: RMSNorm,
        head: Linear,
        embed_scale: float = 1.0,
        logit_cap: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.info = info
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._ranks = ranks
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        self._embed_scale, self._logit_cap = embed_scale, logit_cap

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Mapping[str, Tensor]) -> Tensor:
        exact = accumulate_dtype(self.dtype)
        prompts = self._ranks.prompts
        if prompts is not None:
            batch = spread_batch(batch, prompts)
        hidden = self._embedding(batch.token_ids).to(exact)
        if self._embed_scale != 1.0:
            hidden.mul_(self._embed_scale)
        for layer in self._layers[:-1]:
            hidden = layer(hidden, batch, kv, None)
        hidden = self._layers[-1](hidden, batch, kv, batch.logits_rows)
        hidden = results(batch, hidden)
        if not len(hidden) or (prompts is not None and prompts.rank):
            return hidden.new_zeros(0, self.info.vocab_size)
        logits = self._gathered(self._head(self._norm(hidden, self.dtype))).to(exact)
        if self._logit_cap is not None:
            logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)
        return logits

    def held_groups(self) -> tuple[KVGroup, ...]:
        """See `CausalLM.held_groups`."""
        return tuple(held_group(group, self._ranks) for group in self.info.kv_groups)

    def _gathered(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary from those of each rank's part; on the other ranks none at all."""
        if self._ranks.size == 1:
            return logits
        vocab = self.info.vocab_size
        widest = -(-vocab // self._ranks.size)
        whole = self._ranks.gather(F.pad(logits, (0, widest - logits.shape[1])))
        return logits.new_empty(0, vocab) if whole is None else whole[:, :vocab].contiguous()
