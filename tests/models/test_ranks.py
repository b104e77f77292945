"""A model that several ranks share computes what one computes: every family, replicated KV heads, quantised weights.

Ranks are threads here, so that all families can be tried: what real processes do is in tests/ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forebay.errors import ConfigError
from forebay.kvstore.layout.ownership import split_heads
from forebay.models.base import CausalLM
from forebay.models.loading import check_ranks, load_model, read_info
from forebay.models.parallel import ExpertSplit
from forebay.models.ranks import Alone, held_group, share, share_heads, vocabulary_share
from forebay.models.weights import _Reader
from tests import checkpoints
from tests.parity.families import FAMILIES
from tests.parity.reference import Runner

LENGTH, CPU = 70, torch.device("cpu")

Maker = Callable[[Path], Path]


@dataclass
class Meeting:
    """Where the ranks of one model meet: each brings a tensor and leaves with what all have brought."""

    size: int
    brought: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size, timeout=60)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.brought[rank] = x.clone()
        self._barrier.wait()
        found = [self.brought[other] for other in range(self.size)]
        self._barrier.wait()
        return found


@dataclass(frozen=True)
class ThreadRank:
    """One of several ranks, each of which computes on a thread of its own."""

    meeting: Meeting
    rank: int
    context: None = None
    prompts: None = None
    experts: ExpertSplit = "inside"

    @property
    def size(self) -> int:
        return self.meeting.size

    def sum(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.copy_(sum(self.meeting.exchange(self.rank, x)))  # type: ignore[arg-type]

    def gather(self, x: Tensor) -> Tensor | None:
        found = self.meeting.exchange(self.rank, x)
        return torch.cat(found, dim=1) if self.rank == 0 else None

    def gather_all(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x))

    def sum_parts(self, x: Tensor) -> Tensor:
        count = len(x) // self.size
        mine = slice(self.rank * count, (self.rank + 1) * count)
        total, *parts = (found[mine].clone() for found in self.meeting.exchange(self.rank, x))
        for part in parts:
            total += part
        return total

    def exchange(self, x: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        assert len(x) == sum(given), (x.shape, given)
        counts = [found.tolist() for found in self.meeting.exchange(self.rank, torch.tensor(given))]
        assert [row[self.rank] for row in counts] == list(taken), (counts, taken)
        brought = self.meeting.exchange(self.rank, x)
        return torch.cat([found.split(row)[self.rank] for found, row in zip(brought, counts, strict=True)])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def token_ids() -> list[int]:
    rng = torch.Generator().manual_seed(3)
    return torch.randint(4, checkpoints.VOCAB, (LENGTH,), generator=rng).tolist()


@dataclass
class Shared:
    """What ranks of one size computed: logits of rank 0, and every rank's pools."""

    logits: Tensor
    runners: list[Runner]


def compute(path: Path, size: int, pieces: Sequence[Sequence[int]]) -> Shared:
    """Feed a sequence in pieces to `size` ranks, in fp64."""
    meeting = Meeting(size)

    def run(rank: int) -> tuple[Tensor, Runner]:
        torch.set_num_threads(1)
        ranks = ThreadRank(meeting, rank) if size > 1 else Alone()
        runner = Runner(load_model(path, dtype=torch.float64, device=CPU, ranks=ranks))
        return torch.cat([runner.step({0: piece}) for piece in pieces]), runner

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    assert all(len(logits) == 0 for logits, _ in found[1:]), "only the first rank has logits"
    return Shared(found[0][0], [runner for _, runner in found])


def in_pieces() -> list[list[int]]:
    ids = token_ids()
    return [ids[:33], ids[33:64], *([i] for i in ids[64:])]


CASES: dict[str, tuple[Maker, int]] = {
    **{f"{name}-{size}": (family.make, size) for name, family in FAMILIES.items() for size in (2, 4)},
    "llama-biases-3": (partial(checkpoints.tiny_llama, num_attention_heads=6, num_key_value_heads=3, hidden_size=72,
                               attention_bias=True, mlp_bias=True), 3),
    "deepseek_v2-biases-2": (FAMILIES["deepseek_v2"].variants["biases"], 2),
    "gpt_oss-one-kv-head-2": (FAMILIES["gpt_oss"].variants["one-kv-head"], 2),
    "gemma3-untied-4": (FAMILIES["gemma3_text"].variants["untied"], 4),
    "qwen3-odd-sizes-4": (partial(checkpoints.tiny_qwen3, intermediate_size=90, vocab_size=509), 4),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_computes(case: str, tmp_path: Path) -> None:
    make, size = CASES[case]
    path = make(tmp_path)
    alone, shared = compute(path, 1, in_pieces()), compute(path, size, in_pieces())
    torch.testing.assert_close(shared.logits, alone.logits, rtol=0, atol=1e-10)
    check_pools(alone.runners[0], shared.runners)


def check_pools(whole: Runner, parts: list[Runner]) -> None:
    """Each rank's blocks are its heads of the one rank's, to the last digits."""
    size = len(parts)
    for group in whole.groups:
        expected = whole.pools[group.name]
        for rank, runner in enumerate(parts):
            found = runner.pools[group.name]
            if group.one_row:
                mine = slice(None)
            else:
                part = split_heads(group.kv_heads, rank, size)
                mine = slice(part.first, part.first + part.count)
            # Both runners hand out blocks in the same order.
            torch.testing.assert_close(found, expected[:, :, :, mine], rtol=0, atol=1e-11)


QUANTISED: dict[str, tuple[Maker, Callable[[Path], Path]]] = {
    "llama-fp8": (checkpoints.tiny_llama, checkpoints.to_fp8),
    "qwen3_moe-fp8": (checkpoints.tiny_qwen3_moe, checkpoints.to_fp8),
    "deepseek_v3-fp8": (checkpoints.tiny_deepseek_v3, checkpoints.to_fp8),
    "gpt_oss-mxfp4": (checkpoints.tiny_gpt_oss, checkpoints.to_mxfp4),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", QUANTISED)
def test_quantised_weights_are_cut_inside_of_their_blocks(form: str, size: int, tmp_path: Path) -> None:
    """Their blocks, of 32 x 24 or 32, don't end where ranks' parts do."""
    make, quantise = QUANTISED[form]
    path = make(tmp_path / "model")
    quantise(path)
    alone, shared = compute(path, 1, [token_ids()]), compute(path, size, [token_ids()])
    torch.testing.assert_close(shared.logits, alone.logits, rtol=0, atol=1e-10)


# --- who has what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("total", [8, 9, 90, 509])
def test_every_feature_is_somebodys(total: int, size: int) -> None:
    for shares in (share, vocabulary_share):
        parts = [shares(total, Alone(rank, size)) for rank in range(size)]
        assert [i for part in parts for i in part] == list(range(total))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 2, 8), (12, 3, 6)])
def test_query_heads_look_at_the_kv_heads_of_their_rank(heads: int, kv_heads: int, size: int) -> None:
    seen = []
    for rank in range(size):
        part, stored = share_heads(heads, kv_heads, Alone(rank, size)), split_heads(kv_heads, rank, size)
        assert (part.kv.start, len(part.kv)) == (stored.first, stored.count), "the store's layout has the same split"
        assert {q // (heads // kv_heads) for q in part.q} == set(part.kv)
        seen += list(part.q)
    assert seen == list(range(heads))


def test_a_rank_reads_its_part_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.tiny_llama(tmp_path)
    read: list[int] = []
    original = _Reader.tensor

    def noting(self: _Reader, *arguments: object) -> Tensor:
        found = original(self, *arguments)  # type: ignore[arg-type]
        read.append(found.numel())
        return found

    monkeypatch.setattr(_Reader, "tensor", noting)
    load_model(path, dtype=torch.float32, device=CPU)
    whole, read[:] = sum(read), []
    load_model(path, dtype=torch.float32, device=CPU, ranks=ThreadRank(Meeting(2), 1))
    norms = 7 * 64
    assert sum(read) == (whole - norms) // 2 + norms


def test_pools_have_the_heads_of_their_rank(tmp_path: Path) -> None:
    path = checkpoints.tiny_llama(tmp_path)
    model: CausalLM = load_model(path, dtype=torch.float32, device=CPU, ranks=ThreadRank(Meeting(4), 3))
    (group,) = model.info.kv_groups
    assert group == read_info(path).kv_groups[0], "what a namespace is made from knows no ranks"
    assert model.held_groups() == (held_group(group, Alone(3, 4)),)
    assert model.new_pools({"full": 5})["full"].shape == (5, 3, 2, 1, 16, 20)


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "size", "said"),
    [
        ({}, 3, "tensor_parallel_size 3 can't split this model's 4 attention heads and 2 KV heads"),
        ({}, 8, "use 1, 2 or 4 instead"),
        ({"hidden_size": 72, "num_attention_heads": 12, "num_key_value_heads": 4}, 6, "use 1, 2, 4 or 12 instead"),
        ({"intermediate_size": 3}, 4, "tensor_parallel_size 4 is more than the 3 of intermediate_size"),
        ({"vocab_size": 5}, 4, "leaves one without any of 5 tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(settings: dict[str, int], size: int, said: str, tmp_path: Path) -> None:
    path = checkpoints.tiny_llama(tmp_path, **{"vocab_size": checkpoints.VOCAB, **settings})
    with pytest.raises(ConfigError, match=said):
        check_ranks(path, size)
    check_ranks(path, 1)


def test_latents_are_split_by_query_heads_alone(tmp_path: Path) -> None:
    path = checkpoints.tiny_deepseek_v3(tmp_path)
    check_ranks(path, 4)
    with pytest.raises(ConfigError, match="can't split this model's 4 attention heads and 1 KV heads evenly"):
        check_ranks(path, 3)
