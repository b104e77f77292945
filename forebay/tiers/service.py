"""Between the messages of the daemon and one tier object. Whatever the tier does, every job gets one result."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from forebay.tiers.base import (
    JobResult,
    LoadJob,
    LookupResult,
    Query,
    SecondaryTier,
    StoreJob,
    TierStats,
)
from forebay.tiers.errors import TierFailed
from forebay.tiers.link import DaemonLink
from forebay.tiers.messages import (
    BATCH,
    Attach,
    Changes,
    Cleared,
    ClearTier,
    Finished,
    Forget,
    Forgotten,
    GetTierStats,
    Load,
    Lookup,
    LookupDone,
    NoteNamespace,
    Start,
    Stop,
    Store,
    TierStatsReply,
    ToTier,
)

log = logging.getLogger("forebay.tier")

T = TypeVar("T")
J = TypeVar("J", StoreJob, LoadJob)

LOOK_S = 0.02
"""How often a tier that calls no waker is asked while something is open."""
OPEN_LOOKUPS_MAX = 1024
CLEAR_S = 0.05
"""So long a clear goes on before other messages have their turn. The daemon never has more open than it may."""
EXCEPTIONS_MAX = 8
"""Calls in a row that raise: then the tier is switched off. Its process ends; the next one comes later each time."""


@dataclass(slots=True)
class _OpenLookup:
    """A lookup with answers still to come. `until` is monotonic time."""

    message: Lookup
    results: list[LookupResult]
    until: float


@dataclass(slots=True)
class _OpenClear:
    """A clear under way; None for steps: the tier can't tell what is meant. `count` is how many chunks have gone."""

    rid: int
    steps: Iterator[int | None] | None
    count: int = 0
    waiting: bool = False

    def step(self) -> bool:
        """Do some of it; True if that was the last."""
        assert self.steps is not None
        for found in self.steps:
            self.waiting = found is None
            self.count += found or 0
            return False
        return True


class TierService:
    """Handles messages for one tier. `progress` passes on what the tier has finished."""

    def __init__(self, tier: SecondaryTier, link: DaemonLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier = tier
        self._clock = clock
        self._link = link
        self._maps: dict[int, tuple[mmap.mmap, memoryview]] = {}
        self._open_jobs: set[int] = set()
        self._lookups: list[_OpenLookup] = []
        self._clears: deque[_OpenClear] = deque()
        self._exceptions = self._in_a_row = 0
        self._stray_results = 0
        # A tier that keeps the default never calls the waker, so it has to be asked.
        self._must_ask = type(tier).set_waker is SecondaryTier.set_waker
        self.stopping = False
        self.failed = False

    def handle(self, message: ToTier) -> None:
        """Act on one message. Raises ProtocolError only: an error of the tier becomes failed jobs."""
        match message:
            case Store(jobs=jobs):
                self._submit(jobs, self._tier.submit_store)
            case Load(jobs=jobs):
                self._submit(jobs, self._tier.submit_load)
            case Lookup():
                self._lookup(message)
            case Attach(extents=extents):
                self._attach(extents)
            case Forget():
                self._forget(message)
            case ClearTier():
                self._clear(message)
            case NoteNamespace(namespace=namespace, encoded=encoded):
                self._guard("note_namespace", lambda: self._tier.note_namespace(namespace, encoded))
            case GetTierStats(rid=rid):
                self._link.send(TierStatsReply(rid, self._statistics()))
            case Stop():
                self.stopping = True
            case Start():
                log.error("a second Start is ignored")

    def _forget(self, message: Forget) -> None:
        def forget() -> Forgotten:
            self._tier.forget(message.chunks, message.reason)
            return Forgotten(message.rid)

        answer = self._guard("forget", forget)
        if answer is None:
            self._cannot_remove()
        else:
            self._link.send(answer)

    def _clear(self, message: ClearTier) -> None:
        def begin() -> _OpenClear:
            return _OpenClear(message.rid, self._tier.clear_steps(message.scope))

        clear = self._guard("clear", begin)
        if clear is None:
            self._cannot_remove()
        elif clear.steps is None:
            self._link.send(Cleared(message.rid, None))
        else:
            self._clears.append(clear)

    def _step_clears(self) -> None:
        """Go on with what is being cleared, for a moment."""
        until = self._clock() + CLEAR_S
        left = len(self._clears)  # of those that wait for something, each is asked once
        while self._clears and left and not self.stopping and self._clock() < until:
            clear = self._clears[0]
            answer = self._guard("clear", clear.step)
            if answer is None:
                self._clears.clear()
                self._cannot_remove()
            elif answer:
                self._clears.popleft()
                self._link.send(Cleared(clear.rid, clear.count))
            elif clear.waiting:
                self._clears.rotate(-1)
                left -= 1

    def _cannot_remove(self) -> None:
        """It must not go on serving that: it ends, and the daemon, which has no answer, asks the next process again."""
        self.failed = self.stopping = True

    def _guard(self, what: str, call: Callable[[], T]) -> T | None:
        """Call into the tier; an exception is logged and counted, and gives None."""
        try:
            answer = call()
        except TierFailed as error:
            log.error("tier %s: %s", self._tier.name, error)
            self.failed = self.stopping = True
            return None
        except Exception:
            log.exception("tier %s: %s failed", self._tier.name, what)
            self._raised()
            return None
        if what == "lookup":  # the others say little about a tier that raises whenever it is given work
            self._in_a_row = 0
        return answer

    def _raised(self) -> None:
        self._exceptions += 1
        self._in_a_row += 1
        if self._in_a_row >= EXCEPTIONS_MAX and not self.stopping:
            log.error("tier %s raised %d times in a row: it is switched off for now", self._tier.name, self._in_a_row)
            self.failed = self.stopping = True

    def _attach(self, extents: Sequence[int]) -> None:
        for extent in extents:
            self._attach_one(extent)

    def _attach_one(self, extent: int) -> None:
        descriptor = self._link.take_descriptor()
        try:
            # Page tables are filled now, not in the middle of a load.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=flags)
        except OSError as error:
            log.error("tier %s: extent %d can't be mapped: %s", self._tier.name, extent, error)
            self.failed = self.stopping = True  # the next process may have better luck
            return
        finally:
            os.close(descriptor)
        if extent in self._maps:
            log.error("extent %d is attached already", extent)
            return
        view = memoryview(mapped)
        self._maps[extent] = (mapped, view)
        self._guard("attach_extent", lambda: self._tier.attach_extent(extent, view))

    # --- jobs ------------------------------------------------------------------------------------------

    def _submit(self, jobs: Sequence[J], submit: Callable[[J], None]) -> None:
        failed = []
        for job in jobs:
            self._open_jobs.add(job.id)
            try:
                if not self._in_bounds(job):
                    raise ValueError(f"job {job} is outside of the attached extents")
                submit(job)
            except Exception:
                log.exception("tier %s refused a job", self._tier.name)
                self._raised()
                self._open_jobs.discard(job.id)
                failed.append(JobResult(job.id, False, "io"))
            else:
                self._in_a_row = 0
        if failed:
            self._link.send(Finished(failed))

    def _in_bounds(self, job: StoreJob | LoadJob) -> bool:
        if job.extent not in self._maps:
            return False
        at, length = (job.offset, job.length) if isinstance(job, StoreJob) else (job.payload_offset, job.capacity)
        return at >= 0 and length > 0 and at + length <= len(self._maps[job.extent][1])

    def progress(self) -> None:
        """Pass on changes, results and late answers. Changes first: a result is told after it is true."""
        self._step_clears()
        if self._link.congested:
            return
        changes = list(self._guard("take_changes", self._tier.take_changes) or ())
        for at in range(0, len(changes), BATCH):
            self._link.send(Changes(changes[at : at + BATCH]))
        results = list(self._guard("get_finished_jobs", self._tier.get_finished_jobs) or ())
        known = [result for result in results if result.id in self._open_jobs]
        self._stray_results += len(results) - len(known)
        self._open_jobs.difference_update(result.id for result in known)
        for at in range(0, len(known), BATCH):
            self._link.send(Finished(known[at : at + BATCH]))
        self._retry_lookups()

    # --- lookups ---------------------------------------------------------------------------------------

    def _lookup(self, message: Lookup) -> None:
        results = self._ask(message.queries) if message.queries else []
        if any(r.outcome == "retry" for r in results) and len(self._lookups) < OPEN_LOOKUPS_MAX:
            self._lookups.append(_OpenLookup(message, results, self._clock() + message.timeout_s))
            return
        self._link.send(LookupDone(message.rid, results))

    def _ask(self, queries: Sequence[Query]) -> list[LookupResult]:
        found = self._guard("lookup", lambda: self._tier.lookup(queries))
        if found is None or len(found) != len(queries):
            return [LookupResult("away")] * len(queries)
        return found

    def _retry_lookups(self) -> None:
        if not self._lookups:
            return
        now = self._clock()
        still = []
        for lookup in self._lookups:
            open_at = [i for i, result in enumerate(lookup.results) if result.outcome == "retry"]
            again = self._ask([lookup.message.queries[i] for i in open_at])
            for i, result in zip(open_at, again, strict=True):
                lookup.results[i] = result
            if any(result.outcome == "retry" for result in again) and now < lookup.until:
                still.append(lookup)
            else:
                self._link.send(LookupDone(lookup.message.rid, lookup.results))
        self._lookups = still

    def next_look_s(self) -> float | None:
        """How long the loop may sleep without a wake-up; None for as long as it likes."""
        if self._clears:
            return LOOK_S if all(clear.waiting for clear in self._clears) else 0.0
        if self._must_ask:
            return LOOK_S if self._open_jobs or self._lookups else None
        if not self._lookups:
            return None
        return max(0.0, min(lookup.until for lookup in self._lookups) - self._clock())

    # --- figures and end -------------------------------------------------------------------------------

    def _statistics(self) -> TierStats:
        stats = self._guard("statistics", self._tier.statistics) or TierStats({}, {})
        process = {
            "process.exceptions": float(self._exceptions),
            "process.stray_results": float(self._stray_results),
            "process.open_jobs": float(len(self._open_jobs)),
            "process.open_clears": float(len(self._clears)),
            "process.out_bytes": float(self._link.out_bytes),
        }
        return TierStats({**stats.values, **process}, {**stats.info, "pid": str(os.getpid())})

    def close(self) -> None:
        """Close the tier, then pass on what it still finished."""
        self._guard("close", self._tier.close)
        self.progress()
        for mapped, view in self._maps.values():
            try:
                view.release()
                mapped.close()
            except BufferError:
                pass  # a thread that hangs in its device still holds a piece; the exit unmaps it
        self._maps.clear()
