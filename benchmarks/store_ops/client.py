"""What one client process does, by the public client: the moves that are measured.

    python -m benchmarks.store_ops.client ROLE ADDRESS ...      prints one JSON object
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forebay.kvstore.client import StoreClient
from forebay.kvstore.client.moving import Mover
from forebay.kvstore.identity import GroupGeometry, Namespace, chunk_key, chunk_keys, pack_tokens, root_key
from forebay.kvstore.protocol import Found, NewChunk, Written

UNIT = 16


def namespace(token_bytes: int, chunk_tokens: int = 256, groups: int = 1) -> Namespace:
    """A model of `groups` cache groups with so many bytes of KV a token in each, the second with a window."""
    layers = max(1, token_bytes // 4096)
    dim = token_bytes // layers // 4
    geometry = [GroupGeometry("full", "full", tuple(range(layers)), 1, dim, "bfloat16")]
    if groups == 2:
        geometry.append(GroupGeometry("window", "window", (layers,), 1, dim, "bfloat16", 512))
    weights = f"bench-{token_bytes}-{chunk_tokens}-{groups}".encode()
    return Namespace(weights=weights, groups=tuple(geometry), chunk_tokens=chunk_tokens)


def prompt(seed: int, tokens: int) -> bytes:
    """Token ids (u32 LE) of a prompt that nobody else has."""
    return pack_tokens(random.Random(seed).choices(range(1000, 200_000), k=tokens))


@dataclass
class Bench:
    """One client and its namespace."""

    client: StoreClient
    spec: Namespace

    def __post_init__(self) -> None:
        self.id = self.client.register(self.spec, "bench")
        self.root = root_key(self.id)
        self.mover = Mover()

    def lookup(self, tokens: bytes) -> Found:
        """From tokens to pinned chunks."""
        keys = chunk_keys(self.root, tokens, self.spec.chunk_tokens)
        return self.client.lookup(self.id, self.root, tokens, keys, limit=len(tokens) // 4)

    def chunks(self, tokens: bytes) -> list[NewChunk]:
        """Every chunk of a prompt, in every group."""
        step, parent, made = 4 * self.spec.chunk_tokens, self.root, []
        for at in range(0, len(tokens), step):
            piece = tokens[at : at + step]
            key = chunk_key(parent, piece)
            made += [NewChunk(g, key, parent, at // 4, piece) for g in range(len(self.spec.groups))]
            parent = key
        return made

    def store(self, chunks: list[NewChunk], source: np.ndarray) -> int:
        """Reserve, copy from `source` on, hash every granule, commit. Returns the bytes that became visible.

        A chunk for which `source` has no bytes left gets those of its end again."""
        slots = self.client.reserve(self.id, "", chunks).slots
        assert all(slot.status == "reserved" for slot in slots), [slot.status for slot in slots]
        granules = [self.spec.groups[chunk.group].granule_bytes for chunk in chunks]
        sources, rooms, moved = [], [], 0
        for chunk, slot, granule in zip(chunks, slots, granules, strict=True):
            length = len(chunk.tokens) // 4 // UNIT * granule
            begin = min(moved, len(source) - length)
            sources.append(source.data[begin : begin + length])
            rooms.append(self.client.room(slot, length))
            moved += length
        sums = self.mover.store(sources, rooms, granules)
        written = [Written(slot.reservation, each) for slot, each in zip(slots, sums, strict=True)]
        assert self.client.commit(written).committed == len(chunks)
        return moved

    def load(self, tokens: bytes, target: np.ndarray) -> int:
        """Look up, copy every chunk out, verify every granule, let go. Returns the bytes."""
        found, targets, moved = self.lookup(tokens), [], 0
        for chunk in found.chunks:
            targets.append(target.data[moved : moved + chunk.length])
            moved += chunk.length
        good = self.mover.load(self.client, found.chunks, targets)
        assert sum(good) == moved, "all of it is what was stored"
        self.client.release([found.lease])
        return moved


def repeat(move: Callable[[], object], seconds: float, least: int = 20) -> list[float]:
    """Seconds of each of as many moves as fit."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < least:
        start = time.perf_counter()
        move()
        times.append(time.perf_counter() - start)
    return times


def fill(bench: Bench, seed: int, tokens: int) -> bytes:
    """Store a prompt, bytes left as they are: what a lookup finds."""
    packed = prompt(seed, tokens)
    most = max(group.granule_bytes for group in bench.spec.groups) * (bench.spec.chunk_tokens // UNIT)
    source = np.zeros(most, dtype=np.uint8)
    chunks = bench.chunks(packed)
    for at in range(0, len(chunks), 256):
        bench.store(chunks[at : at + 256], source)
    return packed


def lookups(bench: Bench, seed: int, tokens: int, seconds: float) -> list[float]:
    """Lookup+pin from tokens; the release goes out behind it, unmeasured."""
    packed = fill(bench, seed, tokens)
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 30:
        start = time.perf_counter()
        found = bench.lookup(packed)
        times.append(time.perf_counter() - start)
        assert found.hit == tokens, (found.hit, tokens)
        bench.client.release([found.lease])
        time.sleep(0.001)
    return times[5:]


def commits(bench: Bench, seed: int, count: int, seconds: float) -> list[float]:
    """Reserve and commit batches of `count` chunks without touching their bytes."""
    serial = [seed << 20]

    def once() -> None:
        serial[0] += 1
        chunks = bench.chunks(prompt(serial[0], count * bench.spec.chunk_tokens))
        start = time.perf_counter()
        slots = bench.client.reserve(bench.id, "", chunks).slots
        sums = b"\0" * (8 * bench.spec.chunk_tokens // UNIT)
        bench.client.commit([Written(slot.reservation, sums) for slot in slots])
        times.append(time.perf_counter() - start)

    times: list[float] = []
    repeat(once, seconds)
    return times


def moves(bench: Bench, seed: int, tokens: int, seconds: float) -> dict[str, list[float]]:
    """Store a prompt of its own and load it back, in turns."""
    length = bench.spec.groups[0].granule_bytes * (tokens // UNIT)
    source = np.random.default_rng(seed).integers(0, 255, length, dtype=np.uint8)
    target = np.zeros(length, dtype=np.uint8)
    result: dict[str, list[float]] = {"store": [], "load": [], "bytes": []}
    until, serial = time.perf_counter() + seconds, seed << 20
    while time.perf_counter() < until or len(result["load"]) < 5:
        serial += 1
        packed = prompt(serial, tokens)
        chunks = bench.chunks(packed)
        start = time.perf_counter()
        stored = bench.store(chunks, source)
        middle = time.perf_counter()
        loaded = bench.load(packed, target)
        end = time.perf_counter()
        assert stored == loaded, "a lookup right after an acknowledged commit hits"
        result["store"].append(middle - start)
        result["load"].append(end - middle)
        result["bytes"].append(float(loaded))
    return result


def main() -> int:
    """Play one role and print its times in seconds."""
    role, address, seed, size, seconds, spec = sys.argv[1:7]
    token_bytes, chunk_tokens, groups = map(int, spec.split(","))
    with StoreClient(address, kind="bench") as client:
        bench = Bench(client, namespace(token_bytes, chunk_tokens, groups))
        run = {"lookups": lookups, "commits": commits, "moves": moves}[role]
        times = run(bench, int(seed), int(size), float(seconds))
    print(json.dumps({"pid": os.getpid(), "times": times}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
