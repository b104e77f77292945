"""How the device's memory is divided among the cache groups."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.errors import ConfigError
from forebay.kvstore.identity import MATCH_UNIT
from forebay.workers.prefix import GroupShape, units_of

WINDOW_SHARE = 4
"""A window group gets blocks for 1/4 of the tokens that the full groups hold: a resume point needs a window
of it, while of full attention it needs everything."""

TOKENS_MAX = 1 << 26


def blocks_for_tokens(shapes: Sequence[GroupShape], tokens: int) -> tuple[int, ...]:
    """Blocks of each group so that the full groups hold `tokens`."""
    return tuple(_blocks(shape, tokens) for shape in shapes)


def _blocks(shape: GroupShape, tokens: int) -> int:
    whole = units_of(tokens) + 1
    if not shape.windowed:
        return whole
    least = min(whole, 2 * shape.footprint(tokens))
    return max(least, units_of(tokens // WINDOW_SHARE))


def bytes_of(block_bytes: Sequence[int], blocks: Sequence[int]) -> int:
    """Bytes that so many blocks of each group take."""
    return sum(size * n for size, n in zip(block_bytes, blocks, strict=True))


def divide(
    shapes: Sequence[GroupShape], block_bytes: Sequence[int], memory: int, tokens: int | None, max_context: int
) -> tuple[int, ...]:
    """Blocks of each group: for `tokens`, or else as many as `memory` bytes hold, `block_bytes` being what each group's
    take. Raises ConfigError if not even a short request would fit."""

    def taken(tokens: int) -> int:
        return bytes_of(block_bytes, blocks_for_tokens(shapes, tokens))

    if tokens is None:
        low, high = 0, TOKENS_MAX // MATCH_UNIT
        while low < high:  # the most units whose pools fit
            middle = (low + high + 1) // 2
            fits = taken(middle * MATCH_UNIT) <= memory
            low, high = (middle, high) if fits else (low, middle - 1)
        tokens = low * MATCH_UNIT
    least = min(max_context, 8 * MATCH_UNIT)
    if tokens < least:
        raise ConfigError(
            f"the block pool would hold {tokens} tokens; it needs at least {least} "
            f"(device_memory of {taken(least)} bytes, or max_tokens {least})"
        )
    return blocks_for_tokens(shapes, tokens)
