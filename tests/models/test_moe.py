"""Experts are chosen and summed as their definition says, one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kernels.moe import Routes, Routing, clamped_swiglu, mix_experts, route

F64 = torch.float64


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=F64)


def chosen(routes: Routes) -> list[list[int]]:
    return routes.experts.tolist()


def test_softmax_over_all_keeps_its_weights() -> None:
    routes = route(logits_of([0.0, 2.0, 1.0, -1.0]), Routing(2))
    whole = logits_of([0.0, 2.0, 1.0, -1.0]).softmax(-1)[0]
    assert chosen(routes) == [[1, 2]]
    torch.testing.assert_close(routes.weights[0], whole[[1, 2]])


def test_renormalised_weights_sum_to_the_scale() -> None:
    routes = route(logits_of([0.0, 2.0, 1.0, -1.0]), Routing(2, renormalise=True, scale=2.5))
    assert routes.weights.sum().item() == pytest.approx(2.5)


def test_softmax_over_the_chosen_is_the_renormalised_softmax() -> None:
    logits = logits_of([0.3, -2.0, 1.0, 0.9])
    after, before = route(logits, Routing(3, "top_softmax")), route(logits, Routing(3, renormalise=True))
    assert chosen(after) == chosen(before)
    torch.testing.assert_close(after.weights, before.weights)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = logits_of([2.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 5.0], dtype=F64)
    routes = route(logits, Routing(1, "sigmoid"), bias)
    assert chosen(routes) == [[2]]
    assert routes.weights.item() == pytest.approx(0.5)


def test_of_equal_experts_the_lower_one_is_chosen() -> None:
    routes = route(torch.zeros(3, 64, dtype=F64), Routing(5, "sigmoid"))
    assert chosen(routes) == [[0, 1, 2, 3, 4]] * 3
    grouped = route(torch.zeros(1, 64, dtype=F64), Routing(5, "sigmoid", groups=8, kept_groups=2))
    assert chosen(grouped) == [[0, 1, 2, 3, 4]]


def test_no_expert_of_a_rejected_group_is_chosen_even_if_all_others_are_negative() -> None:
    """With zero in place of minus infinity, expert 5 of a rejected group would beat the negative ones."""
    logits = torch.zeros(1, 6, dtype=F64)
    bias = torch.tensor([3.0, 3.0, -4.0, -5.0, 2.0, 2.0], dtype=F64).view(3, 2).flatten()
    routes = route(logits, Routing(3, "sigmoid", groups=3, kept_groups=2), bias)
    assert chosen(routes) == [[0, 1, 4]]
    bias = torch.tensor([9.0, -9.0, 8.0, -9.5, 0.5, -1.0], dtype=F64)
    routes = route(logits, Routing(3, "sigmoid", groups=3, kept_groups=2, group_worth="max"), bias)
    assert chosen(routes) == [[0, 2, 1]]


def test_a_group_is_worth_its_best_two_or_its_best() -> None:
    logits = logits_of([4.0, -4.0, 1.0, 1.0])
    two = route(logits, Routing(1, "sigmoid", groups=2, kept_groups=1))
    one = route(logits, Routing(1, "sigmoid", groups=2, kept_groups=1, group_worth="max"))
    assert (chosen(two), chosen(one)) == ([[2]], [[0]])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 9),
    experts=st.sampled_from([1, 3, 7, 12]),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_the_sum_is_that_of_every_token_by_itself(tokens: int, experts: int, top_k: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    top_k = min(top_k, experts)
    weights = torch.randn(experts, 4, 4, generator=rng, dtype=F64)
    x = torch.randn(tokens, 4, generator=rng, dtype=F64)
    routes = route(torch.randn(tokens, experts, generator=rng, dtype=F64), Routing(top_k, renormalise=True))
    calls: list[int] = []

    def expert(index: int, rows: torch.Tensor) -> torch.Tensor:
        assert len(rows)
        calls.append(index)
        return rows @ weights[index]

    found = mix_experts(x, routes, experts, expert)
    assert calls == sorted(set(routes.experts.flatten().tolist())), "each expert once, those without tokens not"
    for token in range(tokens):
        pairs = zip(routes.experts[token], routes.weights[token], strict=True)
        wanted = sum((w * (x[token] @ weights[e]) for e, w in pairs), torch.zeros(4, dtype=F64))
        torch.testing.assert_close(found[token], wanted)


def test_the_sum_is_taken_in_the_dtype_of_the_weights() -> None:
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    routes = Routes(torch.tensor([[0, 1]]), torch.tensor([[1.0, 2.0**-10]]))
    assert mix_experts(x, routes, 2, lambda _, rows: rows)[0, 0].item() == 1 + 2.0**-10


def test_gpt_oss_clamps_the_gate_from_above_only() -> None:
    gate_up = torch.tensor([[100.0, 0.0], [-100.0, 0.0], [1.0, 100.0], [1.0, -100.0]], dtype=F64)
    found = clamped_swiglu(gate_up, alpha=1.702, limit=7.0).flatten()
    one = 1 / (1 + torch.tensor(-1.702, dtype=F64).exp())
    seven = 7 / (1 + torch.tensor(-7 * 1.702, dtype=F64).exp())
    wanted = torch.stack([seven, -100 / (1 + torch.tensor(170.2, dtype=F64).exp()), 8 * one, -6 * one])
    torch.testing.assert_close(found, wanted)
