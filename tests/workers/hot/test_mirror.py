"""Host pages: one number an address, told before it stands for another; rows are read where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from forebay.kernels.hot import RowSizes, fetch_rows
from forebay.workers.hot.mirror import HostChunk, HostPages

LAYERS, ROW = 2, 24
GRANULE = LAYERS * 16 * ROW


@dataclass
class Room:
    """Chunks somewhere in memory, and what was told of them."""

    told: list[int] = field(default_factory=list)
    intact: bool = True

    def chunk(self, fill: int, units: int = 2) -> HostChunk:
        payload = bytearray((fill + i) % 251 for i in range(units * GRANULE))
        return HostChunk(0, 0, 16 * units, memoryview(payload), lease=fill, shares=1, witness=lambda: self.intact)

    def pages(self, most: int = 8) -> HostPages:
        return HostPages(GRANULE, most, self.told.extend)


def test_a_row_is_read_where_it_lies() -> None:
    room = Room()
    pages = room.pages()
    chunks = [room.chunk(fill) for fill in (3, 90, 200)]
    numbers = [pages.add(chunk, unit) for chunk in chunks for unit in (0, 1)]
    assert numbers == list(range(6))
    sizes = RowSizes(LAYERS, ROW)
    found = fetch_rows(pages.mirror(), sizes, torch.tensor([5 * 16 + 7, 0]), 1).view(torch.uint8)
    begin = GRANULE + (16 + 7) * ROW
    assert bytes(found[0].tolist()) == bytes(chunks[2].payload[begin : begin + ROW])
    assert bytes(found[1].tolist()) == bytes(chunks[0].payload[16 * ROW : 17 * ROW])


def test_those_who_share_a_chunk_share_its_pages() -> None:
    room = Room()
    pages, chunk = room.pages(), room.chunk(1)
    assert pages.add(chunk, 1) == pages.add(chunk, 1) == 0
    pages.drop([0])
    assert len(pages) == 1 and room.told == []
    pages.drop([0])
    assert len(pages) == 0 and room.told == [0]


def test_a_number_is_told_before_it_stands_for_another_address() -> None:
    room = Room()
    pages = room.pages()
    first = pages.add(room.chunk(1), 0)
    assert first is not None
    pages.drop([first])
    assert room.told == [first]
    other = room.chunk(2)
    assert pages.add(other, 0) == first
    found = fetch_rows(pages.mirror(), RowSizes(LAYERS, ROW), torch.tensor([first * 16]), 0)
    assert bytes(found.view(torch.uint8)[0].tolist()) == bytes(other.payload[:ROW])


def test_there_are_no_more_than_the_cap() -> None:
    room = Room()
    pages = room.pages(most=3)
    chunks = [room.chunk(fill) for fill in (1, 2)]
    assert [pages.add(chunk, unit) for chunk in chunks for unit in (0, 1)] == [0, 1, 2, None]
    assert len(pages) == pages.most == 3
    pages.drop([1])
    assert pages.add(chunks[1], 1) == 1


def test_what_isn_t_that_chunk_s_any_more_is_told_after_the_copy() -> None:
    room = Room()
    pages = room.pages()
    pages.add(room.chunk(1), 0)
    assert pages.changed([0]) == set()
    room.intact = False
    assert pages.changed([0]) == {0}
