"""Conversations that take turns, from few to more than any cache holds: what each tier adds, as a picture.

    python -m benchmarks.multiturn [--conversations 8,16,32,64,128,256] [--plot docs/pictures/multiturn.png] [--quick]

Four servers of the same worker, one after the other at each point: `recompute` (no request finds anything: each has a
salt of its own), `device` (a worker without a store), `memory` (with a store in memory), `files` (files behind it too).
The device holds some 12 conversations, memory some 48, files some 192: sizes are made from what one conversation was
found to take. `--small` takes a random model of 10 M parameters in the demo model's place, for CPUs on which all of it
would take hours. Conversations come round robin, so once a cache is smaller than all of them, what is asked for next is
what it lost. What is recomputed doesn't depend on how many there are, so that is measured with up to 32.

All of it takes half an hour with `--small`, else hours. With `--keep FILE` each point is written there as it is
measured, and not measured again by the same command: so it can be interrupted, and a count whose points were disturbed
can be measured anew once its lines are taken out.

Printed and drawn: prompt and answer tokens a second, of all turns after the first. Targets: where memory no longer
holds them, files keep more than twice what recomputing gives; and device falls off before memory does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.made import LETTERS, small_model
from benchmarks.report import Measure, Report, parser
from benchmarks.serve_sides.client import Seen, ask
from benchmarks.serve_sides.servers import Ours
from forebay.testing.cluster import Cluster

HOLDS = {"device": 12, "memory": 48, "files": 192}
"""Conversations that each has room for, at their full length."""
KINDS = ("recompute", "device", "memory", "files")
TWICE = 2.0
RECOMPUTED_MAX = 32
COLOURS = {"recompute": "tab:gray", "device": "tab:red", "memory": "tab:orange", "files": "tab:blue"}


@dataclass(frozen=True)
class Shape:
    """A conversation: its first message, what each turn adds, how many turns; how many clients there are; and which
    tokens it is made of."""

    first: int = 768
    user: int = 96
    answer: int = 8
    turns: int = 2
    clients: int = 2
    tokens: range = range(1000, 200_000)

    @property
    def longest(self) -> int:
        """Tokens at its end."""
        return self.first + self.turns * (self.user + self.answer)


QUICK = Shape(first=384, user=32, answer=8, turns=2)


@dataclass(frozen=True)
class Sizes:
    """Room of each tier: tokens of the device, bytes of the others."""

    device_tokens: int
    memory: int
    files: int


@dataclass(frozen=True)
class Ran:
    """One point: tokens a second and the share of prompt tokens that were found, over all turns but the first."""

    tokens_s: float
    found: float


def main() -> int:
    """Run all points; exit code 1 if a target is missed."""
    args = options()
    shape = QUICK if args.quick else Shape()
    counts = [int(part) for part in (args.conversations or ("8,32" if args.quick else "8,16,32,64,128,256")).split(",")]
    holds = {name: room // 4 for name, room in HOLDS.items()} if args.quick else HOLDS
    if args.plot is not None:
        from benchmarks.hit_rate import plot

        plot.check()
    with tempfile.TemporaryDirectory(prefix="forebay-multiturn-") as folder:
        if args.small:
            args.model, shape = small_model(Path(folder)), replace(shape, tokens=range(LETTERS))
        return run(args, shape, counts, holds, Path(folder))


def run(
    args: argparse.Namespace, shape: Shape, counts: Sequence[int], holds: dict[str, int], folder: Path
) -> int:
    """All points."""
    report = Report(f"multiturn: {args.model.name}, {shape.longest} tokens a conversation, {shape.turns} turns")
    sizes = sizes_for(one_conversation(args, shape, folder), shape, holds)
    found = kept(args.keep)
    for count in counts:
        for kind in KINDS:
            if (kind, count) in found:
                continue
            found[kind, count] = ran = point(args, shape, sizes, kind, count, folder)
            print(f"{count} conversations, {kind}: {ran.tokens_s:,.0f} tok/s, {ran.found:.0%} found", file=sys.stderr)
            keep(args.keep, kind, count, ran)
    tell(report, found, counts, holds)
    if args.plot is not None:
        draw(found, counts, holds, args.plot)
    return report.print(args.json)


def kept(path: Path | None) -> dict[tuple[str, int], Ran]:
    """Points that an earlier run has measured, by kind and count."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    points = [json.loads(line) for line in lines]
    return {(one["kind"], one["conversations"]): Ran(one["tokens_s"], one["found"]) for one in points}


def keep(path: Path | None, kind: str, count: int, ran: Ran) -> None:
    """Write a point down, if there is a file for it."""
    if path is not None:
        with path.open("a") as file:
            one = {"kind": kind, "conversations": count, "tokens_s": ran.tokens_s, "found": ran.found}
            file.write(json.dumps(one) + "\n")


def options() -> argparse.Namespace:
    """What a user may say."""
    made = parser(__doc__ or "")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--model", type=Path, default=None, help="safetensors or GGUF (default: the demo model)")
    made.add_argument("--small", action="store_true", help="a small model that is made for it")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--conversations", help="how many, with commas between")
    made.add_argument("--keep", type=Path, help="a file of points: those in it aren't measured again")
    made.add_argument("--plot", type=Path, help="write a picture there (.png, .svg); needs matplotlib")
    made.add_argument("--quick", action="store_true", help="short conversations, few of them: to see whether it works")
    args = made.parse_args()
    if args.model is None and not args.small:
        from benchmarks.ttft import demo_model

        args.model = demo_model()
    return args


def one_conversation(args: argparse.Namespace, shape: Shape, folder: Path) -> float:
    """Bytes that a conversation takes in a store's memory."""
    cluster = cluster_for(args, folder / "one", memory="1GiB")
    server = Ours("w", cluster)
    try:
        server.start()
        converse(server, shape, 4, salted=False)
        cluster.settle(server.front)
        return cluster.store_values()["host.bytes_used"] / 4
    finally:
        cluster.stop()


def sizes_for(bytes_each: float, shape: Shape, holds: dict[str, int]) -> Sizes:
    """Room for so many conversations."""
    return Sizes(
        holds["device"] * shape.longest, max(16 << 20, int(holds["memory"] * bytes_each)),
        max(32 << 20, int(holds["files"] * bytes_each)),
    )  # fmt: skip


def cluster_for(args: argparse.Namespace, folder: Path, memory: str) -> Cluster:
    """With nothing started."""
    folder.mkdir()
    return Cluster(folder, args.model, args.dtype, chunk_tokens=256, memory=memory, device_memory="1GiB")


def point(
    args: argparse.Namespace, shape: Shape, sizes: Sizes, kind: str, count: int, folder: Path
) -> Ran:
    """One server from its start, with nothing cached."""
    cluster = cluster_for(args, folder / f"{kind}-{count}", memory=f"{sizes.memory}B")
    disk = f'[tiers.fs]\nkind = "fs"\ndirectory = "{cluster.folder}/files"\nquota_bytes = "{sizes.files}B"\n'
    cluster.tiers = disk if kind == "files" else "# no tiers\n"
    server = Ours(
        "w", cluster, store=kind in ("memory", "files"), extra=("--max-tokens", str(sizes.device_tokens)),
    )
    try:
        server.start()
        if kind == "recompute":
            return converse(server, shape, min(count, RECOMPUTED_MAX), salted=True)
        return converse(server, shape, count, salted=False)
    finally:
        cluster.stop()


def converse(server: Ours, shape: Shape, count: int, *, salted: bool) -> Ran:
    """All turns of all conversations, each in turn."""
    rng = random.Random(7)
    histories = [_some(rng, shape, shape.first) for _ in range(count)]
    salts = iter(range(1 << 30))

    def turn(history: Sequence[int]) -> Seen:
        more = {"cache_salt": f"{next(salts)}"} if salted else {}
        return ask(server, history, shape.answer, return_token_ids=True, **more)

    later: list[Seen] = []
    took = 0.0
    with ThreadPoolExecutor(shape.clients) as pool:
        for number in range(shape.turns + 1):
            start = time.perf_counter()
            answers = list(pool.map(turn, histories))
            if number:
                took += time.perf_counter() - start
                later += answers
            for history, answer in zip(histories, answers, strict=True):
                history += [*answer.token_ids, *_some(rng, shape, shape.user)]
    prompts = sum(one.prompt_tokens for one in later)
    return Ran((prompts + sum(one.tokens for one in later)) / took, sum(one.cached_tokens for one in later) / prompts)


def _some(rng: random.Random, shape: Shape, count: int) -> list[int]:
    return rng.choices(shape.tokens, k=count)


def tell(report: Report, found: dict[tuple[str, int], Ran], counts: Sequence[int], holds: dict[str, int]) -> None:
    """Every point, and what the picture is to show."""
    for count in counts:
        base = found["recompute", count].tokens_s
        for kind in KINDS:
            ran = found[kind, count]
            label = f"{count} conversations: {kind} ({100 * ran.found:.0f} % found)"
            files = kind == "files" and holds["memory"] < count <= holds["files"]
            ratio = ran.tokens_s / base
            report.add(
                Measure(
                    label, ran.tokens_s, "tok/s", peer=base, ratio=ratio, target=f"> {TWICE:g}" if files else "",
                    ok=ratio > TWICE if files else None,
                )
            )  # fmt: skip
    falls = {kind: fell_at(found, counts, kind) for kind in ("device", "memory")}
    report.add(Measure("device falls off at", falls["device"], "conversations", peer=falls["memory"],
                       target="before memory", ok=falls["device"] < falls["memory"]))  # fmt: skip


def fell_at(found: dict[tuple[str, int], Ran], counts: Sequence[int], kind: str) -> float:
    """The first count at which less than half of what it found at the first one is found; infinite for none."""
    first = found[kind, counts[0]].found
    return next((float(count) for count in counts if found[kind, count].found < first / 2), float("inf"))


def draw(found: dict[tuple[str, int], Ran], counts: Sequence[int], holds: dict[str, int], path: Path) -> None:
    """Throughput against conversations, one line a server, and where each tier is full."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=120)
    for kind in KINDS:
        rates = [found[kind, count].tokens_s for count in counts]
        axes.plot(counts, rates, marker="o", label=kind, color=COLOURS[kind])
    for kind, room in holds.items():
        axes.axvline(room, color=COLOURS[kind], linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="conversations (dotted: as many as a tier holds)", ylabel="tokens a second")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
