"""What the connector makes of vLLM's own objects, in vLLM's own environment; no server is needed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import models
from tests.vllm.conftest import EXECUTABLE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def facts(folder: Path) -> dict[str, Any]:
    command = [str(EXECUTABLE.parent / "python"), "-m", "tests.vllm.inside", str(models.qwen3(folder / "inside"))]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_request_is_followed_if_all_that_its_kv_depends_on_is_known_by_content(facts: dict[str, Any]) -> None:
    assert facts["followed"] == {
        "an image": True, "an image under an adapter": True, "a named image": False, "text": True, "a session": False,
    }  # fmt: skip


def test_settings_that_change_positions_are_another_namespace(facts: dict[str, Any]) -> None:
    found = facts["positions"]
    assert found["plain"] == found["again"] and "config" not in found["plain"], "as our own worker says it"
    different = [found[name] for name in ("plain", "eps", "long", "longer")]
    assert len(set(different)) == len(different)


def test_an_update_of_weights_counts_though_they_were_not_known_yet(facts: dict[str, Any]) -> None:
    assert facts["reset"]


def test_each_head_is_written_by_one_rank_and_latents_by_one_in_all(facts: dict[str, Any]) -> None:
    for name, (count, writes) in facts["writers"].items():
        assert sum(writes) == count, name
    counts = {name: count for name, (count, _) in facts["writers"].items()}
    assert counts == {"full 1": 1, "full 2": 2, "full 4": 2, "latent 1": 1, "latent 2": 1, "latent 4": 1}


def test_a_gauge_is_told_when_it_has_changed(facts: dict[str, Any]) -> None:
    assert facts["figures"] == [False, True, False, True]
