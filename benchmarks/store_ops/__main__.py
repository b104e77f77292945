"""What a store costs its clients, beside the limits of the machine and beside LMCache's server.

    python -m benchmarks.store_ops [--lmcache /venv/bin/lmcache] [--seconds 4]

A lookup starts from token ids: hashing, question, answer, pins. 512 and 4,096 keys are 8,192 and 65,536 tokens in
units of 16, to which both servers' answers are compared by length; ours is exact to the unit with chunks of 256,
LMCache's to its chunk. Stores and loads move 64 MiB in 4 chunks, every byte copied and checksummed, each client in a
process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field

from benchmarks.report import Measure, Report, median, parser
from benchmarks.store_ops.limits import copy_s, round_trip_s
from benchmarks.store_ops.servers import Daemon, LMCache, daemon

LOOKUPS = {"512": 8_192, "4,096": 65_536}
TINY, HYBRID, LITERAL, LARGE = "256,256,1", "256,256,2", "256,16,1", "65536,256,1"
MOVE_TOKENS = 1024
MOVE_BYTES = MOVE_TOKENS * 65536
GRANULE = 16 * 65536
CHUNKS_A_BATCH = 64
CROWD = 8


@dataclass
class Run:
    """One run of the benchmark."""

    report: Report
    seconds: float
    peer: dict[str, float] = field(default_factory=dict)
    seed: int = 1

    def next_seed(self) -> int:
        """A seed that no other client uses."""
        self.seed += 1
        return self.seed

    def lookup_times(self, store: Daemon, tokens: int, spec: str, clients: int) -> list[float]:
        """Seconds of lookups by so many clients at a time."""
        started = [store.run("lookups", self.next_seed(), tokens, self.seconds, spec) for _ in range(clients)]
        return [seconds for client in started for seconds in client.times()]

    def tell_lookups(self, name: str, times: list[float], **beside: float | str | bool | None) -> None:
        """Median and p99 of lookups in milliseconds."""
        p50, p99 = median(times) * 1e3, percentile(times, 99) * 1e3
        self.report.add(Measure(f"lookup {name}, p50", p50, "ms", **beside))  # type: ignore[arg-type]
        self.report.add(Measure(f"lookup {name}, p99", p99, "ms"))


def percentile(values: list[float], share: int) -> float:
    """The value below which so many percent lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


def main() -> int:
    """Measure all; exit code 1 if a target is missed."""
    options = parser(__doc__ or "")
    options.add_argument("--lmcache", help="the lmcache command of another environment (0.5.6)")
    options.add_argument("--seconds", type=float, default=4.0, help="how long each row is measured")
    args = options.parse_args()
    run = Run(Report("store_ops: from a client's process, one or eight of them"), args.seconds)
    if args.lmcache:
        run.peer = peer_figures(args.lmcache)
    with daemon(1 << 30, whole=True) as store:
        idle(run, store)
    with daemon(4 << 30) as store:
        lookups(run, store)
        commits(run, store)
        moves(run, store)
    memory(run)
    return run.report.print(args.json)


def peer_figures(command: str) -> dict[str, float]:
    """LMCache's medians in milliseconds: lookups of both lengths, store and retrieve of 64 MiB."""
    found: dict[str, float] = {}
    for name, tokens in LOOKUPS.items():
        shape = f"(2,{tokens // 8},16,1,32):bfloat16:2"
        for size in (256, 16):
            warm = LMCache(command, size).bench(tokens, shape, 12)["warm_lookup"]
            found[f"lookup {name} {size}"] = warm["warm_lookup_p50"]
    figures = LMCache(command).bench(MOVE_TOKENS, f"(2,{MOVE_TOKENS // 8},16,8,128):bfloat16:16", 12)
    found["store"] = figures["cold_store"]["cold_store_p50"]
    found["load"] = figures["warm_retrieve"]["warm_retrieve_p50"]
    return found


def idle(run: Run, store: Daemon) -> None:
    """What a daemon costs that nobody asks, its heartbeats included."""
    store.run("lookups", run.next_seed(), LOOKUPS["512"], 0.1, TINY).times()
    time.sleep(2)
    before, start = store.cpu_s(), time.perf_counter()
    time.sleep(30)
    share = (store.cpu_s() - before) / (time.perf_counter() - start) * 100
    run.report.add(Measure("idle daemon, with files and events", share, "% of a core", target="< 0.1", ok=share < 0.1))


def lookups(run: Run, store: Daemon) -> None:
    """Lookups alone, in a crowd, and beside clients that move bytes."""
    for name, tokens in LOOKUPS.items():
        limit = round_trip_s(tokens // 16 * 32, tokens // 256 * 64) * 1e3
        times = run.lookup_times(store, tokens, TINY, 1)
        p50, peer = median(times) * 1e3, run.peer.get(f"lookup {name} 256")
        good = p50 <= 1.5 if tokens == LOOKUPS["4,096"] else None
        if peer is not None:
            good = good is not False and p50 < peer
        target = "<= 1.5, < peer" if tokens == LOOKUPS["4,096"] else "< peer"
        beside = {"peer": peer, "limit": limit, "ratio": p50 / limit, "target": target, "ok": good}
        run.tell_lookups(f"{name} keys", times, **beside)  # type: ignore[arg-type]
        run.tell_lookups(f"{name} keys, two groups", run.lookup_times(store, tokens, HYBRID, 1))
        literal = run.lookup_times(store, tokens, LITERAL, 1)
        peer = run.peer.get(f"lookup {name} 16")
        run.tell_lookups(
            f"{name} keys, chunks of 16 tokens", literal, peer=peer,
            ok=None if peer is None else median(literal) * 1e3 < peer, target="< peer",
        )  # fmt: skip
    run.tell_lookups("4,096 keys, 8 clients", run.lookup_times(store, LOOKUPS["4,096"], TINY, CROWD))
    mover = store.run("moves", run.next_seed(), MOVE_TOKENS, 3 * run.seconds, LARGE)
    time.sleep(1.5)
    run.tell_lookups("4,096 keys, beside a mover", run.lookup_times(store, LOOKUPS["4,096"], TINY, 1))
    mover.times()


def commits(run: Run, store: Daemon) -> None:
    """Reserve and commit without bytes: what the daemon can take in."""
    for clients in (1, CROWD):
        started = [store.run("commits", run.next_seed(), CHUNKS_A_BATCH, run.seconds, TINY) for _ in range(clients)]
        times = [seconds for client in started for seconds in client.times()]
        each = median(times) / CHUNKS_A_BATCH
        name = "1 client" if clients == 1 else f"{clients} clients"
        run.report.add(Measure(f"reserve+commit a chunk, {name}", each * 1e6, "us"))
        run.report.add(Measure(f"reserve+commit, {name}", clients / each, "chunks/s"))


def moves(run: Run, store: Daemon) -> None:
    """Stores and loads of 64 MiB, and what they cost the daemon."""
    before = store.cpu_s()
    measured = store.run("moves", run.next_seed(), MOVE_TOKENS, 3 * run.seconds, LARGE).times()
    spent = store.cpu_s() - before
    limit = copy_s(MOVE_BYTES, GRANULE, hash_too=True)
    plain = copy_s(MOVE_BYTES, GRANULE, hash_too=False)
    for what in ("store", "load"):
        took = median(measured[what][1:])
        rate, peer = MOVE_BYTES / took / 1e9, run.peer.get(what)
        of_peer = None if peer is None else MOVE_BYTES / peer / 1e6
        run.report.add(
            Measure(
                f"{what} 64 MiB, of memcpy + xxh3", rate, "GB/s", limit=MOVE_BYTES / limit / 1e9, ratio=limit / took,
                target=">= 0.8", ok=limit / took >= 0.8,
            )
        )  # fmt: skip
        run.report.add(
            Measure(
                f"{what} 64 MiB, of the peer's", rate, "GB/s", peer=of_peer, limit=MOVE_BYTES / plain / 1e9,
                ratio=None if of_peer is None else rate / of_peer, target=">= 2",
                ok=None if of_peer is None else rate / of_peer >= 2,
            )
        )  # fmt: skip
    moved = 2 * sum(measured["bytes"]) / 1e9
    run.report.add(Measure("daemon's CPU a GB moved", spent / moved * 1e3, "ms/GB"))


def memory(run: Run) -> None:
    """Bytes of the daemon's memory a chunk, a million of them in the index."""
    command = [sys.executable, "-m", "benchmarks.store_ops.memory", "1000000"]
    each = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    limit = 2**30 / 1e6
    run.report.add(
        Measure(
            "daemon's memory a chunk, of 1 GiB a million", each, "bytes", limit=limit, ratio=each / limit,
            target="<= 1", ok=each <= limit,
        )
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
