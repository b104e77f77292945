"""What a client that dies with 100,000 pins costs the others, in a store of a million chunks.

    python -m benchmarks.drop_client [--chunks 1000000] [--pins 100000] [--rounds 5]

The store's service answers on a unix socket, in a process of its own, over a table that is as large as said and a pool
without bytes (`benchmarks.synthetic`). One process looks up chains of 100 chunks until it holds the pins, and is killed
with SIGKILL. Another one looks up and releases chains of 100 chunks all the while; its times between the kill and the
last pin's end count. `peer` is the same before anything was dropped, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.report import Measure, Report, parser
from benchmarks.synthetic import EXTENT_BYTES, LINKS, NAMESPACE, chain_keys, chain_tokens, filled_core, key
from forebay.errors import StoreUnavailable
from forebay.kvstore.announce import Announcer
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.collecting import Collector
from forebay.kvstore.core import SLICE_STEPS, StoreCore
from forebay.kvstore.extents import ClientLocks, PoolFiles
from forebay.kvstore.protocol import Found
from forebay.kvstore.server import Connection
from forebay.kvstore.service import StoreService

TARGET_MS = 10.0
FREED_TARGET_MS = 100.0
TICK_S = 1.0
IDLE_S = 3.0
LIMIT = LINKS * 32
LONGEST_SLICE = "benchmark.longest_slice_ms"


class BareClient(AsyncStoreClient):
    """A client of a store whose pool has no bytes."""

    async def map_extents(self) -> None:
        """There is nothing to map."""

    async def find(self, chain: int) -> Found:
        """Look one chain up."""
        return await self.lookup(
            NAMESPACE.id, key(-1), chain_tokens(chain), chain_keys(chain), limit=LIMIT, deadline_ms=0, lease_ms=600_000
        )


def serve(folder: str, chunks: int) -> None:
    """The store's process."""
    uvloop.run(_serve(Path(folder), chunks))


async def _serve(folder: Path, chunks: int) -> None:
    loop = asyncio.get_running_loop()
    core = filled_core(chunks, clock=loop.time)
    boot = os.urandom(16)
    announcer = Announcer(boot, None, None, "benchmark")
    announcer.core = core
    (folder / "clients").mkdir()
    pool = PoolFiles(folder, EXTENT_BYTES)
    service = StoreService(core, pool, ClientLocks(folder / "clients"), boot, announcer)

    def connected() -> Connection:
        connection = Connection(service, core.limits, lambda uid: uid == os.getuid())
        service.connections.add(connection)
        return connection

    _time_slices(core)
    collector = Collector(lambda: core.generation)
    collector.freeze()
    await loop.create_unix_server(connected, str(folder / "store.sock"))
    while True:
        await asyncio.sleep(TICK_S)
        service.tick()
        collector.tick()


def _time_slices(core: StoreCore) -> None:
    """Note the longest slice of long work, in CPU time: what one may add to a lookup, however busy the machine is."""
    tick = core.tick

    def timed(steps: int = SLICE_STEPS) -> bool:
        began = time.thread_time()
        more = tick(steps)
        longest = core.counters.values.get(LONGEST_SLICE, 0.0)
        core.counters.values[LONGEST_SLICE] = max(longest, 1000 * (time.thread_time() - began))
        return more

    core.tick = timed  # type: ignore[method-assign]


def hold(folder: str, chains: range, holding: Event) -> None:
    """Look chains up, release none, and wait to be killed."""

    async def held() -> None:
        client = BareClient(f"{folder}/store.sock")
        await client.connect()
        for chain in chains:
            found = await client.find(chain)
            assert found.hit == LIMIT, found.hit
        holding.set()
        await asyncio.sleep(3600)

    asyncio.run(held())


@dataclass
class Times:
    """When lookups were asked, and how long each took, in seconds."""

    asked: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)

    def between(self, start: float, end: float) -> list[float]:
        """Sorted times, in milliseconds, of those that were under way between two moments."""
        pairs = zip(self.asked, self.took, strict=True)
        return sorted(1000 * took for asked, took in pairs if asked < end and asked + took > start)


async def probe(folder: str, chains: range, times: Times) -> None:
    """Look chains up and release them, for ever."""
    client = BareClient(f"{folder}/store.sock")
    await client.connect()
    rng = random.Random(3)
    while True:
        chain = rng.choice(chains)
        began = time.monotonic()
        found = await client.find(chain)
        times.asked.append(began)
        times.took.append(time.monotonic() - began)
        assert found.hit == LIMIT, found.hit
        client.release([found.lease])
        await asyncio.sleep(0)


def p99(values: list[float]) -> float:
    """The 99th percentile of sorted values."""
    return values[min(len(values) - 1, int(0.99 * len(values)))]


@dataclass
class Round:
    """One client's death: lookups of others meanwhile (ms), and how long its pins lasted (ms)."""

    during: list[float]
    freed_ms: float


async def one_round(folder: str, chains: range, times: Times, stats: BareClient, pins: int) -> Round:
    """Let a client take its pins, kill it, wait until they are gone."""
    context = multiprocessing.get_context("spawn")
    holding = context.Event()
    process = context.Process(target=hold, args=(folder, chains, holding))
    process.start()
    while not holding.is_set():
        await asyncio.sleep(0.05)
    all_chunks = (await stats.stats()).values["host.entries"]
    await asyncio.sleep(0.5)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    while (await stats.stats()).values["host.evictable"] < all_chunks - LINKS:
        await asyncio.sleep(0.01)
    freed = time.monotonic()
    process.join()
    await asyncio.sleep(0.2)
    return Round(times.between(killed, freed), 1000 * (freed - killed))


async def measure(folder: str, options: argparse.Namespace) -> Report:
    """All rounds."""
    report = Report(f"a client with {options.pins} pins dies; {options.chunks} chunks")
    held = options.pins // LINKS
    others = range(held, options.chunks // LINKS)
    stats = await _connected(folder)
    times = Times()
    probing = asyncio.create_task(probe(folder, others, times))
    started = time.monotonic()
    await asyncio.sleep(IDLE_S)
    idle = times.between(started, time.monotonic())
    rounds = [await one_round(folder, range(held), times, stats, options.pins) for _ in range(options.rounds)]
    few = await one_round(folder, range(max(1, held // 50)), times, stats, options.pins // 50)
    probing.cancel()
    during = sorted(took for each in rounds for took in each.during)
    lookup, target = "lookup of 100 chunks", f"<= {TARGET_MS:g} ms"
    report.add(Measure(f"{lookup}, p50, before", idle[len(idle) // 2], "ms"))
    report.add(Measure(f"{lookup}, p99, before", p99(idle), "ms"))
    report.add(Measure(f"{lookup}, p50, during", during[len(during) // 2], "ms"))
    met = p99(during) <= TARGET_MS
    report.add(Measure(f"{lookup}, p99, during", p99(during), "ms", p99(idle), target=target, ok=met))
    report.add(Measure(f"{lookup}, worst, during", during[-1], "ms", idle[-1]))
    report.add(Measure("lookups that count", len(during), ""))
    slowest = max(each.freed_ms for each in rounds)
    report.add(Measure(f"kill to the last of {options.pins} pins, worst", slowest, "ms"))
    name, target = f"kill to the last of {options.pins // 50} pins", f"<= {FREED_TARGET_MS:g} ms"
    report.add(Measure(name, few.freed_ms, "ms", target=target, ok=few.freed_ms <= FREED_TARGET_MS))
    values = (await stats.stats()).values
    report.add(Measure("longest slice of long work, CPU", values[LONGEST_SLICE], "ms"))
    report.add(Measure("the store's memory", values["process.rss_bytes"] / 2**20, "MiB"))
    await stats.close()
    return report


async def _connected(folder: str) -> BareClient:
    """A client, once the store is there: filling the table takes a while."""
    until = time.monotonic() + 300
    while True:
        client = BareClient(f"{folder}/store.sock", kind="tool", timeout_s=60.0)
        try:
            await client.connect()
            return client
        except StoreUnavailable:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.2)


def main() -> int:
    """Run and print."""
    made = parser(__doc__ or "")
    made.add_argument("--chunks", type=int, default=1_000_000, help="chunks in the table")
    made.add_argument("--pins", type=int, default=100_000, help="pins of the client that dies")
    made.add_argument("--rounds", type=int, default=5, help="how often it dies")
    options = made.parse_args()
    context: Any = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = context.Process(target=serve, args=(folder, options.chunks))
        store.start()
        try:
            report = asyncio.run(measure(folder, options))
        finally:
            store.kill()
            store.join()
    return report.print(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
