"""Lookups: answered from what is known for a moment, else `retry`, and asked of the master by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.tiers.base import ChunkId, LookupResult, Query
from forebay.tiers.mooncake.complaints import complain
from forebay.tiers.mooncake.holdings import Holdings
from forebay.tiers.mooncake.remote import Place, Remote
from forebay.tiers.mooncake.suspects import Suspects

log = logging.getLogger("forebay.tier.mooncake")

BATCH = 2048
WAITING_MAX = 1 << 16
KNOWN_MAX = 1 << 16
HIT_S, MISS_S = 1.0, 0.5
"""How long an answer holds. A hit that is none any more is found out by its load; a miss hides what others store."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the master said. `place` None: there is nothing, or it didn't say, and that isn't `sure`."""

    place: Place | None
    until: float
    sure: bool = True


class Finder:
    """`lookup` never blocks. `wake` is called when answers have come."""

    def __init__(
        self,
        remote: Remote,
        holdings: Holdings,
        suspects: Suspects,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._remote = remote
        self._holdings = holdings
        self._suspects = suspects
        self._wake = wake
        self._clock = clock
        self._changed = threading.Condition()
        self._known: OrderedDict[ChunkId, _Known] = OrderedDict()
        self._waiting: OrderedDict[ChunkId, None] = OrderedDict()
        self._asked: dict[ChunkId, bool] = {}
        """Under way at the master; True once something has happened to the chunk that makes the answer old."""
        self._closing = False
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="mooncake-finder", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def waiting(self) -> int:
        """Keys that the master hasn't answered for yet."""
        return len(self._waiting) + len(self._asked)

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        """See `SecondaryTier.lookup`. Later chunks of a prompt are touched first: a chain's front outlives its end."""
        with self._changed:
            results = [self._answer(query) for query in queries]
            if self._waiting:
                self._changed.notify()
        self._holdings.touch(
            [ChunkId(q.group, q.key) for q, result in zip(queries, results, strict=True) if result.outcome == "hit"]
        )
        return results

    def _answer(self, query: Query) -> LookupResult:
        chunk = ChunkId(query.group, query.key)
        if self._holdings.is_leaving(chunk):
            return LookupResult("miss")
        known = self._known.get(chunk)
        if known is None or known.until < self._clock():
            if chunk in self._asked or chunk in self._waiting:
                return LookupResult("retry")
            if len(self._waiting) >= WAITING_MAX:
                self.counts["lookups_dropped"] += 1
                return LookupResult("away")
            self._waiting[chunk] = None
            return LookupResult("retry")
        if known.place is None:
            return LookupResult("miss" if known.sure else "away")
        if self._suspects.hangs(known.place.endpoint):
            return LookupResult("away")
        tokens = len(query.tokens) // 4
        return LookupResult("hit", query.key, tokens, tokens, known.place.length)

    def place(self, chunk: ChunkId) -> Place | None:
        """Where a chunk is, if that is known."""
        with self._changed:
            known = self._known.get(chunk)
            return known.place if known is not None and known.until >= self._clock() else None

    def forget(self, chunks: Sequence[ChunkId]) -> None:
        """What was known of these chunks isn't so any more."""
        with self._changed:
            for chunk in chunks:
                self._known.pop(chunk, None)
                if chunk in self._asked:
                    self._asked[chunk] = True

    def forget_all(self) -> None:
        """Nothing that was known is so any more."""
        with self._changed:
            self._known.clear()
            self._asked = dict.fromkeys(self._asked, True)

    # --- the thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                chunks = [self._waiting.popitem(last=False)[0] for _ in range(min(BATCH, len(self._waiting)))]
                self._asked = dict.fromkeys(chunks, False)
                # A chunk that is still there hasn't changed its length, and hardly its place.
                before = {c: known.place for c in chunks if (known := self._known.get(c)) and known.place}
            found: dict[ChunkId, Place | None] = dict.fromkeys(chunks)
            unsure = set(chunks)
            try:
                found, unsure = self._ask(chunks, before)
            except Exception:
                self.counts["task_crashes"] += 1
                log.exception("asking the master failed")
            self._learn(found, unsure)
            self._wake()

    def _ask(
        self, chunks: list[ChunkId], before: dict[ChunkId, Place]
    ) -> tuple[dict[ChunkId, Place | None], set[ChunkId]]:
        """What is known now, and of what it isn't for sure. What the master didn't answer in time is asked for again;
        without a master, all that isn't known counts as nothing for a moment."""
        found = self._remote.find(chunks, before)
        if unknown := [chunk for chunk in chunks if chunk not in found]:
            self.counts["lookups_failed"] += len(unknown)
            complain("lookup", "the master didn't answer for %d keys", len(unknown))
            if self._remote.unreachable:
                found |= dict.fromkeys(unknown)
        return found, set(unknown)

    def _learn(self, found: dict[ChunkId, Place | None], unsure: set[ChunkId]) -> None:
        now = self._clock()
        with self._changed:
            for chunk, place in found.items():
                # What happened to the chunk meanwhile may have made the answer wrong: it is asked for again.
                if not self._asked[chunk]:
                    self._known[chunk] = _Known(place, now + (HIT_S if place else MISS_S), chunk not in unsure)
                    self._known.move_to_end(chunk)
            self._asked = {}
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)

    def close(self, timeout_s: float) -> bool:
        """End the thread. False if it didn't end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
