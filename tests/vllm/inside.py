"""Runs in vLLM's own environment and tells, as JSON, what the connector makes of vLLM's objects:

    python -m tests.vllm.inside MODEL_DIRECTORY
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from forebay.connectors.settings import Settings
from forebay.connectors.vllm import model, scheduler, worker
from forebay.connectors.vllm.metrics import Differences, ForebayStats
from forebay.kvstore.geometry import GroupGeometry
from forebay.kvstore.identity import Namespace

NAMESPACE = Namespace(
    weights=b"w" * 32, groups=(GroupGeometry("full", "full", (0,), 1, 32, "float32"),), chunk_tokens=32
)


def followed() -> dict[str, bool]:
    """Which requests can be told by what they consist of."""
    digest, place = "0f" * 32, PlaceholderRange(offset=1, length=2)
    inputs = {
        "an image": MultiModalFeatureSpec(None, "image", digest, place, digest),
        "an image under an adapter": MultiModalFeatureSpec(None, "image", f"lora:{digest}", place, digest),
        "a named image": MultiModalFeatureSpec(None, "image", "cat", place, "cat"),
    }
    requests = {name: _request(mm_features=[spec]) for name, spec in inputs.items()}
    requests |= {"text": _request(), "a session": _request(resumable=True)}
    return {name: scheduler._can_be_told(request) for name, request in requests.items()}


def _request(**fields: Any) -> Request:
    return Request("r", [1, 2, 3, 4], SamplingParams(max_tokens=1), None, **fields)


def positions(directory: Path) -> dict[str, str]:
    """How positions are described under settings of vLLM's that change them."""
    longrope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    given: dict[str, dict[str, Any]] = {
        "plain": {},
        "again": {},
        "eps": {"hf_overrides": {"rms_norm_eps": 0.1}},
        "long": {"hf_overrides": {"rope_parameters": longrope}},
        "longer": {"hf_overrides": {"rope_parameters": longrope}},
    }
    found = {}
    for name, fields in given.items():
        config = ModelConfig(
            model=str(directory), max_model_len=1024 if name == "longer" else 512, dtype="float32", **fields
        )
        found[name] = repr(model._positions(SimpleNamespace(model_config=config), directory))  # type: ignore[arg-type]
    return found


def reset_before_weights_are_known() -> bool:
    """Does an update of weights that comes while their files are still being read count?"""
    read = threading.Event()
    scheduler.grouping_of = lambda *_: SimpleNamespace(engine=())  # type: ignore[assignment,return-value]
    scheduler.namespace_of = lambda *_: read.wait() and NAMESPACE  # type: ignore[assignment,return-value]
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute", is_kv_consumer=True, is_kv_producer=True
        ),
        model_config=SimpleNamespace(use_mla=False),
    )
    side = scheduler.SchedulerSide(config, None, Settings(store="unix:///nobody"), b"g" * 16)  # type: ignore[arg-type]
    assert side.reset()
    read.set()
    while side._tracker is None:
        time.sleep(0.01)
    epoch = side._tracker.namespace.epoch
    side.shutdown()
    return epoch != NAMESPACE.epoch


def writers() -> dict[str, list[Any]]:
    """How many ranks write a chunk together, and which of them."""
    geometries = {
        "full": GroupGeometry("full", "full", (0,), 2, 32, "float32"),
        "latent": GroupGeometry("latent", "latent", (0,), 1, 32, "float32"),
    }
    return {
        f"{name} {ranks}": [
            ranks // worker._replicas(geometry, ranks),
            [worker._heads(geometry, rank, ranks).replica == 0 for rank in range(ranks)],
        ]
        for name, geometry in geometries.items()
        for ranks in (1, 2, 4)
    }


def figures() -> list[bool]:
    """Is a gauge told when it has changed, though nothing was counted?"""
    differences = Differences()
    told = [ForebayStats({"gauges": differences.changed({"queue": value})}) for value in (5, 5, 0, 0)]
    return [stats.is_empty() for stats in told]


if __name__ == "__main__":
    facts = {
        "followed": followed(),
        "positions": positions(Path(sys.argv[1])),
        "reset": reset_before_weights_are_known(),
        "figures": figures(),
        "writers": writers(),
    }
    print(json.dumps(facts))
