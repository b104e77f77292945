"""Slots of a pool that notice who writes where and when he mustn't."""

from __future__ import annotations

from collections import deque

from forebay.testing.conformance import Made, Pool

PAGE = 4096
FILL = 0xEE


class Slots:
    """Equal slots, each between two pages that nobody may write to; a freed one is used again as late as possible.

    A slot is filled when it is freed and looked at when it is used again: a tier that writes after it has said that a
    job is finished, or whose process was said to be dead, shows in `wrong`.
    """

    def __init__(self, count: int, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self.pool = Pool(count * (self.size + PAGE) + PAGE)
        self._free = deque(PAGE + number * (self.size + PAGE) for number in range(count))
        self.pool.memory[:] = bytes([FILL]) * len(self.pool.memory)
        self.wrong: list[str] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The offset of the slot that has been free for the longest time."""
        at = self._free.popleft()
        self._must_be_filled(at - PAGE, at + self.size + PAGE, "a slot that nobody has was written to")
        return at

    def put(self, chunk: Made) -> int:
        """A slot that holds this chunk."""
        at = self.take()
        self.pool.memory[at : at + chunk.length] = chunk.block + chunk.payload
        return at

    def give_back(self, at: int, used: int) -> None:
        """Check what lies around the first `used` bytes, and free the slot."""
        self._must_be_filled(at - PAGE, at, "bytes before a slot were written")
        self._must_be_filled(at + used, at + self.size + PAGE, "bytes behind a slot were written")
        self.pool.memory[at : at + used] = bytes([FILL]) * used
        self._free.append(at)

    def _must_be_filled(self, start: int, end: int, what: str) -> None:
        piece = bytes(self.pool.memory[start:end])
        if piece.count(FILL) != len(piece):
            self.wrong.append(f"{what}: [{start}, {end})")
            self.pool.memory[start:end] = bytes([FILL]) * len(piece)
