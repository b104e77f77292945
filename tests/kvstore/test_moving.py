"""Chunks copied out of the pool on several threads: the bytes that were stored, or none of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from forebay.errors import CorruptChunk
from forebay.kvstore.client.moving import PIECE_BYTES, Mover
from forebay.kvstore.header import granule_checksums
from forebay.kvstore.protocol import ChunkRead


@dataclass
class Pool:
    """Chunks in this process's memory, with what a client says of them."""

    granule: int
    counts: list[int]
    gone: set[int] = field(default_factory=set)
    torn: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.data = [bytearray(random.Random(i).randbytes(self.granule * n)) for i, n in enumerate(self.counts)]
        self.sums = [granule_checksums(memoryview(data), self.granule) for data in self.data]
        self.chunks = [ChunkRead(0, i, 0, 0, 0, 0, len(data), 1, b"", "") for i, data in enumerate(self.data)]

    def payload(self, chunk: ChunkRead) -> memoryview:
        return memoryview(self.data[chunk.start])

    def checksums(self, chunk: ChunkRead) -> bytes:
        if chunk.start in self.torn:
            raise CorruptChunk("torn")
        return self.sums[chunk.start]

    def intact(self, chunk: ChunkRead) -> bool:
        return chunk.start not in self.gone

    def targets(self) -> list[memoryview]:
        return [memoryview(bytearray(len(data))) for data in self.data]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("granule", "counts"),
    [(64, [1, 4, 16]), (100_000, [16, 3, 1, 9]), (PIECE_BYTES + 17, [3, 2]), (3 * PIECE_BYTES, [1]), (1 << 20, [])],
)
def test_every_chunk_arrives_whole_whatever_the_threads_share(threads: int, granule: int, counts: list[int]) -> None:
    pool, mover = Pool(granule, counts), Mover(threads)
    targets = pool.targets()
    assert mover.load(pool, pool.chunks, targets) == [len(data) for data in pool.data]
    assert [bytes(target) for target in targets] == [bytes(data) for data in pool.data]
    mover.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_flipped_bit_ends_the_good_part_at_its_granule_and_spares_the_others(threads: int) -> None:
    pool, mover = Pool(200_000, [8, 8, 8]), Mover(threads)
    pool.data[1][3 * 200_000 + 7] ^= 4
    assert mover.load(pool, pool.chunks, pool.targets()) == [8 * 200_000, 3 * 200_000, 8 * 200_000]
    mover.close()


def test_a_slot_that_was_given_away_or_has_no_header_gives_nothing() -> None:
    pool, mover = Pool(4096, [2, 2, 2], gone={0}, torn={2}), Mover()
    assert mover.load(pool, pool.chunks, pool.targets()) == [0, 8192, 0]
    mover.close()


def test_a_target_that_is_too_small_is_a_mistake_of_the_caller() -> None:
    pool, mover = Pool(4096, [2]), Mover()
    with pytest.raises(AssertionError):
        mover.load(pool, pool.chunks, [memoryview(bytearray(4096))])
    mover.close()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_what_is_stored_arrives_with_the_checksums_of_what_arrived(threads: int) -> None:
    granules, counts = [64, 300_000, 4096], [4, 16, 1]
    sizes = list(zip(granules, counts, strict=True))
    sources = [memoryview(bytearray(random.Random(i).randbytes(g * n))) for i, (g, n) in enumerate(sizes)]
    rooms = [memoryview(bytearray(source.nbytes)) for source in sources]
    mover = Mover(threads)
    sums = mover.store(sources, rooms, granules)
    assert [bytes(room) for room in rooms] == [bytes(source) for source in sources]
    assert sums == [granule_checksums(room, granule) for room, granule in zip(rooms, granules, strict=True)]
    mover.close()
