"""A p2p tier: chunks of other hosts' stores are pulled here, chunks of ours are pushed to them.

    our daemon --jobs--> this tier --dials--> a peer's tier --client of--> the peer's daemon
    our daemon <-client of-- this tier <--dial-- other hosts' tiers

It keeps nothing itself: no bytes, no quota, no changes to tell. What peers have is theirs to evict and to clear.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from forebay.errors import CorruptChunk
from forebay.tiers.base import (
    ChunkId,
    ClearScope,
    JobResult,
    LoadJob,
    LookupResult,
    Query,
    SecondaryTier,
    StoreJob,
    TierChange,
    TierStats,
)
from forebay.tiers.chunks import checked_slot
from forebay.tiers.errors import TierFailed
from forebay.tiers.p2p.answers import Answers
from forebay.tiers.p2p.engine import Engine
from forebay.tiers.p2p.fetch import Wanted
from forebay.tiers.p2p.options import p2p_settings
from forebay.tiers.p2p.source import Source

log = logging.getLogger("forebay.tier.p2p")

NAMESPACES_MAX = 1024


class P2pTier(SecondaryTier):
    """See the module's text. `make_source` puts something else in the place of this host's store, for tests."""

    def __init__(
        self, name: str, options: Mapping[str, object], *, make_source: Callable[[], Source] | None = None
    ) -> None:
        self.name = name
        self._settings = p2p_settings(name, options)
        self._wake: Callable[[], None] = lambda: None
        self._extents: dict[int, memoryview] = {}
        self._namespaces: dict[bytes, bytes] = {}
        self._finished: deque[JobResult] = deque()
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._load_bytes = self._push_bytes = 0
        self._sizes: dict[int, tuple[str, int]] = {}
        self.counts: Counter[str] = Counter()
        found = self._settings.options
        self._answers = Answers(found.hit_s, found.miss_s, time.monotonic)
        self._engine = Engine(
            self._settings, self._extents, self._namespaces, self._answers,
            finish=self._finish, fail=self._fail, wake=self._ring, make_source=make_source,
        )  # fmt: skip

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _ring(self) -> None:
        self._wake()

    def attach_extent(self, extent: int, memory: memoryview) -> None:
        self._extents[extent] = memory
        if self._engine.nixl is not None:
            self._engine.nixl.attach(extent, memory)

    def note_namespace(self, namespace: bytes, encoded: bytes) -> None:
        self._namespaces.pop(namespace, None)
        while len(self._namespaces) >= NAMESPACES_MAX:
            del self._namespaces[next(iter(self._namespaces))]
        self._namespaces[namespace] = encoded

    # --- looking up ------------------------------------------------------------------------------------

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        asking = self._answers.look(queries, self._engine.up, absent=self._engine.absent)
        if asking.unasked:
            self.counts["asked"] += len(asking.unasked)
            self._engine.ask(asking.unasked)
        return asking.results

    # --- jobs ------------------------------------------------------------------------------------------

    def submit_load(self, job: LoadJob) -> None:
        if not self._take(job.id, "load", job.capacity, self._settings.options.load_queue_bytes):
            return
        memory = self._extents[job.extent][job.payload_offset : job.payload_offset + job.capacity]
        self._engine.load(Wanted(job, memory, self._engine.now() + job.deadline_s))

    def submit_store(self, job: StoreJob) -> None:
        memory = self._extents[job.extent][job.offset : job.offset + job.length]
        try:
            slot = checked_slot(memory, job)
        except CorruptChunk:
            self.counts["pushes_corrupt"] += 1
            self._done(JobResult(job.id, False, "corrupt"))
            return
        if not self._settings.push_to:
            if not self.counts["not_pushed"]:
                log.warning('tier %s: push_to names nobody, so nothing is pushed: set copy = "never"', self.name)
            self.counts["not_pushed"] += 1
            self._done(JobResult(job.id, False, "dropped"))
        elif self._take(job.id, "push", job.length, self._settings.options.push_queue_bytes):
            self._engine.push(job, slot)

    def _take(self, job: int, kind: str, size: int, most: int) -> bool:
        """Count a job against its queue; one always fits."""
        with self._lock:
            used = self._load_bytes if kind == "load" else self._push_bytes
            fits = used == 0 or used + size <= most
            if fits:
                self._sizes[job] = (kind, size)
                self._count_bytes(kind, size)
        if not fits:
            self.counts["jobs_dropped"] += 1
            self._done(JobResult(job, False, "dropped"))
        return fits

    def _count_bytes(self, kind: str, size: int) -> None:
        if kind == "load":
            self._load_bytes += size
        else:
            self._push_bytes += size

    def _finish(self, result: JobResult) -> None:
        with self._lock:
            kind, size = self._sizes.pop(result.id)
            self._count_bytes(kind, -size)
        self._done(result)

    def _done(self, result: JobResult) -> None:
        self._finished.append(result)
        self._wake()

    def _fail(self, error: Exception) -> None:
        """From the engine's thread: this process can't go on."""
        self._failure = self._failure or error
        self._wake()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while self._finished:
            results.append(self._finished.popleft())
        if not results and self._failure is not None:
            raise TierFailed(f"p2p can't go on in this process: {self._failure!r}")
        return results

    def take_changes(self) -> Iterable[TierChange]:
        return ()

    # --- forgetting ------------------------------------------------------------------------------------

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        self._answers.forget(chunks)

    def clear(self, namespace: bytes) -> int:
        self.clear_scope(ClearScope(namespace))
        return 0

    def clear_scope(self, scope: ClearScope) -> int | None:
        """None: what peers have stays there, or isn't known to be gone yet. `clears_*` of the figures tell."""
        self._engine.clear(scope)  # first: what is asked from now on is asked of nobody who has yet to clear
        self._answers.clear()
        return None

    # --- figures and end -------------------------------------------------------------------------------

    def statistics(self) -> TierStats:
        values: dict[str, float] = {
            "bytes": 0.0, "bytes_quota": 0.0, "chunks": 0.0,
            "queue_bytes": float(self._load_bytes + self._push_bytes), "load_queue_bytes": float(self._load_bytes),
            "push_queue_bytes": float(self._push_bytes), "namespaces": float(len(self._namespaces)),
        }  # fmt: skip
        values |= {name: float(count) for name, count in self.counts.items()}
        values |= self._answers.figures() | self._engine.figures()
        info = {"kind": "p2p", "listen": self._settings.options.listen, "bulk": self._settings.options.bulk}
        info["encrypted"] = "yes" if self._settings.keys else "no"
        return TierStats(values, info | self._engine.states())

    def close(self) -> None:
        ended = self._engine.close()
        # After a failure a transfer may still be writing: what is open is told by the daemon, once we are dead.
        if ended and self._failure is None:
            for job in list(self._sizes):
                self._finish(JobResult(job, False, "io"))
            self._extents.clear()
