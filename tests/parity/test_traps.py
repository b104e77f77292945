"""Where an implementation and transformers part silently: each trap is shown to be visible, and to be avoided.

A tiny checkpoint that a trap would not change proves nothing. So each test computes the mistake too, and wants it to be
well outside of the tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from forebay.kernels import moe as moe_kernels
from forebay.kernels.moe import Routes, Routing
from forebay.models import latent
from forebay.models.config import read_config
from forebay.models.deepseek import read_routing
from forebay.models.layers import normalise
from forebay.models.loading import load_model, read_info
from tests import checkpoints
from tests.parity.reference import Runner, reference_logits
from tests.parity.test_every_family import CPU, assert_same, load, token_ids


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    return Runner(load(path)).step({0: ids})


def far(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Is it further off than any rounding?"""
    return (found - wanted).abs().max().item() > 1e-2


# --- latent attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [checkpoints.tiny_deepseek_v2, checkpoints.tiny_deepseek_v3])
def test_latents_are_normed_with_an_eps_of_their_own(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the layers': GLM's is 1e-5, here it is large enough to be seen."""
    path, ids = make(tmp_path, rms_norm_eps=0.1), token_ids()
    wanted = reference_logits(path, ids, torch.float32)
    assert_same(logits(path, ids), wanted)
    monkeypatch.setattr(latent, "NORM_EPS", 0.1)
    assert far(logits(path, ids), wanted)


@pytest.mark.parametrize("interleave", [True, False])
def test_pairs_or_halves_are_rotated_as_the_configuration_says(interleave: bool, tmp_path: Path) -> None:
    path, ids = checkpoints.tiny_deepseek_v3(tmp_path, rope_interleave=interleave), token_ids()
    wanted = reference_logits(path, ids, torch.float32)
    assert_same(logits(path, ids), wanted)
    edit_config(path, rope_interleave=not interleave)
    assert far(logits(path, ids), wanted)


def test_pairs_and_halves_are_different_bytes(tmp_path: Path) -> None:
    """Scores are equal when both sides are permuted, keys aren't: so it is part of what tells caches apart."""
    path = checkpoints.tiny_deepseek_v3(tmp_path)
    before = read_info(path).rope
    edit_config(path, rope_interleave=False)
    assert read_info(path).rope != before


def test_yarn_sharpens_scores_only_if_it_is_told_so_for_all_dimensions(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4,
    }  # fmt: skip
    ids = token_ids()
    both = {"mscale": 0.7, "mscale_all_dim": 1.2}
    found = {}
    for name, more in {"neither": {}, "one": {"mscale": 0.7}, "both": both}.items():
        path = checkpoints.tiny_deepseek_v3(tmp_path / name, rope_parameters=rope | more)
        wanted = reference_logits(path, ids, torch.float32)
        found[name] = logits(path, ids)
        assert_same(found[name], wanted)
    assert far(found["both"], found["neither"])
    assert_same(found["one"], found["neither"])


def test_a_latent_is_one_row_for_all_heads(tmp_path: Path) -> None:
    (group,) = read_info(checkpoints.tiny_deepseek_v3(tmp_path)).kv_groups
    assert (group.kind, group.kv_heads, group.head_dim) == ("latent", 1, 28 + 12)
    assert group.granule_bytes(torch.bfloat16) == 3 * 16 * 40 * 2


# --- routers -------------------------------------------------------------------------------------------------


def _weights_with_bias(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> Routes:
    routes = moe_kernels.route(logits, routing, bias)
    assert bias is not None
    weights = (logits.sigmoid() + bias).gather(1, routes.experts)
    return Routes(routes.experts, weights / weights.sum(-1, keepdim=True) * routing.scale)


@pytest.mark.parametrize("make", [checkpoints.tiny_glm4_moe, checkpoints.tiny_minimax_m2, checkpoints.tiny_deepseek_v3])
def test_the_bias_for_the_choice_is_not_in_the_weights(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ids = make(tmp_path), token_ids()
    wanted = reference_logits(path, ids, torch.float32)
    assert_same(logits(path, ids), wanted)
    monkeypatch.setattr("forebay.models.moe.route", _weights_with_bias)
    assert far(logits(path, ids), wanted)


_IN_BEST_GROUPS = moe_kernels._in_best_groups


def _zero_for_minus_infinity(worth: torch.Tensor, routing: Routing) -> torch.Tensor:
    hidden = _IN_BEST_GROUPS(worth, routing)
    return hidden.masked_fill(hidden.isinf(), 0.0)


def test_a_rejected_group_is_out_even_where_the_chosen_are_worth_less_than_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With zero in its place, which older code has, an expert of a rejected group beats one with a negative worth."""
    path, ids = checkpoints.tiny_deepseek_v3(tmp_path), token_ids()
    wanted = reference_logits(path, ids, torch.float32)
    assert_same(logits(path, ids), wanted)
    monkeypatch.setattr(moe_kernels, "_in_best_groups", _zero_for_minus_infinity)
    assert far(logits(path, ids), wanted)


@pytest.mark.parametrize("change", [{"n_group": 1, "topk_group": 1}, {"topk_group": 1}], ids=["no-groups", "one-kept"])
def test_groups_make_a_difference(change: dict[str, int], tmp_path: Path) -> None:
    path, ids = checkpoints.tiny_deepseek_v3(tmp_path), token_ids()
    wanted = reference_logits(path, ids, torch.float32)
    edit_config(path, **change)
    assert far(logits(path, ids), wanted)


def test_v2_takes_the_best_and_v3_the_best_two_of_a_group(tmp_path: Path) -> None:
    second = read_routing(read_config(checkpoints.tiny_deepseek_v2(tmp_path / "v2")))
    third = read_routing(read_config(checkpoints.tiny_deepseek_v3(tmp_path / "v3")))
    assert (second.score, second.group_worth, second.renormalise) == ("softmax", "max", False)
    assert (third.score, third.group_worth, third.renormalise) == ("sigmoid", "top2", True)


def test_a_shared_expert_is_on_top_of_the_scaled_ones(tmp_path: Path) -> None:
    """The scale multiplies what is routed, not what is shared."""
    path, ids = checkpoints.tiny_glm4_moe(tmp_path, routed_scaling_factor=3.0), token_ids()
    wanted = reference_logits(path, ids, torch.float32)
    assert_same(logits(path, ids), wanted)
    edit_config(path, routed_scaling_factor=1.0)
    assert far(logits(path, ids), wanted)


# --- windows, sinks, rotary positions ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [checkpoints.tiny_gemma3, checkpoints.tiny_gpt_oss])
@pytest.mark.parametrize("window", [15, 16, 17])
def test_at_the_edge_of_the_window(make: Callable[..., Path], window: int, tmp_path: Path) -> None:
    """Prompts of W - 1, W and W + 1 tokens, and two decodes behind each."""
    path, ids = make(tmp_path, window=window), token_ids(window + 3)
    model, wanted = load(path), reference_logits(path, ids, torch.float32)
    for length in (window - 1, window, window + 1):
        runner = Runner(model)
        pieces = (ids[:length], [ids[length]], [ids[length + 1]])
        assert_same(torch.cat([runner.step({0: piece}) for piece in pieces]), wanted[: length + 2])


def test_sinks_make_a_difference(tmp_path: Path) -> None:
    path, ids = checkpoints.tiny_gpt_oss(tmp_path), token_ids()
    model = load(path)
    wanted = Runner(model).step({0: ids})
    for layer in model._layers:  # type: ignore[attr-defined]
        layer._attention._sinks = None
    assert far(Runner(model).step({0: ids}), wanted)


def test_qk_norm_over_all_heads_is_not_that_of_each(tmp_path: Path) -> None:
    """MiniMax-M2's weights have one value for every head and dimension."""
    path = checkpoints.tiny_minimax_m2(tmp_path)
    model, ids = load(path), token_ids()
    wanted = Runner(model).step({0: ids})

    def each(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = torch.cat((self._q, self._k)).view(x.shape[1:])
        return normalise(x, self._eps) * weight

    for layer in model._layers:  # type: ignore[attr-defined]
        layer._attention._qk_norm = partial(each, layer._attention._qk_norm)
    assert far(Runner(model).step({0: ids}), wanted)


def test_published_minimax_names_the_rotated_values(tmp_path: Path) -> None:
    path = checkpoints.tiny_minimax_m2(tmp_path)
    wanted = read_info(path)
    assert wanted.rope["full.dim"] == 12
    edit_config(path, rope_parameters=None, rope_theta=5e6, rotary_dim=12)
    assert read_info(path) == wanted


@pytest.mark.parametrize("kind", ["older", "newer"])
def test_deepseek_is_read_in_the_form_that_is_published(kind: str, tmp_path: Path) -> None:
    path = checkpoints.tiny_deepseek_v3(tmp_path)
    ids = token_ids()
    wanted = logits(path, ids)
    if kind == "older":
        scaling = json.loads((path / "config.json").read_text())["rope_parameters"]
        theta, scaling["type"] = scaling.pop("rope_theta"), scaling.pop("rope_type")
        edit_config(path, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    edit_config(path, num_nextn_predict_layers=1, topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1)
    assert torch.equal(logits(path, ids), wanted)


# --- rotary positions that depend on the length --------------------------------------------------------------


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An original context of 40 tokens, four times that with dynamic scaling."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return checkpoints.tiny_llama(tmp_path_factory.mktemp("dynamic"), rope_parameters=rope, max_position_embeddings=40)


def decoded_by_the_reference(path: Path, ids: list[int], first: int) -> torch.Tensor:
    """transformers, with a cache: `first` tokens at once, the others one by one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows, cache = [], None
    with torch.inference_mode():
        for piece in (ids[:first], *([token] for token in ids[first:])):
            out = model(input_ids=torch.tensor([piece]), cache=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0])
    return torch.cat(rows)


def test_dynamic_rope_is_what_decoding_gives_past_the_original_context(growing: Path) -> None:
    ids = token_ids()
    assert read_info(growing).max_context == 160
    wanted = decoded_by_the_reference(growing, ids, first=40)
    assert_same(Runner(load(growing)).step({0: ids}), wanted)
    assert far(reference_logits(growing, ids, torch.float32), wanted), "a prefill by the reference is another thing"


def test_dynamic_rope_is_cached_like_any_other(growing: Path) -> None:
    """A position's bytes don't depend on what comes after it: chunks, decodes and hits give the same."""
    ids = token_ids()
    model = load(growing)
    whole = Runner(model).step({0: ids})
    donor, units = Runner(model), []
    for at in range(0, 80, 16):
        donor.step({0: ids[at : at + 16]})
        units.append(donor.export(0, at // 16))
    for hit in range(1, 6):
        runner = Runner(model, seed=hit)
        runner.adopt(0, units[:hit])
        assert_same(runner.step({0: ids[hit * 16 :]}), whole[hit * 16 :])


def test_positions_are_exact_far_out(tmp_path: Path) -> None:
    """Angles in bf16, or in fp32 from rounded frequencies, drift with the position. Keys at 4,000 tokens in."""
    path = checkpoints.tiny_qwen3(tmp_path, num_hidden_layers=1, max_position_embeddings=4200)
    ids = token_ids(4096)
    wanted = reference_logits(path, ids, torch.float32)[-64:]
    model = load_model(path, dtype=torch.float32, device=CPU)
    runner = Runner(model, blocks=300)
    found = [runner.step({0: ids[at : at + 1024]}) for at in range(0, 4096, 1024)]
    assert_same(torch.cat(found)[-64:], wanted)
