"""Parts of an attention are merged by their LSE, in one base, whatever an empty part holds."""

from __future__ import annotations

import math

import pytest
import torch

from forebay.kernels.gpu.merge import merge
from forebay.kernels.lse import Base, Lse, Partial, merge_parts


def parts(base: Base) -> list[Partial]:
    """Masses 2 and 8, over values 0 and 1; and a part that has seen nothing, full of nan."""
    masses = (2.0, 8.0, 0.0)
    log = math.log if base == "e" else math.log2
    lses = [torch.full((3,), log(mass) if mass else -math.inf) for mass in masses]
    outs = [torch.full((3, 5), value) for value in (0.0, 1.0, math.nan)]
    return [Partial(out, Lse(lse, base)) for out, lse in zip(outs, lses, strict=True)]


@pytest.mark.parametrize("base", ["e", "2"])
def test_masses_of_2_and_8_weigh_a_fifth_and_four_fifths(base: Base) -> None:
    given = parts(base)
    stacked = Lse(torch.stack([part.lse.values for part in given]), base)
    for found in (merge_parts(given), merge(torch.stack([part.out for part in given]), stacked, torch.float32)):
        torch.testing.assert_close(found.out, torch.full((3, 5), 0.8), rtol=0, atol=1e-6)
        assert found.lse.base == "e"
        torch.testing.assert_close(found.lse.values, torch.full((3,), math.log(10.0)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_an_lse_that_is_no_number_is_that_of_an_empty_part(junk: float) -> None:
    given = parts("e")
    given[2].lse.values.fill_(junk)
    outs, lses = torch.stack([part.out for part in given]), torch.stack([part.lse.values for part in given])
    for found in (merge_parts(given), merge(outs, Lse(lses, "e"), torch.float32)):
        torch.testing.assert_close(found.out, torch.full((3, 5), 0.8), rtol=0, atol=1e-6)


def test_nothing_seen_by_anybody_is_zero_with_minus_infinity() -> None:
    outs = torch.full((2, 3, 5), math.nan)
    lses = Lse(torch.full((2, 3), -math.inf), "2")
    wanted = merge_parts([Partial(out, Lse(lse, "2")) for out, lse in zip(outs, lses.values, strict=True)])
    for found in (wanted, merge(outs, lses, torch.float32)):
        assert torch.equal(found.out, torch.zeros(3, 5))
        assert bool((found.lse.values == -math.inf).all())


def test_many_parts_and_dims_against_the_reference() -> None:
    rng = torch.Generator().manual_seed(0)
    outs = torch.randn(7, 2, 3, 70, generator=rng)
    lses = torch.randn(7, 2, 3, generator=rng) * 20
    lses[3] = -math.inf
    found = merge(outs, Lse(lses, "2"), torch.float32)
    wanted = merge_parts([Partial(out.double(), Lse(lse.double(), "2")) for out, lse in zip(outs, lses, strict=True)])
    torch.testing.assert_close(found.out.double(), wanted.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.lse.values.double(), wanted.lse.values, rtol=0, atol=1e-5)
