"""Experts that are dealt out to real processes: the same tokens as one process, by both ways; and a worker that does so
beside one that doesn't, through a store that can't tell them apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import checkpoints
from tests.e2e.expected import PrefixOracle
from tests.e2e.prompts import sharing_prompts
from tests.e2e.reference import greedy_reference
from tests.parity.families import FAMILIES
from tests.ranks.conftest import Crowd
from tests.ranks.dealing import SPARSE, greedy_alone
from tests.ranks.test_workers import LONGEST, OUTPUT, VOCAB, WINDOW, Case, figures

SIZE, COUNT = 2, 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for name in SPARSE:
        FAMILIES[name].make(folder / name)
    return folder


def test_every_family_gives_the_tokens_of_one_process(models: Path, tmp_path: Path) -> None:
    """All-gather and reduce-scatter, then all-to-all, over real collectives."""
    command = [sys.executable, "-m", "tests.ranks.dealing", str(models), str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(SIZE)], stdout=subprocess.PIPE, text=True) for rank in range(SIZE)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * SIZE
    alone = {name: greedy_alone(models / name) for name in SPARSE}
    assert json.loads(said[0]) == {f"{name} {way}": alone[name] for name in SPARSE for way in ("gathered", "exchanged")}


def test_a_worker_that_deals_out_experts_shares_chunks_with_one_that_does_not(crowd: Crowd) -> None:
    model = checkpoints.tiny_deepseek_v3(crowd.folder / "dealt")
    crowd.start("whole", model, 1)
    crowd.start("dealt", model, SIZE, "--enable-expert-parallel", "--all2all-backend", "alltoall")
    prompts = sharing_prompts(VOCAB, 32, WINDOW, COUNT, seed=8, longest=LONGEST)
    answers = greedy_reference(model, prompts, OUTPUT)
    workers = [crowd.worker("whole"), crowd.worker("dealt")]
    case = Case(workers, prompts, answers, PrefixOracle())
    case.ask(workers[1], slice(COUNT))
    assert figures(workers[1])["ranks.experts.bytes"] > 0, "rows went to other ranks"
    case.ask(workers[0], slice(COUNT))
    assert figures(workers[0])["cached.host"] > 0
    for worker in ("whole", "dealt"):
        crowd.workers.pop(worker).end()
