"""What the rank that schedules tells the others of hot buffers: with every step that needs them, what has changed since
the last one, and where the pages of its requests are.

    regions that were opened     blocks have the same numbers on every rank
    host pages that ended        forgotten before anything else: a number may stand for another page in the same step
    host pages that began        by their place in the store's pool, which every rank has mapped somewhere else

Which rows are where follows from that and from what is chosen, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec


class HotShape(msgspec.Struct, frozen=True):
    """What hot buffers are for a model: the cache `group` whose rows are chosen, and see `Buffers`."""

    group: str
    regions: int
    rows: int
    sharers: dict[int, tuple[int, ...]]
    granule_bytes: int


class ChunkPlace(msgspec.Struct, frozen=True, array_like=True):
    """A chunk in the pool of the store of this `boot`: offsets in its extent, and the generation of its slot."""

    boot: bytes
    extent: int
    slot_offset: int
    payload_offset: int
    generation: int


class Arrived(msgspec.Struct, frozen=True, array_like=True):
    """Host pages, each with its granule in the chunk at `place`."""

    place: ChunkPlace
    pages: list[tuple[int, int]]


class HotStep(msgspec.Struct, frozen=True):
    """One step. Of each of its sequences the region (-1: none), and where its pages are: `resident` and `host` i32 LE,
    a row for each sequence, -1 for none."""

    regions: list[int]
    resident: bytes
    host: bytes
    opened: dict[int, list[int]]
    gone: list[int]
    arrived: list[Arrived]


class HotDone(msgspec.Struct, tag=True, frozen=True):
    """A rank is through with a step: sequences, by their place in it, of which it has read what wasn't theirs any more;
    others of which it has read what was nowhere; rows that it has copied; see `StepResolver.decisions`."""

    void: list[int]
    cold: list[int]
    misses: int
    decisions: int


@dataclass
class Changes:
    """What others haven't heard of yet. No longer than there are regions and numbers of host pages."""

    opened: dict[int, list[int]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    arrived: dict[int, tuple[int, ChunkPlace]] = field(default_factory=dict)

    def open(self, region: int, blocks: Sequence[int]) -> None:
        """A region is another request's."""
        self.opened[region] = list(blocks)

    def end(self, pages: Iterable[int]) -> None:
        """Numbers of host pages stand for nothing any more."""
        for page in pages:
            self.gone.add(page)
            self.arrived.pop(page, None)

    def arrive(self, page: int, unit: int, place: ChunkPlace) -> None:
        """A number stands for a granule of the chunk at `place`."""
        self.arrived[page] = unit, place

    def take(self) -> tuple[dict[int, list[int]], list[int], list[Arrived]]:
        """All of it: from now on they have heard of it."""
        opened, gone, arrived = self.opened, sorted(self.gone), self.arrived
        self.opened, self.gone, self.arrived = {}, set(), {}
        by_chunk: dict[ChunkPlace, list[tuple[int, int]]] = {}
        for page, (unit, place) in arrived.items():
            by_chunk.setdefault(place, []).append((page, unit))
        return opened, gone, [Arrived(place, pages) for place, pages in by_chunk.items()]
