"""Which blocks a prefix needs, group by group, and how long a prefix the device holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.kvstore.identity import MATCH_UNIT, GroupGeometry
from forebay.kvstore.layout import needed_from, round_down
from forebay.workers.block_pool import GroupPool


def units_of(tokens: int) -> int:
    """Units that cover `tokens` tokens."""
    return -(-tokens // MATCH_UNIT)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One cache group as the block pool sees it. `step_tokens` is the most that one step feeds."""

    geometry: GroupGeometry
    chunk_tokens: int
    step_tokens: int

    @property
    def windowed(self) -> bool:
        return self.geometry.window is not None

    def first_unit(self, position: int) -> int:
        """First unit that must be on the device when the token at `position` is next.

        A query needs its window; and the open chunk, which is stored when it is full, needs all of its own.
        """
        needed = needed_from(self.geometry, position)
        return min(needed, round_down(position, self.chunk_tokens)) // MATCH_UNIT

    @property
    def units_behind(self) -> int:
        """Upper bound of the units that `first_unit` keeps behind a position. Window groups only."""
        assert self.geometry.window is not None
        behind = max(self.geometry.window, self.chunk_tokens) - 1
        return units_of(behind) + 1

    def footprint(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens holds at most at once, one tail block included.

        In a window group: its window, what one step adds to it, and another window that is loaded meanwhile.
        """
        whole = units_of(tokens) + 1
        if not self.windowed:
            return whole
        return min(whole, 2 * self.units_behind + units_of(self.step_tokens) + 2)


def open_unit(shape: GroupShape, spare: int, hit: int) -> int:
    """Where the device's part begins of a prefix whose other rows are read in place: at the chunk that a hit ends
    inside of, since that is stored when it is full; behind the hit if `spare` blocks aren't enough for that."""
    units, first = hit // MATCH_UNIT, round_down(hit, shape.chunk_tokens) // MATCH_UNIT
    return first if units - first <= spare else units


@dataclass(frozen=True, slots=True)
class DevicePrefix:
    """`units` can be served by all groups together; a full group alone has the first `runs[g]` units."""

    units: int
    runs: tuple[int, ...]


def device_prefix(shapes: Sequence[GroupShape], pools: Sequence[GroupPool], keys: Sequence[bytes]) -> DevicePrefix:
    """The longest prefix of `keys` that every group can serve. Mutates nothing."""
    runs = [_run(pool, keys) if not shape.windowed else 0 for shape, pool in zip(shapes, pools, strict=True)]
    longest = min(
        (run for run, shape in zip(runs, shapes, strict=True) if not shape.windowed),
        default=len(keys),
    )
    windowed = [(s, p) for s, p in zip(shapes, pools, strict=True) if s.windowed]
    behind = [_runs_ending(pool, keys[:longest]) for _, pool in windowed]
    for units in range(longest, 0, -1):
        position = units * MATCH_UNIT
        if all(
            run[units] >= units - shape.first_unit(position) for (shape, _), run in zip(windowed, behind, strict=True)
        ):
            return DevicePrefix(units, tuple(runs))
    return DevicePrefix(0, tuple(runs))


def _run(pool: GroupPool, keys: Sequence[bytes]) -> int:
    for count, key in enumerate(keys):
        if pool.find(key) is None:
            return count
    return len(keys)


def _runs_ending(pool: GroupPool, keys: Sequence[bytes]) -> list[int]:
    """`runs[i]`: how many of the units just before `i` are held without a gap."""
    runs = [0]
    for key in keys:
        runs.append(runs[-1] + 1 if pool.find(key) is not None else 0)
    return runs


def missing_runs(have: Sequence[range], first: int, last: int) -> list[range]:
    """What [first, last) lacks, given ascending runs of what is there."""
    missing: list[range] = []
    for run in have:
        if first < min(run.start, last):
            missing.append(range(first, min(run.start, last)))
        first = max(first, run.stop)
    if first < last:
        missing.append(range(first, last))
    return missing
