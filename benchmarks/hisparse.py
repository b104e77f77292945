"""Hot buffers on a CPU, whose "device" is a capped pool: how many requests, how many misses, how much slower.

    python -m benchmarks.hisparse concurrency     requests of one length under way before the first waits or gives way
    python -m benchmarks.hisparse policy          misses of a region of twice what a step reads: LRU, FIFO, Belady
    python -m benchmarks.hisparse decode          a decode step with a region against full residency

`concurrency` runs the worker's own books and scheduler, with a store that takes everything, and computes nothing: every
request finds its prompt in host memory, as in a conversation's next turn, and decodes. *Plain offload* keeps what
doesn't fit in host memory too, but has all of a request on the device while it runs: so as many run as with ordinary
residency, and the others wait there.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from benchmarks.hisparse_books import Books, tiny_glm
from forebay.kernels.chosen import resident_slots
from forebay.kernels.hot import Ask, Mirror, new_regions, resolve_and_copy
from forebay.kernels.sparse import sparse_latent_attention

MIB = 1 << 20


# --- concurrency ------------------------------------------------------------------------------------------------


def concurrency(device: int, contexts: Sequence[int], most: int) -> None:
    """Print requests at a time by context length, for both ways to hold them."""
    info = tiny_glm()
    print(f"device pool of {device // MIB} MiB, index keys in FP8; a region has {Books.rows(info)} rows")
    print(f"{'context':>10} {'ordinary':>9} {'plain offload':>14} {'hot':>6} {'ratio':>7}   hot: in host memory")
    for context in contexts:
        ordinary = Books(info, device, context, hot=False).fill(most)
        hot = Books(info, device, context, hot=True)
        running = hot.fill(most)
        ratio = f"{running / ordinary:6.1f}x" if ordinary else "      -"
        held = hot.host_bytes / MIB
        print(f"{context:>10,} {ordinary:>9} {ordinary:>14} {running:>6} {ratio}   {held:,.0f} MiB", flush=True)


# --- policy -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """What a layer reads, step by step."""

    steps: Sequence[Sequence[int]]
    k: int


def locality_trace(length: int, k: int, steps: int, seed: int = 0) -> Trace:
    """A synthetic one: much of what was read is read again; rows that matter come up again and again, by Zipf's law;
    some come up once; the newest positions, always."""
    rng = random.Random(seed)
    order = list(range(length))
    rng.shuffle(order)
    popular = order[: 3 * k]
    weights = list(accumulate((at + 1) ** -1.0 for at in range(len(popular))))
    present: dict[int, None] = dict.fromkeys(order[:k])
    out = []
    for step in range(steps):
        newest = dict.fromkeys(length + step - near for near in range(k // 32 + 1))
        kept = dict.fromkeys(row for row in present if rng.random() < 0.5)
        present = newest | kept
        while len(present) < k:
            known = rng.random() < 0.94
            present[rng.choices(popular, cum_weights=weights)[0] if known else rng.choice(order)] = None
        chosen = list(present)[:k]
        rng.shuffle(chosen)
        out.append(chosen)
    return Trace(out, k)


def misses_lru(trace: Trace, slots: int) -> int:
    """Of the region's own policy: what was hit is newer than what was filled beside it."""
    held: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for step in trace.steps:
        hits = [row for row in held if row in set(step)]
        new = [row for row in step if row not in held]
        missed += len(new)
        for row in hits:
            del held[row]
        for row in (*new, *hits):
            held[row] = None
        while len(held) > slots:
            held.popitem(last=False)
    return missed


def misses_fifo(trace: Trace, slots: int) -> int:
    """The oldest filled goes, unless this step reads it."""
    queue: deque[int] = deque()
    held: set[int] = set()
    missed = 0
    for step in trace.steps:
        wanted = set(step)
        for row in step:
            if row in held:
                continue
            missed += 1
            while len(held) >= slots:
                oldest = queue.popleft()
                if oldest in wanted:
                    queue.append(oldest)
                else:
                    held.remove(oldest)
            held.add(row)
            queue.append(row)
    return missed


def misses_belady(trace: Trace, slots: int) -> int:
    """The best there could be: what is read again last, or never, goes."""
    nexts: list[dict[int, int]] = []
    later: dict[int, int] = {}
    for at in range(len(trace.steps) - 1, -1, -1):
        nexts.append({row: later.get(row, 1 << 60) for row in trace.steps[at]})
        for row in trace.steps[at]:
            later[row] = at
    nexts.reverse()
    held: dict[int, int] = {}
    missed = 0
    for at, step in enumerate(trace.steps):
        new = [row for row in step if row not in held]
        missed += len(new)
        for row in step:
            held[row] = nexts[at][row]
        if len(held) > slots:
            for row in sorted(held, key=held.__getitem__, reverse=True)[: len(held) - slots]:
                del held[row]
    return missed


PUBLISHED = {"LRU": 13.4, "FIFO": 17.2, "Belady": 8.2}


def policy(length: int, k: int, steps: int) -> dict[str, float]:
    """Print and return the share of rows that are missed with a region of 2k."""
    trace = locality_trace(length, k, steps)
    counts: dict[str, Callable[[Trace, int], int]] = {
        "LRU": misses_lru, "FIFO": misses_fifo, "Belady": misses_belady,
    }  # fmt: skip
    found = {}
    print(f"{steps} steps of {k} rows out of {length:,}; a region of {2 * k}")
    for name, count in counts.items():
        found[name] = 100 * count(trace, 2 * k) / (k * len(trace.steps))
        print(f"{name:>8}: {found[name]:5.1f} % missed   (published, of a real model: {PUBLISHED[name]} %)", flush=True)
    return found


# --- decode -----------------------------------------------------------------------------------------------------


def decode(context: int, k: int, steps: int) -> None:
    """Print milliseconds of CPU time for one layer of one request: where its rows are, and attention over them."""
    torch.set_num_threads(1)
    layer = _Layer(context, k)
    trace = locality_trace(context - k, k, steps + 8).steps
    print(f"one layer: {context:,} positions, {k} of them read, rows of {WIDTH} in fp32, {HEADS} heads")
    times = {}
    for name, attend in (("full residency", layer.full), (f"a region of {2 * k} rows", layer.hot)):
        for chosen in trace[:8]:
            attend(chosen)
        before = time.process_time()
        for chosen in trace[8:]:
            attend(chosen)
        times[name] = 1000 * (time.process_time() - before) / steps
        print(f"{name:>24}: {times[name]:7.2f} ms a step", flush=True)
    full, hot = times.values()
    print(f"{hot / full:.2f} times as long, with {100 * layer.missed / (k * (steps + 8)):.1f} % of the rows copied")


WIDTH, RANK, HEADS = 576, 512, 16


class _Layer:
    """One sparse layer's cache twice: all of it on the device, and all of it in host memory."""

    def __init__(self, context: int, k: int) -> None:
        pages, blocks = -(-context // 16), 2 * k // 16
        noise = torch.Generator().manual_seed(0)
        self._pool = torch.randn(pages + blocks, 1, 1, 1, 16, WIDTH, generator=noise)
        rows = self._pool[:pages].clone().view(-1).view(torch.uint8)
        self._mirror = Mirror(rows, torch.arange(pages) * (16 * WIDTH * 4))
        self._here, self._away = torch.arange(pages)[None], torch.full((1, pages), -1)
        self._regions = new_regions(1, 2 * k)
        self._regions.blocks[0] = torch.arange(pages, pages + blocks)
        self._q = torch.randn(1, HEADS, WIDTH, generator=noise)
        self.missed = 0

    def full(self, chosen: Sequence[int]) -> None:
        """A step with everything resident."""
        self._attend(resident_slots(self._here, torch.zeros(1, dtype=torch.int64), torch.tensor([list(chosen)])))

    def hot(self, chosen: Sequence[int]) -> None:
        """A step with a region."""
        ask = Ask(torch.tensor([[list(chosen)]]), torch.tensor([0]), self._away, self._here)
        plan = resolve_and_copy(self._regions, ask, self._mirror, self._pool, 0)
        self.missed += int(plan.swaps[0])
        self._attend(plan.rows[0])

    def _attend(self, slots: Tensor) -> None:
        sparse_latent_attention(self._q, self._pool, 0, slots, scale=0.1, rank=RANK)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("concurrency", "policy", "decode"))
    parser.add_argument("--device-memory", type=int, default=1024, help="MiB of the device's pool")
    parser.add_argument("--context", type=int, nargs="*", default=[8192, 32768, 131072, 524288, 1 << 20])
    parser.add_argument("--most", type=int, default=64, help="requests that are tried at a time")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    if args.what == "concurrency":
        concurrency(args.device_memory * MIB, args.context, args.most)
    elif args.what == "policy":
        policy(131072, 256, args.steps)
    else:
        decode(args.context[0], 512, args.steps)


if __name__ == "__main__":
    main()
