"""Finding out what other daemons have packed: new segments are listed now and then, and the index of each is read.

Names begin with the time of their making, so a listing goes on where the last one ended. It begins a while before
that: clocks differ, and a slow put is listed later than its name says.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

from forebay.errors import CorruptChunk
from forebay.tiers.s3.bucket import Listed
from forebay.tiers.s3.clears import Clears
from forebay.tiers.s3.failures import Kind, RequestFailed
from forebay.tiers.s3.holdings import Holdings
from forebay.tiers.s3.names import Names, SegmentName
from forebay.tiers.s3.segment import FRONT_BYTES, Entry, index_length, parse
from forebay.tiers.s3.sightings import Sighting, Sightings

log = logging.getLogger("forebay.tier.s3")

OVERLAP_NS = 300 * 10**9
RECENT_MAX = 1 << 16


class Learner:
    """One round after another, each every `every_s`; a step is one request or none."""

    def __init__(
        self, holdings: Holdings, names: Names, sightings: Sightings, clears: Clears, every_s: float, writer: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._holdings = holdings
        self._names = names
        self._sightings = sightings
        self._clears = clears
        self._every_s = every_s
        self._writer = writer
        self._clock = clock
        self._recent: dict[str, None] = {}
        self._seen_ns = 0
        self._next = 0.0
        self._round: Iterator[None] | None = None
        self.rounds = 0
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def wait_s(self) -> float | None:
        """How long until there is something to do; None: never."""
        if not self._every_s:
            return None
        return 0.0 if self._round is not None else max(0.0, self._next - self._clock())

    def step(self) -> None:
        """Go on a little. Blocks on the bucket; raises RequestFailed, and the round is begun anew later."""
        if self.wait_s != 0.0:
            return
        self._next = self._clock() + self._every_s
        self._round = self._round or self._walk()
        try:
            if next(self._round, self) is self:
                self._round = None
                self.rounds += 1
        except RequestFailed:
            self._round = None
            raise

    def _walk(self) -> Iterator[None]:
        after = max(0, self._seen_ns - OVERLAP_NS)
        for page in self._holdings.bucket.listing(self._names.segments, f"{self._names.segments}{after:016x}"):
            yield
            for listed in page:
                name = self._names.parse_segment(listed.name)
                if name is not None and self._is_news(name):
                    self._learn(name, listed)
                    yield

    def _is_news(self, name: SegmentName) -> bool:
        if str(name) in self._recent or name.writer == self._writer or self._holdings.owns_segment(str(name)):
            return False
        return not self._sightings.has_segment(str(name))

    def _learn(self, name: SegmentName, listed: Listed) -> None:
        try:
            entries = self._index(listed)
        except CorruptChunk as error:
            log.warning("%s is passed over: %s", listed.name, error)
            self.counts["segments_corrupt"] += 1
            entries = []
        except RequestFailed as failure:
            if failure.kind not in (Kind.MISSING, Kind.RANGE):
                raise
            entries = []
        for entry in entries:
            if not self._clears.hide(entry.namespace, entry.tenant, 1 << 62, listed.modified):
                self._sightings.found(entry.chunk, _sighting(entry, str(name), listed.modified))
                self.counts["chunks_learned"] += 1
        self.counts["segments_learned"] += 1
        self._remember(name)

    def _remember(self, name: SegmentName) -> None:
        """A segment is read once, as far as memory goes. Clocks that are far ahead don't hide what others write."""
        self._recent[str(name)] = None
        if len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]
        self._seen_ns = max(self._seen_ns, min(name.time_ns, time.time_ns()))

    def _index(self, listed: Listed) -> list[Entry]:
        front = self._holdings.bucket.front(listed.name, FRONT_BYTES)
        wanted = index_length(front.data)
        if wanted > len(front.data):
            front = self._holdings.bucket.front(listed.name, wanted)
        entries = parse(front.data)
        if any(entry.offset + entry.length > front.size for entry in entries):
            raise CorruptChunk("its index names what lies behind its end")
        return entries


def _sighting(entry: Entry, segment: str, modified: float) -> Sighting:
    # Where it starts isn't in the index: a clear behind a prefix takes it for the last chunk of all.
    return Sighting(
        entry.namespace, entry.tenant, 1 << 62, entry.tokens, entry.plain, entry.length, modified, segment,
        entry.offset,
    )  # fmt: skip
