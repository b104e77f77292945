"""Rotary settings give the frequencies that transformers computes from the same configuration, or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forebay.models.config import Config
from forebay.models.errors import CheckpointBroken, UnsupportedArchitecture
from forebay.models.rope import Rope
from forebay.models.rope_config import read_rope

DIM = 48
SIZES: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 4 * DIM, "num_attention_heads": 4, "head_dim": DIM,
    "max_position_embeddings": 2048,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}

READ: Mapping[str, Mapping[str, Any]] = {
    "newer": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    "older": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
    "newer, older spelling": {"rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    "base in the older table": {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    "both, alike": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
        "rope_scaling": {"type": "yarn", "rope_theta": 5e5, **YARN},
    },
    "yarn": {"rope_scaling": {"type": "yarn", "finetuned": True, **YARN}, "rope_theta": 5e5},
    "yarn of all of the context": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, original context outside": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 300,
    },
    "yarn, original context twice": {
        "rope_scaling": {"rope_type": "yarn", **YARN}, "original_max_position_embeddings": 300,
    },
    "yarn, ramp": {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0}},
    "yarn, whole steps": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "truncate": False}},
    "yarn, strengths": {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn, one strength": {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 0.7}},
    "yarn, own magnitude": {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 0.8, "mscale": 0.7}},
    "yarn, shrinking": {"rope_scaling": {"rope_type": "yarn", **YARN, "factor": 0.5}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
    "llama3, original context outside": {
        "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 128,
    },
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
}  # fmt: skip

REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "longrope": ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "longrope"),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 8, 8]}}, "mrope"),
    "by another name": ({"rope_scaling": {"rope_type": "default", "mrope_section": [8, 8, 8]}}, "mrope_section"),
    "alpha": ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "alpha"),
    "a factor of nothing": ({"rope_scaling": {"factor": 8.0}}, "factor"),
    "by kinds of layers": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}}, "full_attention",
    ),
    "a typo": ({"rope_scaling": {"rope_type": "yarn", **YARN, "attn_factor": 0.8}}, "attn_factor"),
    "two tables": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "differ",
    ),
    "two types": (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "factor",
    ),
    "dynamic from elsewhere": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}}, "of its own",
    ),
    "a part of a head": ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "dimensions"),
}  # fmt: skip


def ours(settings: Mapping[str, Any]) -> Rope:
    return read_rope(Config({**SIZES, **settings}, Path("config.json")), DIM, theta=1e4)


@pytest.mark.parametrize("name", READ)
def test_the_same_frequencies_and_magnitude(name: str) -> None:
    theirs = LlamaConfig(**{**SIZES, **{key: dict(v) if isinstance(v, dict) else v for key, v in READ[name].items()}})
    kind = theirs.rope_parameters["rope_type"]
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    found = ours(READ[name])
    torch.testing.assert_close(found.frequencies(torch.float32, torch.device("cpu")), frequencies, rtol=1e-6, atol=0)
    assert (found.yarn.magnitude if found.yarn else 1.0) == pytest.approx(magnitude)
    assert found.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_named(name: str) -> None:
    settings, named = REFUSED[name]
    with pytest.raises(UnsupportedArchitecture, match=named):
        ours(settings)


def test_factors_must_be_as_many_as_there_are_pairs() -> None:
    assert ours({"rope_scaling": {"rope_type": "factors", "factors": [2.0] * 24}}).factors == (2.0,) * 24
    with pytest.raises(CheckpointBroken, match="24 numbers"):
        ours({"rope_scaling": {"rope_type": "factors", "factors": [2.0] * 23}})
