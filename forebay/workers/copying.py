"""Copies granules between the device's block pools and payloads in the store's mapped pool, and verifies them.

On the CPU a block is one contiguous row, copied by row assignment: measured at the speed of memcpy, where a
batched index copy reaches a tenth of it, and the row is still in the cache when it is hashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from forebay.kernels.cache import gather_granules, scatter_granules

Bytes = NDArray[np.uint8]


class Copier(Protocol):
    """One group's pool, seen as rows of bytes. Calls block for the time of the copy, without the GIL."""

    granule_bytes: int

    def load(self, source: memoryview, checksums: bytes, blocks: Sequence[int]) -> int:
        """Copy `source`, whole granules, into `blocks` and compare; returns how many are good before the
        first bad one. What lies in the blocks after that is garbage."""
        ...

    def store(self, blocks: Sequence[int], room: memoryview) -> bytes:
        """Copy `blocks` into `room`; returns one xxh3_64 (u64 LE) a granule."""
        ...


def copier(pool: Tensor) -> Copier:
    """The copier for a pool [num_blocks, ...] of one group."""
    return HostCopier(pool) if pool.device.type == "cpu" else DeviceCopier(pool)


class HostCopier:
    """A pool in this process's memory."""

    def __init__(self, pool: Tensor) -> None:
        assert pool.is_contiguous()
        rows: Bytes = _rows(pool).numpy()
        self.granule_bytes = rows.shape[1]
        self._rows = list(rows)  # a view for each block: made once, not at every copy

    def load(self, source: memoryview, checksums: bytes, blocks: Sequence[int]) -> int:
        """See `Copier`. The hash is of what arrived in the block, not of what was read."""
        rows, digest = self._rows, xxhash.xxh3_64_intdigest
        granules = _granules(source, self.granule_bytes)
        expected = _checksums(checksums)
        assert len(granules) == len(blocks) == len(expected)
        for index, block in enumerate(blocks):
            row = rows[block]
            row[:] = granules[index]
            if digest(row) != expected[index]:
                return index
        return len(blocks)

    def store(self, blocks: Sequence[int], room: memoryview) -> bytes:
        """See `Copier`."""
        rows, digest = self._rows, xxhash.xxh3_64_intdigest
        granules = _granules(room, self.granule_bytes)
        assert len(granules) == len(blocks)
        sums = []
        for index, block in enumerate(blocks):
            granules[index] = rows[block]
            sums.append(digest(granules[index]).to_bytes(8, "little"))
        return b"".join(sums)


class DeviceCopier:
    """A pool in an accelerator's memory: through a buffer of this process, on a stream of its own."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self.granule_bytes = _rows(pool).shape[1]
        self._stream: torch.cuda.Stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def load(self, source: memoryview, checksums: bytes, blocks: Sequence[int]) -> int:
        """See `Copier`. The bytes are verified in host memory, then copied from that same buffer."""
        staged = torch.frombuffer(bytearray(source), dtype=torch.uint8).view(len(blocks), self.granule_bytes)
        good = _good(staged.numpy(), checksums)
        if good:
            with torch.cuda.stream(self._stream):
                scatter_granules(self._pool, blocks[:good], staged[:good])
            self._stream.synchronize()
        return good

    def store(self, blocks: Sequence[int], room: memoryview) -> bytes:
        """See `Copier`. The engine has synchronised after the step that filled these blocks."""
        granules = _granules(room, self.granule_bytes)
        with torch.cuda.stream(self._stream):
            gather_granules(self._pool, blocks, torch.from_numpy(granules))
        self._stream.synchronize()
        return b"".join(xxhash.xxh3_64_intdigest(row).to_bytes(8, "little") for row in granules)


def _rows(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1).view(torch.uint8)


def _granules(data: memoryview, granule_bytes: int) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, granule_bytes)


def _checksums(packed: bytes) -> list[int]:
    expected: list[int] = np.frombuffer(packed, dtype="<u8").tolist()
    return expected


def _good(granules: Bytes, checksums: bytes) -> int:
    for index, (row, expected) in enumerate(zip(granules, _checksums(checksums), strict=True)):
        if xxhash.xxh3_64_intdigest(row) != expected:
            return index
    return len(granules)
