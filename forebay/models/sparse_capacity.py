"""How many requests a sparse model serves at a time with hot buffers, and without. Pure arithmetic.

    full    everything of a request is on the device
    hot     its index keys, a hot buffer and a few pages are; its rows are in host memory

    device limit   memory for KV / (index keys of the context + hot buffer + retained pages)
    host limit     host memory / rows of the context
    requests       the smaller of the two, but never fewer than full residency serves
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import ConfigError
from forebay.models.base import ModelInfo

BLOCK_TOKENS = 16
HOST_SHARE = 0.95
"""Of a host's memory that may be asked for."""


@dataclass(frozen=True, slots=True)
class SparseBlocks:
    """Bytes of one block of `tokens` tokens: `whole` with everything in it, `index` of its keys as the device holds
    them, `rows` of its rows as host memory does. `hot` are the bytes of one request's hot buffer and what it retains.

    An engine whose pages are all of one size gives a page to each block of keys; then `index` is a page.
    """

    tokens: int
    whole: int
    index: int
    rows: int
    hot: int

    def blocks(self, context: int) -> int:
        """That a context takes."""
        return -(-context // self.tokens)


@dataclass(frozen=True, slots=True)
class HotFit:
    """Requests of one length at a time: with everything on the device (`full`), what the device and what host memory
    let be under way with hot buffers, and the result."""

    context: int
    full: int
    device: int
    host: int
    requests: int


def hot_fit(
    blocks: SparseBlocks, context: int, kv: int, host: int, *, most: int | None = None, host_copies: int = 1
) -> HotFit:
    """What fits into `kv` bytes of device memory and `host` bytes of host memory. `host_copies`: 1 where ranks share a
    mapping, else one a rank. `most` caps all of it, as an engine's number of sequences does."""
    count = blocks.blocks(context)
    full = kv // (blocks.whole * count)
    device = kv // (blocks.index * count + blocks.hot)
    in_host = host // (blocks.rows * count * host_copies)
    cap = most if most is not None else max(full, device, in_host)
    found = max(full, min(device, in_host))
    return HotFit(context, min(full, cap), min(device, cap), min(in_host, cap), min(found, cap))


def host_bytes_needed(blocks: SparseBlocks, longest: int, memory: int, *, host_copies: int = 1) -> int:
    """Host memory that one request of the `longest` length needs, with two blocks to spare. Raises ConfigError if that
    is more than what a host of `memory` bytes should give."""
    needed = (blocks.blocks(longest) + 2) * blocks.rows * host_copies
    if needed > memory * HOST_SHARE:
        raise ConfigError(
            f"one request of {longest} tokens needs {needed} bytes of host memory, {HOST_SHARE:.0%} of {memory} are "
            "less: a shorter context, or more memory"
        )
    return needed


def our_blocks(info: ModelInfo, itemsize: float, hot_rows: int, chunk_tokens: int = 256) -> SparseBlocks:
    """As this engine lays them out: rows and index keys have pools of their own, and a hot buffer's blocks serve all
    layers. A request retains the chunk that fills, and one that is being copied. Raises ConfigError for a model that
    isn't sparse."""
    if info.sparse is None or info.sparse.block != 1:
        raise ConfigError(f"{info.family} has no layers that choose single positions: there is nothing to keep hot")
    sizes = {
        g.name: round(len(g.layers) * g.planes * g.kv_heads * BLOCK_TOKENS * _row_bytes(g.width, g.scaled, itemsize))
        for g in info.kv_groups
    }
    rows = sizes[info.sparse.group]
    retained = 2 * -(-chunk_tokens // BLOCK_TOKENS) + 2
    whole = sum(sizes.values())
    return SparseBlocks(BLOCK_TOKENS, whole, whole - rows, rows, rows * (-(-hot_rows // BLOCK_TOKENS) + retained))


def _row_bytes(width: int, scaled: bool, itemsize: float) -> float:
    return float(width) if scaled else width * itemsize
