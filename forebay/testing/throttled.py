"""A file tier behind a slow link: what is loaded goes through it one chunk after the other, at a pace that may change
at any time. Loaded as `forebay.testing.throttled:ThrottledFiles`.

    [tiers.slow]
    kind = "forebay.testing.throttled:ThrottledFiles"
    directory = "/kv"                 all options of the file tier, and
    pace = "/tmp/pace"                a file: bytes a second; 0 stalls, no file is no limit
    keep = "/tmp/keep"                while this file is there, a clear leaves the tier as it is
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.errors import ConfigError
from forebay.tiers.base import ChunkId, ClearScope, JobResult, LoadJob, LookupResult, Query
from forebay.tiers.fs.tier import FsTier

SLICE_S = 0.004
"""How often the pace is looked at while bytes are under way."""

LENGTHS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Shipment:
    """A load that waits for its bytes; `until` is the clock's time at which it is late."""

    job: LoadJob
    length: int
    until: float


class Link:
    """Lets shipments through, first in, first out, on a thread of its own. `pace` gives bytes a second."""

    def __init__(
        self,
        pace: Callable[[], float],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pace, self._wake, self._clock, self._sleep = pace, wake, clock, sleep
        self._queue: deque[Shipment] = deque()
        self._through: list[tuple[Shipment, bool]] = []
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def send(self, shipment: Shipment) -> None:
        """Queue one."""
        with self._change:
            self._queue.append(shipment)
            self._change.notify()

    def take(self) -> list[tuple[Shipment, bool]]:
        """Those that have left the queue since the last call, and whether they are through (else they are late)."""
        with self._change:
            through, self._through = self._through, []
        return through

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are queued."""
        with self._change:
            return sum(shipment.length for shipment in self._queue)

    def close(self) -> None:
        """End the thread; what is queued stays undone."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(5)

    def _run(self) -> None:
        ahead = 0.0
        while True:
            with self._change:
                if not self._queue:
                    ahead = 0.0  # time that nobody used is lost
                self._change.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                shipment = self._queue[0]
            ahead = self._ship(shipment, ahead)

    def _ship(self, shipment: Shipment, sent: float) -> float:
        """Wait until it is through, or late; what the link could have carried beyond it."""
        then = self._clock()
        while sent < shipment.length and then < shipment.until and not self._closed:
            rate = self._pace()
            left_s = (shipment.length - sent) / rate if rate > 0 else SLICE_S
            self._sleep(min(SLICE_S, left_s, max(0.0, shipment.until - then)))
            now = self._clock()
            sent += rate * (now - then) if rate != float("inf") else shipment.length
            then = now
        arrived = sent >= shipment.length
        with self._change:
            self._queue.popleft()
            self._through.append((shipment, arrived))
        self._wake()
        return sent - shipment.length if arrived else 0.0


class ThrottledFiles(FsTier):
    """See the module's text."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        own = {key: options[key] for key in ("pace", "keep") if key in options}
        if "pace" not in own:
            raise ConfigError(f"tier {name!r} needs pace: the file that says how many bytes a second come through")
        self._pace_file, self._keep_file = Path(str(own["pace"])), Path(str(own.get("keep", "")))
        self._lengths: OrderedDict[ChunkId, int] = OrderedDict()
        self._wake: Callable[[], None] = lambda: None
        super().__init__(name, {key: value for key, value in options.items() if key not in own})
        self._link = Link(self._pace, self._arrived)

    def _pace(self) -> float:
        try:
            return max(0.0, float(self._pace_file.read_text() or "inf"))
        except FileNotFoundError:
            return float("inf")

    def _arrived(self) -> None:
        self._wake()

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `SecondaryTier`."""
        self._wake = wake
        super().set_waker(wake)

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        """See `SecondaryTier`; remembers how long chunks are."""
        found = super().lookup(queries)
        for query, result in zip(queries, found, strict=True):
            if result.outcome == "hit":
                self._lengths[ChunkId(query.group, result.key)] = result.length
        while len(self._lengths) > LENGTHS_MAX:
            self._lengths.popitem(last=False)
        return found

    def submit_load(self, job: LoadJob) -> None:
        """See `SecondaryTier`. The files are read when the bytes are through."""
        length = self._lengths.get(job.chunk, job.capacity)
        self._link.send(Shipment(job, length, time.monotonic() + job.deadline_s))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See `SecondaryTier`."""
        late = []
        for shipment, arrived in self._link.take():
            left_s = shipment.until - time.monotonic()
            if arrived and left_s > 0:
                super().submit_load(msgspec.structs.replace(shipment.job, deadline_s=left_s))
            else:
                late.append(JobResult(shipment.job.id, False, "late"))
        return [*late, *super().get_finished_jobs()]

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        """See `SecondaryTier`."""
        if not (reason == "cleared" and self._keeps()):
            super().forget(chunks, reason)

    def clear_steps(self, scope: ClearScope) -> Iterator[int | None]:
        """See `SecondaryTier`."""
        return iter((0,)) if self._keeps() else iter(super().clear_steps(scope) or ())

    def _keeps(self) -> bool:
        return self._keep_file.is_file()

    def close(self) -> None:
        """See `SecondaryTier`."""
        self._link.close()
        super().close()
