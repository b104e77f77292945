"""Forebay beside vLLM on the CPU and llama.cpp: one model, the same prompts, one server after the other.

    python -m benchmarks.serve --vllm VENV/bin/vllm --xllamacpp VENV/bin/python     [--cells peers,overhead] [--quick]

cells     peers      prefill of 4,096 tokens; time to first token of 16; decoding 1, 4 and 16 streams at once (256
                     tokens in, 64 out; as many times the median stream); memory of all processes at the end,
                     proportional (what several share counts once) and resident. llama.cpp computes on 4-bit weights:
                     no like for like
          overhead   what a store costs a worker that finds nothing in it: three workers stand, one without a store,
                     one attached that pushes nothing, one that pushes every sealed chunk; each prompt goes to all
                     three, orders changing; CPU seconds of all processes, pushes included, and bytes copied a token,
                     with bootstrap intervals of the ratios

Targets: at least 0.9 of vLLM's prefill and decoding, at less memory; attached and pushing each under 2 %.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Measure, Report, median, parser
from benchmarks.serve_sides.client import ask, decode_tokens_s, fresh_prompts, prefill_tokens_s
from benchmarks.serve_sides.servers import Llama, Ours, Server, Vllm, cpu_s, memory, standing
from benchmarks.vllm_side_by_side import checkpoint
from benchmarks.vllm_sides.sides import Setup
from forebay.testing.cluster import Cluster, wait_for

LEAST_OF_PEER = 0.9
OVERHEAD_MAX = 1.02
RESAMPLES = 4000
NOTHING = ("--push-queue", "1B")
"""A queue into which no chunk fits: attached, and nothing is pushed."""


@dataclass(frozen=True)
class Shape:
    """How much is asked. Tokens of prompts and answers, and how often."""

    prefill: int = 4096
    prompts: int = 5
    decode_in: int = 256
    decode_out: int = 64
    streams: tuple[int, ...] = (1, 4, 16)
    repeats: int = 3
    pairs: int = 20
    pair_in: int = 2048
    pair_out: int = 64


QUICK = Shape(prefill=1024, prompts=2, decode_out=24, streams=(1, 4), repeats=1, pairs=4, pair_in=512, pair_out=16)


@dataclass
class Found:
    """Figures of one server, by name."""

    figures: dict[str, float] = field(default_factory=dict)


def main() -> int:
    """Run the cells; exit code 1 if a target is missed."""
    args = options()
    shape = QUICK if args.quick else Shape()
    report = Report(f"serve: {args.model.name}, {args.dtype}, {'quick form' if args.quick else 'one run each in turn'}")
    with tempfile.TemporaryDirectory(prefix="forebay-serve-") as folder:
        for cell in args.cells.split(","):
            {"peers": peers, "overhead": overhead}[cell](report, args, shape, Path(folder))
    return report.print(args.json)


def options() -> argparse.Namespace:
    """What a user may say."""
    made = parser(__doc__ or "")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--vllm", type=Path, help="the vllm command; without it that side is left out")
    made.add_argument("--xllamacpp", type=Path, help="a Python that has xllamacpp; without it that side is left out")
    made.add_argument("--model", type=Path, default=None, help="safetensors or GGUF (default: the demo model)")
    made.add_argument("--gguf", type=Path, default=None, help="for llama.cpp (default: the demo model)")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--cells", default="peers,overhead")
    made.add_argument("--quick", action="store_true", help="short prompts, few of them: to see whether it works")
    args = made.parse_args()
    from benchmarks.ttft import demo_model

    args.model = args.model or demo_model()
    args.gguf = args.gguf or demo_model()
    return args


def peers(report: Report, args: argparse.Namespace, shape: Shape, folder: Path) -> None:
    """One server after the other."""
    cluster = Cluster(folder, args.model, args.dtype, chunk_tokens=256, memory="2GiB", device_memory="1GiB")
    servers: list[Server] = [Ours("forebay", cluster)]
    if args.vllm is not None:
        longest = shape.prefill + 1024
        setup = Setup(args.vllm, Path(), checkpoint(args.model, folder / "model"), folder, args.dtype, longest, 2)
        servers.append(Vllm(setup))
    if args.xllamacpp is not None:
        servers.append(Llama(args.xllamacpp, args.gguf, folder, max(shape.streams), shape.prefill + 512))
    found: dict[str, Found] = {}
    try:
        for server in servers:
            with standing(server):
                found[server.name] = measured(server, shape)
            cluster.stop()
    finally:
        cluster.stop()
    tell_peers(report, found)


def measured(server: Server, shape: Shape) -> Found:
    """All figures of one server. The same prompts for each."""
    for prompt in fresh_prompts(2, shape.prefill, 1):
        ask(server, prompt, 8)  # compiles, touches pools
    found = Found()
    prompts = fresh_prompts(shape.prompts, shape.prefill, 2)
    found.figures[f"prefill {shape.prefill}, tok/s"] = prefill_tokens_s(server, prompts)
    floor = [ask(server, prompt, 1).first_s for prompt in fresh_prompts(10, 16, 3)]
    found.figures["first token of 16, ms"] = 1e3 * median(floor)
    for streams in shape.streams:
        rates = [
            decode_tokens_s(server, fresh_prompts(streams, shape.decode_in, 10 * streams + number), shape.decode_out)
            for number in range(shape.repeats)
        ]
        found.figures[f"decode {streams}, tok/s"] = median(rates)
    used = memory(server)
    found.figures["memory, MB"] = used.proportional / 1e6
    found.figures["resident, MB"] = used.resident / 1e6
    return found


def tell_peers(report: Report, found: dict[str, Found]) -> None:
    """Each figure of each server; ours beside vLLM's, with its target."""
    peer = found["vllm"].figures if "vllm" in found else {}
    for name, one in found.items():
        for what, value in one.figures.items():
            beside = peer.get(what) if name == "forebay" else None
            ratio = None if beside is None else value / beside
            target, ok = "", None
            if ratio is not None and what.endswith("tok/s"):
                target, ok = f">= {LEAST_OF_PEER}", ratio >= LEAST_OF_PEER
            elif ratio is not None and what == "memory, MB":
                target, ok = "< 1", ratio < 1
            label, _, unit = what.rpartition(", ")
            report.add(Measure(f"{name}: {label}", value, unit, peer=beside, ratio=ratio, target=target, ok=ok))


# --- what the store costs ------------------------------------------------------------------------------------


@dataclass
class Cost:
    """Of one server: CPU seconds, wall seconds and tokens, a request each."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def overhead(report: Report, args: argparse.Namespace, shape: Shape, folder: Path) -> None:
    """Three workers, the same prompts in turn."""
    own = folder / "overhead"
    own.mkdir()
    cluster = Cluster(own, args.model, args.dtype, chunk_tokens=256, memory="2GiB", device_memory="512MiB")
    servers = [
        Ours("alone", cluster, store=False), Ours("attached", cluster, extra=NOTHING), Ours("pushing", cluster),
    ]  # fmt: skip
    costs = {server.name: Cost() for server in servers}
    try:
        for server in servers:
            server.start()
            for prompt in fresh_prompts(2, shape.pair_in, 1):
                ask(server, prompt, 4)
        before = pushed(servers[2])
        rng = random.Random(4)
        for prompt in fresh_prompts(shape.pairs, shape.pair_in, 5):
            for server in rng.sample(servers, len(servers)):
                spend(server, prompt, shape.pair_out, costs[server.name])
        tokens = shape.pairs * (shape.pair_in + shape.pair_out)
        copied = (pushed(servers[2]) - before) / tokens
    finally:
        cluster.stop()
    assert copied > 0, "nothing was pushed"
    tell_overhead(report, costs, copied)


def spend(server: Ours, prompt: Sequence[int], tokens: int, cost: Cost) -> None:
    """One request, and all that it leaves to be done afterwards."""
    cpu, start = cpu_s(server), time.perf_counter()
    seen = ask(server, prompt, tokens, cache_salt=server.name)  # nobody finds what another one has pushed
    cost.wall.append(seen.last_s)
    wait_for("pushes", lambda: not waiting(server), 60)
    time.sleep(max(0.0, start + seen.last_s + 0.5 - time.perf_counter()))  # the same for all, pushes or not
    cost.cpu.append(cpu_s(server) - cpu)
    assert seen.cached_tokens == 0


def pushed(server: Ours) -> float:
    """Bytes that its worker has copied into the store."""
    return _figure(server, "push_bytes_total", "push_bytes")


def waiting(server: Ours) -> float:
    """Bytes that wait to be pushed, and pushes under way."""
    return _figure(server, "push_queue_bytes") + _figure(server, "pushes_running")


def _figure(server: Ours, *ends: str) -> float:
    figures = server.cluster.figures(server.front)
    return sum(value for name, value in figures.items() if name.endswith(ends))


def tell_overhead(report: Report, costs: dict[str, Cost], copied: float) -> None:
    """Attached against alone, pushing against attached."""
    for name, base in (("attached", "alone"), ("pushing", "attached")):
        for what, of in (("CPU", "cpu"), ("time", "wall")):
            ours, theirs = getattr(costs[name], of), getattr(costs[base], of)
            low, ratio, high = interval(theirs, ours)
            ok = ratio < OVERHEAD_MAX if what == "CPU" else None
            label = f"overhead: {name} / {base}, {what} (95 %: {low:.3f} to {high:.3f}, {len(ours)} pairs)"
            target = f"< {OVERHEAD_MAX}" if what == "CPU" else ""
            report.add(Measure(label, sum(ours) / len(ours), "s", peer=sum(theirs) / len(theirs), ratio=ratio,
                               target=target, ok=ok))  # fmt: skip
    report.add(Measure("overhead: copied into the store", copied, "bytes a token"))


def interval(base: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Of the sums' ratio over resampled pairs: its 2.5th percentile, itself, its 97.5th."""
    pairs = list(zip(base, ours, strict=True))
    rng = random.Random(1)

    def ratio(some: Sequence[tuple[float, float]]) -> float:
        return sum(b for _, b in some) / sum(a for a, _ in some)

    drawn = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return drawn[RESAMPLES // 40], ratio(pairs), drawn[-RESAMPLES // 40]


if __name__ == "__main__":
    raise SystemExit(main())
