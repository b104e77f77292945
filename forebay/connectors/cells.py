"""How an engine's cache keeps the rows of one block and head, its *cell*: where a token's channel is.

    plain      [tokens, K | V]                        what most backends do
    packed     K as [channels, tokens], V as [tokens, channels], or in tiles: what a CPU's or a GPU's kernels like

A row (K, or V) is told by how tokens and channels nest: factors (count, stride), the outermost first, whose sums give
an element's place. A cell of 64 tokens in tiles of 32: tokens ((2, 32 * dim), (32, 1)), channels ((dim, 32),).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

from forebay.errors import ConfigError
from forebay.kvstore.geometry import MATCH_UNIT

STRANGE = "this attention backend packs its KV cache in a way that Forebay's connector can't follow"

Factors = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CellRow:
    """One row's places in a cell, in elements."""

    offset: int
    tokens: Factors
    channels: Factors

    @property
    def dim(self) -> int:
        return prod(count for count, _ in self.channels)


def plain_rows(dims: Sequence[int], tokens: int, token_stride: int, channel_stride: int) -> tuple[CellRow, ...]:
    """Rows side by side in each token."""
    return tuple(
        CellRow(sum(dims[:place]) * channel_stride, ((tokens, token_stride),), ((dim, channel_stride),))
        for place, dim in enumerate(dims)
    )


def learned_row(places: Sequence[Sequence[int]]) -> CellRow:
    """From `places[token][channel]`, as found by looking at what a backend writes.

    Raises ConfigError for places that no factors give.
    """
    offset = places[0][0]
    row = CellRow(offset, _factors([line[0] - offset for line in places]), _factors([p - offset for p in places[0]]))
    tokens, channels = list(_sums(row.tokens)), list(_sums(row.channels))
    if any(line[c] != offset + t + channels[c] for t, line in zip(tokens, places, strict=True) for c in range(row.dim)):
        raise ConfigError(STRANGE)
    return row


def _factors(steps: Sequence[int]) -> Factors:
    """Nested loops that give these offsets, if there are some."""
    found: list[tuple[int, int]] = []
    left = list(steps)
    while len(left) > 1:
        stride, count = left[1] - left[0], 1
        while count < len(left) and left[count] - left[count - 1] == stride:
            count += 1
        while len(left) % count:
            count -= 1
        if count == 1:
            raise ConfigError(STRANGE)
        found.insert(0, (count, stride))
        left = left[::count]
    return tuple(found) or ((1, 0),)


def _sums(factors: Factors) -> list[int]:
    loops = [[place * stride for place in range(count)] for count, stride in factors]
    return [sum(steps) for steps in product(*loops)]


@dataclass(frozen=True, slots=True)
class Units:
    """A row cut into stretches of `unit` tokens: where each begins, and how its tokens nest."""

    unit: int
    offsets: tuple[int, ...]
    tokens: Factors

    @property
    def step(self) -> int | None:
        """The distance of all of them, if it is one."""
        steps = {b - a for a, b in zip(self.offsets, self.offsets[1:], strict=False)}
        return None if len(steps) > 1 else next(iter(steps), 0)


def unit_of(tokens: int) -> int:
    """The longest stretch of a block of `tokens` tokens that never crosses a granule's edge."""
    return gcd(tokens, MATCH_UNIT)


def cut_units(row: CellRow, unit: int) -> Units:
    """Raises ConfigError if the row's tokens don't nest in stretches of `unit`."""
    inner: list[tuple[int, int]] = []
    outer = list(row.tokens)
    need = unit
    while need > 1:
        count, stride = outer.pop()
        taken = gcd(count, need)
        if taken < min(count, need):
            raise ConfigError(f"this attention backend packs tokens {count} at a time, which Forebay can't follow")
        if taken < count:
            outer.append((count // taken, stride * taken))
        inner.insert(0, (taken, stride))
        need //= taken
    return Units(unit, tuple(_sums(tuple(outer))) or (0,), tuple(inner) or ((1, 0),))
