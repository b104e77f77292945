"""A GGUF file whose metadata or tensors ask for what isn't computed is refused by name, before anything is converted;
metadata that contradicts the tensors is refused when they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forebay.models.errors import CheckpointBroken, UnsupportedArchitecture
from forebay.models.gguf_config import gguf_config, rename_tensor
from forebay.models.gguf_file import GGUFFile, GGUFTensor, read_gguf
from tests import checkpoints
from tests.models.gguf_files import write_gguf


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFFile]:
    folder = tmp_path_factory.mktemp("gguf")
    makers = {"llama": checkpoints.tiny_llama, "gemma3": checkpoints.tiny_gemma3, "qwen2": checkpoints.tiny_qwen2}
    return {name: read_gguf(write_gguf(make(folder / name), folder / f"{name}.gguf")) for name, make in makers.items()}


def having(file: GGUFFile, **entries: Any) -> GGUFFile:
    """With these entries under the architecture's prefix; `__` stands for a dot."""
    more = {f"{file.architecture}.{key.replace('__', '.')}": value for key, value in entries.items()}
    return replace(file, metadata={**file.metadata, **more})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "expert_count", 8),
        ("llama", "attention__sliding_window", 4096),
        ("llama", "attention__scale", 0.0078125),
        ("llama", "attention__causal", False),
        ("llama", "attention__max_alibi_bias", 8.0),
        ("llama", "embedding_scale", 12.0),
        ("llama", "residual_scale", 0.22),
        ("llama", "logit_scale", 0.0625),
        ("llama", "rope__scale_linear", 4.0),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "rope__scaling__attn_factor", 0.8),
        ("qwen2", "rope__scaling__yarn_log_multiplier", 0.1),
        ("qwen2", "attention__clamp_kqv", 8.0),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "attention__scale", 0.1),
    ],
)
def test_a_setting_that_is_not_computed_is_named(
    name: str, key: str, value: object, files: dict[str, GGUFFile]
) -> None:
    with pytest.raises(UnsupportedArchitecture, match=key.replace("__", r"\.")):
        gguf_config(having(files[name], **{key: value}))


def test_what_changes_nothing_may_be_there(files: dict[str, GGUFFile]) -> None:
    neutral = {"expert_count": 0, "attention__causal": True, "logit_scale": 1.0, "rope__scaling__attn_factor": 1.0}
    dims = {"rope__dimension_count": 20, "attention__sliding_window": 0}
    assert gguf_config(having(files["llama"], **neutral, **dims)) == gguf_config(files["llama"])


def test_a_rotation_of_a_part_of_a_head_is_refused(files: dict[str, GGUFFile]) -> None:
    with pytest.raises(UnsupportedArchitecture, match="10 of 20 dimensions"):
        gguf_config(having(files["llama"], rope__dimension_count=10))


@pytest.mark.parametrize(
    "tensor",
    ["blk.0.ffn_gate_exps.weight", "rope_factors_long.weight", "blk.1.attn_sinks.weight", "blk.0.attn_qkv.weight"],
)
def test_a_tensor_that_has_no_part_is_named(tensor: str, files: dict[str, GGUFFile]) -> None:
    file = files["llama"]
    more = replace(file, tensors={**file.tensors, tensor: GGUFTensor(tensor, (4, 4), 0, 0)})
    with pytest.raises(UnsupportedArchitecture, match=tensor):
        gguf_config(more)


def test_one_of_several_parts_is_refused(files: dict[str, GGUFFile]) -> None:
    with pytest.raises(UnsupportedArchitecture, match="several parts"):
        gguf_config(replace(files["llama"], metadata={**files["llama"].metadata, "split.count": 3}))


def test_a_cap_on_logits_is_kept_whatever_names_the_layers(files: dict[str, GGUFFile]) -> None:
    for pattern in (3, [True, True, False] * 2):
        file = having(files["gemma3"], final_logit_softcapping=30.0, attention__sliding_window_pattern=pattern)
        assert gguf_config(file)["final_logit_softcapping"] == 30.0


def test_a_factor_without_a_type_is_linear(files: dict[str, GGUFFile]) -> None:
    config = gguf_config(having(files["llama"], rope__scaling__factor=4.0))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(UnsupportedArchitecture, match=r"rope_freqs\.weight beside"):
        gguf_config(having(files["llama"], rope__scaling__factor=4.0), (1.0,) * 10)


def test_yarns_ramp_is_read(files: dict[str, GGUFFile]) -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_beta_fast": 16.0}
    assert gguf_config(having(files["qwen2"], **yarn))["rope_scaling"]["beta_fast"] == 16.0


def test_more_tokens_than_rows_are_refused(files: dict[str, GGUFFile]) -> None:
    file = files["llama"]
    tokens = [*file.metadata["tokenizer.ggml.tokens"], *("more" for _ in range(600))]
    with pytest.raises(CheckpointBroken, match="tokens for 512 rows"):
        gguf_config(replace(file, metadata={**file.metadata, "tokenizer.ggml.tokens": tokens}))


def test_rows_that_are_not_so_many_heads_are_refused(files: dict[str, GGUFFile]) -> None:
    """Llama's queries and keys are put in another order, by heads, which may be a wrong number of them."""
    file = files["llama"]
    found = rename_tensor("blk.0.attn_q.weight", file, gguf_config(having(file, attention__head_count=7)))
    assert found is not None
    with pytest.raises(CheckpointBroken, match=r"attn_q\.weight.* 80 rows, not 7 heads"):
        found.convert(np.zeros((80, 64), dtype=np.float32))
