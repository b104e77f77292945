"""Latent attention gives what its definition gives, whatever the batch is made of, and what unabsorbed heads give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kernels import mla
from forebay.kernels.batch import BLOCK_TOKENS, Batch, pack_batch
from forebay.kernels.mla import latent_attention, latent_attention_reference, write_latents
from tests.kernels.test_attention import leave_junk

LAYERS, HEADS, RANK, ROPE = 3, 3, 10, 6
WIDTH = RANK + ROPE


@dataclass(frozen=True)
class Case:
    batch: Batch
    pool: torch.Tensor
    q: torch.Tensor


def make_case(sequences: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """`sequences` are (query length, context length); blocks are permuted."""
    rng = torch.Generator().manual_seed(seed)
    needed = [-(-(new + context) // BLOCK_TOKENS) for new, context in sequences]
    free = torch.randperm(sum(needed) + 3, generator=rng).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    batch = pack_batch([([0] * new, context) for new, context in sequences], {"g": tables})
    pool = torch.randn((sum(needed) + 3, LAYERS, 1, 1, BLOCK_TOKENS, WIDTH), generator=rng, dtype=torch.float64)
    q = torch.randn(batch.num_tokens, HEADS, WIDTH, generator=rng, dtype=torch.float64)
    return Case(batch, pool.to(dtype), q.to(dtype))


def assert_as_defined(case: Case, within: float = 1e-12) -> None:
    for layer in range(LAYERS):
        args = (case.q, case.pool, layer, case.batch, "g")
        found = latent_attention(*args, scale=0.3, rank=RANK)
        wanted = latent_attention_reference(*args, scale=0.3, rank=RANK)
        torch.testing.assert_close(found, wanted, rtol=0, atol=within)


@pytest.mark.parametrize(
    "sequences",
    [[(7, 0)], [(1, 0)], [(1, 33)], [(70, 50)], [(1, 15), (1, 16), (1, 17)], [(1, 3), (20, 0), (1, 90), (33, 17)]],
)
def test_prefills_and_decodes(sequences: list[tuple[int, int]]) -> None:
    assert_as_defined(make_case(sequences))


@pytest.mark.parametrize("sequences", [[(1, 3)], [(1, 3), (1, 7)], [(1, 20), (1, 40), (1, 47)], [(1, 5), (9, 14)]])
def test_what_others_have_left_in_blocks_counts_for_nothing(sequences: list[tuple[int, int]]) -> None:
    """A block isn't wiped when it changes hands, and 0 times what is no number is none."""
    case = make_case(sequences)
    leave_junk(case)
    assert_as_defined(case)


def test_tiles_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "TILE_QUERIES", 32)
    assert_as_defined(make_case([(100, 21), (65, 0)]))


def test_decodes_are_split_when_a_gather_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "DECODE_GATHER_BYTES", 1)
    assert_as_defined(make_case([(1, 40), (1, 41), (1, 300)]))


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_every_dtype(dtype: torch.dtype, within: float) -> None:
    assert_as_defined(make_case([(40, 30), (1, 40)], dtype), within)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 1, 2, 15, 16, 17, 40]), st.integers(0, 70)), min_size=1, max_size=4))
def test_any_batch(sequences: list[tuple[int, int]]) -> None:
    assert_as_defined(make_case(sequences))


def test_rows_are_written_where_the_slots_say_and_nowhere_else() -> None:
    pool = torch.zeros(5, LAYERS, 1, 1, BLOCK_TOKENS, WIDTH)
    slots = torch.tensor([3 * 16 + 15, 0, 4 * 16])
    rows = torch.arange(1.0, 1 + 3 * WIDTH).view(3, WIDTH)
    write_latents(pool, 1, slots, rows)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        assert torch.equal(pool[slot // 16, 1, 0, 0, slot % 16], row)
    assert (pool != 0).sum() == rows.numel()


def test_absorbed_is_unabsorbed() -> None:
    """Heads with keys and values of their own, projected from the latents, give the same."""
    case = make_case([(9, 20)])
    rng = torch.Generator().manual_seed(1)
    nope, value = 8, 5
    to_key = torch.randn(HEADS, nope, RANK, generator=rng, dtype=torch.float64)
    to_value = torch.randn(HEADS, value, RANK, generator=rng, dtype=torch.float64)
    q_nope = torch.randn(9, HEADS, nope, generator=rng, dtype=torch.float64)
    q_rope = case.q[..., RANK:]
    absorbed = torch.cat((torch.einsum("thn,hnr->thr", q_nope, to_key), q_rope), dim=-1)
    mixed = latent_attention(absorbed, case.pool, 2, case.batch, "g", scale=0.3, rank=RANK)
    found = torch.einsum("thr,hvr->thv", mixed, to_value)

    table = case.batch.groups["g"].block_tables[0]
    rows = case.pool[table, 2, 0, 0].flatten(0, 1)[:29]
    keys = torch.einsum("pr,hnr->hpn", rows[:, :RANK], to_key)
    values = torch.einsum("pr,hvr->hpv", rows[:, :RANK], to_value)
    scores = torch.einsum("thn,hpn->htp", q_nope, keys) + torch.einsum("the,pe->htp", q_rope, rows[:, RANK:])
    scores = (scores * 0.3).masked_fill(torch.ones(9, 29, dtype=torch.bool).triu(21), -torch.inf)
    wanted = torch.einsum("htp,hpv->thv", scores.softmax(-1), values)
    torch.testing.assert_close(found, wanted)
