"""What a launch would compile follows from its arguments: their types, multiples of 16, ones and constants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the package triton isn't installed: pip install 'forebay[triton]'")

from tests.kernels.ahead.compiling import KERNELS, ROOT, module

PROGRAM = """
import torch
from forebay.kernels.ahead.cases import CASES
from forebay.kernels.ahead.targets import TARGETS
from forebay.kernels.ahead.record import recorded, type_of
from forebay.kernels.gpu.attend import Tiling, attend
from forebay.kernels.paged import Scores
from forebay.kernels.ragged import ragged

assert [type_of(2**31 - 1), type_of(2**31), type_of(-(2**31) - 1), type_of(0.5)] == ["i32", "i64", "i64", "fp32"]

# A block of more elements than 32 bits count, in a pool without memory.
meta = torch.device("meta")
pool = torch.empty(4, 2**17, 2, 8, 16, 128, dtype=torch.bfloat16, device=meta)
where = ragged([1], [31], [32], torch.empty(1, 2, dtype=torch.int64, device=meta))
with recorded() as launches:
    q = torch.empty(1, 32, 128, dtype=torch.bfloat16, device=meta)
    attend(q, pool, 2**17 - 1, where, Scores(0.1), Tiling(splits=2))
first, second = launches
assert (first.name, second.name) == ("attend_kernel", "merge_kernel")
assert (first.signature["block_row"], first.signature["layer_at"]) == ("i64", "i64")
assert first.signature["out"] == "*fp32" and second.signature["out"] == "*bf16"
assert first.signature["rows"] == "constexpr" and first.constants["rows"] == 1
assert first.signature["sinks"] == "constexpr" and first.constants["sinks"] is None
assert "block_row" in first.aligned and first.constants["SPLITS"] == 2
assert first.options == {"num_warps": 4, "num_stages": 2}

# Every case launches what it names, on every target that has it.
for target in TARGETS.values():
    for case in CASES:
        if case.only(target):
            assert case.launch(target, case.sizes(target)[0]).name == case.kernel
"""


def test_launches_are_written_down_as_triton_would_compile_them() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    line = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_every_kernel_compiles_where_all_its_sizes_are_one() -> None:
    found = module("tests.kernels.ahead.ones")
    assert found.returncode == 0, found.stderr
    assert len(set(found.stdout.split())) == KERNELS
