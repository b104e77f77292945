"""Where each page of one request is. Pure.

    DIRTY ----copied and held in host memory----> CLEAN ----released----> LENT ----its block is reused----> ABSENT
      ^                                             |
      `---- forgotten (a store that went away) -----'

    DIRTY     only the device has it
    CLEAN     host memory has it too, under a lease; the request still holds the block
    LENT      the request holds nothing; the block can be read until somebody needs it
    ABSENT    host memory alone has it, if `host` says so; else only a tier

A request is *full* while it holds all of its pages, *mixed* while it holds some, and has *none* else. Its last pages
(`TAIL`) are never released: their rows are what is written, and read at once. What is released goes from the end, so
that the beginning of a prompt, which others may share, stays longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

TAIL = 2
"""Pages at a request's end that stay."""

NONE = -1

Residency = Literal["full", "mixed", "none"]
Ints = NDArray[np.int64]


class Page(IntEnum):
    """See above."""

    DIRTY = 0
    CLEAN = 1
    LENT = 2
    ABSENT = 3


class Pages:
    """The pages of one request, by number. `resident[p]` is the block that can be read, `host[p]` the host page; -1 for
    none. Both are views of what will change."""

    def __init__(self) -> None:
        self._count = 0
        self._state = np.zeros(64, dtype=np.uint8)
        self._resident = np.full(64, NONE, dtype=np.int64)
        self._host = np.full(64, NONE, dtype=np.int64)
        self._clean: set[int] = set()

    def __len__(self) -> int:
        return self._count

    @property
    def resident(self) -> Ints:
        return self._resident[: self._count]

    @property
    def host(self) -> Ints:
        return self._host[: self._count]

    def state(self, page: int) -> Page:
        """Of one page."""
        assert 0 <= page < self._count, (page, self._count)
        return Page(int(self._state[page]))

    @property
    def residency(self) -> Residency:
        """Of the request."""
        held = int(np.count_nonzero(self._state[: self._count] <= Page.CLEAN))
        return "full" if held == self._count else "mixed" if held else "none"

    @property
    def held(self) -> int:
        """Pages whose blocks the request holds."""
        return int(np.count_nonzero(self._state[: self._count] <= Page.CLEAN))

    @property
    def hosted(self) -> int:
        """Pages that have a place in host memory."""
        return int(np.count_nonzero(self.host >= 0))

    @property
    def readable(self) -> bool:
        """Has every page a place on the device or in host memory?"""
        return bool(((self.resident >= 0) | (self.host >= 0)).all())

    # --- pages come --------------------------------------------------------------------------------------

    def append(self, block: int) -> None:
        """One more page, in a block that the request holds."""
        assert block >= 0, block
        self._add(Page.DIRTY, block)

    def append_absent(self) -> None:
        """One more page that isn't on the device: `arrive` says where in host memory it is."""
        self._add(Page.ABSENT, NONE)

    def _add(self, state: Page, block: int) -> None:
        if self._count == len(self._state):
            self._state = np.concatenate((self._state, np.zeros_like(self._state)))
            self._resident = np.concatenate((self._resident, np.full_like(self._resident, NONE)))
            self._host = np.concatenate((self._host, np.full_like(self._host, NONE)))
        self._state[self._count], self._resident[self._count] = state, block
        self._host[self._count] = NONE
        self._count += 1

    # --- host memory -------------------------------------------------------------------------------------

    def arrive(self, page: int, host: int) -> None:
        """Host memory has this page, as host page `host`, for as long as this request wants."""
        assert host >= 0 and self._host[page] == NONE, (page, host)
        self._host[page] = host
        if self.state(page) is Page.DIRTY:
            self._state[page] = Page.CLEAN
            self._clean.add(page)

    def leave(self, page: int) -> int:
        """A page that only host memory has isn't read there any more; returns its host page."""
        assert self.state(page) is Page.ABSENT and self._host[page] >= 0, (page, self.state(page))
        host = int(self._host[page])
        self._host[page] = NONE
        return host

    def forget_host(self) -> list[int]:
        """Host memory has nothing any more: what was clean is dirty. Returns pages that nobody has now."""
        state = self._state[: self._count]
        self.host[:] = NONE
        state[state == Page.CLEAN] = Page.DIRTY
        self._clean.clear()
        lost = np.flatnonzero(state == Page.ABSENT).tolist()
        return [int(page) for page in lost]

    # --- release -----------------------------------------------------------------------------------------

    def releasable(self) -> Iterator[int]:
        """Clean pages before the tail, from the end."""
        return iter(sorted((page for page in self._clean if page < self._count - TAIL), reverse=True))

    def release(self, page: int, *, findable: bool) -> int:
        """The request lets go of a clean page; returns its block. One that can't be found again is gone at once."""
        assert self.state(page) is Page.CLEAN and page < self._count - TAIL, (page, self.state(page))
        block = int(self._resident[page])
        self._clean.remove(page)
        self._state[page] = Page.LENT if findable else Page.ABSENT
        if not findable:
            self._resident[page] = NONE
        return block

    def reused(self, page: int) -> None:
        """Somebody else needs the block of a lent page."""
        assert self.state(page) is Page.LENT, (page, self.state(page))
        self._state[page], self._resident[page] = Page.ABSENT, NONE

    def check(self) -> None:
        """Assert what always holds. For tests."""
        for page in range(self._count):
            state, block, host = self.state(page), int(self._resident[page]), int(self._host[page])
            assert (block >= 0) == (state is not Page.ABSENT), (page, state, block)
            assert host >= 0 or state in (Page.DIRTY, Page.ABSENT), (page, state)
            assert host == NONE or state is not Page.DIRTY, (page, state)
            assert state is not Page.LENT or page < self._count - TAIL, (page, state)
        clean = [page for page in range(self._count) if self.state(page) is Page.CLEAN]
        assert self._clean == set(clean), (self._clean, clean)


def joined(rows: Sequence[Ints]) -> Ints:
    """Rows of different lengths as one table, -1 behind each end."""
    table = np.full((len(rows), max((len(row) for row in rows), default=0)), NONE, dtype=np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table
