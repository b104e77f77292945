"""Every operation's torch form on the CPU, beside torch's own attention, memory's bandwidth, or one large product.

    python -m benchmarks.kernels_cpu                        bf16, as many threads as torch takes
    OMP_NUM_THREADS=1 python -m benchmarks.kernels_cpu      where other processes take cores

Each operation and what it is held against take turns. `peer` is torch's fused attention over the same K and V, already
contiguous; `limit` is reading the same bytes (`sum` over them), or the FLOP/s of a product of 2048 squared.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.report import Measure, Report, parser
from forebay.kernels.attention import paged_attention
from forebay.kernels.batch import Batch, pack_batch
from forebay.kernels.cache import gather_granules, slot_rows, write_rows
from forebay.kernels.mla import latent_attention
from forebay.kernels.moe import Routing, mix_experts, route
from forebay.kernels.narrow import KvScales, narrow
from forebay.models.layers import RMSNorm
from forebay.models.rope import rotate

ROUNDS = 15
HEADS, KV_HEADS, DIM = 32, 8, 128
PRODUCT = 2048
DTYPE = torch.bfloat16

Run = Callable[[], object]


def main() -> int:
    """Measure all; exit code 1 if a target is missed."""
    args = parser(__doc__ or "").parse_args()
    report = Report(f"kernels on the CPU, {torch.get_num_threads()} threads, {DTYPE}")
    with torch.inference_mode():
        for batch, context in ((1, 4096), (8, 2048)):
            decode(report, batch, context)
        narrow_decode(report, 8, 2048)
        for rows, context in ((1024, 0), (512, 2048)):
            prefill(report, rows, context)
        latents(report)
        moving(report)
        rest_of_a_layer(report)
        experts(report)
    return report.print(args.json)


def in_turns(*runs: Run) -> list[float]:
    """The least seconds of each, one after the other in every round: what else runs can only add."""
    taken: list[list[float]] = [[] for _ in runs]
    for number in range(ROUNDS + 1):
        for run, found in zip(runs, taken, strict=True):
            begin = time.perf_counter()
            run()
            if number:
                found.append(time.perf_counter() - begin)
    return [min(found) for found in taken]


def noise(*shape: int) -> torch.Tensor:
    """Numbers of the model's dtype."""
    return torch.randn(shape, dtype=DTYPE)


def paged(sequences: list[tuple[int, int]]) -> tuple[Batch, int]:
    """A batch of (rows, context) whose blocks are permuted, and the number of blocks."""
    needed = [-(-(rows + context) // 16) for rows, context in sequences]
    order = torch.randperm(sum(needed)).split(needed)
    tables = [part.tolist() for part in order]
    return pack_batch([([0] * rows, context) for rows, context in sequences], {"g": tables}), sum(needed)


def reading(*tensors: torch.Tensor) -> Run:
    """Reads all bytes once."""
    words = [tensor.view(-1).view(torch.int64) for tensor in tensors]
    return lambda: [word.sum() for word in words]


def product_rate() -> float:
    """FLOP/s of one large product."""
    a, b = noise(PRODUCT, PRODUCT), noise(PRODUCT, PRODUCT)
    return 2 * PRODUCT**3 / in_turns(lambda: a @ b)[0]


def decode(report: Report, count: int, context: int) -> None:
    """`count` sequences of one new token each."""
    batch, blocks = paged([(1, context - 1)] * count)
    pool, q = noise(blocks, 1, 2, KV_HEADS, 16, DIM), noise(count, HEADS, DIM)
    k, v = noise(count, KV_HEADS, context, DIM), noise(count, KV_HEADS, context, DIM)
    asked = q.view(count, HEADS, 1, DIM)
    ours, peer, limit = in_turns(
        lambda: paged_attention(q, pool, 0, batch, "g", scale=0.1),
        lambda: F.scaled_dot_product_attention(asked, k, v, enable_gqa=True),
        reading(k, v),
    )
    size = (k.numel() + v.numel()) * k.element_size() / 1e9
    name = f"decode {count} x {context}"
    report.add(
        Measure(name, size / ours, "GB/s of KV", size / peer, size / limit, peer / ours, ">= 1 x SDPA", ours <= peer)
    )


def narrow_decode(report: Report, count: int, context: int) -> None:
    """The same with KV in FP8, beside it in bf16: half of the bytes are read, and each value is widened."""
    batch, blocks = paged([(1, context - 1)] * count)
    pool, q = noise(blocks, 1, 2, KV_HEADS, 16, DIM), noise(count, HEADS, DIM)
    scales = KvScales(torch.full((KV_HEADS,), 0.02), torch.full((KV_HEADS,), 0.02))
    small = narrow(pool, scales.k[:, None, None], torch.float8_e4m3fn)
    ours, wide = in_turns(
        lambda: paged_attention(q, small, 0, batch, "g", scale=0.1, scales=scales),
        lambda: paged_attention(q, pool, 0, batch, "g", scale=0.1),
    )
    tokens = count * context / 1e6
    report.add(
        Measure(f"decode {count} x {context}, FP8 KV", tokens / ours, "M tokens/s", tokens / wide, None, wide / ours)
    )


def prefill(report: Report, rows: int, context: int) -> None:
    """One chunk behind a context."""
    batch, blocks = paged([(rows, context)])
    pool, q = noise(blocks, 1, 2, KV_HEADS, 16, DIM), noise(rows, HEADS, DIM)
    total = rows + context
    k, v = noise(1, KV_HEADS, total, DIM), noise(1, KV_HEADS, total, DIM)
    asked = q.transpose(0, 1)[None].contiguous()
    mask = torch.ones(rows, total, dtype=torch.bool).tril(context) if context else None
    ours, peer = in_turns(
        lambda: paged_attention(q, pool, 0, batch, "g", scale=0.1),
        lambda: F.scaled_dot_product_attention(asked, k, v, mask, is_causal=mask is None, enable_gqa=True),
    )
    work = 4 * HEADS * DIM * (rows * context + rows * rows / 2) / 1e9
    name = f"prefill {rows} behind {context}"
    limit, good = product_rate() / 1e9, ours <= peer
    report.add(Measure(name, work / ours, "GFLOP/s", work / peer, limit, peer / ours, ">= 1 x SDPA", good))


def latents(report: Report) -> None:
    """Absorbed latent attention: decodes of 16 heads over rows of 576."""
    batch, blocks = paged([(1, 2047)] * 4)
    pool, q = noise(blocks, 1, 1, 1, 16, 576), noise(4, 16, 576)
    ours, limit = in_turns(
        lambda: latent_attention(q, pool, 0, batch, "g", scale=0.1, rank=512), reading(pool)
    )
    size = pool.numel() * pool.element_size() / 1e9
    report.add(Measure("latent decode 4 x 2048", size / ours, "GB/s of rows", None, size / limit, limit / ours))


def moving(report: Report) -> None:
    """Cache writes of a prefill, and granules out of the pool."""
    pool = noise(512, 4, 2, KV_HEADS, 16, DIM)
    slots = (torch.randperm(512)[:128, None] * 16 + torch.arange(16)).flatten()
    kv, rows = noise(2048, 2 * KV_HEADS, DIM), slot_rows(pool, slots)
    blocks = torch.randperm(512)[:128].tolist()
    out = torch.empty(128, pool[0].numel() * 2, dtype=torch.uint8)
    plain, target = pool[:128].clone(), torch.empty_like(pool[:128])
    small = kv.clone()
    write, write_limit, gather, gather_limit = in_turns(
        lambda: write_rows(pool, 1, rows, kv), lambda: small.copy_(kv),
        lambda: gather_granules(pool, blocks, out), lambda: target.copy_(plain),
    )  # fmt: skip
    for name, size, ours, limit in (
        ("cache write, 2048 rows", kv.numel() * 2, write, write_limit),
        ("gather 128 granules", out.numel(), gather, gather_limit),
    ):
        report.add(Measure(name, size / ours / 1e9, "GB/s", None, size / limit / 1e9, limit / ours))


def rest_of_a_layer(report: Report) -> None:
    """Norm and rotation of 512 rows."""
    hidden, norm = torch.randn(512, 4096), RMSNorm(torch.ones(4096), 1e-6)
    angles, q = torch.randn(512, 1, 64), torch.randn(512, HEADS, DIM)
    cos, sin = torch.cat((angles.cos(), angles.cos()), dim=-1), angles.sin()
    normed, norm_limit, turned, turn_limit = in_turns(
        lambda: norm(hidden), reading(hidden), lambda: rotate(q, cos, sin), reading(q)
    )
    for name, size, ours, limit in (
        ("norm, 512 x 4096", hidden.numel() * 4, normed, norm_limit),
        ("rotation, 512 x 32 heads", q.numel() * 4, turned, turn_limit),
    ):
        report.add(Measure(name, size / ours / 1e9, "GB/s", None, size / limit / 1e9, limit / ours))


def experts(report: Report) -> None:
    """Routing, and a layer of 32 experts: one token a decode (its experts' weights are read), and 512 at a time."""
    weights = [noise(1536, 1024) for _ in range(32)]
    routing = Routing(4, renormalise=True)
    rate = product_rate()
    for tokens in (1, 512):
        x, logits = noise(tokens, 1024), torch.randn(tokens, 32)
        routes = route(logits, routing)
        chosen = routes.experts.unique().tolist()
        ours, limit, routed = in_turns(
            lambda x=x, routes=routes: mix_experts(x, routes, 32, _expert(weights)),  # type: ignore[misc]
            reading(*(weights[index] for index in chosen)),
            lambda logits=logits: route(logits, routing),  # type: ignore[misc]
        )
        size, work = len(chosen) * weights[0].numel() * 2 / 1e9, 2 * tokens * 4 * weights[0].numel() / 1e9
        if tokens == 1:
            report.add(Measure("experts, 1 token", size / ours, "GB/s of weights", None, size / limit, limit / ours))
        else:
            share = work / ours / (rate / 1e9)
            report.add(Measure(f"experts, {tokens} tokens", work / ours, "GFLOP/s", None, rate / 1e9, share))
        report.add(Measure(f"routing, {tokens} tokens", routed * 1e6, "us"))


def _expert(weights: list[torch.Tensor]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """One product of 1024 by 1536, of which as much is kept as there was."""
    return lambda index, rows: (rows @ weights[index].T)[:, :1024]


if __name__ == "__main__":
    raise SystemExit(main())
