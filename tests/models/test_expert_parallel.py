"""Experts that ranks deal out whole give what one rank gives: by all-gather and reduce-scatter, and by all-to-all.

Ranks are threads here, so that every family can be tried; real processes are in tests/ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forebay.errors import ConfigError
from forebay.kernels.experts import Activation
from forebay.kernels.moe import Routes, Routing, route
from forebay.models.expert_parallel import DealtExperts
from forebay.models.experts import PackedExperts, expert_share
from forebay.models.layers import Linear
from forebay.models.loading import check_ranks, load_model
from forebay.models.parallel import ExpertSplit
from forebay.models.ranks import Alone, share
from forebay.models.weights import _Reader
from tests import checkpoints
from tests.models.test_ranks import CPU, Meeting, ThreadRank, one_thread, token_ids
from tests.parity.families import FAMILIES
from tests.parity.reference import Runner

__all__ = ["one_thread"]

WAYS: tuple[ExpertSplit, ...] = ("gathered", "exchanged")
SPARSE = ("qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2", "glm4_moe")


def in_pieces() -> list[list[int]]:
    """A prompt in chunks, and decodes: one token is at home on one rank, and on no other."""
    ids = token_ids()
    return [ids[:33], ids[33:36], *([i] for i in ids[36:40])]


def compute(path: Path, size: int, experts: ExpertSplit) -> Tensor:
    meeting = Meeting(size)

    def run(rank: int) -> Tensor:
        torch.set_num_threads(1)
        ranks = ThreadRank(meeting, rank, experts=experts) if size > 1 else Alone()
        runner = Runner(load_model(path, dtype=torch.float64, device=CPU, ranks=ranks))
        return torch.cat([runner.step({0: piece}) for piece in in_pieces()])

    with ThreadPoolExecutor(size) as threads:
        return next(iter(list(threads.map(run, range(size)))))


@pytest.mark.parametrize("family", SPARSE)
def test_every_family_with_experts(family: str, tmp_path: Path) -> None:
    """4 ranks share 5, 7, 10 and 12 experts: not all have as many."""
    path = FAMILIES[family].make(tmp_path)
    alone = compute(path, 1, "inside")
    for experts in WAYS:
        for size in (2, 4):
            found = compute(path, size, experts)
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-10)
            assert torch.equal(found.argmax(dim=1), alone.argmax(dim=1))


@pytest.mark.parametrize(
    ("make", "quantise"),
    [(checkpoints.tiny_deepseek_v3, checkpoints.to_fp8), (checkpoints.tiny_gpt_oss, checkpoints.to_mxfp4)],
    ids=["fp8", "mxfp4"],
)
def test_quantised_experts(make: Callable[[Path], Path], quantise: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path / "model")
    quantise(path)
    torch.testing.assert_close(compute(path, 2, "exchanged"), compute(path, 1, "inside"), rtol=0, atol=1e-10)


# --- one layer of experts, to the bit ------------------------------------------------------------------------

HIDDEN, FFN, COUNT, TOP_K = 24, 16, 7, 3


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def experts_of(ids: range, dtype: torch.dtype) -> PackedExperts:
    ups, downs = noise(COUNT, 2 * FFN, HIDDEN, seed=1).to(dtype), noise(COUNT, HIDDEN, FFN, seed=2).to(dtype)
    return PackedExperts([(Linear(ups[i]), Linear(downs[i])) for i in ids], Activation())


def dealt(x: Tensor, size: int, experts: ExpertSplit, choose: Callable[[Tensor], Routes]) -> list[Tensor]:
    """What every rank has in the end."""
    meeting = Meeting(size)

    def run(rank: int) -> Tensor:
        ranks = ThreadRank(meeting, rank, experts=experts)
        mine = expert_share(COUNT, FFN, ranks)
        assert mine.columns == range(FFN)
        layer = DealtExperts(experts_of(mine.ids, x.dtype), COUNT, ranks)
        return layer(x, choose, lambda rows: rows.float() * 2)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def choose_by(x: Tensor) -> Callable[[Tensor], Routes]:
    """Routes that follow from a row's contents alone, as a router's do."""
    gate = noise(COUNT, x.shape[1], seed=3)
    return lambda rows: route(rows.float() @ gate.T, Routing(TOP_K, renormalise=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 32])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_to_all_gives_the_bits_of_one_rank(size: int, tokens: int, dtype: torch.dtype) -> None:
    x = noise(tokens, HIDDEN, seed=tokens).to(dtype)
    choose = choose_by(x)
    wanted = experts_of(range(COUNT), dtype)(x, choose(x)) + x.float() * 2
    for found in dealt(x, size, "exchanged", choose):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("tokens", [1, 5, 32])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_gathering_gives_the_same_sums_every_time(size: int, tokens: int) -> None:
    """On every rank the same bits, again and again, and one rank's within rounding."""
    x = noise(tokens, HIDDEN, seed=tokens)
    choose = choose_by(x)
    first, *others = dealt(x, size, "gathered", choose) + dealt(x, size, "gathered", choose)
    assert all(torch.equal(found, first) for found in others)
    wanted = experts_of(range(COUNT), torch.float32)(x, choose(x)) + x * 2
    torch.testing.assert_close(first, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("experts", WAYS)
def test_a_rank_whose_experts_nobody_chooses_takes_part(experts: ExpertSplit) -> None:
    x = noise(4, HIDDEN, seed=0)
    chosen = Routes(torch.tensor([[0, 1, 0]]), torch.tensor([[0.5, 0.25, 0.25]]))

    def choose(rows: Tensor) -> Routes:
        return Routes(chosen.experts.expand(len(rows), -1), chosen.weights.expand(len(rows), -1))

    wanted = experts_of(range(COUNT), torch.float32)(x, choose(x)) + x * 2
    for found in dealt(x, 3, experts, choose):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_every_expert_is_on_one_rank() -> None:
    for count in (5, 7, 12):
        for size in range(1, 6):
            ids = [expert_share(count, 8, Alone(rank, size, experts="gathered")).ids for rank in range(size)]
            assert [i for part in ids for i in part] == list(range(count))
            assert ids == [share(count, Alone(rank, size)) for rank in range(size)]


def test_a_rank_reads_its_own_experts_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.tiny_qwen3_moe(tmp_path)
    read: set[str] = set()
    original = _Reader.tensor

    def noting(self: _Reader, file: Path, name: str, *rest: object) -> Tensor:
        read.add(name)
        return original(self, file, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(_Reader, "tensor", noting)
    load_model(path, dtype=torch.float32, device=CPU, ranks=ThreadRank(Meeting(2), 1, experts="exchanged"))
    experts = {name.split(".experts.")[1].split(".")[0] for name in read if ".experts." in name}
    assert experts == {"3", "4", "5", "6"}


# --- refusals ------------------------------------------------------------------------------------------------


def test_a_model_without_experts_has_none_to_deal_out(tmp_path: Path) -> None:
    path = checkpoints.tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="no experts; leave enable_expert_parallel out"):
        check_ranks(path, 2, "exchanged")


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    path = checkpoints.tiny_qwen3_moe(tmp_path, num_experts=3, moe_intermediate_size=2)
    with pytest.raises(ConfigError, match="4 leaves a rank without any of 3 experts; use 3 or fewer"):
        check_ranks(path, 4, "gathered")
    with pytest.raises(ConfigError, match="more than the 2 of moe_intermediate_size"):
        check_ranks(path, 4)
    check_ranks(path, 2, "gathered")
