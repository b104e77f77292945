"""Lookups: exact chunks from the manifest, partial ones by comparing tokens with a few headers.

Never touches the disk itself: a header that isn't cached is read on a read thread, and the answer is `retry`
until it has come.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lmdb
import msgspec

from forebay.errors import CorruptChunk
from forebay.kvstore.header import ChunkHeader
from forebay.tiers.base import ChunkId, LookupResult, Query
from forebay.tiers.chunks import UNIT_BYTES, best_match
from forebay.tiers.codec.errors import CannotDecode
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.inspect import front_of
from forebay.tiers.fs.manifest import UNIT_DIGEST_BYTES, Record, View, first_unit
from forebay.tiers.fs.shelf import Shelf

if TYPE_CHECKING:
    from forebay.tiers.fs.neighbours import Neighbours

CANDIDATES_MAX = 16
FETCHES_MAX = 256
CACHE_BYTES = 16 << 20
FETCH_BYTES = 4096
ASK_MAX = 256
"""Of one lookup so many chunks at a time are asked of the disk."""
ASKING_MAX = 4096


class HeaderCache:
    """Headers of chunks that were stored or compared lately, bounded in bytes."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self._bytes_max = bytes_max
        self._headers: OrderedDict[ChunkId, ChunkHeader] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    @staticmethod
    def _size(header: ChunkHeader) -> int:
        return 512 + len(header.tokens) + len(header.checksums) + len(header.extra)

    def get(self, chunk: ChunkId) -> ChunkHeader | None:
        """A chunk's header, if it is here."""
        with self._lock:
            header = self._headers.get(chunk)
            if header is not None:
                self._headers.move_to_end(chunk)
            return header

    def put(self, chunk: ChunkId, header: ChunkHeader) -> None:
        """Keep a header; the least recently used ones leave."""
        with self._lock:
            old = self._headers.pop(chunk, None)
            self.bytes += self._size(header) - (self._size(old) if old else 0)
            self._headers[chunk] = header
            while self.bytes > self._bytes_max:
                _, gone = self._headers.popitem(last=False)
                self.bytes -= self._size(gone)


@dataclass
class Finder:
    """Answers lookups. `submit` queues a task (what to run, its bytes) on the read threads, False if it can't;
    `wake` tells that an open lookup may be answered now. Chunks of other stores are found through `neighbours`: by
    name, if nobody has told of them yet."""

    shelf: Shelf
    cache: HeaderCache
    neighbours: Neighbours
    submit: Callable[[Callable[[], None], int], bool]
    wake: Callable[[], None]

    def __post_init__(self) -> None:
        self._fetching: set[ChunkId] = set()
        self._asking: set[ChunkId] = set()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        """One result a query. Uses are noted from the last to the first: a chain's front outlives its end."""
        used: list[ChunkId] = []
        with self.shelf.manifest.reading() as view:
            results = [self._find(view, query, used) for query in queries]
        self.shelf.touch(used[::-1])
        return self._asked(queries, results) if self.neighbours.mirrors else results

    def _asked(self, queries: Sequence[Query], results: list[LookupResult]) -> list[LookupResult]:
        """Have the disk asked for chunks that nothing is known of, which another store may just have stored."""
        open_at: list[int] = []
        for at, (query, found) in enumerate(zip(queries, results, strict=True)):
            chunk = ChunkId(query.group, query.key)
            unknown = found.key != query.key and self.neighbours.unknown(chunk)
            if unknown:
                open_at.append(at)
            if found.key != query.key and (unknown or self.neighbours.passed_over(chunk)):
                results[at] = self._unsure(found)  # unless the disk is asked now
        open_at = open_at[:ASK_MAX]
        wanted = [ChunkId(queries[at].group, queries[at].key) for at in open_at]
        with self._lock:
            chunks = [chunk for chunk in wanted if chunk not in self._asking]
            if len(self._asking) + len(chunks) > ASKING_MAX:
                return results
            self._asking.update(chunks)
        if chunks and not self.submit(lambda: self._ask(chunks), FETCH_BYTES):
            self._asked_all(chunks)
            return results
        for at in open_at:
            results[at] = LookupResult("retry")
        return results

    @staticmethod
    def _unsure(found: LookupResult) -> LookupResult:
        """The same where there may be more."""
        if found.outcome == "hit":
            return msgspec.structs.replace(found, sure=False)
        return LookupResult("away") if found.outcome == "miss" else found

    def _ask(self, chunks: list[ChunkId]) -> None:
        try:
            self.neighbours.ask(chunks)
        except (OSError, lmdb.Error) as error:
            self.counts["neighbour_errors"] += 1
            complain("ask", "another store's files can't be looked at: %s", error)
        finally:
            self._asked_all(chunks)
            self.wake()

    def _asked_all(self, chunks: list[ChunkId]) -> None:
        with self._lock:
            self._asking.difference_update(chunks)

    @property
    def asking(self) -> int:
        """Chunks that the disk is being asked for."""
        return len(self._asking)

    def _find(self, view: View, query: Query, used: list[ChunkId]) -> LookupResult:
        chunk = ChunkId(query.group, query.key)
        record = view.get(chunk)
        if record is not None and not record.unreadable:
            used.append(chunk)
            self.counts["lookups_hit"] += 1
            return LookupResult("hit", query.key, record.tokens, record.tokens, record.length)
        place = self.neighbours.place(chunk)
        if place is not None:
            self.counts["lookups_hit"] += 1
            return LookupResult("hit", query.key, place.record.tokens, place.record.tokens, place.record.length)
        return self._find_partial(view, query, used)

    def _find_partial(self, view: View, query: Query, used: list[ChunkId]) -> LookupResult:
        found: dict[ChunkId, ChunkHeader] = {}
        unknown = False
        if len(query.tokens) >= UNIT_BYTES:
            unit = query.first[:UNIT_DIGEST_BYTES] or first_unit(query.parent, query.tokens, b"")
            children = view.children(query.group, query.parent, unit, CANDIDATES_MAX)
            if self.neighbours.mirrors:
                more = self.neighbours.children(query.group, query.parent, unit, CANDIDATES_MAX)
                children = list(dict.fromkeys([*children, *more]))
            for child in children:
                header = self.cache.get(child)
                if header is not None:
                    found[child] = header
                elif self._record(view, child) is not None:  # else a damaged manifest names a child that nobody has
                    unknown |= self._fetch(child)
        if unknown:
            self.counts["lookups_retry"] += 1
            return LookupResult("retry")
        match = best_match(query, found)
        record = self._record(view, match.chunk) if match else None
        if match is None or record is None:
            self.counts["lookups_miss"] += 1
            return LookupResult("miss")
        used.append(match.chunk)
        self.counts["lookups_partial"] += 1
        return LookupResult("hit", match.chunk.key, match.matched, record.tokens, record.length)

    def _record(self, view: View, chunk: ChunkId) -> Record | None:
        record = view.get(chunk)
        if record is not None and not record.unreadable:
            return record
        place = self.neighbours.place(chunk)
        return None if place is None else place.record

    def _fetch(self, chunk: ChunkId) -> bool:
        """Have a header read. False if that isn't going to happen now: the candidate is then passed over."""
        with self._lock:
            if chunk in self._fetching:
                return True
            if len(self._fetching) >= FETCHES_MAX:
                self.counts["headers_passed_over"] += 1
                return False
            self._fetching.add(chunk)
        if self.submit(lambda: self._read(chunk), FETCH_BYTES):
            return True
        self.counts["headers_passed_over"] += 1
        with self._lock:
            self._fetching.discard(chunk)
        return False

    def _read(self, chunk: ChunkId) -> None:
        place = self.neighbours.place(chunk) if self.shelf.manifest.get(chunk) is None else None
        path = (place.mirror.paths if place else self.shelf.device.paths).chunk(chunk)
        try:
            self.cache.put(chunk, front_of(self.shelf.device, path).header)
            self.counts["headers_read"] += 1
        except CorruptChunk as error:
            if place is None:
                self.shelf.damaged(chunk, 0, error)
            else:
                place.mirror.leave([chunk], "corrupt")
        except CannotDecode as error:
            (self.shelf if place is None else place.mirror).unreadable(chunk, error)
        except FileNotFoundError:
            (self.shelf if place is None else place.mirror).vanished(chunk)
        except OSError:
            self.counts["header_errors"] += 1
            if place is None:
                self.shelf.remove([chunk], "corrupt")
        finally:
            with self._lock:
                self._fetching.discard(chunk)
            self.wake()


