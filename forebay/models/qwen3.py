"""Qwen3, dense: Llama's layers with a norm on every query and key head before the rotation."""

from __future__ import annotations

from forebay.models.base import CausalLM, ModelInfo
from forebay.models.config import Config
from forebay.models.llama import build_llama, llama_info
from forebay.models.weights import Weights


def qwen3_info(config: Config) -> ModelInfo:
    """Facts of a qwen3 configuration."""
    return llama_info(config)


def build_qwen3(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    return build_llama(config, weights)
