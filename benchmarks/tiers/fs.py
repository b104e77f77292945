"""The file tier through its own process, against raw O_DIRECT files of the same sizes in the same run.

    python -m benchmarks.tiers.fs [--directory DIR] [--threads 1,2,4,8] [--direct] [--lmcache PATH]

Store and load move whole chunks between a pool in shared memory and files: one process hop, header, granule
checksums (verified on every load), manifest, atomic naming. The limit writes and reads files with pwritev and
preadv from the same memory, in as many threads, and does nothing else. Both take turns, so the ratio is the median of
the rounds' ratios. With `--lmcache` its own benchmark of its file adapter runs in between, in the same directory,
with O_DIRECT and the same sizes.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Measure, Report, median, parser
from forebay.kvstore.header import ChunkHeader, SlotState, encode_header, granule_checksums
from forebay.kvstore.identity import chain, pack_tokens
from forebay.tiers.base import ChunkId, JobResult, LoadJob, Query, StoreJob
from forebay.tiers.host import HostLimits, TierHost
from forebay.tiers.messages import OptionValue

SIZES = {"1 MiB": 1 << 20, "4 MiB": 4 << 20}
WORKING_SET = 192 << 20
ROUNDS = 5
WRITERS, READERS = 2, 4
STORE_TARGET, LOAD_TARGET = 0.8, 0.95
PEER_KEYS = 32
DIRECT_SIZES = (32 << 10, 64 << 10, 256 << 10, 1 << 20)
TOKENS = 256
LOOKUP_KEYS = 1024
LOOKUP_ROUNDS = 50
HEADER = 4096


@dataclass(frozen=True)
class Chunk:
    """A chunk in the pool: where its slot is, and what a lookup asks."""

    id: ChunkId
    offset: int
    length: int
    query: Query


class Pool:
    """One extent, cut into slots of one size that all hold a chunk."""

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("benchmark")
        os.posix_fallocate(self.descriptor, 0, WORKING_SET)
        self.memory = memoryview(mmap.mmap(self.descriptor, WORKING_SET))
        self.size = size

    def fill(self, seed: int) -> list[Chunk]:
        """New chunks in all slots; only their tokens, and so their keys, differ between seeds."""
        chunks = []
        for number, offset in enumerate(range(0, WORKING_SET, self.size)):
            payload = self.memory[offset + HEADER : offset + self.size]
            payload[:8] = (seed << 32 | number).to_bytes(8, "little")
            tokens = pack_tokens([seed * 10_000 + number] * TOKENS)
            parent = b"p" * 32
            length = len(payload) // 256 * 256
            sums = granule_checksums(payload[:length], length // (TOKENS // 16))
            key = chain(parent, tokens)[-1]
            header = ChunkHeader(b"n" * 32, 0, key, parent, 0, tokens, "", b"", length, sums)
            block = encode_header(header, state=SlotState.COMMITTED, generation=1)
            assert len(block) == HEADER
            self.memory[offset : offset + HEADER] = block
            chunks.append(Chunk(ChunkId(0, key), offset, HEADER + length, Query(0, key, parent, tokens)))
        return chunks


def gigabytes_per_s(work: Callable[[], object]) -> float:
    """Speed of one pass over the working set."""
    began = time.perf_counter()
    work()
    return WORKING_SET / (time.perf_counter() - began) / 1e9


@dataclass(frozen=True)
class Threads:
    """How many write and how many read, ours and the limit's alike."""

    write: int = WRITERS
    read: int = READERS


class Raw:
    """Files and nothing else."""

    def __init__(self, folder: Path, pool: Pool, threads: Threads) -> None:
        self.folder = folder
        self.threads = threads
        self.pool = pool
        folder.mkdir()

    def _write(self, offset: int) -> None:
        name = self.folder / f"{offset}"
        descriptor = os.open(f"{name}.tmp", os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        slot = self.pool.memory[offset : offset + self.pool.size]
        assert os.pwritev(descriptor, [slot[:HEADER], slot[HEADER:]], 0) == self.pool.size
        os.close(descriptor)
        os.rename(f"{name}.tmp", name)

    def _read(self, offset: int) -> None:
        descriptor = os.open(self.folder / f"{offset}", os.O_RDONLY | os.O_DIRECT)
        slot = self.pool.memory[offset : offset + self.pool.size]
        assert os.preadv(descriptor, [slot[:HEADER], slot[HEADER:]], 0) == self.pool.size
        os.close(descriptor)

    def _all(self, threads: int, one: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(threads) as executor:
            for _ in executor.map(one, range(0, WORKING_SET, self.pool.size)):
                pass

    def write(self) -> None:
        """Every slot into a new file."""
        self._all(self.threads.write, self._write)

    def read(self) -> None:
        """Every file into its slot."""
        self._all(self.threads.read, self._read)

    def remove(self) -> None:
        """Make room for the next round."""
        for path in self.folder.iterdir():
            path.unlink()


class Ours:
    """The tier behind its host. The loop runs only while something is being waited for."""

    def __init__(self, folder: Path, pool: Pool, threads: Threads, odirect: str = "auto") -> None:
        self.pool = pool
        self.folder = folder
        self._threads, self._odirect = threads, odirect
        self._loop = asyncio.new_event_loop()
        self._results: list[JobResult] = []
        self._jobs = 0
        self._loop.run_until_complete(self._start(folder))

    async def _start(self, folder: Path) -> None:
        options: dict[str, OptionValue] = {
            "directory": str(folder), "quota_bytes": 8 * WORKING_SET, "write_queue_bytes": 2 * WORKING_SET,
            "read_queue_bytes": 2 * WORKING_SET, "read_threads": self._threads.read,
            "write_threads": self._threads.write, "odirect": self._odirect,
        }  # fmt: skip
        limits = HostLimits(store_queue_bytes=2 * WORKING_SET, load_queue_bytes=2 * WORKING_SET)
        self.host = TierHost(
            "fs", "fs", options, limits=limits, on_finished=self._results.extend, on_changes=lambda changes: None
        )
        await self.host.start({0: self.pool.descriptor})

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
        """Every slot to the tier."""
        self.host.store([StoreJob(self._next(), c.id, b"p" * 32, 0, c.offset, c.length) for c in chunks])
        self._finish(len(chunks))

    def load(self, chunks: Sequence[Chunk]) -> None:
        """Every chunk from the tier into its slot, verified."""
        jobs = [LoadJob(self._next(), c.id, 0, c.offset + HEADER, c.length - HEADER, 60.0) for c in chunks]
        self.host.load(jobs)
        self._finish(len(chunks))

    def clear(self) -> None:
        """Make room for the next round, on the disk too."""

        async def empty() -> None:
            await self.host.clear(b"")
            while (await self.host.stats()).values["bytes_leaving"]:
                await asyncio.sleep(0.01)

        self._loop.run_until_complete(empty())

    def lookup_us(self, queries: Sequence[Query]) -> float:
        """Microseconds a key for one batch, there and back."""
        began = time.perf_counter()
        self._loop.run_until_complete(self.host.lookup(queries, 10.0))
        return (time.perf_counter() - began) / len(queries) * 1e6

    def close(self) -> None:
        """Stop the process."""
        self._loop.run_until_complete(self.host.stop())
        self._loop.close()


@dataclass(frozen=True)
class Peer:
    """What LMCache's benchmark of its file adapter says: GB/s, and microseconds a key."""

    store: float
    load: float
    lookup: float


def lmcache(program: Path, folder: Path, size: int) -> Peer:
    """Run it once: as many bytes as one of our rounds, in batches of its usual size."""
    folder.mkdir()
    written = folder.with_suffix(".json")
    adapter = {"type": "fs", "base_path": str(folder), "use_odirect": True}
    command = [
        str(program), "bench", "l2", "--l2-adapter", json.dumps(adapter), "--num-keys", str(PEER_KEYS),
        "--data-size-kb", str(size >> 10), "--l1-align-bytes", "4096", "--rounds",
        str(max(1, WORKING_SET // size // PEER_KEYS)), "--lookup-max-hit-rate", "1.0", "--format", "json",
        "--output", str(written), "-q",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        return _peer(json.loads(written.read_text()))
    finally:
        shutil.rmtree(folder)


def _peer(found: dict[str, dict[str, dict[str, float | str]]]) -> Peer:
    by_name = {entry["operation"]: entry for entry in found["metrics"].values() if "operation" in entry}
    store, load = (float(by_name[name]["throughput_avg_mbps"]) * (1 << 20) / 1e9 for name in ("Store", "Load"))
    return Peer(store, load, float(by_name["Lookup"]["latency_per_key_ms"]) * 1e3)


class Rounds:
    """Speeds of each round by name."""

    def __init__(self) -> None:
        self.speeds: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """Note a figure of the present round."""
        self.speeds.setdefault(name, []).append(value)

    def middle(self, name: str) -> float:
        """The median of all rounds."""
        return median(self.speeds[name])

    def ratio(self, name: str, other: str) -> float:
        """The median of the rounds' ratios."""
        return median([one / two for one, two in zip(self.speeds[name], self.speeds[other], strict=True)])


def run_rounds(folder: Path, size: int, threads: Threads, program: Path | None) -> Rounds:
    """Everything in turns, the other way round every second time."""
    pool, rounds = Pool(size), Rounds()
    raw, ours = Raw(folder / f"raw-{size}", pool, threads), Ours(folder / f"ours-{size}", pool, threads)
    try:
        for number in range(ROUNDS):
            _round(rounds, number, pool, raw, ours)
            if program is not None:
                peer = lmcache(program, folder / f"peer-{size}", size)
                for name, value in (("peer store", peer.store), ("peer load", peer.load), ("peer lookup", peer.lookup)):
                    rounds.add(name, value)
    finally:
        ours.close()
        shutil.rmtree(raw.folder)
    return rounds


def _round(rounds: Rounds, number: int, pool: Pool, raw: Raw, ours: Ours) -> None:
    chunks = pool.fill(number)
    order: list[tuple[str, Callable[[], None]]] = [
        ("raw write", raw.write), ("store", lambda: ours.store(chunks)),
        ("raw read", raw.read), ("load", lambda: ours.load(chunks)),
    ]  # fmt: skip
    if number % 2:
        order = [order[1], order[0], order[3], order[2]]
    for key, work in order:
        rounds.add(key, gigabytes_per_s(work))
    queries = [chunk.query for chunk in chunks]
    queries = (queries * (LOOKUP_KEYS // len(queries) + 1))[:LOOKUP_KEYS]
    rounds.add("lookup", median([ours.lookup_us(queries) for _ in range(LOOKUP_ROUNDS)]))
    absent = [Query(0, os.urandom(32), os.urandom(32), query.tokens) for query in queries]
    rounds.add("lookup misses", median([ours.lookup_us(absent) for _ in range(LOOKUP_ROUNDS)]))
    raw.remove()
    ours.clear()


def measure(report: Report, folder: Path, name: str, size: int, program: Path | None = None) -> None:
    """Store, load and look up chunks of one size, beside the limit and the peer."""
    found = run_rounds(folder, size, Threads(), program)
    for key, limit, target in (("store", "raw write", STORE_TARGET), ("load", "raw read", LOAD_TARGET)):
        ratio = found.ratio(key, limit)
        report.add(
            Measure(
                f"{key}, {name}", found.middle(key), "GB/s", limit=found.middle(limit), ratio=ratio,
                target=f">= {target}", ok=ratio >= target,
            )
        )  # fmt: skip
        if program is not None:
            beats = found.ratio(key, f"peer {key}")
            report.add(
                Measure(
                    f"{key}, {name}, of the peer's", found.middle(key), "GB/s", peer=found.middle(f"peer {key}"),
                    ratio=beats, target="> 1", ok=beats > 1,
                )
            )  # fmt: skip
    if program is None:
        report.add(Measure(f"lookup, hits, {name}", found.middle("lookup"), "us/key"))
    else:
        less = found.ratio("lookup", "peer lookup")
        report.add(
            Measure(
                f"lookup, hits, {name}", found.middle("lookup"), "us/key", peer=found.middle("peer lookup"),
                ratio=less, target="< 1", ok=less < 1,
            )
        )  # fmt: skip
    report.add(Measure(f"lookup, misses, {name}", found.middle("lookup misses"), "us/key"))


def measure_threads(report: Report, folder: Path, counts: Sequence[int]) -> None:
    """The same with as many threads, to see where more of them gain nothing."""
    for name, size in SIZES.items():
        for count in counts:
            found = run_rounds(folder, size, Threads(count, count), None)
            for key, limit in (("store", "raw write"), ("load", "raw read")):
                report.add(
                    Measure(
                        f"{key}, {name}, {count} threads", found.middle(key), "GB/s", limit=found.middle(limit),
                        ratio=found.ratio(key, limit),
                    )
                )  # fmt: skip


def measure_direct(report: Report, folder: Path) -> None:
    """Past the page cache and through it, by size. Before each load the files are out of the cache, as those of a cache
    on disk mostly are."""
    for size in DIRECT_SIZES:
        pool = Pool(size)
        tiers = {mode: Ours(folder / f"direct-{mode}-{size}", pool, Threads(), mode) for mode in ("on", "off")}
        rounds = Rounds()
        for number in range(ROUNDS):
            chunks = pool.fill(number)
            for mode in ("on", "off") if number % 2 else ("off", "on"):
                ours = tiers[mode]
                rounds.add(f"store {mode}", gigabytes_per_s(lambda ours=ours, c=chunks: ours.store(c)))  # type: ignore[misc]
                drop_from_cache(ours.folder)
                rounds.add(f"load {mode}", gigabytes_per_s(lambda ours=ours, c=chunks: ours.load(c)))  # type: ignore[misc]
                ours.clear()
        for ours in tiers.values():
            ours.close()
        for key in ("store", "load"):
            report.add(
                Measure(
                    f"{key}, {size >> 10} KiB, O_DIRECT beside the page cache", rounds.middle(f"{key} on"), "GB/s",
                    limit=rounds.middle(f"{key} off"), ratio=rounds.ratio(f"{key} on", f"{key} off"),
                )
            )  # fmt: skip


def drop_from_cache(folder: Path) -> None:
    """Write all files to the disk and have the kernel forget their pages."""
    for path in folder.rglob("*-00"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> int:
    """Run all."""
    options = parser(__doc__)
    options.add_argument("--directory", type=Path, help="where to write (default: a new folder in the temporary one)")
    options.add_argument("--threads", default="", help="measure these counts of threads, too: 1,2,4,8")
    options.add_argument("--direct", action="store_true", help="measure from which size on O_DIRECT pays, too")
    options.add_argument("--lmcache", type=Path, help="its program, to run beside")
    arguments = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="forebay-bench-", dir=arguments.directory))
    report = Report("fs: file tier against raw O_DIRECT files")
    try:
        for name, size in SIZES.items():
            measure(report, folder, name, size, arguments.lmcache)
        if arguments.threads:
            measure_threads(report, folder, [int(count) for count in arguments.threads.split(",")])
        if arguments.direct:
            measure_direct(report, folder)
    finally:
        shutil.rmtree(folder)
    return report.print(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
