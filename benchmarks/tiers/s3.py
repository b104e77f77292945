"""The S3 tier behind its host, beside raw boto3 with 8 threads, on the same SeaweedFS.

    python -m benchmarks.tiers.s3 [--rounds 5] [--json]

Chunks of 4 MiB have an object of their own; chunks of 16 KiB are packed by the tier, while raw boto3 puts and gets an
object a chunk. The raw side moves bytes between memory and the server and does nothing else: no pool, no checksum, no
account. The tier verifies what it loads. Both take turns, each with the server's full attention; client and server
share the machine's cores. Lookups of chunks that another daemon has stored ask the bucket once a chunk, raw ones by
HEAD.
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
from forebay.testing.buckets import SeaweedFS, Server
from forebay.tiers.base import ChunkId, JobResult, LoadJob, Query, StoreJob
from forebay.tiers.host import HostLimits, TierHost
from forebay.tiers.messages import OptionValue

BUCKET = "benchmark"
HEADER = 4096
TOKENS = 256
THREADS = 8
TARGET = 0.8


@dataclass(frozen=True)
class Case:
    """Chunks of one size: `size` with the header, `count` of them, `packed` if the tier may put several together."""

    name: str
    size: int
    count: int
    packed: bool

    @property
    def bytes(self) -> int:
        return self.size * self.count


CASES = (
    Case("4 MiB", 4 << 20, 32, False),
    Case("16 KiB packed", 16 << 10, 1024, True),
    Case("16 KiB", 16 << 10, 1024, False),
)


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
    """boto3 and nothing else."""

    def __init__(self, server: Server, pool: Pool) -> None:
        self._client: Any = server.client()
        self._pool = pool
        self._executor = ThreadPoolExecutor(THREADS)

    def _put(self, number: int) -> None:
        at, size = number * self._pool.case.size, self._pool.case.size
        body = bytes(self._pool.memory[at : at + size])
        self._client.put_object(Bucket=BUCKET, Key=f"raw/{size}/{number}", Body=body)

    def _get(self, number: int) -> None:
        size = self._pool.case.size
        body = self._client.get_object(Bucket=BUCKET, Key=f"raw/{size}/{number}")["Body"].read()
        assert len(body) == size

    def _head(self, number: int) -> None:
        self._client.head_object(Bucket=BUCKET, Key=f"raw/{self._pool.case.size}/{number}")

    def _all(self, one: Callable[[int], None]) -> None:
        for _ in self._executor.map(one, range(self._pool.case.count)):
            pass

    def put(self) -> None:
        """Every slot into an object."""
        self._all(self._put)

    def get(self) -> None:
        """Every object."""
        self._all(self._get)

    def head(self) -> None:
        """Is every object there?"""
        self._all(self._head)


class Ours:
    """The tier behind its host. The loop runs only while something is being waited for."""

    def __init__(self, server: Server, pool: Pool, prefix: str) -> None:
        self._pool = pool
        self._loop = asyncio.new_event_loop()
        self._results: list[JobResult] = []
        self._jobs = 0
        self._loop.run_until_complete(self._start(server, prefix))

    async def _start(self, server: Server, prefix: str) -> None:
        case = self._pool.case
        options: dict[str, OptionValue] = {
            "bucket": BUCKET, "prefix": prefix, "endpoint_url": server.endpoint, "addressing": "path",
            "write_queue_bytes": 2 * case.bytes, "read_queue_bytes": 2 * case.bytes, "refresh_s": 0.0,
            "pack_below_bytes": case.size + 1 if case.packed else 0,
        }  # fmt: skip
        limits = HostLimits(store_queue_bytes=2 * case.bytes, load_queue_bytes=2 * case.bytes)
        self.host = TierHost(
            "s3", "s3", options, limits=limits, on_finished=self._results.extend, on_changes=lambda changes: None
        )
        await self.host.start({0: self._pool.descriptor})

    def _next(self) -> int:
        self._jobs += 1
        return self._jobs

    def _finish(self, count: int) -> None:
        async def wait() -> None:
            while len(self._results) < count:
                await asyncio.sleep(0.001)

        self._loop.run_until_complete(wait())
        assert all(result.ok for result in self._results), {result.reason for result in self._results}
        self._results.clear()

    def store(self, chunks: Sequence[Chunk]) -> None:
        """Every slot to the bucket."""
        self.host.store([StoreJob(self._next(), c.id, b"p" * 32, 0, c.offset, c.length) for c in chunks])
        self._finish(len(chunks))

    def load(self, chunks: Sequence[Chunk]) -> None:
        """Every chunk from the bucket into its slot, verified."""
        self.host.load([LoadJob(self._next(), c.id, 0, c.offset + HEADER, c.length - HEADER, 60.0) for c in chunks])
        self._finish(len(chunks))

    def lookup(self, chunks: Sequence[Chunk]) -> None:
        """Is every chunk there?"""
        found = self._loop.run_until_complete(self.host.lookup([chunk.query for chunk in chunks], 30.0))
        assert all(result.outcome == "hit" for result in found)

    def clear(self) -> None:
        """Make room for the next round."""

        async def empty() -> None:
            await self.host.clear(b"")
            values = (await self.host.stats()).values
            while values["bytes_leaving"] or values["clears_open"]:
                await asyncio.sleep(0.02)
                values = (await self.host.stats()).values

        self._loop.run_until_complete(empty())

    def close(self) -> None:
        """Stop the process."""
        self._loop.run_until_complete(self.host.stop())
        self._loop.close()


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(report: Report, server: Server, case: Case, rounds: int) -> None:
    """Store, load and look up chunks of one size."""
    pool = Pool(case)
    raw, ours = Raw(server, pool), Ours(server, pool, f"ours-{case.size}-{case.packed}")
    took: dict[str, list[float]] = {key: [] for key in ("raw put", "store", "raw get", "load", "lookup")}
    for round_ in range(rounds + 1):
        chunks = pool.fill(round_)
        order: list[tuple[str, Callable[[], None]]] = [
            ("raw put", raw.put), ("store", lambda c=chunks: ours.store(c)),  # type: ignore[misc]
            ("raw get", raw.get), ("load", lambda c=chunks: ours.load(c)),  # type: ignore[misc]
            ("lookup", lambda c=chunks: ours.lookup(c)),  # type: ignore[misc]
        ]  # fmt: skip
        if round_ % 2:
            order = [order[1], order[0], order[3], order[2], order[4]]
        for key, work in order:
            spent = seconds(work)
            if round_:  # the first round opens connections and volumes
                took[key].append(spent)
        if round_ < rounds:
            ours.clear()
    for key, limit in (("store", "raw put"), ("load", "raw get")):
        _add(report, f"{key}, {case.name}", case, median(took[key]), median(took[limit]))
    report.add(Measure(f"lookup, own, {case.name}", median(took["lookup"]) / case.count * 1e6, "us/key"))
    if not case.packed:
        _others(report, server, raw, pool, chunks)
    ours.close()


def _add(report: Report, name: str, case: Case, ours: float, raw: float) -> None:
    unit, amount = ("MB/s", case.bytes / 1e6) if case.size >= 1 << 20 else ("chunks/s", case.count)
    ratio = raw / ours
    report.add(
        Measure(name, amount / ours, unit, limit=amount / raw, ratio=ratio, target=f">= {TARGET}", ok=ratio >= TARGET)
    )


def _others(report: Report, server: Server, raw: Raw, pool: Pool, chunks: Sequence[Chunk]) -> None:
    """Lookups of what another daemon has stored: each asks the bucket, up to a number a lookup."""
    some = chunks[:256]
    mine, heads = [], []
    for _ in range(3):
        other = Ours(server, pool, f"ours-{pool.case.size}-{pool.case.packed}")
        mine.append(len(some) / seconds(lambda: other.lookup(some)))  # noqa: B023
        other.close()
        heads.append(pool.case.count / seconds(raw.head))
    value, limit = median(mine), median(heads)
    report.add(Measure(f"lookup, another's, {pool.case.name}", value, "keys/s", limit=limit, ratio=value / limit))


def main() -> int:
    """Run all."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    arguments = options.parse_args()
    report = Report("S3 tier against raw boto3, 8 threads")
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder, SeaweedFS(Path(folder)) as server:
        os.environ.update(server.environment)
        server.make_bucket(BUCKET)
        for case in CASES:
            measure(report, server, case, arguments.rounds)
    return report.print(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
