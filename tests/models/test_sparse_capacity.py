"""Requests at a time with hot buffers, against figures that others have published."""

from __future__ import annotations

import pytest

from forebay.errors import ConfigError
from forebay.models.base import KVGroup, ModelInfo, Sparsity
from forebay.models.sparse_capacity import SparseBlocks, host_bytes_needed, hot_fit, our_blocks

GIB = 1 << 30
HOT_GROUPS, HOT_ROWS, RETAINED, PAGE = 20, 4096, 2, 64


def glm_5_3(kind: str) -> SparseBlocks:
    """Of the published calculator: pages of one size, which hold 64 tokens' keys, or rows of four layers."""
    whole, index, rows = {"fp8": (3_052_800, 184_320, 2_875_392), "bf16": (5_928_192, 294_912, 5_750_784)}[kind]
    return SparseBlocks(PAGE, whole, index, rows, index * HOT_GROUPS * (HOT_ROWS // PAGE + RETAINED))


def kv_of_h200(tp: int = 8) -> int:
    """141 GB at 92 %, less weights and 15 GiB in reserve."""
    return int(141e9 * 0.92 - 19.556 * GIB / tp - 684.167 * GIB / tp - 15 * GIB)


def test_the_published_block_sizes_follow_from_the_model() -> None:
    assert glm_5_3("fp8").rows // PAGE == 78 * 576
    assert glm_5_3("bf16").rows // PAGE == 78 * 1152
    for kind in ("fp8", "bf16"):
        blocks = glm_5_3(kind)
        assert (blocks.whole - blocks.rows) // PAGE == 21 * 132
    assert glm_5_3("fp8").hot == 20 * 64 * 184_320 + 20 * 2 * 184_320
    assert glm_5_3("fp8").index // PAGE == 2_880


def test_a_million_tokens_serve_several_times_as_many() -> None:
    blocks, kv = glm_5_3("fp8"), kv_of_h200()
    found = hot_fit(blocks, 1_000_000, kv, 1536 * GIB)
    # By hand: ceil(1e6 / 64) = 15,625 blocks; 47.7 GB each when full, 3.1 GB when hot, 44.9 GB of host memory.
    assert found.full == kv // (3_052_800 * 15_625)
    assert found.device == kv // 184_320 // (15_625 + 20 * 64 + 40)
    assert found.host == 1536 * GIB // 2_875_392 // 15_625
    assert found.requests == max(found.full, min(found.device, found.host)) >= 3 * max(1, found.full)


def test_whatever_is_scarce_decides() -> None:
    blocks = SparseBlocks(16, whole=100, index=10, rows=90, hot=200)
    assert hot_fit(blocks, 160, kv=3000, host=10**6).requests == 3000 // (10 * 10 + 200) == 10
    assert hot_fit(blocks, 160, kv=3000, host=4500).requests == 5
    assert hot_fit(blocks, 160, kv=3000, host=0).requests == 3, "never fewer than full residency"
    assert hot_fit(blocks, 160, kv=3000, host=10**6, most=4).requests == 4
    assert hot_fit(blocks, 160, kv=3000, host=14_400, host_copies=4).host == 4


def test_a_host_that_can_t_hold_one_request_is_refused() -> None:
    blocks = SparseBlocks(64, 1, 1, 1000, 1)
    assert host_bytes_needed(blocks, 640, memory=20_000) == 12 * 1000
    with pytest.raises(ConfigError, match="95%"):
        host_bytes_needed(blocks, 640, memory=12_100)


def test_our_own_layout() -> None:
    groups = (
        KVGroup("latent", "latent", tuple(range(78)), 1, 576),
        KVGroup("index", "indexer", tuple(range(21)), 1, 128, scaled=True),
    )
    leaders = tuple(min(range(21), key=lambda i: abs(i - layer)) for layer in range(78))
    info = ModelInfo("glm_moe_dsa", 1, 1, 78, 1 << 20, groups, sparse=Sparsity("latent", 2048, leaders))
    blocks = our_blocks(info, 2, hot_rows=4096)
    assert blocks.rows == 16 * 78 * 1152 and blocks.index == 16 * 21 * 132
    assert blocks.whole == blocks.rows + blocks.index
    assert blocks.hot == blocks.rows * (256 + 34)
    found = hot_fit(blocks, 1 << 20, 60 * GIB, 1 << 50)
    assert found.full == 0 and found.requests == 60 * GIB // (blocks.index * 65_536 + blocks.hot) >= 15


def test_a_model_that_isn_t_sparse_has_nothing_to_keep_hot() -> None:
    info = ModelInfo("llama", 1, 1, 1, 4096, (KVGroup("full", "full", (0,), 2, 64),))
    with pytest.raises(ConfigError, match="nothing to keep hot"):
        our_blocks(info, 2, hot_rows=4096)
