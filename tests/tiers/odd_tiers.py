"""Tiers that misbehave, for the tests of the process and its host. Loaded as `module:Class`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from forebay.errors import AlreadyRunning, NoSpace, TierUnavailable
from forebay.tiers.base import ChunkId, ClearScope, JobResult, LoadJob, LookupResult, Query, StoreJob
from forebay.tiers.errors import TierFailed
from forebay.tiers.fs.tier import FsTier
from forebay.tiers.memory import MemoryTier


class Plain(MemoryTier):
    """A memory tier that takes no options."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        super().__init__(name, {})


class Raising(Plain):
    """Every call raises."""

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        raise RuntimeError("lookup")

    def submit_store(self, job: StoreJob) -> None:
        raise RuntimeError("store")

    def submit_load(self, job: LoadJob) -> None:
        raise RuntimeError("load")


class Clinging(FsTier):
    """Can't remove anything as long as the file `held` is there."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        self._held = str(options["held"])
        super().__init__(name, {key: value for key, value in options.items() if key != "held"})

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        self._try()
        super().forget(chunks, reason)

    def clear_steps(self, scope: ClearScope) -> Iterator[int]:
        yield 0
        self._try()
        yield from super().clear_steps(scope)

    def _try(self) -> None:
        if os.path.exists(self._held):
            raise RuntimeError("not now")


class Thorough(Plain):
    """Has so much to clear that it takes two seconds, in steps."""

    def clear_steps(self, scope: ClearScope) -> Iterator[int]:
        for _ in range(40):
            time.sleep(0.05)
            yield 0
        yield self.clear_scope(scope)


class Patient(MemoryTier):
    """Waits with a clear of everything until the file `there` is."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        super().__init__(name, {})
        self._there = str(options["there"])

    def clear_steps(self, scope: ClearScope) -> Iterator[int | None]:
        while not scope.namespace and not os.path.exists(self._there):
            yield None
        yield self.clear_scope(scope)


class Sleeping(Plain):
    """Takes jobs and never finishes one; writes into the slot of a load for as long as it lives."""

    def submit_store(self, job: StoreJob) -> None:
        pass

    def submit_load(self, job: LoadJob) -> None:
        pass


class NeverBrings(Plain):
    """Takes stores, and has a load under way for as long as it lives."""

    def submit_load(self, job: LoadJob) -> None:
        pass


class Stuck(Plain):
    """The first store never returns, so its process answers nobody any more."""

    def submit_store(self, job: StoreJob) -> None:
        time.sleep(3600)


class Slow(Plain):
    """Answers `retry` until it has been asked ten times; calls no waker."""

    asked = 0

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        self.asked += 1
        return [LookupResult("retry")] * len(queries) if self.asked < 10 else super().lookup(queries)


class Never(Plain):
    """Always `retry`."""

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        return [LookupResult("retry")] * len(queries)


class Suicidal(Plain):
    """Dies of the first store."""

    def submit_store(self, job: StoreJob) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Failing(Plain):
    """Can't go on after the first store."""

    broken = False

    def submit_store(self, job: StoreJob) -> None:
        self.broken = True

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if self.broken:
            raise TierFailed("my manifest is broken")
        return super().get_finished_jobs()


class Full(Plain):
    """Can't start."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        raise NoSpace("the disk is full: free some")


class Taken(Plain):
    """Can't start: somebody else has what it needs."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        raise AlreadyRunning("another process has my directory")


class Bug(Plain):
    """Can't start, and nobody foresaw why."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        raise ZeroDivisionError


class Chatty(Plain):
    """Reports each result twice, and one that nobody asked for."""

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        return [*results, *results, JobResult(123_456, True)] if results else []


class Absent(Plain):
    """Its server isn't there until the file `there` is."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        if not os.path.exists(str(options["there"])):
            raise TierUnavailable("nobody answers on port 1")
        super().__init__(name, {})


class Broken(Plain):
    """Takes stores, and offers what it can't bring."""

    def submit_load(self, job: LoadJob) -> None:
        self._finished.append(JobResult(job.id, False, "io"))
