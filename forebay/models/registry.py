"""Which model types are known, and what reads and builds each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forebay.models.base import CausalLM, ModelInfo
from forebay.models.config import Config
from forebay.models.deepseek import build_deepseek, deepseek_info
from forebay.models.dsa import build_dsa, dsa_info
from forebay.models.errors import UnsupportedArchitecture
from forebay.models.gemma3 import build_gemma3, gemma3_info
from forebay.models.glm4_moe import build_glm4_moe, glm4_moe_info
from forebay.models.gpt_oss import build_gpt_oss, gpt_oss_info
from forebay.models.llama import build_llama, llama_info
from forebay.models.minimax_m2 import build_minimax_m2, minimax_m2_info
from forebay.models.minimax_m3 import build_minimax_m3, minimax_m3_info
from forebay.models.qwen3_moe import build_qwen3_moe, qwen3_moe_info
from forebay.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Family:
    """`info` needs the configuration alone, `build` takes the weights as well."""

    info: Callable[[Config], ModelInfo]
    build: Callable[[Config, Weights], CausalLM]


_LLAMA = Family(llama_info, build_llama)
_DEEPSEEK = Family(deepseek_info, build_deepseek)
_DSA = Family(dsa_info, build_dsa)
FAMILIES = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": Family(qwen3_moe_info, build_qwen3_moe),
    "gemma3_text": Family(gemma3_info, build_gemma3),
    "gpt_oss": Family(gpt_oss_info, build_gpt_oss),
    "glm4_moe": Family(glm4_moe_info, build_glm4_moe),
    "minimax_m2": Family(minimax_m2_info, build_minimax_m2),
    "minimax_m3_vl_text": Family(minimax_m3_info, build_minimax_m3),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DSA,
    "glm_moe_dsa": _DSA,
}


def text_config(config: Config) -> Config:
    """The part of a multimodal configuration that describes the language model; else `config` itself."""
    nested = config.section("text_config")
    if "model_type" not in nested:
        return config
    tied = config.get("tie_word_embeddings")  # of the whole model, which has the head
    return nested if tied is None else nested.having(tie_word_embeddings=tied)


def find_family(config: Config) -> Family:
    """By the configuration's `model_type`. Raises UnsupportedArchitecture."""
    model_type = config.text("model_type", "")
    if model_type not in FAMILIES:
        raise UnsupportedArchitecture(
            f"{config.origin}: model type {model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
