"""The store on virtual time: nothing that must hold ever doesn't, whatever goes wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from forebay.testing.simulate.plan import draw_plan
from forebay.testing.simulate.world import simulate

FOUND = [
    int(line.split()[0])
    for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    if line[:1].isdigit()
]


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    simulate(draw_plan(seed))


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = simulate(draw_plan(4)), simulate(draw_plan(4))
    assert (first.digest, first.steps, first.counts) == (second.digest, second.steps, second.counts)


def test_a_world_without_faults_does_what_it_is_for() -> None:
    seeds = [seed for seed in range(200) if not draw_plan(seed).faults][:5]
    total: Counter[str] = Counter()
    for seed in seeds:
        total.update(simulate(draw_plan(seed)).counts)
    assert total["hit_tokens"] and total["op.read"] and total["op.commit"] and not total["reads.stale"]
