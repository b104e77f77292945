"""Loading: from an object, or a part of one, into a slot of the pool; all of it verified before it is reported."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import lmdb

from forebay.errors import CorruptChunk
from forebay.tiers.base import JobResult, LoadJob
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.s3.bucket import GivenUp
from forebay.tiers.s3.clears import Clears
from forebay.tiers.s3.deadlines import Deadlines
from forebay.tiers.s3.doomed import Doomed
from forebay.tiers.s3.failures import Kind, RequestFailed
from forebay.tiers.s3.holdings import Holdings
from forebay.tiers.s3.names import Names
from forebay.tiers.s3.sightings import Sightings
from forebay.tiers.s3.slot import LoadSlot, TooLarge

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
    """A load under way: its slot, and what its deadline is cancelled with."""

    def __init__(self, slot: LoadSlot, due: float) -> None:
        self.slot = slot
        self.due = due
        self.timer = -1
        self.running = False


class Reader:
    """Runs load jobs on the read threads."""

    def __init__(
        self, holdings: Holdings, names: Names, sightings: Sightings, clears: Clears, doomed: Doomed, outbox: Outbox,
        deadlines: Deadlines, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._holdings = holdings
        self._bucket = holdings.bucket
        self._names = names
        self._sightings = sightings
        self._clears = clears
        self._doomed = doomed
        self._outbox = outbox
        self._deadlines = deadlines
        self._clock = clock
        self.counts: Counter[str] = Counter()

    def begin(self, job: LoadJob, memory: memoryview) -> Load:
        """Take a job on: from now on its chunk is kept and its deadline holds."""
        load = Load(LoadSlot(job, memory, self._told), self._clock() + job.deadline_s)
        self._holdings.pin(job.chunk)
        load.timer = self._deadlines.add(load.due, lambda: self._too_late(load))
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

    def run(self, load: Load) -> None:
        """Load one job and report it, whatever happens."""
        try:
            if not load.slot.finished:
                load.running = True
                self._run(load)
        except lmdb.Error as error:
            self._outbox.manifest_error(error)
        except Exception:
            log.exception("loading %s failed", load.slot.job.chunk.key.hex())
        finally:
            load.slot.fail("io")
            self.end(load)

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
        self._bucket.read(place.name, slot, place.part, load.due)
        header = slot.verified()
        if not place.own and self._clears.hide(header.namespace, header.tenant, header.start, slot.modified):
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
            length = record.length if record else 0
            if card is not None and card.segment and record is not None:
                return Place(f"{self._names.segments}{card.segment}", card.segment, card.offset, length, own=True)
            return None if card is not None and card.segment else Place(name, length=length, own=True)
        if name in self._doomed:
            return None
        _, seen = self._sightings.get(job.chunk)
        if seen is not None and seen.segment:
            return Place(f"{self._names.segments}{seen.segment}", seen.segment, seen.offset, seen.length)
        return Place(name)  # even if it was missing a moment ago: somebody may have stored it since

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
