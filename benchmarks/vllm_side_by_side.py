"""vLLM alone, with LMCache's server, and with Forebay's store: the same vLLM, model and requests, in one run.

    python -m benchmarks.vllm_side_by_side --vllm VENV/bin/vllm [--lmcache VENV/bin/lmcache] [--cells reuse,overhead]

cells     reuse      4,096-token prompts: cold, from the device, from the host after a restart of vLLM, from files after
                     a restart of both; time to first token and CPU seconds
          overhead   nothing to reuse: pairs of fresh prompts, one to vLLM alone and one to vLLM with Forebay, in turn,
                     both standing; CPU seconds and time a token, with a bootstrap interval of their ratio
          turns      conversations turn by turn, with a device cache that holds a part of them
          agents     a scaled cut of a trace of agents (--trace)
          bench      `vllm bench serve`, prefix repetition

LMCache refuses hybrid models under vLLM's defaults, so its vLLM has the hybrid KV cache manager off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Measure, Report, median, parser
from benchmarks.vllm_sides.client import Seen, ask, random_prompts
from benchmarks.vllm_sides.sides import Alone, Forebay, LMCache, Setup, Side, standing
from benchmarks.vllm_sides.work import Ran, Turns, agents, converse, replay

PROMPT_TOKENS = 4096
RESAMPLES = 4000
OVERHEAD_MAX = 1.02
ARCHITECTURES = {"gemma3_text": ["Gemma3ForCausalLM"], "llama": ["LlamaForCausalLM"], "qwen3": ["Qwen3ForCausalLM"]}
UNITS = {"throughput": "tok/s", "found": "% of tokens", "CPU": "s"}
DEVICE_BLOCKS = 192
"""Of vLLM's 128 tokens: enough for the longest request, as vLLM demands, and too few for all conversations."""


def main() -> int:
    """Run the cells; exit code 1 if a target is missed."""
    args = options()
    report = Report(f"vLLM side by side: {args.model.name}, {args.dtype}, {args.prompts} prompts a cell")
    with tempfile.TemporaryDirectory(prefix="forebay-vllm-") as folder:
        setup = Setup(
            args.vllm, args.lmcache or Path(), checkpoint(args.model, Path(folder) / "model"), Path(folder), args.dtype,
            eager=args.eager,
        )  # fmt: skip
        for cell in args.cells.split(","):
            {
                "reuse": reuse, "overhead": overhead, "turns": turns, "agents": agent_trace, "bench": bench,
            }[cell](report, setup, args)  # fmt: skip
    return report.print(args.json)


def options() -> argparse.Namespace:
    """What a user may say."""
    made = parser(__doc__ or "")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--vllm", type=Path, required=True, help="the vllm command, Forebay installed beside it")
    made.add_argument("--lmcache", type=Path, help="the lmcache command; without it that side is left out")
    made.add_argument("--model", type=Path, default=None, help="safetensors or GGUF (default: the demo model)")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--cells", default="reuse,overhead,turns")
    made.add_argument("--sides", default="alone,lmcache,forebay")
    made.add_argument("--prompts", type=int, default=6)
    made.add_argument("--pairs", type=int, default=40)
    made.add_argument("--trace", type=Path, help="kvct_sessions.jsonl.zst, for the cell `agents`")
    made.add_argument("--eager", action="store_true", help="no compilation: starts sooner, computes slower")
    args = made.parse_args()
    if args.model is None:
        from benchmarks.ttft import demo_model

        args.model = demo_model()
    return args


def checkpoint(model: Path, folder: Path) -> Path:
    """A directory of safetensors as vLLM wants it: what was converted from GGUF doesn't say that it is to generate."""
    from forebay.models.loading import checkpoint_directory

    found = checkpoint_directory(model)
    config = json.loads((found / "config.json").read_text())
    if "architectures" in config:
        return found
    folder.mkdir()
    for path in found.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ARCHITECTURES[config["model_type"]]}))
    return folder


def sides(setup: Setup, args: argparse.Namespace) -> list[Side]:
    """Those that were asked for and that there are, each on its own."""
    wanted = args.sides.split(",")
    found: list[Side] = [Alone("alone", setup)] if "alone" in wanted else []
    if "lmcache" in wanted and setup.lmcache != Path():
        found.append(LMCache("lmcache", setup, hybrid=False))
    return [*found, Forebay("forebay", setup)] if "forebay" in wanted else found


def reuse(report: Report, setup: Setup, args: argparse.Namespace) -> None:
    """One side after the other; all see the same prompts."""
    cells: dict[str, dict[str, list[Seen]]] = {}
    for side in sides(setup, args):
        cells[side.name] = _reuse(side, random_prompts(args.prompts, PROMPT_TOKENS, 7))
    for phase in ("cold", "device", "host", "files"):
        peer = cells.get("lmcache", {}).get(phase)
        for name, phases in cells.items():
            if phase in phases:
                _tell_reuse(report, phase, name, phases[phase], peer if name == "forebay" else None)
    if "alone" not in cells:
        return
    same = [[one.token_ids for one in seen] for phases in cells.values() for seen in phases.values()]
    agree = sum(ids == cells["alone"]["cold"][place].token_ids for run in same for place, ids in enumerate(run))
    report.add(Measure("answers as vLLM alone gives them cold", agree, f"of {sum(map(len, same))}"))


def _tell_reuse(report: Report, phase: str, name: str, seen: Sequence[Seen], peer: Sequence[Seen] | None) -> None:
    took = median([one.first_s for one in seen]) * 1e3
    beside = median([one.first_s for one in peer]) * 1e3 if peer else None
    against = beside is not None and phase in ("host", "files")
    report.add(
        Measure(
            f"{phase}: {name}, time to first token", took, "ms", peer=beside,
            ratio=took / beside if beside else None, target="< LMCache" if against else "",
            ok=took < beside if against and beside else None,
        )
    )  # fmt: skip
    report.add(Measure(f"{phase}: {name}, CPU", median([one.cpu_s for one in seen]), "s"))
    report.add(Measure(f"{phase}: {name}, found", median([one.cached_tokens for one in seen]), "tokens"))


def _reuse(side: Side, prompts: Sequence[Sequence[int]]) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = {}
    with standing(side):
        _warm(side)
        found["cold"] = [ask(side, prompt, 2) for prompt in prompts]
        found["device"] = [ask(side, prompt, 2) for prompt in prompts]
        side.settle()
        if isinstance(side, Alone):
            return found
        side.stop()
        side.start()
        _warm(side)
        found["host"] = [ask(side, prompt, 2) for prompt in prompts]
        side.settle()
        side.stop()
        side.stop_peer()
        _out_of_page_cache(side.folder / "files")
        side.start_peer()
        side.start()
        _warm(side)
        found["files"] = [ask(side, prompt, 2) for prompt in prompts]
    return found


def _warm(side: Side) -> None:
    """What is set up at first use is set up; nothing of it is asked for again."""
    for prompt in random_prompts(3, 600, int.from_bytes(os.urandom(4), "little")):
        ask(side, prompt, 4)


def _out_of_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def overhead(report: Report, setup: Setup, args: argparse.Namespace) -> None:
    """Both servers stand; each pair is one fresh prompt each, whose order changes."""
    alone, ours = Alone("alone-pair", setup), Forebay("forebay-pair", setup)
    with standing(alone), standing(ours):
        for side in (alone, ours):
            _warm(side)
        prompts = iter(random_prompts(2 * args.pairs, PROMPT_TOKENS, 11))
        pairs = [_pair(alone, ours, prompts, turned=bool(place % 2)) for place in range(args.pairs)]
    for what, of in (("CPU seconds", lambda one: one.cpu_s), ("time to first token", lambda one: one.first_s)):
        low, middle, high = _ratio(pairs, of)
        ours_, theirs = median([of(b) for _, b in pairs]), median([of(a) for a, _ in pairs])
        report.add(
            Measure(
                f"nothing to reuse: {what}, {len(pairs)} pairs, 95 % of the ratio in {low:.3f} to {high:.3f}",
                ours_ * 1e3, "ms", peer=theirs * 1e3, ratio=middle, target=f"<= {OVERHEAD_MAX}",
                ok=middle <= OVERHEAD_MAX,
            )
        )  # fmt: skip


def _pair(alone: Side, ours: Side, prompts: Iterator[list[int]], *, turned: bool) -> tuple[Seen, Seen]:
    seen = {}
    for side in (ours, alone) if turned else (alone, ours):
        seen[side.name] = ask(side, next(prompts), 2)
        side.settle()
    return seen[alone.name], seen[ours.name]


def _ratio(pairs: Sequence[tuple[Seen, Seen]], of: Callable[[Seen], float]) -> tuple[float, float, float]:
    """Of the sums, ours to vLLM's alone: the 2.5th percentile of resampled pairs, the figure itself, the 97.5th."""
    rng = random.Random(1)
    values = [(of(a), of(b)) for a, b in pairs]

    def ratio(some: Sequence[tuple[float, float]]) -> float:
        return sum(b for _, b in some) / sum(a for a, _ in some)

    drawn = sorted(ratio(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return drawn[RESAMPLES // 40], ratio(values), drawn[-RESAMPLES // 40]


def _work(
    report: Report, setup: Setup, args: argparse.Namespace, name: str, run: Callable[[Side], Ran]
) -> None:
    """One workload on every side in turn, each beginning with nothing."""
    results: dict[str, Ran] = {}
    for side in sides(setup, args):
        with standing(side):
            _warm(side)
            results[side.name] = run(side)
    peer = results.get("lmcache")
    for side_name, ran in results.items():
        figures: dict[str, tuple[str, Callable[[Ran], float]]] = {
            "first token p50": ("ms", lambda ran: ran.first_ms(0.5)),
            "first token p99": ("ms", lambda ran: ran.first_ms(0.99)),
            "throughput": ("tok/s", lambda ran: ran.tokens_s),
            "found": ("% of tokens", lambda ran: 100 * ran.hit_share),
            "CPU": ("s", lambda ran: ran.cpu_s),
        }
        for what, (unit, of) in figures.items():
            beside = of(peer) if peer is not None and side_name == "forebay" else None
            ratio = of(ran) / beside if beside else None
            report.add(Measure(f"{name}: {side_name}, {what}", of(ran), unit, peer=beside, ratio=ratio))


def turns(report: Report, setup: Setup, args: argparse.Namespace) -> None:
    """Conversations; the device holds some 8,000 tokens."""
    small = replace(setup, blocks=DEVICE_BLOCKS)
    _work(report, small, args, "turns", lambda side: converse(side, Turns()))


def agent_trace(report: Report, setup: Setup, args: argparse.Namespace) -> None:
    """Six sessions of the trace at a sixteenth of their lengths."""
    assert args.trace is not None, "--trace is needed for this cell"
    prompts = agents(args.trace, sessions=6, requests=8, shrink=16, longest=6000)
    small = replace(setup, blocks=DEVICE_BLOCKS)
    _work(report, small, args, "agents", lambda side: replay(side, prompts, 8, 2))


def bench(report: Report, setup: Setup, args: argparse.Namespace) -> None:
    """vLLM's own load generator: prompts of which several have the same prefix, more than the device holds."""
    small = replace(setup, blocks=DEVICE_BLOCKS)
    results: dict[str, dict[str, float]] = {}
    for side in sides(small, args):
        with standing(side):
            _warm(side)
            results[side.name] = _generated(side, small)
    for name, figures in results.items():
        for what, value in figures.items():
            beside = results["lmcache"][what] if name == "forebay" and "lmcache" in results else None
            unit, ratio = UNITS.get(what, "ms"), value / beside if beside else None
            report.add(Measure(f"bench serve: {name}, {what}", value, unit, peer=beside, ratio=ratio))


def _generated(side: Side, setup: Setup) -> dict[str, float]:
    """One run of the generator, as its result file has it; CPU seconds are the servers' alone."""
    out, before, cached = side.folder / "bench.json", side.cpu_s(), side.cached_tokens()
    subprocess.run(
        [
            str(setup.vllm), "bench", "serve", "--backend", "vllm", "--base-url", side.url, "--model", "m",
            "--tokenizer", str(setup.model), "--dataset-name", "prefix_repetition", "--num-prompts", "96",
            "--prefix-repetition-prefix-len", "1536", "--prefix-repetition-suffix-len", "256",
            "--prefix-repetition-num-prefixes", "12", "--prefix-repetition-output-len", "16",
            "--max-concurrency", "2", "--ignore-eos", "--save-result", "--result-filename", str(out),
        ],
        check=True, stdout=subprocess.DEVNULL, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    result = json.loads(out.read_text())
    return {
        "first token p50": float(result["median_ttft_ms"]), "first token p99": float(result["p99_ttft_ms"]),
        "throughput": float(result["total_token_throughput"]), "CPU": side.cpu_s() - before,
        "found": 100 * (side.cached_tokens() - cached) / float(result["total_input_tokens"]),
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
