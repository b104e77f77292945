"""Ranks that share out positions compute what one computes: every family that can, whichever way it is exchanged.

Ranks are threads here, so that all families and shapes can be tried: what real processes do is in tests/ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forebay.errors import ConfigError
from forebay.kernels.dealing import Dealing
from forebay.models import context as flow
from forebay.models.context import Prefill
from forebay.models.loading import load_model
from forebay.models.ranks import Alone
from forebay.models.traffic import Backend, Exchange, Traffic
from tests import checkpoints
from tests.models.test_ranks import CPU, Maker, Meeting, ThreadRank
from tests.parity.families import FAMILIES
from tests.parity.reference import Runner

Pieces = Sequence[dict[int, Sequence[int]]]


@dataclass(frozen=True)
class Way:
    """How ranks share positions: tensor parallel and context parallel sizes, and how they exchange what they find."""

    tp: int
    dcp: int
    interleave: int = 1
    backend: Backend = "ag_rs"
    prefill: Prefill = "auto"
    replicated: bool = False


@dataclass(frozen=True)
class ThreadContext:
    """The ranks that share positions with one rank. `log` has what each step sent."""

    meeting: Meeting
    dealing: Dealing
    way: Way
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def backend(self) -> Backend:
        return self.way.backend

    @property
    def prefill(self) -> Prefill:
        return self.way.prefill

    @property
    def replicated(self) -> bool:
        return self.way.replicated

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.dealing.rank, x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.stack([found[self.dealing.rank] for found in self.meeting.exchange(self.dealing.rank, x)]).sum(0)

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([found[self.dealing.rank] for found in self.meeting.exchange(self.dealing.rank, x)])


@dataclass(frozen=True)
class SharingRank(ThreadRank):
    """A tensor parallel rank that shares positions with its neighbours."""

    context: ThreadContext | None = None  # type: ignore[assignment]


def ranks_of(way: Way) -> list[SharingRank]:
    """All ranks of a model; neighbours share positions."""
    every = Meeting(way.tp)
    among = [Meeting(way.dcp) for _ in range(way.tp // way.dcp)]
    return [
        SharingRank(every, rank, ThreadContext(
            among[rank // way.dcp], Dealing(way.dcp, rank % way.dcp, way.interleave), way))
        for rank in range(way.tp)
    ]  # fmt: skip


@dataclass
class Computed:
    """Logits of rank 0 by step, every rank's pools, and what each rank had sent after each step."""

    logits: list[Tensor]
    runners: list[Runner]
    sent: list[list[Traffic]]


def compute(
    path: Path, way: Way | None, steps: Pieces, *, dtype: torch.dtype = torch.float64,
    kv_dtype: torch.dtype | None = None, stale: float = 0.0,
) -> Computed:  # fmt: skip
    """Feed sequences in steps; `way` None: to one rank. Blocks are full of `stale` before."""
    ranks = [Alone()] if way is None else ranks_of(way)

    def run(rank: Alone | SharingRank) -> tuple[list[Tensor], Runner, list[Traffic]]:
        torch.set_num_threads(1)
        runner = Runner(load_model(path, dtype=dtype, device=CPU, ranks=rank, kv_dtype=kv_dtype))
        for pool in runner.pools.values() if stale else ():
            pool.fill_(stale)
        logits, sent = [], []
        for step in steps:
            logits.append(runner.step(dict(step)))
            if rank.context is not None:
                sent.append(copied(rank.context.traffic))
        return logits, runner, sent

    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(run, ranks))
    return Computed(found[0][0], [runner for _, runner, _ in found], [sent for _, _, sent in found])


def copied(traffic: Traffic) -> Traffic:
    return Traffic({kind: replace(sent) for kind, sent in traffic.sent.items()})


def ids(count: int, seed: int) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(4, checkpoints.VOCAB, (count,), generator=rng).tolist()


def mixed_steps() -> Pieces:
    """Prompts whole and in pieces, from one token on, decodes beside them: lengths on both sides of every owner's
    boundary, ranks with nothing of a sequence among them."""
    a, b, c, d = ids(70, 3), ids(42, 4), ids(21, 5), ids(4, 6)
    return [
        {0: a[:33], 1: b[:1]},
        {0: a[33:50], 1: b[1:2], 2: c[:16]},
        *({0: a[50 + i : 51 + i], 1: b[2 + i : 3 + i]} for i in range(4)),
        {0: a[54:55], 1: b[6:39], 2: c[16:19], 3: d[:2]},
        {0: a[55:70], 1: b[39:40], 2: c[19:20], 3: d[2:3]},
        {1: b[40:42], 2: c[20:21], 3: d[3:4]},
    ]


LLAMA1 = partial(checkpoints.tiny_llama, num_key_value_heads=1)
LLAMA2 = checkpoints.tiny_llama
V3 = FAMILIES["deepseek_v3"].make
CASES: dict[str, tuple[Maker, Way]] = {
    "llama-one-kv-head-2": (LLAMA1, Way(2, 2)),
    "llama-one-kv-head-4": (LLAMA1, Way(4, 4)),
    "llama-one-kv-head-4-two-groups": (LLAMA1, Way(4, 2, 2)),
    "llama-one-kv-head-4-interleave-4": (LLAMA1, Way(4, 4, 4)),
    "llama-two-kv-heads-4": (LLAMA2, Way(4, 2)),
    "llama-a2a": (LLAMA1, Way(4, 4, backend="a2a")),
    "llama-replicated": (LLAMA1, Way(4, 4, replicated=True)),
    "llama-replicated-a2a": (LLAMA2, Way(4, 2, 2, "a2a", "query", replicated=True)),
    "llama-queries-sent": (LLAMA1, Way(4, 4, prefill="query")),
    "llama-keys-sent": (LLAMA1, Way(4, 4, 2, prefill="context")),
    "qwen3_moe": (partial(checkpoints.tiny_qwen3_moe, num_key_value_heads=1), Way(4, 4, 2)),
    "deepseek_v3-4": (V3, Way(4, 4)),
    "deepseek_v3-a2a": (V3, Way(4, 4, 2, backend="a2a")),
    "deepseek_v3-replicated": (V3, Way(4, 4, replicated=True)),
    "deepseek_v3-queries-sent": (V3, Way(4, 4, prefill="query")),
    "deepseek_v3-keys-sent": (V3, Way(4, 4, prefill="context")),
    "gpt_oss": (FAMILIES["gpt_oss"].variants["one-kv-head"], Way(4, 4)),
    "gemma3": (FAMILIES["gemma3_text"].make, Way(4, 4)),
    "minimax_m2": (FAMILIES["minimax_m2"].make, Way(4, 2)),
    "glm4_moe": (FAMILIES["glm4_moe"].make, Way(4, 2)),
}
if os.environ.get("FOREBAY_CONTEXT_RANKS"):  # shapes that CI has no time for
    CASES |= {
        "llama-two-kv-heads-4-interleave-8": (LLAMA2, Way(4, 2, 8)),
        "qwen3_moe-replicated": (checkpoints.tiny_qwen3_moe, Way(4, 2, replicated=True)),
        "deepseek_v3-2": (V3, Way(2, 2)),
        "deepseek_v3-4-two-groups": (V3, Way(4, 2, 8)),
        "deepseek_v2": (FAMILIES["deepseek_v2"].make, Way(4, 4)),
        "gpt_oss-a2a": (FAMILIES["gpt_oss"].variants["one-kv-head"], Way(2, 2, backend="a2a")),
    }


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_positions_compute_what_one_computes(case: str, tmp_path: Path) -> None:
    make, way = CASES[case]
    path, steps = make(tmp_path), mixed_steps()
    alone, shared = compute(path, None, steps), compute(path, way, steps)
    for expected, found in zip(alone.logits, shared.logits, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    check_pools(alone.runners[0], shared.runners, way)


STALE = [(LLAMA1, Way(4, 4)), (LLAMA2, Way(4, 2, 8, "a2a", "context")), (V3, Way(4, 4, 2, prefill="query"))]


@pytest.mark.parametrize(("make", "way"), STALE, ids=["llama", "llama-keys-sent", "deepseek_v3"])
def test_what_others_have_left_in_blocks_counts_for_nothing(make: Maker, way: Way, tmp_path: Path) -> None:
    """A block that is given away isn't wiped: a request whose keys were no numbers would spoil all that come after."""
    path, steps = make(tmp_path), mixed_steps()
    alone, shared = compute(path, None, steps), compute(path, way, steps, stale=math.nan)
    for expected, found in zip(alone.logits, shared.logits, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


CLOSE = 1e-4
LIKELIEST = {
    "llama-one-kv-head": (LLAMA1, Way(4, 4)),
    "llama-two-kv-heads": (LLAMA2, Way(4, 2, 4, prefill="query")),
    "qwen3_moe": (partial(checkpoints.tiny_qwen3_moe, num_key_value_heads=1), Way(4, 4, backend="a2a")),
    "deepseek_v3": (V3, Way(4, 4, 2)),
}


@pytest.mark.parametrize("case", LIKELIEST)
def test_in_fp32_the_likeliest_token_is_the_same_unless_two_are_as_good(case: str, tmp_path: Path) -> None:
    make, way = LIKELIEST[case]
    path, steps = make(tmp_path), mixed_steps()
    alone, shared = (torch.cat(compute(path, some, steps, dtype=torch.float32).logits) for some in (None, way))
    other = alone.argmax(dim=1) != shared.argmax(dim=1)
    best = alone.topk(2, dim=1).values
    print(f"{case}: {int(other.sum())} of {len(alone)} rows have another likeliest token")
    assert bool((best[other, 0] - best[other, 1] <= CLOSE).all())
    torch.testing.assert_close(shared, alone, rtol=0, atol=CLOSE)


def test_queries_that_are_normed_together_can_not_be_replicated(tmp_path: Path) -> None:
    path = FAMILIES["minimax_m2"].make(tmp_path)
    with pytest.raises(ConfigError, match="dcp_q_replicate: this family norms all query heads together; leave it out"):
        load_model(path, dtype=torch.float64, device=CPU, ranks=ranks_of(Way(4, 2, replicated=True))[0])


@pytest.mark.parametrize("make", [LLAMA1, V3], ids=["llama", "deepseek_v3"])
def test_what_is_copied_at_a_time_is_bounded(make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached keys come in pieces, the last one not whole; decodes go by as many as a copy may hold: here, one each."""
    path, way, a, b = make(tmp_path), Way(4, 4, 2, prefill="context"), ids(90, 3), ids(60, 4)
    steps = [
        {0: a[:45], 1: b[:33]}, {0: a[45:77], 1: b[33:50]},
        *({0: a[i : i + 1], 1: b[i - 27 : i - 26]} for i in (77, 78)),
    ]  # fmt: skip
    alone = compute(path, None, steps)
    monkeypatch.setattr(flow, "CONTEXT_TOKENS", 32)
    monkeypatch.setattr(flow, "GATHER_BYTES", 1)
    shared = compute(path, way, steps)
    for expected, found in zip(alone.logits, shared.logits, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    layers, size = shared.runners[0].model.info.num_layers, 40 if make is V3 else 2 * 20
    first, second, *_ = shared.sent[0]
    assert second.sent["context"].calls - first.sent["context"].calls == layers * (2 + 2), "45 and 33 by 32"
    # Whole blocks: of 48 and 48 positions each rank has a quarter, and sends it to three others.
    assert second.sent["context"].bytes == layers * 2 * 3 * 12 * size * 8


@pytest.mark.parametrize("make", [LLAMA1, V3], ids=["llama", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_narrower_dtypes_it_is_as_near_as_one_rank_is(make: Maker, dtype: torch.dtype, tmp_path: Path) -> None:
    """Both ways to bring parts together; what is weighed and summed is in fp32. Near to what fp64 gives."""
    path, steps = make(tmp_path), mixed_steps()[:4]
    exact = torch.cat(compute(path, None, steps).logits)

    def error(way: Way | None) -> float:
        found = torch.cat(compute(path, way, steps, dtype=dtype).logits)
        assert found.dtype == torch.float32
        # Of the middle row: where two experts are as good, a rounding chooses another one, and a row is far off.
        return float((found - exact).square().mean(dim=1).sqrt().median())

    alone = error(None)
    for way in (Way(4, 4), Way(4, 4, backend="a2a")):
        assert error(way) < 1.5 * alone


NARROW: dict[str, tuple[Maker, Way]] = {
    "llama": (LLAMA1, Way(2, 2, 2)),
    "llama-keys-sent": (LLAMA1, Way(2, 2, prefill="context")),
    "deepseek_v3": (V3, Way(2, 2, backend="a2a")),
}


@pytest.mark.parametrize("case", NARROW)
def test_kv_in_fp8_is_shared_out_as_well(case: str, tmp_path: Path) -> None:
    """With scales that a checkpoint has: what new tokens see of one another is what is kept of them, too."""
    make, way = NARROW[case]
    path, steps = make(tmp_path), mixed_steps()
    write_kv_scales(path)
    kept = torch.float8_e4m3fn
    alone, shared = (compute(path, some, steps, kv_dtype=kept) for some in (None, way))
    plain = compute(path, None, steps)
    for expected, found, wide in zip(alone.logits, shared.logits, plain.logits, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert not torch.allclose(wide, expected, rtol=0, atol=1e-6), "it makes a difference"
    assert all(pool.dtype == kept for runner in shared.runners for pool in runner.pools.values())


def write_kv_scales(path: Path) -> None:
    """Other ones in each layer, for K and V; of latents it is one."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    for layer in range(layers):
        at = f"model.layers.{layer}.self_attn."
        tensors |= {f"{at}k_scale": torch.tensor(0.02 + 0.01 * layer), f"{at}v_scale": torch.tensor(0.05)}
    save_file(tensors, file, metadata={"format": "pt"})


def check_pools(whole: Runner, parts: list[Runner], way: Way) -> None:
    """A rank's blocks have its positions and no others: the whole pool, dealt out."""
    for group in whole.groups:
        expected = whole.pools[group.name]
        for rank, runner in enumerate(parts):
            found = runner.pools[group.name]
            if group.window is not None:
                assert found.shape[4] == 16, "windows aren't dealt out"
                continue
            head = 0 if group.kind == "latent" else rank * group.kv_heads // way.tp
            dealing = Dealing(way.dcp, rank % way.dcp, way.interleave)
            own = [position for position in range(16) if dealing.owner(position) == dealing.rank]
            assert found.shape[4] == len(own) == 16 // way.dcp
            torch.testing.assert_close(found, expected[:, :, :, head : head + 1, own], rtol=0, atol=1e-11)


# --- what is sent --------------------------------------------------------------------------------------------


def decodes(context: int, count: int) -> Pieces:
    """Two prompts, then steps of nothing but decodes."""
    a, b = ids(context + count, 7), ids(2 * context + count, 8)
    steps = [{0: a[i : i + 1], 1: b[context + i : context + i + 1]} for i in range(context, context + count)]
    return [{0: a[:context], 1: b[: 2 * context]}, *steps]


def exchange_of(way: Way, latent: bool) -> Exchange:
    """What the tiny models' layers exchange for a token in fp64: 4 heads, llama's of 20 values, latents of 28 + 12."""
    key, value = (40, 28) if latent else (20, 20)
    return Exchange(way.dcp, 4 // way.tp, key, value, 8, 8, way.backend, way.replicated)


WAYS = [Way(4, 4), Way(4, 2, backend="a2a"), Way(2, 2, 2, replicated=True), Way(2, 2, 2, "a2a", replicated=True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("latent", [False, True])
def test_a_decode_sends_what_was_worked_out_and_no_keys(way: Way, latent: bool, tmp_path: Path) -> None:
    """Bytes and collectives to the last one, for every layer and token; they don't grow with the context."""
    path = V3(tmp_path) if latent else LLAMA1(tmp_path)
    exchange, rows = exchange_of(way, latent), 2
    for context in (10, 40):
        computed = compute(path, way, decodes(context, 3))
        layers = computed.runners[0].model.info.num_layers
        for sent in computed.sent:
            for before, after in pairwise(sent):
                bytes_ = {kind: after.sent[kind].bytes - before.sent[kind].bytes for kind in before.sent}
                calls = {kind: after.sent[kind].calls - before.sent[kind].calls for kind in before.sent}
                assert bytes_.pop("context") == 0 and calls.pop("context") == 0, "no keys are gathered"
                expected = dict.fromkeys(bytes_, 0) | exchange.sent
                assert bytes_ == {kind: layers * rows * size for kind, size in expected.items()}
                assert sum(calls.values()) == layers * exchange.collectives
        prompts = [sent[0].sent["context"].bytes + sent[0].sent["query"].bytes for sent in computed.sent]
        assert prompts == [0] * way.tp, "nothing is cached yet, so nothing is sent"


@pytest.mark.parametrize("latent", [False, True])
def test_for_long_contexts_the_queries_go_to_the_keys_and_for_short_ones_the_keys_come(
    latent: bool, tmp_path: Path
) -> None:
    path, way, a = (V3 if latent else LLAMA1)(tmp_path), Way(4, 4), ids(120, 9)
    exchange = exchange_of(way, latent)
    row = 8 * 40 if latent else 2 * 8 * 20
    computed = compute(path, way, [{0: a[:100]}, {0: a[100:102]}, {0: a[102:112]}, {1: a[:5]}, {1: a[5:80]}])
    sent = computed.sent[0]
    changes = [
        tuple(after.sent[kind].bytes > before.sent[kind].bytes for kind in ("query", "context"))
        for before, after in pairwise(sent)
    ]
    expected = [exchange.cheaper(*pair, row) for pair in ((2, 100), (10, 102))]
    assert changes == [(way == "query", way == "context") for way in expected] + [(False, False), (False, True)]
    assert exchange.cheaper(75, 5, row) == "context"
    if latent:
        assert expected[0] == "query"
