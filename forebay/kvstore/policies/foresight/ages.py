"""What waiting is worth: from the chance that a session comes back at each age to an index that can be compared.

An age is the time since a session's last request. Ages are cut into bins of a quarter of an octave:

    bin     0          1             2             3    ...
    age     0 .. 1 s   1 .. 2^(1/4)  .. 2^(1/2)    ..            up to 2^16 s, 18 hours

A session that has reached a bin comes back within it with probability `hazard[bin]`. Keeping its chunks from age a on
until some later age is a bet: it wins one hit with some probability and takes up room for some time. The index at a is
the best such bet's hits for each second of room (Gittins' index of an optimal stopping problem): if room has a price,
keeping is right exactly while the index is above it, so evicting from the lowest index up is right whatever it is.

Over the cumulative chance F(t) and the expected time T(t) until t, the best bet from a is the steepest line from
(T(a), F(a)) to a later point: the upper hull of the curve.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

PER_OCTAVE = 4
OCTAVES = 16
BINS = PER_OCTAVE * OCTAVES + 1

EDGES = (0.0, *(2.0 ** (i / PER_OCTAVE) for i in range(BINS)))
"""Bin i is [EDGES[i], EDGES[i + 1]); the last one begins at 18 hours."""

WIDTHS = tuple(EDGES[i + 1] - EDGES[i] for i in range(BINS))


def bin_of(age: float) -> int:
    """The bin that an age in seconds falls into."""
    return min(max(bisect_right(EDGES, age) - 1, 0), BINS - 1)


def indices(hazard: Sequence[float]) -> list[float]:
    """Hits a second of the best bet at the start of each bin. O(bins)."""
    times, chances = [0.0], [0.0]
    surviving = 1.0
    time = 0.0
    for chance, width in zip(hazard, WIDTHS, strict=True):
        time += surviving * width * (1 - chance / 2)
        surviving *= 1 - chance
        times.append(time)
        chances.append(1 - surviving)
    result = [0.0] * BINS
    hull = [BINS]  # later points worth betting on, the nearest last
    for start in range(BINS - 1, -1, -1):
        t, f = times[start], chances[start]
        while len(hull) > 1:
            near, far = hull[-1], hull[-2]
            if (chances[far] - f) * (times[near] - t) < (chances[near] - f) * (times[far] - t):
                break
            hull.pop()
        span = times[hull[-1]] - t
        result[start] = (chances[hull[-1]] - f) / span if span > 0 else 0.0
        hull.append(start)
    return result
