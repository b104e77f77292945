"""What peers have said that they have: remembered briefly, asked for once, known to any thread.

A query is open from when peers are asked until one has the exact chunk, or all have answered or had their time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from forebay.tiers.base import ChunkId, LookupResult, Query

KNOWN_MAX = 1 << 16
OPEN_MAX = 1 << 14
MISS = LookupResult("miss")
RETRY = LookupResult("retry")
AWAY = LookupResult("away")


@dataclass(slots=True)
class _Open:
    """A query that peers were asked. `asked` have not answered yet, and some are `unsure`, or won't answer."""

    asked: set[str]
    unsure: bool
    best: LookupResult = MISS

    def result(self, query: Query) -> LookupResult:
        """What all of them have, as far as that is known."""
        if not self.unsure or self.best.key == query.key:
            return self.best
        return msgspec.structs.replace(self.best, sure=False) if self.best.outcome == "hit" else AWAY


@dataclass(frozen=True, slots=True)
class _Known:
    result: LookupResult
    until: float


@dataclass(slots=True)
class Asking:
    """What a lookup knows by now, and which of its queries nobody has been asked yet."""

    results: list[LookupResult]
    unasked: list[Query] = field(default_factory=list)


class Answers:
    """Thread-safe. `hit_s` and `miss_s` are how long an answer holds; `clock` is monotonic."""

    def __init__(self, hit_s: float, miss_s: float, clock: Callable[[], float], known_max: int = KNOWN_MAX) -> None:
        self._hit_s, self._miss_s, self._clock, self._known_max = hit_s, miss_s, clock, known_max
        self._lock = threading.Lock()
        self._open: dict[Query, _Open] = {}
        self._known: OrderedDict[Query, _Known] = OrderedDict()
        self._where: OrderedDict[ChunkId, dict[str, float]] = OrderedDict()

    def look(self, queries: Sequence[Query], peers: frozenset[str], *, absent: bool = False) -> Asking:
        """Answers that are known, `retry` for the others. Those that are new are open from now on, towards `peers`;
        others, that can't be asked, are `absent`."""
        asking = Asking([])
        now = self._clock()
        with self._lock:
            for query in queries:
                asking.results.append(self._look(query, peers, now, asking.unasked, absent=absent))
        return asking

    def _look(
        self, query: Query, peers: frozenset[str], now: float, unasked: list[Query], *, absent: bool
    ) -> LookupResult:
        known = self._known.get(query)
        if known is not None and now < known.until and self._still_true(query, known.result):
            return known.result
        if query in self._open:
            return RETRY
        if not peers or len(self._open) >= OPEN_MAX:
            return AWAY if peers or absent else MISS
        self._open[query] = _Open(set(peers), absent)
        unasked.append(query)
        return RETRY

    def _still_true(self, query: Query, result: LookupResult) -> bool:
        return result.outcome != "hit" or ChunkId(query.group, result.key) in self._where

    def heard(self, peer: str, queries: Sequence[Query], results: Sequence[LookupResult]) -> None:
        """A peer has answered."""
        now = self._clock()
        with self._lock:
            for query, result in zip(queries, results, strict=True):
                if result.outcome == "hit":
                    self._note_place(ChunkId(query.group, result.key), peer, now)
                self._settle(query, peer, result, now)

    def silent(self, peer: str, queries: Iterable[Query]) -> None:
        """A peer hasn't answered in time, or is gone: nothing is to be had from it."""
        now = self._clock()
        with self._lock:
            for query in queries:
                self._settle(query, peer, AWAY, now)

    def _settle(self, query: Query, peer: str, result: LookupResult, now: float) -> None:
        state = self._open.get(query)
        if state is None:
            return  # another peer's exact chunk has answered it already
        state.asked.discard(peer)
        if result.outcome == "hit" and result.matched > state.best.matched:
            state.best = result
        state.unsure |= result.outcome in ("retry", "away") or not result.sure
        if state.asked and not (state.best.outcome == "hit" and state.best.key == query.key):
            return
        del self._open[query]
        lasts = self._hit_s if state.best.outcome == "hit" else self._miss_s
        # Also what isn't worth remembering has to be known until the lookup that asked has been told.
        self._known[query] = _Known(state.result(query), now + max(lasts, 0.02))
        self._known.move_to_end(query)
        while len(self._known) > self._known_max:
            self._known.popitem(last=False)

    def _note_place(self, chunk: ChunkId, peer: str, now: float) -> None:
        self._where.setdefault(chunk, {})[peer] = now + max(self._hit_s, 1.0) * 4
        self._where.move_to_end(chunk)
        while len(self._where) > self._known_max:
            self._where.popitem(last=False)

    def places(self, chunk: ChunkId) -> list[str]:
        """Peers that said lately that they have this chunk, the latest word first."""
        now = self._clock()
        with self._lock:
            peers = self._where.get(chunk, {})
            return sorted((peer for peer, until in peers.items() if until > now), key=lambda peer: -peers[peer])

    def not_there(self, chunk: ChunkId, peer: str) -> None:
        """A peer hasn't got a chunk after all: nobody is told any more that there is one."""
        with self._lock:
            peers = self._where.get(chunk, {})
            peers.pop(peer, None)
            if not peers:
                self._where.pop(chunk, None)

    def forget(self, chunks: Iterable[ChunkId]) -> None:
        """Know nothing of these any more."""
        with self._lock:
            for chunk in chunks:
                self._where.pop(chunk, None)

    def clear(self) -> None:
        """Forget every answer."""
        with self._lock:
            self._known.clear()
            self._where.clear()

    def figures(self) -> dict[str, float]:
        """How much is remembered and open."""
        return {
            "answers_known": len(self._known), "answers_open": len(self._open), "places_known": len(self._where),
        }  # fmt: skip
