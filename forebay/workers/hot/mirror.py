"""Pages of the store's pool that requests read rows from, in place: their numbers, their addresses, who uses them.

A host page is one granule of a chunk that is pinned under a lease. Its number is the worker's own, and stands for its
address: requests that share a chunk share its numbers, so what one has in its hot buffer stays right for it. A number
whose last user has gone may be given to another address; before that, `on_gone` makes every hot buffer forget it.

A slot can't be taken away while its lease holds. Should the store have gone meanwhile, its successor may write there:
so whoever has copied rows asks `witness` afterwards, and takes nothing of it if the slot is another one's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forebay.kernels.hot import Mirror
from forebay.workers.hot.telling import ChunkPlace

NONE = -1


class InPlace(Protocol):
    """A chunk in the store's pool that is read where it lies. `payload` is its bytes; they stay mapped as long as
    somebody has this. `witness` says whether they are still that chunk's."""

    @property
    def payload(self) -> memoryview: ...

    @property
    def witness(self) -> Callable[[], bool]: ...


@dataclass(frozen=True, slots=True, eq=False)
class HostChunk:
    """The front of a chunk in the store's pool, verified and pinned under `lease`, which `shares` of these are under
    (0: with the room that its request has). See `InPlace`; `place` is where other ranks find it, if there are any."""

    group: int
    start: int
    tokens: int
    payload: memoryview
    lease: int
    shares: int
    witness: Callable[[], bool]
    place: ChunkPlace | None = None


@dataclass(slots=True)
class Places:
    """Where each host page lies in this process's memory, by number. `granule_bytes` is the size of one."""

    granule_bytes: int
    _chunks: dict[int, InPlace] = field(default_factory=dict)
    _addresses: np.ndarray[tuple[int], np.dtype[np.int64]] = field(
        default_factory=lambda: np.full(256, NONE, dtype=np.int64)
    )
    _low: int = 0
    _high: int = 0
    _made: Mirror | None = None
    _span: tuple[int, int, Tensor] | None = None

    def __len__(self) -> int:
        """Pages that lie somewhere."""
        return len(self._chunks)

    def address(self, chunk: InPlace, unit: int) -> int:
        """Of a chunk's granule `unit`."""
        assert (unit + 1) * self.granule_bytes <= chunk.payload.nbytes, (unit, chunk.payload.nbytes)
        return _address(chunk.payload) + unit * self.granule_bytes

    def put(self, number: int, chunk: InPlace, unit: int) -> None:
        """A number stands for a chunk's granule `unit`."""
        address = self.address(chunk, unit)
        self.name(number)
        self._chunks[number], self._addresses[number] = chunk, address
        self._low = min(self._low or address, address)
        self._high = max(self._high, address + self.granule_bytes)
        self._made = None

    def name(self, number: int) -> None:
        """A number may come up from now on, though it lie nowhere: its rows are zeros then, and have `changed`."""
        while number >= len(self._addresses):
            self._addresses = np.concatenate((self._addresses, np.full_like(self._addresses, NONE)))
            self._made = None

    def renew(self, number: int, chunk: InPlace) -> None:
        """The same granule by another lease."""
        self._chunks[number] = chunk

    def remove(self, numbers: Iterable[int]) -> None:
        """These stand for nothing any more; some may not have before."""
        for number in numbers:
            if self._chunks.pop(number, None) is not None:
                self._addresses[number] = NONE
                self._made = None

    def changed(self, pages: Iterable[int]) -> set[int]:
        """Those whose bytes aren't that chunk's any more. Ask after the copy."""
        found = {number: self._chunks.get(number) for number in pages}
        chunks = {id(chunk): chunk for chunk in found.values() if chunk is not None}
        broken = {name for name, chunk in chunks.items() if not chunk.witness()}
        if not broken and None not in found.values():
            return set()  # as it is after nearly every step
        return {number for number, chunk in found.items() if chunk is None or id(chunk) in broken}

    def mirror(self) -> Mirror:
        """Their memory and addresses as the resolver takes them. Valid until pages come or go."""
        if self._made is None:
            first = np.where(self._addresses == NONE, NONE, self._addresses - self._low)
            nothing = torch.zeros(self.granule_bytes, dtype=torch.uint8)
            self._made = Mirror(self._memory() if self._chunks else nothing, torch.from_numpy(first))
        return self._made

    def _memory(self) -> Tensor:
        """All bytes from the lowest address to the highest, most of which may not exist: nothing is read but what pages
        name."""
        if self._span is None or self._span[:2] != (self._low, self._high):
            room = (ctypes.c_uint8 * (self._high - self._low)).from_address(self._low)
            self._span = (self._low, self._high, torch.from_numpy(np.ctypeslib.as_array(room)))
        return self._span[2]


@dataclass(slots=True, eq=False)
class _HostPage:
    address: int
    users: int


class HostPages:
    """Host pages of one group, and who uses them. `most` caps how many there are at a time.

    `on_gone(pages)` is called when numbers stand for nothing any more, `on_new` when one stands for a chunk's granule.
    """

    def __init__(
        self, granule_bytes: int, most: int, on_gone: Callable[[Sequence[int]], None],
        on_new: Callable[[int, HostChunk, int], None] | None = None,
    ) -> None:  # fmt: skip
        self.most, self._on_gone, self._on_new = most, on_gone, on_new
        self.places = Places(granule_bytes)
        self._pages: dict[int, _HostPage] = {}
        self._by_address: dict[int, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Pages in use."""
        return len(self._pages)

    def add(self, chunk: HostChunk, unit: int) -> int | None:
        """One more user of a chunk's granule `unit`; returns its page. None: there are `most` already."""
        address = self.places.address(chunk, unit)
        known = self._by_address.get(address)
        if known is not None:
            self._pages[known].users += 1
            self.places.renew(known, chunk)  # the newest lease lasts longest
            return known
        if len(self._pages) >= self.most:
            return None
        number = self._free.pop() if self._free else len(self._pages)
        self._pages[number] = _HostPage(address, 1)
        self._by_address[address] = number
        self.places.put(number, chunk, unit)
        if self._on_new is not None:
            self._on_new(number, chunk, unit)
        return number

    def drop(self, pages: Iterable[int]) -> None:
        """One user less of each."""
        gone = []
        for number in pages:
            page = self._pages[number]
            page.users -= 1
            if page.users == 0:
                del self._pages[number], self._by_address[page.address]
                gone.append(number)
        if gone:
            self.places.remove(gone)
            self._free += gone
            self._on_gone(gone)

    def changed(self, pages: Iterable[int]) -> set[int]:
        """See `Places`."""
        return self.places.changed(pages)

    def mirror(self) -> Mirror:
        """See `Places`."""
        return self.places.mirror()


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
