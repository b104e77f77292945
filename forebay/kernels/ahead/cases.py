"""Every kernel at published sizes, launched on meta tensors: what `compile` builds and what the table has rows for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.ahead.record import Launch, recorded
from forebay.kernels.ahead.targets import Target
from forebay.kernels.choose import Choices
from forebay.kernels.experts import Activation, Stack
from forebay.kernels.formats import Scaled, scale_shape
from forebay.kernels.gpu import (
    attend,
    choose,
    experts,
    hot,
    indexer,
    latent,
    merge,
    move,
    norm,
    rotary,
    route,
    sparse,
)
from forebay.kernels.gpu.attend import Tiling
from forebay.kernels.gpu.experts import Sizes
from forebay.kernels.hot import Ask, Mirror, SwapPlan, new_regions
from forebay.kernels.lse import Lse
from forebay.kernels.moe import Routing
from forebay.kernels.moving import Pattern
from forebay.kernels.narrow import KvScales
from forebay.kernels.paged import Scores
from forebay.kernels.ragged import Ragged, ragged
from forebay.kernels.rotary import HeadNorms, Turn
from forebay.kernels.tuning.tables import as_sizes, entries

META = torch.device("meta")
BLOCKS = 2**20
"""Of a pool: enough that its offsets don't fit into 32 bits."""

Start = Callable[[Target, Any], None]
"""Launches a case's kernels, of the given sizes (None: there is nothing to choose), on meta tensors."""


@dataclass(frozen=True, slots=True)
class Case:
    """`kernel` at the sizes of `model`. `tuned` names the operation in the tuning tables, `kind` its sizes; entries for
    heads below `dim` aren't for this case."""

    kernel: str
    model: str
    start: Start
    tuned: str | None = None
    kind: type | None = None
    dim: int = 0
    only: Callable[[Target], bool] = lambda _: True

    def sizes(self, target: Target) -> list[Any]:
        """All that are shipped for the target."""
        if self.tuned is None or self.kind is None:
            return [None]
        fitting = [e for e in entries(target.name, self.tuned) if e.get("upto", {}).get("dim", self.dim) >= self.dim]
        return [as_sizes(entry, self.kind) for entry in fitting]

    def launch(self, target: Target, sizes: Any) -> Launch:
        """What is launched with these sizes."""
        with recorded() as launches:
            self.start(target, sizes)
        return next(launch for launch in launches if launch.name == self.kernel)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device=META)


def exact(*shape: int) -> Tensor:
    """The same in fp32."""
    return empty(*shape, dtype=torch.float32)


def fp8_of(target: Target) -> torch.dtype:
    """The target's own FP8."""
    return torch.float8_e4m3fnuz if target.fnuz else torch.float8_e4m3fn


def _batch(count: int, context: int) -> Ragged:
    tables = torch.empty(2, (context + count) // 16 + 1, dtype=torch.int64, device=META)
    return ragged([count, count], [context, context], [context + count] * 2, tables)


def _attend(heads: int, kv_heads: int, dim: int, count: int, *, fp8: bool = False, **rest: Any) -> Start:
    def start(target: Target, tiling: Tiling) -> None:
        dtype = fp8_of(target) if fp8 else torch.bfloat16
        pool = empty(BLOCKS, 4, 2, kv_heads, 16, dim, dtype=dtype)
        scale = exact(kv_heads) if fp8 else None
        sinks = exact(heads) if rest.get("sinks") else None
        scores = Scores(dim**-0.5, rest.get("cap"), rest.get("window"), sinks, scale, scale)
        attend.attend(empty(2 * count, heads, dim), pool, 3, _batch(count, 4095), scores, tiling)

    return start


def _latent(heads: int, *, fp8: bool = False) -> Start:
    def start(target: Target, tiling: Tiling) -> None:
        pool = empty(BLOCKS, 4, 1, 1, 16, 576, dtype=fp8_of(target) if fp8 else torch.bfloat16)
        scores = Scores(0.1, k_scale=exact(1) if fp8 else None)
        q = empty(2, heads, 576)
        latent.attend_latents(q, pool, 3, _batch(1, 4095), scores, rank=512, tiling=tiling)

    return start


def _sparse(heads: int) -> Start:
    def start(_: Target, tiling: Tiling) -> None:
        slots = torch.empty(8, 2048, dtype=torch.int64, device=META)
        pool = empty(BLOCKS, 78, 1, 1, 16, 576)
        sparse.attend_chosen(empty(8, heads, 576), pool, 3, slots, 0.1, rank=512, tiling=tiling)

    return start


def _score(heads: int, *, scaled: bool = False) -> Start:
    def start(_: Target, __: object) -> None:
        whole, rows, n = torch.int64, 8, 2**17
        pool = empty(BLOCKS, 21, 1, 1, 16, 132, dtype=torch.uint8) if scaled else empty(BLOCKS, 21, 1, 1, 16, 128)
        tables, column = empty(rows, n // 16, dtype=whole), empty(rows, dtype=whole)
        indexer.score_keys(empty(rows, heads, 128), exact(rows, heads), pool, 3, tables, column, column, n)

    return start


def _pick(_: Target, __: object) -> None:
    indexer.pick_columns(exact(8, 2**17), 2048)


def _products(count: int, n: int, k: int, form: str, *, both: bool = False) -> Start:
    def start(target: Target, sizes: Sizes) -> None:
        chosen = torch.empty(64, 4, dtype=torch.int64, device=META)
        order = route.sort_choices(chosen, count, sizes.rows)
        stack = _stack(target, count, n, k, form)
        x: Tensor | Scaled = empty(64, k)
        if both:
            mx = form == "mxfp4"
            scales = empty(64, k // 32, dtype=torch.uint8) if mx else exact(64, k // 128)
            x = Scaled(empty(64, k, dtype=fp8_of(target)), scales)
        experts.expert_products(x, stack, chosen, order, sizes, dtype=torch.bfloat16)

    return start


def _stack(target: Target, count: int, n: int, k: int, form: str) -> Stack:
    if form == "plain":
        return Stack(empty(count, n, k))
    if form == "fp8":
        scales = exact(count, *scale_shape((n, k), (128, 128)))
        return Stack(empty(count, n, k, dtype=fp8_of(target)), "fp8", scales)
    byte = torch.uint8
    bias = empty(count, n)
    return Stack(empty(count, n, k // 2, dtype=byte), "mxfp4", empty(count, n, k // 32, dtype=byte), bias)


def _move(_: Target, __: object) -> None:
    at = torch.arange(8, dtype=torch.int64) * 2**30
    heads = 4 * 16 * 128 * 2
    pattern = Pattern(heads, (32, 2), (4 * heads, 2 * heads), (2 * heads, heads), at, at)
    side = torch.empty(2**33, dtype=torch.uint8, device=META)
    move.move(pattern, side, side, store=True)


def _merge(_: Target, __: object) -> None:
    merge.merge(exact(16, 8, 32, 128), Lse(exact(16, 8, 32), "2"), torch.bfloat16)


def _norm(_: Target, __: object) -> None:
    norm.add_norm(exact(8, 4096), empty(8, 4096), exact(4096), 1e-6, torch.bfloat16)


def _turn() -> Turn:
    return Turn(exact(8, 64), exact(8, 64))


def _rope(_: Target, __: object) -> None:
    rotary.rotate_(empty(8, 32, 128), _turn())


def _write(target: Target, *, fp8: bool = False) -> None:
    norms = HeadNorms(exact(128), exact(128), 1e-6)
    slots = torch.empty(8, dtype=torch.int64, device=META)
    pool = empty(BLOCKS, 4, 2, 8, 16, 128, dtype=fp8_of(target) if fp8 else torch.bfloat16)
    scales = KvScales(exact(8), exact(8)) if fp8 else None
    rotary.norm_rotate_write(empty(8, 48, 128), _turn(), norms, pool, 3, slots, 32, scales)


def _write_plain(target: Target, _: object) -> None:
    _write(target)


def _write_fp8(target: Target, _: object) -> None:
    _write(target, fp8=True)


def _choose(_: Target, __: object) -> None:
    double = empty(8, dtype=torch.float64)
    choices = Choices(double, empty(8, dtype=torch.int32), double, double)
    choose.choose(exact(8, 151936), choices)


def _route(_: Target, __: object) -> None:
    routing = Routing(8, "sigmoid", renormalise=True, scale=2.5, groups=8, kept_groups=4)
    route.route(exact(8, 256), routing, exact(256))


def _sort(_: Target, __: object) -> None:
    route.sort_choices(torch.empty(64, 8, dtype=torch.int64, device=META), 256, 64)


def _activate(_: Target, __: object) -> None:
    experts.activate(empty(64, 5760), Activation("clamped"))


def _sum(_: Target, __: object) -> None:
    experts.sum_choices(exact(64, 2880), 4, torch.float32)


def _resolve(rows: int) -> Start:
    def start(_: Target, __: object) -> None:
        whole = torch.int64
        pages = torch.empty(8, 2**16, dtype=whole, device=META)
        ask = Ask(torch.empty(8, rows, 2048, dtype=whole, device=META), empty(8, dtype=whole), pages, pages)
        regions = new_regions(8, 2048 * (rows + 1), META)
        mirror = Mirror(empty(2**40, dtype=torch.uint8), empty(2**24, dtype=whole))
        hot.resolve_and_copy(regions, ask, mirror, empty(BLOCKS, 78, 1, 1, 16, 576), 3)

    return start


def _replay(_: Target, __: object) -> None:
    whole = torch.int64
    rows, sources, targets = (empty(8, 2048, dtype=whole) for _ in range(3))
    plan = SwapPlan(rows, sources, targets, empty(8, dtype=whole), empty(8, dtype=whole))
    mirror = Mirror(empty(2**40, dtype=torch.uint8), empty(2**24, dtype=whole))
    hot.replay(plan, mirror, empty(BLOCKS, 78, 1, 1, 16, 576), 3)


def _native(target: Target) -> bool:
    return target.native_mx


_GPT_OSS = _attend(64, 8, 64, 512, window=128, sinks=True)
_DEEPSEEK_FP8 = _products(256, 4096, 7168, "fp8", both=True)

CASES = (
    Case("move_kernel", "Llama 3 8B, half of the heads", _move),
    Case("merge_kernel", "Llama 3 8B, 16 splits", _merge),
    Case("attend_kernel", "prefill, Llama 3 8B", _attend(32, 8, 128, 512), "attend.prefill", Tiling, 128),
    Case("attend_kernel", "prefill, gpt-oss", _GPT_OSS, "attend.prefill", Tiling, 64),
    Case("attend_kernel", "prefill, Gemma 2 9B", _attend(16, 8, 256, 512, cap=50.0), "attend.prefill", Tiling, 256),
    Case("attend_kernel", "decode, Llama 3 8B", _attend(32, 8, 128, 1), "attend.decode", Tiling, 128),
    Case("attend_kernel", "decode, Llama 3 8B, FP8 KV", _attend(32, 8, 128, 1, fp8=True), "attend.decode", Tiling, 128),
    Case("latent_kernel", "DeepSeek V3", _latent(128), "latent.decode", Tiling),
    Case("latent_kernel", "DeepSeek V3, FP8 KV", _latent(128, fp8=True), "latent.decode", Tiling),
    Case("sparse_kernel", "GLM-5, 2048 rows", _sparse(64), "latent.decode", Tiling),
    Case("score_kernel", "DeepSeek V3.2", _score(64)),
    Case("score_kernel", "GLM-5, FP8 keys", _score(32, scaled=True)),
    Case("pick_kernel", "2048 of 131072", _pick),
    Case("add_norm_kernel", "Llama 3 8B", _norm),
    Case("turn_kernel", "rotation, Llama 3 8B", _rope),
    Case("turn_kernel", "norm, rotation, write, Qwen 3 8B", _write_plain),
    Case("turn_kernel", "norm, rotation, write, Qwen 3 8B, FP8 KV", _write_fp8),
    Case("choose_kernel", "Qwen 3", _choose),
    Case("route_kernel", "DeepSeek V3", _route),
    Case("count_kernel", "DeepSeek V3", _sort),
    Case("place_kernel", "DeepSeek V3", _sort),
    Case("products_kernel", "Qwen 3 30B A3B, bf16", _products(128, 1536, 2048, "plain"), "experts.plain", Sizes),
    Case("products_kernel", "DeepSeek V3, FP8 x FP8", _DEEPSEEK_FP8, "experts.fp8", Sizes),
    Case("products_kernel", "DeepSeek V3, bf16 x FP8", _products(256, 4096, 7168, "fp8"), "experts.fp8", Sizes),
    Case("products_kernel", "gpt-oss, MXFP4 unpacked", _products(32, 5760, 2880, "mxfp4"), "experts.mxfp4", Sizes),
    Case(
        "products_kernel", "gpt-oss, MXFP8 x MXFP4", _products(32, 5760, 2880, "mxfp4", both=True), "experts.mx",
        Sizes, only=_native,
    ),
    Case("resolve_kernel", "GLM-5, 2048 of 4096 rows", _resolve(1)),
    Case("resolve_kernel", "GLM-5, two rows a sequence", _resolve(2)),
    Case("replay_kernel", "GLM-5", _replay),
    Case("activate_kernel", "gpt-oss", _activate),
    Case("sum_kernel", "gpt-oss", _sum),
)  # fmt: skip


def cases_for(target: Target) -> Iterator[Case]:
    """Those that the target can run."""
    return (case for case in CASES if case.only(target))
