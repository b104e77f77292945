"""The hot buffers' policy as lists and loops: the page to read beside `forebay.kernels.hot`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from forebay.kernels.hot import Ask, Regions, new_regions


@dataclass
class NaiveRegion:
    """One region: the host row in each slot (-1: none), and the slots, oldest first."""

    slots: int
    held: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = [-1] * self.slots
        self.order = list(range(self.slots))

    def step(self, wanted: list[int]) -> tuple[dict[int, int], list[tuple[int, int]]]:
        """The slot of each host row of `wanted`, and the copies (row, slot) that make it true."""
        ids = list(dict.fromkeys(wanted))
        if not ids:
            return {}, []
        hits = [slot for slot in self.order if self.held[slot] in set(ids)]
        old = [slot for slot in self.order if slot not in set(hits)]
        slot_of = {self.held[slot]: slot for slot in hits}
        swaps = []
        for row in ids:
            if row not in slot_of:
                slot = old[len(swaps)]
                self.held[slot] = row
                slot_of[row] = slot
                swaps.append((row, slot))
        self.order = old[len(swaps) :] + [slot for _, slot in swaps] + hits
        return slot_of, swaps

    def forget(self, page: int) -> None:
        self.held = [-1 if row >= 0 and row // 16 == page else row for row in self.held]


@dataclass
class NaiveStep:
    """What one sequence's answer must be."""

    rows: list[int]
    swaps: list[tuple[int, int]]
    cold: int


def naive_resolve(
    region: NaiveRegion | None, blocks: list[int], selected: list[int], resident: list[int], host: list[int]
) -> NaiveStep:
    """One sequence, all of its rows flat. Mutates `region`."""
    rows, lacking, cold = [-1] * len(selected), [], 0
    for at, position in enumerate(selected):
        if position < 0:
            continue
        page, offset = divmod(position, 16)
        if resident[page] >= 0:
            rows[at] = resident[page] * 16 + offset
        elif region is None or host[page] < 0:
            cold += 1
        else:
            lacking.append((at, host[page] * 16 + offset))
    if region is None or not lacking:
        return NaiveStep(rows, [], cold)
    slot_of, swaps = region.step([row for _, row in lacking])
    for at, row in lacking:
        rows[at] = blocks[slot_of[row] // 16] * 16 + slot_of[row] % 16
    return NaiveStep(rows, [(row, blocks[slot // 16] * 16 + slot % 16) for row, slot in swaps], cold)


# --- streams of selections, easy and nasty ---------------------------------------------------------------------


def walk(rng: random.Random, length: int, k: int) -> Iterator[list[int]]:
    """Most of what was read is read again; the rest is near it, or anywhere."""
    present = rng.sample(range(length), k)
    while True:
        kept = rng.sample(present, k - max(1, k // 4))
        while len(kept) < k:
            near = (kept[0] + rng.randrange(-8, 9)) % length if kept and rng.random() < 0.7 else rng.randrange(length)
            if near not in kept:
                kept.append(near)
        rng.shuffle(kept)
        present = kept
        yield list(kept)


def cycle(rng: random.Random, length: int, k: int, slots: int) -> Iterator[list[int]]:
    """A scan round slots + 1 rows: the oldest is always the next."""
    around, at = min(length, slots + 1), 0
    while True:
        yield [(at + i) % around for i in range(min(k, around))]
        at += k


def same(rng: random.Random, length: int, k: int) -> Iterator[list[int]]:
    """Only hits, after the first."""
    chosen = rng.sample(range(length), k)
    while True:
        yield list(chosen)


def always_new(rng: random.Random, length: int, k: int) -> Iterator[list[int]]:
    """Never a hit, as far as the context reaches."""
    at = 0
    while True:
        yield [(at + i) % length for i in range(k)]
        at += k


def holes(rng: random.Random, inner: Iterator[list[int]]) -> Iterator[list[int]]:
    """Nothing in front, in the middle, at the end, or everywhere."""
    for chosen in inner:
        kind, k = rng.randrange(5), len(chosen)
        cut = rng.randrange(k + 1)
        if kind == 0:
            yield [-1] * cut + chosen[cut:]
        elif kind == 1:
            yield chosen[:cut] + [-1] * (k - cut)
        elif kind == 2:
            yield [row if rng.random() < 0.5 else -1 for row in chosen]
        elif kind == 3:
            yield [-1] * k
        else:
            yield chosen


def stream(name: str, rng: random.Random, length: int, k: int, slots: int) -> Iterator[list[int]]:
    """One of all these by name."""
    plain = {
        "walk": lambda: walk(rng, length, k),
        "cycle": lambda: cycle(rng, length, k, slots),
        "same": lambda: same(rng, length, k),
        "new": lambda: always_new(rng, length, k),
    }
    if name == "holes":
        return holes(rng, walk(rng, length, k))
    return plain[name]()


STREAMS = ("walk", "cycle", "same", "new", "holes")


# --- a whole case: several sequences, one device ---------------------------------------------------------------


@dataclass
class Case:
    """Sequences over one device and one host memory, by seed; pages come, go and are given to others."""

    seed: int
    sequences: int = 2
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.pages = rng.randrange(2, 9)
        self.rows_at_once = rng.choice([1, 1, 2, 3])
        self.slots = 16 * rng.randrange(1, 5)
        most = min(self.slots // self.rows_at_once, self.pages * 16)
        self.k = rng.choice([most, rng.randrange(1, most + 1)])
        self.regions: Regions = new_regions(self.sequences, self.slots)
        blocks = rng.sample(range(200, 400), self.sequences * self.slots // 16)
        self.regions.blocks.copy_(torch.tensor(blocks).view(self.sequences, -1))
        self.naive = [NaiveRegion(self.slots) for _ in range(self.sequences)]
        self.region_of = rng.sample(range(self.sequences), self.sequences)
        self.host = [rng.sample(range(i * 100, i * 100 + 50), self.pages) for i in range(self.sequences)]
        self.resident = [[-1] * self.pages for _ in range(self.sequences)]
        name = rng.choice(STREAMS)
        self.streams = [
            [stream(name, rng, self.pages * 16, self.k, self.slots) for _ in range(self.rows_at_once)]
            for _ in range(self.sequences)
        ]

    def change(self) -> list[int]:
        """Pages become resident, are released, turn cold; some give their number to other bytes. Returns those."""
        recycled = []
        for i in range(self.sequences):
            page, deed = self.rng.randrange(self.pages), self.rng.randrange(8)
            if deed == 0:
                self.resident[i][page] = self.rng.randrange(200)
            elif deed in (1, 2):
                self.resident[i][page] = -1
            elif deed == 3 and self.host[i][page] >= 0:
                recycled.append(self.host[i][page])
            elif deed == 4:
                self.host[i][page] = -1
            elif deed == 5 and self.host[i][page] < 0:
                used = set(self.host[i])
                free = next(n for n in range(i * 100, i * 100 + 50) if n not in used)
                recycled.append(free)
                self.host[i][page] = free
        return recycled

    def ask(self, *, padded: int | None = None) -> Ask:
        """The next step; sequence `padded` has no region and selects nothing."""
        selected = [[next(s) for s in streams] for streams in self.streams]
        width = max(len(row) for rows in selected for row in rows)
        selected = [[row + [-1] * (width - len(row)) for row in rows] for rows in selected]
        regions = list(self.region_of)
        if padded is not None:
            regions[padded] = -1
            selected[padded] = [[-1] * width] * self.rows_at_once
        return Ask(
            torch.tensor(selected), torch.tensor(regions), torch.tensor(self.resident), torch.tensor(self.host)
        )

    def expected(self, ask: Ask) -> list[NaiveStep]:
        """What the naive model says. Mutates it."""
        steps = []
        for i, region in enumerate(ask.regions.tolist()):
            mine = self.naive[region] if region >= 0 else None
            blocks = self.regions.blocks[region].tolist() if region >= 0 else []
            flat = ask.selected[i].flatten().tolist()
            steps.append(naive_resolve(mine, blocks, flat, ask.resident[i].tolist(), ask.host[i].tolist()))
        return steps
