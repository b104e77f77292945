"""Attention sinks: a score without a value that takes its part of every query's softmax."""

from __future__ import annotations

import math

import pytest
import torch

from forebay.kernels.attention import attention_reference, paged_attention
from tests.kernels.test_attention import Shape, make_case

SEQUENCES = [(19, 30), (1, 40), (1, 44), (1, 7)]


@pytest.mark.parametrize("window", [None, 15, 16, 17])
@pytest.mark.parametrize("shape", [Shape(6, 2, 8), Shape(3, 1, 8), Shape(2, 2, 8)])
def test_prefills_and_decodes_with_sinks_are_as_defined(shape: Shape, window: int | None) -> None:
    case = make_case(SEQUENCES, shape, window=window)
    sinks = torch.linspace(-1.0, 3.0, shape.heads, dtype=torch.float64)
    args = (case.q, case.pool, 1, case.batch, "g")
    found = paged_attention(*args, scale=0.3, window=window, sinks=sinks)
    wanted = attention_reference(*args, scale=0.3, window=window, sinks=sinks)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_single_decode_with_sinks_is_as_defined() -> None:
    case = make_case([(1, 33)])
    sinks = torch.tensor([0.5, 1.0, -2.0, 4.0], dtype=torch.float64)
    args = (case.q, case.pool, 0, case.batch, "g")
    wanted = attention_reference(*args, scale=0.3, sinks=sinks)
    torch.testing.assert_close(paged_attention(*args, scale=0.3, sinks=sinks), wanted, rtol=0, atol=1e-12)


def test_a_sink_takes_mass_and_gives_no_value() -> None:
    """One key of score 0 and value v beside a sink of ln 3: a quarter of v is left."""
    case = make_case([(1, 0)], Shape(1, 1, 4))
    case.q.zero_()
    args = (case.q, case.pool, 0, case.batch, "g")
    plain = paged_attention(*args, scale=1.0)
    sunk = paged_attention(*args, scale=1.0, sinks=torch.tensor([math.log(3.0)], dtype=torch.float64))
    torch.testing.assert_close(sunk, plain / 4)


def test_a_sink_of_minus_infinity_is_none() -> None:
    case = make_case(SEQUENCES)
    args = (case.q, case.pool, 0, case.batch, "g")
    found = paged_attention(*args, scale=0.3, sinks=torch.full((4,), -math.inf, dtype=torch.float64))
    torch.testing.assert_close(found, paged_attention(*args, scale=0.3), rtol=0, atol=1e-14)
