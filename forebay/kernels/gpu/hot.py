"""The hot buffers' resolver and its copies, in one launch that waits for nobody's decision.

One program a sequence does what `forebay.kernels.hot.resolve` says, in this order: translate, look up, fill, reorder,
copy. What it compares, it compares in tiles of slots by tiles of rows, so nothing depends on which thread is first. Its
grid and all its buffers have sizes that don't depend on what is found, so a graph can capture it. `replay` copies for
another layer by the plan in device memory, with several programs a sequence; on a side stream it runs beside the layers
in between.

Host memory is read over the bus: it must be mapped for the device.
"""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.hot import Ask, Mirror, Regions, SwapPlan, as_words, empty_plan, row_sizes

PAGE = tl.constexpr(BLOCK_TOKENS)
TILE_ROWS, TILE_SLOTS, COPIED_ROWS, WORDS_AT_ONCE = 64, 128, 16, 128
PARTS = 8
"""Programs a sequence that carry out a plan in another layer."""


@triton.jit
def copy_some(
    memory, pages, pool, sources, targets, begin, step, swaps, layer, layers, known, limit,
    WORDS: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Rows begin, begin + step, ... of a plan, BR at a time, into one layer. In words; zeros from where nothing is."""
    for at in range(begin, swaps, step):
        r = at + tl.arange(0, BR)
        inside = r < swaps
        source = tl.load(sources + r, mask=inside, other=0)
        target = tl.load(targets + r, mask=inside, other=0)
        page = source // PAGE
        first = tl.load(pages + page, mask=inside & (page < known), other=-1)
        read = first + (layer * PAGE + source % PAGE) * WORDS
        there = inside & (first >= 0) & (read + WORDS <= limit)
        write = ((target // PAGE * layers + layer) * PAGE + target % PAGE) * WORDS
        for begin_word in range(0, WORDS, BW):
            w = begin_word + tl.arange(0, BW)
            some = w < WORDS
            values = tl.load(memory + read[:, None] + w[None, :], mask=there[:, None] & some[None, :], other=0)
            tl.store(pool + write[:, None] + w[None, :], values, mask=inside[:, None] & some[None, :])


@triton.jit
def translate(
    selected, resident, host, rows, ids, found, sources, targets, has_region, U: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    """What is resident gets its row, of the rest the host row is noted. Returns how many lack, and how many nobody
    has."""
    lacking, cold = 0, 0
    for at in range(0, U, BU):
        u = at + tl.arange(0, BU)
        inside = u < U
        position = tl.load(selected + u, mask=inside, other=-1)
        there = position >= 0
        page, offset = position // PAGE, position % PAGE
        block = tl.load(resident + page, mask=there, other=-1)
        away = there & (block < 0)
        host_page = tl.load(host + page, mask=away, other=-1)
        usable = away & (host_page >= 0) & has_region
        tl.store(rows + u, tl.where(there & (block >= 0), block * PAGE + offset, -1), mask=inside)
        tl.store(ids + u, tl.where(usable, host_page * PAGE + offset, -1), mask=inside)
        tl.store(found + u, tl.full((BU,), -1, tl.int32), mask=inside)
        tl.store(sources + u, tl.full((BU,), -1, tl.int64), mask=inside)
        tl.store(targets + u, tl.full((BU,), -1, tl.int64), mask=inside)
        lacking += tl.sum(usable.to(tl.int32), 0)
        cold += tl.sum(away.to(tl.int32) - usable.to(tl.int32), 0)
    return lacking, cold


@triton.jit
def look_up(
    held, order, ids, found, evictable, hits, U: tl.constexpr, SLOTS: tl.constexpr, BU: tl.constexpr, BS: tl.constexpr
):
    """Slots in their order, apart: those that hold a wanted row, and the others. Returns how many others there are."""
    old, hit_count = 0, 0
    for at in range(0, SLOTS, BS):
        s = at + tl.arange(0, BS)
        inside = s < SLOTS
        slot = tl.load(order + s, mask=inside, other=0).to(tl.int32)
        row = tl.load(held + slot, mask=inside, other=-1)
        hit = tl.zeros((BS,), tl.int32)
        for begin in range(0, U, BU):
            u = begin + tl.arange(0, BU)
            wanted = tl.load(ids + u, mask=u < U, other=-1)
            same = (row[:, None] == wanted[None, :]) & (wanted[None, :] >= 0)
            hit = tl.maximum(hit, tl.max(same.to(tl.int32), 1))
            where = tl.max(tl.where(same, slot[:, None] + 1, 0), 0)
            tl.store(found + u, where - 1, mask=where > 0)
        other = inside.to(tl.int32) - hit
        tl.store(hits + hit_count + tl.cumsum(hit, 0) - hit, slot, mask=hit > 0)
        tl.store(evictable + old + tl.cumsum(other, 0) - other, slot, mask=other > 0)
        hit_count += tl.sum(hit, 0)
        old += tl.sum(other, 0)
    return old


@triton.jit
def fill(
    held, blocks, ids, found, first, evictable, rows, sources, targets,
    U: tl.constexpr, UNION: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    """What no slot has takes the oldest slots, in the order in which it is asked for. Returns how many."""
    swaps = 0
    for at in range(0, U, BU):
        u = at + tl.arange(0, BU)
        wanted = tl.load(ids + u, mask=u < U, other=-1)
        earliest = u
        if UNION:
            for begin in range(0, at + BU, BU):
                v = begin + tl.arange(0, BU)
                other = tl.load(ids + v, mask=v < U, other=-1)
                same = (wanted[:, None] == other[None, :]) & (v[None, :] < u[:, None])
                earliest = tl.minimum(earliest, tl.min(tl.where(same, v[None, :], u[:, None]), 1))
            tl.store(first + u, earliest, mask=u < U)
        where = tl.load(found + u, mask=u < U, other=0)
        miss = ((wanted >= 0) & (where < 0) & (earliest == u)).to(tl.int32)
        rank = swaps + tl.cumsum(miss, 0) - miss
        slot = tl.load(evictable + rank, mask=miss > 0, other=0)
        row = tl.load(blocks + slot // PAGE, mask=miss > 0, other=0) * PAGE + slot % PAGE
        tl.store(held + slot, wanted, mask=miss > 0)
        tl.store(sources + rank, wanted, mask=miss > 0)
        tl.store(targets + rank, row, mask=miss > 0)
        tl.store(rows + u, row, mask=miss > 0)
        swaps += tl.sum(miss, 0)
    return swaps


@triton.jit
def tell(blocks, ids, found, first, rows, U: tl.constexpr, UNION: tl.constexpr, BU: tl.constexpr):
    """The rows of what was hit, and of what came up before in the same sequence."""
    for at in range(0, U, BU):
        u = at + tl.arange(0, BU)
        wanted = tl.load(ids + u, mask=u < U, other=-1)
        slot = tl.load(found + u, mask=u < U, other=-1)
        hit = (wanted >= 0) & (slot >= 0)
        block = tl.load(blocks + slot // PAGE, mask=hit, other=0)
        tl.store(rows + u, block * PAGE + slot % PAGE, mask=hit)
        if UNION:
            earliest = tl.load(first + u, mask=u < U, other=0)
            again = (wanted >= 0) & (slot < 0) & (earliest < u)
            tl.store(rows + u, tl.load(rows + earliest, mask=again, other=-1), mask=again)


@triton.jit
def reorder(order, evictable, hits, old, swaps, SLOTS: tl.constexpr, BS: tl.constexpr):
    """[ others that stay | filled, which were the oldest | hits ]"""
    for at in range(0, SLOTS, BS):
        s = at + tl.arange(0, BS)
        late = s >= old
        place = tl.where(s < old - swaps, s + swaps, s - (old - swaps))
        slot = tl.load(evictable + place, mask=(s < SLOTS) & (s < old), other=0)
        hit = tl.load(hits + s - old, mask=(s < SLOTS) & late, other=0)
        tl.store(order + s, tl.where(late, hit, slot).to(tl.int16), mask=s < SLOTS)


@triton.jit
def resolve_kernel(
    selected, regions, resident, host, held, order, blocks, rows, sources, targets, swaps_out, cold_out,
    ids, found, first, evictable, hits, memory, pages, pool, page_count, layer, layers, known, limit,
    U: tl.constexpr, SLOTS: tl.constexpr, UNION: tl.constexpr, WORDS: tl.constexpr,
    BU: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """selected [n, U] -> rows [n, U], sources and targets [n, U], swaps and cold [n]; held and order of each region as
    they are after the step. ids, found, first [n, U], evictable and hits [n, SLOTS] are scratch. One program a
    sequence. UNION: several of its rows may ask for the same."""
    i = tl.program_id(0).to(tl.int64)
    region = tl.load(regions + i)
    mine, at, table = i * U, region * SLOTS, region * (SLOTS // PAGE)
    lacking, cold = translate(
        selected + mine, resident + i * page_count, host + i * page_count, rows + mine, ids + mine, found + mine,
        sources + mine, targets + mine, region >= 0, U, BU,
    )  # fmt: skip
    tl.store(cold_out + i, cold)
    tl.store(swaps_out + i, 0)
    if lacking > 0:
        tl.debug_barrier()
        old = look_up(
            held + at, order + at, ids + mine, found + mine, evictable + i * SLOTS, hits + i * SLOTS, U, SLOTS, BU, BS
        )
        tl.debug_barrier()
        swaps = fill(
            held + at, blocks + table, ids + mine, found + mine, first + mine, evictable + i * SLOTS, rows + mine,
            sources + mine, targets + mine, U, UNION, BU,
        )  # fmt: skip
        tl.debug_barrier()
        tell(blocks + table, ids + mine, found + mine, first + mine, rows + mine, U, UNION, BU)
        reorder(order + at, evictable + i * SLOTS, hits + i * SLOTS, old, swaps, SLOTS, BS)
        copy_some(
            memory, pages, pool, sources + mine, targets + mine, 0, BR, swaps, layer, layers, known, limit,
            WORDS, BR, BW,
        )  # fmt: skip
        tl.store(swaps_out + i, swaps)


@triton.jit
def replay_kernel(
    sources, targets, swaps, memory, pages, pool, layer, layers, known, limit,
    U: tl.constexpr, WORDS: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """A plan [n, U], carried out in one layer. Programs (sequence, share of its rows)."""
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    copy_some(
        memory, pages, pool, sources + i * U, targets + i * U, part * BR, SHARES * BR, tl.load(swaps + i).to(tl.int32),
        layer, layers, known, limit, WORDS, BR, BW,
    )  # fmt: skip


def resolve_and_copy(
    regions: Regions, ask: Ask, mirror: Mirror, pool: Tensor, layer: int, plan: SwapPlan | None = None
) -> SwapPlan:
    """See `forebay.kernels.hot.resolve_and_copy`. Returns once it is queued on the current stream. With a `plan` the
    answer goes there, as a captured graph needs it. What is to be rejected isn't looked for here."""
    n, union = ask.selected.shape[0], ask.union
    plan = empty_plan(ask) if plan is None else plan
    assert regions.slots >= union, (regions.slots, union)
    scratch = ask.selected.new_empty((n, union))
    found, first = (torch.empty((n, union), dtype=torch.int32, device=scratch.device) for _ in range(2))
    evictable, hits = (torch.empty((n, regions.slots), dtype=torch.int32, device=scratch.device) for _ in range(2))
    sides = _sides(mirror, pool)
    resolve_kernel[(n,)](
        ask.selected.contiguous(), ask.regions, ask.resident, ask.host, regions.held, regions.order, regions.blocks,
        plan.rows, plan.sources, plan.targets, plan.swaps, plan.cold, scratch, found, first, evictable, hits,
        sides.memory, sides.pages, sides.pool, ask.resident.shape[1], layer, sides.layers, len(sides.pages),
        len(sides.memory), U=union, SLOTS=regions.slots, UNION=ask.selected.shape[1] > 1, WORDS=sides.words,
        BU=min(TILE_ROWS, triton.next_power_of_2(union)), BS=min(TILE_SLOTS, triton.next_power_of_2(regions.slots)),
        BR=COPIED_ROWS, BW=min(WORDS_AT_ONCE, triton.next_power_of_2(sides.words)), num_warps=8,
    )  # fmt: skip
    return plan


def replay(plan: SwapPlan, mirror: Mirror, pool: Tensor, layer: int) -> None:
    """See `forebay.kernels.hot.replay`. Returns once it is queued on the current stream."""
    sides = _sides(mirror, pool)
    replay_kernel[(plan.sources.shape[0], PARTS)](
        plan.sources, plan.targets, plan.swaps, sides.memory, sides.pages, sides.pool, layer, sides.layers,
        len(sides.pages), len(sides.memory), U=plan.sources.shape[1], WORDS=sides.words, BR=COPIED_ROWS,
        BW=min(WORDS_AT_ONCE, triton.next_power_of_2(sides.words)), SHARES=PARTS,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Sides:
    """Both sides of the copies in words; host pages by their first word."""

    memory: Tensor
    pages: Tensor
    pool: Tensor
    layers: int
    words: int


def _sides(mirror: Mirror, pool: Tensor) -> _Sides:
    sizes = row_sizes(pool)
    return _Sides(
        as_words(mirror.memory, sizes.word),
        torch.where(mirror.pages >= 0, mirror.pages // sizes.word, mirror.pages),
        as_words(pool.view(-1).view(torch.uint8), sizes.word),
        sizes.layers,
        sizes.row_bytes // sizes.word,
    )
