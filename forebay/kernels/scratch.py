"""Memory for what is gathered out of the pool, kept from one gather to the next.

Memory that is fresh from the kernel costs a fault for every page: on CPUs several times the copy itself. What is given
is overwritten by the thread's next gather of that dtype, so it is used at once and never kept.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

KEPT_BYTES = 64 * 2**20
"""The most that is kept for a thread and dtype. Larger gathers get memory of their own."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.of_dtype: dict[torch.dtype, Tensor] = {}


_kept = _Kept()
_lock = threading.Lock()
_held = 0


def gather_rows(source: Tensor, rows: Tensor) -> Tensor:
    """`source[rows]` for `source` [n, width] and `rows` int64 [m]: valid until this thread gathers again."""
    width = source.shape[1]
    size = len(rows) * width
    if source.device.type != "cpu" or size * source.element_size() > KEPT_BYTES:
        return source.index_select(0, rows)
    out = room(size, source.dtype).view(-1, width)
    return torch.index_select(source, 0, rows, out=out)


def room(size: int, dtype: torch.dtype) -> Tensor:
    """`size` values on the host, whatever is in them: valid until this thread wants room of that dtype again, or
    gathers. More than is kept is memory of its own."""
    if size * dtype.itemsize > KEPT_BYTES:
        return torch.empty(size, dtype=dtype)
    return _kept_room(size, dtype)[:size]


def _kept_room(size: int, dtype: torch.dtype) -> Tensor:
    global _held  # noqa: PLW0603  (a figure of the process)
    found = _kept.of_dtype.get(dtype)
    if found is None or found.numel() < size:
        grown = min(2 * size, KEPT_BYTES // dtype.itemsize)
        with _lock:
            _held += (grown - (0 if found is None else found.numel())) * dtype.itemsize
        with torch.inference_mode(False):  # what is made in that mode can't be written outside of it
            found = _kept.of_dtype[dtype] = torch.empty(grown, dtype=dtype)
    return found


def held_bytes() -> int:
    """Kept at most: threads that have ended keep nothing any more, and are counted."""
    return _held
