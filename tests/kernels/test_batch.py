"""A batch says which rows belong together, and keeps what was worked out for it."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels.batch import NO_BLOCK, SequenceSpan, pack_batch


def test_packing_lays_sequences_one_after_the_other() -> None:
    batch = pack_batch([([7, 8, 9], 14), ([5], 3)], {"g": [[2, 0], [4]]})
    batch.check()
    assert batch.spans == (SequenceSpan(0, 3, 14), SequenceSpan(3, 1, 3))
    assert batch.token_ids.tolist() == [7, 8, 9, 5]
    assert batch.positions.tolist() == [14, 15, 16, 3]
    assert batch.groups["g"].slots.tolist() == [2 * 16 + 14, 2 * 16 + 15, 0, 4 * 16 + 3]
    assert batch.groups["g"].block_tables.tolist() == [[2, 0], [4, NO_BLOCK]]
    assert batch.logits_rows.tolist() == [2, 3]


def test_a_token_needs_a_block_to_go_to() -> None:
    with pytest.raises(AssertionError):
        pack_batch([([1], 16)], {"g": [[3, NO_BLOCK]]})


def test_what_is_worked_out_once_is_kept() -> None:
    batch = pack_batch([([1], 0)], {"g": [[0]]})
    made = [batch.once("key", lambda: torch.ones(1)) for _ in range(2)]
    assert made[0] is made[1]
    assert batch.once("other", lambda: 5) == 5
