"""What ranks send each other: counted as it is sent, and worked out in advance. Bytes are those that one rank sends.

    sum       what ranks compute in parts, added up (an all-reduce: counted as the tensor, once)
    logits    parts of the vocabulary, to rank 0
    query     query heads, to the ranks that keep the positions
    lse       log-sum-exps of each rank's part of the attention
    out       each rank's part of the attention, to the ranks whose heads it is of
    context   cached keys, to ranks that compute a prompt further: never in a step of decodes
    rows      new keys, and hidden states at the end, of prompts that ranks share out
    experts   rows to the ranks of their experts, and what these give, where experts are dealt out
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Kind = Literal["sum", "logits", "query", "lse", "out", "context", "rows", "experts"]
Backend = Literal["ag_rs", "a2a"]
"""How parts of the attention come together: all-gather and reduce-scatter, or one all-to-all."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(slots=True)
class Sent:
    """Collectives of one kind, and what this rank sent in them."""

    calls: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Traffic:
    """Counts of one rank, by kind. One thread counts, any may read."""

    sent: dict[Kind, Sent] = field(default_factory=lambda: {kind: Sent() for kind in KINDS})

    def add(self, kind: Kind, size: int) -> None:
        """One more collective, in which this rank sends `size` bytes."""
        sent = self.sent[kind]
        sent.calls += 1
        sent.bytes += size

    def figures(self) -> dict[str, float]:
        """By dotted name."""
        values: dict[str, float] = {}
        for kind, sent in self.sent.items():
            values[f"ranks.{kind}.calls"], values[f"ranks.{kind}.bytes"] = sent.calls, sent.bytes
        return values


@dataclass(frozen=True, slots=True)
class Exchange:
    """What attention over dealt out positions sends for one token in one layer: of one rank, that has `heads` query
    heads of `key` values, summing `value` values, in items of `item` bytes; `exact` bytes have LSEs and sums."""

    ranks: int
    heads: int
    key: int
    value: int
    item: int
    exact: int
    backend: Backend
    replicated: bool = False

    @property
    def collectives(self) -> int:
        """In a layer, for all tokens of a step together."""
        return (not self.replicated) + (2 if self.backend == "ag_rs" else 1)

    @property
    def sent(self) -> dict[Kind, int]:
        """Bytes by kind."""
        others, heads = self.ranks - 1, self.heads
        query = 0 if self.replicated else others * heads * self.key * self.item
        if self.backend == "ag_rs":
            lse, out = others * self.ranks * heads * self.exact, others * heads * self.value * self.exact
        else:
            lse, out = 0, others * heads * (self.value * self.item + self.exact)
        return {"query": query, "lse": lse, "out": out}

    @property
    def bytes(self) -> int:
        """In all."""
        return sum(self.sent.values())

    def context_bytes(self, row: int) -> float:
        """What one cached position costs if its keys, of `row` bytes on the rank that has them, go to all others."""
        return (self.ranks - 1) * row / self.ranks

    def cheaper(self, queries: int, context: int, row: int) -> Literal["query", "context"]:
        """What to send for that many new tokens behind so many cached ones: the queries, or the keys."""
        return "query" if queries * self.bytes <= context * self.context_bytes(row) else "context"
