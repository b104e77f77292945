"""Carrying out a clear among objects that this daemon hasn't stored: a walk over the bucket, in the background."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from forebay.errors import CorruptChunk
from forebay.tiers.base import ChunkId
from forebay.tiers.codec.codec import Codec
from forebay.tiers.codec.errors import CannotDecode
from forebay.tiers.s3.bucket import Listed
from forebay.tiers.s3.clears import Clear, Clears
from forebay.tiers.s3.doomed import Doomed
from forebay.tiers.s3.failures import Kind, RequestFailed
from forebay.tiers.s3.finder import see_front
from forebay.tiers.s3.holdings import Holdings
from forebay.tiers.s3.names import Names
from forebay.tiers.s3.sightings import Sighting, Sightings


class Sweeper:
    """Works on one clear at a time, a page of the listing with each step."""

    def __init__(
        self, holdings: Holdings, codec: Codec, names: Names, sightings: Sightings, clears: Clears, doomed: Doomed
    ) -> None:
        self._holdings = holdings
        self._codec = codec
        self._names = names
        self._sightings = sightings
        self._clears = clears
        self._doomed = doomed
        self._walk: Iterator[None] | None = None
        self.counts: Counter[str] = Counter()

    def step(self) -> bool:
        """Go on a little; True if there is more to do. Blocks on the bucket; raises RequestFailed, and then the walk
        begins anew at the next step."""
        clear = self._clears.first()
        if clear is None:
            return False
        try:
            self._walk = self._walk or self._sweep(clear)
            if next(self._walk, self) is self:
                self._walk = None
                # What was only hidden until now comes back if others have deleted it.
                self._sightings.forget_if(lambda s: clear.covers(s.namespace, s.tenant, s.start, s.modified))
                self._clears.done(clear)
                self.counts["sweeps"] += 1
        except RequestFailed:
            self._walk = None
            raise
        return True

    def _sweep(self, clear: Clear) -> Iterator[None]:
        if clear.before == float("inf"):
            clear.before = self._holdings.bucket.now()
        for page in self._holdings.bucket.listing(self._names.segments):
            self._delete([listed.name for listed in page if self._takes_segment(clear, listed)])
            yield
        for page in self._holdings.bucket.listing(self._names.chunks):
            for at in range(0, len(page), 100):
                self._delete([listed.name for listed in page[at : at + 100] if self._takes_chunk(clear, listed)])
                yield

    def _takes_segment(self, clear: Clear, listed: Listed) -> bool:
        name = self._names.parse_segment(listed.name)
        if name is None or not clear.is_after(listed.modified) or self._holdings.owns_segment(str(name)):
            return False
        return name.covered(clear.scope)

    def _takes_chunk(self, clear: Clear, listed: Listed) -> bool:
        chunk = self._names.parse_chunk(listed.name)
        if chunk is None or not clear.is_after(listed.modified) or self._holdings.owns(chunk):
            return False
        scope = clear.scope
        if not scope.namespace and scope.tenant is None and not scope.parent:
            return True
        seen = self._seen(chunk)
        return seen is not None and clear.covers(seen.namespace, seen.tenant, seen.start, listed.modified)

    def _seen(self, chunk: ChunkId) -> Sighting | None:
        _, seen = self._sightings.get(chunk)
        if seen is not None and not seen.segment:
            return seen
        try:
            return see_front(self._holdings.bucket, self._codec, self._names.chunk(chunk), chunk).sighting
        except CannotDecode:
            self.counts["sweep_undecodable"] += 1  # whose it is can be told with its key alone
            return None
        except CorruptChunk:
            self.counts["sweep_corrupt"] += 1  # it can't be served, whosever it is
            return None
        except RequestFailed as failure:
            if failure.kind in (Kind.MISSING, Kind.RANGE):
                return None
            raise

    def _delete(self, names: list[str]) -> None:
        """Delete what isn't ours by now. What somebody is storing at this moment is left to that, or goes later."""
        chunks = {name: self._names.parse_chunk(name) for name in names}
        with self._holdings.locks.hold_free([chunk for chunk in chunks.values() if chunk is not None]) as held:
            mine = set(held)
            busy = {name for name, chunk in chunks.items() if chunk is not None and chunk not in mine}
            owned = {name for name, chunk in chunks.items() if chunk in mine and self._holdings.owns(chunk)}
            going = [name for name in names if name not in busy | owned]
            failed = set(self._holdings.bucket.delete(going)) if going else set()
        for name in failed | busy:
            self._doomed.add(name)  # a store that succeeds takes its name off again
        for name in going:
            if name not in failed:
                self._forget(name)
        self.counts["swept"] += len(going) - len(failed)

    def _forget(self, name: str) -> None:
        chunk, segment = self._names.parse_chunk(name), self._names.parse_segment(name)
        if chunk is not None:
            self._sightings.forget(chunk)
        if segment is not None:
            self._sightings.segment_gone(str(segment))
