"""What is configured, eligible and executed are told apart, and nothing falls back silently."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from forebay.errors import ConfigError
from forebay.kernels import dispatch as deciding
from forebay.kernels.attention import attention_reference, paged_attention
from forebay.kernels.cache import gather_granules, scatter_granules
from forebay.kernels.dispatch import Dispatch, configure
from forebay.kernels.mla import latent_attention, latent_attention_reference
from tests.kernels.test_attention import Case, Shape, make_case

SEQUENCES = [(1, 3), (5, 20), (1, 40)]


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    configure("auto")


def attend(case: Case, **rest: object) -> torch.Tensor:
    return paged_attention(case.q, case.pool, 1, case.batch, "g", scale=0.3, **rest)


def count(present: Dispatch, operation: str, form: str) -> float:
    return present.figures()[f"kernels.{operation}.{form}.executed"]


@pytest.mark.parametrize("sequences", [SEQUENCES, [(1, 3), (1, 40)], [(5, 20), (2, 3)]])
def test_the_engines_attention_runs_as_the_kernel_that_was_asked_for(sequences: list[tuple[int, int]]) -> None:
    present = configure("triton")
    case = make_case(sequences, Shape(4, 2, 16), window=24, dtype=torch.float32)
    sinks = torch.tensor([0.5, 1.0, -1.0, 0.0])
    found = attend(case, window=24, softcap=2.0, sinks=sinks)
    args = (case.q, case.pool, 1, case.batch, "g")
    wanted = attention_reference(*args, scale=0.3, window=24, softcap=2.0, sinks=sinks)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    assert (count(present, "attend", "triton"), count(present, "attend", "torch")) == (1, 0)


def test_latent_attention_runs_as_the_kernel_that_was_asked_for() -> None:
    present = configure("triton")
    case = make_case([(1, 20), (2, 9)], Shape(3, 1, 24), dtype=torch.float32)
    pool = case.pool[:, :, :1].contiguous()
    args = (case.q, pool, 1, case.batch, "g")
    found = latent_attention(*args, scale=0.3, rank=16)
    torch.testing.assert_close(found, latent_attention_reference(*args, scale=0.3, rank=16), rtol=0, atol=2e-5)
    assert (count(present, "latent", "triton"), count(present, "latent", "torch")) == (1, 0)


def test_granules_are_moved_by_the_kernel_that_was_asked_for() -> None:
    present = configure("triton")
    pool = torch.randn(5, 2, 2, 2, 16, 6).to(torch.bfloat16)
    granules = torch.zeros(3, pool[0].numel() * 2, dtype=torch.uint8)
    gather_granules(pool, [4, 0, 2], granules)
    back = torch.zeros_like(pool)
    scatter_granules(back, [4, 0, 2], granules)
    assert torch.equal(back[[0, 2, 4]].view(torch.uint8), pool[[0, 2, 4]].view(torch.uint8))
    assert not back[[1, 3]].any()
    assert (count(present, "move", "triton"), count(present, "move", "torch")) == (2, 0)


def test_what_the_kernel_cannot_do_is_an_error_where_it_is_asked_for() -> None:
    configure("triton")
    with pytest.raises(ConfigError, match=r"doesn't compute in torch\.float64"):
        attend(make_case(SEQUENCES))
    with pytest.raises(ConfigError, match="wrongly in bfloat16"):
        attend(make_case(SEQUENCES, dtype=torch.bfloat16))
    case = make_case([(1, 3)], dtype=torch.float32)
    older = Case(case.batch, case.pool.to(torch.float8_e4m3fnuz), case.q)
    with pytest.raises(ConfigError, match="doesn't know float8_e4m3fnuz"):
        attend(older)
    with pytest.raises(ConfigError, match="256 values at most"):
        attend(make_case([(1, 3)], Shape(1, 1, 272), dtype=torch.float32))


def test_a_kernel_that_fails_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.kernels import forms

    def fail(*_: object) -> None:
        raise RuntimeError("the launch failed")

    configure("triton")
    monkeypatch.setattr(forms, "attend", fail)
    with pytest.raises(RuntimeError, match="launch failed"):
        attend(make_case(SEQUENCES, dtype=torch.float32))


def test_a_kernel_that_was_never_run_on_a_device_is_off_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    present = configure("auto")
    case = make_case(SEQUENCES, dtype=torch.float32)
    with caplog.at_level(logging.INFO, deciding.__name__):
        for _ in range(3):
            attend(case)
    figures = present.figures()
    assert figures["kernels.attend.triton.configured"] == figures["kernels.attend.triton.eligible"] == 1
    assert (figures["kernels.attend.triton.executed"], figures["kernels.attend.torch.executed"]) == (0, 3)
    assert [record.message for record in caplog.records] == [
        "kernel attend, torch.float32 over torch.float32 on cpu, auto: torch; not triton: it is compiled only for this "
        "device, not yet run and checked on it (FOREBAY_KERNELS=triton takes it)"
    ]


def test_a_kernel_that_has_run_on_a_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "executed_on", lambda *_: "this one, today")
    present = configure("auto")
    attend(make_case(SEQUENCES, Shape(4, 2, 16), dtype=torch.float32))
    assert count(present, "attend", "triton") == 1


def test_without_an_interpreter_there_is_no_kernel_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    present = configure("auto")
    attend(make_case(SEQUENCES, dtype=torch.float32))
    assert present.figures()["kernels.attend.triton.eligible"] == 0
    configure("triton")
    with pytest.raises(ConfigError, match="no kernel for cpu"):
        attend(make_case(SEQUENCES, dtype=torch.float32))


def test_torch_alone_is_torch_alone() -> None:
    present = configure("torch")
    attend(make_case(SEQUENCES, dtype=torch.float32))
    assert present.figures()["kernels.attend.triton.configured"] == 0
    assert count(present, "attend", "torch") == 1


def test_another_word_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"FOREBAY_KERNELS='fast' must be one of auto, torch, triton"):
        Dispatch("fast")


def test_an_absent_triton_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding.library, "installed", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'forebay\[triton\]'"):
        Dispatch("triton")
    present = configure("auto")
    attend(make_case(SEQUENCES, dtype=torch.float32))
    assert count(present, "attend", "torch") == 1


def test_decisions_are_as_many_as_kinds_of_questions() -> None:
    present = configure("torch")
    for dim in range(1, 40):
        attend(make_case([(1, 3)], Shape(1, 1, dim), dtype=torch.float32))
    assert len(present._decided) == 1
