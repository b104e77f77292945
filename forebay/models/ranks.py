"""Tensor parallel ranks, as a model sees them: which part of each tensor is this rank's, and their collectives.

    whole on every rank   norms, routers, projections into latents, the residual stream
    split by rows         q, k, v by heads; gate and up by columns of the MLP; embedding and head by tokens
    split by columns      the projections behind those: each rank has a part of the sum, which all ranks then take

KV heads fewer than ranks are held by several neighbours, each of which computes them. Experts are split inside, each
over all ranks: their load is even whatever the router chooses, and nothing has to be exchanged but the layer's sum.
Or they are dealt out whole (`expert_parallel.py`).
Nothing here knows how ranks reach each other: `forebay.workers.ranks` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from forebay.errors import ConfigError
from forebay.models.base import KVGroup, ModelInfo
from forebay.models.config import Config
from forebay.models.context import Context, is_dealt
from forebay.models.parallel import ExpertSplit
from forebay.models.prompts import Prompts


class Ranks(Protocol):
    """This rank among its like. Collectives are entered by all ranks, in the same order, or by none."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def experts(self) -> ExpertSplit: ...

    @property
    def context(self) -> Context | None:
        """Those among them that share a sequence's positions with this one; None: each has all of them."""

    @property
    def prompts(self) -> Prompts | None:
        """Those beside them that share out prompts' new tokens with this one; None: each computes all of them."""

    def sum(self, x: Tensor) -> Tensor:
        """`x`, summed over all ranks in place: the same bits on each. It is contiguous."""

    def gather(self, x: Tensor) -> Tensor | None:
        """Every rank's `x` [n, m], of equal shapes, side by side on rank 0: [n, size * m]; None on the others."""

    def gather_all(self, x: Tensor) -> Tensor:
        """Every rank's `x` [n, ...], of equal shapes, one behind the other on each rank: [size * n, ...]."""

    def sum_parts(self, x: Tensor) -> Tensor:
        """This rank's n of the rows of `x` [size * n, ...], summed over all ranks in the order of the ranks."""

    def exchange(self, x: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Rows of `x` [sum of given, ...], the first `given[0]` to rank 0 and so on, for those that the others give,
        `taken[r]` by rank r, in the order of the ranks: [sum of taken, ...]. Counts may be 0."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One rank that has everything."""

    rank: int = 0
    size: int = 1
    context: Context | None = None
    prompts: Prompts | None = None
    experts: ExpertSplit = "inside"

    def sum(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """`x` itself."""
        return x

    def gather_all(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def sum_parts(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def exchange(self, x: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """`x` itself."""
        assert list(given) == list(taken) == [len(x)], (given, taken, x.shape)
        return x


ALONE = Alone()


def share(total: int, ranks: Ranks) -> range:
    """This rank's part of `total` features: equal parts, or as near as whole numbers come."""
    return range(total * ranks.rank // ranks.size, total * (ranks.rank + 1) // ranks.size)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's query heads, and the KV heads that they look at."""

    q: range
    kv: range


def share_heads(heads: int, kv_heads: int, ranks: Ranks) -> HeadShare:
    """Equal parts of the query heads, and of the KV heads or one of these that neighbours share. Raises ConfigError."""
    check_heads(heads, kv_heads, ranks.size)
    if kv_heads >= ranks.size:
        return HeadShare(share(heads, ranks), share(kv_heads, ranks))
    first = ranks.rank // (ranks.size // kv_heads)
    return HeadShare(share(heads, ranks), range(first, first + 1))


def held_group(group: KVGroup, ranks: Ranks) -> KVGroup:
    """A cache group as one rank's pool has it: its KV heads, but latents whole; its positions, where they are dealt
    out."""
    context = ranks.context if is_dealt(group, ranks.context) else None
    tokens = group.block_tokens if context is None else context.dealing.block_tokens
    heads = 1 if group.one_row else max(group.kv_heads // ranks.size, 1)
    return replace(group, kv_heads=heads, block_tokens=tokens)


def vocabulary_share(vocab: int, ranks: Ranks) -> range:
    """This rank's tokens: equal parts, the last one shorter if need be."""
    per = -(-vocab // ranks.size)
    return range(min(ranks.rank * per, vocab), min((ranks.rank + 1) * per, vocab))


class Embedding:
    """Rows of a table by token id. Each rank has its part of the tokens; the others' come by a sum with zeros."""

    def __init__(self, weight: Tensor, tokens: range, ranks: Ranks = ALONE) -> None:
        self._weight, self._tokens, self._ranks = weight, tokens, ranks
        self.dtype, self.device = weight.dtype, weight.device

    def __call__(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, hidden], the caller's own."""
        if self._ranks.size == 1:
            return F.embedding(ids, self._weight)
        local = ids - self._tokens.start
        elsewhere = (local < 0) | (local >= len(self._tokens))
        found = F.embedding(local.masked_fill_(elsewhere, 0), self._weight)
        return self._ranks.sum(found.masked_fill_(elsewhere[:, None], 0))


# --- what can't be split -------------------------------------------------------------------------------------


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raises ConfigError that names the number to change."""
    if size == 1:
        return
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size in possible:
        return
    what = f"{heads} attention heads and {kv_heads} KV heads" if kv_heads != heads else f"{heads} attention heads"
    raise ConfigError(
        f"tensor_parallel_size {size} can't split this model's {what} evenly; use {_or(possible)} instead"
    )


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_experts(config: Config, size: int) -> None:
    """May `size` ranks deal out this model's experts? Raises ConfigError that says what to change."""
    counts = [config.size(name) for name in EXPERT_COUNTS if name in config]
    if not counts:
        raise ConfigError("this model has no experts; leave enable_expert_parallel out")
    if counts[0] < size:
        raise ConfigError(
            f"tensor_parallel_size {size} leaves a rank without any of {counts[0]} experts; use {counts[0]} or fewer, "
            "or leave enable_expert_parallel out"
        )


def check_split(config: Config, info: ModelInfo, size: int, experts: ExpertSplit = "inside") -> None:
    """May `size` ranks share this model? `config` is the language model's. Raises ConfigError; reads no weights."""
    if experts != "inside":
        check_experts(config, size)
    heads = config.size("num_attention_heads")
    for group in info.kv_groups:
        # Latents have no heads of their own: every rank keeps all of them, whatever heads it computes.
        check_heads(heads, 1 if group.one_row else group.kv_heads, size)
    for name in ("intermediate_size", "moe_intermediate_size")[: 2 if experts == "inside" else 1]:
        if name in config and config.size(name) < size:
            raise ConfigError(f"tensor_parallel_size {size} is more than the {config.size(name)} of {name}; use fewer")
    if size > 1 and len(vocabulary_share(info.vocab_size, Alone(size - 1, size))) == 0:
        raise ConfigError(f"tensor_parallel_size {size} leaves one without any of {info.vocab_size} tokens; use fewer")


def _or(numbers: list[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
