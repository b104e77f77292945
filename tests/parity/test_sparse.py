"""Sparse families choose what transformers chooses, layer by layer, but for exact ties at the cut: they are counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from forebay.errors import ConfigError
from forebay.kernels.batch import Batch, pack_batch
from forebay.kernels.blocks import BlockSelection
from forebay.kernels.chosen import Selection, resident_slots
from forebay.models import block_sparse, sparse
from forebay.models.errors import CheckpointBroken, UnsupportedArchitecture
from forebay.models.loading import load_model, read_info
from tests import checkpoints
from tests.parity.reference import Runner, reference_logits
from tests.parity.test_every_family import CPU, LENGTH, assert_same, load, token_ids
from tests.parity.test_traps import edit_config, far, logits
from tests.ties import stable_topk

TOP_K = 24
DSA = {"deepseek_v32": checkpoints.tiny_deepseek_v32, "glm_moe_dsa": checkpoints.tiny_glm_moe_dsa}


# --- the same sets -------------------------------------------------------------------------------------------


@dataclass
class Choice:
    """One choice of transformers: its scores [rows, n], what topk took, and what it takes of equals in order."""

    scores: torch.Tensor
    taken: torch.Tensor
    first: torch.Tensor


def reference_choices(path: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch, last: int) -> list[Choice]:
    """Of every layer with an index. `last`: how many values the scores have along the last axis."""
    found: list[Choice] = []
    topk = torch.Tensor.topk

    def noting(x: torch.Tensor, k: int, dim: int = -1, **more: Any) -> Any:
        first = stable_topk(x, k, dim, **more)
        if x.shape[-1] == last:
            found.append(Choice(x[0].clone(), topk(x, k, dim=dim, **more).indices[0], first.indices[0]))
        return first

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(torch.Tensor, "topk", noting)
        model.eval()(torch.tensor([ids]))
    return found


@contextmanager
def own_choices(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    found: list[Any] = []
    choose = getattr(module, name)

    def noting(*args: Any) -> Any:
        found.append(choose(*args))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(module, name, noting)
        yield found


def tied_at_the_cut(scores: torch.Tensor, count: int) -> bool:
    """Are there more with the last chosen score than fit?"""
    last = scores.sort(descending=True).values[count - 1]
    return bool((scores >= last).sum() > count)


@pytest.mark.parametrize("family", DSA)
def test_positions_are_those_that_transformers_chooses(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ids = DSA[family](tmp_path), token_ids()
    wanted = reference_choices(path, ids, monkeypatch, last=LENGTH)
    with own_choices(sparse, "choose_positions", monkeypatch) as found:
        Runner(load(path)).step({0: ids})
    assert len(found) == len(wanted) == len(set(leaders_of(path)))
    ties = same = 0
    for own, theirs in zip(found, wanted, strict=True):
        assert isinstance(own, Selection)
        for row in range(LENGTH):
            seen = min(row + 1, TOP_K)
            mine = {p for p in own.positions[row].tolist() if p >= 0}
            assert mine == set(theirs.first[row, :seen].tolist())
            tied = row >= TOP_K and tied_at_the_cut(theirs.scores[row, : row + 1], TOP_K)
            ties += tied
            if not tied:
                assert mine == set(theirs.taken[row, :seen].tolist()), "not even order may differ here"
                same += row >= TOP_K
    print(f"{family}: {ties} of {ties + same} rows have exact ties at the cut")
    assert same > 20 and ties > 0, "both kinds are there"


def leaders_of(path: Path) -> tuple[int, ...]:
    sparsity = read_info(path).sparse
    assert sparsity is not None
    return sparsity.leaders


def test_blocks_are_those_that_transformers_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ids = checkpoints.tiny_minimax_m3(tmp_path), token_ids()
    wanted = reference_choices(path, ids, monkeypatch, last=-(-LENGTH // 12))
    with own_choices(block_sparse, "choose_blocks", monkeypatch) as found:
        Runner(load(path)).step({0: ids})
    assert len(found) == len(wanted) == 3
    for own, theirs in zip(found, wanted, strict=True):
        assert isinstance(own, BlockSelection)
        scores = theirs.scores.transpose(0, 1)  # [rows, heads, blocks]
        for row in range(LENGTH):
            for head in range(2):
                seen = min(row // 12 + 1, 3)
                mine = [b for b in own.blocks[row, head].tolist() if b >= 0]
                assert set(mine) == set(theirs.taken[head, row, :seen].tolist())
                assert mine[0] == row // 12 and scores[row, head, mine[0]] == torch.inf, "its own is always there"


@pytest.mark.parametrize("family", DSA)
def test_no_choice_hangs_on_rounding(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests count on: in these checkpoints scores at the cut are equal, or well apart."""
    path = DSA[family](tmp_path)
    for choice in reference_choices(path, token_ids(), monkeypatch, last=LENGTH):
        for row in range(TOP_K, LENGTH):
            ranked = choice.scores[row, : row + 1].sort(descending=True).values
            gap = float(ranked[TOP_K - 1] - ranked[TOP_K])
            assert gap == 0 or gap > 1e-5 * float(ranked[0] - ranked[-1])


@pytest.mark.parametrize("make", [*DSA.values(), checkpoints.tiny_minimax_m3])
def test_logits_of_some_rows_in_any_order(make: Any, tmp_path: Path) -> None:
    """The last layer chooses for these alone."""
    ids, rows = token_ids(40), [39, 7, 30]
    model = load(make(tmp_path))
    wanted = Runner(model).step({0: ids})[rows]
    names = [group.name for group in model.info.kv_groups]
    batch = pack_batch([(ids, 0)], {name: [[2, 0, 3]] for name in names}, logits_rows=rows)
    assert_same(model.forward(batch, model.new_pools(dict.fromkeys(names, 4))), wanted)


# --- sharing, settings, refusals -----------------------------------------------------------------------------


def test_layers_share_what_the_last_full_one_chose(tmp_path: Path) -> None:
    path = checkpoints.tiny_glm_moe_dsa(tmp_path)
    assert leaders_of(path) == (0, 1, 1, 1)
    latents, keys = read_info(path).kv_groups
    assert (latents.layers, keys.layers) == ((0, 1, 2, 3), (0, 1))
    assert (keys.name, keys.kind, keys.kv_heads, keys.head_dim) == ("index", "indexer", 1, 16)


@pytest.mark.parametrize(
    ("settings", "full"),
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 2}, [0, 1, 5, 9, *range(13, 78, 4)]),
        ({"index_topk_freq": 1}, list(range(78))),
        ({}, list(range(78))),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 4}, [0, 1, 2, 3, *range(6, 78, 3)]),
        ({"index_topk_pattern": "FS" * 39}, list(range(0, 78, 2))),
    ],
)
def test_schedules_of_sharing(settings: dict[str, Any], full: list[int], tmp_path: Path) -> None:
    """The first one is GLM-5.2's: 21 full layers of 78."""
    sizes = {
        "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "hidden_size": 6144, "num_attention_heads": 64,
        "max_position_embeddings": 202752, "vocab_size": 154880,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes | settings))
    leaders = leaders_of(tmp_path)
    assert sorted(set(leaders)) == full
    assert transformers.GlmMoeDsaConfig(**settings).indexer_types == [
        "full" if i == leader else "shared" for i, leader in enumerate(leaders)
    ]


def test_an_index_makes_a_difference(tmp_path: Path) -> None:
    path, ids = checkpoints.tiny_deepseek_v32(tmp_path), token_ids()
    wanted = reference_logits(path, ids, torch.float32)
    edit_config(path, index_topk=LENGTH)
    assert far(logits(path, ids), wanted)
    assert_same(logits(path, ids[:TOP_K]), wanted[:TOP_K])


@pytest.mark.parametrize("family", DSA)
def test_halves_or_pairs_of_index_keys_are_rotated(family: str, tmp_path: Path) -> None:
    """V3.2 rotates halves in its index, whatever it does in its latents; GLM pairs."""
    path, ids = DSA[family](tmp_path), token_ids()
    wanted = reference_logits(path, ids, torch.float32)
    assert_same(logits(path, ids), wanted)
    model = load(path)
    for layer in model._layers:  # type: ignore[attr-defined]
        if layer._attention._index is not None:
            shape = layer._attention._index._shape
            layer._attention._index._shape = replace(shape, pairs=not shape.pairs)
    assert far(Runner(model).step({0: ids}), wanted)


def test_the_choice_is_in_what_tells_caches_apart(tmp_path: Path) -> None:
    path = checkpoints.tiny_glm_moe_dsa(tmp_path)
    before = read_info(path)
    edit_config(path, index_topk=25)
    assert read_info(path).rope != before.rope
    scaled = read_info(path, "fp8")
    assert scaled.kv_groups[1].scaled and scaled.rope["index.turned"] and not before.rope["index.turned"]


@pytest.mark.parametrize(
    ("make", "change", "said"),
    [
        (checkpoints.tiny_glm_moe_dsa, {"indexer_types": ["shared"] + ["full"] * 3}, "must begin with a full layer"),
        (checkpoints.tiny_glm_moe_dsa, {"indexer_types": ["full"] * 3}, "must name 4 layers"),
        (checkpoints.tiny_glm_moe_dsa, {"mlp_layer_types": ["dense", "dense", "odd", "sparse"]}, "dense or sparse"),
        (checkpoints.tiny_deepseek_v32, {"index_head_dim": 8}, "less than the 12 dimensions that are rotated"),
        (checkpoints.tiny_deepseek_v32, {"mlp_bias": True}, "mlp_bias = true is not supported"),
        (checkpoints.tiny_deepseek_v32, {"scoring_func": "softmax"}, "router other than sigmoid"),
        (checkpoints.tiny_minimax_m3, {"index_n_heads": 4}, "4 index heads for 2 KV heads"),
        (checkpoints.tiny_minimax_m3, {"layer_types": ["sliding_attention"] * 4}, "must name 4 layers"),
        (checkpoints.tiny_minimax_m3, {"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(make: Any, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    edit_config(path, **change)
    with pytest.raises((CheckpointBroken, UnsupportedArchitecture), match=said):
        load(path)


# --- index keys of eight bits --------------------------------------------------------------------------------


def test_scaled_keys_are_a_cache_of_their_own_that_hits_like_any(tmp_path: Path) -> None:
    """Their bytes go from one pool to another; what follows is the same to the last bits that rounding leaves."""
    path, ids = checkpoints.tiny_glm_moe_dsa(tmp_path, index_head_dim=32), token_ids()
    model = load_model(path, dtype=torch.float32, device=CPU, index_keys="fp8")
    keys = model.info.kv_groups[1]
    assert keys.granule_bytes(torch.float32) == 2 * 16 * 36
    donor = Runner(model)
    wanted = torch.cat([donor.step({0: ids[at : at + 16]}) for at in range(0, LENGTH, 16)])
    units = [donor.export(0, unit) for unit in range(LENGTH // 16)]
    for hit in (1, 3, 5):
        runner = Runner(model, seed=hit)
        runner.adopt(0, units[:hit])
        assert_same(runner.step({0: ids[hit * 16 :]}), wanted[hit * 16 :])


def test_scaled_keys_choose_nearly_what_exact_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ids = checkpoints.tiny_deepseek_v32(tmp_path, index_head_dim=32), token_ids()
    chosen = []
    for form in ("model", "fp8"):
        model = load_model(path, dtype=torch.float32, device=CPU, index_keys=form)  # type: ignore[arg-type]
        with own_choices(sparse, "choose_positions", monkeypatch) as found:
            Runner(model).step({0: ids})
        chosen.append([set(row.tolist()) for row in found[0].positions[TOP_K:]])  # of the first layer: equal inputs
    shared = sum(len(a & b) for a, b in zip(*chosen, strict=True))
    assert 0.9 < shared / (TOP_K * len(chosen[0])) < 1


def test_models_without_an_index_refuse_such_keys(tmp_path: Path) -> None:
    path = checkpoints.tiny_deepseek_v3(tmp_path)
    with pytest.raises(ConfigError, match="this model has no index keys"):
        read_info(path, "fp8")


# --- where rows are found ------------------------------------------------------------------------------------


class Noting:
    """A resolver that says what the tables say, and notes who asks."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def resolve(self, leader: int, batch: Batch, selection: Selection) -> torch.Tensor:
        self.asked.append(("resolve", leader, len(selection.rows)))
        tables = batch.groups["latent"].block_tables
        return resident_slots(tables, selection.sequences, selection.positions)

    def prepare(self, layer: int, batch: Batch, selection: Selection, slots: torch.Tensor) -> None:
        assert slots.shape == selection.positions.shape
        self.asked.append(("prepare", layer, len(selection.rows)))


def test_a_resolver_is_asked_once_a_choice_and_told_before_every_read(tmp_path: Path) -> None:
    path, ids = checkpoints.tiny_glm_moe_dsa(tmp_path), token_ids(40)
    model = load(path)
    pools = model.new_pools({"latent": 4, "index": 4})
    tables = {"latent": [[2, 0, 3]], "index": [[1, 3, 0]]}
    wanted = model.forward(pack_batch([(ids, 0)], tables, logits_rows=[39, 7]), pools)
    resolver = Noting()
    found = model.forward(pack_batch([(ids, 0)], tables, logits_rows=[39, 7], resolver=resolver), pools)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    every = [("resolve", 0, 40), ("prepare", 0, 40), ("resolve", 1, 40)]
    assert resolver.asked == [*every, ("prepare", 1, 40), ("prepare", 2, 40), ("prepare", 3, 2)]


def test_with_a_resolver_even_short_sequences_choose(tmp_path: Path) -> None:
    """What isn't on the device is found by the resolver alone."""
    path, ids = checkpoints.tiny_deepseek_v32(tmp_path), token_ids(9)
    model = load(path)
    pools, resolver = model.new_pools({"latent": 1, "index": 1}), Noting()
    tables = {"latent": [[0]], "index": [[0]]}
    wanted = model.forward(pack_batch([(ids, 0)], tables), pools)
    found = model.forward(pack_batch([(ids, 0)], tables, resolver=resolver), pools)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert [who for who, _, _ in resolver.asked] == ["resolve", "prepare"] * 3
