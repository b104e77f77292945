"""`bench`: every operation checked, then measured beside what the device can do at most."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from forebay.kernels.gpu import library
from forebay.kernels.measure.parity import CHECKS, Place, Wrong
from forebay.kernels.measure.peers import beside
from forebay.kernels.measure.timing import Ceilings, DeviceTimer, Timer, ceilings
from forebay.kernels.measure.work import Scale, Work, works
from forebay.kernels.tuning.tables import sizes_for

UNITS = {"copy": (1e9, "GB/s"), "link": (1e9, "GB/s"), "product": (1e12, "TFLOP/s")}


def run(seconds: float) -> int:
    """On this machine's first GPU; prints as it goes. 1 if a kernel is wrong, which is then the only result."""
    device = torch.device("cuda", 0)
    architecture = library.architecture(device)
    place = Place(device, torch.bfloat16, fnuz=architecture == "gfx942")
    print(f"{torch.cuda.get_device_name(device)} ({architecture}), torch {torch.__version__}")
    failed = wrong(place)
    if failed:
        return 1
    timer = DeviceTimer(device, seconds)
    limits = ceilings(device, timer)
    link, product = f"{limits.link / 1e9:.1f} GB/s", f"{limits.product / 1e12:.0f} TFLOP/s"
    print(f"at most: copy {limits.copy / 1e9:.0f} GB/s, link {link}, product {product}")
    for line in measured(works(place, Scale()), architecture, limits, timer):
        print(line, flush=True)
    return 0


def wrong(place: Place) -> list[str]:
    """The operations whose kernel gives something else than its definition; prints them."""
    failed = []
    for name, check in CHECKS.items():
        try:
            check(place)
        except Wrong as error:
            failed.append(name)
            print(f"{name}: WRONG: {error}", file=sys.stderr)
    print(f"checked {len(CHECKS)} operations, {len(failed)} wrong")
    return failed


def measured(found: list[Work], architecture: str, limits: Ceilings, timer: Timer) -> Iterator[str]:
    """A line for each piece of work, with the shipped sizes for it."""
    for work in found:
        sizes: Any = None
        if work.operation and work.kind:
            sizes = sizes_for(architecture, work.operation, work.kind, **work.shape)
        rate = work.amount / timer(lambda work=work, sizes=sizes: work.run(sizes))  # type: ignore[misc]
        share = rate / getattr(limits, work.limit)
        unit, name = UNITS[work.limit]
        wanted = f"{work.target:.0%} {'met' if share >= work.target else 'not met'}"
        yield f"{work.name:34} {rate / unit:8.1f} {name:8} {share:6.1%} of {work.limit}; {wanted}; {sizes}"
        if work.paged is None:
            continue
        for peer, seconds, why in beside(work.paged(sizes), timer):
            other = 0.0 if seconds is None else work.amount / seconds
            said = f"{other / unit:8.1f} {name:8} ours {rate / other:6.1%} of it" if seconds else f"{'-':>8} {why}"
            yield f"  {peer:32} {said}"
