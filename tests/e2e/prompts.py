"""Prompts that share prefixes at every offset that matters: around units, chunks and the window."""

from __future__ import annotations

import random


def boundary_offsets(chunk: int, window: int, unit: int = 16) -> list[int]:
    """Offsets one before, at and one after units, chunks and window edges, small ones first."""
    edges = [unit, chunk, window, window + unit, 2 * chunk, 2 * window, 3 * chunk + unit, 4 * chunk]
    return sorted({edge + step for edge in edges for step in (-1, 0, 1)})


def sharing_prompts(vocab: int, chunk: int, window: int, count: int, *, seed: int, longest: int) -> list[list[int]]:
    """`count` prompts of 1 to `longest` tokens. Each but the first few begins with a piece of one base text,
    cut at a boundary offset, and goes on with its own tokens."""
    rng = random.Random(seed)
    low = min(16, vocab // 4)
    base = [rng.randrange(low, vocab) for _ in range(longest)]
    offsets = [offset for offset in boundary_offsets(chunk, window) if offset < longest - 2]
    prompts = [[base[0]], base[: longest - 1]]
    while len(prompts) < count:
        shared = offsets[(len(prompts) - 2) % len(offsets)]
        own = rng.choice((0, 1, unit_ish(rng), unit_ish(rng)))
        tail = [rng.randrange(low, vocab) for _ in range(min(own, longest - shared))]
        prompts.append(base[:shared] + tail)
    return prompts


def unit_ish(rng: random.Random) -> int:
    """A length near a multiple of the unit."""
    return max(1, 16 * rng.randrange(0, 5) + rng.choice((-1, 0, 1)))
