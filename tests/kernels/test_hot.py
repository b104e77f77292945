"""Hot buffers: every row is found where the naive model says, and holds what its position holds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from forebay.kernels.chosen import resident_slots
from forebay.kernels.hot import (
    Ask,
    Mirror,
    RowSizes,
    SwapPlan,
    copy_rows,
    fetch_rows,
    forget_pages,
    new_regions,
    resolve,
    row_sizes,
)
from forebay.kernels.sparse import sparse_latent_attention
from tests.kernels.naive_hot import STREAMS, Case, NaiveStep, stream

SEEDS = int(os.environ.get("FOREBAY_HOT_SEEDS", "150"))
STEPS = 8


def assert_step(plan: SwapPlan, steps: list[NaiveStep]) -> None:
    for i, step in enumerate(steps):
        assert plan.rows[i].flatten().tolist() == step.rows
        assert int(plan.cold[i]) == step.cold
        count = int(plan.swaps[i])
        found = list(zip(plan.sources[i, :count].tolist(), plan.targets[i, :count].tolist(), strict=True))
        assert found == step.swaps
        assert bool((plan.sources[i, count:] == -1).all()) and bool((plan.targets[i, count:] == -1).all())


def assert_sound(case: Case) -> None:
    for order, held in zip(case.regions.order, case.regions.held, strict=True):
        assert sorted(order.tolist()) == list(range(case.slots))
        known = [row for row in held.tolist() if row >= 0]
        assert len(set(known)) == len(known)


def assert_same_state(case: Case) -> None:
    for region, naive in enumerate(case.naive):
        assert case.regions.held[region].tolist() == naive.held
        assert case.regions.order[region].tolist() == naive.order


@pytest.mark.parametrize("part", range(5))
def test_every_step_is_what_the_naive_model_says(part: int) -> None:
    swaps = 0
    for seed in range(part, SEEDS, 5):
        case = Case(seed)
        for step in range(STEPS):
            for page in case.change():
                forget_pages(case.regions, torch.tensor([page]))
                for naive in case.naive:
                    naive.forget(page)
            ask = case.ask(padded=0 if step == 3 else None)
            before = case.regions.held.clone()
            plan = resolve(case.regions, ask)
            assert_step(plan, case.expected(ask))
            assert_same_state(case)
            assert_sound(case)
            swaps += _check_invariants(case, ask, plan, before)
    assert swaps > 0


def _check_invariants(case: Case, ask: Ask, plan: SwapPlan, before: torch.Tensor) -> int:
    """A slot hit in this step isn't filled in it; no target twice; as many copies as rows that weren't there."""
    for i, region in enumerate(ask.regions.tolist()):
        count = int(plan.swaps[i])
        targets = plan.targets[i, :count].tolist()
        assert len(set(targets)) == count
        now = case.regions.held[region]
        filled = {slot for slot in range(case.slots) if region >= 0 and int(now[slot]) != int(before[region, slot])}
        flat = ask.selected[i].flatten()
        wanted = set()
        for position in flat[flat >= 0].tolist():
            page = int(ask.host[i][position // 16])
            if int(ask.resident[i][position // 16]) < 0 and page >= 0 and region >= 0:
                wanted.add(page * 16 + position % 16)
        were = set(before[region].tolist()) if region >= 0 else set()
        assert count == len(wanted - were)
        assert len(filled) == count
    return int(plan.swaps.sum())


def test_a_position_twice_in_a_row_is_refused() -> None:
    regions = new_regions(1, 16)
    regions.blocks[0] = 3
    ask = Ask(torch.tensor([[[4, 7, 4]]]), torch.tensor([0]), torch.tensor([[-1]]), torch.tensor([[0]]))
    with pytest.raises(ValueError, match="twice"):
        resolve(regions, ask)


def test_more_rows_than_slots_are_refused() -> None:
    regions = new_regions(1, 16)
    regions.blocks[0] = 3
    ask = Ask(torch.arange(17).view(1, 1, -1), torch.tensor([0]), torch.tensor([[-1, -1]]), torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="don't fit"):
        resolve(regions, ask)


def test_what_is_resident_ages_nothing() -> None:
    regions = new_regions(1, 16)
    regions.blocks[0] = 3
    away = Ask(torch.tensor([[[1, 2]]]), torch.tensor([0]), torch.tensor([[-1]]), torch.tensor([[5]]))
    resolve(regions, away)
    held, order = regions.held.clone(), regions.order.clone()
    here = Ask(torch.tensor([[[1, 2]]]), torch.tensor([0]), torch.tensor([[9]]), torch.tensor([[5]]))
    plan = resolve(regions, here)
    assert plan.rows.tolist() == [[[9 * 16 + 1, 9 * 16 + 2]]] and int(plan.swaps) == 0
    assert torch.equal(regions.held, held) and torch.equal(regions.order, order)


def test_a_host_page_that_is_given_to_other_bytes_must_miss() -> None:
    """The same number, another content: without `forget_pages` the old row would be read."""
    pool, mirror = torch.zeros(8, 2, 1, 1, 16, 4), _mirror(layers=2, width=4, pages=2)
    regions = new_regions(1, 16)
    regions.blocks[0] = 3
    ask = Ask(torch.tensor([[[1, 2]]]), torch.tensor([0]), torch.tensor([[-1]]), torch.tensor([[0]]))
    copy_rows(resolve(regions, ask), mirror, pool, 1)
    mirror.memory.add_(1)
    assert int(resolve(regions, ask).swaps) == 0
    forget_pages(regions, torch.tensor([0]))
    plan = resolve(regions, ask)
    assert int(plan.swaps) == 2
    copy_rows(plan, mirror, pool, 1)
    expected = fetch_rows(mirror, row_sizes(pool), torch.tensor([1, 2]), 1)
    assert torch.equal(_words(pool)[_at(plan.rows[0, 0], 2, 1)], expected)


def test_a_row_of_a_page_without_a_place_is_zeros() -> None:
    pool, mirror = torch.ones(8, 2, 1, 1, 16, 4), _mirror(layers=2, width=4, pages=2)
    mirror.pages[1] = -1
    regions = new_regions(1, 16)
    regions.blocks[0] = 3
    ask = Ask(torch.tensor([[[1, 17]]]), torch.tensor([0]), torch.tensor([[-1, -1]]), torch.tensor([[0, 1]]))
    plan = resolve(regions, ask)
    copy_rows(plan, mirror, pool, 0)
    rows = pool.view(-1, 4)[_at(plan.rows[0, 0], 2, 0)]
    assert bool((rows[0] != 0).any()) and bool((rows[1] == 0).all())


def test_every_layer_keeps_its_own_rows() -> None:
    """Three layers share a plan; each row is a function of layer and position, in each layer its own."""
    layers, width, pages = 3, 6, 4
    mirror = _mirror(layers=layers, width=width, pages=pages)
    for seed in range(20):
        rng = random.Random(seed)
        pool = torch.zeros(8, layers, 1, 1, 16, width)
        regions = new_regions(1, 32)
        regions.blocks[0] = torch.tensor([5, 2])
        host = torch.tensor([rng.sample(range(pages), pages)])
        steps = stream("walk", rng, pages * 16, 12, 32)
        for _ in range(6):
            selected = torch.tensor([[next(steps)]])
            plan = resolve(regions, Ask(selected, torch.tensor([0]), torch.full((1, pages), -1), host))
            for layer in range(layers):
                copy_rows(plan, mirror, pool, layer)
                found = pool.view(-1, width)[_at(plan.rows[0, 0], layers, layer)]
                position = selected[0, 0]
                row = host[0][position // 16] * 16 + position % 16
                assert torch.equal(found, _value(layer, row, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_attention_over_resolved_rows_has_the_bits_of_attention_over_resident_ones(dtype: torch.dtype) -> None:
    """Some pages on the device, others in host memory alone: the same rows in the same order are the same sums."""
    layers, width, rank, pages, k = 2, 24, 16, 12, 20
    noise, rng = torch.Generator().manual_seed(3), random.Random(3)
    whole = torch.randn(pages, layers, 1, 1, 16, width, generator=noise, dtype=torch.float64).to(dtype)
    pool = torch.cat((torch.full_like(whole, torch.nan), torch.zeros_like(whole)))
    memory = whole.view(-1).view(torch.uint8)
    mirror = Mirror(memory, torch.arange(pages) * (len(memory) // pages))
    regions = new_regions(1, 48)
    regions.blocks[0] = torch.tensor([pages + 4, pages + 1, pages + 9])
    here = torch.arange(pages)[None]
    steps = stream("walk", rng, pages * 16, k, 48)
    for step in range(30):
        resident = torch.where(torch.rand(1, pages, generator=noise) < 0.3, here, -1)
        pool[resident[resident >= 0]] = whole[resident[resident >= 0]]
        selected, q = torch.tensor([next(steps)]), torch.randn(1, 3, width, generator=noise).to(dtype)
        plan = resolve(regions, Ask(selected[None], torch.tensor([0]), resident, here))
        expected = resident_slots(here, torch.zeros(1, dtype=torch.int64), selected)
        for layer in range(layers):
            copy_rows(plan, mirror, pool, layer)
            found = sparse_latent_attention(q, pool, layer, plan.rows[0], scale=0.2, rank=rank)
            assert torch.equal(found, sparse_latent_attention(q, whole, layer, expected, scale=0.2, rank=rank)), step


def test_rows_beyond_two_to_the_31_are_counted_right(tmp_path: Path) -> None:
    """7.5 million rows of 576: products pass 2^31, numbers of host pages too."""
    regions = new_regions(1, 16)
    regions.blocks[0] = 2**27 + 3
    far = 2**33
    ask = Ask(torch.tensor([[[5]]]), torch.tensor([0]), torch.tensor([[-1]]), torch.tensor([[far]]))
    plan = resolve(regions, ask)
    assert plan.sources[0, 0] == far * 16 + 5 and plan.rows[0, 0, 0] == (2**27 + 3) * 16
    # A file of 6 GiB, of which only what is touched exists.
    granule = 61 * 16 * 1152
    count = (6 << 30) // granule
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=count * granule, dtype=torch.uint8)
    last = count - 1
    begin = last * granule + (60 * 16 + 3) * 1152
    memory[begin : begin + 1152] = torch.arange(1152) % 251
    sizes = RowSizes(61, 1152)
    mirror = Mirror(memory, torch.arange(count) * granule)
    found = fetch_rows(mirror, sizes, torch.tensor([last * 16 + 3]), 60)
    assert begin > 2**32 and torch.equal(found.view(torch.uint8)[0], memory[begin : begin + 1152])


@pytest.mark.parametrize("row", [656, 576, 132, 66, 33])
def test_all_bytes_of_a_row_travel(row: int) -> None:
    """A row of FP8 has its scales behind it: all bytes come along, whatever they stand for."""
    pool = torch.zeros(4, 2, 1, 1, 16, row, dtype=torch.uint8)
    memory = torch.randint(0, 256, (3 * 2 * 16 * row + 64,), dtype=torch.uint8)
    mirror = Mirror(memory, torch.tensor([64 + 2 * 16 * row, -1, 64]))
    plan = SwapPlan(
        torch.empty(0, dtype=torch.int64), torch.tensor([[5, 2 * 16 + 15]]), torch.tensor([[17, 40]]),
        torch.tensor([2]), torch.tensor([0]),
    )  # fmt: skip
    copy_rows(plan, mirror, pool, 1)
    for page, offset, target in ((0, 5, 17), (2, 15, 40)):
        begin = int(mirror.pages[page]) + (16 + offset) * row
        assert torch.equal(pool[target // 16, 1, 0, 0, target % 16], memory[begin : begin + row])


@pytest.mark.parametrize("name", STREAMS)
def test_hits_outlive_what_was_filled_beside_them(name: str) -> None:
    """Whatever the stream: after a step, what was hit leaves later than what was filled."""
    rng, slots = random.Random(1), 32
    regions = new_regions(1, slots)
    regions.blocks[0] = torch.tensor([0, 1])
    steps = stream(name, rng, 96, 8, slots)
    for _ in range(30):
        before = set(regions.held[0].tolist())
        ask = Ask(torch.tensor([[next(steps)]]), torch.tensor([0]), torch.full((1, 6), -1), torch.arange(6)[None])
        plan = resolve(regions, ask)
        place = {int(slot): at for at, slot in enumerate(regions.order[0].tolist())}
        wanted = [row for row in ask.selected[0, 0].tolist() if row >= 0]
        slot_of = {row: slot for slot, row in enumerate(regions.held[0].tolist())}
        hits = [place[slot_of[row]] for row in wanted if row in before]
        filled = [place[slot_of[row]] for row in wanted if row not in before]
        assert len(filled) == int(plan.swaps)
        assert not hits or not filled or max(filled) < min(hits)


def _mirror(*, layers: int, width: int, pages: int) -> Mirror:
    rows = torch.stack(
        [torch.stack([_value(layer, torch.arange(p * 16, p * 16 + 16), width) for layer in range(layers)])
         for p in range(pages)]
    )  # fmt: skip
    granule = layers * 16 * width * 4
    return Mirror(rows.view(-1).view(torch.uint8).clone(), torch.arange(pages) * granule)


def _value(layer: int, row: torch.Tensor, width: int) -> torch.Tensor:
    return (layer * 1000 + row[:, None] * 10 + torch.arange(width)).to(torch.float32)


def _words(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(-1, pool.shape[-1]).view(torch.int64)


def _at(slots: torch.Tensor, layers: int, layer: int) -> torch.Tensor:
    return (slots // 16 * layers + layer) * 16 + slots % 16
