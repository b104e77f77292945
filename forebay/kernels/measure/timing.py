"""How long something takes on a device, and what the device can do at most."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

FLUSH_BYTES = 256 * 2**20
"""Written between two runs: more than any cache on a device."""

ROUNDS_MIN = 5


class Timer(Protocol):
    """Median seconds of `run`, which queues work on a device."""

    def __call__(self, run: Callable[[], object]) -> float: ...


class DeviceTimer:
    """By events on the device's stream, its caches flushed before each run. Spends about `seconds` on each call."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._seconds = seconds
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], object]) -> float:
        """See `Timer`. The first run, which compiles, doesn't count."""
        run()
        torch.cuda.synchronize()
        taken: list[float] = []
        while len(taken) < ROUNDS_MIN or sum(taken) < self._seconds:
            self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1000)
        return statistics.median(taken)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured: bytes/s of a copy inside of the device (read and written), bytes/s over the link to pinned memory, and
    FLOP/s of one large product in bf16."""

    copy: float
    link: float
    product: float


def ceilings(device: torch.device, time: Timer, size: int = 2**30, side: int = 8192) -> Ceilings:
    """Of this device, with copies of `size` bytes and a product of `side` squared."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    a = torch.empty(side, side, dtype=torch.bfloat16, device=device).normal_()
    return Ceilings(
        copy=2 * size / time(lambda: target.copy_(source)),
        link=size / time(lambda: host.copy_(source, non_blocking=True)),
        product=2 * side**3 / time(lambda: a @ a),
    )
