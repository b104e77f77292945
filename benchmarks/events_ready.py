"""How long a router that starts takes to know a store: `python -m benchmarks.events_ready --blocks 1000000`.

A publisher in a process of its own holds so many blocks of 16 tokens, in chains of `--chain`, and has told far more
than its ring has kept. A subscriber joins, is answered with the compacted history, decodes it, hashes its tokens and
indexes them, as `forebay router` does. Ready is when all blocks are in the index.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks.report import Measure, Report, parser
from forebay.events.publisher import EventPublisher, PublisherLimits, StreamOptions, restart_safe_seq
from forebay.events.schema import CPU, LOCAL, BlockStored
from forebay.events.subscriber import EventSubscriber
from forebay.scheduler.feed import Feed
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.loops import compiled_loops
from forebay.scheduler.places import Holders

LIMIT_S = 600.0


def held(blocks: int, chain: int) -> Iterator[BlockStored]:
    """What the store holds: chains whose tokens are numbers that never come again."""
    for begin in range(0, blocks, chain):
        count = min(chain, blocks - begin)
        hashes: list[int | bytes] = list(range(begin + 1, begin + 1 + count))
        tokens = [(16 * begin + place) & 0xFFFFFFFF for place in range(16 * count)]
        yield BlockStored(hashes, None, tokens, 16, medium=CPU, locality=LOCAL)


def publish(blocks: int, chain: int, told: multiprocessing.connection.Connection) -> None:
    """Serve replays until told to stop."""
    publisher = EventPublisher(
        "tcp://127.0.0.1:0", topic="kv@127.0.0.1:8000@m", replay="tcp://127.0.0.1:0",
        options=StreamOptions(
            epoch="00" * 16, first_seq=restart_safe_seq(time.time()), limits=PublisherLimits(ring_batches=16)
        ),
        snapshot=lambda: held(blocks, chain),
    )  # fmt: skip
    # The ring has forgotten how it came to this.
    for event in held(min(blocks, 64 * chain), chain):
        publisher.publish([event], time.time())
    told.send((publisher.endpoint, publisher.replay_endpoint))
    while not told.poll(0 if publisher.answering else 0.001):
        publisher.tick(time.time())
        while publisher.poll_replay():
            pass
    publisher.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    made = parser(__doc__ or "")
    made.add_argument("--blocks", type=int, default=1_000_000, help="that the store holds")
    made.add_argument("--chain", type=int, default=256, help="blocks of one event")
    given = made.parse_args(argv)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=publish, args=(given.blocks, given.chain, theirs), daemon=True)
    child.start()
    endpoint, replay = ours.recv()
    feed = Feed("s0", "m", PrefixIndex(), Holders(), 16)
    batches, started = 0, time.perf_counter()
    with EventSubscriber(endpoint, replay=replay, from_start=True, replay_timeout=LIMIT_S) as stream:
        while len(feed.index) < given.blocks and time.perf_counter() - started < LIMIT_S:
            received = stream.receive(0.5)
            if received is not None:
                batches += 1
                feed.apply(received)
    took = time.perf_counter() - started
    ours.send("over")
    child.join()
    known, loops = len(feed.index), "compiled" if compiled_loops() else "numpy"
    report = Report(f"A router joins a store of {given.blocks:,} blocks (loops: {loops})")
    report.add(Measure("blocks known", float(known), "", target=f"{given.blocks:,}", ok=known == given.blocks))
    report.add(Measure("ready after", took, "s"))
    report.add(Measure("rate", known / took, "blocks/s"))
    report.add(Measure("batches", float(batches), ""))
    return report.print(given.json)


if __name__ == "__main__":
    sys.exit(main())
