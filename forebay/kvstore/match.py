"""One length that all groups can serve, as a fixed point.

`reach[g][i]` is what group `g` has of chunk position `i`: how many tokens from the chunk's start, or, of a
recurrent group, a bit for each unit at whose end a state is stored (`state_bit`). A full group serves a hit of P
if it has [0, P); a window group if it has [needed_from(P), P); a recurrent group if it has the state at P itself,
whatever it has before and behind it.

                needed_from(P)              P
    window   . . . .[=======================)
    full     [==============================)
    state    . . . . . . . . . . . . . . . .|
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.kvstore.identity import MATCH_UNIT, GroupGeometry
from forebay.kvstore.layout import needed_from, round_down

Reach = Sequence[Sequence[int]]


class Front(Sequence[int]):
    """A group's row of which it is known that so many chunks from its `front` are whole: they needn't be asked for."""

    front: int = 0


def state_bit(tokens: int) -> int:
    """What stands in a recurrent group's row for a state `tokens` tokens behind its chunk's start."""
    assert tokens > 0 and tokens % MATCH_UNIT == 0, tokens
    return 1 << (tokens // MATCH_UNIT - 1)


def last_state(have: Sequence[int], chunk_tokens: int, limit: int) -> int:
    """The greatest position up to `limit` that has a state, or 0."""
    limit = round_down(limit, MATCH_UNIT)
    for position in range((limit - 1) // chunk_tokens, -1, -1):
        start = position * chunk_tokens
        states = have[position] if position < len(have) else 0
        states &= 2 * state_bit(min(chunk_tokens, limit - start)) - 1
        if states:
            return start + states.bit_length() * MATCH_UNIT
    return 0


def longest_hit(groups: Sequence[GroupGeometry], reach: Reach, chunk_tokens: int, limit: int) -> int:
    """The greatest multiple of the unit up to `limit` that all groups can serve."""
    hit = limit // 16 * 16
    while hit:
        lower = min(
            _served(group, have, chunk_tokens, hit) for group, have in zip(groups, reach, strict=True)
        )
        if lower == hit:
            return hit
        hit = lower
    return 0


def _served(group: GroupGeometry, have: Sequence[int], chunk_tokens: int, hit: int) -> int:
    """`hit` if this group can serve it, else the next shorter length worth trying."""
    if group.recurrent:
        return last_state(have, chunk_tokens, hit)
    first = needed_from(group, hit) // chunk_tokens
    if group.window is None:
        return _contiguous(have, chunk_tokens, hit)
    for position in range((hit - 1) // chunk_tokens, first - 1, -1):
        start = position * chunk_tokens
        present = have[position] if position < len(have) else 0
        if present < min(chunk_tokens, hit - start):
            return start + present
    return hit


def _contiguous(have: Sequence[int], chunk_tokens: int, hit: int) -> int:
    front = have.front if isinstance(have, Front) else 0
    for position in range(front, -(-hit // chunk_tokens)):
        start = position * chunk_tokens
        present = have[position] if position < len(have) else 0
        if present < min(chunk_tokens, hit - start):
            return start + present
    return hit


def needed_positions(group: GroupGeometry, chunk_tokens: int, hit: int) -> range:
    """Chunk positions that a hit of `hit` tokens reads from this group."""
    if hit == 0:
        return range(0)
    return range(needed_from(group, hit) // chunk_tokens, (hit - 1) // chunk_tokens + 1)


def longest_hit_naive(groups: Sequence[GroupGeometry], reach: Reach, chunk_tokens: int, limit: int) -> int:
    """The same by trying every length: the oracle of the clever one."""
    for hit in range(limit // 16 * 16, 0, -16):
        if all(_serves_naive(group, have, chunk_tokens, hit) for group, have in zip(groups, reach, strict=True)):
            return hit
    return 0


def _serves_naive(group: GroupGeometry, have: Sequence[int], chunk_tokens: int, hit: int) -> bool:
    for position in needed_positions(group, chunk_tokens, hit):
        wanted = min(chunk_tokens, hit - position * chunk_tokens)
        if position >= len(have):
            return False
        if not have[position] >> (wanted // 16 - 1) & 1 if group.recurrent else have[position] < wanted:
            return False
    return True
