"""Load all, compute all, or cut: time to first token of prompts whose prefix lies in a tier of any speed.

    python -m benchmarks.cut [--long] [--lengths 512,2048] [--times 0.1,0.33,1,3,10] [--repeats 3] [--small]

Real processes by the public commands: one store with a file tier behind a link that is throttled, three workers that
differ in `--prefixes` alone. For each length, break-even is measured first: the bytes that loading all takes, by the
seconds that computing all takes. Then the link is set to so many times that. Each prompt is of its own random tokens
and goes to all three: computed (by the first, which stores it), then loaded and cut, in changing order, with memory
emptied before each; so the three are measured within seconds of each other. Loading all isn't measured where it would
take longer than `--longest`; computing all is better there by far.

Targets: the cut never takes over 3 % more than the better of the two; near break-even it takes less than both.
Intervals are bootstrapped over prompts.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.made import LETTERS, small_model
from benchmarks.report import Measure, Report, median, parser, table
from benchmarks.serve import interval
from benchmarks.ttft import Bench, demo_model
from forebay.kvstore.client import StoreClient
from forebay.testing.cluster import Cluster, wait_for

POLICIES = ("compute", "load", "cut")
SHORT = ((512, 2048), (0.1, 0.33, 1.0, 3.0, 10.0), 3)
LONG = ((512, 2048, 8192, 32512), (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0), 5)
WORSE_MAX = 1.03
MIDDLE = (0.5, 2.0)
"""Times break-even between which the cut has to be better than both."""
WARM_UP_TOKENS = 1024
CHUNK = 256


@dataclass
class Cell:
    """One length at one bandwidth: seconds to the first token by policy, one a prompt; what the cuts loaded."""

    length: int
    times: float
    bytes_s: float
    seconds: dict[str, list[float]] = field(default_factory=lambda: {policy: [] for policy in POLICIES})
    loaded: list[float] = field(default_factory=list)


class Arena:
    """A store, its throttled tier, and one worker a policy."""

    def __init__(self, cluster: Cluster, client: httpx.Client, longest: int, tokens: range) -> None:
        self.cluster = cluster
        self._bench = Bench(cluster, client, [])
        self._rng, self._tokens = random.Random(7), tokens
        self._set_pace(float("inf"))
        (cluster.folder / "keep").touch()
        cluster.start_store()
        # Room for two prompts of the longest kind.
        settings = ("--max-tokens", str(2 * longest + 2048), "--lookup-deadline", "600s")
        for policy in POLICIES:
            cluster.start_worker(policy, extra=(*settings, "--prefixes", policy))
        for policy in POLICIES:
            cluster.start_frontend(f"front-{policy}", policy)

    def prompt(self, length: int) -> list[int]:
        """Tokens that nobody has seen."""
        return self._rng.choices(self._tokens, k=length)

    def store(self, prompt: list[int]) -> float:
        """Have it computed and stored; the seconds to its first token."""
        took = self._bench.ttft("front-compute", prompt)
        self.cluster.settle("front-compute")
        return took

    def ask(self, policy: str, prompt: list[int], bytes_s: float) -> float:
        """Seconds to the first token by a policy, with memory empty and the link at this pace."""
        self._empty_memory()
        self._set_pace(bytes_s)
        took = self._bench.ttft(f"front-{policy}", prompt)
        self._set_pace(float("inf"))
        self.cluster.settle(f"front-{policy}")
        return took

    def loaded(self) -> float:
        """Tokens that the cutting worker has loaded so far."""
        figures = self.cluster.figures("front-cut")
        return next((value for name, value in figures.items() if name.endswith("tokens_loaded")), 0.0)

    def promoted(self) -> float:
        """Bytes that the tier has brought so far."""
        return self.cluster.store_values().get("tier.slow.promoted_bytes", 0.0)

    def _empty_memory(self) -> None:
        """Nothing is under way, and nothing is in host memory; the tier keeps what it has."""
        self._set_pace(float("inf"))
        wait_for("loads under way", lambda: self.cluster.store_values()["host.reserved_bytes"] == 0)
        with StoreClient(self.cluster.store_address) as client:
            client.clear()

    def _set_pace(self, bytes_s: float) -> None:
        partial = self.cluster.folder / "pace.partial"
        partial.write_text(str(bytes_s))
        partial.replace(self.cluster.folder / "pace")


def break_even(arena: Arena, length: int) -> float:
    """Bytes a second at which loading all of a prefix takes as long as computing it: the median of three prompts."""
    rates = []
    for _ in range(3):
        prompt = arena.prompt(length)
        computing = arena.store(prompt)
        before = arena.promoted()
        arena.ask("load", prompt, float("inf"))
        rates.append((arena.promoted() - before) / computing)
    return median(rates)


def measure(arena: Arena, length: int, times: float, bytes_s: float, repeats: int, longest_s: float) -> Cell:
    """All policies at one length and bandwidth."""
    cell = Cell(length, times, bytes_s)
    known = arena.prompt(min(length, WARM_UP_TOKENS))
    arena.store(known)
    arena.ask("cut", known, bytes_s)  # so that the worker knows this pace, as it would after any other request
    for number in range(repeats):
        prompt = arena.prompt(length)
        cell.seconds["compute"].append(arena.store(prompt))
        loads = cell.seconds["compute"][0] / times <= longest_s
        for policy in ("load", "cut") if number % 2 else ("cut", "load"):
            if policy == "load" and not loads:
                continue
            before = arena.loaded()
            cell.seconds[policy].append(arena.ask(policy, prompt, bytes_s))
            if policy == "cut":
                cell.loaded.append(arena.loaded() - before)
    return cell


def tell(report: Report, cell: Cell) -> None:
    """One cell's figures and targets."""
    name = f"{cell.length} tokens, {cell.times:g} x break-even ({cell.bytes_s / 1e6:.2f} MB/s)"
    compute, load, cut = (cell.seconds[policy] for policy in POLICIES)
    report.add(Measure(f"{name}: compute all", median(compute) * 1e3, "ms"))
    if load:
        report.add(Measure(f"{name}: load all", median(load) * 1e3, "ms"))
    loads = bool(load) and sum(load) < sum(compute)
    best = load if loads else compute
    low, ratio, high = interval(best, cut)
    share = sum(cell.loaded) / (len(cell.loaded) * cell.length)
    report.add(
        Measure(
            f"{name}: cut, {share:.0%} loaded, against {'loading' if loads else 'computing'} all"
            f" (95 %: {low:.3f} to {high:.3f})",
            median(cut) * 1e3, "ms", peer=median(best) * 1e3, ratio=ratio, target=f"<= {WORSE_MAX}",
            ok=ratio <= WORSE_MAX,
        )
    )  # fmt: skip
    if MIDDLE[0] <= cell.times <= MIDDLE[1]:
        report.add(
            Measure(f"{name}: cut, better than both", median(cut) * 1e3, "ms", peer=median(best) * 1e3, ratio=ratio,
                    target="interval < 1", ok=high < 1)
        )  # fmt: skip


def numbers(text: str) -> list[float]:
    """`1,2.5` as numbers."""
    return [float(part) for part in text.split(",")]


def main() -> int:
    """Run all cells; exit code 1 if a target is missed."""
    options = parser(__doc__ or "")
    options.add_argument("--model", type=Path, help="safetensors directory or GGUF (default: the demo model)")
    options.add_argument("--small", action="store_true", help="a small model that is made for it, for slow CPUs")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--long", action="store_true", help="up to 32 k tokens, more bandwidths, more prompts: hours")
    options.add_argument("--lengths", type=numbers, help="tokens of prompts")
    options.add_argument("--times", type=numbers, help="bandwidths, as multiples of break-even")
    options.add_argument("--repeats", type=int, help="prompts a cell")
    options.add_argument("--longest", type=float, default=60.0, help="seconds that loading all may be expected to take")
    args = options.parse_args()
    usual, times, repeats = LONG if args.long else SHORT
    lengths = [int(length) for length in args.lengths or usual]
    report = Report(f"cut: {args.dtype}, medians of {args.repeats or repeats} prompts a cell")
    with tempfile.TemporaryDirectory(prefix="forebay-cut-") as folder, httpx.Client() as client:
        model, tokens = args.model or (None if args.small else demo_model()), range(1000, 200_000)
        if model is None:
            model, tokens = small_model(Path(folder)), range(LETTERS)
        cluster = Cluster(Path(folder), model, args.dtype, chunk_tokens=CHUNK, memory="1GiB")
        cluster.tiers = (
            '[tiers.slow]\nkind = "forebay.testing.throttled:ThrottledFiles"\n'
            f'directory = "{folder}/files"\npace = "{folder}/pace"\nkeep = "{folder}/keep"\nquota_bytes = "8GiB"\n'
        )
        try:
            arena = Arena(cluster, client, max(lengths), tokens)
            for length in lengths:
                run_length(report, arena, length, args.times or times, args.repeats or repeats, args.longest)
        finally:
            cluster.stop()
    return report.print(args.json)


def run_length(
    report: Report, arena: Arena, length: int, times: Sequence[float], repeats: int, longest_s: float
) -> None:
    """All bandwidths at one length."""
    arena.store(arena.prompt(min(length, WARM_UP_TOKENS)))
    even = break_even(arena, length)
    report.add(Measure(f"{length} tokens: break-even", even / 1e6, "MB/s"))
    for factor in times:
        before = len(report.measures)
        tell(report, measure(arena, length, factor, factor * even, repeats, longest_s))
        print(table(report.measures[before:]), file=sys.stderr, flush=True)  # hours may be between here and the end


if __name__ == "__main__":
    raise SystemExit(main())
