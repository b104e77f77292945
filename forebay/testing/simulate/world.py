"""One seed's world: builds it, lets it go wrong, heals it, and sees whether everything ends well."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import random
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.testing.simulate.chaos import Chaos
from forebay.testing.simulate.checks import Checks
from forebay.testing.simulate.loop import PROCESS, Killed, Process, SimLoop
from forebay.testing.simulate.net import Net
from forebay.testing.simulate.node import Node
from forebay.testing.simulate.oracle import Oracle
from forebay.testing.simulate.plan import Plan
from forebay.testing.simulate.pubsub import Hub
from forebay.testing.simulate.tierproc import Tiers
from forebay.testing.simulate.worker import Worker

PREFIX = "forebay-simulation-"
SWEEP_RUNS = 16
_runs = [0]
SETTLE_S = 60.0
"""So long, in virtual time, may it take until everything has ended once faults have stopped."""


class SimulationFailed(AssertionError):
    """Something that must always hold didn't."""


@dataclass(frozen=True)
class Outcome:
    """What happened in one seed's run."""

    seed: int
    counts: Counter[str]
    virtual_s: float
    steps: int
    digest: str


class World:
    """Everything that is simulated. Used once."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.counts: Counter[str] = Counter()
        # Abstract it stays: signals, pipes and the like are nobody's business here, and raise NotImplementedError.
        self.loop = SimLoop(random.Random(f"{plan.seed}/order"), shuffle=plan.shuffle)  # type: ignore[abstract]
        self.rng = random.Random(f"{plan.seed}/world")
        self.tier_rng = random.Random(f"{plan.seed}/tiers")
        self.disk_rng = random.Random(f"{plan.seed}/disk")
        self.event_rng = random.Random(f"{plan.seed}/events")
        self.kernel = contextvars.copy_context()
        self.kernel.run(PROCESS.set, None)
        self.net = Net(self.loop, random.Random(f"{plan.seed}/net"))
        self.oracle = Oracle()
        self.checks = Checks(self)
        self.events = Hub(self)
        self.tiers = Tiers(self)
        self.disk_quota = self.rng.choice((40, 100, 1000)) << 10
        self.disk_syncs = self.rng.random() < 0.5
        self.healthy = self.closing = self.over = self.rotted = False
        self.healed_at = 0.0
        self.nodes = [Node(self, index, folder / f"pool{index}") for index in range(plan.nodes)]
        self.workers: list[Worker] = []
        self.chaos = Chaos(self)
        self._touched: set[int] = set()
        self._tick_at = 0.0
        self.loop.after_step = self._after_step
        self.loop.on_error = self._on_error

    # --- what the parts use ----------------------------------------------------------------------------

    def count(self, what: str, amount: float = 1) -> None:
        """Something happened."""
        self.counts[what] += int(amount)

    def fault(self, name: str) -> None:
        """A fault really happened."""
        self.counts[f"fault.{name}"] += 1

    def strikes(self, name: str, share: float, rng: random.Random) -> bool:
        """Does this fault happen now? Counts it."""
        if self.healthy or not self.plan.has(name) or rng.random() >= share * self.plan.rate:
            return False
        self.fault(name)
        return True

    def fail(self, why: str) -> None:
        """The run has failed."""
        self.loop.fail(SimulationFailed(why))

    async def sleep(self, seconds: float) -> None:
        """Virtual time passes."""
        await asyncio.sleep(seconds)

    # --- after each step -------------------------------------------------------------------------------

    def _after_step(self, process: Process | None) -> None:
        now = self.loop.time()
        if process is not None and process.node >= 0:
            self._touched.add(process.node)
        if now > self._tick_at or self.loop.idle:
            self._tick_at = now
            for index in sorted(self._touched):
                daemon = self.nodes[index].running
                if daemon is not None:
                    self.checks.tick(daemon)
            self._touched.clear()

    def _on_error(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Killed):
            return
        failure = SimulationFailed(f"{context.get('message')}: {error!r}")
        failure.__cause__ = error
        self.loop.fail(failure)

    # --- the run ---------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """From start to end. Raises SimulationFailed, or whatever a part raised that it should not."""
        plan = self.plan
        for node in self.nodes:
            node.start()
        for index in range(plan.workers):
            self.workers.append(Worker(self, self.nodes[index % plan.nodes], index))
        for index in range(plan.subscribers):
            for stream in range(len(plan.namespaces)):
                self.events.subscribe(self.nodes[index % plan.nodes], stream)
        self.chaos.begin()
        self.loop.run_until(plan.seconds)
        self.chaos.heal()
        self._settle()
        for fault, count in self.net.counts.items():
            self.counts[f"fault.{fault}"] += count
        return Outcome(plan.seed, self.counts, self.loop.time(), self.loop.steps, self._digest())

    def _settle(self) -> None:
        self.loop.run_until(self.loop.time() + 0.2)
        self._wait("daemons to be there", lambda: all(node.serving for node in self.nodes))
        done = [worker.turns for worker in self.workers]
        self._wait(
            "each worker's next turns",
            lambda: all(w.turns > n + 2 for w, n in zip(self.workers, done, strict=True)),
        )
        self._wait("subscribers to hear everything", self._views_agree)
        self.closing = True
        self._wait("workers to end", lambda: all(worker.parked for worker in self.workers))
        try:
            self._wait("daemons to be quiet", lambda: not self._left_over())
        except SimulationFailed as failure:
            raise SimulationFailed(f"{failure}: left are {self._left_over()}") from failure
        for node in self.nodes:
            if node.running is not None:
                self.checks.tick(node.running)
        self.checks.tiers_forgot()
        self._raise()
        for node in self.nodes:
            node.stop_cleanly()
        self._wait("daemons to stop", lambda: all(node.running is None for node in self.nodes))
        self.over = True
        for node in self.nodes:
            if node.folder.exists():
                self.fail(f"{node.name} has stopped cleanly and left its pool")
        self._raise()

    def _views_agree(self) -> bool:
        if not self.plan.replay:
            return True
        return all(subscriber.gap or self.checks.view(subscriber) for subscriber in self.events.all)

    def _left_over(self) -> dict[str, dict[str, int]]:
        found = {}
        for node in self.nodes:
            left = self.checks.left_over(node.running) if node.serving and node.running else {"a start": 1}
            if left:
                found[node.name] = left
        return found

    def _wait(self, what: str, done: Any) -> None:
        until = self.loop.time() + SETTLE_S
        while self.loop.time() < until:
            if done():
                return
            self.loop.run_until(self.loop.time() + 0.05)
        raise SimulationFailed(f"faults have stopped, and {SETTLE_S:.0f} s were not enough for {what}")

    def _raise(self) -> None:
        if self.loop.failure is not None:
            raise self.loop.failure

    def _digest(self) -> str:
        told = repr((sorted(self.counts.items()), self.loop.steps, round(self.loop.time(), 9)))
        return f"{zlib.crc32(told.encode()):08x}"

    def close(self) -> None:
        """Let go of whatever is left, also after a failure."""
        for node in self.nodes:
            node.kill()
        for worker in self.workers:
            worker.process.kill()
        for subscriber in self.events.all:
            subscriber.subscriber.close()
        self.loop.close()


class _Loud(logging.Handler):
    """A logged traceback is an error that some part did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[logging.LogRecord] = []
        self.deaf = False

    def emit(self, record: logging.LogRecord) -> None:
        if (
            not self.deaf
            and record.exc_info
            and record.exc_info[1] is not None
            and not isinstance(record.exc_info[1], Killed)
        ):
            self.found.append(record)


@contextmanager
def _listening(verbose: bool) -> Iterator[_Loud]:
    """The store's log, kept from the terminal unless asked for."""
    log, handler = logging.getLogger("forebay"), _Loud()
    before = (log.propagate, log.level)
    log.propagate = verbose
    log.setLevel(logging.DEBUG if verbose else logging.ERROR)
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.propagate, level = before
        log.setLevel(level)


def simulate(plan: Plan, *, verbose: bool = False) -> Outcome:
    """Run one plan. Raises SimulationFailed with what went wrong."""
    base = Path("/dev/shm") if os.path.isdir("/dev/shm") else None
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    collecting = gc.isenabled()
    gc.disable()  # when the collector comes by must not decide when a killed task is unwound
    try:
        with _listening(verbose) as loud:
            world = World(plan, folder)
            try:
                outcome = world.run()
            finally:
                loud.deaf = True  # what a killed process was in the middle of may not unwind well, and never did
                world.close()
            if loud.found:
                record = loud.found[0]
                assert record.exc_info is not None
                raise SimulationFailed(f"an error was logged: {record.getMessage()}") from record.exc_info[1]
            return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if collecting:
            gc.enable()
        _runs[0] += 1
        if _runs[0] % SWEEP_RUNS == 0:
            sweep()


def sweep() -> int:
    """Close what killed processes of finished runs had open, as the kernel would have; how many descriptors."""
    gc.collect()  # mappings close their own
    closed = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if f"/{PREFIX}" in target and target.endswith("(deleted)"):
                os.close(int(name))
                closed += 1
    return closed
