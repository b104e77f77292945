"""What a KV cache takes, against the published sizes of well-known models; and what fits, against counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.models.base import KVGroup, ModelInfo
from forebay.models.capacity import (
    Budget,
    Ranks,
    contexts,
    fit,
    fixed_whole,
    footprint,
    per_token,
    per_token_whole,
)
from forebay.models.config import INDEX_KEYS, Config
from forebay.models.registry import find_family

BF16, FP8 = 2.0, 1.0
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA_70B = LLAMA | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
QWEN3_30B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 262144, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "sliding_window": 128, "max_position_embeddings": 131072, "num_local_experts": 128, "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "rms_norm_eps": 1e-5,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 163840, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3, "rms_norm_eps": 1e-6,
}  # fmt: skip
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
GLM_5 = {
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "max_position_embeddings": 202752, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "rms_norm_eps": 1e-5, "index_head_dim": 128,
    "index_n_heads": 32, "index_topk": 2048,
}  # fmt: skip
GLM_52 = GLM_5 | {"index_topk_freq": 4, "index_skip_topk_offset": 2}


def info_of(values: dict[str, Any], index_keys: str = "model") -> ModelInfo:
    config = Config(values | {INDEX_KEYS: index_keys}, Path("config.json"))
    return find_family(config).info(config)


@pytest.mark.parametrize(
    ("values", "grows", "at_128k_gib"),
    [
        (LLAMA, 131_072, 16.0), (LLAMA_70B, 327_680, 40.0), (QWEN3_30B, 98_304, 12.0), (GPT_OSS_120B, 36_864, 4.5),
        (DEEPSEEK_V3, 70_272, 8.6),
    ],
    ids=["llama-3-8b", "llama-3-70b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3"],
)  # fmt: skip
def test_a_token_takes_what_is_published(values: dict[str, Any], grows: int, at_128k_gib: float) -> None:
    info = info_of(values)
    assert per_token_whole(info, BF16) == grows == 2 * per_token_whole(info, FP8)
    whole = footprint(info, Ranks(), BF16, 131_072).whole - fixed_whole(info, BF16)
    assert whole / 2**30 == pytest.approx(at_128k_gib, abs=0.06)


@pytest.mark.parametrize(
    ("values", "latents", "index"),
    [(DEEPSEEK_V32, 70_272, 61 * 132), (GLM_5, 89_856, 78 * 132), (GLM_52, 89_856, 21 * 132)],
    ids=["deepseek-v3.2", "glm-5", "glm-5.2"],
)
def test_index_keys_come_on_top_of_latents(values: dict[str, Any], latents: int, index: int) -> None:
    """In eight bits a key takes 132 bytes; otherwise two bytes a value, even beside latents of one."""
    assert per_token_whole(info_of(values, "fp8"), BF16) == latents + index
    assert per_token_whole(info_of(values, "fp8"), FP8) == latents / 2 + index
    assert per_token_whole(info_of(values), BF16) == latents + index / 132 * 256
    assert per_token_whole(info_of(values), FP8) == latents / 2 + index / 132 * 256
    at_128k = footprint(info_of(values, "fp8"), Ranks(), BF16, 131_072).whole / 2**30
    assert at_128k == pytest.approx({70_272: 8.6 + 0.98, 89_856: 11.0 + index / 8192}[latents], abs=0.06)


def test_pages_of_glm_5_2_are_those_that_are_published() -> None:
    """Of 64 tokens: 3,052,800 bytes in FP8, 5,928,192 in bf16; rows with scales, of 656 bytes, make 51,168 a token."""
    info = info_of(GLM_52, "fp8")
    assert [64 * per_token_whole(info, item) for item in (FP8, BF16)] == [3_052_800, 5_928_192]
    assert per_token_whole(info, 656 / 576) == pytest.approx(51_168 + 2_772)
    assert per_token(info, Ranks(8), FP8) == 47_700, "both are on every rank whole"


def test_rows_with_scales_and_windows_kept_in_full_take_what_is_published() -> None:
    assert per_token_whole(info_of(DEEPSEEK_V3), 656 / 576) == pytest.approx(40_016)
    kept = GPT_OSS_120B | {"layer_types": ["full_attention"] * 36}
    assert per_token_whole(info_of(kept), BF16) == 73_728


def test_windows_take_the_same_however_long_a_request_is() -> None:
    info = info_of(GPT_OSS_120B)
    assert fixed_whole(info, BF16) == 18 * 128 * 2 * 8 * 64 * 2  # 4.7 MB
    short, long = (footprint(info, Ranks(), BF16, n).whole for n in (1 << 14, 1 << 15))
    assert long - short == (1 << 14) * 36_864


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_heads_are_shared_out_until_there_are_none_left(tp: int) -> None:
    info = info_of(QWEN3_30B)
    assert per_token(info, Ranks(tp), BF16) == 98_304 / min(tp, 4)


def test_latents_are_on_every_rank_unless_their_tokens_are_shared_out() -> None:
    info = info_of(DEEPSEEK_V3)
    assert per_token(info, Ranks(8), BF16) == 70_272
    assert per_token(info, Ranks(8, 8), BF16) == 70_272 / 8
    budget = Budget(memory=10 << 30, utilisation=1.0)
    without, shared = (fit(info, Ranks(8, dcp), BF16, budget, 32_768) for dcp in (1, 8))
    assert shared.requests == pytest.approx(8 * without.requests, abs=8) and without.requests > 0
    assert without.footprint.whole == shared.footprint.whole, "the store sees no ranks"
    for context in (1, 15, 17, 4097):
        without, shared = (footprint(info, Ranks(8, dcp), BF16, context) for dcp in (1, 8))
        assert 8 * shared.rank == without.rank == without.whole, "blocks are dealt out, so nothing is rounded up"


@pytest.mark.parametrize(
    ("values", "ranks", "named"),
    [
        (LLAMA, Ranks(8, 2), "dcp 2: with tp 8 .* on 1 rank at once"), (LLAMA, Ranks(4, 3), "dcp 3 must divide tp 4"),
        (DEEPSEEK_V3, Ranks(6, 3), "dcp 3 must divide the 16 tokens of a block"),
        (QWEN3_30B, Ranks(3), "tp 3 must divide the 4 KV heads"), (QWEN3_30B, Ranks(6), "tp 6 must be a multiple of"),
        (GLM_52, Ranks(8, 8), "choose among all positions"),
        (QWEN3_30B, Ranks(16, 8), "on 4 ranks at once"), (LLAMA, Ranks(0), "at least 1"),
    ],
)  # fmt: skip
def test_ranks_that_can_not_be_are_refused_by_the_number_to_change(
    values: dict[str, Any], ranks: Ranks, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        fit(info_of(values), ranks, BF16, Budget(1 << 40), 4096)


def test_what_fits_is_what_counting_gives() -> None:
    """Requests are added one by one, in blocks of 16 tokens, until the next would not fit."""
    groups = (KVGroup("full", "full", (0, 1), 2, 8), KVGroup("window", "window", (2,), 2, 8, window=50))
    info = ModelInfo("made", 100, 16, 3, 4096, groups)
    for context in (1, 16, 17, 50, 300):
        block = 16 * 2 * 2 * 8 * 2
        one = -(-context // 16) * 2 * block + -(-min(context, 50) // 16) * block
        budget, used, count = Budget(1_000_000, 100_000, 50_000, 0.9), 0, 0
        while used + one <= 750_000:
            used, count = used + one, count + 1
        found = fit(info, Ranks(), BF16, budget, context, host=10 * one - 1, files=20 * one)
        assert (found.footprint.rank, found.footprint.whole) == (one, one)
        assert (found.requests, found.tokens, found.host, found.files) == (count, count * context, 9, 20)


def test_no_room_for_kv_is_said() -> None:
    with pytest.raises(ConfigError, match="leave nothing for KV"):
        _ = Budget(80 << 30, 70 << 30, 4 << 30).kv


def test_lengths_double_up_to_the_longest() -> None:
    assert list(contexts(20_000)) == [4096, 8192, 16384, 20_000]
    assert list(contexts(4096)) == [4096] and list(contexts(100)) == [100]
