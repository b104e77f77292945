"""`tune`: for each operation, the fastest of a set of sizes on this GPU, written as its tuning table."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from forebay.errors import ResourceError
from forebay.kernels.gpu import library
from forebay.kernels.gpu.attend import Tiling
from forebay.kernels.gpu.experts import Sizes
from forebay.kernels.measure.bench import wrong
from forebay.kernels.measure.parity import CHECKS, Place
from forebay.kernels.measure.timing import DeviceTimer, Timer
from forebay.kernels.measure.work import Scale, Work, works
from forebay.kernels.tuning.tables import table

CONTEXTS = (1024, 4096, 32768)
CANDIDATES: dict[str, list[Any]] = {
    "attend.decode": [Tiling(*s) for s in product((16,), (32, 64, 128), (1, 4, 8, 16, 32), (4, 8), (2, 3))],
    "attend.prefill": [Tiling(*s) for s in product((64, 128), (32, 64, 128), (1,), (4, 8), (1, 2, 3))],
    "latent.decode": [Tiling(*s) for s in product((16, 32, 64), (16, 32), (4, 8, 16, 32), (4, 8), (1, 2))],
    "experts.plain": [Sizes(*s) for s in product((16, 32, 64, 128), (64, 128, 256), (64, 128), (4, 8), (2, 3, 4))],
}


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest sizes for a piece of work, its seconds, and how many candidates couldn't run."""

    sizes: Any
    seconds: float
    refused: int


def fastest(work: Work, candidates: Iterable[Any], timer: Timer, refusals: tuple[type[Exception], ...]) -> Best:
    """Try all. A candidate that asks for more than the device has (`refusals`) is left out; raises ResourceError if
    that goes for all of them."""
    found: list[tuple[float, Any]] = []
    refused = 0
    for sizes in candidates:
        try:
            found.append((timer(lambda sizes=sizes: work.run(sizes)), sizes))  # type: ignore[misc]
        except refusals:
            refused += 1
    if not found:
        raise ResourceError(f"none of {refused} candidates for {work.name} runs on this device")
    seconds, sizes = min(found, key=lambda pair: pair[0])
    return Best(sizes, seconds, refused)


def entries(found: Iterable[tuple[Work, Best]], limited: Callable[[Work], dict[str, int]]) -> list[dict[str, Any]]:
    """Entries of a tuning table, smallest limits first; the last one without any."""
    ordered = sorted(found, key=lambda pair: sorted(limited(pair[0]).items()))
    rows = [{"upto": limited(work), **asdict(best.sizes), "measured": best.seconds} for work, best in ordered]
    rows[-1].pop("upto")
    return rows


def run(seconds: float, out: Path) -> int:
    """Write `out`: what is measured here, the rest as shipped. 1 if a kernel is wrong: nothing is written then."""
    from triton.runtime.errors import OutOfResources

    device = torch.device("cuda", 0)
    name, architecture = torch.cuda.get_device_name(device), library.architecture(device)
    place = Place(device, torch.bfloat16, fnuz=architecture == "gfx942")
    failed = wrong(place)
    if failed:
        return 1
    timer, today = DeviceTimer(device, seconds), datetime.datetime.now(datetime.UTC).date().isoformat()
    made = dict(table(architecture))
    made["made"] = f"on {name}, {today}"
    made["executed"] = dict.fromkeys(CHECKS, f"{name}, {today}")
    best: dict[str, list[tuple[Work, Best]]] = {}
    for context in CONTEXTS:
        for work in works(place, Scale(context=context, prefill=context)):
            if work.operation in CANDIDATES:
                found = fastest(work, CANDIDATES[work.operation], timer, (OutOfResources,))
                best.setdefault(work.operation, []).append((work, found))
                print(f"{work.name}: {found.sizes}, {found.seconds * 1e6:.0f} us, {found.refused} refused", flush=True)
    for operation, pairs in best.items():
        made[operation] = entries(pairs, lambda work: work.shape)
    out.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return 0
