"""What a rank says of itself, and why it may be refused: before any byte moves, not when bytes are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from forebay.kvstore.geometry import MATCH_UNIT, GroupGeometry
from forebay.kvstore.identity import Namespace
from forebay.kvstore.layout.planes import STATE_ORDER, TOKEN_ORDER, AxisName, Order, planes_of

RANKS_MAX = 4096
BLOCK_TOKENS_MAX = 65536
BLOCKS_MAX = 2**32
STAGES_MAX = 1024


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of an engine: its place among the ranks, and how its buffers lie.

    Tensor parallelism splits heads (or shares one, where there are more ranks than heads), `stages` gives the
    model layers of each pipeline stage, decode context parallelism deals tokens out, `interleave` at a time, except
    in the groups that `undivided` names. `dcp_ranks` says whether its ranks are devices of their own or those
    tensor parallel ranks that would hold the same heads. Prefill context parallel ranks all end up with the same.

    Buffers are `blocks` pool blocks of `block_tokens` of the rank's own tokens; `order` is how their axes nest, the
    outermost first, `state_order` the same for recurrent groups, where a block is one state. `blocks` may be left
    away where blocks are outermost.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    stages: tuple[int, ...] = ()
    dcp_rank: int = 0
    dcp_size: int = 1
    interleave: int = 1
    dcp_ranks: Literal["own", "tp"] = "own"
    undivided: tuple[str, ...] = ()
    pcp_rank: int = 0
    pcp_size: int = 1
    block_tokens: int = MATCH_UNIT
    blocks: int = 0
    order: Order = TOKEN_ORDER
    state_order: Order = STATE_ORDER

    def divides(self, group: GroupGeometry) -> bool:
        """Are this group's tokens dealt out over the context parallel ranks?"""
        return self.dcp_size > 1 and group.name not in self.undivided

    def stage_layers(self, group: GroupGeometry) -> range:
        """Which of the group's layers, by their place in it, this stage has."""
        if self.pp_size == 1:
            return range(len(group.layers))
        first = sum(self.stages[: self.pp_rank])
        last = first + self.stages[self.pp_rank]
        mine = [place for place, layer in enumerate(group.layers) if first <= layer < last]
        return range(mine[0], mine[-1] + 1) if mine else range(0)


def check_shard(namespace: Namespace, shard: Shard) -> str | None:
    """Why a rank of this shape can't write or read this namespace, naming the number to change, or None."""
    return next((why for why in _refusals(namespace, shard) if why), None)


def _refusals(namespace: Namespace, shard: Shard) -> Iterator[str | None]:
    yield _check_ranks(shard)
    yield _check_stages(namespace, shard)
    yield _check_context(namespace, shard)
    yield _check_buffers(shard)
    for group in namespace.groups:
        why = _check_heads(group, shard) or _check_context_of(group, shard)
        yield f"group {group.name!r}: {why}" if why else None


def _check_ranks(shard: Shard) -> str | None:
    for name in ("tp", "pp", "dcp", "pcp"):
        rank, size = getattr(shard, f"{name}_rank"), getattr(shard, f"{name}_size")
        if not 1 <= size <= RANKS_MAX:
            return f"{name}_size {size} must be 1 to {RANKS_MAX}"
        if not 0 <= rank < size:
            return f"{name}_rank {rank} must be 0 to {size - 1}, {name}_size is {size}"
    return None


def _check_stages(namespace: Namespace, shard: Shard) -> str | None:
    if shard.pp_size == 1 and not shard.stages:
        return None
    if len(shard.stages) != shard.pp_size or shard.pp_size > STAGES_MAX:
        return f"stages has {len(shard.stages)} entries, pp_size is {shard.pp_size}: give each stage's layers"
    if min(shard.stages) < 1:
        return f"stages {shard.stages}: each stage has a layer at least, so lower pp_size {shard.pp_size}"
    last = max(group.layers[-1] for group in namespace.groups)
    if sum(shard.stages) <= last:
        return f"stages {shard.stages} are {sum(shard.stages)} layers in all, but a cache group has layer {last}"
    return None


def _check_context(namespace: Namespace, shard: Shard) -> str | None:
    names = [group.name for group in namespace.groups]
    unknown = next((name for name in shard.undivided if name not in names), None)
    if unknown is not None:
        return f"undivided names {unknown!r}, the namespace's groups are {', '.join(names)}"
    if shard.interleave < 1:
        return f"interleave {shard.interleave} must be positive"
    if shard.dcp_size == 1:
        return None
    if MATCH_UNIT % shard.interleave and shard.interleave % MATCH_UNIT:
        return f"interleave {shard.interleave} neither divides the match unit of {MATCH_UNIT} nor is a multiple of it"
    if shard.dcp_ranks == "tp" and shard.tp_size % shard.dcp_size:
        return f"dcp_size {shard.dcp_size} doesn't divide tp_size {shard.tp_size}, whose ranks it uses"
    if shard.dcp_ranks == "tp" and shard.dcp_rank != shard.tp_rank % shard.dcp_size:
        return f"dcp_rank {shard.dcp_rank} of tp_rank {shard.tp_rank} must be {shard.tp_rank % shard.dcp_size}"
    return None


def _check_buffers(shard: Shard) -> str | None:
    if not 1 <= shard.block_tokens <= BLOCK_TOKENS_MAX:
        return f"block_tokens {shard.block_tokens} must be 1 to {BLOCK_TOKENS_MAX}"
    if not 0 <= shard.blocks <= BLOCKS_MAX:
        return f"blocks {shard.blocks} must be 0 to {BLOCKS_MAX}"
    if shard.dcp_size > 1 and shard.block_tokens % shard.interleave:
        return (
            f"block_tokens {shard.block_tokens} must be a multiple of interleave {shard.interleave}, "
            "or a block isn't the same stretch of the prompt on every rank"
        )
    for name, order, canonical in (
        ("order", shard.order, TOKEN_ORDER),
        ("state_order", shard.state_order, STATE_ORDER),
    ):
        if sorted(order) != sorted(canonical):
            return f"{name} {order} must have each of {', '.join(canonical)} once"
        if order[0] != "block" and not shard.blocks:
            return f"blocks must be given where {name} doesn't begin with it"
    return _check_state_order(shard.state_order)


def _check_state_order(order: Order) -> str | None:
    # The planes of a state have different numbers of heads, channels and taps: those nest inside of what tells
    # the planes apart, or they would be no arrays.
    place = {axis: at for at, axis in enumerate(order)}
    nests: tuple[tuple[AxisName, AxisName], ...] = (
        ("tensor", "field"), ("tensor", "tap"), ("tensor", "head"), ("tensor", "channel"),
        ("field", "head"), ("field", "channel"),
    )  # fmt: skip
    for outer, inner in nests:
        if place[outer] > place[inner]:
            return f"state_order {order}: {outer} must come before {inner}"
    return None


def _check_heads(group: GroupGeometry, shard: Shard) -> str | None:
    for plane in planes_of(group):
        if plane.heads % shard.tp_size and shard.tp_size % plane.heads:
            what = (
                "kv_heads" if plane.tensor == 0 or not group.recurrent else f"heads of {group.conv[plane.field].name!r}"
            )
            return f"tp_size {shard.tp_size} must divide its {plane.heads} {what} or be a multiple of them"
    return None


def _check_context_of(group: GroupGeometry, shard: Shard) -> str | None:
    if not shard.divides(group):
        return None
    if group.recurrent:
        return f"a state has no tokens to deal out over dcp_size {shard.dcp_size}: name the group in undivided"
    replicas = max(shard.tp_size // group.kv_heads, 1)
    if shard.dcp_ranks == "tp" and replicas % shard.dcp_size:
        return (
            f"dcp_size {shard.dcp_size} must divide the {replicas} ranks that share a head "
            f"(tp_size {shard.tp_size} over {group.kv_heads} kv_heads), or the group must be named in undivided"
        )
    return None
