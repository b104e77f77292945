"""The interface of a secondary tier.

A tier object lives in the tier's own process, which maps the pool's extents. Its methods never block and
never raise for what happens to one chunk: a job that fails is a JobResult with `ok` false. Work happens on
the tier's own threads (or inside `get_finished_jobs`, which the process calls often).

A tier is handed finished keys and nothing else: no tenant, no salt, no model name, so none can be forgotten
on the way. What it stores for a chunk is the bytes [header | payload] of the pool's slot, with the slot's
own fields (state, generation) as COMMITTED and 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

Outcome = Literal["hit", "miss", "retry", "away"]


class ChunkId(msgspec.Struct, frozen=True, array_like=True):
    """What a tier stores under: the cache group's index and the chain key at the chunk's end."""

    group: int
    key: bytes


class Query(msgspec.Struct, frozen=True, array_like=True):
    """Is this chunk there? If not, does another child of `parent` begin with the same tokens?

    `tokens` (u32 LE) are those of the wanted chunk; a tier that keeps a manifest of parents answers with
    the child that shares the most whole units, others answer for the exact key alone. `first` is the chain's
    key after the first unit: equal tokens aren't enough, since a chunk's `extra` is part of its key. Empty
    stands for a chunk without `extra`. With `whole` a child serves only where all of its tokens are the query's:
    a recurrent state is of no use before its end.
    """

    group: int
    key: bytes
    parent: bytes
    tokens: bytes
    first: bytes = b""
    whole: bool = False


class LookupResult(msgspec.Struct, frozen=True, array_like=True):
    """Answer to one Query. `retry`: not known yet, ask again. `away`: the tier can't say, and won't soon; nobody waits
    for it, but unlike after a `miss` it may have the chunk. On a hit, `key` names the stored chunk, `matched` how many
    of the query's tokens it serves (a multiple of the unit), `tokens` how many it has, `length` its bytes with the
    header. One that isn't `sure` may be less than the tier has."""

    outcome: Outcome
    key: bytes = b""
    matched: int = 0
    tokens: int = 0
    length: int = 0
    sure: bool = True


class StoreJob(msgspec.Struct, frozen=True, array_like=True):
    """Copy [offset, offset + length) of an extent, header included, to the tier under `chunk`.

    The daemon keeps the slot alive until the job is reported finished. `replaces` names a shorter chunk that
    may be removed once this one is stored. A `cold` chunk goes first when room is needed.
    """

    id: int
    chunk: ChunkId
    parent: bytes
    extent: int
    offset: int
    length: int
    replaces: bytes = b""
    cold: bool = False


class LoadJob(msgspec.Struct, frozen=True, array_like=True):
    """Read a chunk, verify all of it, and leave its payload at `payload_offset` of the extent.

    The header isn't written into the pool: it comes back in the result, and the daemon publishes it.
    `capacity` bounds the payload. `deadline_s` is relative to submission; a job that misses it fails.
    """

    id: int
    chunk: ChunkId
    extent: int
    payload_offset: int
    capacity: int
    deadline_s: float


class JobResult(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of one job. `header` is a verified chunk's header block (loads only). `reason` of a failure is
    one of: missing, corrupt, full, quota, io, late, dropped."""

    id: int
    ok: bool
    reason: str = ""
    header: bytes = b""
    length: int = 0


class TierChange(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that came into the tier or left it, told after it is true.

    `header` is the chunk's header block (tokens, parent and namespace are in it), also for removals where
    the tier still knows it; empty if not. `reason` of a removal: evicted, quota, corrupt, cleared, replaced.
    """

    chunk: ChunkId
    stored: bool
    reason: str = ""
    header: bytes = b""


class ClearScope(msgspec.Struct, frozen=True, array_like=True):
    """What to forget: of a namespace (all if empty), of a tenant (None: of all), and if there is a `parent` only what
    follows it: the children of that key in all of `groups`, at token `start`, which begin with `tokens` and have this
    `extra`, and everything that goes on from them."""

    namespace: bytes = b""
    tenant: str | None = None
    groups: int = 0
    parent: bytes = b""
    start: int = 0
    tokens: bytes = b""
    extra: bytes = b""


class TierStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters and gauges of a tier by name; `info` for people."""

    values: dict[str, float]
    info: dict[str, str]


class SecondaryTier(ABC):
    """One secondary tier. See the module's text for what its methods owe."""

    name: str

    @abstractmethod
    def attach_extent(self, extent: int, memory: memoryview) -> None:
        """Jobs may name this extent from now on. `memory` stays valid and writable until `close`."""

    def set_waker(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever there is something new for `get_finished_jobs`,
        `take_changes` or a lookup that was answered `retry`. A tier that never calls it is asked after
        every message and then only every 20 ms while jobs or lookups are open."""

    def note_namespace(self, namespace: bytes, encoded: bytes) -> None:
        """Remember what the namespace of this id is, for listings and checks. By default ignored."""

    @abstractmethod
    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        """One result a query. Never blocks on a device."""

    @abstractmethod
    def submit_store(self, job: StoreJob) -> None:
        """Queue a store. A full queue finishes the job at once with reason `dropped`."""

    @abstractmethod
    def submit_load(self, job: LoadJob) -> None:
        """Queue a load. Loads and stores never wait for each other's queue."""

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have finished since the last call, each exactly once."""

    @abstractmethod
    def take_changes(self) -> Iterable[TierChange]:
        """Arrivals and removals since the last call, in the order in which they became true."""

    @abstractmethod
    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        """Remove chunks (a clear, a replacement, damage). Unknown ones are ignored."""

    @abstractmethod
    def clear(self, namespace: bytes) -> int:
        """Remove everything of a namespace (all if empty); returns how many chunks."""

    def clear_scope(self, scope: ClearScope) -> int | None:
        """Remove at least what the scope covers, of that namespace alone; how many chunks. None: this tier can't
        tell which chunks are meant, nothing was removed. By default it knows whole namespaces only."""
        if scope.tenant is None and not scope.parent:
            return self.clear(scope.namespace)
        return None

    def clear_steps(self, scope: ClearScope) -> Iterator[int | None] | None:
        """`clear_scope` for a tier that may have very many chunks: how many left sight with each step, and all have
        after the last. None of a step: there is something to wait for. Between two steps the tier is given other work.
        Steps that aren't taken to their end are begun anew by the next process. By default there is one."""
        count = self.clear_scope(scope)
        return None if count is None else iter((count,))

    @abstractmethod
    def statistics(self) -> TierStats:
        """Present figures; `bytes`, `bytes_quota`, `chunks`, `queue_bytes` are always among them."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is being written, release what is held. May block for a short while."""
