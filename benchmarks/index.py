"""The prefix index: blocks stored a second, lookups of short and long prompts, bytes a block; at 1 M blocks beside
Dynamo's RadixTree in the same run, where an environment with `ai-dynamo-runtime` is named.

    python -m benchmarks.index --blocks 1000000 --dynamo .venv-consumers/bin/python

Prompts of 64 blocks (`short`) or 4,096 (`long`) come in events of 64 blocks; ours takes `--batch` events of one holder
in one call, Dynamo's takes them as encoded JSON, one a call. Keys are random numbers. "From wire" are msgpack events
with 16 tokens a block, decoded, hashed, named and indexed. On a machine that others use too, compare processor time
(of all threads): Dynamo's tree has a thread beside the caller's, so its wall time may be the shorter one.
"""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Measure, Report, median, parser
from forebay.events.codec import decode_batch, encode_batch
from forebay.events.schema import GPU, BlockStored
from forebay.events.subscriber import Received
from forebay.scheduler.feed import Feed
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.key_table import Keys
from forebay.scheduler.places import Holders

EVENT = 64
LENGTHS = {"short": 64, "long": 4096}
LOOKUPS = 400
WIRE_BLOCKS = 131_072


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@dataclass
class Took:
    """Seconds by the wall clock, and of the processor."""

    wall: float = 0.0
    cpu: float = 0.0


def fill(index: PrefixIndex, keys: Keys, length: int, owners: int, batch: int) -> Took:
    """Store prompts of so many blocks, each at an owner of its own."""
    # A call has what one owner announced: whole prompts, or a part of one.
    step = max(1, batch * EVENT // length) * length
    took = Took()
    for number, at in enumerate(range(0, keys.size, step)):
        for begin in range(at, min(at + step, keys.size), batch * EVENT):
            piece = keys[begin : min(at + step, begin + batch * EVENT)]
            started, begun = time.perf_counter(), time.process_time()
            index.stored(number % owners, piece)
            took.cpu += time.process_time() - begun
            took.wall += time.perf_counter() - started
    return took


def lookups(ask: Callable[[Keys], object], keys: Keys, length: int) -> list[float]:
    """Seconds of each of some lookups of whole prompts."""
    rng, took = random.Random(1), []
    for _ in range(LOOKUPS):
        at = rng.randrange(keys.size // length) * length
        prompt = keys[at : at + length].copy()
        started = time.perf_counter()
        ask(prompt)
        took.append(time.perf_counter() - started)
    return sorted(took)


def ours(blocks: int, owners: int, length: int, batch: int) -> dict[str, float]:
    """One filling of our index."""
    keys = np.random.default_rng(7).integers(1, 1 << 62, blocks // length * length, np.uint64)
    gc.collect()
    before, index = resident(), PrefixIndex()
    stored = fill(index, keys, length, owners, batch)
    grown = (resident() - before) / keys.size
    assert len(index) == keys.size
    found = {name: lookups(index.match, keys, size) for name, size in LENGTHS.items() if size <= length}
    figures = {
        "stored": keys.size / stored.wall, "stored_cpu": keys.size / stored.cpu,
        "bytes": index.stats().bytes / keys.size, "rss": grown,
        "p50": found["long" if length == LENGTHS["long"] else "short"][LOOKUPS // 2],
        "p99": found["long" if length == LENGTHS["long"] else "short"][LOOKUPS * 99 // 100],
        "rehashes": index.stats().rehashes,
    }  # fmt: skip
    started = time.perf_counter()
    for owner in range(owners):
        index.drop(owner)
    figures["dropped"] = keys.size / (time.perf_counter() - started)
    assert len(index) == 0 and index.stats().bytes < 1 << 16, "what is gone leaves nothing behind"
    return figures


def from_wire() -> float:
    """Blocks a second from payloads of 16 events of 64 blocks, through the feed."""
    rng, payloads = np.random.default_rng(3), []
    tokens = rng.integers(0, 1 << 17, WIRE_BLOCKS * 16).tolist()
    for at in range(0, WIRE_BLOCKS, 16 * EVENT):
        events = [
            BlockStored(
                list(range(begin + 1, begin + 1 + EVENT)), begin if begin > at else None,
                tokens[16 * begin : 16 * (begin + EVENT)], 16, medium=GPU,
            )
            for begin in range(at, at + 16 * EVENT, EVENT)
        ]  # fmt: skip
        payloads.append(encode_batch(0.0, events).payload)
    feed = Feed("w", "m", PrefixIndex(), Holders())
    started = time.perf_counter()
    for seq, payload in enumerate(payloads):
        feed.apply(Received("", seq, decode_batch(payload)))
    took = time.perf_counter() - started
    assert len(feed.index) == WIRE_BLOCKS
    return WIRE_BLOCKS / took


def dynamo(python: Path, blocks: int, owners: int, length: int) -> dict[str, float]:
    """The same with Dynamo's tree, in a process of its environment."""
    script = Path(__file__).with_name("index_dynamo.py")
    arguments = [str(python), "-P", str(script), str(blocks), str(owners), str(length), str(LOOKUPS)]
    told = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=550)
    return dict(json.loads(told.stdout))


def measures(
    blocks: int, owners: Sequence[int], batch: int, runs: int, python: Path | None
) -> Iterator[Measure]:
    """Everything, in order."""
    for count in owners:
        for name, length in LENGTHS.items():
            mine = [ours(blocks, count, length, batch) for _ in range(runs)]
            peer = None if python is None else dynamo(python, blocks, count, length)
            told = f"{blocks:,} blocks, {count} owners, {name}"
            for name_of, shown in (("stored", "stored"), ("stored_cpu", "stored, processor time")):
                rate, other = median([one[name_of] for one in mine]), None if peer is None else peer[name_of]
                yield Measure(
                    f"{told}: {shown}", rate, "blocks/s", peer=other, ratio=None if other is None else rate / other,
                    target="" if other is None else "as many", ok=None if other is None else rate >= other,
                )  # fmt: skip
            for share in ("p50", "p99"):
                value = 1e6 * median([one[share] for one in mine])
                limit = 500.0 if length == LENGTHS["long"] and share == "p50" else None
                yield Measure(
                    f"{told}: lookup {share}", value, "us", peer=None if peer is None else 1e6 * peer[share],
                    target="" if limit is None else "500", ok=None if limit is None else value <= limit,
                )  # fmt: skip
            size = max(one["bytes"] for one in mine)
            other = None if peer is None else peer["rss"]
            yield Measure(f"{told}: size", size, "B/block", peer=other, target="150", ok=size <= 150)
            yield Measure(f"{told}: dropped", median([one["dropped"] for one in mine]), "blocks/s")
    yield Measure("from wire, 16 tokens a block", median([from_wire() for _ in range(runs)]), "blocks/s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    made = parser(__doc__ or "")
    made.add_argument("--blocks", type=int, default=1_000_000, help="how many")
    made.add_argument("--owners", default="8,512", help="how many hold them, with commas between")
    made.add_argument("--batch", type=int, default=64, help="events of one holder that are stored in one call")
    made.add_argument("--runs", type=int, default=3, help="medians of so many")
    made.add_argument("--dynamo", type=Path, help="a Python that has ai-dynamo-runtime")
    given = made.parse_args(argv)
    report = Report("Prefix index")
    owners = [int(part) for part in given.owners.split(",")]
    for measure in measures(given.blocks, owners, given.batch, given.runs, given.dynamo):
        report.add(measure)
    return report.print(given.json)


if __name__ == "__main__":
    sys.exit(main())
