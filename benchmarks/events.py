"""What it costs to tell a store's chunks once for each of its workers.

    python -m benchmarks.events --workers 1,8,64 --seconds 3 --consumers 1

A relay's streams (`forebay.events.fanout`) are given the same batches of chunks stored and removed, as fast as they
take them; `--consumers` subscribers to every stream receive, in a process of their own. Beside it: one stream for all.
Events and bytes are counted where they leave: a batch for W workers counts W times. What subscribers got is counted
where it arrives; under full load a queue of ZMQ loses the rest, and those who lose it ask again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.synchronize
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import zmq

from forebay.events.fanout import WorkerStreams
from forebay.events.publisher import PublisherLimits, StreamOptions
from forebay.events.schema import CPU, LOCAL, BlockRemoved, BlockStored, KVEvent
from forebay.kvstore.identity import chain, pack_tokens

ROOT = b"r" * 32
BLOCKS = 16
"""Blocks of a chunk of 256 tokens."""
BATCH = 8
"""Chunks in a batch: what one turn of the daemon's loop brings when it is busy."""


@dataclass(frozen=True)
class Row:
    """One measurement. `source_*` is what the store told, `sent_*` what all workers' streams said of it."""

    workers: int
    seconds: float
    cpu_seconds: float
    source_events_per_s: float
    source_blocks_per_s: float
    sent_events_per_s: float
    sent_bytes_per_s: float
    bytes_per_block: float
    received_batches: int
    sent_batches: int
    ring_bytes: int


def batches(count: int) -> list[list[KVEvent]]:
    """Chunks that are stored, and then removed again."""
    made: list[list[KVEvent]] = []
    for number in range(count):
        stored: list[KVEvent] = []
        removed: list[KVEvent] = []
        for index in range(BATCH):
            first = 16 * BLOCKS * (number * BATCH + index)
            tokens = list(range(first, first + 16 * BLOCKS))
            keys = list(chain(ROOT, pack_tokens(tokens)))
            stored.append(BlockStored(list(keys), None, tokens, 16, medium=CPU, locality=LOCAL))
            removed.append(BlockRemoved(list(keys), CPU, locality=LOCAL, reason="evicted"))
        made += [stored, removed]
    return made


def receive(
    endpoints: Sequence[str], each: int, over: multiprocessing.synchronize.Event, found: multiprocessing.Queue[int]
) -> None:
    """Count what arrives at subscribers of all these streams."""
    context = zmq.Context()
    poller = zmq.Poller()
    for endpoint in endpoints:
        for _ in range(each):
            sub = context.socket(zmq.SUB)
            sub.rcvhwm = 100_000
            sub.connect(endpoint)
            sub.subscribe(b"")
            poller.register(sub, zmq.POLLIN)
    found.put(0)
    count = 0
    while not over.is_set():
        for sub, _ in poller.poll(50):
            try:
                while True:
                    sub.recv_multipart(zmq.NOBLOCK)
                    count += 1
            except zmq.Again:
                continue
    found.put(count)
    context.destroy(linger=0)


def measure(workers: int, seconds: float, consumers: int) -> Row:
    """Publish for some seconds to so many workers' streams."""
    limits = PublisherLimits(heartbeat_seconds=3600.0)
    streams = WorkerStreams(
        "tcp://127.0.0.1:0", model="tiny", shared=lambda: (), replay="tcp://127.0.0.1:0",
        options=StreamOptions(epoch="e" * 32, limits=limits),
    )  # fmt: skip
    endpoints = [streams.attach(f"w{number}").endpoint for number in range(workers)]
    over = multiprocessing.Event()
    found: multiprocessing.Queue[int] = multiprocessing.Queue()
    reader = multiprocessing.Process(target=receive, args=(endpoints, consumers, over, found))
    reader.start()
    found.get()
    time.sleep(0.5)
    told = batches(64)
    began, busy, count = time.perf_counter(), _cpu(), 0
    while time.perf_counter() - began < seconds:
        streams.publish_shared(told[count % len(told)], float(count))
        count += 1
        if count % 64 == 0:
            streams.poll()
    took, cpu = time.perf_counter() - began, _cpu() - busy
    figures = streams.statistics()
    time.sleep(0.5)
    over.set()
    received = found.get()
    reader.join()
    size = figures["ring_bytes"] / max(1, figures["ring_batches"])
    streams.close()
    sent = count * workers
    return Row(
        workers, took, cpu, count * BATCH / took, count * BATCH * BLOCKS / took, sent * BATCH / took,
        sent * size / took, size / (BATCH * BLOCKS), received, sent * consumers, int(figures["ring_bytes"]),
    )  # fmt: skip


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.events", description=__doc__)
    parser.add_argument("--workers", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--consumers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(int(count), options.seconds, options.consumers) for count in options.workers.split(",")]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print("workers  store's events/s  sent events/s  sent MB/s  bytes/block  CPU us/event sent  arrived")
    for row in rows:
        cost = 1e6 * row.cpu_seconds / max(1.0, row.sent_events_per_s * row.seconds)
        arrived = row.received_batches / max(1, row.sent_batches)
        print(
            f"{row.workers:7d}  {row.source_events_per_s:16,.0f}  {row.sent_events_per_s:13,.0f}  "
            f"{row.sent_bytes_per_s / 1e6:9.1f}  {row.bytes_per_block:11.1f}  {cost:17.2f}  {arrived:7.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
