"""The Mooncake tier behind its host, beside the library's own batch_put_from and batch_get_into, on the same pool.

    python -m benchmarks.tiers.mooncake [--rounds 5] [--json]

Master and one lending host are processes of their own on this machine, the transfers go over TCP. The raw side moves
the same pieces between the same memory and the pool, in as many threads and as large batches, and does nothing else:
no other process, no header, no checksum, no account, and into the slots at once. The tier verifies what it loads, and
copies it once. Both take turns.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Measure, Report, median, parser
from forebay.kvstore.header import ChunkHeader, SlotState, encode_header, granule_checksums
from forebay.kvstore.identity import chain, pack_tokens
from forebay.testing.mooncake import Master, Member, why_not
from forebay.tiers.base import ChunkId, ClearScope, JobResult, LoadJob, Query, StoreJob
from forebay.tiers.host import HostLimits, TierHost
from forebay.tiers.messages import OptionValue
from forebay.tiers.mooncake.remote import span_of
from forebay.tiers.mooncake.tier import BATCH_BYTES, BATCH_JOBS

HEADER = 4096
TOKENS = 256
THREADS = 2
TARGET = 0.8
SEGMENT_BYTES = 1 << 30
LOOKUP_ROUNDS = 20


@dataclass(frozen=True)
class Case:
    """Chunks of one size: `size` with the header, `count` of them. `judged`: the target is meant for them."""

    name: str
    size: int
    count: int
    judged: bool = True

    @property
    def bytes(self) -> int:
        return self.size * self.count


CASES = (Case("4 MiB", 4 << 20, 32), Case("1 MiB", 1 << 20, 128), Case("64 KiB", 64 << 10, 1024, judged=False))


@dataclass(frozen=True)
class Chunk:
    """A chunk in the pool: where its slot is, and what a lookup asks."""

    id: ChunkId
    offset: int
    length: int
    query: Query


class Pool:
    """One extent, cut into slots of one size that all hold a chunk."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.descriptor = os.memfd_create("benchmark")
        os.posix_fallocate(self.descriptor, 0, case.bytes)
        self.memory = memoryview(mmap.mmap(self.descriptor, case.bytes))
        self.memory[:] = os.urandom(1 << 20) * (case.bytes >> 20)

    def fill(self, seed: int) -> list[Chunk]:
        """New chunks in all slots."""
        return [self._chunk(seed, number) for number in range(self.case.count)]

    def _chunk(self, seed: int, number: int) -> Chunk:
        offset, length = number * self.case.size, self.case.size - HEADER
        payload = self.memory[offset + HEADER : offset + self.case.size]
        payload[:8] = (seed << 32 | number).to_bytes(8, "little")
        tokens, parent = pack_tokens([seed * 100_000 + number] * TOKENS), b"p" * 32
        sums = granule_checksums(payload, length // (TOKENS // 16))
        key = chain(parent, tokens)[-1]
        header = ChunkHeader(b"n" * 32, 0, key, parent, 0, tokens, "", b"", length, sums)
        self.memory[offset : offset + HEADER] = encode_header(header, state=SlotState.COMMITTED, generation=1)
        return Chunk(ChunkId(0, key), offset, self.case.size, Query(0, key, parent, tokens))


class Raw:
    """The library and nothing else."""

    def __init__(self, master: Master) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        assert self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", str(master.address)) == 0
        self._executor = ThreadPoolExecutor(THREADS)

    def take(self, pool: Pool) -> None:
        """Use this memory."""
        self._case = pool.case
        self._address = span_of(pool.memory).address
        assert self._store.register_buffer(self._address, pool.case.bytes) == 0

    def leave(self) -> None:
        """Use it no more."""
        assert self._store.unregister_buffer(self._address) == 0

    def _all(self, call: Callable[..., Sequence[int]], accept: Callable[[int], bool]) -> None:
        size, count = self._case.size, self._case.count
        step = max(1, min(BATCH_BYTES // size, BATCH_JOBS, count // THREADS))

        def one(first: int) -> None:
            some = range(first, min(first + step, count))
            keys = [f"raw/{size}/{number}" for number in some]
            codes = call(keys, [self._address + number * size for number in some], [size] * len(keys))
            assert all(accept(code) for code in codes), codes

        for _ in self._executor.map(one, range(0, count, step)):
            pass

    def put(self) -> None:
        """Every slot into the pool."""
        self._all(self._store.batch_put_from, lambda code: code == 0)

    def get(self) -> None:
        """Every slot out of the pool."""
        self._all(self._store.batch_get_into, lambda code: code == self._case.size)

    def exist(self) -> None:
        """Is everything there?"""
        codes = self._store.batch_is_exist([f"raw/{self._case.size}/{number}" for number in range(self._case.count)])
        assert set(codes) == {1}

    def clear(self) -> None:
        """Make room for the next round."""
        assert self._store.remove_by_regex("^raw/", True) >= 0


class Ours:
    """The tier behind its host. The loop runs only while something is being waited for."""

    def __init__(self, master: Master, pool: Pool) -> None:
        self._pool = pool
        self._loop = asyncio.new_event_loop()
        self._results: list[JobResult] = []
        self._jobs = 0
        self._loop.run_until_complete(self._start(master))

    async def _start(self, master: Master) -> None:
        case = self._pool.case
        options: dict[str, OptionValue] = {
            "master": str(master.address), "trusted_network": True, "segment_bytes": 0, "read_threads": THREADS,
            "write_threads": THREADS, "write_queue_bytes": 2 * case.bytes, "read_queue_bytes": 2 * case.bytes,
        }  # fmt: skip
        limits = HostLimits(store_queue_bytes=2 * case.bytes, load_queue_bytes=2 * case.bytes)
        self.host = TierHost(
            "pool", "mooncake", options, limits=limits, on_finished=self._results.extend,
            on_changes=lambda changes: None,
        )  # fmt: skip
        await self.host.start({0: self._pool.descriptor})

    def _next(self) -> int:
        self._jobs += 1
        return self._jobs

    def _finish(self, count: int) -> None:
        async def wait() -> None:
            while len(self._results) < count:
                await asyncio.sleep(0.0005)

        self._loop.run_until_complete(wait())
        assert all(result.ok for result in self._results), {result.reason for result in self._results}
        self._results.clear()

    def store(self, chunks: Sequence[Chunk]) -> None:
        """Every slot into the pool."""
        self.host.store([StoreJob(self._next(), c.id, b"p" * 32, 0, c.offset, c.length) for c in chunks])
        self._finish(len(chunks))

    def load(self, chunks: Sequence[Chunk]) -> None:
        """Every chunk out of the pool into its slot, verified."""
        self.host.load([LoadJob(self._next(), c.id, 0, c.offset + HEADER, c.length - HEADER, 60.0) for c in chunks])
        self._finish(len(chunks))

    def lookup(self, queries: Sequence[Query], outcome: str) -> None:
        """Ask for all of them."""
        found = self._loop.run_until_complete(self.host.lookup(queries, 30.0))
        assert {result.outcome for result in found} == {outcome}

    def clear(self) -> None:
        """Make room for the next round."""
        assert self._loop.run_until_complete(self.host.clear_scope(ClearScope())) is not None

    def close(self) -> None:
        """Stop the process."""
        self._loop.run_until_complete(self.host.stop())
        self._loop.close()


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(report: Report, master: Master, raw: Raw, case: Case, rounds: int) -> None:
    """Store, load and look up chunks of one size."""
    pool = Pool(case)
    raw.take(pool)
    ours = Ours(master, pool)
    took: dict[str, list[float]] = {key: [] for key in ("raw put", "store", "raw get", "load")}
    for round_ in range(rounds + 1):
        chunks = pool.fill(round_)
        order: list[tuple[str, Callable[[], None]]] = [
            ("raw put", raw.put), ("store", lambda c=chunks: ours.store(c)),  # type: ignore[misc]
            ("raw get", raw.get), ("load", lambda c=chunks: ours.load(c)),  # type: ignore[misc]
        ]  # fmt: skip
        if round_ % 2:
            order = [order[1], order[0], order[3], order[2]]
        for key, work in order:
            spent = seconds(work)
            if round_:  # the first round opens connections
                took[key].append(spent)
        if round_ == rounds:
            _lookups(report, raw, ours, chunks, case)
        raw.clear()
        ours.clear()
    raw.leave()
    ours.close()
    for key, limit in (("store", "raw put"), ("load", "raw get")):
        value, best = (case.bytes / median(took[which]) / 1e9 for which in (key, limit))
        ratio = median([r / o for r, o in zip(took[limit], took[key], strict=True)])
        report.add(
            Measure(
                f"{key}, {case.name}", value, "GB/s", limit=best, ratio=ratio,
                target=f">= {TARGET}" if case.judged else "", ok=ratio >= TARGET if case.judged else None,
            )
        )  # fmt: skip


def _lookups(report: Report, raw: Raw, ours: Ours, chunks: Sequence[Chunk], case: Case) -> None:
    exist = median([seconds(raw.exist) for _ in range(LOOKUP_ROUNDS)])
    misses = []
    for _ in range(LOOKUP_ROUNDS):
        absent = [Query(0, os.urandom(32), c.query.parent, c.query.tokens) for c in chunks]
        misses.append(seconds(lambda: ours.lookup(absent, "miss")))  # noqa: B023
    time.sleep(1.2)  # what is known of them is old by then
    hit = seconds(lambda: ours.lookup([chunk.query for chunk in chunks], "hit"))
    unit = 1e6 / case.count
    report.add(Measure(f"lookup, {case.count} misses", median(misses) * unit, "us/key", limit=exist * unit))
    report.add(Measure(f"lookup, {case.count} hits", hit * unit, "us/key", limit=exist * unit))


def main() -> int:
    """Run all."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    arguments = options.parse_args()
    report = Report(f"Mooncake tier against batch_put_from and batch_get_into, {THREADS} threads, TCP")
    if why := why_not():
        print(why)
        return 1
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    with (
        tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder,
        Master(Path(folder), lease_ms=5000, client_ttl_s=30) as master,
        Member(master, SEGMENT_BYTES),
    ):
        raw = Raw(master)
        for case in CASES:
            measure(report, master, raw, case, arguments.rounds)
    return report.print(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
