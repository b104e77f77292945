"""What gathers keep is reused, capped, and each thread's own."""

from __future__ import annotations

import threading

import pytest
import torch

from forebay.kernels import scratch
from forebay.kernels.dispatch import dispatch
from forebay.kernels.scratch import gather_rows, held_bytes


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_kept", scratch._Kept())
    monkeypatch.setattr(scratch, "_held", 0)
    monkeypatch.setattr(scratch, "KEPT_BYTES", 4096)


def rows(count: int, width: int = 8) -> torch.Tensor:
    return torch.arange(count * width, dtype=torch.float32).view(count, width)


def test_rows_come_in_the_order_that_was_asked_for() -> None:
    source, at = rows(9), torch.tensor([7, 0, 7, 3])
    assert torch.equal(gather_rows(source, at), source[at])
    assert torch.equal(gather_rows(source, at[:1]), source[7:8])
    assert gather_rows(source, at[:0]).shape == (0, 8)


def test_the_next_gather_takes_the_same_memory() -> None:
    first = gather_rows(rows(9), torch.arange(4))
    second = gather_rows(rows(9), torch.arange(5, 9))
    assert first.data_ptr() == second.data_ptr()


def test_what_is_kept_stays_under_its_cap_and_is_told() -> None:
    source = rows(1000)
    for count in (1, 5, 100, 128, 129, 1000):
        assert torch.equal(gather_rows(source, torch.arange(count)), source[:count])
        assert held_bytes() <= 4096
    assert held_bytes() == dispatch().figures()["kernels.scratch.bytes"] == 4096


def test_a_larger_gather_has_memory_of_its_own() -> None:
    source = rows(1000)
    large = gather_rows(source, torch.arange(1000))
    gather_rows(source, torch.arange(100))
    assert torch.equal(large, source)


def test_dtypes_and_threads_do_not_share() -> None:
    source, at = rows(9), torch.arange(4)
    mine = gather_rows(source, at)
    gather_rows(source.double(), at + 3)

    def other() -> None:
        gather_rows(source, at + 5)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert torch.equal(mine, source[:4])


def test_inside_and_outside_of_inference_mode() -> None:
    source, at = rows(9), torch.arange(4)
    with torch.inference_mode():
        gather_rows(source, at)
    assert torch.equal(gather_rows(source, at + 1), source[1:5])
    with torch.inference_mode():
        assert torch.equal(gather_rows(source, at), source[:4])
