"""`python -m forebay.kernels`: compile the Triton kernels ahead of time; tune and measure them where a GPU is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forebay.errors import ForebayError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        found: int = args.run(args)
    except ForebayError as error:
        print(f"forebay.kernels: {error}", file=sys.stderr)
        return error.exit_code
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forebay.kernels", description=__doc__)
    commands = parser.add_subparsers(required=True)
    build = commands.add_parser("compile", help="compile every kernel; no GPU is needed")
    build.add_argument("--target", action="append", help="sm_90, sm_100, gfx942, gfx950; may be repeated; default: all")
    build.add_argument("--first", action="store_true", help="only the first of the shipped sizes of each")
    build.add_argument("--check", type=Path, metavar="PAGE", help="compare with the budgets in this page")
    build.add_argument("--write", type=Path, metavar="PAGE", help="write the tables into this page")
    build.set_defaults(run=_compile)
    bench = commands.add_parser("bench", help="check every operation on this GPU and measure it beside its ceilings")
    bench.add_argument("--seconds", type=float, default=0.5, help="spent on each measurement")
    bench.set_defaults(run=_bench)
    tune = commands.add_parser("tune", help="measure sizes of launches on this GPU, and write its tuning table")
    tune.add_argument("--seconds", type=float, default=0.2, help="spent on each candidate")
    tune.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    tune.set_defaults(run=_tune)
    return parser


def _compile(args: argparse.Namespace) -> int:
    from forebay.kernels.gpu.library import require_compiler

    require_compiler()
    from forebay.kernels.ahead import table
    from forebay.kernels.ahead.targets import TARGETS, target_of

    rows = []
    for name in args.target or list(TARGETS):
        for row in table.build(target_of(name), first=args.first):
            built = row.built
            use = f"{built.registers:4} registers {built.stack:5} stack {built.shared:7} shared  {built.tensor or '-'}"
            print(f"{row.target:7} {row.kernel:16} {use:64} {row.model}; {row.launch}", flush=True)
            rows.append(row)
    if args.write:
        table.write(args.write, rows)
    wrong = table.complaints(rows, table.budgets(args.check)) if args.check else []
    for line in wrong:
        print(f"worse than its budget: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _bench(args: argparse.Namespace) -> int:
    from forebay.kernels.gpu.library import require_gpu

    require_gpu("bench")
    from forebay.kernels.measure.bench import run

    return run(args.seconds)


def _tune(args: argparse.Namespace) -> int:
    from forebay.kernels.gpu.library import require_gpu

    require_gpu("tune")
    from forebay.kernels.measure.tune import run

    return run(args.seconds, args.out)


if __name__ == "__main__":
    sys.exit(main())
