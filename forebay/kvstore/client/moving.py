"""Copying chunks out of the pool and into it, every granule hashed, on several threads.

    granules of all chunks   [ g g g g g g | g g g g g g ]     thread 0 copies the front half, thread 1 the rest
    one granule              copied in pieces that are still in the cache when they are hashed

One thread doesn't reach what the memory can give: two copy half as much again. Neither the copy nor the hash of a piece
holds the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import xxhash

from forebay.errors import CorruptChunk
from forebay.kvstore.protocol import ChunkRead

PIECE_BYTES = 512 << 10
ALONE_BYTES = 1 << 20
"""Less than this isn't worth a second thread."""


class PoolReader(Protocol):
    """What both clients have."""

    def payload(self, chunk: ChunkRead) -> memoryview:
        """A pinned chunk's payload in the mapped pool."""

    def checksums(self, chunk: ChunkRead) -> bytes:
        """One xxh3_64 (u64 LE) a granule. Raises CorruptChunk."""

    def intact(self, chunk: ChunkRead) -> bool:
        """Is the slot still of the promised generation?"""


@dataclass(slots=True)
class _Granule:
    """One granule to copy, by address; `checksum` is that of what `arrived`, once it has."""

    source: int
    target: int
    length: int
    arrived: memoryview
    checksum: int = 0


class Mover:
    """Loads and stores with a number of threads; the caller's is one of them. Use it from one thread at a time."""

    def __init__(self, threads: int = 2) -> None:
        assert threads > 0
        self._threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "mover") if threads > 1 else None

    def load(
        self, reader: PoolReader, chunks: Sequence[ChunkRead], targets: Sequence[memoryview]
    ) -> list[int]:
        """Copy each chunk's payload into its target (writable, at least as long); blocks for the time of the copy.

        Returns how many bytes of each are good: whole granules before the first bad one, 0 for a chunk whose slot was
        given away meanwhile. What lies in a target after that is garbage. Report what is bad (`damaged`).
        """
        sums = [_checksums(reader, chunk) for chunk in chunks]
        work = [
            _granules(reader.payload(chunk), target, chunk.length // max(len(expected), 1)) if expected else []
            for chunk, target, expected in zip(chunks, targets, sums, strict=True)
        ]
        self._run([granule for some in work for granule in some])
        # Asked after the copy: a slot that was given away meanwhile has another generation, whatever its checksums say.
        return [
            _good(some, expected) if reader.intact(chunk) else 0
            for chunk, some, expected in zip(chunks, work, sums, strict=True)
        ]

    def store(
        self, sources: Sequence[memoryview], rooms: Sequence[memoryview], granule_bytes: Sequence[int]
    ) -> list[bytes]:
        """Copy each of `sources` (writable buffers, whole granules) into its room; blocks for the time of the copy.

        Returns the checksums of each, as `commit` takes them: one xxh3_64 (u64 LE) a granule of what arrived.
        """
        work = [_granules(*each) for each in zip(sources, rooms, granule_bytes, strict=True)]
        self._run([granule for some in work for granule in some])
        return [b"".join(granule.checksum.to_bytes(8, "little") for granule in some) for some in work]

    def _run(self, granules: Sequence[_Granule]) -> None:
        share = -(-len(granules) // self._threads)
        if self._others is None or sum(granule.length for granule in granules) < ALONE_BYTES:
            _copy(granules)
        else:
            rest = [granules[at : at + share] for at in range(share, len(granules), share)]
            others = [self._others.submit(_copy, some) for some in rest]
            _copy(granules[:share])
            for other in others:
                other.result()

    def close(self) -> None:
        """End the threads."""
        if self._others is not None:
            self._others.shutdown()


def _checksums(reader: PoolReader, chunk: ChunkRead) -> list[int]:
    """Those of a pinned chunk's granules; none if its header isn't right."""
    try:
        packed = reader.checksums(chunk)
    except CorruptChunk:
        return []
    return [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), 8)]


def _granules(source: memoryview, target: memoryview, length: int) -> list[_Granule]:
    size = source.nbytes
    assert size <= target.nbytes and size % length == 0, (size, target.nbytes, length)
    begin, end = _address(source), _address(target)
    return [_Granule(begin + at, end + at, length, target[at : at + length]) for at in range(0, size, length)]


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _copy(granules: Sequence[_Granule]) -> None:
    for granule in granules:
        digest = xxhash.xxh3_64()
        for at in range(0, granule.length, PIECE_BYTES):
            length = min(PIECE_BYTES, granule.length - at)
            ctypes.memmove(granule.target + at, granule.source + at, length)
            digest.update(granule.arrived[at : at + length])
        granule.checksum = digest.intdigest()


def _good(granules: Sequence[_Granule], expected: Sequence[int]) -> int:
    good = 0
    for granule, checksum in zip(granules, expected, strict=True):
        if granule.checksum != checksum:
            break
        good += granule.length
    return good
