"""transformers chooses the best of many scores by `topk`, which takes any of equal ones; we take the first.

Sparse attention's scores are often exactly equal: zero. So a reference that is to choose alike is run with this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


def stable_topk(
    x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> torch.return_types.topk:
    """As torch's, and of equal values the first ones."""
    values, indices = x.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


@contextmanager
def first_of_equals() -> Iterator[None]:
    """Methods `topk` of tensors are `stable_topk` in here."""
    with mock.patch.object(torch.Tensor, "topk", stable_topk):
        yield
