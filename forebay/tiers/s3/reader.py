"""Loading: from an object, or a part of one, into a slot of the pool; all of it verified before it is reported."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lmdb

from forebay.errors import CorruptChunk
from forebay.tiers.base import JobResult, LoadJob
from forebay.tiers.codec.codec import Codec
from forebay.tiers.codec.errors import CannotDecode
from forebay.tiers.fs.manifest import tenant_digest
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.s3.bucket import GivenUp
from forebay.tiers.s3.clears import Clears
from forebay.tiers.s3.complaints import complain
from forebay.tiers.s3.doomed import Doomed
from forebay.tiers.s3.failures import Kind, RequestFailed
from forebay.tiers.s3.holdings import Holdings
from forebay.tiers.s3.names import Names
from forebay.tiers.s3.runs import Part, RunSink, runs_of
from forebay.tiers.s3.sightings import Sightings
from forebay.tiers.s3.slot import LoadSlot, TooLarge
from forebay.tiers.timers import Timers

log = logging.getLogger("forebay.tier.s3")

_STILL_READABLE = ("evicted", "replaced")
"""What leaves for these reasons was promised rightly and may be read as long as it is there."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk is to be read. `length` 0: all of the object, however long. `own`: this daemon has stored it."""

    name: str
    segment: str = ""
    offset: int = 0
    length: int = 0
    own: bool = False

    @property
    def part(self) -> tuple[int, int] | None:
        return (self.offset, self.length) if self.segment else None


class Load:
    """A load under way: its slot, where it is to be read (None: not looked up yet, or nowhere), and what its deadline
    is cancelled with."""

    def __init__(self, slot: LoadSlot, due: float) -> None:
        self.slot = slot
        self.due = due
        self.place: Place | None = None
        self.timer = -1
        self.running = False


class Reader:
    """Runs load jobs on the read threads."""

    def __init__(
        self, holdings: Holdings, codec: Codec, names: Names, sightings: Sightings, clears: Clears, doomed: Doomed,
        outbox: Outbox, deadlines: Timers, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._holdings = holdings
        self._bucket = holdings.bucket
        self._codec = codec
        self._names = names
        self._sightings = sightings
        self._clears = clears
        self._doomed = doomed
        self._outbox = outbox
        self._deadlines = deadlines
        self._clock = clock
        self._waiting: dict[str, list[Load]] = {}
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def begin(self, job: LoadJob, memory: memoryview) -> Load:
        """Take a job on: from now on its chunk is kept and its deadline holds."""
        load = Load(LoadSlot(job, memory, self._told, self._codec), self._clock() + job.deadline_s)
        self._holdings.pin(job.chunk)
        load.timer = self._deadlines.add(load.due, lambda: self._too_late(load))
        try:
            load.place = self._place(job)
        except lmdb.Error as error:
            self._outbox.manifest_error(error)
        if load.place is not None and load.place.segment:
            with self._lock:
                self._waiting.setdefault(load.place.segment, []).append(load)
        return load

    def end(self, load: Load) -> None:
        """No thread touches the job any more."""
        self._deadlines.cancel(load.timer)
        self._holdings.unpin(load.slot.job.chunk)

    def _told(self, result: JobResult) -> None:
        self.counts[f"loads_{result.reason}" if result.reason else "loads_ok"] += 1
        self._outbox.finish(result)

    def _too_late(self, load: Load) -> None:
        silent = load.running and not load.slot.started
        if load.slot.fail("late") and silent:
            self._bucket.requests.breaker.failed()  # it was asked and has said nothing; its thread will wait longer

    def drop(self, load: Load) -> None:
        """A job that was begun won't be run."""
        if self._is_mine(load):
            load.slot.fail("dropped")
            self.end(load)

    def run(self, load: Load) -> None:
        """Load one job and report it, whatever happens; with it others that wait for the same segment."""
        if load.place is None or not load.place.segment:
            self._run_all([load])
            return
        with self._lock:
            loads = self._waiting.pop(load.place.segment, [])
        if loads:  # else another thread has taken this load along
            self._run_all(loads)

    def _is_mine(self, load: Load) -> bool:
        """Take a load back, unless another thread has taken it along."""
        if load.place is None or not load.place.segment:
            return True
        with self._lock:
            waiting = self._waiting.get(load.place.segment, [])
            if load not in waiting:
                return False
            waiting.remove(load)
            return True

    def _run_all(self, loads: Sequence[Load]) -> None:
        try:
            wanted = [load for load in loads if not load.slot.finished]
            for load in wanted:
                load.running = True
            if len(wanted) > 1:
                self._run_segment(wanted)
            for load in wanted:
                if not load.slot.finished:
                    self._run(load)
        except lmdb.Error as error:
            self._outbox.manifest_error(error)
        except Exception:
            log.exception("loading %d chunks failed", len(loads))
        finally:
            for load in loads:
                load.slot.fail("io")
                self.end(load)

    def _run_segment(self, loads: Sequence[Load]) -> None:
        """Read chunks of one segment, many with a request. What doesn't come right is left to be read by itself."""
        parts, by_slot, name, segment = [], {}, "", ""
        for load in loads:
            place = self._place(load.slot.job)  # it may have been removed since it was asked for
            if place is None or not place.segment or segment not in ("", place.segment):
                continue
            name, segment = place.name, place.segment
            parts.append(Part(load.slot, place.offset, place.length))
            by_slot[id(load.slot)] = load
        for run in (run for run in runs_of(parts) if len(run) > 1):
            sink = RunSink(run)
            until = max(by_slot[id(part.slot)].due for part in run)
            for part in run:
                part.slot.expected = part.length
            try:
                self._bucket.read(name, sink, (run[0].offset, sink.length), until)
            except (CorruptChunk, GivenUp):
                continue
            except RequestFailed as failure:
                for part in run:
                    self._run_failed(by_slot[id(part.slot)], failure)
                continue
            self.counts["loads_together"] += len(run)
            for number, part in enumerate(run):
                if number not in sink.wrong:
                    self._check(by_slot[id(part.slot)])

    def _run_failed(self, load: Load, failure: RequestFailed) -> None:
        if failure.kind not in (Kind.MISSING, Kind.RANGE):
            load.slot.fail("late" if self._clock() >= load.due else "io")
        # Else each is asked for by itself: one chunk that isn't there any more needn't cost the others.

    def _check(self, load: Load) -> None:
        """Report a load whose bytes have come, if they are right."""
        try:
            self._verified(load)
        except GivenUp:
            return
        except CannotDecode as error:
            self._undecodable(load, error)
        except CorruptChunk:
            self.counts["loads_read_again"] += 1  # by itself, and if it isn't right then, it is damaged

    def _run(self, load: Load) -> None:
        place = self._place(load.slot.job)
        if place is None:
            load.slot.fail("missing")
            return
        for again in (False, True):
            try:
                self._read(load, place)
                return
            except GivenUp:
                return
            except CannotDecode as error:
                self._undecodable(load, error)
                return
            except TooLarge as error:
                complain("s3 large", "a load is refused: %s", error)
                load.slot.fail("io")
                return
            except CorruptChunk as error:
                # What a network has spoilt on the way is right the second time.
                if again or self._clock() >= load.due or not self._bucket.requests.budget.take():
                    self._damaged(load.slot.job, place, str(error))
                    load.slot.fail("corrupt")
                    return
                self.counts["loads_read_again"] += 1
            except RequestFailed as failure:
                self._failed(load, place, failure)
                return

    def _read(self, load: Load, place: Place) -> None:
        slot = load.slot
        slot.expected = place.length
        known = place.length if place.own else 0
        self._bucket.read(place.name, slot, place.part, load.due, known=known)
        self._verified(load)

    def _verified(self, load: Load) -> None:
        """Report what is in the slot. Raises CorruptChunk if that isn't the chunk."""
        slot = load.slot
        header = slot.verified()
        own = self._holdings.owns(slot.job.chunk)
        tenant = tenant_digest(header.tenant)
        if not own and self._clears.hide(header.namespace, tenant, header.start, slot.modified):
            slot.fail("missing")
            return
        if slot.succeed():
            self._holdings.touch([slot.job.chunk], loaded=True)

    def _place(self, job: LoadJob) -> Place | None:
        """Where to read a chunk; None if it is known to be nowhere, or not to be served."""
        with self._holdings.manifest.reading() as view:
            record = view.get(job.chunk)
            leaving = view.leaving(job.chunk)
        name = self._names.chunk(job.chunk)
        if leaving is not None and leaving not in _STILL_READABLE:
            return None
        if record is not None or leaving is not None:
            card = self._holdings.cards.get(job.chunk)
            if card is None or not card.segment:
                return Place(name, length=card.length if card else 0, own=True)
            if record is None:
                return None  # its segment may be gone at any moment
            return Place(f"{self._names.segments}{card.segment}", card.segment, card.offset, card.length, own=True)
        if name in self._doomed:
            return None
        _, seen = self._sightings.get(job.chunk)
        if seen is not None and seen.segment:
            return Place(f"{self._names.segments}{seen.segment}", seen.segment, seen.offset, seen.length)
        return Place(name)  # even if it was missing a moment ago: somebody may have stored it since

    def _undecodable(self, load: Load, error: CannotDecode) -> None:
        """It may be right, but here is no key for it, or no library: a miss, and it stays where it is."""
        complain("s3 undecodable", "a chunk can't be decoded: %s", error)
        self.counts["loads_undecodable"] += 1
        self._sightings.missing(load.slot.job.chunk)
        load.slot.fail("missing")

    def _failed(self, load: Load, place: Place, failure: RequestFailed) -> None:
        chunk = load.slot.job.chunk
        if failure.kind not in (Kind.MISSING, Kind.RANGE):
            load.slot.fail("late" if self._clock() >= load.due else "io")
            return
        if place.own:
            self._holdings.vanished(chunk)
        elif place.segment:
            self._sightings.segment_gone(place.segment)
        if not place.segment:
            self._sightings.missing(chunk)
        load.slot.fail("missing")

    def _damaged(self, job: LoadJob, place: Place, why: str) -> None:
        """What was read isn't the chunk: out of sight, and out of the bucket."""
        complain("s3 corrupt", "%s is removed: %s", place.name, why)
        if place.own:
            self._holdings.remove([job.chunk], "corrupt")
            return
        if place.segment:
            self._sightings.segment_gone(place.segment)
        self._sightings.missing(job.chunk)
        self._doomed.add(place.name)
