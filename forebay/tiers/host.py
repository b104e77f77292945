"""The daemon's handle of one tier process: feeds it, accounts for what it holds, survives its death.

    store, load  -> jobs in the process's hands, bounded in bytes -> on_finished, exactly once each
    process dies or doesn't answer -> SIGKILL, reaped -> its jobs finish as failed -> started again, later each time

A job of a lost process is reported only after that process is dead, since until then it may still write
into the pool. Nothing here blocks the loop, and everything is called on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from forebay.errors import ProtocolError
from forebay.tiers.base import (
    ChunkId,
    ClearScope,
    JobResult,
    LoadJob,
    LookupResult,
    Query,
    StoreJob,
    TierChange,
    TierStats,
)
from forebay.tiers.channel import Channel
from forebay.tiers.child import Child
from forebay.tiers.jobs import Job, JobTable
from forebay.tiers.messages import (
    BATCH,
    Attach,
    Changes,
    Cleared,
    ClearTier,
    Finished,
    Forgotten,
    FromTier,
    GetTierStats,
    Load,
    Lookup,
    LookupDone,
    NoteNamespace,
    OptionValue,
    Start,
    Store,
    TierStatsReply,
)
from forebay.tiers.pending_clears import PendingClears
from forebay.tiers.pending_forgets import PendingForgets
from forebay.tiers.supervise import HEARTBEAT_RID, Hooks, Patience, Supervisor

log = logging.getLogger(__name__)

ATTACH_BATCH = 32

A = TypeVar("A")
J = TypeVar("J", StoreJob, LoadJob)


@dataclass(frozen=True)
class HostLimits:
    """What the daemon may have under way at one tier; bytes where nothing else is said."""

    store_queue_bytes: int = 256 << 20
    load_queue_bytes: int = 256 << 20
    out_bytes: int = 32 << 20
    requests: int = 1024
    forgets: int = 1 << 16
    namespaces: int = 1024


DEFAULT_LIMITS = HostLimits()
DEFAULT_PATIENCE = Patience()


class TierHost:
    """One tier in a process of its own. See the module's text.

    `on_finished` and `on_changes` are called on the loop, never from inside `store` or `load`. `on_down` is
    told why a process was lost, after its jobs have been reported. `lock_fd` is handed to the process, which
    keeps it open for life; this object owns it and closes it in `stop`. `clock` and `sleep` are asyncio's
    unless a test injects others; `new_child` starts a process, given its lock.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        options: Mapping[str, OptionValue],
        *,
        on_finished: Callable[[list[JobResult]], None],
        on_changes: Callable[[list[TierChange]], None],
        on_down: Callable[[str], None] | None = None,
        lock_fd: int | None = None,
        limits: HostLimits = DEFAULT_LIMITS,
        patience: Patience = DEFAULT_PATIENCE,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        new_child: Callable[[int | None], Child] = Child,
    ) -> None:
        self.name = name
        self._limits = limits
        self._patience = patience
        self._on_finished = on_finished
        self._on_changes = on_changes
        self._on_down = on_down
        self._lock_fd = lock_fd
        self._clock = clock or asyncio.get_running_loop().time
        self._extents: dict[int, int] = {}
        self._namespaces: dict[bytes, bytes] = {}
        self._jobs = JobTable({"store": limits.store_queue_bytes, "load": limits.load_queue_bytes})
        self._early: list[JobResult] = []
        self._requests: dict[int, asyncio.Future[FromTier]] = {}
        self._clears = PendingClears(limits.requests, self._next_rid)
        self._forgets = PendingForgets(limits.forgets, self._next_rid)
        self._rid = HEARTBEAT_RID
        self._counts: Counter[str] = Counter()
        self._last_stats = TierStats({}, {})
        self._supervisor = Supervisor(
            Start(kind, name, dict(options)),
            Hooks(self._received, self._opened, self._ready, self._dead, self._overdue),
            patience,
            lock_fd=lock_fd, out_bytes_max=limits.out_bytes, clock=self._clock, sleep=sleep,
            new_child=new_child,
        )  # fmt: skip

    def _next_rid(self) -> int:
        self._rid += 1
        return self._rid

    # --- life ------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Is there a started process that takes jobs?"""
        return self._supervisor.up

    @property
    def pid(self) -> int | None:
        """Process id of the latest process."""
        return self._supervisor.pid

    async def start(self, extents: Mapping[int, int]) -> None:
        """Start the process with these extents (id to descriptor; copies are kept).

        Raises what the tier says if it can't start: ConfigError, AlreadyRunning, NotWritable, NoSpace.
        Call it on the main thread: the process dies with the thread that started it.
        """
        for extent, descriptor in extents.items():
            self._extents[extent] = os.dup(descriptor)
        try:
            await self._supervisor.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Let the process finish what it writes, at most `stop_s`, and end it. Open jobs are reported."""
        await self._supervisor.stop()
        self._flush_early()
        self._clears.cancel()
        for descriptor in self._extents.values():
            os.close(descriptor)
        self._extents.clear()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _opened(self, channel: Channel) -> None:
        self._attach(channel, list(self._extents))

    def _ready(self, channel: Channel) -> None:
        """Tell a new process what it must know, and what the old one may not have done."""
        for namespace, encoded in self._namespaces.items():
            channel.send(NoteNamespace(namespace, encoded), force=True)
        for forget in self._forgets.again():
            channel.send(forget, force=True)
        for clear in self._clears:
            channel.send(ClearTier(clear.rid, clear.scope), force=True)

    def _dead(self, why: str) -> None:
        lost = [JobResult(job.id, False, "io") for job in self._jobs.take_all()]
        self._counts["jobs_lost"] += len(lost)
        requests, self._requests = self._requests, {}
        for future in requests.values():
            future.cancel()
        if lost:
            self._tell(self._on_finished, lost)
        if self._on_down is not None and not self._supervisor.stopping:
            self._tell(self._on_down, why)

    def _overdue(self) -> str | None:
        now = self._clock()
        job = self._jobs.overdue(now)
        return f"{job.kind} job {job.id} is overdue by {now - job.overdue_at:.1f} s" if job else None

    # --- requests --------------------------------------------------------------------------------------

    @property
    def _channel(self) -> Channel | None:
        """Where messages go; None while there is no started process."""
        return self._supervisor.channel if self.alive else None

    def attach(self, extent: int, descriptor: int) -> None:
        """Jobs may name this extent from now on. A copy of the descriptor is kept."""
        assert extent not in self._extents, extent
        self._extents[extent] = os.dup(descriptor)
        if (channel := self._supervisor.channel) is not None:
            self._attach(channel, [extent])

    def _attach(self, channel: Channel, extents: list[int]) -> None:
        for at in range(0, len(extents), ATTACH_BATCH):
            some = extents[at : at + ATTACH_BATCH]
            channel.send(Attach(tuple(some)), _copies(self._extents[extent] for extent in some), force=True)

    def note_namespace(self, namespace: bytes, encoded: bytes) -> None:
        """Tell the tier what a namespace is; every later process is told too, of the last ones."""
        self._namespaces.pop(namespace, None)
        if len(self._namespaces) >= self._limits.namespaces:
            self._counts["namespaces_forgotten"] += 1
            del self._namespaces[next(iter(self._namespaces))]
        self._namespaces[namespace] = encoded
        if (channel := self._channel) is not None:
            channel.send(NoteNamespace(namespace, encoded), force=True)

    async def lookup(self, queries: Sequence[Query], timeout_s: float) -> list[LookupResult]:
        """One result a query, after `timeout_s` at the latest. `retry` if the tier doesn't know in time,
        `away` if there is no tier process."""
        if not self.alive:
            return [LookupResult("away")] * len(queries)
        answer = await self._ask(lambda rid: Lookup(rid, list(queries), timeout_s), timeout_s, "lookups_late")
        if isinstance(answer, LookupDone) and len(answer.results) == len(queries):
            return answer.results
        return [LookupResult("retry" if self.alive else "away")] * len(queries)

    async def _ask(self, make: Callable[[int], object], timeout_s: float, late: str) -> FromTier | None:
        """Send a request, wait for its answer. None if it doesn't come in time or can't be sent."""
        channel = self._channel
        if channel is None or len(self._requests) >= self._limits.requests:
            self._counts["requests_refused"] += 1
            return None
        rid = self._next_rid()
        future: asyncio.Future[FromTier] = asyncio.get_running_loop().create_future()
        self._requests[rid] = future
        try:
            if not self._send_request(channel, make(rid)):
                self._counts["requests_refused"] += 1
                return None
            # Not wait_for: the answer is no task of ours, and being cancelled from outside must pass through.
            await asyncio.wait((future,), timeout=timeout_s)
            if future.done() and not future.cancelled():
                return future.result()
            self._counts[late] += 1
            return None
        finally:
            self._requests.pop(rid, None)

    def _send_request(self, channel: Channel, message: object) -> bool:
        try:
            return channel.send(message)
        except ProtocolError as error:  # more in one batch than a frame holds
            log.error("tier %s: a request is refused: %s", self.name, error)
            return False

    def store(self, jobs: Sequence[StoreJob]) -> None:
        """Hand over stores. Whatever is over the budget finishes as `dropped`, without a process as `io`."""
        due = self._clock() + self._patience.store_s
        taken = [job for job in jobs if self._take(Job(job.id, "store", job.length, due))]
        self._hand_over(taken, Store)

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Hand over loads, with a budget of their own. A load that misses its deadline finishes as `late`."""
        now = self._clock()
        taken = []
        for job in jobs:
            due = now + job.deadline_s + self._patience.hang_s
            if self._take(Job(job.id, "load", job.capacity, due)):
                taken.append(job)
        self._hand_over(taken, Load)

    def _take(self, job: Job) -> bool:
        if not self.alive:
            self._finish_early(job.id, "io")
            return False
        if not self._jobs.add(job):
            self._counts[f"{job.kind}s_dropped"] += 1
            self._finish_early(job.id, "dropped")
            return False
        return True

    def _hand_over(self, jobs: Sequence[J], message: Callable[[list[J]], Store | Load]) -> None:
        for at in range(0, len(jobs), BATCH):
            some = list(jobs[at : at + BATCH])
            if (channel := self._channel) is not None and channel.send(message(some)):
                continue
            for job in some:
                self._jobs.finish(job.id)
                self._counts["jobs_dropped"] += 1
                self._finish_early(job.id, "dropped")

    def _finish_early(self, job_id: int, reason: str) -> None:
        if not self._early:
            asyncio.get_running_loop().call_soon(self._flush_early)
        self._early.append(JobResult(job_id, False, reason))

    def _flush_early(self) -> None:
        early, self._early = self._early, []
        if early:
            self._tell(self._on_finished, early)

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        """Remove chunks. Remembered until a process has done it; of too many of them, everything is to be forgotten."""
        channel = self._channel
        if channel is None and self._clears.everything:
            return
        for message in self._forgets.add(chunks, reason):
            if channel is not None:
                channel.send(message, force=True)
        if self._forgets.overflowed:
            self._forgets.drop()
            self._counts["forgets_widened"] += 1
            self._ask_to_clear(ClearScope(), asyncio.get_running_loop().create_future())

    @property
    def forgetting(self) -> int:
        """Chunks that no process has confirmed to have forgotten yet."""
        return len(self._forgets)

    async def clear(self, namespace: bytes, timeout_s: float = 30.0) -> int | None:
        """Remove everything of a namespace (all if empty). See `clear_scope`."""
        return await self.clear_scope(ClearScope(namespace), timeout_s)

    async def clear_scope(self, scope: ClearScope, timeout_s: float = 30.0) -> int | None:
        """Remove what a scope covers; how many chunks left sight.

        None if that isn't known in time (the clear is then still carried out, by the next process if need be), or
        if the tier can't tell what is meant.
        """
        done: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._ask_to_clear(scope, done)
        await asyncio.wait((done,), timeout=timeout_s)
        return done.result() if done.done() and not done.cancelled() else None

    def _ask_to_clear(self, scope: ClearScope, done: asyncio.Future[int | None]) -> None:
        for clear in self._clears.add(scope, done):
            if (channel := self._channel) is not None:
                channel.send(ClearTier(clear.rid, clear.scope), force=True)

    async def stats(self, timeout_s: float = 1.0) -> TierStats:
        """The tier's figures and, as `host.*`, this object's. Without an answer, the last known."""
        await self._ask(GetTierStats, timeout_s, "stats_late")
        last = self._last_stats
        return TierStats({**last.values, **self.statistics()}, {**last.info, "state": "up" if self.alive else "down"})

    def statistics(self) -> dict[str, float]:
        """Counters and gauges of this object alone."""
        counts = self._counts + self._supervisor.counts
        values = {f"host.{name}": float(count) for name, count in counts.items()}
        values["host.up"] = float(self.alive)
        values["host.restarts"] = float(max(0, counts["starts"] - 1))
        values["host.clears_pending"] = float(len(self._clears))
        values["host.forgets_pending"] = float(len(self._forgets))
        values["host.clears_widened"] = float(self._clears.widened)
        values["host.jobs_open"] = float(len(self._jobs.open))
        values["host.store_queue_bytes"] = float(self._jobs.bytes["store"])
        values["host.load_queue_bytes"] = float(self._jobs.bytes["load"])
        values["host.out_bytes"] = float(channel.out_bytes if (channel := self._supervisor.channel) else 0)
        return values

    # --- answers ---------------------------------------------------------------------------------------

    def _received(self, message: FromTier) -> None:
        match message:
            case Finished(results=results):
                self._finished(results)
            case Changes(changes=changes):
                self._tell(self._on_changes, changes)
            case LookupDone(rid=rid):
                self._answer(rid, message)
            case TierStatsReply(rid=rid, stats=stats):
                self._last_stats = stats
                self._answer(rid, message)
            case Cleared(rid=rid, count=count):
                self._clears.confirmed(rid, count)
            case Forgotten(rid=rid):
                self._forgets.confirmed(rid)
            case _:
                raise AssertionError(f"{type(message).__name__} is the supervisor's business")

    def _finished(self, results: list[JobResult]) -> None:
        known = [result for result in results if self._jobs.finish(result.id) is not None]
        if known:
            self._tell(self._on_finished, known)

    def _tell(self, callback: Callable[[A], None], what: A) -> None:
        """An owner's mistake in one callback must not cost it the messages that follow."""
        try:
            callback(what)
        except Exception:
            self._counts["callback_errors"] += 1
            log.exception("tier %s: the owner's callback failed", self.name)

    def _answer(self, rid: int, message: FromTier) -> None:
        future = self._requests.get(rid)
        if future is not None and not future.done():
            future.set_result(message)


def _copies(descriptors: Iterable[int]) -> list[int]:
    """Copies of descriptors: all, or an OSError and none."""
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
    except OSError:
        for copy in copies:
            os.close(copy)
        raise
    return copies
