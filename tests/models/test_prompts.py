"""Ranks that share out prompts compute what one computes, and all of them have all keys afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forebay.errors import ConfigError
from forebay.kernels.batch import pack_batch
from forebay.models.base import KVGroup, ModelInfo
from forebay.models.loading import load_model
from forebay.models.parallel import Parallel, check_parallel
from forebay.models.prompts import SpreadBatch, everyones, own_stretches, results, spread_batch, stretches
from forebay.models.ranks import Alone
from forebay.models.traffic import Traffic
from tests import checkpoints
from tests.models.test_context import SharingRank, ThreadContext, Way, check_pools, mixed_steps
from tests.models.test_ranks import CPU, Maker, Meeting, in_pieces
from tests.models.test_ranks import check_pools as check_heads
from tests.parity.families import FAMILIES
from tests.parity.reference import Runner

# --- who computes what ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 9))
def test_every_token_is_one_ranks_and_all_have_as_much(size: int) -> None:
    for length in (*range(1, 40), 511):
        check_stretches(length, size)


def check_stretches(length: int, size: int) -> None:
    every = stretches(length, size)
    assert [token for part in every for token in part] == list(range(length))
    own = [own_stretches(length, size, rank) for rank in range(size)]
    counts = [sum(map(len, parts)) for parts in own]
    assert sum(counts) == length and max(counts) - min(counts) <= 2
    for rank, parts in enumerate(own):
        assert all(parts) and parts == [part for part in (every[rank], every[-1 - rank]) if part]
    work = [sum(token + 1 for part in parts for token in part) for parts in own]
    if length >= 8 * size:
        assert max(work) - min(work) <= 3 * length, "what they see is as even: of some length squared / 2 / size"


Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Reader:
    """One of the ranks that share out prompts."""

    meeting: Meeting
    rank: int
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        return self.meeting.size

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x))


@given(
    st.lists(st.tuples(st.integers(1, 23), st.integers(0, 40)), min_size=1, max_size=5), st.integers(2, 4),
    st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_is_shared_out_comes_back_in_order(spans: Spans, size: int, rng: object) -> None:
    blocks = [[7 * i + j for j in range(5)] for i in range(len(spans))]
    total = sum(count for count, _ in spans)
    rows = rng.sample(range(total), rng.randint(0, total))  # type: ignore[attr-defined]
    whole = pack_batch(
        [(list(range(100 * i, 100 * i + count)), context) for i, (count, context) in enumerate(spans)],
        {"full": blocks}, logits_rows=rows,
    )  # fmt: skip
    meeting = Meeting(size)

    def run(rank: int) -> tuple[SpreadBatch, Tensor, Tensor]:
        batch = spread_batch(whole, Reader(meeting, rank))
        batch.check()
        own = torch.stack((batch.token_ids, batch.positions), dim=1)
        return batch, everyones(batch, own), results(batch, own.index_select(0, batch.logits_rows))

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    expected = torch.stack((whole.token_ids, whole.positions), dim=1)
    for batch, kept, wanted in found:
        assert torch.equal(kept, expected)
        assert torch.equal(wanted, expected[whole.logits_rows])
        for index, span in enumerate(batch.spans):
            ids = batch.token_ids[span.query_start : span.query_end]
            sequence = int(ids[0]) // 100
            assert ids.tolist() == list(range(int(ids[0]), int(ids[0]) + span.query_len))
            assert span.context_len == spans[sequence][1] + int(ids[0]) % 100, "it is behind all that is before it"
            assert batch.groups["full"].block_tables[index].tolist() == blocks[sequence]


# --- models --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadingRank(SharingRank):
    """A rank that shares prompts with the same ones of other sets, and perhaps positions with its neighbours."""

    prompts: Reader | None = None  # type: ignore[assignment]


def ranks_of(parallel: Parallel) -> list[ReadingRank]:
    tensor = [Meeting(parallel.tp) for _ in range(parallel.pcp)]
    sharing = {tuple(parallel.sharing(rank)): Meeting(parallel.dcp) for rank in range(parallel.size)}
    reading = [Meeting(parallel.pcp) for _ in range(parallel.tp)]
    way = Way(parallel.tp, parallel.dcp, parallel.interleave)
    made = []
    for rank in range(parallel.size):
        place, part = parallel.tensor_rank(rank), parallel.prefill_rank(rank)
        context = ThreadContext(sharing[tuple(parallel.sharing(rank))], parallel.dealing(rank), way)
        made.append(ReadingRank(
            tensor[part], place, context if parallel.dcp > 1 else None, Reader(reading[place], part)
        ))  # fmt: skip
    return made


def compute(path: Path, ranks: list[ReadingRank] | list[Alone]) -> tuple[list[Tensor], list[Runner]]:
    def run(rank: ReadingRank | Alone) -> tuple[list[Tensor], Runner]:
        torch.set_num_threads(1)
        runner = Runner(load_model(path, dtype=torch.float64, device=CPU, ranks=rank))
        steps = [*mixed_steps(), *({9: piece} for piece in in_pieces())]
        return [runner.step(dict(step)) for step in steps], runner

    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(run, ranks))
    assert all(len(logits) == 0 for steps, _ in found[1:] for logits in steps), "only the first rank has logits"
    return found[0][0], [runner for _, runner in found]


CASES: dict[str, tuple[Maker, Parallel]] = {
    "llama-2": (checkpoints.tiny_llama, Parallel(pcp=2)),
    "llama-4": (checkpoints.tiny_llama, Parallel(pcp=4)),
    "llama-3-of-2": (checkpoints.tiny_llama, Parallel(2, pcp=3)),
    "llama-with-positions": (partial(checkpoints.tiny_llama, num_key_value_heads=1), Parallel(2, 2, 2, 4)),
    "deepseek_v3-2": (FAMILIES["deepseek_v3"].make, Parallel(pcp=2)),
    "deepseek_v3-with-positions": (FAMILIES["deepseek_v3"].make, Parallel(4, 4, 2)),
    "gemma3-2": (FAMILIES["gemma3_text"].make, Parallel(pcp=2)),
    "gpt_oss-2": (FAMILIES["gpt_oss"].make, Parallel(pcp=2)),
    "glm_moe_dsa-2": (FAMILIES["glm_moe_dsa"].make, Parallel(pcp=2)),
    "minimax_m3-2-of-2": (FAMILIES["minimax_m3_vl_text"].make, Parallel(2, pcp=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_prompts_compute_what_one_computes(case: str, tmp_path: Path) -> None:
    make, parallel = CASES[case]
    path = make(tmp_path)
    alone, (whole,) = compute(path, [Alone()])
    found, runners = compute(path, ranks_of(parallel))
    for expected, logits in zip(alone, found, strict=True):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    for part in range(parallel.pcp):
        mine = runners[part * parallel.tp : (part + 1) * parallel.tp]
        if parallel.dcp > 1:
            check_pools(whole, mine, Way(parallel.tp, parallel.dcp, parallel.interleave))
        else:
            check_heads(whole, mine)
    for rank, runner in enumerate(runners[parallel.tp :], parallel.tp):
        for name, pool in runner.pools.items():
            assert torch.equal(pool, runners[rank % parallel.tp].pools[name]), "the same bits on all"


# --- what can't be -------------------------------------------------------------------------------------------


def info(kind: Literal["full", "latent", "window"], heads: int = 1, window: int | None = None) -> ModelInfo:
    return ModelInfo("tiny", 100, 64, 2, 512, (KVGroup(kind, kind, (0, 1), heads, 16, window),))


@pytest.mark.parametrize(
    ("model", "parallel", "said"),
    [
        (info("full", 2), Parallel(4, 4), "2 KV heads are, each, on 2 ranks, .*; use 1 or 2, or tensor_.* 8"),
        (info("full", 8), Parallel(4, 2), "8 KV heads are, each, on 1 rank, .*; use 1, or tensor_parallel_size 16"),
        (info("latent"), Parallel(4, 8), "decode_context_parallel_size 8 must divide tensor_parallel_size 4"),
        (info("latent"), Parallel(6, 3), "decode_context_parallel_size 3 must be one of 1, 2, 4, 8, 16"),
        (info("latent"), Parallel(4, 4, 1, 8), "cp_kv_cache_interleave_size 8 must be one of 1, 2, 4"),
        (info("latent"), Parallel(4, 1, 1, 2), "are for decode_context_parallel_size > 1"),
        (info("latent"), Parallel(4, replicated=True), "are for decode_context_parallel_size > 1"),
        (info("window", 1, 40), Parallel(4, 4), "every layer of tiny has a window"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(model: ModelInfo, parallel: Parallel, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_parallel(model, parallel)


def test_layers_that_choose_positions_keep_all_of_them() -> None:
    """But their prompts can be shared out."""
    groups = (KVGroup("latent", "latent", (0, 1), 1, 16), KVGroup("index", "indexer", (0,), 1, 8))
    model = ModelInfo("glm_moe_dsa", 100, 64, 2, 512, groups)
    with pytest.raises(ConfigError, match=r"parallel_size 2: glm_moe_dsa chooses the positions .* use 1"):
        check_parallel(model, Parallel(4, 2))
    check_parallel(model, Parallel(4, pcp=2))


def test_prompts_of_layers_that_need_what_is_before_are_refused() -> None:
    model = info("full")
    odd = KVGroup("odd", "recurrent", (1,), 1, 16)  # type: ignore[arg-type]
    model = ModelInfo("tiny", 100, 64, 2, 512, (*model.kv_groups, odd))
    with pytest.raises(ConfigError, match="prefill_context_parallel_size 2: tiny has a group of kind 'recurrent'"):
        check_parallel(model, Parallel(pcp=2))
    check_parallel(model, Parallel())


@pytest.mark.parametrize(
    "parallel", [Parallel(8, 8), Parallel(8, 2, 2, 8), Parallel(8), Parallel(8, 4, 1, 4, "a2a", replicated=True)]
)
def test_latents_can_be_shared_by_as_many_as_there_are(parallel: Parallel) -> None:
    check_parallel(info("latent"), parallel)
