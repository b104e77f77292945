"""What hot buffers are told, and what follows from it for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forebay.errors import ConfigError
from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.hot import SLOTS_MAX
from forebay.models.base import ModelInfo
from forebay.workers.hot.residency import TAIL
from forebay.workers.prefix import units_of


def default_rows(top_k: int, speculated: int = 0) -> int:
    """Rows of a region: twice what a step reads, or room for every row of a verification and one set more."""
    return (speculated + 2) * top_k


@dataclass(frozen=True, slots=True)
class HotSettings:
    """Of one worker. `rows` are those of a region in every layer, `regions` how many there can be, `group` the number
    of the cache group whose rows are chosen; `sharers` are the layers that choose, by their place in the group, each
    with those that take its choice, itself included. `deadline_s`: how long a request may lack room or rows; then it is
    computed anew."""

    group: int
    sharers: Mapping[int, tuple[int, ...]]
    rows: int
    top_k: int
    regions: int
    chunk_tokens: int
    deadline_s: float

    @property
    def blocks(self) -> int:
        """Device blocks of one region."""
        return self.rows // BLOCK_TOKENS

    @property
    def step_tokens(self) -> int:
        """Tokens that one step may feed of a request with a region: each reads `top_k` rows, and all have to fit."""
        return self.rows // self.top_k

    @property
    def footprint(self) -> int:
        """Device blocks of a request with a region: the region, the chunk that fills, one that is being copied, what a
        step adds, and the tail."""
        return self.blocks + 2 * units_of(self.chunk_tokens) + units_of(self.step_tokens) + 1 + TAIL


def settings_for(
    info: ModelInfo, rows: int, *, regions: int, chunk_tokens: int, deadline_s: float
) -> HotSettings:
    """For a model, with `rows` (0: as many as are usual). Raises ConfigError that names the setting."""
    sparse = info.sparse
    if sparse is None or sparse.block != 1:
        raise ConfigError(
            f"hot_buffer_rows needs a model whose layers choose single positions, such as deepseek_v32 or glm_moe_dsa; "
            f"{info.family} isn't one"
        )
    rows = rows or default_rows(sparse.top_k)
    rounded = -(-rows // BLOCK_TOKENS) * BLOCK_TOKENS
    if not sparse.top_k <= rounded <= SLOTS_MAX:
        raise ConfigError(
            f"hot_buffer_rows is {rows}; it must lie between the {sparse.top_k} rows that a step of this model reads "
            f"and {SLOTS_MAX}"
        )
    group = next(i for i, group in enumerate(info.kv_groups) if group.name == sparse.group)
    layers = info.kv_groups[group].layers
    chosen_by = [layers.index(sparse.leaders[layer]) for layer in layers]
    sharers = {
        leader: tuple(place for place, other in enumerate(chosen_by) if other == leader)
        for leader in sorted(set(chosen_by))
    }
    return HotSettings(group, sharers, rounded, sparse.top_k, regions, chunk_tokens, deadline_s)
