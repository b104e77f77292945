"""Whole blocks are chosen for every KV head, and attended to, as the definition says."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels import blocks as blocks_module
from forebay.kernels.blocks import Blocks, block_sparse_attention, block_sparse_reference, choose_blocks
from tests.kernels.sparse_cases import make_case, noise

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, KV_HEADS, DIM, INDEX_DIM, SCALE = 4, 2, 8, 6, 0.4
MIXED = [(1, 3), (20, 0), (1, 90), (33, 17), (5, 43)]


def check(blocks: Blocks) -> None:
    """Each sequence's new rows, against the whole sequence worked out from its first position on."""
    keys = make_case(MIXED, INDEX_DIM)
    batch, layer = keys.batch, 1
    values = noise(len(keys.pool), 3, 2, KV_HEADS, 16, DIM, seed=9)
    q, index_q = noise(batch.num_tokens, HEADS, DIM, seed=3), noise(batch.num_tokens, KV_HEADS, INDEX_DIM, seed=4)
    tables = batch.groups["g"].block_tables
    chosen = choose_blocks(index_q, keys.pool, layer, batch, "g", blocks)
    found = block_sparse_attention(q, values, layer, tables, chosen, blocks.size, scale=SCALE)
    for index, span in enumerate(batch.spans):
        rows, total = slice(span.query_start, span.query_end), span.total_len
        pages = values[tables[index, : -(-total // 16)], layer]  # [n, 2, kv_heads, 16, dim]
        k, v = pages.transpose(0, 1).transpose(2, 3).flatten(1, 2)[:, :total]
        whole_q, whole_index = (noise(total, *x.shape[1:], seed=8) for x in (q, index_q))
        whole_q[span.context_len :], whole_index[span.context_len :] = q[rows], index_q[rows]
        wanted = block_sparse_reference(whole_q, k, v, whole_index, keys.rows(layer, index), blocks, scale=SCALE)
        torch.testing.assert_close(found[rows], wanted[span.context_len :], rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [7, 16, 32])
@pytest.mark.parametrize(("top_k", "local"), [(1, 1), (3, 1), (3, 2), (2, 0), (20, 1)])
def test_as_defined(size: int, top_k: int, local: int) -> None:
    check(Blocks(size, top_k, local))


def test_tiles_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "SCORE_BYTES", 1)
    monkeypatch.setattr(blocks_module, "GATHER_BYTES", 1)
    check(Blocks(7, 3, 1))


def test_only_the_rows_that_are_wanted() -> None:
    keys, blocks = make_case(MIXED, INDEX_DIM), Blocks(7, 3, 1)
    index_q = noise(keys.batch.num_tokens, KV_HEADS, INDEX_DIM, seed=4)
    every = choose_blocks(index_q, keys.pool, 0, keys.batch, "g", blocks)
    rows = torch.tensor([0, 5, 21, 40])
    some = choose_blocks(index_q[rows], keys.pool, 0, keys.batch, "g", blocks, rows)
    assert torch.equal(some.blocks, every.blocks[rows]) and torch.equal(some.ends, every.ends[rows])
