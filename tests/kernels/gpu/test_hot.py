"""The resolver's kernel, interpreted: plan, state of the regions and copied rows are the definition's, exactly."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels import hot
from forebay.kernels.gpu import hot as gpu
from forebay.kernels.hot import Ask, Mirror, Regions, empty_plan, forget_pages, new_regions
from tests.kernels.gpu.watching import watched
from tests.kernels.naive_hot import Case

LAYERS, WIDTH = 2, 6


def copy_of(regions: Regions) -> Regions:
    return Regions(regions.held.clone(), regions.order.clone(), regions.blocks.clone())


def noise_mirror() -> Mirror:
    granule = LAYERS * 16 * WIDTH * 4
    pages = torch.full((200,), -1, dtype=torch.int64)
    there = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:150]
    pages[there] = torch.arange(150) * granule + 8
    memory = torch.randint(0, 255, (150 * granule + 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    return Mirror(memory, pages)


def assert_same(found: hot.SwapPlan, wanted: hot.SwapPlan) -> None:
    for name in ("rows", "sources", "targets", "swaps", "cold"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_does_what_the_definition_says(seed: int) -> None:
    case, mirror = Case(seed), noise_mirror()
    mine = copy_of(case.regions)
    pools = [torch.zeros(400, LAYERS, 1, 1, 16, WIDTH) for _ in range(2)]
    for step in range(3):
        for page in case.change():
            for regions in (case.regions, mine):
                forget_pages(regions, torch.tensor([page]))
        ask = case.ask(padded=1 if step == 2 else None)
        wanted = hot.resolve(case.regions, ask)
        hot.copy_rows(wanted, mirror, pools[0], 0)
        hot.copy_rows(wanted, mirror, pools[0], 1)
        with watched() as watch:
            found = gpu.resolve_and_copy(mine, ask, mirror, pools[1], 0)
            gpu.replay(found, mirror, pools[1], 1)
        assert not watch.wrong, watch.wrong
        assert_same(found, wanted)
        assert torch.equal(mine.held, case.regions.held) and torch.equal(mine.order, case.regions.order)
        words = [pool.view(torch.int32) for pool in pools]  # noise may be nan
        assert torch.equal(*words)


def test_a_plan_s_memory_can_be_used_again() -> None:
    """As a captured graph does it: nothing of the longer step before is left behind the last."""
    regions, mirror, pool = new_regions(1, 64), noise_mirror(), torch.zeros(400, LAYERS, 1, 1, 16, WIDTH)
    regions.blocks[0] = torch.arange(4)
    pages = torch.arange(4)[None]
    away = torch.full((1, 4), -1)
    long = Ask(torch.arange(20).view(1, 1, -1), torch.tensor([0]), away, pages)
    few = torch.where(torch.arange(20) < 3, torch.arange(40, 60), -1)
    short = Ask(few.view(1, 1, -1), torch.tensor([0]), away, pages)
    plan = empty_plan(long)
    gpu.resolve_and_copy(regions, long, mirror, pool, 0, plan)
    assert int(plan.swaps) == 20
    gpu.resolve_and_copy(regions, short, mirror, pool, 0, plan)
    assert int(plan.swaps) == 3
    assert plan.sources[0, :3].tolist() == [40, 41, 42] and bool((plan.sources[0, 3:] == -1).all())
    assert bool((plan.rows[0, 0, 3:] == -1).all())
