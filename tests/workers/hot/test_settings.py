"""What hot buffers are told is checked at the start, and what is wrong names the number to change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.hisparse_books import tiny_glm
from forebay.errors import ConfigError
from forebay.models.base import KVGroup, ModelInfo, Sparsity
from forebay.workers.assembly import namespace_of
from forebay.workers.config import WorkerConfig
from forebay.workers.hot.making import hot_blocks
from forebay.workers.hot.settings import default_rows, settings_for
from forebay.workers.prefix import GroupShape

CONFIG = WorkerConfig(Path("none"), "none", store="unix:///none", hot_buffers=True)


def test_a_region_has_twice_what_a_step_reads_or_room_for_every_row_of_a_verification() -> None:
    assert default_rows(2048) == 4096
    assert default_rows(2048, speculated=3) == 5 * 2048


def test_layers_that_share_a_choice_share_their_slots() -> None:
    groups = (KVGroup("latent", "latent", (0, 1, 2, 3), 1, 64), KVGroup("index", "indexer", (0, 1), 1, 32))
    info = ModelInfo("glm_moe_dsa", 1, 1, 4, 4096, groups, sparse=Sparsity("latent", 64, (0, 1, 1, 1)))
    settings = settings_for(info, 0, regions=2, chunk_tokens=32, deadline_s=1)
    assert settings.sharers == {0: (0,), 1: (1, 2, 3)}
    assert settings.rows == 128 and settings.step_tokens == 2 and settings.blocks == 8


@pytest.mark.parametrize("rows", [100, 40_000])
def test_rows_must_hold_what_a_step_reads_and_fit_their_order(rows: int) -> None:
    with pytest.raises(ConfigError, match="hot_buffer_rows"):
        settings_for(tiny_glm(), rows, regions=1, chunk_tokens=32, deadline_s=1)


def test_a_model_that_chooses_blocks_or_nothing_has_no_hot_buffers() -> None:
    for sparse in (None, Sparsity("latent", 4, (0, 0), block=128)):
        with pytest.raises(ConfigError, match="single positions"):
            settings_for(replace(tiny_glm(), sparse=sparse), 0, regions=1, chunk_tokens=32, deadline_s=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"store": None}, "need a store"), ({"prefill_context_parallel_size": 2}, "every rank"),
        ({"device": "cuda"}, "for the CPU"),
        ({"hot_buffer_rows": -1}, "hot_buffer_rows"), ({"hot_buffer_deadline_s": 0.0}, "hot_buffer_deadline"),
    ],
)  # fmt: skip
def test_what_can_t_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(CONFIG, **change).check()  # type: ignore[arg-type]


def test_ranks_may_share_a_model_with_hot_buffers() -> None:
    replace(CONFIG, tensor_parallel_size=4).check()


def test_a_device_that_can_t_hold_one_region_says_how_much_it_takes() -> None:
    info = tiny_glm()
    shapes = [GroupShape(geometry, 32, 64) for geometry in namespace_of(info, "float32", b"w" * 32, 32).groups]
    sizes = [group.granule_bytes(torch.float32) for group in info.kv_groups]
    settings = settings_for(info, 0, regions=1, chunk_tokens=32, deadline_s=1)
    enough = replace(CONFIG, hot_buffer_pool_tokens=16 * settings.footprint, device_memory=1 << 22)
    blocks = hot_blocks(enough, info, settings, shapes, sizes)
    assert blocks[0] == settings.footprint + 1 and blocks[1] * sizes[1] <= (1 << 22) - blocks[0] * sizes[0]
    few = replace(enough, hot_buffer_pool_tokens=16 * settings.footprint - 32)
    with pytest.raises(ConfigError, match=f"hot_buffer_pool_tokens to {16 * settings.footprint}"):
        hot_blocks(few, info, settings, shapes, sizes)
