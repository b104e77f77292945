"""Each operation at small sizes against its definition, on a device: what has to hold before any figure counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels import choose, experts, hot, moe, norm, paged, rotary
from forebay.kernels.choose import Choices
from forebay.kernels.chosen import best_columns
from forebay.kernels.experts import Activation, Stack
from forebay.kernels.formats import as_fnuz
from forebay.kernels.gpu import attend, indexer, latent, move, sparse
from forebay.kernels.gpu import choose as gpu_choose
from forebay.kernels.gpu import experts as gpu_experts
from forebay.kernels.gpu import hot as gpu_hot
from forebay.kernels.gpu import norm as gpu_norm
from forebay.kernels.gpu import rotary as gpu_rotary
from forebay.kernels.gpu import route as gpu_route
from forebay.kernels.gpu.attend import Tiling
from forebay.kernels.gpu.experts import Sizes
from forebay.kernels.indexer import index_scores, write_keys
from forebay.kernels.moe import Routing
from forebay.kernels.moving import Pattern
from forebay.kernels.paged import Scores
from forebay.kernels.ragged import Ragged, ragged
from forebay.kernels.rotary import HeadNorms, Turn
from forebay.kernels.sparse import sparse_latent_attention_reference

WITHIN = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest value that there should be."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device, the dtype of the model on it, and whether its FP8 is the older AMD one."""

    device: torch.device
    dtype: torch.dtype
    fnuz: bool = False

    def noise(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """The same numbers on every device."""
        found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return found.to(dtype or self.dtype).to(self.device)


class Wrong(AssertionError):
    """A kernel's result isn't that of its definition."""


Check = Callable[[Place], None]
"""Raises Wrong."""


def close(found: Tensor, wanted: Tensor, place: Place) -> None:
    """Raises Wrong unless they are the same within what the dtype gives."""
    gap = (found.double().cpu() - wanted.double().cpu()).abs().max().item() if found.numel() else 0.0
    allowed = WITHIN[place.dtype] * max(1.0, wanted.double().abs().max().item())
    if not gap <= allowed:
        raise Wrong(f"off by {gap:.3g}, {allowed:.3g} at most")


def same(found: Tensor, wanted: Tensor) -> None:
    """Raises Wrong unless all values are equal."""
    if not torch.equal(found.cpu(), wanted.cpu()):
        raise Wrong("not the same values")


def _where(place: Place, sequences: list[tuple[int, int]]) -> Ragged:
    blocks = [-(-(rows + context) // 16) for rows, context in sequences]
    tables = torch.full((len(sequences), max(blocks)), -1, dtype=torch.int64)
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1)).split(blocks)
    for index, part in enumerate(order):
        tables[index, : len(part)] = part
    counts, contexts = zip(*sequences, strict=True)
    lengths = [rows + context for rows, context in sequences]
    return ragged(counts, contexts, lengths, tables.to(place.device))


def _host(where: Ragged) -> Ragged:
    columns = (where.starts.cpu(), where.contexts.cpu(), where.lengths.cpu(), where.tables.cpu())
    return Ragged(where.counts, *columns, where.causal)


def _on_host(scores: Scores) -> Scores:
    tensors = (scores.sinks, scores.k_scale, scores.v_scale)
    return Scores(scores.scale, scores.cap, scores.window, *(None if t is None else t.cpu() for t in tensors))


def check_attend(place: Place) -> None:
    """Prefill and decode, whole and split, with window, sinks and cap, and over FP8."""
    where = _where(place, [(5, 20), (1, 70), (1, 0)])
    q, pool = place.noise(7, 4, 32), place.noise(10, 2, 2, 2, 16, 32, seed=1)
    sinks = place.noise(4, dtype=torch.float32, seed=2)
    ones = torch.tensor([0.5, 2.0], device=place.device)
    stored = pool.to(torch.float8_e4m3fnuz if place.fnuz else torch.float8_e4m3fn)
    for tiling in (Tiling(rows=16, keys=32), Tiling(rows=16, keys=32, splits=2)):
        for kv, scores in (
            (pool, Scores(0.3)),
            (pool, Scores(0.3, cap=2.0, window=17, sinks=sinks)),
            (stored, Scores(0.3, k_scale=ones, v_scale=ones)),
        ):
            found = attend.attend(q, kv, 1, where, scores, tiling)
            wanted = paged.attend(q.cpu(), kv.cpu(), 1, _host(where), _on_host(scores))
            close(found.out, wanted.out, place)
            close(found.lse.values, wanted.lse.values, place)


def check_latent(place: Place) -> None:
    """Decodes, whole and split."""
    where = _where(place, [(1, 40), (2, 9)])
    q, pool = place.noise(3, 6, 96), place.noise(5, 2, 1, 1, 16, 96, seed=1)
    for splits in (1, 2):
        tiling = Tiling(rows=16, keys=16, splits=splits)
        found = latent.attend_latents(q, pool, 1, where, Scores(0.1), rank=64, tiling=tiling)
        wanted = paged.attend_latents(q.cpu(), pool.cpu(), 1, _host(where), Scores(0.1), rank=64)
        close(found.out, wanted.out, place)
        close(found.lse.values, wanted.lse.values, place)


def check_sparse(place: Place) -> None:
    """Rows that are there, some that aren't, and a query that has chosen none; whole and split."""
    q, pool = place.noise(3, 6, 96), place.noise(5, 2, 1, 1, 16, 96, seed=1)
    slots = torch.tensor([[70, 3, 17, 33, -1], [64, 1, 2, -1, -1], [-1] * 5], device=place.device)
    wanted = sparse_latent_attention_reference(q.cpu(), pool.cpu(), 1, slots.cpu(), scale=0.1, rank=64)
    for splits in (1, 2):
        tiling = Tiling(rows=16, keys=16, splits=splits)
        close(sparse.attend_chosen(q, pool, 1, slots, 0.1, rank=64, tiling=tiling).out, wanted, place)


def check_index(place: Place) -> None:
    """Scores of keys in both forms, and the best of them; values whose products are exact choose the same."""
    rng = torch.Generator().manual_seed(3)
    keys = torch.randint(-3, 4, (80, 16), generator=rng).float()
    q, weights = (torch.randint(-3, 4, shape, generator=rng).float() for shape in ((2, 3, 16), (2, 3)))
    tables, ends = torch.tensor([[4, 0, 2], [3, 1, -1]]), torch.tensor([40, 23])
    for scaled in (False, True):
        pool = torch.zeros(5, 2, 1, 1, 16, 20, dtype=torch.uint8) if scaled else torch.zeros(5, 2, 1, 1, 16, 16)
        write_keys(pool, 1, torch.arange(80), keys)
        at, sequences, seen = (side.to(place.device) for side in (tables, torch.arange(2), ends))
        there = pool.to(place.device) if scaled else pool.to(place.device, place.dtype)
        found = indexer.score_keys(
            q.to(place.device, torch.float32 if scaled else place.dtype), weights.to(place.device), there, 1, at,
            sequences, seen, 48,
        )  # fmt: skip
        for row, end in enumerate(ends.tolist()):
            mine = keys.view(5, 16, 16)[tables[row]].flatten(0, 1)[:end]
            close(found[row, :end], index_scores(q[row : row + 1], weights[row : row + 1], mine)[0], place)
        assert bool((found[0, 40:] == -math.inf).all())
        columns = indexer.pick_columns(found, 7)
        assert torch.equal(columns.cpu(), best_columns(found.cpu(), 7))


def check_move(place: Place) -> None:
    """Half of the heads of granules, there and back, to memory of the host and of the device."""
    heads = 2 * 16 * 8
    at = torch.arange(3, dtype=torch.int64)
    strides = (4 * heads, 2 * heads), (2 * heads, heads)
    pattern = Pattern(heads, (4, 2), *strides, at * 16 * heads, at.flip(0) * 8 * heads)
    buffers = torch.arange(24 * heads, device=place.device).to(torch.uint8)
    for device in {place.device, torch.device("cpu")}:
        payload = torch.zeros(48 * heads, dtype=torch.uint8, device=device)
        move.move(pattern, payload, buffers, store=True)
        back = torch.zeros_like(buffers)
        move.move(pattern, payload, back, store=False)
        same(back, buffers)
        same(payload.view(-1, 2, heads)[:, 1].any(), torch.tensor(False))


def check_hot(place: Place) -> None:
    """Hits, misses, rows of the device and one that is nowhere, over three steps; and a layer that shares the plan."""
    rng = torch.Generator().manual_seed(9)
    noise = torch.randint(0, 255, (20 * 2 * 16 * 48,), generator=rng).to(torch.uint8)
    pages = torch.randperm(24, generator=rng)
    first = torch.where(pages < 20, pages * (2 * 16 * 48), hot.NONE)
    resident = torch.tensor([[30, -1, -1, 31, -1, -1], [-1] * 6])
    host = torch.tensor([[-1, 2, 9, 4, 11, -1], [9, 11, 0, 7, 15, 3]])
    sides = []
    for device in (torch.device("cpu"), place.device):
        regions = hot.new_regions(2, 32, device)
        regions.blocks.copy_(torch.arange(4).view(2, 2))
        mirror = hot.Mirror(noise.to(device), first.to(device))
        sides.append((regions, mirror, torch.zeros(32, 2, 1, 1, 16, 24, dtype=torch.float16, device=device)))
    (wanted_in, known, wanted_pool), (found_in, mirror, pool) = sides
    for step in range(3):
        chosen = torch.stack([torch.randperm(96, generator=rng)[:12] for _ in range(2)]).view(2, 1, 12)
        chosen[0, 0, step] = hot.NONE
        ask = hot.Ask(chosen, torch.tensor([0, 1]), resident, host)
        wanted = hot.resolve(wanted_in, ask)
        there = hot.Ask(*(side.to(place.device) for side in (chosen, ask.regions, resident, host)))
        found = gpu_hot.resolve_and_copy(found_in, there, mirror, pool, 0)
        gpu_hot.replay(found, mirror, pool, 1)
        for layer in (0, 1):
            hot.copy_rows(wanted, known, wanted_pool, layer)
        for name in ("rows", "sources", "targets", "swaps", "cold"):
            same(getattr(found, name), getattr(wanted, name))
        same(found_in.held, wanted_in.held)
        same(found_in.order, wanted_in.order)
        same(pool.view(torch.int16), wanted_pool.view(torch.int16))


def check_norm(place: Place) -> None:
    """With a residual sum."""
    hidden, x = place.noise(3, 100, dtype=torch.float32), place.noise(3, 100, seed=1)
    weight = place.noise(100, dtype=torch.float32, seed=2)
    wanted = norm.add_norm(hidden.cpu().clone(), x.cpu(), weight.cpu(), 1e-6, torch.float32)
    close(gpu_norm.add_norm(hidden, x, weight, 1e-6, place.dtype), wanted, place)


def check_turn(place: Place) -> None:
    """Norms, rotation and write, of halves and of pairs."""
    for pairs in (False, True):
        angles = place.noise(4, 8, dtype=torch.float32, seed=3)
        turn = Turn(angles.cos(), angles.sin(), pairs)
        q, k = (place.noise(24, dtype=torch.float32, seed=seed) for seed in (4, 5))
        norms = HeadNorms(q, k, 1e-6)
        qkv, pool = place.noise(4, 7, 24), torch.zeros(3, 2, 2, 2, 16, 24, dtype=place.dtype, device=place.device)
        slots = torch.tensor([17, -1, 3, 47], device=place.device)
        host, host_pool = qkv.cpu().clone(), pool.cpu().clone()
        host_turn = Turn(turn.cos.cpu(), turn.sin.cpu(), pairs)
        host_norms = HeadNorms(norms.q.cpu(), norms.k.cpu(), norms.eps)
        rotary.norm_rotate_write(host, host_turn, host_norms, host_pool, 1, slots.cpu(), 3)
        gpu_rotary.norm_rotate_write(qkv, turn, norms, pool, 1, slots, 3)
        close(qkv[:, :3], host[:, :3], place)
        close(pool, host_pool, place)


def check_activate(place: Place) -> None:
    """Every kind."""
    gate_up = place.noise(3, 26) * 4
    for kind in gpu_experts.KINDS:
        act = Activation(kind)
        close(gpu_experts.activate(gate_up, act), act(gate_up.cpu().double()), place)


def check_choose(place: Place) -> None:
    """Greedy, whole and cut, with ties."""
    logits = torch.randint(-6, 7, (4, 150), generator=torch.Generator().manual_seed(0)) / 2.0
    exact = torch.tensor([[0.0, 1.0, 0.7, 1.3], [1.0, 1.0, 1.0, 0.6], [0.1, 0.4, 0.9, 0.6]], dtype=torch.float64)
    top_k = torch.tensor([0, 0, 9, 40], dtype=torch.int32)
    wanted = choose.choose(logits, Choices(exact[0], top_k, exact[1], exact[2]))
    on_device = Choices(exact[0].to(place.device), top_k.to(place.device), *(exact[i].to(place.device) for i in (1, 2)))
    same(gpu_choose.choose(logits.to(place.device), on_device, block=64), wanted)


def check_route(place: Place) -> None:
    """Group-limited with biases, and the sorted choices."""
    routing = Routing(3, "sigmoid", renormalise=True, scale=2.5, groups=4, kept_groups=2)
    logits, bias = place.noise(6, 16, dtype=torch.float32), place.noise(16, dtype=torch.float32, seed=1)
    found, wanted = gpu_route.route(logits, routing, bias), moe.route(logits.cpu(), routing, bias.cpu())
    same(found.experts, wanted.experts)
    close(found.weights, wanted.weights, place)
    order, wanted_order = gpu_route.sort_choices(found.experts, 16, 16), experts.sort_choices(wanted.experts, 16, 16)
    same(order.choices[: int(wanted_order.total)], wanted_order.choices)


def check_experts(place: Place) -> None:
    """A mixture in every format of weights."""
    x, act, sizes = place.noise(5, 64, seed=1) * 0.1, Activation(), Sizes(rows=16, columns=32, depth=32)
    routes = moe.route(place.noise(5, 4, dtype=torch.float32, seed=2).cpu(), Routing(2, renormalise=True))
    on_device = moe.Routes(routes.experts.to(place.device), routes.weights.to(place.device))
    for form in ("plain", "fp8", "mxfp4"):
        up, down = _stack(place, form, 64, 64), _stack(place, form, 64, 32)
        found = gpu_experts.mix(x, on_device, up, down, act, sizes)
        close(found, experts.mix(x.cpu(), routes, _host_stack(up), _host_stack(down), act), place)


def _host_stack(stack: Stack) -> Stack:
    return Stack(stack.values.cpu(), stack.form, None if stack.scales is None else stack.scales.cpu())


def _stack(place: Place, form: str, n: int, k: int) -> Stack:
    values = place.noise(4, n, k, seed=7, dtype=torch.float32) * 0.2
    if form == "plain":
        return Stack(values.to(place.dtype))
    if form == "fp8":
        scales = torch.full((4, 1, 1), 0.5, device=place.device)
        stored = values.to(torch.float8_e4m3fn)
        stored, scales = as_fnuz(stored, scales) if place.fnuz else (stored, scales)
        return Stack(stored, "fp8", scales)
    bits = (values.abs()[..., ::2] * 500).to(torch.uint8)
    return Stack(bits.contiguous(), "mxfp4", torch.full((4, n, k // 32), 122, dtype=torch.uint8, device=place.device))


CHECKS: dict[str, Check] = {
    "attend": check_attend,
    "latent": check_latent,
    "sparse": check_sparse,
    "index": check_index,
    "move": check_move,
    "hot": check_hot,
    "norm": check_norm,
    "turn": check_turn,
    "activate": check_activate,
    "choose": check_choose,
    "route": check_route,
    "experts": check_experts,
}
