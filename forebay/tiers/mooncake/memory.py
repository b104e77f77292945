"""Memory of this tier's own that the library may write at any time: where chunks arrive."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable

from forebay.kvstore.layout import ALIGNMENT, round_up
from forebay.tiers.mooncake.remote import Span, span_of

Register = Callable[[memoryview], bool]


class Area:
    """A registered piece of memory, used by one thread at a time."""

    def __init__(self, size: int, register: Register) -> None:
        """Raises MemoryError, OSError."""
        self._map = mmap.mmap(-1, round_up(size, ALIGNMENT))
        self.memory = memoryview(self._map)
        self.address = span_of(self.memory).address
        if not register(self.memory):
            raise OSError(f"{len(self.memory)} bytes can't be registered for transfers")

    def __len__(self) -> int:
        return len(self.memory)

    def span(self, at: int, length: int) -> Span:
        """A piece of it."""
        assert at + length <= len(self.memory)
        return Span(self.address + at, length)

    def close(self) -> None:
        """Give it back. No transfer may be under way any more."""
        # Where a traceback that somebody keeps still has a piece of it, it goes with the process.
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()


class Areas:
    """An area for each thread, by number, as large as it has ever needed.

    None is given back before `close`: a transfer that was given up may still write into it.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._by_number: dict[int, Area] = {}
        self._outgrown: list[Area] = []

    @property
    def bytes(self) -> int:
        """All that is held."""
        return sum(map(len, self._by_number.values())) + sum(map(len, self._outgrown))

    def of(self, number: int, size: int) -> Area:
        """The area of this thread, at least `size` bytes; valid until its next call."""
        with self._lock:
            area = self._by_number.get(number)
            if area is None or len(area) < size:
                if area is not None:
                    self._outgrown.append(area)
                area = self._by_number[number] = Area(size, self._register)
            return area

    def close(self) -> None:
        """Give everything back, once the library is closed."""
        for area in (*self._by_number.values(), *self._outgrown):
            area.close()
        self._by_number.clear()
        self._outgrown.clear()
