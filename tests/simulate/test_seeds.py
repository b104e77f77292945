"""The store on virtual time: nothing that must hold ever doesn't, whatever goes wrong.

`FOREBAY_SIMULATE_SEEDS=20000 FOREBAY_SIMULATE_FROM=5000 pytest tests/simulate/test_seeds.py` is the longer form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forebay.testing.simulate.plan import FAULTS, draw_plan
from forebay.testing.simulate.world import simulate, sweep

SEEDS = int(os.environ.get("FOREBAY_SIMULATE_SEEDS", "2000"))
FIRST = int(os.environ.get("FOREBAY_SIMULATE_FROM", "0"))
ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).parent / "seeds.txt"
FOUND = [int(line.split()[0]) for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1].isdigit()]


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    simulate(draw_plan(seed))


def started(first: int, seeds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "forebay.testing.simulate", "--seed", str(first), "--seeds", str(seeds), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.mark.alone
@pytest.mark.timeout(max(900, SEEDS))
def test_nothing_goes_wrong_in_the_seeds_and_every_kind_of_fault_happens_in_them() -> None:
    shares = max(1, min(os.cpu_count() or 1, 4))
    size = -(-SEEDS // shares)
    running = [started(at, min(size, FIRST + SEEDS - at)) for at in range(FIRST, FIRST + SEEDS, size)]
    answers = [process.communicate()[0] for process in running]
    for process, answer in zip(running, answers, strict=True):
        assert process.returncode == 0, answer[-8000:]
    figures: list[dict[str, Any]] = [json.loads(answer.splitlines()[-1]) for answer in answers]
    total: Counter[str] = Counter()
    for figure in figures:
        total.update(figure["total"])
    assert sum(figure["passed"] for figure in figures) == SEEDS
    least = {name: min(figure["least"][name] for figure in figures) for name in figures[0]["least"]}
    assert least["op.lookup"] >= 4 and least["op.commit"] >= 1 and least["ticks"] >= 20, least
    if SEEDS >= 500:
        never = [fault for fault in FAULTS if total[f"fault.{fault}"] < SEEDS // 200]
        assert not never, f"too rare to have shown anything: {never}"
        for what in ("adopted_chunks", "views_compared", "clears.checked", "leases.joined", "reads.stale", "op.read"):
            assert total[what] > 0, f"no seed had any {what}"


def test_the_same_seed_gives_the_same_run_in_every_process() -> None:
    def digests(hash_seed: str) -> list[str]:
        command = [sys.executable, "-m", "forebay.testing.simulate", "--seed", "1", "--seeds", "5", "--verbose"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
        answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
        return [line for line in answer.splitlines() if "digest" in line]

    first = digests("1")
    assert len(first) == 5
    assert first == digests("2")


def test_no_descriptor_is_left_where_nobody_was_killed() -> None:
    def open_now() -> set[str]:
        return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}

    killing = {fault for fault in FAULTS if "killed" in fault or "stopped" in fault} | {"power_loss", "tier_hung"}
    seeds = [seed for seed in range(400) if not draw_plan(seed).faults & killing][:3]
    simulate(draw_plan(seeds[0]))
    sweep()
    before = open_now()
    for seed in seeds:
        simulate(draw_plan(seed))
    assert sweep() == 0
    assert open_now() == before


def test_a_world_without_faults_does_what_it_is_for() -> None:
    seeds = [seed for seed in range(300) if not draw_plan(seed).faults][:5]
    total: Counter[str] = Counter()
    for seed in seeds:
        total.update(simulate(draw_plan(seed)).counts)
    assert total["hit_tokens"] and total["op.read"] and total["op.commit"]
    assert not total["reads.checksum_differs"]
