"""Lookups: own chunks from the manifest, others' by the front of their object, asked for on threads of its own.

A front costs what a HEAD does and brings the header along, so a hit is a chunk whose header was seen and verified, not
a name. Until the answer has come, and is remembered, the lookup is told `retry`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from forebay.errors import CorruptChunk
from forebay.kvstore.header import HEADER_BYTES_MAX, ChunkHeader, decode_header
from forebay.tiers.base import ChunkId, LookupResult, Query
from forebay.tiers.chunks import UNIT_BYTES, best_match
from forebay.tiers.codec.codec import Codec, front_length
from forebay.tiers.codec.errors import CannotDecode
from forebay.tiers.fs.manifest import UNIT_DIGEST_BYTES, View, first_unit
from forebay.tiers.s3.bucket import Bucket
from forebay.tiers.s3.clears import Clears
from forebay.tiers.s3.doomed import Doomed
from forebay.tiers.s3.failures import Kind, RequestFailed
from forebay.tiers.s3.holdings import Holdings
from forebay.tiers.s3.names import Names
from forebay.tiers.s3.sightings import Sighting, Sightings, sighting_of

CANDIDATES_MAX = 16
PROBES_MAX = 1024
ASKED_A_LOOKUP = 256
"""What one lookup may ask the bucket for; of what goes beyond it, its first chunks are the ones of use."""
FRONT_BYTES = 4096
UNSURE_S = 1.0
"""How long a chunk counts as missing whose front couldn't be asked for."""

@dataclass(frozen=True, slots=True)
class FrontSeen:
    """A verified header at the front of an object."""

    header: ChunkHeader
    sighting: Sighting


def see_front(bucket: Bucket, codec: Codec, name: str, chunk: ChunkId) -> FrontSeen:
    """The header of a chunk's own object. Blocks. Raises RequestFailed, CorruptChunk if it is another's or nobody's,
    CannotDecode if a key or a library is missing."""
    length = FRONT_BYTES
    while True:
        front = bucket.front(name, length)
        wanted = front_length(front.data)
        if wanted <= len(front.data):
            break
        if wanted <= length or wanted > 2 * HEADER_BYTES_MAX:
            raise CorruptChunk("the object ends before its header does")
        length = wanted
    found = codec.front(front.data)
    header = found.header
    if (header.group, header.key) != (chunk.group, chunk.key):
        raise CorruptChunk("the object holds another chunk than its name says")
    if front.size != found.stored_length:
        raise CorruptChunk(f"the object has {front.size} bytes, {found.stored_length} were stored")
    return FrontSeen(header, sighting_of(header, len(found.block), front.size, front.modified))


@dataclass
class Finder:
    """Answers lookups. `submit` queues work of some bytes on the threads that ask, False if it can't; `wake` tells that
    an open lookup may be answered now."""

    holdings: Holdings
    codec: Codec
    names: Names
    sightings: Sightings
    clears: Clears
    doomed: Doomed
    submit: Callable[[Callable[[], None], int], bool]
    wake: Callable[[], None]

    def __post_init__(self) -> None:
        self._asking: set[ChunkId] = set()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    @property
    def asking(self) -> int:
        """How many fronts are being asked for."""
        return len(self._asking)

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        """One result a query. Never asks the bucket itself."""
        if self.holdings.bucket.requests.breaker.shut:
            self.counts["lookups_shut"] += len(queries)
            return [LookupResult("away")] * len(queries)
        used: list[ChunkId] = []
        with self.holdings.manifest.reading() as view:
            left = ASKED_A_LOOKUP
            results = []
            for query in queries:
                results.append(self._find(view, query, used, may_ask=left > 0))
                left -= results[-1].outcome == "retry"
        self.holdings.touch(used[::-1])  # a chain's front outlives its end
        for result in results:
            self.counts[f"lookups_{result.outcome}"] += 1
        return results

    def _find(self, view: View, query: Query, used: list[ChunkId], *, may_ask: bool) -> LookupResult:
        chunk = ChunkId(query.group, query.key)
        record = view.get(chunk)
        if record is not None:
            used.append(chunk)
            return LookupResult("hit", query.key, record.tokens, record.tokens, record.length)
        if view.leaving(chunk) is None and self.names.chunk(chunk) not in self.doomed:
            known, seen = self.sightings.get(chunk)
            if seen is not None and not self._hidden(seen):
                return LookupResult("hit", query.key, seen.tokens, seen.tokens, seen.plain)
            if not known and may_ask and self._ask(chunk):
                return LookupResult("retry")
            self.counts["fronts_passed_over"] += not known
            if not known or self.sightings.unsure(chunk):  # the bucket isn't asked now, or didn't say
                partial = self._find_partial(view, query, used)
                if partial.outcome != "hit":
                    return LookupResult("away")
                return msgspec.structs.replace(partial, sure=False)
        return self._find_partial(view, query, used)

    def _hidden(self, seen: Sighting) -> bool:
        return self.clears.hide(seen.namespace, seen.tenant, seen.start, seen.modified)

    def _find_partial(self, view: View, query: Query, used: list[ChunkId]) -> LookupResult:
        if len(query.tokens) < UNIT_BYTES:
            return LookupResult("miss")
        found: dict[ChunkId, ChunkHeader] = {}
        unit = query.first[:UNIT_DIGEST_BYTES] or first_unit(query.parent, query.tokens, b"")
        for child in view.children(query.group, query.parent, unit, CANDIDATES_MAX):
            card = self.holdings.cards.get(child)
            if card is not None and card.header and view.get(child) is not None:
                try:
                    found[child] = decode_header(card.header)
                except CorruptChunk:
                    self.counts["cards_corrupt"] += 1
        match = best_match(query, found)
        record = view.get(match.chunk) if match else None
        if match is None or record is None:
            return LookupResult("miss")
        used.append(match.chunk)
        self.counts["lookups_partial"] += 1
        return LookupResult("hit", match.chunk.key, match.matched, record.tokens, record.length)

    def _ask(self, chunk: ChunkId) -> bool:
        """Have the bucket asked. False if that isn't going to happen now."""
        with self._lock:
            if chunk in self._asking:
                return True
            if len(self._asking) >= PROBES_MAX:
                return False
            self._asking.add(chunk)
        if self.submit(lambda: self._look(chunk), FRONT_BYTES):
            return True
        self._asked(chunk)
        return False

    def _look(self, chunk: ChunkId) -> None:
        try:
            self.look(chunk)
        except BaseException:
            self.sightings.missing(chunk, UNSURE_S)
            raise
        finally:
            self._asked(chunk)
            self.wake()

    def look(self, chunk: ChunkId) -> None:
        """Ask the bucket and remember the answer, unless something newer was said meanwhile. Blocks."""
        self.sightings.ask(chunk)
        try:
            seen = see_front(self.holdings.bucket, self.codec, self.names.chunk(chunk), chunk).sighting
        except CannotDecode:
            self.counts["fronts_undecodable"] += 1
            self.sightings.missing(chunk)
            return
        except CorruptChunk:
            self.counts["fronts_corrupt"] += 1
            self.sightings.missing(chunk)
            return
        except RequestFailed as failure:
            sure = failure.kind in (Kind.MISSING, Kind.RANGE)
            self.counts["fronts_missing" if sure else "fronts_failed"] += 1
            self.sightings.missing(chunk, None if sure else UNSURE_S)
            return
        self.counts["fronts_found"] += 1
        if not self.sightings.answered(chunk, seen):
            self.counts["fronts_outdated"] += 1  # a lookup that still waits has it asked for again

    def _asked(self, chunk: ChunkId) -> None:
        with self._lock:
            self._asking.discard(chunk)
