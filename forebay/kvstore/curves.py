"""Online miss-ratio curves: what the hit rate would be with more or less memory. Pure.

Only keys whose hash falls into a small part of the range are looked at (spatial sampling, as SHARDS does it), so a
sampled key's reuse distance among sampled keys, divided by the rate, estimates its distance among all. Distances are
in bytes: a cache of LRU order that holds as much would have hit.

A single sample can't resolve a pool of a gigabyte and foresee a terabyte within bounded memory, and one whose rate
only falls (as SHARDS with a fixed size does) sees in the end nothing of what is asked today. So each curve has a
ladder of samples of a fixed rate each, every one a stack that forgets its oldest keys:

    rung     0       1       2        3             a size is read off the finest rung
    rate     1/8     1/64    1/512    1/4096        whose stack reaches that far
    reaches  8 Ki    64 Ki   512 Ki   4 Mi chunks

Chunks are of one length in tokens, so rates by bytes are rates by tokens within a namespace.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ldexp, log2

KEY_BYTES = 32
RUNGS = 4
FIRST_RATE_BITS = 3
RUNG_BITS = 3
STACK_KEYS = 1024
BLOCK = 64
BUCKETS_AN_OCTAVE = 8
TENANTS_MAX = 32
REGISTER_BITS = 11

_SAMPLED = re.compile(b"[\\x00-\\x1f]")  # the first byte of a key that is in rung 0: one of 2**(8 - FIRST_RATE_BITS)


class Stack:
    """The last `limit` sampled keys in the order of their use, with bytes: sums over time, by blocks.

    Each key sits at the position of its last use. Positions only grow; when they run out, they are given out anew. A
    sum over what came later is one over the rest of a block and over the blocks behind it: both are short, and a change
    costs two additions.
    """

    def __init__(self, limit: int = STACK_KEYS) -> None:
        self._limit = limit
        self._size = -(-2 * limit // BLOCK) * BLOCK
        self._places: OrderedDict[int, tuple[int, int]] = OrderedDict()  # key -> (position, bytes), oldest first
        self._empty()
        self.bytes = 0
        self.full = False

    def _empty(self) -> None:
        self._held = [0] * self._size
        self._blocks = [0] * (self._size // BLOCK)
        self._next = 0

    def __len__(self) -> int:
        return len(self._places)

    def use(self, key: int, size: int) -> int | None:
        """Bytes of what was used since `key` was, itself excluded; None if it isn't known (any more)."""
        place = self._places.pop(key, None)
        distance = None
        if place is not None:
            position, held = place
            block = position // BLOCK
            distance = sum(self._held[position + 1 : (block + 1) * BLOCK]) + sum(self._blocks[block + 1 :])
            self._remove(position, held)
        elif len(self._places) >= self._limit:
            self._remove(*self._places.popitem(last=False)[1])
            self.full = True
        if self._next == self._size:
            self._renumber()
        self._places[key] = self._next, size
        self._append(size)
        self.bytes += size
        return distance

    def _append(self, size: int) -> None:
        self._held[self._next] = size
        self._blocks[self._next // BLOCK] += size
        self._next += 1

    def _remove(self, position: int, size: int) -> None:
        self._held[position] = 0
        self._blocks[position // BLOCK] -= size
        self.bytes -= size

    def _renumber(self) -> None:
        self._empty()
        for key, (_, size) in list(self._places.items()):
            self._places[key] = self._next, size
            self._append(size)


class Rung:
    """One rate of the ladder: a stack of sampled keys, and a histogram of distances, both in bytes."""

    def __init__(self, number: int, keys: int = STACK_KEYS) -> None:
        self.rate = ldexp(1.0, -(FIRST_RATE_BITS + RUNG_BITS * number))
        self.stack = Stack(keys)
        self.asked = 0.0
        self._reused: dict[int, float] = {}

    def use(self, key: int, size: int, asked: bool) -> bool:
        """A sampled key was asked for, or stored. Is it remembered from before?"""
        distance = self.stack.use(key, size)
        if asked:
            self.asked += size
            if distance is not None:
                bucket = _bucket(distance / self.rate + size)
                self._reused[bucket] = self._reused.get(bucket, 0.0) + size
        return distance is not None

    @property
    def reach(self) -> float:
        """Distances up to this many bytes are known here."""
        return self.stack.bytes / self.rate if self.stack.full else float("inf")

    def halve(self) -> None:
        """Let the past count half."""
        self.asked /= 2
        self._reused = {bucket: size / 2 for bucket, size in self._reused.items() if size > 1}

    def hits(self, sizes: Sequence[float], expected: float) -> list[float]:
        """Bytes among all that were asked that caches of these sizes would have had. `expected` is what should have
        been sampled: what is missing of it, or too much, is put down to the shortest distances (few keys that are
        asked often are in the sample or not)."""
        buckets = sorted(self._reused)
        sums = [0.0, *accumulate(self._reused[bucket] for bucket in buckets)]
        found = []
        for size in sizes:
            last = _bucket(size)
            whole = sums[bisect_right(buckets, last - 1)]
            # Within a bucket distances are taken to be spread evenly over the logarithm.
            part = self._reused.get(last, 0.0) * _within(size, last)
            found.append(max(0.0, whole + part + expected - self.asked) / self.rate if size > 0 else 0.0)
        return found


def _bucket(size: float) -> int:
    return int(log2(max(size, 1.0)) * BUCKETS_AN_OCTAVE)


def _within(size: float, bucket: int) -> float:
    return log2(max(size, 1.0)) * BUCKETS_AN_OCTAVE - bucket


class Distinct:
    """How many distinct keys there were, within some 2 %, in 2 KiB: HyperLogLog registers, and the running estimate
    that adds to each change of one the inverse of its probability."""

    def __init__(self) -> None:
        self._registers = bytearray(1 << REGISTER_BITS)
        self._chance = 1.0

    def add(self, number: int) -> float:
        """A 64-bit hash was seen: by how many distinct keys it raises the estimate (0 for all that were seen)."""
        register = number & ((1 << REGISTER_BITS) - 1)
        rest = number >> REGISTER_BITS
        rank = 64 - REGISTER_BITS - rest.bit_length() + 1
        known = self._registers[register]
        if rank <= known:
            return 0.0
        raised = 1.0 / self._chance
        self._registers[register] = rank
        self._chance -= (ldexp(1.0, -known) - ldexp(1.0, -rank)) / (1 << REGISTER_BITS)
        return raised


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A cache of `size` bytes would hit at `rate`, between 0 and 1."""

    size: float
    rate: float


class Curve:
    """One tenant's curve. `asked` are the bytes of all chunks that were asked for, of late: `halve` fades them."""

    def __init__(self, keys: int = STACK_KEYS) -> None:
        self.rungs = [Rung(number, keys) for number in range(RUNGS)]
        self.asked = 0.0
        self.asked_tokens = 0.0
        self.hit_tokens = 0.0
        self._distinct = Distinct()
        self._new = 0.0
        self.quiet = 0

    def observe(self, keys: bytes, size: int) -> None:
        """These chunks, of `size` bytes each, were asked for; `keys` are joined, 32 bytes each."""
        self.asked += size * (len(keys) // KEY_BYTES)
        self.quiet = 0
        for match in _SAMPLED.finditer(keys[::KEY_BYTES]):
            at = match.start() * KEY_BYTES
            self._use(keys[at : at + KEY_BYTES], size, True)

    def stored(self, key: bytes, size: int) -> None:
        """This chunk was stored, whether it had been asked for or not."""
        if key[0] < 1 << (8 - FIRST_RATE_BITS):
            self._use(key, size, False)

    def _use(self, key: bytes, size: int, asked: bool) -> None:
        number = int.from_bytes(key[:8])
        if not self.rungs[0].use(number, size, asked):
            new = self._distinct.add(int.from_bytes(key[8:16])) * size
            self._new += new if asked else 0.0
        depth = (64 - number.bit_length() - FIRST_RATE_BITS) // RUNG_BITS
        for rung in self.rungs[1 : depth + 1]:
            rung.use(number, size, asked)

    def halve(self) -> None:
        """Let the past count half."""
        self.asked, self._new = self.asked / 2, self._new / 2
        self.asked_tokens, self.hit_tokens = self.asked_tokens / 2, self.hit_tokens / 2
        self.quiet += 1
        for rung in self.rungs:
            rung.halve()

    @property
    def keys(self) -> int:
        return sum(len(rung.stack) for rung in self.rungs)

    @property
    def measured(self) -> float | None:
        """The hit rate that there was, in tokens; None if nobody asked."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else None

    @property
    def ceiling(self) -> float:
        """The hit rate of a cache without end: of all that had been asked or stored before."""
        if not self.asked:
            return 0.0
        return min(1.0, max(0.0, 1 - self._new / (self.asked * self.rungs[0].rate)))

    @property
    def footprint(self) -> float:
        """Bytes of all that is remembered by the rung that remembers most."""
        return max(rung.stack.bytes / rung.rate for rung in self.rungs)

    def rates(self, sizes: Sequence[float]) -> list[float]:
        """The hit rates of caches of these sizes in bytes; never falling with the size, never above the ceiling."""
        if not self.asked:
            return [0.0] * len(sizes)
        found: list[float] = [0.0] * len(sizes)
        for number, rung in enumerate(self.rungs):
            hits = rung.hits(sizes, self.asked * rung.rate)
            finer = self.rungs[number - 1].reach if number else 0.0
            for index, size in enumerate(sizes):
                if size > finer or not number:
                    found[index] = hits[index] / self.asked
        ceiling, best = self.ceiling, 0.0
        by_size = sorted(range(len(sizes)), key=lambda index: sizes[index])
        for index in by_size:
            best = found[index] = max(best, min(found[index], ceiling))
        return found

    def points(self, most: float) -> list[CurvePoint]:
        """The curve in steps of an octave, up to `most` bytes."""
        sizes = [most / 2**step for step in range(10, -1, -1)]
        return [CurvePoint(size, rate) for size, rate in zip(sizes, self.rates(sizes), strict=True)]


class Curves:
    """A curve a tenant, for the first TENANTS_MAX that ask; one more for all others."""

    def __init__(self, limit: int = TENANTS_MAX) -> None:
        self._limit = limit
        self._curves: dict[str, Curve] = {}
        self.others = Curve()

    def __len__(self) -> int:
        return len(self._curves)

    def of(self, tenant: str) -> Curve:
        """The tenant's curve, which may be that of the others."""
        curve = self._curves.get(tenant)
        if curve is None and len(self._curves) < self._limit:
            curve = self._curves[tenant] = Curve()
        return curve or self.others

    def named(self) -> Mapping[str, Curve]:
        """All curves by tenant, without that of the others. Don't mutate."""
        return self._curves

    def looked_up(self, tenant: str, keys: bytes, size: int, tokens: int, hit: int) -> None:
        """A lookup of `tokens` tokens, with these whole chunks of `size` bytes each, hit `hit` tokens."""
        curve = self.of(tenant)
        curve.asked_tokens += tokens
        curve.hit_tokens += hit
        curve.observe(keys, size)

    def stored(self, tenant: str, key: bytes, size: int) -> None:
        """A whole chunk of a tenant was stored."""
        self.of(tenant).stored(key, size)

    def fade(self) -> None:
        """Let the past count half; curves of tenants that have asked nothing for long make room for others."""
        for tenant, curve in list(self._curves.items()):
            curve.halve()
            if curve.quiet > 4:
                del self._curves[tenant]
        self.others.halve()

    @property
    def keys(self) -> int:
        """Sampled keys that are remembered in all; at most (limit + 1) * RUNGS * STACK_KEYS."""
        return sum(curve.keys for curve in self._curves.values()) + self.others.keys
