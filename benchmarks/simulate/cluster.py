"""The modelled machines: workers that compute in order of arrival, hosts with a store of two tiers, links that are
taken one load after the other. All change only when told the time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulate.caches import Device, TierCache
from benchmarks.simulate.hardware import BLOCK, Hardware
from benchmarks.simulate.workload import Request
from forebay.scheduler.routing import Decision


@dataclass
class Link:
    """Something that moves bytes, one load after the other."""

    rate: float
    bytes: float = 0.0
    until: float = 0.0

    def move(self, size: float, now: float) -> float:
        """Move so many bytes; returns when they are there."""
        self.bytes += size
        self.until = max(self.until, now) + size / self.rate
        return self.until


@dataclass
class Host:
    """A store: memory and disk, what its workers share."""

    number: int
    memory: TierCache
    disk: TierCache
    disk_link: Link
    network: Link

    def __contains__(self, block: int) -> bool:
        return block in self.memory or block in self.disk


@dataclass(eq=False)
class Job:
    """One request at a worker. `attempts` counts the workers that it was sent to; `epoch` is that of the worker when it
    took it."""

    request: Request
    decision: Decision
    ticket: int
    attempts: int = 1
    epoch: int = 0
    device: int = 0
    reached: int = 0
    load_begun: float = 0.0
    load_done: float = 0.0


@dataclass(eq=False)
class SimWorker:
    """One worker. `epoch` grows with each of its deaths; `busy_s` is what its device computed."""

    number: int
    host: Host
    device: Device
    link: Link
    queue: deque[Job] = field(default_factory=deque)
    running: Job | None = None
    decoding: set[Job] = field(default_factory=set)
    busy_s: float = 0.0
    up: bool = True
    epoch: int = 0


class Machines:
    """All of them. `where` has the hosts of each block that a store holds."""

    def __init__(self, hardware: Hardware, workers: int, stores: bool, policy: str, rng: random.Random) -> None:
        self.hardware, self.stores, self._rng = hardware, stores, rng
        hosts = -(-workers // hardware.workers_a_host)
        memory, disk = (hardware.blocks(size) if stores else 0 for size in (hardware.memory, hardware.disk))
        self.hosts = [
            Host(
                number, TierCache(memory, policy), TierCache(disk, policy),
                Link(hardware.disk_read), Link(hardware.network),
            )
            for number in range(hosts)
        ]  # fmt: skip
        capacity = hardware.device_tokens // BLOCK
        self.workers = [
            SimWorker(
                number, self.hosts[number // hardware.workers_a_host], Device(capacity), Link(hardware.device_link)
            )
            for number in range(workers)
        ]
        self.where: dict[int, set[int]] = {}

    def begin(self, worker: SimWorker, job: Job, now: float) -> None:
        """A job arrives: what it can use is found, used, and begins to be loaded."""
        blocks, host, most = job.request.blocks, worker.host, job.request.tokens - 1
        on_device = _leading(blocks, worker.device)
        end, from_disk, from_afar = on_device, 0, 0
        sources: dict[int, int] = {}
        for block in blocks[on_device:]:
            if block in host.disk and block not in host.memory:
                from_disk += 1
            elif block not in host.memory:
                others = self.where.get(block)
                if not others:
                    break
                from_afar += 1
                sources[min(others)] = sources.get(min(others), 0) + 1
            end += 1
        self._use(worker, blocks[:end], on_device)
        size = self.hardware.kv_bytes * BLOCK
        job.device, job.reached = min(BLOCK * on_device, most), min(BLOCK * end, most)
        job.load_begun = job.load_done = now
        if end > on_device:
            arrivals = [worker.link.move(size * (end - on_device), now)]
            arrivals += [host.disk_link.move(size * from_disk, now)] if from_disk else []
            arrivals += [host.network.move(size * from_afar, now)] if from_afar else []
            arrivals += [self.hosts[other].network.move(size * count, now) for other, count in sources.items()]
            job.load_done = max(arrivals) + self.hardware.latency_s

    def _use(self, worker: SimWorker, blocks: Sequence[int], on_device: int) -> None:
        memory, disk = worker.host.memory, worker.host.disk
        memory.use([block for block in blocks if block in memory])
        disk.use([block for block in blocks if block in disk])

    def service_s(self, worker: SimWorker, job: Job, now: float) -> float:
        """What the device takes for a job that it begins now: the rest of the prefix until computing and loading
        meet, then what nobody has."""
        hardware = self.hardware
        # What was computed here while it waited is on the device by now.
        job.device = max(job.device, min(BLOCK * _leading(job.request.blocks, worker.device), job.request.tokens - 1))
        job.reached = max(job.reached, job.device)
        prefix = hardware.prefill_s(job.device, job.reached)
        rest = hardware.prefill_s(job.reached, job.request.tokens)
        slower = 1 + hardware.decode_slows * len(worker.decoding)
        left = max(0.0, job.load_done - now)
        whole = max(job.load_done - job.load_begun, 1e-12)
        stands = prefix * slower * min(1.0, left / whole)
        cut = stands * left / (stands + left) if left and stands else 0.0
        vary = self._rng.lognormvariate(0.0, hardware.noise)
        return (cut + rest * slower) * vary

    def stored(self, host: Host, came: Sequence[int], went: Sequence[int]) -> None:
        """Keep `where` right after a change of one of the host's tiers."""
        for block in came:
            self.where.setdefault(block, set()).add(host.number)
        for block in went:
            if block not in host and block in self.where:
                self.where[block].discard(host.number)
                if not self.where[block]:
                    del self.where[block]


def _leading(blocks: Sequence[int], device: Device) -> int:
    return next((at for at, block in enumerate(blocks) if block not in device), len(blocks))
