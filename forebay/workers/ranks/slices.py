"""A rank's slice of a payload's granules: copied between the store's pool and the blocks of this rank.

    granule in the pool   [ layer | K/V | all heads | 16 tokens | dim ]
    block of this rank    [ layer | K/V | its heads | 16 tokens | dim ]

What lies where is the layout's business (`View`); one granule's copies are worked out once, as arrays with strides.
Verifying isn't: a checksum is of a whole granule, so one rank does it for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import xxhash
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from forebay.kernels.cache import gather_granules, scatter_granules
from forebay.kvstore.geometry import MATCH_UNIT
from forebay.kvstore.layout import Copy, View
from forebay.workers.copying import Bytes

Pieces = list[Bytes]
"""Arrays over the bytes of one granule or block that belong to this rank, in the order of its copies."""


class Slices:
    """One group's pool of one rank. Calls block for the time of the copy, most of it without the GIL.

    A pool that isn't in this process's memory is reached through a buffer there: `staged` (None: as its device wants).
    """

    def __init__(self, view: View, pool: Tensor, *, staged: bool | None = None) -> None:
        self.granule_bytes = view.group.granule_bytes
        self.writes = view.writes
        self._pool = pool
        self._read = view.copies(0, range(MATCH_UNIT))
        self._written = view.copies(0, range(MATCH_UNIT), writing=True)
        self._block_bytes = view.block_bytes
        assert pool[0].numel() * pool.element_size() == view.block_bytes, (tuple(pool.shape), view.block_bytes)
        self._stream: torch.cuda.Stream | None = None
        if pool.device.type != "cpu":
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._staged = pool.device.type != "cpu" if staged is None else staged
        if not self._staged:
            rows: Bytes = pool.view(len(pool), -1).view(torch.uint8).numpy()
            # Of each block, made once: not at every copy.
            self._into = [_in_block(row, self._read) for row in rows]
            self._out = [_in_block(row, self._written) for row in rows]

    def load(self, source: memoryview, blocks: Sequence[int]) -> None:
        """Copy this rank's slice of `source`, whole granules, into `blocks`."""
        granules = self._granules(source, blocks)
        if not self._staged:
            for granule, block in zip(granules, blocks, strict=True):
                _move(_in_granule(granule, self._read), self._into[block])
            return
        staged = np.empty((len(blocks), self._block_bytes), dtype=np.uint8)
        for granule, row in zip(granules, staged, strict=True):
            _move(_in_granule(granule, self._read), _in_block(row, self._read))
        with self._own_stream():
            scatter_granules(self._pool, blocks, torch.from_numpy(staged))

    def store(self, blocks: Sequence[int], room: memoryview) -> None:
        """Copy what this rank is the one to write of `blocks` into `room`."""
        granules = self._granules(room, blocks)
        if not self._staged:
            for granule, block in zip(granules, blocks, strict=True):
                _move(self._out[block], _in_granule(granule, self._written))
            return
        staged = torch.empty((len(blocks), self._block_bytes), dtype=torch.uint8)
        with self._own_stream():
            gather_granules(self._pool, blocks, staged)
        for granule, row in zip(granules, staged.numpy(), strict=True):
            _move(_in_block(row, self._written), _in_granule(granule, self._written))

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Beside what the model computes; ends when what is begun in it is done."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _granules(self, memory: memoryview, blocks: Sequence[int]) -> Bytes:
        granules = np.frombuffer(memory, dtype=np.uint8).reshape(-1, self.granule_bytes)
        assert len(granules) == len(blocks), (len(granules), len(blocks))
        return granules


def checksums(payload: memoryview, granule_bytes: int) -> bytes:
    """One xxh3_64 (u64 LE) a granule."""
    digest = xxhash.xxh3_64_intdigest
    return b"".join(
        digest(payload[at : at + granule_bytes]).to_bytes(8, "little") for at in range(0, len(payload), granule_bytes)
    )


def _in_granule(granule: Bytes, copies: Sequence[Copy]) -> Pieces:
    return [_piece(granule, copy.canonical, copy, [axis.canonical for axis in copy.axes]) for copy in copies]


def _in_block(block: Bytes, copies: Sequence[Copy]) -> Pieces:
    return [_piece(block, copy.local, copy, [axis.local for axis in copy.axes]) for copy in copies]


def _piece(row: Bytes, offset: int, copy: Copy, strides: Sequence[int]) -> Bytes:
    shape = (*(axis.times for axis in copy.axes), copy.length)
    last = offset + sum((axis.times - 1) * step for axis, step in zip(copy.axes, strides, strict=True)) + copy.length
    assert offset >= 0 and last <= len(row), (offset, last, len(row))
    return as_strided(row[offset:], shape, (*strides, 1))


def _move(sources: Pieces, targets: Pieces) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source
