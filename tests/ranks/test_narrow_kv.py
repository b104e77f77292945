"""KV in FP8 through real processes: computed on two ranks, hit on one, from memory and from files, as bytes of FP8.

The reference is our own model, in this process: transformers has no such cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forebay.models.loading import load_model
from tests import checkpoints
from tests.e2e.expected import PrefixOracle
from tests.e2e.prompts import sharing_prompts
from tests.parity.reference import Runner
from tests.parity.test_narrow_kv import with_scales
from tests.ranks.conftest import Crowd
from tests.ranks.test_workers import LONGEST, OUTPUT, VOCAB, WINDOW, Case, figures
from tests.workers.processes import start_store, store_values

COUNT = 5
FP8 = ("--kv-cache-dtype", "fp8_e4m3", "--lookup-deadline", "30s")
MAKERS: dict[str, Callable[[Path], Path]] = {"llama": checkpoints.tiny_llama}
if os.environ.get("FOREBAY_ALL_FAMILIES"):
    MAKERS |= {"deepseek_v3": checkpoints.tiny_deepseek_v3, "gpt_oss": checkpoints.tiny_gpt_oss}


def answers(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy, in fp64 over KV in FP8."""
    model = load_model(path, dtype=torch.float64, device=torch.device("cpu"), kv_dtype=torch.float8_e4m3fn)
    found = []
    for prompt in prompts:
        runner, given = Runner(model), list(prompt)
        logits = runner.step({0: prompt})
        for _ in range(OUTPUT):
            given.append(int(logits[-1].argmax()))
            logits = runner.step({0: given[-1:]})
        found.append(given[len(prompt) :])
    return found


@pytest.mark.parametrize("family", MAKERS)
def test_what_two_ranks_kept_in_fp8_is_hit_by_one(family: str, crowd: Crowd) -> None:
    model = with_scales(MAKERS[family](crowd.folder / family), "layer")
    names = [f"{family}-{name}" for name in ("two", "one", "later")]
    prompts = sharing_prompts(VOCAB, 32, WINDOW, COUNT, seed=8, longest=LONGEST)
    crowd.start(names[0], model, 2, *FP8)
    crowd.start(names[1], model, 1, *FP8)
    case = Case([crowd.worker(name) for name in names[:2]], prompts, answers(model, prompts), PrefixOracle())
    case.ask(case.workers[0], slice(COUNT))
    cached = case.ask(case.workers[1], slice(COUNT))
    loaded = figures(case.workers[1])
    assert loaded["cached.host"] > 0 and loaded["loaded.host.bytes"] > 0
    assert loaded["cached.host"] + loaded.get("cached.device", 0) == cached
    for name in names[:2]:
        crowd.workers.pop(name).end()
    assert crowd.store.end() == 0
    crowd.store = start_store(crowd.folder)
    crowd.start(names[2], model, 1, *FP8)
    last = crowd.worker(names[2])
    case.ask(last, slice(COUNT))
    assert figures(last)["cached.fs"] > 0, "from files, by a store with an empty memory"
    assert store_values(crowd.folder)["tier.fs.promoted_bytes"] > 0
    crowd.workers.pop(names[2]).end()
