"""KV in FP8: a model computes what one does whose keys and values were rounded to what FP8 has of them, and stores and
takes up the bytes of that FP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forebay.errors import ConfigError
from forebay.kernels.narrow import KvScales, narrow
from forebay.models import latent, layers
from forebay.models.base import CausalLM
from forebay.models.errors import CheckpointBroken
from forebay.models.loading import load_model, read_info
from forebay.workers.assembly import namespace_of
from tests import checkpoints
from tests.parity.reference import Runner
from tests.parity.test_every_family import CPU, UNIT, assert_same, token_ids
from tests.parity.test_traps import far

OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
LENGTH = 70

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llama": checkpoints.tiny_llama,
    "gemma3, windows": partial(checkpoints.tiny_gemma3, window=24),
    "gpt-oss, sinks": partial(checkpoints.tiny_gpt_oss, window=24),
    "minimax, norm of all heads": checkpoints.tiny_minimax_m2,
    "deepseek, latents": checkpoints.tiny_deepseek_v3,
}


def load(path: Path, kv_dtype: torch.dtype | None = OCP) -> CausalLM:
    return load_model(path, dtype=torch.float64, device=CPU, kv_dtype=kv_dtype)


def with_scales(path: Path, kind: str, factor: float = 1.0) -> Path:
    """A scale or two for each layer, none of them a power of two: one number, one a head, or one for K and V."""
    config = json.loads((path / "config.json").read_text())
    latents = "kv_lora_rank" in config
    heads = 1 if latents else config["num_key_value_heads"]
    tensors = load_file(path / "model.safetensors")
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}.self_attn."
        one = torch.tensor(0.3 + 0.07 * index) * factor
        if kind == "layer":
            tensors[f"{at}k_proj.k_scale"], tensors[f"{at}v_proj.v_scale"] = one, 2 * one
        elif kind == "head":
            tensors[f"{at}k_scale"] = one * torch.arange(1, heads + 1)
            tensors[f"{at}v_scale"] = one * torch.arange(heads, 0, -1) / 2
        else:
            tensors[f"{at}kv_scale"] = one[None]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@dataclass
class Rounded:
    """Puts what FP8 leaves of keys, values and latents where they would be kept in full."""

    dtype: torch.dtype

    def rows(self, pool: Tensor, layer: int, rows: Tensor, kv: Tensor, scales: KvScales | None) -> None:
        scale = None if scales is None else scales.both
        WRITE_ROWS(pool, layer, rows, self.there_and_back(kv, scale))

    def latents(self, pool: Tensor, layer: int, slots: Tensor, rows: Tensor, scales: KvScales | None) -> None:
        WRITE_LATENTS(pool, layer, slots, self.there_and_back(rows, None if scales is None else scales.k))

    def there_and_back(self, x: Tensor, scale: Tensor | None) -> Tensor:
        back = narrow(x, scale, self.dtype).to(x.dtype)
        return back if scale is None else back * scale


def unscaled(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What is kept has its scales in it already."""
    return lambda *given, **named: attention(*given, **(named | {"scales": None}))


WRITE_ROWS, WRITE_LATENTS = layers.write_rows, latent.write_latents


def dequantised(
    path: Path, pieces: list[list[int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """Logits of the same model over a pool in fp64, in which there is what FP8 leaves. In the same pieces: products of
    more or fewer rows may differ in the last bit, which can make another FP8 number of it: rarely in fp64."""
    model = load(path, dtype)
    model.narrow_kv = None
    assert Runner(model).pools["full" if "full" in Runner(model).pools else "latent"].dtype == torch.float64
    with monkeypatch.context() as patch:
        patch.setattr(layers, "write_rows", Rounded(dtype).rows)
        patch.setattr(latent, "write_latents", Rounded(dtype).latents)
        patch.setattr(latent, "latent_attention", unscaled(latent.latent_attention))
        patch.setattr(layers, "paged_attention", unscaled(layers.paged_attention))
        runner = Runner(model)
        return torch.cat([runner.step({0: piece}) for piece in pieces])


@pytest.mark.parametrize(
    ("scales", "dtype"), [("none", OCP), ("layer", OCP), ("head", FNUZ), ("shared", OCP)],
    ids=["none-ocp", "layer-ocp", "head-fnuz", "shared-ocp"],
)  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_over_dequantised_keys_and_values(
    family: str, scales: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ids = FAMILIES[family](tmp_path), token_ids(LENGTH)
    if scales != "none":
        with_scales(path, scales)
    pieces = [ids[:30], ids[30:31], ids[31:64], *([i] for i in ids[64:])]
    wanted = dequantised(path, pieces, dtype, monkeypatch)
    runner = Runner(load(path, dtype))
    assert {pool.dtype for pool in runner.pools.values()} == {dtype}
    assert_same(torch.cat([runner.step({0: piece}) for piece in pieces]), wanted)
    assert far(Runner(load(path, None)).step({0: ids}), wanted), "FP8 leaves a trace"


@pytest.mark.parametrize("family", FAMILIES)
def test_hits_are_of_the_bytes_of_that_fp8(family: str, tmp_path: Path) -> None:
    path, ids = with_scales(FAMILIES[family](tmp_path), "head"), token_ids(LENGTH)
    model = load(path)
    donor, units, logits = Runner(model), [], []
    for at in range(0, 64, UNIT):
        logits.append(donor.step({0: ids[at : at + UNIT]}))
        units.append(donor.export(0, at // UNIT))
    logits.append(donor.step({0: ids[64:]}))
    wanted = torch.cat(logits)
    for group in model.info.kv_groups:
        values = len(group.layers) * group.planes * group.kv_heads * 16 * group.head_dim
        assert units[0][group.name].numel() == values, "a byte a value"
    for hit in range(1, len(units) + 1):
        runner = Runner(model, seed=hit)
        runner.adopt(0, units[:hit])
        assert_same(runner.step({0: ids[hit * UNIT :]}), wanted[hit * UNIT :])


def test_what_is_too_large_for_fp8_is_cut_and_never_lost(tmp_path: Path) -> None:
    """Without a cut it would be no number, or infinite."""
    for dtype, most in ((OCP, 448.0), (FNUZ, 240.0)):
        found = narrow(torch.tensor([1e9, -1e9, most, most * 1.01, 0.0]), None, dtype).float()
        assert found.tolist() == [most, -most, most, most, 0.0]
    path = with_scales(checkpoints.tiny_llama(tmp_path), "layer", factor=1e-4)
    found = Runner(load(path)).step({0: token_ids(20)})
    assert bool(found.isfinite().all())


def test_a_scale_makes_use_of_more_digits(tmp_path: Path) -> None:
    """Values of some thousands, cut at 448 without a scale."""
    path, ids = checkpoints.tiny_llama(tmp_path), token_ids(40)
    tensors = load_file(path / "model.safetensors")
    for index in range(3):
        for kind, by in (("v", 1000.0), ("o", 0.001)):
            tensors[f"model.layers.{index}.self_attn.{kind}_proj.weight"] *= by
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    exact = Runner(load(path, None)).step({0: ids})
    cut = Runner(load(path)).step({0: ids})
    for index in range(3):
        tensors[f"model.layers.{index}.self_attn.v_proj.v_scale"] = torch.tensor(16.0)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    scaled = Runner(load(path)).step({0: ids})
    assert (scaled - exact).abs().mean() < 0.3 * (cut - exact).abs().mean()


# --- what is refused, and what tells caches apart ------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (torch.tensor([1.0, 2.0, 3.0]), r"has shape \[3\]; a KV scale is one number, or one for each of 2 KV heads"),
        (torch.tensor(-1.0), "KV scales are positive numbers"),
        (torch.tensor(float("nan")), "KV scales are positive numbers"),
    ],
)
def test_a_scale_that_is_none_is_refused(scale: Tensor, said: str, tmp_path: Path) -> None:
    path = checkpoints.tiny_llama(tmp_path)
    tensors = load_file(path / "model.safetensors") | {"model.layers.0.self_attn.k_scale": scale}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointBroken, match=said):
        load(path)
    load(path, None)


def test_a_family_with_other_kinds_of_groups_has_no_kv_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.tiny_llama(tmp_path)
    info = read_info(path)
    odd = type(info.kv_groups[0])("x", "indexer", (0,), 1, 8)  # type: ignore[arg-type]
    monkeypatch.setattr("forebay.models.loading._info", lambda *_: type(info)(**{
        **{name: getattr(info, name) for name in info.__slots__}, "kv_groups": (*info.kv_groups, odd)
    }))  # fmt: skip
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*'indexer'.*use auto"):
        load(path)


def test_caches_of_both_dialects_and_of_the_model_s_own_dtype_are_three(tmp_path: Path) -> None:
    info = read_info(checkpoints.tiny_llama(tmp_path))
    found = [namespace_of(info, "float32", b"w" * 32, 64, kv) for kv in (None, "float8_e4m3fn", "float8_e4m3fnuz")]
    assert len({namespace.id for namespace in found}) == 3
    assert [namespace.groups[0].dtype for namespace in found] == ["float32", "float8_e4m3fn", "float8_e4m3fnuz"]
    assert found[0].id == namespace_of(info, "float32", b"w" * 32, 64, "float32").id
    assert found[1].groups[0].granule_bytes * 4 == found[0].groups[0].granule_bytes
