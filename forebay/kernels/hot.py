"""Hot buffers: which rows of a sparse layer are where, and the rows that have to come from host memory.

A sparse layer reads K rows a step out of a long context. A request's *region* is a few blocks of the device pool that
hold the rows it has read last; the rest is in host memory, row by row at addresses that stay.

    selected    position  ->  page = position // 16
                    page is resident           row of that block                       (nothing is aged)
                    row is held by a slot      row of the slot                         *hit*
                    else                       the oldest slot that isn't a hit is filled   *miss*: one row is copied

    order of slots after a step      [ old ones, as they were | filled now | hit, as they were ]    oldest first

Hits rank behind what was filled: that is the policy, and not the one of a dictionary that appends what it reads.

A *host row* is `host page * 16 + offset`. The number of a host page says where a granule lies, not what is in it: when
one is given to other bytes, `forget_pages` must come before the next step. The same slots stand for a row in every
layer, so layers that share a selection share the plan, and only `copy_rows` is done again. Row numbers are int64: a
pool of a few million rows passes 2^31 values.

This page is the definition, in torch; `gpu/hot.py` is the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.dispatch import dispatch

NONE = -1
BLOCK_BITS, OFFSET = BLOCK_TOKENS.bit_length() - 1, BLOCK_TOKENS - 1
"""Shifts and masks take half as long as divisions."""
assert BLOCK_TOKENS == 1 << BLOCK_BITS

SLOTS_MAX = 32768
"""Of a region: the order is kept in 16 bits."""

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """All hot regions of a pool. `held` int64 [regions, slots]: the host row in a slot, or -1. `order` int16 [regions,
    slots]: slots, oldest first. `blocks` int64 [regions, slots / 16]: the device blocks whose rows the slots are."""

    held: Tensor
    order: Tensor
    blocks: Tensor

    @property
    def slots(self) -> int:
        """Of one region."""
        return self.held.shape[1]


def new_regions(count: int, slots: int, device: torch.device | None = None) -> Regions:
    """Empty regions, without blocks."""
    assert 0 < slots <= SLOTS_MAX and slots % BLOCK_TOKENS == 0, slots
    return Regions(
        torch.full((count, slots), NONE, dtype=torch.int64, device=device),
        torch.arange(slots, dtype=torch.int16, device=device).repeat(count, 1),
        torch.full((count, slots // BLOCK_TOKENS), NONE, dtype=torch.int64, device=device),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """What one layer reads in a step, for n sequences of q rows each.

    `selected` int64 [n, q, K]: positions, those of one row all different, -1 for none. `regions` int64 [n]: -1 for a
    sequence that has none, or is padding. `resident` int64 [n, pages]: the device block of each page, or -1. `host`
    int64 [n, pages]: its host page, or -1.
    """

    selected: Tensor
    regions: Tensor
    resident: Tensor
    host: Tensor

    @property
    def union(self) -> int:
        """The most rows that one sequence can need at once."""
        return self.selected.shape[1] * self.selected.shape[2]


@dataclass(frozen=True, slots=True, eq=False)
class SwapPlan:
    """Where the rows are, once `swaps` of them have been copied.

    `rows` int64 [n, q, K]: device row (block * 16 + offset) of each selected position, -1 for none. `sources` and
    `targets` int64 [n, q * K]: host row and device row of each copy, -1 behind the last. `swaps`, `cold` int64 [n]:
    copies, and positions that neither device nor host memory has: that sequence's result is void.
    """

    rows: Tensor
    sources: Tensor
    targets: Tensor
    swaps: Tensor
    cold: Tensor


def empty_plan(ask: Ask) -> SwapPlan:
    """Room for the answer to `ask`. A captured graph keeps it."""
    n, device = ask.selected.shape[0], ask.selected.device
    lists = [torch.full((n, ask.union), NONE, dtype=torch.int64, device=device) for _ in range(2)]
    counts = [torch.zeros(n, dtype=torch.int64, device=device) for _ in range(2)]
    return SwapPlan(torch.full_like(ask.selected, NONE), *lists, *counts)


@dataclass(frozen=True, slots=True, eq=False)
class Mirror:
    """Host memory that rows come from. `memory` uint8 [bytes]; `pages` int64 [host pages]: the first byte of each one's
    granule in it, -1 for none. A granule is [layers, 16, row]."""

    memory: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True)
class RowSizes:
    """How rows lie in a pool [blocks, layers, 1, 1, 16, width]."""

    layers: int
    row_bytes: int

    @property
    def word(self) -> int:
        """Bytes of the widest word that a row consists of."""
        return math.gcd(8, self.row_bytes)


def row_sizes(pool: Tensor) -> RowSizes:
    """Of a contiguous pool of latents."""
    _, layers, planes, heads, tokens, width = pool.shape
    assert planes == heads == 1 and tokens == BLOCK_TOKENS and pool.is_contiguous(), pool.shape
    return RowSizes(layers, width * pool.element_size())


def forget_pages(regions: Regions, pages: Tensor) -> None:
    """No slot holds rows of these host pages (int64 [n]) any more. Call it before they are given to other bytes."""
    stale = (regions.held >= 0) & torch.isin(regions.held // BLOCK_TOKENS, pages)
    regions.held.masked_fill_(stale, NONE)


def forget_region(regions: Regions, region: int) -> None:
    """A region is empty again, and its order the first one."""
    regions.held[region] = NONE
    regions.order[region] = torch.arange(regions.slots, dtype=torch.int16, device=regions.order.device)


def resolve(regions: Regions, ask: Ask) -> SwapPlan:
    """Find all selected rows, and make room for those that lack. Mutates `regions`. A sequence of which everything is
    resident leaves its region as it is. Raises ValueError for a position twice in one row, or more rows than slots."""
    plan = empty_plan(ask)
    for i, region in enumerate(ask.regions.tolist()):
        _resolve_one(regions, ask, plan, i, region)
    return plan


def _resolve_one(regions: Regions, ask: Ask, plan: SwapPlan, i: int, region: int) -> None:
    selected = ask.selected[i]
    position = selected.reshape(-1)
    there = position >= 0
    page, offset = position.clamp_min(0) >> BLOCK_BITS, position & OFFSET
    block = ask.resident[i].index_select(0, page)
    lacking, rows = (there & (block < 0)).nonzero()[:, 0], plan.rows[i].view(-1)
    nothing_here = len(lacking) == len(position)
    # If one row's host rows are all different, so are its positions.
    single = nothing_here and len(selected) == 1
    if not single:
        _check_distinct(selected)
    if not nothing_here:
        rows.copy_(((block << BLOCK_BITS) | offset).masked_fill_(block < 0, NONE).masked_fill_(~there, NONE))
        page, offset = page[lacking], offset[lacking]
    if not len(lacking):
        return
    host = ask.host[i].index_select(0, page)
    if region < 0:
        host.fill_(NONE)
    wanted, known = (host << BLOCK_BITS) | offset, host >= 0
    if not bool(known.all()):
        lacking, wanted, single = lacking[known], wanted[known], False
        plan.cold[i] = len(known) - len(wanted)
        _check_distinct(selected)
    if not len(wanted):
        return
    order = _in_order(wanted)
    if single and order.back is not None:
        _check_distinct(selected)
    slots = _find(regions, plan, i, region, order)
    rows[lacking] = _rows_of_slots(regions, region, slots if order.back is None else slots[order.back])


def _rows_of_slots(regions: Regions, region: int, slots: Tensor) -> Tensor:
    return (regions.blocks[region][slots >> BLOCK_BITS] << BLOCK_BITS) | (slots & OFFSET)


def _check_distinct(selected: Tensor) -> None:
    ordered = selected.sort(dim=1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise ValueError("a position is selected twice in one row")


def _find(regions: Regions, plan: SwapPlan, i: int, region: int, wanted: _Once) -> Tensor:
    """The slot of each of `wanted.ids`."""
    if len(wanted.ids) > regions.slots:
        raise ValueError(f"{len(wanted.ids)} rows at once don't fit into {regions.slots} slots")
    held, order = regions.held[region], regions.order[region]
    slots = order.to(torch.int64)
    holds = held[slots]
    nearest = torch.searchsorted(wanted.ordered, holds).clamp_max_(len(wanted.ordered) - 1)
    hit = wanted.ordered[nearest] == holds  # -1 is nobody's row
    evictable, hits = slots[~hit], slots[hit]
    found = torch.full_like(wanted.ids, NONE)
    found[wanted.place[nearest[hit]]] = hits
    missing = (found < 0).nonzero()[:, 0]
    count = len(missing)
    if count:
        filled, sources = evictable[:count], wanted.ids[missing]
        found[missing] = filled
        held[filled] = sources
        plan.swaps[i] = count
        plan.sources[i, :count] = sources
        plan.targets[i, :count] = _rows_of_slots(regions, region, filled)
    order.copy_(torch.cat((evictable[count:], evictable[:count], hits)))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Once:
    """Each id once, in the order of first appearance: `ids`. `back` is the place among these of every one there was,
    None where each is at its own. `ordered` are the ids sorted, `place` where each of these stands in `ids`."""

    ids: Tensor
    back: Tensor | None
    ordered: Tensor
    place: Tensor


def _in_order(ids: Tensor) -> _Once:
    ordered, place = ids.sort(stable=True)
    begins = ordered[1:] != ordered[:-1]
    if bool(begins.all()):  # as it is where a sequence has one row
        return _Once(ids, None, ordered, place)
    begins = torch.cat((begins.new_ones(1), begins))
    # The sort being stable, the first of equals stands where the id appears first.
    appears = torch.zeros_like(begins).index_fill_(0, place[begins], True)
    number = (appears.cumsum(0) - 1)[place[begins]]
    back = torch.empty_like(place)
    back[place] = number[begins.cumsum(0) - 1]
    return _Once(ids[appears], back, ordered[begins], number)


def copy_rows(plan: SwapPlan, mirror: Mirror, pool: Tensor, layer: int) -> None:
    """Carry out a plan in one layer: its own, or one that shares its selection. Mutates `pool`. A row of a page that
    has no place becomes zeros."""
    if len(plan.swaps) == 1:
        count = int(plan.swaps[0])
        sources, targets = plan.sources[0, :count], plan.targets[0, :count]
    else:
        chosen = plan.sources >= 0
        sources, targets = plan.sources[chosen], plan.targets[chosen]
    if len(sources):
        sizes = row_sizes(pool)
        rows = fetch_rows(mirror, sizes, sources, layer)
        at = ((targets >> BLOCK_BITS) * sizes.layers + layer << BLOCK_BITS) + (targets & OFFSET)
        as_words(pool.view(-1).view(torch.uint8), sizes.word).view(-1, rows.shape[1]).index_copy_(0, at, rows)


def fetch_rows(mirror: Mirror, sizes: RowSizes, sources: Tensor, layer: int) -> Tensor:
    """Rows of one layer, in words [n, words a row], out of host memory; zeros for pages that have no place."""
    words, count = as_words(mirror.memory, sizes.word), sizes.row_bytes // sizes.word
    first = mirror.pages[sources >> BLOCK_BITS]
    row = layer * BLOCK_TOKENS + (sources & OFFSET)
    at = (first + row * sizes.row_bytes) // sizes.word
    outside = (first < 0) | (at > len(words) - count)
    some_outside = bool(outside.any())
    if some_outside:
        at = at.masked_fill(outside, 0)
    # Every stretch of `count` words as a row of its own: rows begin at any word, and none is copied before it's chosen.
    stretches = words.as_strided((max(1, len(words) - count + 1), count), (1, 1))
    rows = stretches.index_select(0, at)
    return rows.masked_fill_(outside[:, None], 0) if some_outside else rows


def as_words(memory: Tensor, word: int) -> Tensor:
    """uint8 [bytes] as words. Bytes behind the last whole one aren't in it."""
    return memory[: len(memory) // word * word].view(WORDS[word])


def resolve_and_copy(regions: Regions, ask: Ask, mirror: Mirror, pool: Tensor, layer: int) -> SwapPlan:
    """Both, by whichever form dispatch chooses: the plan, carried out in `layer`. Mutates `regions` and `pool`."""
    if dispatch().choose("hot", ask.selected, regions.held) == "triton":
        from forebay.kernels.gpu import hot as gpu

        return gpu.resolve_and_copy(regions, ask, mirror, pool, layer)
    plan = resolve(regions, ask)
    copy_rows(plan, mirror, pool, layer)
    return plan


def replay(plan: SwapPlan, mirror: Mirror, pool: Tensor, layer: int) -> None:
    """`copy_rows` by whichever form dispatch chooses: a layer that shares the selection of the one that resolved it."""
    if dispatch().choose("hot", plan.rows, plan.sources) == "triton":
        from forebay.kernels.gpu import hot as gpu

        gpu.replay(plan, mirror, pool, layer)
    else:
        copy_rows(plan, mirror, pool, layer)
