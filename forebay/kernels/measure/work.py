"""Operations at sizes that serving has, on a device: what `bench` measures and `tune` chooses sizes for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from forebay.kernels.experts import Stack
from forebay.kernels.gpu import attend, experts, latent, move, route
from forebay.kernels.gpu.attend import Tiling
from forebay.kernels.gpu.experts import Sizes
from forebay.kernels.measure.parity import Place
from forebay.kernels.measure.peers import Paged
from forebay.kernels.moving import Pattern
from forebay.kernels.paged import Scores
from forebay.kernels.ragged import Ragged, ragged

Limit = Literal["copy", "link", "product"]


@dataclass(frozen=True, slots=True)
class Work:
    """An operation: `run` queues it with given sizes (None: there are none to choose). `amount` is the bytes that it
    must move, or its FLOP; `limit` says which, and against which of the device's ceilings. `shape` is what a tuning
    table's limits are about. `target` is the share of the ceiling that is wanted. `paged`, of attention, is what other
    packages can be given, too; its result with given sizes."""

    name: str
    operation: str | None
    shape: dict[str, int]
    run: Callable[[Any], object]
    amount: int
    limit: Limit
    target: float
    kind: type | None = None
    paged: Callable[[Any], Paged] | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """Sequences, their context, tokens of a prefill, and heads; `experts` of a layer, and its width."""

    sequences: int = 64
    context: int = 8192
    prefill: int = 8192
    kv_heads: int = 8
    experts: int = 128
    hidden: int = 2048
    granules: int = 512


def works(place: Place, scale: Scale) -> list[Work]:
    """All of them, their tensors made on the device."""
    return [
        _decode(place, scale), _prefill(place, scale), _latent(place, scale), _experts(place, scale, 1),
        _experts(place, scale, 64), _move(place, scale, pinned=False), _move(place, scale, pinned=True),
    ]  # fmt: skip


def _batch(place: Place, count: int, rows: int, context: int) -> Ragged:
    blocks = -(-(context + rows) // 16)
    tables = torch.randperm(count * blocks).view(count, blocks).to(place.device)
    return ragged([rows] * count, [context] * count, [context + rows] * count, tables)


def _decode(place: Place, scale: Scale) -> Work:
    heads, dim = 4 * scale.kv_heads, 128
    where = _batch(place, scale.sequences, 1, scale.context - 1)
    pool = torch.empty(where.tables.numel(), 1, 2, scale.kv_heads, 16, dim, dtype=place.dtype, device=place.device)
    pool.normal_()
    q = torch.empty(scale.sequences, heads, dim, dtype=place.dtype, device=place.device).normal_()
    amount = 2 * scale.sequences * scale.context * scale.kv_heads * dim * pool.element_size()

    def run(tiling: Tiling) -> Tensor:
        return attend.attend(q, pool, 0, where, Scores(dim**-0.5), tiling).out

    def paged(tiling: Tiling) -> Paged:
        return Paged(q, pool, where, lambda: run(tiling))

    shape, name = {"dim": dim, "context": scale.context}, f"decode, {scale.sequences} x {scale.context}"
    return Work(name, "attend.decode", shape, run, amount, "copy", 0.8, Tiling, paged)


def _prefill(place: Place, scale: Scale) -> Work:
    heads, dim, rows = 4 * scale.kv_heads, 128, scale.prefill
    where = _batch(place, 1, rows, 0)
    pool = torch.empty(where.tables.numel(), 1, 2, scale.kv_heads, 16, dim, dtype=place.dtype, device=place.device)
    pool.normal_()
    q = torch.empty(rows, heads, dim, dtype=place.dtype, device=place.device).normal_()

    def run(tiling: Tiling) -> Tensor:
        return attend.attend(q, pool, 0, where, Scores(dim**-0.5), tiling).out

    def paged(tiling: Tiling) -> Paged:
        return Paged(q, pool, where, lambda: run(tiling))

    shape = {"dim": dim, "context": rows}
    amount = 2 * heads * dim * rows * rows  # two products, of which causality leaves half
    return Work(f"prefill, {rows}", "attend.prefill", shape, run, amount, "product", 0.45, Tiling, paged)


def _latent(place: Place, scale: Scale) -> Work:
    heads, width = 16 * scale.kv_heads, 576
    where = _batch(place, scale.sequences, 1, scale.context - 1)
    pool = torch.empty(where.tables.numel(), 1, 1, 1, 16, width, dtype=place.dtype, device=place.device).normal_()
    q = torch.empty(scale.sequences, heads, width, dtype=place.dtype, device=place.device).normal_()

    def run(tiling: Tiling) -> object:
        return latent.attend_latents(q, pool, 0, where, Scores(0.1), rank=512, tiling=tiling)

    amount = scale.sequences * scale.context * width * pool.element_size()
    shape = {"dim": width, "context": scale.context}
    name = f"latent decode, {scale.sequences} x {scale.context}"
    return Work(name, "latent.decode", shape, run, amount, "copy", 0.7, Tiling)


def _experts(place: Place, scale: Scale, each: int) -> Work:
    count, k, n, top_k = scale.experts, scale.hidden, 2 * scale.hidden, 8
    tokens = max(1, each * count // top_k)
    stack = Stack(torch.empty(count, n, k, dtype=place.dtype, device=place.device).normal_())
    x = torch.empty(tokens, k, dtype=place.dtype, device=place.device).normal_()
    scores = torch.rand(tokens, count, device=place.device)
    chosen = scores.topk(min(top_k, count), dim=1).indices
    touched = int(chosen.unique().numel())

    def run(sizes: Sizes) -> object:
        order = route.sort_choices(chosen, count, sizes.rows)
        return experts.expert_products(x, stack, chosen, order, sizes, dtype=place.dtype)

    decode = each == 1
    amount = touched * n * k * x.element_size() if decode else 2 * chosen.numel() * n * k
    name = f"experts, {tokens} tokens to {top_k} of {count}"
    limit: Limit = "copy" if decode else "product"
    return Work(name, "experts.plain", {"each": each}, run, amount, limit, 0.75 if decode else 0.35, Sizes)


def _move(place: Place, scale: Scale, *, pinned: bool) -> Work:
    """Half of the heads of granules of 32 layers: to device memory, or over the link."""
    heads = scale.kv_heads // 2 * 16 * 128 * 2
    layers = 32
    granule = layers * 2 * 2 * heads
    at = torch.arange(scale.granules, dtype=torch.int64)
    pattern = Pattern(
        heads, (layers, 2), (4 * heads, 2 * heads), (2 * heads, heads), at * granule,
        torch.randperm(scale.granules) * (granule // 2),
    )  # fmt: skip
    where = "cpu" if pinned else place.device
    pin = pinned and place.device.type == "cuda"
    payload = torch.empty(scale.granules * granule, dtype=torch.uint8, device=where, pin_memory=pin)
    buffers = torch.empty(scale.granules * granule // 2, dtype=torch.uint8, device=place.device)

    def run(_: object) -> None:
        move.move(pattern, payload, buffers, store=True)

    amount = len(buffers) if pinned else 2 * len(buffers)
    name = "move to pinned memory" if pinned else "move inside of the device"
    return Work(name, None, {}, run, amount, "link" if pinned else "copy", 0.85)
