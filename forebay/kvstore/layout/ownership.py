"""Which tokens, heads and layers are whose.

Under decode context parallelism of size D with interleave I, tokens go round the ranks I at a time:

    token    0 ... I-1 | I ... 2I-1 | ... | DI ... DI+I-1 | ...
    rank         0     |     1      | ... |       0       |
    there    0 ... I-1 | 0 ...  I-1 | ... |  I ... 2I-1   |
"""

from __future__ import annotations

from dataclasses import dataclass


def owner(token: int, size: int, interleave: int) -> int:
    """The rank, of `size`, that holds a token."""
    return token // interleave % size


def local_index(token: int, size: int, interleave: int) -> int:
    """Which of its owner's tokens it is."""
    return token // (size * interleave) * interleave + token % interleave


def local_length(tokens: int, rank: int, size: int, interleave: int) -> int:
    """How many of a sequence's first `tokens` tokens a rank holds."""
    whole, rest = divmod(tokens, size * interleave)
    return whole * interleave + min(max(rest - rank * interleave, 0), interleave)


def even_stages(layers: int, size: int) -> tuple[int, ...]:
    """Layers of each of `size` pipeline stages, as even as it goes, the first ones having one more."""
    assert 0 < size <= layers, (layers, size)
    return tuple(layers // size + (rank < layers % size) for rank in range(size))


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Heads [first, first + count) of a tensor. `replica` says which of those that hold them this rank is."""

    first: int
    count: int
    replica: int


def split_heads(heads: int, rank: int, size: int) -> HeadPart:
    """A tensor parallel rank's heads: an equal part, or one head that `size // heads` neighbours share."""
    if heads % size == 0:
        count = heads // size
        return HeadPart(rank * count, count, 0)
    assert size % heads == 0, (heads, size)
    replicas = size // heads
    return HeadPart(rank // replicas, 1, rank % replicas)
