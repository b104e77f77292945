"""A rank that shares positions dies in the middle of a stream: all of them start again, and the stream goes on."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import tiny_deepseek_v3
from tests.cli.test_serve import Serving, free_port
from tests.e2e.reference import greedy_reference
from tests.ranks.conftest import children, wait_gone
from tests.ranks.test_loss import LENGTH, PROMPT, over_a_killed_rank


def test_what_it_had_is_put_together_from_the_store(tmp_path: Path) -> None:
    """Its positions are nowhere else on a device; the store has them, in order, with everybody's."""
    model = tiny_deepseek_v3(tmp_path / "tiny")
    (wanted,) = greedy_reference(model, [PROMPT], LENGTH)
    serving = Serving(tmp_path, model, free_port())
    serving.start(
        "--dtype", "float64", "--tensor-parallel-size", "2", "--decode-context-parallel-size", "2", "--threads", "1"
    )
    try:
        serving.ready()
        worker, another = over_a_killed_rank(serving, wanted)
        last = [another, *children(another)]
        assert another != worker and len(last) == 2
    finally:
        assert serving.stop() == 0
    wait_gone(last)
    serving.nothing_left()
