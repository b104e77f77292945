"""A Forebay tier in one SQLite database: an example of a tier that lives outside of Forebay's own package.

    submit_store, forget, clear -> writer thread -> rows      submit_load -> reader thread -> the pool
    lookup -> an index in memory of what the rows hold

It answers for exact keys. A power cut may cost the database (`synchronous = OFF`), never a wrong byte: each load is
verified.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from forebay.errors import ConfigError, CorruptChunk
from forebay.tiers.base import (
    ChunkId,
    JobResult,
    LoadJob,
    LookupResult,
    Query,
    SecondaryTier,
    StoreJob,
    TierChange,
    TierStats,
)
from forebay.tiers.chunks import checked_slot, stored_header, verify_payload
from forebay.tiers.errors import TierFailed
from forebay.tiers.registry import convert_options

BUSY_S = 5.0
"""How long a write waits for somebody else who has locked the database."""
TABLE = """CREATE TABLE IF NOT EXISTS chunks (grp INTEGER, key BLOB, cold INTEGER, header BLOB, payload BLOB,
           PRIMARY KEY (grp, key))"""


class SqliteOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`quota_bytes` of headers and payloads; `queue_bytes` of what waits to be stored, and as much to be loaded."""

    path: str
    quota_bytes: int = 1 << 30
    queue_bytes: int = 64 << 20


class Row(msgspec.Struct):
    """What the index knows of a stored chunk. `header` is its block, as stored."""

    header: bytes
    namespace: bytes
    tokens: int
    length: int
    cold: bool


class Forget(msgspec.Struct):
    """Chunks that have left the index already; their rows follow."""

    rows: dict[ChunkId, Row | None]
    reason: str


class Worker(threading.Thread):
    """One thread, one connection, one queue bounded in bytes."""

    def __init__(self, path: str, limit: int, act: Callable[[sqlite3.Connection, Any], None]) -> None:
        super().__init__(name=f"sqlite tier: {act.__name__}", daemon=True)
        self._path, self._limit, self._act = path, limit, act
        self._queue: queue.SimpleQueue[tuple[Any, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.bytes = 0
        self.start()

    def put(self, item: object, size: int = 0) -> bool:
        """Queue an item; False if its bytes are over the bound. An empty queue takes any."""
        with self._lock:
            if size and self.bytes and self.bytes + size > self._limit:
                return False
            self.bytes += size
        self._queue.put((item, size))
        return True

    def run(self) -> None:
        database = sqlite3.connect(self._path, isolation_level=None)
        database.execute("PRAGMA synchronous = OFF")
        while (entry := self._queue.get()) is not None:
            try:
                self._act(database, entry[0])
            finally:
                with self._lock:
                    self.bytes -= entry[1]
        database.close()

    def stop(self) -> list[Any]:
        """End after the present item and what is to be removed; returns the jobs that were waiting."""
        waiting = []
        with suppress(queue.Empty):
            while True:
                waiting.append(self._queue.get_nowait())
        for entry in (*(entry for entry in waiting if entry and isinstance(entry[0], Forget)), None):
            self._queue.put(entry)
        self.join(2 * BUSY_S)
        return [entry[0] for entry in waiting if entry and not isinstance(entry[0], Forget)]


class SqliteTier(SecondaryTier):
    """Chunks as rows, with a byte quota; cold ones leave first, then the least recently used."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        self.name = name
        self._options = found = convert_options(name, options, SqliteOptions)
        if not Path(found.path).parent.is_dir():
            raise ConfigError(f"tier {name!r}: the folder of {found.path} isn't there: create it")
        self._wake: Callable[[], None] = lambda: None
        self._extents: dict[int, memoryview] = {}
        self._lock = threading.Lock()  # for everything below; held for moments only
        self._index: OrderedDict[ChunkId, Row] = OrderedDict()
        self._finished: list[JobResult] = []
        self._changes: list[TierChange] = []
        self._counts: Counter[str] = Counter()
        self._bytes = 0
        self._closed = False
        self._read_index(found.path)
        self._writer = Worker(found.path, found.queue_bytes, self._write)
        self._reader = Worker(found.path, found.queue_bytes, self._read)

    def _read_index(self, path: str) -> None:
        database = sqlite3.connect(path, isolation_level=None)
        try:
            database.execute(TABLE)
            for group, key, cold, block, size in database.execute(
                "SELECT grp, key, cold, header, length(payload) FROM chunks ORDER BY rowid"
            ).fetchall():
                try:
                    header = stored_header(block)
                    if (header.group, header.key, header.payload_length) != (group, key, size):
                        raise CorruptChunk("the row holds another chunk than its key says")
                except CorruptChunk:
                    self._counts["corrupt"] += 1
                    database.execute("DELETE FROM chunks WHERE grp = ? AND key = ?", (group, key))
                    continue
                row = Row(block, header.namespace, header.token_count, len(block) + size, bool(cold))
                self._index[ChunkId(group, key)] = row
                self._bytes += row.length
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"tier {self.name!r}: {path} can't be used: {error}; move it away") from error
        finally:
            database.close()

    def attach_extent(self, extent: int, memory: memoryview) -> None:
        self._extents[extent] = memory

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        # Later chunks of a prompt are touched first, so that a chain's front outlives its end.
        with self._lock:
            return [self._find(query) for query in reversed(queries)][::-1]

    def _find(self, query: Query) -> LookupResult:
        row = self._index.get(chunk := ChunkId(query.group, query.key))
        if row is None:
            return LookupResult("miss")
        self._index.move_to_end(chunk)
        return LookupResult("hit", query.key, row.tokens, row.tokens, row.length)

    def submit_store(self, job: StoreJob) -> None:
        if not self._writer.put(job, job.length):
            self._finish(JobResult(job.id, False, "dropped"))

    def submit_load(self, job: LoadJob) -> None:
        if not self._reader.put((job, time.monotonic() + job.deadline_s), job.capacity):
            self._finish(JobResult(job.id, False, "dropped"))

    def _finish(self, result: JobResult, *changes: TierChange) -> None:
        with self._lock:
            self._counts["ok" if result.ok else result.reason] += 1
            self._changes.extend(changes)
            self._finished.append(result)
        self._wake()

    # --- the writer's thread ---------------------------------------------------------------------------

    def _write(self, database: sqlite3.Connection, item: StoreJob | Forget) -> None:
        database.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
        try:
            if isinstance(item, Forget):
                self._remove(database, item.rows, item.reason)
            else:
                self._finish(self._store(database, item))
        except sqlite3.Error as error:
            if isinstance(item, StoreJob):
                self._finish(JobResult(item.id, False, "full" if "full" in str(error) else "io"))
            else:
                time.sleep(0.1)
                self._writer.put(item)  # not yet, but they must go

    def _store(self, database: sqlite3.Connection, job: StoreJob) -> JobResult:
        memory = self._extents[job.extent][job.offset : job.offset + job.length]
        try:
            slot = checked_slot(memory, job)
        except CorruptChunk:
            return JobResult(job.id, False, "corrupt")
        if job.length > self._options.quota_bytes:
            return JobResult(job.id, False, "quota")
        if job.chunk not in self._index:
            if not self._make_room(database, job.length):
                return JobResult(job.id, False, "full")
            database.execute(
                "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?)",
                (job.chunk.group, job.chunk.key, job.cold, slot.block, slot.payload),
            )
            row = Row(slot.block, slot.header.namespace, slot.header.token_count, job.length, job.cold)
            with self._lock:
                self._index[job.chunk] = row
                self._bytes += row.length
                self._changes.append(TierChange(job.chunk, True, "", row.header))
        if job.replaces:
            shorter = ChunkId(job.chunk.group, job.replaces)
            self._remove(database, {shorter: None}, "replaced")
        return JobResult(job.id, True, length=job.length)

    def _make_room(self, database: sqlite3.Connection, length: int) -> bool:
        while self._bytes + length > self._options.quota_bytes:
            with self._lock:
                victim = next((c for c, row in self._index.items() if row.cold), next(iter(self._index), None))
                if victim is None:
                    return False  # what has left sight has yet to leave the database
                self._counts["evicted"] += 1
            self._remove(database, {victim: None}, "evicted")
        return True

    def _remove(self, database: sqlite3.Connection, rows: dict[ChunkId, Row | None], reason: str) -> None:
        for chunk, hidden in rows.items():
            database.execute("DELETE FROM chunks WHERE grp = ? AND key = ?", (chunk.group, chunk.key))
            with self._lock:
                if (row := self._index.pop(chunk, None) or hidden) is not None:
                    self._bytes -= row.length
                    self._changes.append(TierChange(chunk, False, reason, row.header))
        self._wake()

    # --- the reader's thread ---------------------------------------------------------------------------

    def _read(self, database: sqlite3.Connection, item: tuple[LoadJob, float]) -> None:
        job, until = item
        try:
            self._finish(self._load(database, job, until))
        except CorruptChunk:
            self.forget([job.chunk], "corrupt")
            self._finish(JobResult(job.id, False, "corrupt"))
        except sqlite3.Error as error:  # it waits for a lock until the deadline
            self._finish(JobResult(job.id, False, "late" if "locked" in str(error) else "io"))

    def _load(self, database: sqlite3.Connection, job: LoadJob, until: float) -> JobResult:
        left_ms = int((until - time.monotonic()) * 1000)
        if left_ms <= 0:
            return JobResult(job.id, False, "late")
        database.execute(f"PRAGMA busy_timeout = {left_ms}")
        wanted = "SELECT header, payload FROM chunks WHERE grp = ? AND key = ?"
        found = database.execute(wanted, (job.chunk.group, job.chunk.key)).fetchone()
        with self._lock:
            row = self._index.get(job.chunk)
        if found is None or row is None:
            self.forget([job.chunk], "corrupt")  # somebody else has taken the row
            return JobResult(job.id, False, "missing")
        block, payload = found
        header = stored_header(block)
        if (header.group, header.key) != (job.chunk.group, job.chunk.key) or len(payload) > job.capacity:
            raise CorruptChunk("the row holds another chunk than its key says")
        verify_payload(header, memoryview(payload))
        if time.monotonic() >= until:
            return JobResult(job.id, False, "late")
        self._extents[job.extent][job.payload_offset : job.payload_offset + len(payload)] = payload
        with self._lock:
            row.cold = False
            if job.chunk in self._index:
                self._index.move_to_end(job.chunk)
        return JobResult(job.id, True, "", block, len(payload))

    # --- the rest --------------------------------------------------------------------------------------

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if not (self._closed or (self._writer.is_alive() and self._reader.is_alive())):
            raise TierFailed("a thread has ended; its traceback is in the log")  # a new process is started
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def take_changes(self) -> Iterable[TierChange]:
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        with self._lock:  # out of sight at once; also what is still waiting to be stored goes, in its turn
            self._writer.put(Forget({chunk: self._index.pop(chunk, None) for chunk in chunks}, reason))

    def clear(self, namespace: bytes) -> int:
        with self._lock:
            doomed = [chunk for chunk, row in self._index.items() if namespace in (b"", row.namespace)]
        self.forget(doomed, "cleared")
        return len(doomed)

    def statistics(self) -> TierStats:
        with self._lock:
            values = {name: float(count) for name, count in self._counts.items()}
            values |= {"bytes": self._bytes, "bytes_quota": self._options.quota_bytes, "chunks": len(self._index)}
        values |= {"queue_bytes": self._writer.bytes, "load_queue_bytes": self._reader.bytes}
        return TierStats(values, {"path": self._options.path})

    def close(self) -> None:
        self._closed = True
        for job in [*self._writer.stop(), *(job for job, _ in self._reader.stop())]:
            self._finish(JobResult(job.id, False, "dropped"))
