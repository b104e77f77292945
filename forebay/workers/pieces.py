"""What a hit lacks, chunk position by chunk position: the pieces that a cut divides between computing and loading.

    group      position 3        position 4        position 5   |reach
    full       [. . . missing . .][. . missing . . .][. missing .|
    window                              [. . missing .][. missing .|
    pieces     [start ... end)    [start .... end)   [start . end)

Where a group needs nothing at a position, as a window group before its window, a piece is all the cheaper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.protocol import Place
from forebay.workers.moves import GroupRoom
from forebay.workers.prefix import GroupShape, missing_runs


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) at one chunk position. `missing` are the units that each group lacks and must have, `loads`
    the bytes by tier that have to be brought for them first (none: host memory has them)."""

    start: int
    end: int
    position: int
    missing: tuple[tuple[range, ...], ...]
    loads: Mapping[str, int]

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """Places (group, chunk position) that hold what is missing."""
        return [(group, self.position) for group, runs in enumerate(self.missing) if runs]

    def units(self, group: int) -> int:
        """How many units `group` lacks."""
        return sum(map(len, self.missing[group]))


def plan_pieces(
    shapes: Sequence[GroupShape], rooms: Sequence[GroupRoom], start: int, reach: int, places: Sequence[Place]
) -> list[Piece]:
    """What a hit of `reach` tokens lacks from `start` on, chunk position by chunk position."""
    size = shapes[0].chunk_tokens
    offers = {(place.group, place.position): place for place in places}
    pieces = []
    for position in range(start // size, -(-reach // size)):
        begin, end = max(start, position * size), min(reach, (position + 1) * size)
        loads: Counter[str] = Counter()
        missing = []
        for group, (shape, room) in enumerate(zip(shapes, rooms, strict=True)):
            first = max(begin // MATCH_UNIT, shape.first_unit(reach))
            missing.append(tuple(missing_runs(room.have, first, end // MATCH_UNIT)))
            offer = offers.get((group, position))
            if missing[-1] and offer is not None:
                loads[offer.tier] += offer.length
        pieces.append(Piece(begin, end, position, tuple(missing), loads))
    return pieces
