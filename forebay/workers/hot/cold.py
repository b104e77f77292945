"""The part of one request's prefix whose rows tiers have: what of it is in host memory by now, and what is waited for.

    COLD ----a step names rows of it, or one did before----> ASKED ----it comes----> HERE
      ^                                                        |                       |
      `------------------ it doesn't come ---------------------'                       |
      `------- others are wanted, and there may be no more (`most`) -------------------'

A chunk is the least that a tier brings. A step that names a row of one that isn't here is void for this request, which
then waits until all are here that the step has named: so each attempt gets at least one layer further. What such a step
names behind that layer is a guess; it is brought with the rest. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from forebay.workers.moves import Pull


@dataclass(slots=True, eq=False)
class ColdRows:
    """Chunks are named by their position in the prompt. `pull` is how the request has asked for its prefix, of which
    `hit` tokens are served. Of chunks that were cold at first, `most` may be in host memory at a time (None: all).
    `asked` are those that are on their way, each with the number of the last of `asks` for it."""

    pull: Pull
    hit: int
    cold: set[int]
    most: int | None = None
    here: dict[int, None] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    asks: int = 0
    waits: set[int] = field(default_factory=set)
    _ahead: set[int] = field(default_factory=set)
    _needed: set[int] = field(default_factory=set)

    @property
    def watched(self) -> bool:
        """Does it matter what steps read?"""
        return bool(self.cold) or self.most is not None

    @property
    def parked(self) -> bool:
        """Does the request wait for any?"""
        return bool(self.waits)

    def read(self, named: Iterable[int]) -> None:
        """A step has read rows of these chunks, and holds: they go last when others are wanted."""
        for position in named:
            if position in self.here:
                del self.here[position]
                self.here[position] = None
        self._needed.clear()

    def lack(self, missing: Collection[int], named: Iterable[int]) -> None:
        """A step is void because these were `missing`, of all that it has `named`: they are waited for."""
        assert self.cold.issuperset(missing), (self.cold, missing)
        self.waits.update(missing)
        self._needed.update(named)

    def ask(self, ahead: Iterable[int] = ()) -> list[int]:
        """Those that are to be asked for now: what is waited for, then what may be wanted, as far as there may be more.
        Each is asked for once until it comes, or doesn't."""
        wanted = sorted(self.waits - self.asked.keys())
        room = len(self.cold) if self.most is None else self.most - len(self.here) - len(self.asked) - len(wanted)
        known = self.waits | self.asked.keys()
        more = [position for position in ahead if position in self.cold and position not in known]
        more = more[: max(0, room)]
        self._ahead.update(more)
        wanted += more
        self.asks += 1
        self.asked.update(dict.fromkeys(wanted, self.asks))
        return wanted

    def surplus(self) -> list[int]:
        """Those to let go of before others come, least recently read first; none that a step needs now."""
        if self.most is None:
            return []
        count = len(self.here) + len(self.waits | self.asked.keys()) - self.most
        return self.spare()[: max(0, count)]

    def spare(self) -> list[int]:
        """Those that no step needs now and that can be brought again, least recently read first."""
        return [] if self.most is None else [position for position in self.here if position not in self._needed]

    def leave(self, position: int) -> None:
        """One isn't in host memory any more."""
        del self.here[position]
        self.cold.add(position)

    def came(self, position: int) -> None:
        """One is in host memory."""
        if position in self.cold:
            self.cold.remove(position)
            self.here[position] = None
        self.waits.discard(position)
        self.asked.pop(position, None)
        self._ahead.discard(position)

    def ended(self, positions: Iterable[int], number: int) -> list[int]:
        """Nothing more comes of what was asked for with this number of `asks`. Returns those that are waited for, and
        haven't come. What came, was let go of, and has been asked for anew is the later one's. What was asked for
        before it was waited for has had less time since than there is for it: it can be asked for again."""
        ended = {position for position in positions if self.asked.get(position) == number}
        for position in ended:
            del self.asked[position]
        late = sorted((ended & self.waits) - self._ahead)
        self._ahead -= ended
        return late
