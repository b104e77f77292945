"""Regular copies between a payload and a shard's buffers, and the plain runs that they stand for.

A `Copy` is a nest of loops over one memory copy:

    for i in range(axes[0].times):            payload + i * axes[0].canonical, buffers + i * axes[0].local
        for j in range(axes[1].times):        ...
            copy `length` bytes

which is what a strided device copy takes. `Run`s are the same without loops, for who copies with memcpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple


class Axis(NamedTuple):
    """One loop: how often, and how far both sides move each time, in bytes."""

    times: int
    canonical: int
    local: int


class Run(NamedTuple):
    """`length` bytes at `canonical` in a payload are those at `local` in the shard's buffers."""

    canonical: int
    local: int
    length: int


@dataclass(frozen=True, slots=True)
class Copy:
    """`length` bytes, for every combination of the axes, outermost first. Offsets are those of the first."""

    canonical: int
    local: int
    length: int
    axes: tuple[Axis, ...] = ()

    @property
    def total(self) -> int:
        """Bytes copied in all."""
        size = self.length
        for axis in self.axes:
            size *= axis.times
        return size


def folded(canonical: int, local: int, length: int, axes: Iterable[Axis]) -> Copy:
    """The copy with as few axes, and as long pieces, as it can be said with."""
    kept: list[Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.canonical):
        if axis.times == 1:
            continue
        inner = kept[-1] if kept else None
        if inner is None and axis.canonical == axis.local == length:
            length *= axis.times
        elif inner is not None and _continues(axis, inner):
            kept[-1] = Axis(inner.times * axis.times, inner.canonical, inner.local)
        else:
            kept.append(axis)
    return Copy(canonical, local, length, tuple(reversed(kept)))


def _continues(outer: Axis, inner: Axis) -> bool:
    return outer.canonical == inner.canonical * inner.times and outer.local == inner.local * inner.times


def merged(copies: Iterable[Copy]) -> list[Copy]:
    """The same bytes in fewer copies: neighbours are joined, regular rows of equal copies become an axis."""
    present = sorted(copies, key=lambda copy: copy.canonical)
    while True:
        fewer = _rows(_joined(present))
        if len(fewer) == len(present):
            return fewer
        present = fewer


def _joined(copies: Sequence[Copy]) -> list[Copy]:
    joined: list[Copy] = []
    for copy in copies:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.axes == copy.axes
            and (last.canonical + last.length, last.local + last.length) == (copy.canonical, copy.local)
        ):
            joined[-1] = folded(last.canonical, last.local, last.length + copy.length, last.axes)
        else:
            joined.append(copy)
    return joined


def _rows(copies: Sequence[Copy]) -> list[Copy]:
    rows: list[Copy] = []
    at = 0
    while at < len(copies):
        end = _row_end(copies, at)
        first = copies[at]
        if end - at > 1:
            step = Axis(end - at, copies[at + 1].canonical - first.canonical, copies[at + 1].local - first.local)
            rows.append(folded(first.canonical, first.local, first.length, (*first.axes, step)))
        else:
            rows.append(first)
        at = end
    return rows


def _row_end(copies: Sequence[Copy], at: int) -> int:
    """Where the row of equally spaced equal copies that begins at `at` ends."""
    first, end = copies[at], at + 1
    while end < len(copies):
        copy, before = copies[end], copies[end - 1]
        if (copy.length, copy.axes) != (first.length, first.axes):
            break
        step = (copy.canonical - before.canonical, copy.local - before.local)
        if end > at + 1 and step != (copies[at + 1].canonical - first.canonical, copies[at + 1].local - first.local):
            break
        end += 1
    return end


def runs_of(copies: Iterable[Copy]) -> list[Run]:
    """All runs in the payload's order; those that touch on both sides are one."""
    pieces: list[Run] = []
    for copy in copies:
        steps = product(*([(i * axis.canonical, i * axis.local) for i in range(axis.times)] for axis in copy.axes))
        for step in steps:
            canonical = copy.canonical + sum(offset for offset, _ in step)
            pieces.append(Run(canonical, copy.local + sum(offset for _, offset in step), copy.length))
    pieces.sort()
    runs: list[Run] = []
    for piece in pieces:
        if runs:
            last = runs[-1]
            if (last.canonical + last.length, last.local + last.length) == (piece.canonical, piece.local):
                runs[-1] = Run(last.canonical, last.local, last.length + piece.length)
                continue
        runs.append(piece)
    return runs
