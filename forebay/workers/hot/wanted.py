"""What is still wanted of one ask for rows: what may be asked for now, what again later, and what nobody has. Pure.

    WAITS ----message----> UNDER WAY ----> came
      ^                      |    `------> lost: nobody has it, as the store has said GONE_TIMES in a row
      `---- a pause ---------'

A chunk that doesn't come isn't lost: there may be no room for it at present, or its tier doesn't answer. It is asked
for again, after a pause that grows each time, and behind the others: none of them waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

PAUSE_S, PAUSE_MAX_S = 0.05, 1.0
"""The first pause, which doubles each time."""

GONE_TIMES = 2
"""The store may have said it in the moment in which somebody was storing it."""


class Wanted:
    """Chunks by their positions, in the order in which they are of use. At most `window` are under way at a time, one a
    message if they are to come `apart`. Times are in seconds."""

    def __init__(self, positions: Iterable[int], window: int, *, apart: bool) -> None:
        self._waits: dict[int, float] = dict.fromkeys(positions, 0.0)  # until when
        self._window, self._apart = window, apart
        self._under_way: set[int] = set()
        self._taken_at = -PAUSE_MAX_S
        self._failed: dict[int, int] = {}
        self._gone: dict[int, int] = {}

    @property
    def over(self) -> bool:
        """Has everything come, or been lost?"""
        return not self._waits and not self._under_way

    def under_way(self, position: int) -> bool:
        """Has it been asked for, and not come yet?"""
        return position in self._under_way

    def take(self, now: float) -> list[int]:
        """What the next message is to ask for; it is under way from now on. Small messages cost more than they bring,
        so for a while there is none before half of what is under way may be new."""
        room = self._window - len(self._under_way)
        small = not self._apart and 2 * room < self._window
        if room <= 0 or (small and now < self._taken_at + PAUSE_MAX_S):
            return []
        ready = [position for position, until in self._waits.items() if until <= now]
        taken = ready[: 1 if self._apart else room]
        for position in taken:
            del self._waits[position]
        if taken:
            self._taken_at = now
        self._under_way.update(taken)
        return taken

    def ready(self, now: float) -> bool:
        """Does anything wait for nothing but what is under way?"""
        return any(until <= now for until in self._waits.values())

    def next_at(self, now: float) -> float | None:
        """When something else may be asked for: None if nothing waits for its time to come."""
        return min((until for until in self._waits.values() if until > now), default=None)

    def came(self, positions: Iterable[int]) -> None:
        """These are in host memory."""
        for position in positions:
            self._under_way.discard(position)
            self._failed.pop(position, None)
            self._gone.pop(position, None)

    def ended(self, message: Sequence[int], gone: Collection[int], now: float) -> list[int]:
        """A message has been answered, and nobody has what is `gone`. Returns what is lost. The first that didn't come
        may be why those behind it weren't brought: if others came, or it is gone, they can do without it at once."""
        missing = [position for position in message if position in self._under_way]
        self._under_way.difference_update(missing)
        freed = len(missing) < len(message) or bool(missing and missing[0] in gone)
        lost, again, later = [], dict[int, float](), dict[int, float]()
        for place, position in enumerate(missing):
            if self._count_gone(position, position in gone) >= GONE_TIMES:
                lost.append(position)
                del self._gone[position]
            elif freed and place and position not in gone:
                again[position] = 0.0
            else:
                later[position] = now + self._pause(position)
        last = {position: later.pop(position) for position in missing[:1] if position in later}
        self._waits = again | self._waits | later | last
        return lost

    def _count_gone(self, position: int, gone: bool) -> int:
        if not gone:
            self._gone.pop(position, None)
            return 0
        self._gone[position] = self._gone.get(position, 0) + 1
        return self._gone[position]

    def _pause(self, position: int) -> float:
        failed = self._failed[position] = self._failed.get(position, 0) + 1
        return min(PAUSE_S * 2.0 ** min(failed - 1, 10), PAUSE_MAX_S)
