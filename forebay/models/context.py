"""Attention over positions that ranks share out: each asks the others for what their part of the keys gives.

    decode   queries of all heads --> every rank, over its own positions --> merged, each rank's own heads
    prefill  new tokens over new tokens: every rank has these keys, so nothing is sent
             new tokens over cached ones: as a decode, or the cached keys come to all; whichever sends less

The ranks that share the positions are those that tensor parallelism gives the same KV head, or all latents: they
compute the new keys all the same, and each keeps its own. Without them every rank would keep all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS, Batch, SequenceSpan
from forebay.kernels.dealing import Dealing
from forebay.kernels.lse import Lse, Partial, merge_parts
from forebay.kernels.partial import (
    Keys,
    Stored,
    attend_all,
    attend_causal,
    attend_lengths,
    exact,
    nothing_seen,
    weigh,
    with_sinks,
)
from forebay.models.base import KVGroup
from forebay.models.prompts import everyones, kept_slots
from forebay.models.traffic import Backend, Exchange, Traffic

if TYPE_CHECKING:
    from forebay.models.ranks import Ranks

GATHER_BYTES = 4 * 2**20
"""The most keys that one batch of decodes copies out of the pool at a time."""

CONTEXT_TOKENS = 8192
"""Cached positions that come to every rank at a time, when prompts want them: what the workspace holds."""

Prefill = Literal["auto", "query", "context"]
"""What goes to whom when new tokens attend to cached ones: the cheaper, queries to keys, or keys to queries."""


class Context(Protocol):
    """The ranks that share a sequence's positions. All enter each collective, in the same order, or none."""

    @property
    def dealing(self) -> Dealing: ...

    @property
    def backend(self) -> Backend: ...

    @property
    def prefill(self) -> Prefill: ...

    @property
    def replicated(self) -> bool:
        """Has each rank the query projections of all of them, so that queries needn't be sent?"""

    @property
    def traffic(self) -> Traffic: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, contiguous and of equal shapes: [size, *x.shape]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """`x` [size, ...] summed over all ranks: the part of this one, [...]."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """Of each rank's `x` [size, ...] that part which is for this one: [size, ...], by sender."""


def is_dealt(group: KVGroup, context: Context | None) -> bool:
    """Are this group's positions shared out? Those of a window aren't: it is small, and would move through them."""
    return context is not None and context.dealing.size > 1 and group.kind in ("full", "latent") and not group.window


def context_of(group: KVGroup, ranks: Ranks) -> Context | None:
    """The ranks that share this group's positions with this one; None: it has them all."""
    return ranks.context if is_dealt(group, ranks.context) else None


def query_heads(own: range, context: Context | None) -> range:
    """The heads whose queries a rank computes, `own` being those that it attends with: all of the ranks that share
    positions, if that is wanted rather than to send them."""
    if context is None or not context.replicated:
        return own
    first = own.start - context.dealing.rank * len(own)
    return range(first, first + context.dealing.size * len(own))


@dataclass(frozen=True, slots=True, eq=False)
class _Decodes:
    """Rows [first, first + B) of those that are asked: one query each, over `blocks` [B, n] up to `lengths` [B]. Behind
    these are `others` int64, among the rows of all blocks: nobody's, or somebody else's."""

    first: int
    blocks: Tensor
    lengths: Tensor
    others: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Several new tokens of one sequence, whose table is `blocks` [n]; behind `first` of those rows that are asked, if
    their queries are sent."""

    span: SequenceSpan
    blocks: Tensor
    first: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """`asked` int64 [A] are the rows whose queries are sent: those of `decodes`, then those of chunks."""

    asked: Tensor
    single: Tensor
    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True)
class DealtAttention:
    """One layer's cache, which is `stored` somehow, and attention, of a dealt out group as this rank holds it."""

    context: Context
    group: KVGroup
    stored: Stored
    scale: float

    def write(self, pool: Tensor, batch: Batch, rows: Tensor) -> None:
        """Keep this rank's positions of the new `rows` [T, planes, dim]. Mutates `pool`."""
        name, rows = self.group.name, everyones(batch, rows)
        own = batch.once(("own rows", name), lambda: self.context.dealing.own_rows(kept_slots(batch, name)))
        self.stored.write(pool, own.slots, rows.index_select(0, own.rows))

    def attend(self, q: Tensor, rows: Tensor, pool: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
        """Causal attention of this rank's heads `q` [T, heads, dim] (of all ranks' heads, if they are replicated): [T,
        heads, value dim]. `rows` [T, planes, dim] are the new keys, which have been written."""
        q = q * self.scale
        own = q[:, self._mine(q.shape[1])] if self.context.replicated else q
        plan = batch.once(("dealt", self.group.name), lambda: self._plan(batch, own, pool))
        value, rows = self.stored.rank or rows.shape[-1], self.stored.as_kept(pool, rows)
        asked = self._ask(q, plan, pool, own.shape[1], value)
        found = nothing_seen(len(q), own.shape[1], value, q)
        out, lse = found.out, found.lse.values
        if len(plan.single):
            out.index_copy_(0, plan.single, asked.out[: len(plan.single)])
            lse.index_copy_(0, plan.single, asked.lse.values[: len(plan.single)])
        for chunk in plan.chunks:
            at = slice(chunk.span.query_start, chunk.span.query_end)
            part = merge_parts(self._chunk(chunk, own[at], rows[at], pool, asked))
            out[at], lse[at] = part.out, part.lse.values
        mixed = out if sinks is None else with_sinks(Partial(out, Lse(lse, "e")), sinks)
        return mixed.to(q.dtype)

    # --- queries that go to the keys ---------------------------------------------------------------------

    def _ask(self, q: Tensor, plan: _Plan, pool: Tensor, heads: int, value: int) -> Partial:
        """What all ranks' positions together give the rows that are asked: of this rank's own heads."""
        if not len(plan.asked):
            return nothing_seen(0, heads, value, q)
        everyone = self._gathered(q.index_select(0, plan.asked))
        parts: list[Partial] = []
        for decodes in plan.decodes:
            queries = everyone[decodes.first : decodes.first + len(decodes.lengths)]
            keys = self.stored.gather(pool, decodes.blocks, q.dtype)
            keys.clear(decodes.others)
            parts.append(attend_lengths(queries, keys, decodes.lengths))
        for chunk in plan.chunks:
            if chunk.first is not None:
                queries = everyone[chunk.first : chunk.first + chunk.span.query_len]
                parts.append(attend_all(queries, self._own_keys(chunk, pool, q.dtype)))
        out, lse = torch.cat([part.out for part in parts]), torch.cat([part.lse.to("e").values for part in parts])
        return self._merged(Partial(out, Lse(lse, "e")), q.dtype)

    def _gathered(self, q: Tensor) -> Tensor:
        """All ranks' heads [A, size * heads, dim], in order."""
        if self.context.replicated:
            return q
        self._count("query", q)
        return self.context.all_gather(q).movedim(0, 1).flatten(1, 2)

    def _merged(self, part: Partial, dtype: torch.dtype) -> Partial:
        """This rank's own heads of the whole, from its `part` for everybody's heads."""
        size = self.context.dealing.size
        heads = part.out.shape[1] // size
        apart = part.out.unflatten(1, (size, heads)).movedim(1, 0)
        if self.context.backend == "a2a":
            return self._exchanged(apart.to(dtype), part.lse.values.unflatten(1, (size, heads)).movedim(1, 0))
        self._count("lse", part.lse.values)
        lses = Lse(self.context.all_gather(part.lse.values), "e")
        weighed = weigh(lses, self.context.dealing.rank)
        share = weighed.of(part.out).unflatten(1, (size, heads)).movedim(1, 0).contiguous()
        self._count("out", share[0])
        mine = self._mine(part.out.shape[1])
        return Partial(self.context.reduce_scatter(share), Lse(weighed.lse[:, mine], "e"))

    def _exchanged(self, out: Tensor, lse: Tensor) -> Partial:
        """`out` [size, A, heads, dim] and `lse` [size, A, heads] by whose heads they are, as bytes side by side."""
        dim, kind = out.shape[-1], out.dtype
        packed = torch.cat((out.contiguous().view(torch.uint8), lse[..., None].contiguous().view(torch.uint8)), dim=-1)
        self._count("out", packed[0])
        found = self.context.all_to_all(packed)
        outs = found[..., : dim * kind.itemsize].contiguous().view(kind)
        lses = found[..., dim * kind.itemsize :].contiguous().view(lse.dtype)[..., 0]
        return merge_parts([Partial(o, Lse(s, "e")) for o, s in zip(outs, lses, strict=True)])

    def _mine(self, heads: int) -> slice:
        each = heads // self.context.dealing.size
        return slice(self.context.dealing.rank * each, (self.context.dealing.rank + 1) * each)

    def _count(self, kind: Literal["query", "lse", "out", "context"], sent: Tensor) -> None:
        self.context.traffic.add(kind, (self.context.dealing.size - 1) * sent.numel() * sent.element_size())

    # --- prompts -----------------------------------------------------------------------------------------

    def _chunk(self, chunk: _Chunk, q: Tensor, rows: Tensor, pool: Tensor, asked: Partial) -> list[Partial]:
        """Parts of the attention of one sequence's new tokens, which are this rank's heads `q` of them."""
        parts = [attend_causal(q, self.stored.keys(rows))]
        context = chunk.span.context_len
        if chunk.first is not None:
            at = slice(chunk.first, chunk.first + len(q))
            parts.append(Partial(asked.out[at], Lse(asked.lse.values[at], "e")))
        elif context:
            for start in range(0, context, CONTEXT_TOKENS):
                end = min(start + CONTEXT_TOKENS, context)
                parts.append(attend_all(q, self._everybodys(chunk, pool, start, end, q.dtype)))
                parts = [merge_parts(parts)]
        return parts

    def _everybodys(self, chunk: _Chunk, pool: Tensor, start: int, end: int, dtype: torch.dtype) -> Keys:
        """The cached keys of positions [start, end), in order: those of all ranks, copied here."""
        blocks = chunk.blocks[start // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]
        found = self.stored.gather(pool, blocks[None], dtype)
        whole = found.k[0] if self.stored.rank is not None else torch.stack((found.k[0], found.v[0]), dim=1)
        own = whole.reshape(len(whole), -1, pool.shape[-1]).contiguous()
        self._count("context", own)
        everyone = self.context.all_gather(own).flatten(0, 1)
        order = self.context.dealing.in_order(end - start, len(own), own.device)
        return self.stored.keys(everyone.index_select(0, order))

    def _own_keys(self, chunk: _Chunk, pool: Tensor, dtype: torch.dtype) -> Keys:
        """This rank's own cached keys of a sequence."""
        dealing, context = self.context.dealing, chunk.span.context_len
        found = self.stored.gather(pool, chunk.blocks[None, : dealing.local_blocks(context)], dtype)
        length = dealing.local_length(context)
        return Keys(found.k[0, :length], found.v[0, :length])

    # --- what a batch needs, the same in every layer -----------------------------------------------------

    def _plan(self, batch: Batch, q: Tensor, pool: Tensor) -> _Plan:
        tables, device = batch.groups[self.group.name].block_tables, pool.device
        singles = [index for index, span in enumerate(batch.spans) if span.query_len == 1]
        # By length: what goes together is padded to the longest.
        singles.sort(key=lambda index: batch.spans[index].total_len, reverse=True)
        asked = [batch.spans[index].query_start for index in singles]
        decodes = tuple(self._decodes(batch, tables, singles, pool))
        exchange, row = self.exchange(q), self.group.planes * pool.shape[-1] * q.element_size()
        chunks = []
        for index, span in enumerate(batch.spans):
            if span.query_len == 1:
                continue
            way = self.context.prefill
            if way == "auto":
                way = exchange.cheaper(span.query_len, span.context_len, row)
            first = len(asked) if way == "query" and span.context_len else None
            if first is not None:
                asked.extend(range(span.query_start, span.query_end))
            chunks.append(_Chunk(span, tables[index], first))
        rows = torch.tensor(asked, dtype=torch.int64, device=device)
        return _Plan(rows, rows[: len(singles)], decodes, tuple(chunks))

    def exchange(self, q: Tensor) -> Exchange:
        """What is sent for one of the queries `q` [T, heads, dim] of this rank's own heads."""
        context = self.context
        return Exchange(
            context.dealing.size, q.shape[1], q.shape[2], self.stored.rank or q.shape[2], q.element_size(),
            exact(q.dtype).itemsize, context.backend, context.replicated,
        )  # fmt: skip

    def _decodes(self, batch: Batch, tables: Tensor, singles: Sequence[int], pool: Tensor) -> list[_Decodes]:
        dealing, done = self.context.dealing, 0
        block_bytes = self.group.planes * dealing.block_tokens * pool.shape[-1] * pool.element_size()
        totals = torch.tensor([batch.spans[index].total_len for index in singles])
        made: list[_Decodes] = []
        while done < len(singles):
            longest = dealing.local_blocks(batch.spans[singles[done]].total_len)
            most = max(1, GATHER_BYTES // (max(longest, 1) * block_bytes))
            # At most half of what goes together is padding.
            lengths = [dealing.local_blocks(batch.spans[index].total_len) for index in singles[done : done + most]]
            count = sum(2 * length >= longest for length in lengths)
            part = torch.tensor(singles[done : done + count], device=pool.device)
            blocks = tables.index_select(0, part)[:, :longest].clamp(min=0)  # what is behind a length is hidden
            own = dealing.local_lengths(totals[done : done + count])
            behind = torch.arange(longest * dealing.block_tokens) >= own[:, None]
            others = behind.flatten().nonzero()[:, 0]
            made.append(_Decodes(done, blocks, own.to(pool.device), others.to(pool.device)))
            done += count
        return made
