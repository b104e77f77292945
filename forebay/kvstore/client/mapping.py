"""A client's side of the pool: mapped extents and the windows that leases and reservations open into them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.errors import CorruptChunk, StoreUnavailable
from forebay.kvstore.header import decode_header, slot_generation
from forebay.kvstore.protocol import ChunkRead, Slot


@dataclass
class PoolMap:
    """Extents that the store has handed over. Mapping one faults its pages in, off the hot path."""

    extent_bytes: int = 0
    views: dict[int, memoryview] = field(default_factory=dict)
    _maps: list[mmap.mmap] = field(default_factory=list)

    def add(self, extent: int, descriptor: int) -> None:
        """Map an extent and close its descriptor. May block while page tables are filled. Raises StoreUnavailable."""
        try:
            if extent in self.views:
                return
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(descriptor, self.extent_bytes, flags=flags)
        except OSError as error:
            raise StoreUnavailable(
                f"the store's pool can't be mapped ({error.strerror}): raise this process's memory limits"
            ) from error
        finally:
            os.close(descriptor)
        mapped.madvise(mmap.MADV_DONTDUMP)
        self._maps.append(mapped)
        self.views[extent] = memoryview(mapped)

    def payload(self, chunk: ChunkRead, length: int) -> memoryview:
        """The first `length` payload bytes of a pinned chunk."""
        return self._view(chunk.extent)[chunk.payload_offset : chunk.payload_offset + length]

    def checksums(self, chunk: ChunkRead) -> bytes:
        """One xxh3_64 (u64 LE) a granule of a pinned chunk, out of its header. Raises CorruptChunk."""
        header = decode_header(self._view(chunk.extent)[chunk.slot_offset : chunk.payload_offset])
        if (header.group, header.key, header.payload_length) != (chunk.group, chunk.key, chunk.length):
            raise CorruptChunk("the slot holds another chunk than the one that was promised")
        return header.checksums

    def room(self, slot: Slot, length: int) -> memoryview:
        """Where a reserved chunk's payload goes."""
        return self._view(slot.extent)[slot.payload_offset : slot.payload_offset + length]

    def intact(self, chunk: ChunkRead) -> bool:
        """Is the slot still of the generation that was promised? Ask after the copy."""
        return slot_generation(self._view(chunk.extent)[chunk.slot_offset : chunk.slot_offset + 64]) == chunk.generation

    def witness(self, chunk: ChunkRead) -> Callable[[], bool]:
        """`intact` as a question that can still be asked when this map has been closed: for who goes on reading."""
        head = self._view(chunk.extent)[chunk.slot_offset : chunk.slot_offset + 64]
        return lambda: slot_generation(head) == chunk.generation

    def _view(self, extent: int) -> memoryview:
        view = self.views.get(extent)
        if view is None:
            raise StoreUnavailable(f"extent {extent} isn't mapped (any more): its store has gone")
        return view

    def close(self) -> None:
        """Drop the mappings. One that somebody still looks into stays until that view is gone."""
        self.views.clear()
        self._maps.clear()
