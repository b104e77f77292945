"""No kernel has programs that get into each other's way, or touches what isn't its arguments'."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from forebay.kernels.measure.parity import CHECKS, Place
from tests.kernels.gpu.watching import watched


@pytest.mark.parametrize("name", CHECKS)
def test_programs_keep_to_themselves_and_to_their_arguments(name: str) -> None:
    with watched() as watch:
        CHECKS[name](Place(torch.device("cpu"), torch.float32))
    assert watch.launches > 0 and watch.wrong == []


@triton.jit
def overlapping(out, STEP: tl.constexpr):
    tl.store(out + tl.program_id(0) * STEP + tl.arange(0, 4), 1.0)


@triton.jit
def leaning(out):
    at = tl.program_id(0)
    tl.store(out + at, tl.load(out + 1 - at) + 1.0)


def test_two_programs_that_write_one_place_are_seen() -> None:
    with watched() as watch:
        overlapping[(2,)](torch.zeros(8), STEP=4)
        assert watch.wrong == []
        overlapping[(2,)](torch.zeros(8), STEP=3)
    assert watch.wrong == ["overlapping: two programs write the same place"]


def test_a_program_that_reads_what_another_writes_is_seen() -> None:
    with watched() as watch:
        leaning[(2,)](torch.zeros(2))
    assert watch.wrong == ["leaning: a program reads what another one writes"]


def test_a_step_beyond_an_argument_is_seen_and_not_taken() -> None:
    room = torch.zeros(10)
    with watched() as watch:
        overlapping[(2,)](room[:7], STEP=4)
    assert watch.wrong == ["overlapping: 1 places outside of its arguments are written"]
    assert room[7] == 0
