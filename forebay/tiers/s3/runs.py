"""Several chunks of one segment, read with one request: chunks that are loaded together were stored together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from forebay.errors import CorruptChunk
from forebay.tiers.s3.bucket import GivenUp
from forebay.tiers.s3.slot import LoadSlot

RUN_BYTES = 8 << 20
GAP_BYTES = 64 << 10
"""What may be read in vain between two chunks: less than a request of its own would cost."""


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk's place in its segment, and the slot that it goes to."""

    slot: LoadSlot
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def runs_of(parts: Sequence[Part]) -> list[list[Part]]:
    """These parts in runs that are worth one request each. Two loads of one chunk are in different runs."""
    runs: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: part.offset):
        run = runs[-1] if runs else []
        if run and run[-1].end <= part.offset <= run[-1].end + GAP_BYTES and part.end - run[0].offset <= RUN_BYTES:
            run.append(part)
        else:
            runs.append([part])
    return runs


class RunSink:
    """Deals the bytes of a run out to its parts' slots (see `bucket.Sink`). A part that can't be a chunk, or that
    nobody waits for any more, doesn't stop the others; what was wrong with it is in `wrong`."""

    def __init__(self, run: Sequence[Part]) -> None:
        self._run = run
        self._at = 0
        self.wrong: dict[int, Exception] = {}

    @property
    def length(self) -> int:
        """How many bytes to ask for, from the first part's offset on."""
        return self._run[-1].end - self._run[0].offset

    def begin(self, length: int, modified: float) -> None:
        """See `bucket.Sink`. Raises CorruptChunk if the segment is shorter than it was."""
        if length != self.length:
            raise CorruptChunk(f"{length} bytes of a segment, {self.length} were stored there")
        self._at = self._run[0].offset
        self.wrong.clear()
        for number, part in enumerate(self._run):
            self._try(number, partial(part.slot.begin, part.length, modified))

    def take(self, data: bytes) -> None:
        """See `bucket.Sink`."""
        begin, end = self._at, self._at + len(data)
        for number, part in enumerate(self._run):
            low, high = max(begin, part.offset), min(end, part.end)
            if low < high and number not in self.wrong:
                self._try(number, partial(part.slot.take, data[low - begin : high - begin]))
        self._at = end
        if len(self.wrong) == len(self._run):
            raise GivenUp

    def _try(self, number: int, what: Callable[[], None]) -> None:
        try:
            what()
        except (CorruptChunk, GivenUp) as error:
            self.wrong[number] = error
