"""What others feel of tiers that are saturated: host lookups, and a worker's decoding.

The feeder commits chunks of 16 MiB whose bytes it doesn't touch, faster than the disk takes them: the tier's queue is
full all the time, and hardly any CPU goes to anything else. So it is the tier's doing that is measured.

    python -m benchmarks.tiers.beside [--seconds 4] [--no-model]
    python -m benchmarks.tiers.beside feed ADDRESS SECONDS        the feeder alone
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.report import Measure, Report, median, parser
from benchmarks.store_ops.client import Bench, namespace, prompt
from benchmarks.store_ops.servers import daemon
from benchmarks.ttft import demo_model
from forebay.kvstore.client import StoreClient
from forebay.kvstore.protocol import Written
from forebay.testing.cluster import Cluster

LOOKUP_TOKENS = 65_536
FEED_SPEC = (65536, 256)
FEED_PAUSE_S = 0.03
FEED_CHUNKS = 4
DECODE_TOKENS = 96
ROUNDS = 5


def measure(report: Report, seconds: float, model: Path | None) -> None:
    """Lookups, then decoding if there is a model."""
    lookups(report, seconds)
    if model is not None:
        decoding(report, model)


def lookups(report: Report, seconds: float) -> None:
    """p99 of 4,096 keys, idle and beside a file tier that writes all it can."""
    with daemon(4 << 30, whole=True) as store:
        spec = "256,256,1"
        idle = store.run("lookups", 7, LOOKUP_TOKENS, seconds, spec).times()
        with feeding(store.address, seconds + 3):
            time.sleep(1.5)
            busy = store.run("lookups", 8, LOOKUP_TOKENS, seconds, spec).times()
        with StoreClient(store.address) as client:
            values = client.stats().values
    dropped = values.get("tier.fs.dropped", 0) + values.get("tier.fs.store_dropped", 0)
    before, during = (_p99(times) * 1e3 for times in (idle, busy))
    report.add(Measure("lookup of 4,096 keys, p50, tiers idle", median(idle) * 1e3, "ms"))
    report.add(Measure("lookup of 4,096 keys, p50, files saturated", median(busy) * 1e3, "ms"))
    report.add(Measure("lookup of 4,096 keys, p99, tiers idle", before, "ms"))
    report.add(
        Measure(
            "lookup of 4,096 keys, p99, files saturated", during, "ms", limit=before, ratio=during / before,
            target="<= 2", ok=during <= 2 * before,
        )
    )  # fmt: skip
    report.add(Measure("stores that the full queue dropped meanwhile", dropped, "chunks"))


def decoding(report: Report, model: Path) -> None:
    """Tokens a second of one sequence, idle and beside the same tier; in turns, since the machine drifts."""
    with tempfile.TemporaryDirectory(prefix="forebay-beside-") as folder:
        cluster = Cluster(Path(folder), model, "bfloat16", chunk_tokens=256, memory="2GiB", device_memory="512MiB")
        try:
            cluster.start_store()
            cluster.start_pair("worker", "front")
            rng, idle, busy = random.Random(3), [], []
            _rate(cluster, rng)
            for _ in range(ROUNDS):
                idle.append(_rate(cluster, rng))
                with feeding(cluster.store_address, 60):
                    time.sleep(1.0)
                    busy.append(_rate(cluster, rng))
        finally:
            cluster.stop()
    alone, beside = statistics.median(idle), statistics.median(busy)
    report.add(
        Measure(
            "decoding beside saturated files", beside, "tokens/s", limit=alone, ratio=beside / alone, target=">= 0.95",
            ok=beside >= 0.95 * alone,
        )
    )  # fmt: skip


def _rate(cluster: Cluster, rng: random.Random) -> float:
    tokens = [rng.randrange(1000, 200_000) for _ in range(64)]
    body = cluster.body(tokens, DECODE_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    answer = httpx.post(f"{cluster.url('front')}/v1/completions", json=body, timeout=600)
    answer.raise_for_status()
    return float(answer.json()["usage"]["completion_tokens"]) / (time.perf_counter() - start)


def _p99(times: list[float]) -> float:
    return sorted(times)[len(times) * 99 // 100]


@contextmanager
def feeding(address: str, seconds: float) -> Iterator[None]:
    """A feeder process, for the while."""
    command = [sys.executable, "-m", "benchmarks.tiers.beside", "feed", address, str(seconds)]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def feed(address: str, seconds: float) -> None:
    """Commit untouched chunks at a steady pace."""
    serial, until = 0, time.monotonic() + seconds
    with StoreClient(address, kind="bench") as client:
        bench = Bench(client, namespace(*FEED_SPEC))
        sums = b"\0" * (8 * FEED_SPEC[1] // 16)
        while time.monotonic() < until:
            serial += 1
            chunks = bench.chunks(prompt(1 << 40 | serial, FEED_CHUNKS * FEED_SPEC[1]))
            slots = client.reserve(bench.id, "", chunks).slots
            client.commit([Written(slot.reservation, sums) for slot in slots if slot.status == "reserved"])
            time.sleep(FEED_PAUSE_S)


def main() -> int:
    """Run both; or be the feeder."""
    if sys.argv[1:2] == ["feed"]:
        feed(sys.argv[2], float(sys.argv[3]))
        return 0
    options = parser(__doc__ or "")
    options.add_argument("--seconds", type=float, default=4.0, help="how long lookups are measured")
    options.add_argument("--no-model", action="store_true", help="lookups alone")
    arguments = options.parse_args()
    report = Report("beside: what is felt of a file tier that is saturated")
    measure(report, arguments.seconds, None if arguments.no_model else demo_model())
    return report.print(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
