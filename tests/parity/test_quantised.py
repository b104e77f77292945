"""Quantised checkpoints compute what transformers computes with the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from forebay.models.fingerprint import fingerprint_weights
from tests import checkpoints
from tests.parity.reference import Runner, reference_logits
from tests.parity.test_every_family import assert_same, load, token_ids

Quantise = Callable[[Path], Path]

FORMS: dict[str, tuple[Callable[[Path], Path], Quantise]] = {
    "llama-fp8": (checkpoints.tiny_llama, checkpoints.to_fp8),
    "qwen3_moe-fp8": (checkpoints.tiny_qwen3_moe, checkpoints.to_fp8),
    "minimax_m2-fp8": (checkpoints.tiny_minimax_m2, checkpoints.to_fp8),
    "glm4_moe-fp8": (checkpoints.tiny_glm4_moe, checkpoints.to_fp8),
    "deepseek_v3-fp8": (checkpoints.tiny_deepseek_v3, partial(checkpoints.to_fp8, block=(128, 128))),
    "gpt_oss-mxfp4": (checkpoints.tiny_gpt_oss, checkpoints.to_mxfp4),
}


@pytest.mark.parametrize("form", FORMS)
def test_quantised(form: str, tmp_path: Path) -> None:
    make, quantise = FORMS[form]
    path = make(tmp_path / "model")
    before, ids = Runner(load(path)).step({0: token_ids()}), token_ids()
    plain = quantise(path)
    found = Runner(load(path)).step({0: ids})
    assert_same(found, reference_logits(plain, ids, torch.float32))
    assert not torch.allclose(found, before, atol=1e-2), "other numbers than before they were quantised"


def test_a_quantised_checkpoint_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    path = checkpoints.tiny_gpt_oss(tmp_path / "model")
    plain = checkpoints.to_mxfp4(path)
    assert fingerprint_weights(path, tmp_path / "cache") != fingerprint_weights(plain, tmp_path / "cache")
