"""An engine's blocks and our chunks: which tokens of a request are where.

    tokens    0 ........ 128 ....... 256 ....... 384 ....... 512
    chunks    |------- chunk 0 ------|------- chunk 1 -------|
    blocks    |   7   |   8   |   0   |   3   |   4   |   5  |        one table for each of the engine's groups

Block 0 is the engine's hole: what lay there has left its window, or was never brought. Nothing is read from it, and
nothing written.

A window may begin in the middle of a block. The engine takes each block that it has as whole, for other requests too,
so what is loaded begins where the blocks do:

    window of a hit at 448             |<----------------------->|
    blocks of such a group   0    0    |   9   |   4   |   5   |     (one hole for each block that lies before)
                                       ^ loaded from here, not from the window's first token
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forebay.kvstore.geometry import MATCH_UNIT

NO_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [token, token + count * blocks), counted from a chunk's start, are in so many blocks from `block` on, in
    each from `slot` on. Several blocks only where each is whole."""

    token: int
    count: int
    block: int
    slot: int
    blocks: int = 1


def pieces(start: int, first: int, last: int, block_tokens: int, table: Sequence[int], base: int = 0) -> list[Piece]:
    """Where tokens [first, last) of the chunk that begins at `start` are, in few pieces. `table` is the request's, from
    its block `base` on.

    A piece lies in one granule unless it is whole granules on both sides. Raises LookupError for a hole.
    """
    found: list[Piece] = []
    whole_units = block_tokens % MATCH_UNIT == 0
    token = first
    while token < last:
        place, slot = divmod(token - base * block_tokens, block_tokens)
        if place >= len(table) or table[place] == NO_BLOCK:
            raise LookupError(f"no block holds token {token}")
        count = min(last - token, block_tokens - slot)
        if not whole_units or (token - start) % MATCH_UNIT or count % MATCH_UNIT:
            count = min(count, MATCH_UNIT - (token - start) % MATCH_UNIT)
        _append(found, Piece(token - start, count, table[place], slot), block_tokens)
        token += count
    return found


def _append(found: list[Piece], piece: Piece, block_tokens: int) -> None:
    """Add a piece, to the last one where both are whole neighbouring blocks."""
    last = found[-1] if found else None
    if (
        last is not None
        and (last.count, piece.count, block_tokens % MATCH_UNIT) == (block_tokens, block_tokens, 0)
        and last.block + last.blocks == piece.block
        and last.token % MATCH_UNIT == 0
    ):
        found[-1] = Piece(last.token, last.count, last.block, 0, last.blocks + 1)
    else:
        found.append(piece)


def holds(first: int, last: int, block_tokens: int, table: Sequence[int]) -> bool:
    """Are all tokens [first, last) in blocks?"""
    places = range(first // block_tokens, -(-last // block_tokens))
    return places.stop <= len(table) and all(table[place] != NO_BLOCK for place in places)


def held_from(first: int, last: int, block_tokens: int, table: Sequence[int]) -> int:
    """The token in [first, last] from which on all are in blocks: what follows the last hole."""
    place = -(-last // block_tokens)
    if place > len(table):
        return last
    while place > first // block_tokens and table[place - 1] != NO_BLOCK:
        place -= 1
    return min(max(first, place * block_tokens), last)


def covered(start: int, spans: Iterable[tuple[int, int]]) -> int:
    """How far [first, last) spans, in whatever order, reach from `start` on without a gap."""
    reached = start
    for first, last in sorted(spans):
        if first > reached:
            break
        reached = max(reached, last)
    return reached


def cut(first: int, last: int, block_tokens: int, table: Sequence[int]) -> tuple[int, ...]:
    """The part of a table that covers [first, last); what lies before is left out."""
    return tuple(table[first // block_tokens : -(-last // block_tokens)])


def split(table: Sequence[int], ratio: int) -> list[int]:
    """A table in blocks of which `ratio` make one of the engine's, where its buffers are cut finer."""
    if ratio == 1:
        return list(table)
    return [block * ratio + part if block != NO_BLOCK else NO_BLOCK for block in table for part in range(ratio)]
