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

import numpy as np
import torch
from torch import Tensor

from forebay.kernels.hot import Mirror

NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class HostChunk:
    """The front of a chunk in the store's pool, verified and pinned under `lease`, which `shares` of these are under
    (0: with the room that its request has).
    `payload` is its bytes; they stay mapped as long as somebody has this. `witness` says whether they are still that
    chunk's."""

    group: int
    start: int
    tokens: int
    payload: memoryview
    lease: int
    shares: int
    witness: Callable[[], bool]


@dataclass(slots=True, eq=False)
class _HostPage:
    address: int
    users: int
    chunk: HostChunk


@dataclass(slots=True)
class HostPages:
    """Host pages of one group. `granule_bytes` is the size of one; `most` caps how many there are at a time.

    `on_gone(pages)` is called when numbers stand for nothing any more."""

    granule_bytes: int
    most: int
    on_gone: Callable[[Sequence[int]], None]
    _pages: dict[int, _HostPage] = field(default_factory=dict)
    _by_address: dict[int, int] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _addresses: np.ndarray[tuple[int], np.dtype[np.int64]] = field(
        default_factory=lambda: np.full(256, NONE, dtype=np.int64)
    )
    _low: int = 0
    _high: int = 0
    _made: Mirror | None = None
    _span: tuple[int, int, Tensor] | None = None

    def __len__(self) -> int:
        """Pages in use."""
        return len(self._pages)

    def add(self, chunk: HostChunk, unit: int) -> int | None:
        """One more user of a chunk's granule `unit`; returns its page. None: there are `most` already."""
        address = _address(chunk.payload) + unit * self.granule_bytes
        assert (unit + 1) * self.granule_bytes <= chunk.payload.nbytes, (unit, chunk.payload.nbytes)
        known = self._by_address.get(address)
        if known is not None:
            page = self._pages[known]
            page.users += 1
            page.chunk = chunk  # the newest lease lasts longest
            return known
        if len(self._pages) >= self.most:
            return None
        number = self._free.pop() if self._free else len(self._pages)
        self._made = None
        if number >= len(self._addresses):
            self._addresses = np.concatenate((self._addresses, np.full_like(self._addresses, NONE)))
        self._pages[number] = _HostPage(address, 1, chunk)
        self._by_address[address] = number
        self._addresses[number] = address
        self._low = min(self._low or address, address)
        self._high = max(self._high, address + self.granule_bytes)
        return number

    def drop(self, pages: Iterable[int]) -> None:
        """One user less of each."""
        gone = []
        for number in pages:
            page = self._pages[number]
            page.users -= 1
            if page.users == 0:
                del self._pages[number], self._by_address[page.address]
                self._addresses[number] = NONE
                gone.append(number)
        if gone:
            self._made = None
            self._free += gone
            self.on_gone(gone)

    def changed(self, pages: Iterable[int]) -> set[int]:
        """Those whose bytes aren't that chunk's any more. Ask after the copy."""
        found = {number: self._pages.get(number) for number in pages}
        chunks = {id(page.chunk): page.chunk for page in found.values() if page is not None}
        broken = {name for name, chunk in chunks.items() if not chunk.witness()}
        if not broken and None not in found.values():
            return set()  # as it is after nearly every step
        return {number for number, page in found.items() if page is None or id(page.chunk) in broken}

    def mirror(self) -> Mirror:
        """Their memory and addresses as the resolver takes them. Valid until pages come or go."""
        if not self._pages:
            return Mirror(torch.zeros(0, dtype=torch.uint8), torch.full((1,), NONE, dtype=torch.int64))
        if self._made is None:
            first = np.where(self._addresses == NONE, NONE, self._addresses - self._low)
            self._made = Mirror(self._memory(), torch.from_numpy(first))
        return self._made

    def _memory(self) -> Tensor:
        """All bytes from the lowest address to the highest, most of which may not exist: nothing is read but what pages
        name."""
        if self._span is None or self._span[:2] != (self._low, self._high):
            room = (ctypes.c_uint8 * (self._high - self._low)).from_address(self._low)
            self._span = (self._low, self._high, torch.from_numpy(np.ctypeslib.as_array(room)))
        return self._span[2]


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
