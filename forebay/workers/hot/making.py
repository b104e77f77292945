"""Holdings and the blocks of each group, with hot buffers or without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from forebay.errors import ConfigError
from forebay.kvstore.identity import MATCH_UNIT
from forebay.models.base import ModelInfo
from forebay.workers.config import WorkerConfig
from forebay.workers.holdings import Holdings, PoolListener
from forebay.workers.hot.holdings import HotHoldings
from forebay.workers.hot.settings import HotSettings, settings_for
from forebay.workers.prefix import GroupShape, units_of
from forebay.workers.sizing import divide

POOL_SHARE = 2
"""Rows get one part in so many of the device's memory, index keys the rest, if nobody says otherwise."""


def make_holdings(
    config: WorkerConfig,
    info: ModelInfo,
    shapes: Sequence[GroupShape],
    block_bytes: Sequence[int],
    listener: PoolListener,
    release: Callable[[Sequence[int]], None],
) -> Holdings:
    """The books of a worker, over as many blocks as it may have. `release` gives leases back. Raises ConfigError."""
    if not config.hot_buffers:
        blocks = divide(shapes, block_bytes, config.device_memory, config.max_tokens, info.max_context)
        return Holdings(shapes, blocks, listener)
    settings = settings_for(
        info, config.hot_buffer_rows, regions=config.max_num_seqs, chunk_tokens=config.chunk_tokens,
        deadline_s=config.hot_buffer_deadline_s,
    )  # fmt: skip
    blocks = hot_blocks(config, info, settings, shapes, block_bytes)
    pages = config.hot_buffer_host_tokens // MATCH_UNIT
    return HotHoldings(shapes, blocks, listener, settings, pages, release, time.monotonic)


def hot_blocks(
    config: WorkerConfig, info: ModelInfo, settings: HotSettings, shapes: Sequence[GroupShape],
    block_bytes: Sequence[int],
) -> tuple[int, ...]:  # fmt: skip
    """Blocks of each group where rows needn't all be on the device. Raises ConfigError."""
    sparse, memory = settings.group, config.device_memory
    if config.hot_buffer_pool_tokens is not None:
        rows = units_of(config.hot_buffer_pool_tokens) + 1
    elif config.max_tokens is not None:
        rows = units_of(config.max_tokens) + 1
    else:
        rows = memory // POOL_SHARE // block_bytes[sparse]
    if rows < settings.footprint:
        raise ConfigError(
            f"the device holds {rows} blocks of rows, and one request with a hot buffer of {settings.rows} rows takes "
            f"{settings.footprint}: raise hot_buffer_pool_tokens to {settings.footprint * MATCH_UNIT} tokens (or "
            "device_memory), or lower hot_buffer_rows or chunk_tokens"
        )
    others = [shape for group, shape in enumerate(shapes) if group != sparse]
    sizes = [size for group, size in enumerate(block_bytes) if group != sparse]
    left = max(0, memory - rows * block_bytes[sparse])
    blocks = list(divide(others, sizes, left, config.max_tokens, info.max_context))
    blocks.insert(sparse, rows)
    return tuple(blocks)
