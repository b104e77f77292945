"""One run: requests in, events of virtual time in order, figures out. Deterministic for a seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.simulate.cluster import Job, Machines, SimWorker
from benchmarks.simulate.hardware import BLOCK, Hardware
from benchmarks.simulate.telling import Telling, Tier
from benchmarks.simulate.workload import Request, prompt_of
from forebay.scheduler.fleet import Fleet, Worker
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.places import Holders
from forebay.scheduler.policies import POLICIES
from forebay.scheduler.routing import Routing

NOTICE_S = 1.0
"""After which the router knows that a worker is dead. Until then, a request that is sent there comes back at once."""
BACK_S = 30.0
ATTEMPTS_MAX = 5


@dataclass(frozen=True)
class Setup:
    """What is run. `kill` workers die when half of the requests have arrived, and come back empty. `in_turn`: nobody
    sends a turn before the answer to the one before it is whole; without it, all are sent at their times."""

    hardware: Hardware
    workers: int
    policy: str
    stores: bool = True
    eviction: str = "lru"
    predict_s: float = 5.0
    max_waiting: int = 0
    kill: int = 0
    seed: int = 1
    in_turn: bool = True


@dataclass
class Figures:
    """What came of it. Times in seconds, tokens over all requests, bytes a kind of link. `held` turns were sent later
    than their time, because the answer before them wasn't whole."""

    ttft: list[float] = field(default_factory=list)
    tokens: int = 0
    hit_tokens: int = 0
    believed_tokens: int = 0
    error_tokens: int = 0
    rejected: int = 0
    resent: int = 0
    held: int = 0
    imbalance: float = 0.0
    utilisation: float = 0.0
    moved: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    events: int = 0
    index_blocks: int = 0
    index_bytes: int = 0

    def quantile(self, share: float) -> float:
        """Of the times to first token."""
        return float(np.quantile(self.ttft, share)) if self.ttft else float("nan")


class Simulation:
    """See the module."""

    def __init__(self, setup: Setup, requests: Sequence[Request]) -> None:
        self.setup, self._requests = setup, requests
        rng = random.Random(setup.seed)
        self.machines = Machines(setup.hardware, setup.workers, setup.stores, setup.eviction, rng)
        index, holders = PrefixIndex(), Holders()
        names = [
            Worker(f"w{w.number}", f"s{w.host.number}" if setup.stores else None, BLOCK, setup.hardware.rates)
            for w in self.machines.workers
        ]
        self.routing = Routing.of(
            Fleet(names, holders), index, POLICIES[setup.policy](random.Random(setup.seed)), predict_s=setup.predict_s
        )
        self.telling = Telling(index, holders)
        self.figures = Figures()
        self.now = self._last_sent = 0.0
        self._over: set[int] = set()
        self._waiting: dict[int, list[Request]] = {}
        self._open = np.ones(setup.workers, np.bool_)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def run(self) -> Figures:
        """All requests, to the end."""
        half = self._requests[len(self._requests) // 2].at
        for worker in self.machines.workers[: self.setup.kill]:
            self._at(half, lambda worker=worker: self._die(worker))  # type: ignore[misc]
        arrivals = iter(self._requests)
        self._next_arrival(arrivals)
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self._summed()

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, happen))

    def _next_arrival(self, arrivals: Iterator[Request]) -> None:
        request = next(arrivals, None)
        if request is not None:
            self._at(request.at, lambda: self._arrive(request, arrivals))

    def _arrive(self, request: Request, arrivals: Iterator[Request]) -> None:
        if self.setup.in_turn and request.after >= 0 and request.after not in self._over:
            self._waiting.setdefault(request.after, []).append(request)
            self.figures.held += 1
        else:
            self._send(request, 1)
        self._next_arrival(arrivals)

    # --- a request ---------------------------------------------------------------------------------------

    def _send(self, request: Request, attempts: int) -> None:
        self._last_sent = self.now
        decision = self.routing.decide(prompt_of(request), self.now, self._open)
        worker = self.machines.workers[decision.worker]
        full = self.setup.max_waiting and len(worker.queue) >= self.setup.max_waiting
        if full or attempts > ATTEMPTS_MAX:
            self.figures.rejected += 1
            self._ended(request)
            return
        ticket = self.routing.sent(decision, self.now)
        job = Job(request, decision, ticket, attempts, worker.epoch)
        if not worker.up:
            self._again(job)
            return
        self.machines.begin(worker, job, self.now)
        worker.queue.append(job)
        self._go_on(worker)

    def _again(self, job: Job) -> None:
        """Its worker is dead: the router hears of it at once, and sends the request somewhere else."""
        self.routing.ended(job.ticket, self.now)
        self.figures.resent += 1
        self._open[job.decision.worker] = False
        self._send(job.request, job.attempts + 1)

    def _go_on(self, worker: SimWorker) -> None:
        if worker.running is not None or not worker.queue:
            return
        job = worker.running = worker.queue.popleft()
        took = self.machines.service_s(worker, job, self.now)
        worker.busy_s += took
        self._at(self.now + took, lambda: self._computed(worker, job))

    def _computed(self, worker: SimWorker, job: Job) -> None:
        if job.epoch != worker.epoch:
            return
        figures, request = self.figures, job.request
        figures.ttft.append(self.now - request.at)
        figures.tokens += request.tokens
        figures.hit_tokens += job.reached
        believed = job.decision.cached
        figures.believed_tokens += believed
        figures.error_tokens += abs(believed - job.reached)
        self.routing.belief.add(request.tokens, believed, job.reached)
        self.routing.first_token(job.ticket, self.now)
        worker.running = None
        worker.decoding.add(job)
        self._at(self.now + request.output * self.setup.hardware.decode_s, lambda: self._decoded(worker, job))
        self._kept(worker, request)
        self._go_on(worker)

    def _decoded(self, worker: SimWorker, job: Job) -> None:
        if job.epoch == worker.epoch:
            worker.decoding.discard(job)
            self.routing.ended(job.ticket, self.now)
            self._ended(job.request)

    def _ended(self, request: Request) -> None:
        """Its answer is whole, or there is none: whoever waited for it goes on."""
        self._over.add(request.number)
        for follower in self._waiting.pop(request.number, ()):
            self._at(self.now, lambda follower=follower: self._send(replace(follower, at=self.now), 1))  # type: ignore[misc]

    # --- caches and what they tell -----------------------------------------------------------------------

    def _kept(self, worker: SimWorker, request: Request) -> None:
        came, went = worker.device.take(request.blocks)
        self._tell(f"w{worker.number}", "device", request.blocks, came, went)
        if self.setup.stores:
            size = self.setup.hardware.kv_bytes * BLOCK * len(came)
            pushed = self.now + size / self.setup.hardware.device_link
            self._at(pushed, lambda: self._stored(worker, request))

    def _stored(self, worker: SimWorker, request: Request) -> None:
        host, owner = worker.host, f"s{worker.host.number}"
        tiers: tuple[Tier, ...] = ("memory", "disk")
        for tier in tiers:
            came, went = getattr(host, tier).put(request.blocks)
            self.machines.stored(host, came, went)
            self._tell(owner, tier, request.blocks, came, went)

    def _tell(self, owner: str, tier: Tier, chain: Sequence[int], came: Sequence[int], went: Sequence[int]) -> None:
        if came or went:
            payload = self.telling.payload(tier, chain, came, went, self.now)
            seen = self.now + self.setup.hardware.visible_s
            self._at(seen, lambda: self.telling.hear(owner, payload, self.now))

    # --- failures ----------------------------------------------------------------------------------------

    def _die(self, worker: SimWorker) -> None:
        jobs = [*([worker.running] if worker.running else []), *worker.queue, *worker.decoding]
        worker.up, worker.running, worker.epoch = False, None, worker.epoch + 1
        worker.queue.clear()
        worker.device.clear()
        decoding, worker.decoding = worker.decoding, set()
        self._at(self.now + NOTICE_S, lambda: self._noticed(worker))
        self._at(self.now + BACK_S, lambda: self._back(worker))
        for job in jobs:
            if job in decoding:
                self.routing.ended(job.ticket, self.now)
                self._ended(job.request)
            else:
                self._again(job)

    def _noticed(self, worker: SimWorker) -> None:
        self._open[worker.number] = False
        self.telling.lost(f"w{worker.number}")
        self.routing.predicted.forget(worker.number)

    def _back(self, worker: SimWorker) -> None:
        worker.up = True
        self._open[worker.number] = True

    # --- the end -----------------------------------------------------------------------------------------

    def _summed(self) -> Figures:
        figures, workers, hosts = self.figures, self.machines.workers, self.machines.hosts
        assert not self._waiting, "every turn is sent"
        assert self.routing.load.stats().in_flight == 0, "every request ends"
        busy = np.array([worker.busy_s for worker in workers])
        figures.imbalance = float(busy.max() / busy.mean())
        figures.utilisation = float(busy.sum() / len(workers) / self._last_sent)
        figures.moved = {
            "device": sum(worker.link.bytes for worker in workers),
            "disk": sum(host.disk_link.bytes for host in hosts),
            "network": sum(host.network.bytes for host in hosts) / 2,
        }
        figures.reasons, figures.events = dict(self.routing.reasons), self.telling.events
        stats = self.routing.index.stats()
        figures.index_blocks, figures.index_bytes = stats.blocks, stats.bytes
        return figures
