"""A rank that shares positions dies in the middle of a stream: all of them start again, and the stream goes on.

    FOREBAY_CONTEXT_RANKS=1     more ranks; ranks that share prompts as well; and one that is stopped rather than killed
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from forebay.testing.ports import free_port
from tests.checkpoints import tiny_deepseek_v3, tiny_llama
from tests.cli.test_serve import Serving
from tests.e2e.reference import greedy_reference
from tests.ranks.conftest import children, wait_gone
from tests.ranks.test_loss import LENGTH, PROMPT, over_a_killed_rank

LLAMA8 = partial(tiny_llama, num_key_value_heads=1, num_attention_heads=8, hidden_size=96)
CASES: dict[str, tuple[Callable[[Path], Path], int, int, int, int]] = {
    "deepseek_v3-2": (tiny_deepseek_v3, 2, 2, 1, signal.SIGKILL),
}
"""Tensor parallel ranks, those that share positions, sets that share prompts, and what the last rank is sent."""
if os.environ.get("FOREBAY_CONTEXT_RANKS"):
    CASES |= {
        "deepseek_v3-4-stopped": (tiny_deepseek_v3, 4, 4, 1, signal.SIGSTOP),
        "llama-8": (LLAMA8, 8, 8, 1, signal.SIGKILL),
        "deepseek_v3-2-of-2": (tiny_deepseek_v3, 2, 2, 2, signal.SIGKILL),
    }


@pytest.mark.parametrize("case", CASES)
def test_what_it_had_is_put_together_from_the_store(case: str, tmp_path: Path) -> None:
    """Its positions are nowhere else on a device; the store has them, in order, with everybody's."""
    make, tp, dcp, pcp, number = CASES[case]
    model = make(tmp_path / "tiny")
    (wanted,) = greedy_reference(model, [PROMPT], LENGTH)
    serving = Serving(tmp_path, model, free_port())
    serving.start(
        "--dtype", "float64", "--tensor-parallel-size", str(tp), "--decode-context-parallel-size", str(dcp),
        "--prefill-context-parallel-size", str(pcp), "--threads", "1",
        *(("--distributed-timeout", "10s") if number == signal.SIGSTOP else ()),
    )  # fmt: skip
    try:
        serving.ready()
        worker, another = over_a_killed_rank(serving, wanted, number)
        last = [another, *children(another)]
        assert another != worker and len(last) == tp * pcp
    finally:
        assert serving.stop() == 0
    wait_gone(last)
    serving.nothing_left()
