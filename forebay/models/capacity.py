"""What a model's KV cache takes, and what fits: of tokens, requests, ranks and tiers. Pure arithmetic.

A rank has `kv_heads / tp` heads of each layer, but never less than one: beyond that, tensor parallelism copies the
cache. Latents have no heads, so every rank has them whole. Decode context parallelism takes those copies apart: of a
group's tokens each rank keeps one in `dcp`. Windows aren't taken apart. Index keys of sparse layers, too, are on every
rank whole; such layers need all positions of a sequence, so they don't go together with `dcp`.

    per token    bytes of groups that grow with the context, on one rank
    fixed        bytes of windows, once the context is longer than they are, on one rank
    whole        what the store keeps of a token or a window, for all ranks together: it sees no ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.errors import ConfigError
from forebay.models.base import KVGroup, ModelInfo

BLOCK_TOKENS = 16

INDEX_BYTES = 2.0
"""The least that a value of an index key takes, if it isn't scaled."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Tensor parallel and decode context parallel sizes. DCP uses the tensor parallel ranks, it adds none."""

    tp: int = 1
    dcp: int = 1

    def check(self, info: ModelInfo) -> None:
        """Raises ConfigError that names the number to change."""
        if self.tp < 1 or self.dcp < 1:
            raise ConfigError(f"tp {self.tp} and dcp {self.dcp}: both are at least 1")
        if self.tp % self.dcp:
            raise ConfigError(f"dcp {self.dcp} must divide tp {self.tp}: it shares the tensor parallel ranks")
        if BLOCK_TOKENS % self.dcp:
            raise ConfigError(f"dcp {self.dcp} must divide the {BLOCK_TOKENS} tokens of a block, which it deals out")
        if self.dcp > 1 and info.sparse is not None:
            raise ConfigError(f"dcp {self.dcp}: this model's layers choose among all positions; leave dcp at 1")
        for group in _growing(info):
            copies = self.copies(group)
            if copies % self.dcp:
                raise ConfigError(
                    f"dcp {self.dcp}: with tp {self.tp} group {group.name!r} ({group.kv_heads} KV heads) is on "
                    f"{copies} rank{'s' * (copies > 1)} at once, and dcp must divide that: it takes only copies apart"
                )

    def heads(self, group: KVGroup) -> int:
        """Of this group on one rank. Raises ConfigError if they can't be shared out."""
        if group.one_row:
            return 1
        if self.tp <= group.kv_heads:
            if group.kv_heads % self.tp:
                raise ConfigError(f"tp {self.tp} must divide the {group.kv_heads} KV heads of group {group.name!r}")
            return group.kv_heads // self.tp
        if self.tp % group.kv_heads:
            raise ConfigError(f"tp {self.tp} must be a multiple of the {group.kv_heads} KV heads of {group.name!r}")
        return 1

    def copies(self, group: KVGroup) -> int:
        """How many ranks have the same head of this group without DCP."""
        return self.tp * self.heads(group) // group.kv_heads


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one request: on one rank, and whole, as the store has it."""

    rank: int
    whole: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of one rank's memory, of which `weights` and `reserve` (activations, graphs, the runtime) are taken
    and `utilisation` may be used at most. `weights` are those of one rank."""

    memory: int
    weights: int = 0
    reserve: int = 0
    utilisation: float = 0.92

    @property
    def kv(self) -> int:
        """Left for KV. Raises ConfigError if that is nothing."""
        left = int(self.memory * self.utilisation) - self.weights - self.reserve
        if left <= 0:
            raise ConfigError(
                f"{self.memory} bytes a rank at {self.utilisation:.0%}, less {self.weights} of weights and "
                f"{self.reserve} in reserve, leave nothing for KV: more memory, a larger tp, or a smaller reserve"
            )
        return left


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits at one context length: requests at a time on the device and in what the store has of memory and of
    files (None: not asked), with each request's bytes."""

    context: int
    footprint: Footprint
    requests: int
    host: int | None
    files: int | None

    @property
    def tokens(self) -> int:
        """On the device at a time."""
        return self.requests * self.context


def per_token(info: ModelInfo, ranks: Ranks, itemsize: float) -> float:
    """Bytes that one more token of context takes on one rank."""
    return sum(_row_bytes(g, ranks.heads(g), itemsize) / ranks.dcp for g in _growing(info))


def per_token_whole(info: ModelInfo, itemsize: float) -> float:
    """Bytes that one more token of context takes in the store."""
    return sum(_row_bytes(g, g.kv_heads, itemsize) for g in _growing(info))


def fixed_whole(info: ModelInfo, itemsize: float) -> float:
    """Bytes of a long request's windows."""
    return sum(_row_bytes(g, g.kv_heads, itemsize) * (g.window or 0) for g in _windows(info))


def footprint(info: ModelInfo, ranks: Ranks, itemsize: float, context: int) -> Footprint:
    """Of a request whose prompt and answer have `context` tokens, in whole blocks."""
    rank = whole = 0.0
    for group in info.kv_groups:
        tokens = _blocks(context if group.window is None else min(context, group.window))
        # Every block is dealt out, so of whole blocks each rank has an equal part.
        own = tokens if group.window is not None else tokens / ranks.dcp
        rank += _row_bytes(group, ranks.heads(group), itemsize) * own
        whole += _row_bytes(group, group.kv_heads, itemsize) * tokens
    return Footprint(round(rank), round(whole))


def fit(
    info: ModelInfo, ranks: Ranks, itemsize: float, budget: Budget, context: int,
    host: int | None = None, files: int | None = None,
) -> Fit:  # fmt: skip
    """How many requests of `context` tokens are there at a time. Raises ConfigError."""
    ranks.check(info)
    taken = footprint(info, ranks, itemsize, context)
    return Fit(
        context, taken, budget.kv // taken.rank,
        None if host is None else host // taken.whole, None if files is None else files // taken.whole,
    )  # fmt: skip


def contexts(longest: int, shortest: int = 4096) -> Sequence[int]:
    """Lengths to show: doubling, up to the longest."""
    lengths = []
    length = min(shortest, longest)
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


def _growing(info: ModelInfo) -> list[KVGroup]:
    return [group for group in info.kv_groups if group.window is None]


def _windows(info: ModelInfo) -> list[KVGroup]:
    return [group for group in info.kv_groups if group.window is not None]


def _row_bytes(group: KVGroup, heads: int, itemsize: float) -> float:
    """Of one token. Index keys have no narrower form than two bytes but the scaled one."""
    if group.scaled:
        return len(group.layers) * group.width
    itemsize = max(itemsize, INDEX_BYTES) if group.kind == "indexer" else itemsize
    return len(group.layers) * group.planes * heads * group.head_dim * itemsize


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
