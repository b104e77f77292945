"""Copying between a worker's paged device pool and canonical chunks, against memcpy + xxh3 of the same bytes.

    python -m benchmarks.copy

Ours gathers scattered blocks into a chunk's payload in shared memory and hashes every granule, and back:
verifies every granule and scatters into blocks. The limit is one memcpy of contiguous bytes and one xxh3 over
them. Both take turns, over buffers far larger than the caches.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from benchmarks.report import Measure, Report, median, parser
from forebay.workers.copying import copier

WORKING_SET = 256 << 20
SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
TARGET = 0.7
ROUNDS = 15


@dataclass(frozen=True)
class Group:
    """One cache group of Gemma 3 270M in bf16: pages [layers, 2, heads, 16, dim]."""

    name: str
    layers: int

    def pool(self, blocks: int) -> torch.Tensor:
        """A device pool, every page touched."""
        pool = torch.empty(blocks, self.layers, 2, 1, 16, 256, dtype=torch.bfloat16)
        pool.view(torch.int16).random_(0, 30000)
        return pool


GROUPS = (Group("full", 3), Group("window", 15))


def main() -> int:
    """Measure all groups and sizes; exit code 1 if a target is missed."""
    args = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    report = Report("copy: device pages <-> canonical chunks, one thread")
    gc.disable()
    for group in GROUPS:
        for label, size in SIZES.items():
            measure(report, group, label, size)
    return report.print(args.json)


def measure(report: Report, group: Group, label: str, size: int) -> None:
    """One group at one size: both directions, limit and ours in turns."""
    granule = group.layers * 2 * 16 * 256 * 2
    count = max(1, round(size / granule))
    length = count * granule
    blocks = WORKING_SET // granule
    pool = group.pool(blocks)
    pages = copier(pool)
    shared = np.memmap("/dev/shm/forebay-bench-copy", dtype=np.uint8, mode="w+", shape=(WORKING_SET,))
    try:
        order = list(range(blocks))
        random.Random(1).shuffle(order)
        chunks = [order[i : i + count] for i in range(0, blocks - count + 1, count)]
        rooms = [shared.data[i * length : (i + 1) * length] for i in range(len(chunks))]
        flat = pool.view(torch.uint8).view(-1).numpy()
        plain = [flat[i * length : (i + 1) * length] for i in range(len(chunks))]
        targets = [np.frombuffer(room, dtype=np.uint8) for room in rooms]
        sums = [pages.store(ids, room) for ids, room in zip(chunks, rooms, strict=True)]

        def limit_out() -> None:
            for source, target in zip(plain, targets, strict=True):
                np.copyto(target, source)
                xxhash.xxh3_64_intdigest(target.data)

        def limit_in() -> None:
            for source, target in zip(targets, plain, strict=True):
                np.copyto(target, source)
                xxhash.xxh3_64_intdigest(target.data)

        def ours_out() -> None:
            for ids, room in zip(chunks, rooms, strict=True):
                pages.store(ids, room)

        def ours_in() -> None:
            for ids, room, checksums in zip(chunks, rooms, sums, strict=True):
                assert pages.load(room, checksums, ids) == len(ids)

        total = len(chunks) * length
        compare(report, f"{group.name} pages -> chunk, {label} ({count} granules)", total, length, limit_out, ours_out)

        def write_anew() -> None:
            sums[:] = [pages.store(ids, room) for ids, room in zip(chunks, rooms, strict=True)]

        # The limit's plain copies scramble the pages: chunks are written anew before they are verified.
        name = f"{group.name} chunk -> pages, {label} ({count} granules)"
        compare(report, name, total, length, limit_in, ours_in, before=write_anew)
    finally:
        del shared
        os.unlink("/dev/shm/forebay-bench-copy")


def compare(
    report: Report,
    name: str,
    total: int,
    length: int,
    limit: Callable[[], None],
    ours: Callable[[], None],
    before: Callable[[], None] = lambda: None,
) -> None:
    """Run both in turns; the ratio is the median of the rounds' ratios."""
    ratios, ours_s, limit_s = [], [], []
    for _ in range(ROUNDS):
        limit_s.append(timed(limit))
        before()
        ours_s.append(timed(ours))
        ratios.append(limit_s[-1] / ours_s[-1])
    ratio = median(ratios)
    target = f">= {TARGET}" if length >= 900 << 10 else ""
    report.add(
        Measure(
            name, total / median(ours_s) / 1e9, "GB/s", limit=total / median(limit_s) / 1e9, ratio=ratio,
            target=target, ok=ratio >= TARGET if target else None,
        )
    )  # fmt: skip


def timed(work: Callable[[], None]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())
