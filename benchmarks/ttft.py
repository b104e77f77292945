"""Time to first token of a 4,096-token prompt: cold, device hit, host hit from another worker, file hit.

    python -m benchmarks.ttft [--model PATH] [--prompts 5] [--dtype bfloat16]

Real processes by the public commands. Each prompt is of its own random tokens, sent once a cell, so every
figure is a median over prompts. Beside them, in the same run: the floor (TTFT of a 16-token prompt), a memcpy
of the bytes that a host hit loads, and an O_DIRECT read of the bytes that a file hit loads.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmarks.report import Measure, Report, median, parser
from forebay.testing.cluster import Cluster

PROMPT_TOKENS = 4096
FLOOR_TOKENS = 16
READ_BYTES = 4 << 20


@dataclass
class Bench:
    """One cluster and its prompts."""

    cluster: Cluster
    client: httpx.Client
    prompts: list[list[int]]

    def ttft(self, frontend: str, prompt: list[int]) -> float:
        """Seconds from sending a streamed request to its first token."""
        body = self.cluster.body(prompt, 1, stream=True)
        start = time.perf_counter()
        url = f"{self.cluster.url(frontend)}/v1/completions"
        with self.client.stream("POST", url, json=body, timeout=600) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    return time.perf_counter() - start
        raise AssertionError("the stream ended without a token")

    def cell(self, frontend: str) -> list[float]:
        """TTFT of every prompt."""
        return [self.ttft(frontend, prompt) for prompt in self.prompts]

    def floor(self, frontend: str, seed: int) -> list[float]:
        """TTFT of short prompts that nobody has seen: what a request costs without its prefix."""
        rng = random.Random(seed)
        prompts = [[rng.randrange(1000, 200_000) for _ in range(FLOOR_TOKENS)] for _ in range(12)]
        return [self.ttft(frontend, prompt) for prompt in prompts][2:]

    def loaded(self, frontend: str) -> float:
        """Bytes that this front end's worker has copied out of the store."""
        figures = self.cluster.figures(frontend)
        return sum(value for name, value in figures.items() if "loaded_" in name and name.endswith("_bytes"))


def memcpy_s(length: int) -> float:
    """Seconds to copy `length` bytes from shared memory to private memory, both warm; median of 15."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="forebay-bench-") as file:
        file.truncate(length)
        source = np.frombuffer(mmap.mmap(file.fileno(), length), dtype=np.uint8)
        target, other = np.empty(length, dtype=np.uint8), np.ones(128 << 20, dtype=np.uint8)
        source[:] = 1
        target[:] = 0
        times = []
        for _ in range(15):
            other += 1  # push both out of the caches
            start = time.perf_counter()
            np.copyto(target, source)
            times.append(time.perf_counter() - start)
    return median(times)


def direct_read_s(length: int, folder: Path) -> float:
    """Seconds to read `length` bytes of a file with O_DIRECT in 4 MiB pieces; median of 7."""
    path = folder / "direct-read"
    length = -(-length // 4096) * 4096
    path.write_bytes(os.urandom(length))
    os.sync()
    buffer = memoryview(mmap.mmap(-1, READ_BYTES))
    times = []
    for _ in range(7):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        start = time.perf_counter()
        at = 0
        while at < length:
            at += os.preadv(descriptor, [buffer[: min(READ_BYTES, length - at)]], at)
        times.append(time.perf_counter() - start)
        os.close(descriptor)
    path.unlink()
    return median(times)


def main() -> int:
    """Run all cells; exit code 1 if a target is missed."""
    options = parser(__doc__ or "")
    options.add_argument("--model", type=Path, help="safetensors directory or GGUF (default: the demo model)")
    options.add_argument("--prompts", type=int, default=5)
    options.add_argument("--dtype", default="bfloat16")
    args = options.parse_args()
    model = args.model or demo_model()
    rng = random.Random(20)
    prompts = [[rng.randrange(1000, 200_000) for _ in range(PROMPT_TOKENS)] for _ in range(args.prompts)]
    report = Report(f"ttft: {PROMPT_TOKENS}-token prompts, {args.dtype}, medians of {len(prompts)}")
    with tempfile.TemporaryDirectory(prefix="forebay-ttft-") as folder, httpx.Client() as client:
        cluster = Cluster(
            Path(folder), model, args.dtype, chunk_tokens=256, memory="2GiB", device_memory="1GiB"
        )
        try:
            run(report, Bench(cluster, client, prompts))
        finally:
            cluster.stop()
    return report.print(args.json)


def demo_model() -> Path:
    """The demo model, assembled if need be."""
    from forebay.models.demo import demo_path

    return demo_path()


def run(report: Report, bench: Bench) -> None:
    """All cells, in the order in which they fill the tiers."""
    cluster = bench.cluster
    cluster.start_store()
    cluster.start_pair("worker1", "front1")
    bench.floor("front1", 0)
    cold = bench.cell("front1")
    device = bench.cell("front1")
    floors = bench.floor("front1", 1)
    cluster.settle("front1")
    cluster.start_pair("worker2", "front2")
    bench.floor("front2", 2)
    host = bench.cell("front2")
    host_bytes = int(bench.loaded("front2") / len(bench.prompts))
    floors += bench.floor("front2", 3)
    cluster.settle("front2")
    cluster.stop()
    cluster.start_store()
    cluster.start_pair("worker1", "front1")
    bench.floor("front1", 4)
    files = bench.cell("front1")
    file_bytes = int(cluster.store_values()["tier.fs.promoted_bytes"] / len(bench.prompts))
    floors += bench.floor("front1", 5)
    tell(report, cold, device, host, files, floors, host_bytes, file_bytes, cluster.folder)


def tell(
    report: Report,
    cold: Sequence[float],
    device: Sequence[float],
    host: Sequence[float],
    files: Sequence[float],
    floors: Sequence[float],
    host_bytes: int,
    file_bytes: int,
    folder: Path,
) -> None:
    """The figures and their targets."""
    floor, base = median(floors), median(cold)
    copy, read = memcpy_s(host_bytes), direct_read_s(file_bytes, folder)
    report.add(Measure("floor: 16-token prompt", floor * 1e3, "ms"))
    report.add(Measure("cold", base * 1e3, "ms"))
    report.add(Measure("device hit", median(device) * 1e3, "ms", peer=base * 1e3, ratio=base / median(device)))
    for name, times, least, bytes_, moved in (
        ("host hit", host, 20, host_bytes, copy),
        ("file hit", files, 10, file_bytes, read),
    ):
        took = median(times)
        report.add(
            Measure(
                f"{name}, times faster than cold", took * 1e3, "ms", peer=base * 1e3, ratio=base / took,
                target=f">= {least}x", ok=base / took >= least,
            )
        )  # fmt: skip
        limit = floor + 3 * moved
        report.add(
            Measure(
                f"{name}, against floor + 3 moves of {bytes_ / 1e6:.1f} MB ({moved * 1e3:.2f} ms each)", took * 1e3,
                "ms", limit=limit * 1e3, ratio=took / limit, target="<= 1", ok=took <= limit,
            )
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
