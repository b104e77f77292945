"""What was seen of chunks that others have stored, or wasn't: believed for a while, in a table with a cap."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from forebay.kvstore.header import ChunkHeader
from forebay.tiers.base import ChunkId
from forebay.tiers.fs.manifest import tenant_digest

SHORTEST_S = 0.25
"""An answer is kept at least so long, or a lookup that waits for it would never see it."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A chunk that is in the bucket. `tenant` is a digest; `plain` is its length with the header as it lies in the
    pool, `length` what is stored of it; `modified` is the service's time. In a segment, it begins at `offset`."""

    namespace: bytes
    tenant: bytes
    start: int
    tokens: int
    plain: int
    length: int
    modified: float
    segment: str = ""
    offset: int = 0


def sighting_of(header: ChunkHeader, block_bytes: int, length: int, modified: float) -> Sighting:
    """What a header at the front of an object says."""
    return Sighting(
        header.namespace, tenant_digest(header.tenant), header.start, header.token_count,
        block_bytes + header.payload_length, length, modified,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Row:
    found: Sighting | None
    until: float
    sure: bool = True


class Sightings:
    """Methods may be called from any thread and never block. The least recently used rows leave first.

    Who asks the bucket says so before (`ask`) and after (`answered`). What was said of the chunk in between is newer
    than the answer, which may be of a moment before the object was deleted: it's dropped then.
    """

    def __init__(self, rows_max: int, found_s: float, missing_s: float, clock: Callable[[], float]) -> None:
        self._rows_max = rows_max
        self._found_s = max(found_s, SHORTEST_S)
        self._missing_s = max(missing_s, SHORTEST_S)
        self._clock = clock
        self._rows: OrderedDict[ChunkId, _Row] = OrderedDict()
        self._segments: dict[str, set[ChunkId]] = {}
        self._asked: set[ChunkId] = set()
        self._lock = threading.Lock()
        self.pushed_out = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def segments(self) -> int:
        """How many segments of others have chunks in the table."""
        return len(self._segments)

    def get(self, chunk: ChunkId) -> tuple[bool, Sighting | None]:
        """Is it known whether the chunk is there, and if it is, what was seen of it."""
        with self._lock:
            row = self._rows.get(chunk)
            if row is None:
                return False, None
            if self._clock() >= row.until:
                self._remove(chunk)
                return False, None
            self._rows.move_to_end(chunk)
            return True, row.found

    def unsure(self, chunk: ChunkId) -> bool:
        """Is what counts as missing not known to be?"""
        with self._lock:
            row = self._rows.get(chunk)
            return row is not None and not row.sure

    def ask(self, chunk: ChunkId) -> None:
        """The bucket is about to be asked, by one at a time."""
        with self._lock:
            self._asked.add(chunk)

    def answered(self, chunk: ChunkId, sighting: Sighting) -> bool:
        """It was there when the bucket answered. False if that isn't the last word any more, and was dropped."""
        with self._lock:
            last = chunk in self._asked
            if last:
                self._found(chunk, sighting)
            return last

    def found(self, chunk: ChunkId, sighting: Sighting) -> None:
        """It is there. What is in a segment is known until that is found missing."""
        with self._lock:
            self._found(chunk, sighting)

    def missing(self, chunk: ChunkId, seconds: float | None = None) -> None:
        """It isn't, for so long as that is believed. With `seconds` it isn't known, and counts as missing for those."""
        with self._lock:
            wait = self._missing_s if seconds is None else max(seconds, SHORTEST_S)
            self._put(chunk, _Row(None, self._clock() + wait, sure=seconds is None))

    def forget(self, chunk: ChunkId) -> None:
        """Whether it is there isn't known any more."""
        with self._lock:
            self._asked.discard(chunk)
            self._remove(chunk)

    def segment_gone(self, segment: str) -> None:
        """None of what was in this segment is there any more."""
        with self._lock:
            for chunk in self._segments.pop(segment, set()):
                self._rows.pop(chunk, None)

    def has_segment(self, segment: str) -> bool:
        """Is there a chunk of this segment in the table?"""
        return segment in self._segments

    def forget_if(self, true: Callable[[Sighting], bool]) -> None:
        """Forget sightings of which this is true. It may be of any answer that is under way."""
        with self._lock:
            self._asked.clear()
            for chunk in [c for c, row in self._rows.items() if row.found is not None and true(row.found)]:
                self._remove(chunk)

    def _found(self, chunk: ChunkId, sighting: Sighting) -> None:
        until = float("inf") if sighting.segment else self._clock() + self._found_s
        self._put(chunk, _Row(sighting, until))

    def _put(self, chunk: ChunkId, row: _Row) -> None:
        self._asked.discard(chunk)
        self._remove(chunk)
        if len(self._rows) >= self._rows_max:
            self.pushed_out += 1
            self._remove(next(iter(self._rows)))
        self._rows[chunk] = row
        if row.found is not None and row.found.segment:
            self._segments.setdefault(row.found.segment, set()).add(chunk)

    def _remove(self, chunk: ChunkId) -> None:
        row = self._rows.pop(chunk, None)
        if row is None or row.found is None or not row.found.segment:
            return
        members = self._segments.get(row.found.segment, set())
        members.discard(chunk)
        if not members:
            self._segments.pop(row.found.segment, None)
