"""Who comes back when: sessions told apart by the chunks that they ask for, and what their next turn is worth.

A lookup belongs to the session whose last prompt it goes on from: each session has marks, the keys of the last two
chunks of its last prompt (the very last one may have been a tail, which is not in the next prompt). Chunks that are
evicted leave nothing behind; a session costs the same whether its chunks are here or not, and the sessions that were
idle for longest are forgotten beyond a limit.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from forebay.kvstore.policies.base import LookedUp
from forebay.kvstore.policies.foresight.ages import BINS, EDGES, PER_OCTAVE, bin_of, indices
from forebay.kvstore.policies.foresight.habits import Habits, Kind

SESSIONS_MAX = 1 << 15
EXPECTED_MAX = 1 << 16
GAPS_KEPT = 32
GAP_FADES = 0.97
OWN_LEAN = 10.0
"""A session's own gaps count as much as what its kind says once there are so many."""
SMOOTHING = 0.3
FIRST_REFRESH = bin_of(8.0)


class Holder(Protocol):
    """What holds chunks of a session, and wants to know when its worth changes."""

    def worth_changed(self) -> None:
        """The session's `worth` is another one."""


class Session:
    """One chain of prompts, each of which goes on from the one before.

    `worth` is the index (see `ages`) at its present age: hits a second for each chunk that is kept. `usual` is the
    smoothed log2 of its gaps in seconds, `spread` the smoothed distance of a gap from that. `gaps` are the bins of its
    last gaps. `counted`: what it does is learned from.
    """

    __slots__ = (
        "age_bin", "counted", "depth", "gaps", "holders", "index", "kind", "last", "marks", "spread", "timer", "turn",
        "usual", "worth",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self.last = now
        self.turn = 0
        self.depth = 0
        self.usual, self.spread = 0.0, 1.0
        self.gaps = b""
        self.marks: tuple[bytes, ...] = ()
        self.kind: Kind | None = None
        self.counted = True
        self.index: Sequence[float] = ()
        self.age_bin = 0
        self.timer = 0
        self.worth = 0.0
        self.holders: dict[object, Holder] = {}

    def changed(self, worth: float) -> None:
        """Its next turn is worth so much now."""
        self.worth = worth
        for holder in list(self.holders.values()):
            holder.worth_changed()


class Sessions:
    """All sessions that are remembered, their clock, and what they have taught. One a store; pure."""

    def __init__(self, *, limit: int = SESSIONS_MAX, expected_max: int = EXPECTED_MAX) -> None:
        self._limit, self._expected_max = limit, expected_max
        self.habits = Habits()
        self.now = 0.0
        self.nobody = Session(0.0)
        self.nobody.worth = -1.0
        self._sessions: OrderedDict[Session, None] = OrderedDict()
        self._marks: dict[bytes, Session] = {}
        self._expected: OrderedDict[bytes, Session] = OrderedDict()
        self._timers: list[tuple[float, int, Session]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def expected(self) -> int:
        """How many keys of missing chunks are awaited; bounded."""
        return len(self._expected)

    def observe(self, lookup: LookedUp) -> tuple[Session, int]:
        """Whose lookup this was, and how many of its chunks the session had asked for before. Advances the time."""
        self._advance(lookup.now)
        self.habits.next_request()
        session, known = self._find(lookup.keys)
        if session is None:
            session = Session(self.now)
        else:
            self._came_back(session)
        grown = len(lookup.keys) - session.depth
        session.depth, session.age_bin = len(lookup.keys), 0
        session.kind = self.habits.kind(_features(session, grown))
        self._mark(session, lookup.keys)
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        self._refresh(session)
        self._set_timer(session)
        session.changed(session.index[0])
        while len(self._sessions) > self._limit:
            self._forget(next(iter(self._sessions)))
        return session, known

    def anonymous(self) -> Session:
        """A session for chunks that were stored without a lookup: worth what a new one is, and never learned from."""
        session = Session(self.now)
        session.depth, session.counted = 1, False
        session.kind = self.habits.kind(_features(session, 1)[:1])
        self._sessions[session] = None
        self._refresh(session)
        self._set_timer(session)
        session.worth = session.index[0]
        while len(self._sessions) > self._limit:
            self._forget(next(iter(self._sessions)))
        return session

    def expect(self, keys: Sequence[bytes], hit: int, session: Session) -> None:
        """The first `hit` of these chunks are here; the others will be stored for `session`, in every group, if at
        all."""
        for key in keys[:hit]:
            self._expected.pop(key, None)
        for key in keys[hit:]:
            self._expected[key] = session
            self._expected.move_to_end(key)
        while len(self._expected) > self._expected_max:
            self._expected.popitem(last=False)

    def expecting(self, key: bytes) -> Session | None:
        """Whose this chunk is, if it is awaited."""
        session = self._expected.get(key)
        return session if session in self._sessions else None

    def _find(self, keys: Sequence[bytes]) -> tuple[Session | None, int]:
        # One chunk alone says nothing: many sessions may begin with it.
        for depth in range(len(keys), 1, -1):
            session = self._marks.get(keys[depth - 1])
            if session is not None:
                return session, depth
        return None, 0

    def _mark(self, session: Session, keys: Sequence[bytes]) -> None:
        self._unmark(session)
        session.marks = tuple(keys[-2:])
        for mark in session.marks:
            self._marks[mark] = session

    def _unmark(self, session: Session) -> None:
        for mark in session.marks:
            if self._marks.get(mark) is session:
                del self._marks[mark]
        session.marks = ()

    def _came_back(self, session: Session) -> None:
        gap = max(self.now - session.last, 0.0)
        age_bin = bin_of(gap)
        if session.kind is not None:
            self.habits.returned(session.kind, age_bin)
        log_gap = math.log2(max(gap, 0.25))
        if session.turn == 0:
            session.usual = log_gap
        else:
            distance = abs(log_gap - session.usual)
            session.usual += SMOOTHING * (log_gap - session.usual)
            session.spread += SMOOTHING * (distance - session.spread)
        session.turn += 1
        session.last = self.now
        session.gaps = (session.gaps + bytes([age_bin]))[-GAPS_KEPT:]

    def _wait_until(self, session: Session, age_bin: int) -> None:
        while session.age_bin < age_bin:
            if session.kind is not None and session.counted:
                self.habits.waited(session.kind, session.age_bin)
            session.age_bin += 1

    def _advance(self, now: float) -> None:
        self.now = max(self.now, now)
        while self._timers and self._timers[0][0] <= self.now:
            _, timer, session = heappop(self._timers)
            if timer != session.timer:
                continue
            before = session.age_bin
            self._wait_until(session, max(bin_of(self.now - session.last), session.age_bin + 1))
            if session.age_bin == BINS - 1:
                self._forget(session)
                continue
            self._set_timer(session)
            if not session.holders:
                session.index = ()  # it may never be needed again
                continue
            aged = session.age_bin > FIRST_REFRESH and _octave(session.age_bin) != _octave(before)
            if aged or not session.index:
                self._refresh(session)
            session.changed(session.index[session.age_bin])

    def _set_timer(self, session: Session) -> None:
        """Look at a session again when it reaches the next bin: what it has waited through is to be known soon."""
        self._serial += 1
        session.timer = self._serial
        heappush(self._timers, (session.last + EDGES[session.age_bin + 1], session.timer, session))
        # Timers that were overtaken go when they are due, which is soon after; this is for floods.
        if len(self._timers) > 8 * len(self._sessions) + 64:
            self._timers = [item for item in self._timers if item[1] == item[2].timer]
            heapify(self._timers)

    def _refresh(self, session: Session) -> None:
        assert session.kind is not None
        session.index = array("d", indices(_blend(self.habits.hazard(session.kind), session.gaps)))

    def _forget(self, session: Session) -> None:
        """It isn't expected any more: what it still holds goes first."""
        self._unmark(session)
        session.timer = 0
        del self._sessions[session]
        session.changed(0.0)

    def __iter__(self) -> Iterator[Session]:
        """From the one that was idle for longest."""
        return iter(list(self._sessions))


def _octave(age_bin: int) -> int:
    return age_bin // PER_OCTAVE


def _features(session: Session, grown: int) -> tuple[int, ...]:
    """What kind of session this is, widest first: turn, length of a first prompt, growth, usual gap and spread."""
    turn = session.turn
    turns = turn if turn < 3 else 3 if turn < 5 else 4 if turn < 9 else 5
    if turn == 0:
        return (turns, min(int(math.log2(max(session.depth, 1)) / 1.5), 9))
    growth = min(int(math.log2(max(grown + 2, 1)) / 2), 5)
    usual = max(-2, min(math.floor(session.usual), 14))
    spread = max(-2, min(math.floor(math.log2(max(session.spread, 0.25))), 3)) if turn > 1 else -9
    return (turns, growth, usual, spread)


def _blend(hazard: Sequence[float], gaps: bytes) -> Sequence[float]:
    """The kind's hazard, corrected by a session's own gaps: the latest count most."""
    if not gaps:
        return hazard
    returned = [0.0] * BINS
    weight = 1.0
    for age_bin in reversed(gaps):
        returned[age_bin] += weight
        weight *= GAP_FADES
    waited = sum(returned)
    blended = []
    for chance, own in zip(hazard, returned, strict=True):
        blended.append((own + OWN_LEAN * chance) / (waited + OWN_LEAN))
        waited = max(waited - own, 0.0)
    return blended
