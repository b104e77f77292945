"""Thousands of drawn operations on one tier, behind its real host and process, while everything goes wrong.

    python -m tests.conformance.campaign --tier fs --operations 10000 --seed 1

Three parts, on one and the same storage. First the device or server below the tier misbehaves and the tier's process is
killed or hangs: a load that the tier calls good must have the right bytes. Then the tier itself lies: whoever takes a
load verifies it, as the store and its readers do, and what passes must be right. At the end all is calm: nothing has
leaked, and the tier stores and serves as on the first day.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forebay.errors import CorruptChunk
from forebay.testing.conformance import Made, numbered
from forebay.testing.faults.dice import START, rates_text, read_log
from forebay.tiers.base import JobResult, LoadJob, StoreJob, TierChange
from forebay.tiers.chunks import stored_header, verify_payload
from forebay.tiers.host import TierHost
from forebay.tiers.messages import OptionValue
from forebay.tiers.supervise import Patience
from tests.conformance.bucket_world import S3World, SealedS3World
from tests.conformance.file_worlds import SealedFsWorld, SharedFsWorld
from tests.conformance.peer_world import PeerWorld, TlsPeerWorld
from tests.conformance.pool_world import PoolWorld
from tests.conformance.slots import Slots
from tests.conformance.worlds import WORLDS, World

WORLDS.update({"fs-sealed": SealedFsWorld, "fs-shared": SharedFsWorld})
WORLDS.update({"s3": S3World, "s3-sealed": SealedS3World, "mooncake": PoolWorld})
WORLDS.update({"p2p": PeerWorld, "p2p-tls": TlsPeerWorld})

CHUNKS, IN_FLIGHT, SLOTS = 120, 16, 48
GRANULES = (16, 1000, 4096, 4096, 20_000, 50_000)
PATIENCE = Patience(start_s=30, heartbeat_s=0.2, hang_s=1.5, store_s=2.5, backoff_first_s=0.05, backoff_max_s=0.2)
DEADLINE_S = 1.0
WINDOWS = 8
CALM_S = 30.0
"""The deadline when all is calm: there, a slow machine must not pass for a tier that fails."""
READY_S = 10.0
HANG_S = 60.0
"""By far longer than the patience above and a new process take: a job that is open by then is never reported."""
NAMESPACES = (b"n" * 32, b"o" * 32)
FAULTS = {
    "error": 0.01, "raise": 0.003, "delay": 0.03, "lose": 0.001, "twice": 0.01, "stray": 0.01, "partition": 0.0005,
    "full": 0.0005, "hang": 0.0003, "die": 0.0004,
}  # fmt: skip
LIES = dict.fromkeys(("claim", "measure", "flip", "short", "length", "header", "other", "pretend"), 0.02)
MOST = {"threads": 64, "descriptors": 256}
"""What a tier's process may have of them at any time."""
FaultRates = Mapping[str, float]


@dataclass
class Tally:
    """What happened, by name."""

    counts: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)

    def note_most(self, name: str, value: int) -> None:
        self.most[name] = max(self.most[name], value)


class Part:
    """One part: a host over the world's storage, and drawn operations against it."""

    def __init__(
        self, world: World, rng: random.Random, chunks: list[Made], *, lies: bool = False,
        patience: Patience = PATIENCE, deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        self.patience = patience
        self.deadline_s = deadline_s
        self.world = world
        self.rng = rng
        self.chunks = chunks
        self.lies = lies
        self.tally = Tally()
        self.slots = Slots(SLOTS, max(chunk.length for chunk in chunks))
        self.open: dict[int, tuple[StoreJob | LoadJob, Made, asyncio.Future[JobResult]]] = {}
        self.serial = 0
        self.wrong: list[str] = []
        self.changes: Counter[bool] = Counter()

    async def start(self, kind: str, options: Mapping[str, OptionValue]) -> None:
        self.host = TierHost(
            "tier", kind, options, on_finished=self._finished, on_changes=self._changed, patience=self.patience
        )
        await self.host.start({0: self.slots.pool.descriptor})
        for namespace in NAMESPACES:
            self.host.note_namespace(namespace, b"a namespace of the campaign")
        until = time.monotonic() + READY_S
        while not self.world.ready((await self.host.stats()).values) and time.monotonic() < until:
            await asyncio.sleep(0.05)

    def _changed(self, changes: list[TierChange]) -> None:
        self.changes.update(change.stored for change in changes)

    # --- operations ------------------------------------------------------------------------------------

    async def run(self, operations: int, trouble: float) -> None:
        """Do so many, no more than IN_FLIGHT at a time; more if until then hardly anything came back."""
        number = 0
        while number < operations or (number < 5 * operations and not self.told_enough()):
            number += 1
            if not self.host.alive and self.rng.random() < 0.9:  # the others are for a tier without a process
                await self.until_alive()
            draw = self.rng.random()
            if draw < 0.38:
                self.store(self.some())
            elif draw < 0.86:
                self.load(self.some())
            elif draw < 0.96:
                await self.lookup([self.some() for _ in range(self.rng.randrange(1, 6))])
            elif draw < 0.985:
                self.host.forget([self.some().id], "cleared")
                self.tally.counts["forgets"] += 1
            elif draw < 0.987:
                await self.clear()
            else:
                await self.look()
            if self.rng.random() < trouble:
                await asyncio.to_thread(self.world.trouble, self.rng)
            if number % 3 == 0:
                await asyncio.sleep(0)
            await self.wait_for_at_most(IN_FLIGHT)
        await self.wait_for_at_most(0)

    async def until_alive(self) -> None:
        until = time.monotonic() + HANG_S
        while not self.host.alive:
            if time.monotonic() > until:
                raise AssertionError(f"the tier's process hasn't come back in {HANG_S} s")
            await asyncio.sleep(0.02)

    def told_enough(self) -> bool:
        """Have loads succeeded, and lies been told of them?"""
        counts = self.tally.counts
        return counts["load ok"] >= 10 and (not self.lies or counts["load refused by its reader"] >= 1)

    def some(self) -> Made:
        """A chunk; a sixth of them is wanted most of the time."""
        return self.rng.choice(self.chunks[: CHUNKS // 6] if self.rng.random() < 0.6 else self.chunks)

    def store(self, chunk: Made) -> None:
        self.serial += 1
        at = self.slots.put(chunk)
        job = StoreJob(
            self.serial, chunk.id, chunk.header.parent, 0, at, chunk.length, b"", self.rng.random() < 0.1
        )
        self._opened(job, chunk)
        self.host.store([job])

    def load(self, chunk: Made) -> None:
        self.serial += 1
        job = LoadJob(self.serial, chunk.id, 0, self.slots.take(), len(chunk.payload), self.deadline_s)
        self._opened(job, chunk)
        self.host.load([job])

    def _opened(self, job: StoreJob | LoadJob, chunk: Made) -> None:
        self.open[job.id] = (job, chunk, asyncio.get_running_loop().create_future())

    async def wait_for_at_most(self, limit: int) -> None:
        while len(self.open) > limit:
            futures = [entry[2] for entry in self.open.values()]
            done, _ = await asyncio.wait(futures, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise AssertionError(f"hang: jobs {sorted(self.open)} have no result after {HANG_S} s")

    async def lookup(self, chunks: list[Made]) -> None:
        answers = await asyncio.wait_for(self.host.lookup([chunk.query() for chunk in chunks], 0.5), HANG_S)
        for chunk, answer in zip(chunks, answers, strict=True):
            self.tally.counts[f"lookup {answer.outcome}"] += 1
            if answer.outcome == "hit" and answer.key == chunk.id.key and not self.lies:
                right = (answer.matched, answer.tokens) == (32, 32)
                right = right and (answer.length == chunk.length or not self.world.tells_length)
                self._must(right, f"a lookup tells {answer} of a chunk of {chunk.length} bytes")

    async def clear(self) -> None:
        count = await asyncio.wait_for(self.host.clear(self.rng.choice(self.chunks).header.namespace, 5.0), HANG_S)
        self.tally.counts["clears" if count is not None else "clears not told"] += 1

    async def look(self) -> None:
        """The tier's figures, and what its process has open."""
        stats = await self.host.stats()
        self.tally.counts["looks"] += 1
        quota, held = stats.values.get("bytes_quota", 0), stats.values.get("bytes", 0)
        self._must(not quota or held <= quota, f"{held} bytes in a quota of {quota}")
        for name, value in open_things(self.host.pid).items():
            self.tally.note_most(name, value)
            self._must(value <= MOST[name], f"the tier's process has {value} {name}")

    # --- results ---------------------------------------------------------------------------------------

    def _finished(self, results: list[JobResult]) -> None:
        for result in results:
            if result.id not in self.open:
                self._must(False, f"a result of job {result.id}, which isn't open")
                continue
            job, chunk, future = self.open.pop(result.id)
            if isinstance(job, StoreJob):
                self.tally.counts[f"store {'ok' if result.ok else result.reason}"] += 1
                self.slots.give_back(job.offset, job.length)
            else:
                self._loaded(job, chunk, result)
                self.slots.give_back(job.payload_offset, job.capacity)
            future.set_result(result)

    def _loaded(self, job: LoadJob, chunk: Made, result: JobResult) -> None:
        if not result.ok:
            self.tally.counts[f"load {result.reason}"] += 1
            return
        payload = bytes(self.slots.pool.memory[job.payload_offset : job.payload_offset + result.length])
        if self.lies and not acceptable(chunk, result, payload):
            self.tally.counts["load refused by its reader"] += 1
            return
        right = payload == chunk.payload and result.header == chunk.block
        self._must(right, f"WRONG BYTES: job {job.id}, chunk {chunk.id}, {result.length} bytes")
        self.tally.counts["load ok"] += 1

    def _must(self, true: bool, what: str) -> None:
        if not true:
            self.wrong.append(what)

    # --- the end ---------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Stop the host; nothing may be left of what it had."""
        figures = self.host.statistics()
        for name in ("host.jobs_open", "host.store_queue_bytes", "host.load_queue_bytes"):
            self._must(figures[name] == 0, f"{name} is {figures[name]} with no job open")
        self._must(self.host.statistics().get("host.callback_errors", 0) == 0, "a callback has failed")
        for name in ("restarts", "hangs", "deaths"):
            self.tally.counts[name] += int(figures.get(f"host.{name}", 0))
        await self.host.stop()
        self._must(self.slots.free == SLOTS, f"{SLOTS - self.slots.free} slots are still in use")
        for _ in range(SLOTS):  # a look at each: nobody has written where nobody may
            self.slots.give_back(self.slots.take(), 0)
        self.wrong += self.slots.wrong
        self.slots.pool.close()


def acceptable(chunk: Made, result: JobResult, payload: bytes) -> bool:
    """Would the store publish this load, and a reader take it? Both know what they asked for."""
    try:
        header = stored_header(result.header)
        same = (header.namespace, header.group, header.key, header.parent, header.start, header.end) == (
            chunk.header.namespace, chunk.header.group, chunk.header.key, chunk.header.parent, chunk.header.start,
            chunk.header.end,
        )  # fmt: skip
        verify_payload(header, memoryview(payload))
    except CorruptChunk:
        return False
    return same


def open_things(pid: int | None) -> dict[str, int]:
    """How many threads and descriptors a process has; nothing if it has just ended."""
    try:
        return {
            "threads": len(os.listdir(f"/proc/{pid}/task")),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        }
    except OSError:
        return {}


def faulty(world: World, rates: FaultRates, part: str) -> dict[str, OptionValue]:
    """Options of the world's tier inside of faults."""
    return {
        **world.sick_options(), "fault_kind": world.sick_kind, "fault_rates": rates_text(rates),
        "fault_seed": world.seed, "fault_log": str(world.folder / f"{part}.log"),
    }  # fmt: skip


FAULTY = "forebay.testing.faults.tier:FaultyTier"


@dataclass
class Outcome:
    """Of a whole campaign."""

    wrong: list[str]
    parts: dict[str, Tally]
    faults: Counter[str]
    seconds: float

    def lines(self) -> list[str]:
        """For people."""
        lines = []
        for name, tally in self.parts.items():
            told = ", ".join(f"{key} {value}" for key, value in sorted(tally.counts.items()))
            most = ", ".join(f"{key} {value}" for key, value in sorted(tally.most.items()))
            lines.append(f"{name}: {told}; most at a time: {most}")
        struck = ", ".join(f"{key} {value}" for key, value in sorted(self.faults.items()) if key != START)
        return [*lines, f"faults: {struck}", f"{self.seconds:.1f} s; wrong: {len(self.wrong)}", *self.wrong[:20]]


async def campaign(world: World, operations: int, seed: int, faults: FaultRates = FAULTS) -> Outcome:
    """The three parts; see the module's text. `faults` are those around the tier in both of the first."""
    begun = time.monotonic()
    rng = random.Random(seed)
    chunks = [
        numbered(i, granule=rng.choice(GRANULES), namespace=rng.choice(NAMESPACES)) for i in range(CHUNKS)
    ]
    world.chunks = chunks
    calm = max(100, operations // 10)
    half = (operations - calm) // 2
    plan: list[tuple[str, int, bool, FaultRates]] = [
        ("trouble below", half, False, faults),
        ("lies", operations - calm - half, True, {**faults, **LIES}),
    ]
    parts: dict[str, Part] = {}
    before = open_things(os.getpid())
    for name, count, lies, rates in plan:
        part = parts[name] = Part(world, rng, chunks, lies=lies)
        await part.start(FAULTY, faulty(world, rates, name))
        await part.run(count, 0.02)
        await part.finish()
    world.calm()
    part = parts["calm"] = Part(world, rng, chunks, patience=Patience(), deadline_s=CALM_S)
    await part.start(world.kind, world.options())
    await settled(part, calm)
    await part.finish()
    wrong = [f"{name}: {what}" for name, part in parts.items() for what in part.wrong]
    wrong += [f"left behind: {what}" for what in world.left_behind()]
    after = open_things(os.getpid())
    if after["descriptors"] > before["descriptors"] + world.slack:
        wrong.append(f"this process had {before} open, now {after}")
    struck = sum((read_log(world.folder / f"{name}.log") for name in parts), read_log(world.log) + world.struck)
    return Outcome(wrong, {name: part.tally for name, part in parts.items()}, struck, time.monotonic() - begun)


async def stored_and_served(part: Part, count: int) -> None:
    """So many chunks, one after another; each must succeed."""
    for _ in range(count):
        chunk = part.rng.choice(part.chunks)
        before = part.tally.counts["store ok"], part.tally.counts["load ok"]
        part.store(chunk)
        await part.wait_for_at_most(0)
        part.load(chunk)
        await part.wait_for_at_most(0)
        after = part.tally.counts["store ok"], part.tally.counts["load ok"]
        part._must(after == (before[0] + 1, before[1] + 1), f"in calm, a chunk isn't stored and served: {part.tally}")


async def settled(part: Part, operations: int) -> None:
    """The calm part: first a pass that meets the damage done before, then nothing but success; nothing grows."""
    for chunk in part.chunks:
        part.load(chunk)
        await part.wait_for_at_most(IN_FLIGHT)
    await part.wait_for_at_most(0)
    grown = ""
    for _ in range(WINDOWS):  # a pool of threads or connections may grow to its size; a leak never stops
        before = open_things(part.host.pid)
        await stored_and_served(part, max(10, operations // 20))
        after = open_things(part.host.pid)
        grown = f"from {before} to {after}" if any(after[name] > before[name] for name in after) else ""
        if not grown:
            break
    part._must(not grown, f"grown without end, in the last of {WINDOWS} windows {grown}")
    await part.look()
    until, left = time.monotonic() + READY_S, {"queue_bytes": 1.0}
    while left and time.monotonic() < until:  # a result may be told a moment before its queue is
        values = (await part.host.stats()).values
        left = {name: values[name] for name in ("queue_bytes", "process.open_jobs") if values[name]}
    part._must(not left, f"at rest, there is {left}")


def run(tier: str, operations: int, seed: int, folder: Path, faults: FaultRates = FAULTS) -> Outcome:
    """A campaign on one kind of tier, with its servers."""
    world = WORLDS[tier](folder, seed)
    try:
        return asyncio.run(campaign(world, operations, seed, faults))
    finally:
        world.close()


def main() -> int:
    """Entry point; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.campaign", description=__doc__)
    parser.add_argument("--tier", choices=list(WORLDS), required=True)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(options.tier, options.operations, options.seed, Path(folder))
    print(f"{options.tier}: {options.operations} operations, seed {options.seed}")
    print("\n".join(outcome.lines()))
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
