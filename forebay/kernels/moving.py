"""Bytes between a payload of canonical granules and one shard's own buffers: what is copied where, and as plain torch.

A `Nest` is a nest of loops over one copy, with strides on both sides; `forebay.kvstore.layout` gives them for any
shard. Here nests of one shape are collected into a `Pattern`, so that all granules and layers of a chunk, or of many,
are one launch. Bytes are moved as words and never as numbers: every dtype comes out as it went in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

AXES_MAX = 5
"""Loops of a nest. The layouts there are need four: layers, K and V, heads, tokens."""

PIECES = 4096
"""Stretches whose indices are in memory at a time."""

Steps = tuple[int, int, int]
"""A loop: times, and how far it goes in the payload and in the buffers."""

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Loop(Protocol):
    """`times` steps, and how far each goes on both sides, in bytes."""

    @property
    def times(self) -> int: ...
    @property
    def canonical(self) -> int: ...
    @property
    def local(self) -> int: ...


class Nest(Protocol):
    """`length` bytes for every combination of `axes`, the first at these offsets of both sides."""

    @property
    def canonical(self) -> int: ...
    @property
    def local(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def axes(self) -> Sequence[Loop]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """`length` bytes, `times` [axes] with strides `canonical` and `local` [axes], from each of the n first offsets
    int64 [n] `canonical_at` in the payload and `local_at` in the buffers."""

    length: int
    times: tuple[int, ...]
    canonical: tuple[int, ...]
    local: tuple[int, ...]
    canonical_at: Tensor
    local_at: Tensor

    @property
    def piece(self) -> int:
        """Bytes of one nest."""
        return self.length * math.prod(self.times)

    @property
    def word(self) -> int:
        """The widest word, in bytes, that all of it consists of."""
        steps = math.gcd(8, self.length, *self.canonical, *self.local)
        for offsets in (self.canonical_at, self.local_at):
            steps = math.gcd(steps, *offsets.tolist())
        return steps

    def _contiguous(self) -> tuple[int, ...]:
        strides, step = [], self.length
        for times in reversed(self.times):
            strides.append(step)
            step *= times
        return tuple(reversed(strides))

    def packed(self) -> tuple[Pattern, Pattern]:
        """(packed bytes <-> buffers, payload <-> packed bytes), where packed bytes lie nest after nest."""
        first = torch.arange(len(self.canonical_at), dtype=torch.int64) * self.piece
        strides = self._contiguous()
        return (
            replace(self, canonical=strides, canonical_at=first),
            replace(self, local=strides, local_at=first),
        )


def patterns(nests: Iterable[Nest], granule: int) -> list[Pattern]:
    """The same copies, those of one shape together: one nest for each granule of `granule` bytes, since tables scatter
    granules, so that a shard's copies have as many shapes as its planes have. Raises ValueError for too many loops."""
    found: dict[tuple[int, tuple[Steps, ...]], list[tuple[int, int]]] = {}
    for nest in nests:
        outer = [axis for axis in nest.axes if axis.canonical % granule == 0]
        inner = tuple((axis.times, axis.canonical, axis.local) for axis in nest.axes if axis.canonical % granule)
        if len(inner) > AXES_MAX:
            raise ValueError(f"a copy of {len(inner)} nested loops: there can be {AXES_MAX}")
        length = min(nest.length, granule)
        assert nest.length % length == 0, (nest.length, granule)
        loops = [*((axis.times, axis.canonical, axis.local) for axis in outer), (nest.length // length, length, length)]
        steps = product(*([(i * there, i * here) for i in range(times)] for times, there, here in loops))
        firsts = found.setdefault((length, inner), [])
        for step in steps:
            there, here = (sum(side) for side in zip(*step, strict=True))
            firsts.append((nest.canonical + there, nest.local + here))
    return [_pattern(length, shape, firsts) for (length, shape), firsts in found.items()]


def _pattern(length: int, shape: tuple[Steps, ...], firsts: list[tuple[int, int]]) -> Pattern:
    at = torch.tensor(firsts, dtype=torch.int64)
    times, canonical, local = (tuple(column) for column in zip(*shape, strict=True)) if shape else ((), (), ())
    return Pattern(length, times, canonical, local, at[:, 0].contiguous(), at[:, 1].contiguous())


def move(pattern: Pattern, payload: Tensor, buffers: Tensor, *, store: bool) -> None:
    """Copy from `buffers` into `payload` (`store`) or the other way; both uint8 [bytes], on one device.

    Mutates the side that is copied to, nothing beside what the pattern names. Blocks for the time of the copy.
    """
    check_inside(pattern, payload, buffers)
    word = min(pattern.word, alignment(payload), alignment(buffers))
    there, here = _at(pattern, pattern.canonical_at, pattern.canonical), _at(pattern, pattern.local_at, pattern.local)
    (target, written), (source, read) = (payload, there), (buffers, here)
    if not store:
        (target, written), (source, read) = (source, read), (target, written)
    to, of = as_words(target, word), as_words(source, word)
    inside = torch.arange(pattern.length // word)
    for first in range(0, len(written), PIECES):
        rows = slice(first, first + PIECES)
        at, values = written[rows, None] // word + inside, of[read[rows, None] // word + inside]
        to.index_put_((at.to(to.device),), values)


def _at(pattern: Pattern, firsts: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Offsets of all its stretches of `length` bytes, in the same order on both sides."""
    found = firsts
    for times, step in zip(pattern.times, strides, strict=True):
        found = (found[:, None] + torch.arange(times) * step).flatten()
    return found


def check_inside(pattern: Pattern, payload: Tensor, buffers: Tensor) -> None:
    """Assert that all of it lies inside of both sides: a kernel would write beyond them."""
    sides = ((payload, pattern.canonical_at, pattern.canonical), (buffers, pattern.local_at, pattern.local))
    for side, at, strides in sides:
        reach = [(times - 1) * step for times, step in zip(pattern.times, strides, strict=True)]
        low = int(at.min()) + sum(min(step, 0) for step in reach)
        high = int(at.max()) + sum(max(step, 0) for step in reach) + pattern.length
        assert low >= 0 and high <= len(side), (low, high, len(side))


def alignment(side: Tensor) -> int:
    """The widest word, in bytes, whose multiple its address is."""
    assert side.dtype == torch.uint8 and side.dim() == 1 and side.is_contiguous(), (side.dtype, side.shape)
    return next(word for word in WORDS if side.data_ptr() % word == 0)


def as_words(side: Tensor, word: int) -> Tensor:
    """`side` as words. Bytes behind the last whole one aren't in it: a pattern consists of whole ones."""
    return side[: len(side) // word * word].view(WORDS[word])
