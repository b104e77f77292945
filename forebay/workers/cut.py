"""The table of one prefix that is computed from its front while it is loaded from its back.

    start             front         meeting       taken      landed            end
    |====computed=====|···to compute···|···asked for···|--copied--|===on the device===|
     engine's thread -->                                          <-- transfer's thread

Both ends claim pieces, chunk by chunk, until they meet. What was only asked for is claimed by nobody: the engine
computes it if it gets there first, and what comes too late is dropped. Only while the bytes of a piece are being copied
into its blocks, for milliseconds, the engine keeps off. So neither waits for the other, and no block has two writers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from forebay.kvstore.identity import MATCH_UNIT
from forebay.workers.meeting import Outstanding, meeting_point
from forebay.workers.pieces import Piece
from forebay.workers.rates import Rates

PROBE_S = 0.03
"""How long a prefix from tiers of which nothing is known is thought to take."""

MET = -1
"""The answer to a claim where the two ends have met."""

ALONE = -2
"""The answer where nothing has landed and nothing is worth waiting for: the front computes all, in whatever steps."""


@dataclass(slots=True)
class Landed:
    """What a cut has brought: blocks by unit, one table a group, and where the units came from."""

    placed: tuple[dict[int, int], ...]
    names: dict[int, str] = field(default_factory=dict)

    def sources(self) -> dict[str, int]:
        """Tokens by source."""
        return {name: units * MATCH_UNIT for name, units in sorted(Counter(self.names.values()).items())}


class Cut:
    """One request's table. `claim`, `spend`, `open` and `close` belong to the engine's thread, the rest to the
    transfer's; any may be called at any time. No call waits for more than the lock, which nobody keeps.

    `pieces` are ascending and cover [start, end) without a gap. `clock` gives seconds.
    """

    def __init__(
        self, request: Hashable, pieces: Sequence[Piece], groups: int, rates: Rates, clock: Callable[[], float]
    ) -> None:
        assert pieces, request
        self.request = request
        self.pieces = tuple(pieces)
        self.start, self.end = pieces[0].start, pieces[-1].end
        self.total: Counter[str] = Counter()
        for piece in self.pieces:
            self.total.update(piece.loads)
        self._rates, self._clock = rates, clock
        self._lock = threading.Lock()
        self._front = self.start
        self._landed_from = len(pieces)
        self._landing = False
        self._asked_from = len(pieces)
        self._since = clock()
        self._segment = 0
        self._parked = True
        self._opened = self._closed = self._ended = False
        self._landed = Landed(tuple({} for _ in range(groups)))
        self._spare: list[list[int]] = []

    # --- the engine's side -----------------------------------------------------------------------------

    def open(self, spare: list[list[int]]) -> None:
        """Blocks to land in, one list a group. The lists are shared: take from them by `spend` alone from now on."""
        with self._lock:
            self._spare = spare
            self._opened = True

    def claim(self, position: int, count: int) -> int:
        """How many tokens from `position` on are to be computed now, at most `count`. 0: wait, for a load that is
        worth it; the transfer thread says when. MET: there is nothing left to compute, all else has landed. ALONE:
        there is nothing else; the cut is over."""
        with self._lock:
            bound = self._bound()
            if position < self._front:  # claimed before, and not computed yet for want of blocks
                self._parked = False
                return min(count, self._front - position)
            self._front = position
            if position >= bound:
                self._parked = self._landing
                return 0 if self._landing else MET
            upto = bound if self._ended else min(self._meeting(), bound)
            if upto <= position:
                self._parked = True
                return 0
            self._parked = False
            known = self._ended or self._rates.prefill.samples > 0
            if upto == self.end and count >= upto - position and known:
                self._closed = True  # the last step of the prefix: nothing else could land in time
                return ALONE
            taken = min(count, upto - position)
            if not known:  # one piece shows how fast it goes
                taken = min(taken, max(piece.end - piece.start for piece in self.pieces))
            self._front = position + taken
            return taken

    def spend(self, group: int, count: int) -> list[int]:
        """Up to `count` blocks for the front, of those that were set aside for the back."""
        with self._lock:
            spare = self._spare[group]
            taken = [spare.pop() for _ in range(min(count, len(spare)))]
        return taken

    def refund(self, group: int, blocks: Sequence[int]) -> None:
        """Put back what was spent and isn't used."""
        with self._lock:
            self._spare[group].extend(reversed(blocks))

    def close(self) -> Landed:
        """Nothing lands any more; what has landed. Also the end for a request that nobody wants any more."""
        with self._lock:
            self._closed = True
            return self._landed

    # --- the transfer thread's side --------------------------------------------------------------------

    @property
    def parked(self) -> bool:
        """Does the engine wait?"""
        return self._parked

    @property
    def opened(self) -> bool:
        """Are there blocks to land in?"""
        return self._opened

    @property
    def over(self) -> bool:
        """Is nothing left to load: it was closed, or the ends have met?"""
        with self._lock:
            return self._closed or (not self._landing and self._front >= self._bound())

    @property
    def next(self) -> int:
        """One more than the index of the piece that must land next."""
        return self._landed_from

    def asked(self, first: int) -> None:
        """Pieces from `first` on have been asked for, those of the segment that arrives next together."""
        with self._lock:
            if not self._segment:
                self._since, self._segment = self._clock(), self._landed_from - first
            self._asked_from = first

    def arrived(self, pieces: int) -> None:
        """A segment is here, all of it landed, and the next one has `pieces`."""
        with self._lock:
            self._since, self._segment = self._clock(), pieces

    def late_s(self) -> float:
        """How much longer than the rates say the segment that arrives next has been waited for."""
        with self._lock:
            nominal = sum(self.load_seconds()[self._landed_from - self._segment :])
            return self._clock() - self._since - nominal if self._segment else 0.0

    def take(self, index: int) -> list[list[int]] | None:
        """Blocks for piece `index`, one list a group; the engine keeps off it until `landed` or `failed`. None: the
        engine has begun with it, or blocks are lacking."""
        piece = self.pieces[index]
        with self._lock:
            assert self._opened and not self._landing and index == self._landed_from - 1, index
            if self._closed or piece.start < self._front:
                return None
            needs = [piece.units(group) for group in range(len(self._spare))]
            if any(len(spare) < need for spare, need in zip(self._spare, needs, strict=True)):
                return None
            self._landing = True
            blocks = []
            for spare, need in zip(self._spare, needs, strict=True):
                blocks.append(spare[:need])
                del spare[:need]
            return blocks

    def landed(self, index: int, blocks: Sequence[Sequence[int]], names: Mapping[int, str]) -> None:
        """Piece `index` is on the device, in the blocks that were taken for it."""
        piece = self.pieces[index]
        with self._lock:
            assert self._landing and index == self._landed_from - 1, index
            for group, runs in enumerate(piece.missing):
                units = [unit for run in runs for unit in run]
                self._landed.placed[group].update(zip(units, blocks[group], strict=True))
            self._landed.names.update(names)
            self._landing, self._landed_from = False, index
            self._asked_from = min(self._asked_from, index)
            self._segment = max(0, self._segment - 1)

    def failed(self, blocks: Sequence[Sequence[int]]) -> None:
        """What was taken did not arrive; its blocks are free again."""
        with self._lock:
            self._landing = False
            for spare, taken in zip(self._spare, blocks, strict=True):
                spare[:0] = taken

    def finish(self) -> None:
        """Nothing more will land: the engine computes all that hasn't."""
        with self._lock:
            self._ended = True

    def wakes(self) -> bool:
        """Should an engine that waits go on? True once for each time that it does wait."""
        with self._lock:
            if not self._parked or not self._opened or self._closed:
                return False
            bound = self._bound()
            waits = self._landing if self._front >= bound else min(self._meeting(), bound) <= self._front
            self._parked = waits
            return not waits

    def meeting(self) -> int:
        """Where the ends should meet, by what is known now."""
        with self._lock:
            return self._meeting()

    # --- small steps; the lock is held -----------------------------------------------------------------

    def _bound(self) -> int:
        """The first token that the engine may not compute."""
        first = self._landed_from - (1 if self._landing else 0)
        return self.pieces[first].start if first < len(self.pieces) else self.end

    def _meeting(self) -> int:
        pieces = self.pieces[: self._landed_from]
        landed = self.pieces[self._landed_from].start if self._landed_from < len(self.pieces) else self.end
        outstanding = Outstanding(
            [piece.start for piece in pieces], self.load_seconds(), self._segment,
            self._clock() - self._since if self._segment else 0.0, landed,
        )  # fmt: skip
        # Once something has landed, the step behind the prefix is one more in any case.
        step_s = self._rates.prefill.step_s if landed == self.end else 0.0
        return meeting_point(self._front, outstanding, self._rates.prefill.seconds, step_s)

    def load_seconds(self) -> list[float]:
        """What each piece that hasn't landed will take, by the rates."""
        loads = self._rates.loads
        bandwidth = {tier: loads.bandwidth(tier) or size / PROBE_S for tier, size in self.total.items()}
        pieces = self.pieces[: self._landed_from]
        return [sum(size / bandwidth[tier] for tier, size in piece.loads.items()) for piece in pieces]
