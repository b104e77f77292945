"""Any tier, with faults around it. Kind `forebay.testing.faults.tier:FaultyTier`.

    [tiers.flaky]
    kind = "forebay.testing.faults.tier:FaultyTier"
    fault_kind = "fs"                           # the real one; it gets all options without `fault_`
    fault_rates = "error=0.02,hang=0.001"       # see FAULTS
    fault_seed = 7
    fault_log = "/tmp/faults"                   # a line for each fault that struck; may be left out
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from forebay.errors import ConfigError
from forebay.testing.faults.dice import Dice, rates_of
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
from forebay.tiers.registry import create_tier

FAULTS = {
    "error": "a job fails at once",
    "raise": "a call raises",
    "delay": "a result comes up to 50 ms late",
    "lose": "a job's result never comes",
    "twice": "a result comes twice",
    "stray": "a result comes of a job that nobody gave",
    "partition": "for some time, jobs fail and lookups aren't answered",
    "full": "for some time, stores find no room",
    "hang": "a call never returns",
    "die": "the process is killed",
}
"""Faults of a tier that says nothing wrong of a chunk."""
LIES = {
    "claim": "a lookup hits what isn't there",
    "measure": "a lookup tells another length",
    "flip": "a load that succeeds has a wrong bit",
    "short": "a load that succeeds has brought half of the chunk",
    "length": "a load that succeeds tells another length",
    "header": "a load that succeeds brings a header with a wrong bit",
    "other": "a load that succeeds brings the header of another chunk",
    "pretend": "a store that succeeds has stored nothing",
}
"""What a tier says that isn't so. Whoever takes a load verifies it: none of these may cost more than a miss."""

PREFIX = "fault_"
DELAY_S = 0.05
TICK_S = 0.02


class FaultyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the faults; see the module's text."""

    fault_kind: str
    fault_rates: str = ""
    fault_seed: int = 0
    fault_log: str = ""


class FaultyTier(SecondaryTier):
    """A tier inside of trouble. Everything it doesn't spoil is the inner tier's own."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        self.name = name
        ours = {key: value for key, value in options.items() if key.startswith(PREFIX)}
        try:
            found = msgspec.convert(ours, FaultyOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(f"tier {name!r}: {error}") from error
        self._dice = Dice(found.fault_seed, rates_of(found.fault_rates, FAULTS | LIES), found.fault_log)
        inner = {key: value for key, value in options.items() if not key.startswith(PREFIX)}
        self.inner = create_tier(found.fault_kind, name, inner)
        self._extents: dict[int, memoryview] = {}
        self._loads: dict[int, LoadJob] = {}
        self._finished: list[JobResult] = []
        self._held: list[tuple[float, JobResult]] = []
        self._headers: list[bytes] = []
        self._wake: Callable[[], None] = lambda: None
        self._closed = threading.Event()

    def attach_extent(self, extent: int, memory: memoryview) -> None:
        self._extents[extent] = memory
        self.inner.attach_extent(extent, memory)

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.inner.set_waker(wake)
        if type(self.inner).set_waker is SecondaryTier.set_waker:  # it wants to be asked, so it has to be
            threading.Thread(target=self._tick, name="faults: tick", daemon=True).start()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            self._wake()

    def note_namespace(self, namespace: bytes, encoded: bytes) -> None:
        self.inner.note_namespace(namespace, encoded)

    def _trouble(self, call: str) -> None:
        """What may happen to any call."""
        if self._dice.strikes("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._dice.strikes("hang"):
            while True:
                time.sleep(3600)
        if self._dice.strikes("raise"):
            raise RuntimeError(f"a fault in {call}")

    # --- lookups ---------------------------------------------------------------------------------------

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        self._trouble("lookup")
        if self._dice.lasts("partition"):
            return [LookupResult("retry")] * len(queries)
        return [self._told(query, answer) for query, answer in zip(queries, self.inner.lookup(queries), strict=True)]

    def _told(self, query: Query, answer: LookupResult) -> LookupResult:
        if answer.outcome == "miss" and self._dice.strikes("claim"):
            tokens = len(query.tokens) // 4
            return LookupResult("hit", query.key, tokens, tokens, self._dice.between(1, 1 << 20))
        if answer.outcome == "hit" and self._dice.strikes("measure"):
            return LookupResult("hit", answer.key, answer.matched, answer.tokens, self._dice.between(1, 1 << 20))
        return answer

    # --- jobs ------------------------------------------------------------------------------------------

    def submit_store(self, job: StoreJob) -> None:
        self._trouble("submit_store")
        if self._dice.lasts("full"):
            self._end(JobResult(job.id, False, "full"))
        elif self._dice.lasts("partition") or self._dice.strikes("error"):
            self._end(JobResult(job.id, False, "io"))
        elif self._dice.strikes("pretend"):
            self._end(JobResult(job.id, True, length=job.length))
        else:
            self.inner.submit_store(job)

    def submit_load(self, job: LoadJob) -> None:
        self._trouble("submit_load")
        if self._dice.lasts("partition") or self._dice.strikes("error"):
            self._end(JobResult(job.id, False, "io"))
            return
        self._loads[job.id] = job
        self.inner.submit_load(job)

    def _end(self, result: JobResult) -> None:
        self._finished.append(result)
        self._wake()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._trouble("get_finished_jobs")
        for result in self.inner.get_finished_jobs():
            self._spoil(result)
        now = time.monotonic()
        self._finished += [result for due, result in self._held if due <= now]
        self._held = [(due, result) for due, result in self._held if due > now]
        finished, self._finished = self._finished, []
        return finished

    def _spoil(self, result: JobResult) -> None:
        job = self._loads.pop(result.id, None)
        if self._dice.strikes("lose"):
            return
        if job is not None and result.ok:
            result = self._lie(job, result)
        if self._dice.strikes("twice"):
            self._finished.append(result)
        if self._dice.strikes("stray"):
            self._finished.append(JobResult(1 << 62, True, "", result.header, 1))
        if self._dice.strikes("delay"):
            wait = self._dice.part() * DELAY_S
            self._held.append((time.monotonic() + wait, result))
            threading.Timer(wait + 0.001, self._wake).start()
        else:
            self._finished.append(result)

    def _lie(self, job: LoadJob, result: JobResult) -> JobResult:
        at, length, header = job.payload_offset, result.length, result.header
        payload = self._extents[job.extent][at : at + length]
        if self._dice.strikes("flip"):
            self._dice.flip(payload)
        if self._dice.strikes("short"):
            half = len(payload) // 2
            payload[half:] = bytes(len(payload) - half)
        if self._dice.strikes("length"):
            length = self._dice.between(0, job.capacity)
        if self._dice.strikes("header"):
            changed = bytearray(header)
            self._dice.flip(changed)
            header = bytes(changed)
        if self._dice.strikes("other") and self._headers:
            header = self._headers[-1]
        self._headers = [result.header]
        return JobResult(result.id, True, "", header, length)

    # --- the rest --------------------------------------------------------------------------------------

    def take_changes(self) -> Iterable[TierChange]:
        self._trouble("take_changes")
        return self.inner.take_changes()

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        self.inner.forget(chunks, reason)

    def clear(self, namespace: bytes) -> int:
        return self.inner.clear(namespace)

    def clear_scope(self, scope: ClearScope) -> int | None:
        return self.inner.clear_scope(scope)

    def clear_steps(self, scope: ClearScope) -> Iterator[int | None] | None:
        return self.inner.clear_steps(scope)

    def statistics(self) -> TierStats:
        return self.inner.statistics()

    def close(self) -> None:
        self._closed.set()
        self.inner.close()
        self._finished += [result for _, result in self._held]
        self._held = []
        self._dice = Dice(0, {})  # last words are true
