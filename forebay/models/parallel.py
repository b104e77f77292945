"""How many ranks a worker has and what each of them is, and which models they can share like that.

    rank = prefill context rank * tp + tensor parallel rank

Of the `tp` tensor parallel ranks neighbours, `dcp` at a time, share out the positions of what would else be on all of
them. Every prefill context rank has all that tensor parallelism gives it, and computes its part of long prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.errors import ConfigError
from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.dealing import Dealing, refusal
from forebay.models.base import ModelInfo
from forebay.models.traffic import Backend

ExpertSplit = Literal["inside", "gathered", "exchanged"]
"""How ranks share experts: each expert split over all of them; or dealt out whole, tokens coming by all-gather and sums
going home by reduce-scatter; or dealt out, rows going there and back by all-to-all."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes; `interleave` neighbouring positions are one rank's. `backend`, `replicated`: see `models.context`;
    `experts`: `models.expert_parallel`."""

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    backend: Backend = "ag_rs"
    replicated: bool = False
    experts: ExpertSplit = "inside"

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pcp

    def tensor_rank(self, rank: int) -> int:
        """Its place among the tensor parallel ranks."""
        return rank % self.tp

    def prefill_rank(self, rank: int) -> int:
        """Its place among those that share out prompts."""
        return rank // self.tp

    def dealing(self, rank: int) -> Dealing:
        """What positions are its."""
        return Dealing(self.dcp, self.tensor_rank(rank) % self.dcp, self.interleave)

    def sharing(self, rank: int) -> list[int]:
        """The ranks that share positions with this one, itself among them, in order."""
        first = rank - self.dealing(rank).rank
        return list(range(first, first + self.dcp))

    def reading(self, rank: int) -> list[int]:
        """The ranks that share out prompts with this one, itself among them, in order."""
        return [part * self.tp + self.tensor_rank(rank) for part in range(self.pcp)]


def check_parallel(info: ModelInfo, parallel: Parallel) -> None:
    """Can ranks share this model's positions and prompts like that? Raises ConfigError that names what to change. That
    tensor parallelism can split it `models.ranks.check_split` says."""
    why = refusal(parallel.dcp, parallel.interleave)
    if why is not None:
        raise ConfigError(why)
    if parallel.pcp > 1:
        _check_prompts(info, parallel)
    if parallel.dcp == 1:
        if parallel.interleave > 1 or parallel.replicated:
            raise ConfigError(
                "cp_kv_cache_interleave_size and dcp_q_replicate are for decode_context_parallel_size > 1: "
                "raise that, or leave them out"
            )
        return
    if parallel.tp % parallel.dcp:
        raise ConfigError(
            f"decode_context_parallel_size {parallel.dcp} must divide tensor_parallel_size {parallel.tp}: it takes "
            f"these ranks, and adds none; use {_divisors(parallel.tp)}"
        )
    _check_groups(info, parallel)


def _check_groups(info: ModelInfo, parallel: Parallel) -> None:
    if any(group.kind == "indexer" for group in info.kv_groups):
        raise ConfigError(
            f"decode_context_parallel_size {parallel.dcp}: {info.family} chooses the positions that it attends to, "
            "which isn't supported with positions on several ranks; use 1"
        )
    growing = [group for group in info.kv_groups if group.kind in ("full", "latent") and group.window is None]
    if not growing:
        raise ConfigError(
            f"decode_context_parallel_size {parallel.dcp}: every layer of {info.family} has a window, and windows "
            "aren't dealt out; use 1"
        )
    for group in growing:
        heads = 1 if group.kind == "latent" else group.kv_heads
        copies = max(parallel.tp // heads, 1)
        if copies % parallel.dcp:
            what = "latents are" if group.kind == "latent" else f"{heads} KV heads are, each,"
            raise ConfigError(
                f"decode_context_parallel_size {parallel.dcp}: with tensor_parallel_size {parallel.tp} this model's "
                f"{what} on {copies} rank{'s' * (copies > 1)}, and only such copies can be dealt out; use "
                f"{_divisors(copies)}, or tensor_parallel_size {heads * parallel.dcp} or a multiple of it"
            )


def _check_prompts(info: ModelInfo, parallel: Parallel) -> None:
    kinds = {group.kind for group in info.kv_groups}
    odd = sorted(kinds - {"full", "latent", "window", "indexer"})
    if odd:
        raise ConfigError(
            f"prefill_context_parallel_size {parallel.pcp}: {info.family} has a group of kind {odd[0]!r}, whose layers "
            "can't compute a prompt's middle without what is before it; use 1"
        )


def _divisors(number: int) -> str:
    found = [str(n) for n in range(1, min(number, BLOCK_TOKENS) + 1) if number % n == 0 and BLOCK_TOKENS % n == 0]
    return " or ".join(found)
