"""Routing and sorting kernels, interpreted, choose and order as the definitions do."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels import experts, moe
from forebay.kernels.gpu import route as gpu
from forebay.kernels.moe import Routing

VARIANTS = [
    Routing(3),
    Routing(2, "softmax", renormalise=True),
    Routing(4, "top_softmax"),
    Routing(3, "sigmoid", renormalise=True, scale=2.5),
    Routing(4, "sigmoid", renormalise=True, scale=2.5, groups=4, kept_groups=2),
    Routing(3, "softmax", groups=3, kept_groups=2, group_worth="max"),
]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("routing", VARIANTS)
def test_every_way_to_route(routing: Routing, biased: bool) -> None:
    logits, bias = noise(6, 12) * 2, noise(12, seed=1) if biased else None
    wanted, found = moe.route(logits, routing, bias), gpu.route(logits, routing, bias)
    assert torch.equal(found.experts, wanted.experts)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("routing", VARIANTS)
def test_equal_scores_go_to_the_lower_expert(routing: Routing) -> None:
    logits = torch.zeros(3, 12)
    logits[1] = torch.tensor([1.0, 2.0] * 6)
    logits[2, 5:] = 0.5
    wanted, found = moe.route(logits, routing), gpu.route(logits, routing)
    assert torch.equal(found.experts, wanted.experts)


def test_a_biased_choice_of_a_rejected_group_is_not_made() -> None:
    """With negative worths everywhere a group that was masked by zeros would win."""
    routing = Routing(2, "sigmoid", groups=2, kept_groups=1)
    logits, bias = noise(4, 8), torch.full((8,), -5.0)
    wanted = moe.route(logits, routing, bias)
    found = gpu.route(logits, routing, bias)
    assert torch.equal(found.experts, wanted.experts)
    assert bool((found.experts // 4 == found.experts[:, :1] // 4).all())


def assert_sorted_alike(chosen: torch.Tensor, count: int, block: int) -> None:
    wanted, found = experts.sort_choices(chosen, count, block), gpu.sort_choices(chosen, count, block)
    total = int(wanted.total)
    assert int(found.total) == total <= len(found.choices)
    assert torch.equal(found.choices[:total], wanted.choices)
    assert torch.equal(found.experts[: total // block], wanted.experts)


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize(("tokens", "top_k", "count"), [(1, 1, 1), (7, 3, 5), (40, 2, 3), (2, 2, 33)])
def test_choices_are_sorted_stably_and_padded(tokens: int, top_k: int, count: int, block: int) -> None:
    chosen = torch.randint(0, count, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
    assert_sorted_alike(chosen, count, block)


def test_experts_that_are_elsewhere_or_have_nobody_are_in_no_block() -> None:
    chosen = torch.tensor([[-1, 2], [2, -1], [0, -1], [-1, -1]])
    assert_sorted_alike(chosen, 5, 4)
    assert_sorted_alike(torch.full((3, 2), -1), 5, 4)


def test_more_choices_than_a_program_scans_at_a_time() -> None:
    chosen = torch.randint(0, 3, (gpu.SCAN, 2), generator=torch.Generator().manual_seed(0))
    assert_sorted_alike(chosen, 3, 16)


def test_no_tokens_are_no_blocks() -> None:
    assert int(gpu.sort_choices(torch.empty(0, 2, dtype=torch.int64), 3, 4).total) == 0
