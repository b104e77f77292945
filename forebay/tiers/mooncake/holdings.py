"""What this process has stored in the pool and believes is still there: its account, in the order of use.

    storing -> held -> leaving -> gone

The pool evicts without telling, and a master forgets everything when it restarts, so this is a belief; a sweep corrects
it. What other hosts have stored is theirs to account for; of them only what is leaving is noted here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.tiers.base import ChunkId

CHUNKS_MAX = 1 << 18
LEAVING_MAX = 1 << 16
"""Removals of other hosts' chunks that may wait at a time; more are dropped and counted."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """A chunk that is out of sight, but may still be in the pool. `held`: it was in this process's account."""

    chunk: ChunkId
    reason: str
    length: int
    held: bool


class Holdings:
    """Bytes of chunks: cold ones leave first, then the least recently used. May be called from any thread."""

    def __init__(self, quota: int, chunks_max: int = CHUNKS_MAX) -> None:
        """`quota` bounds the bytes of all three states; 0: it doesn't."""
        self.quota = quota
        self._chunks_max = chunks_max
        self._lock = threading.Lock()
        self.telling = threading.Lock()
        """Held from a change of the account until it has been told, so that changes are told in their order."""
        self._storing: dict[ChunkId, int] = {}
        self._warm: OrderedDict[ChunkId, int] = OrderedDict()
        self._cold: OrderedDict[ChunkId, int] = OrderedDict()
        self._leaving: OrderedDict[ChunkId, Leaving] = OrderedDict()
        self.bytes = 0
        self._swept: list[ChunkId] = []

    def __len__(self) -> int:
        return len(self._warm) + len(self._cold)

    @property
    def leaving(self) -> int:
        """How many are leaving."""
        return len(self._leaving)

    def is_leaving(self, chunk: ChunkId) -> bool:
        """Has it been taken out of sight?"""
        return chunk in self._leaving

    # --- coming ----------------------------------------------------------------------------------------

    def begin(self, chunk: ChunkId, length: int) -> bool:
        """Reserve room for a chunk that isn't being stored yet. False if there is none, or while it is leaving."""
        with self._lock:
            assert chunk not in self._storing, "one store of a chunk at a time"
            if chunk in self._leaving or (self.quota and self.bytes + length > self.quota):
                return False
            self._storing[chunk] = length
            self.bytes += length
            return True

    def end(self, chunk: ChunkId, *, stored: bool, cold: bool = False) -> bool:
        """A store has ended. True if the chunk is here now and wasn't before."""
        with self._lock:
            length = self._storing.pop(chunk)
            known = chunk in self._warm or chunk in self._cold
            if not stored or known or chunk in self._leaving:
                self.bytes -= length
                if stored and known:
                    self._touch(chunk)
                return False
            (self._cold if cold else self._warm)[chunk] = length
            return True

    def touch(self, chunks: Sequence[ChunkId], *, loaded: bool = False) -> None:
        """They were used, the last one least recently. What was loaded isn't cold any more."""
        with self._lock:
            for chunk in reversed(chunks):
                if loaded and chunk in self._cold:
                    self._warm[chunk] = self._cold.pop(chunk)
                self._touch(chunk)

    def _touch(self, chunk: ChunkId) -> None:
        for order in (self._warm, self._cold):
            if chunk in order:
                order.move_to_end(chunk)

    # --- going -----------------------------------------------------------------------------------------

    def leave(self, chunks: Sequence[ChunkId], reason: str) -> int:
        """Take chunks out of sight, known or not; returns how many couldn't be noted."""
        with self._lock:
            return sum(not self._leave(chunk, reason) for chunk in chunks)

    def leave_coldest(self, size: int) -> list[Leaving]:
        """Take the coldest chunks out of sight, `size` bytes or more of them if there are so many."""
        with self._lock:
            gone: list[Leaving] = []
            while size > 0 and (chunk := next(iter(self._cold or self._warm), None)) is not None:
                self._leave(chunk, "evicted")
                gone.append(self._leaving[chunk])
                size -= gone[-1].length
            return gone

    def _leave(self, chunk: ChunkId, reason: str) -> bool:
        if chunk in self._leaving:
            return True
        length = self._cold.pop(chunk, 0) or self._warm.pop(chunk, 0)
        if not length and len(self._leaving) >= LEAVING_MAX:
            return False
        self._leaving[chunk] = Leaving(chunk, reason, length, length > 0)
        return True

    def find_leaving(self, chunk: ChunkId) -> Leaving | None:
        """This chunk, if it is leaving."""
        return self._leaving.get(chunk)

    def list_leaving(self, count: int) -> list[Leaving]:
        """The first `count` that wait, but not those that are being stored right now: their store comes first."""
        with self._lock:
            found: list[Leaving] = []
            for chunk, left in self._leaving.items():
                if len(found) >= count:
                    break
                if chunk not in self._storing:
                    found.append(left)
            return found

    def gone(self, chunk: ChunkId) -> Leaving | None:
        """A leaving chunk has left the pool. None if somebody else has said so."""
        with self._lock:
            left = self._leaving.pop(chunk, None)
            if left is not None:
                self.bytes -= left.length
            return left

    def vanished(self, chunk: ChunkId) -> bool:
        """A chunk isn't in the pool any more, or not reckoned with. True if it was held."""
        with self._lock:
            length = self._cold.pop(chunk, 0) or self._warm.pop(chunk, 0)
            self.bytes -= length
            return length > 0

    def all(self) -> list[ChunkId]:
        """All that is held."""
        with self._lock:
            return [*self._cold, *self._warm]

    def excess(self) -> list[ChunkId]:
        """The coldest chunks, of which more are held than can be reckoned with."""
        with self._lock:
            over = len(self) - self._chunks_max
            return [*self._cold, *self._warm][:over] if over > 0 else []

    def some(self, count: int) -> list[ChunkId]:
        """Each call the next so many of those that are held, round and round."""
        with self._lock:
            if not self._swept:
                self._swept = [*self._cold, *self._warm]
            self._swept, found = self._swept[count:], self._swept[:count]
            return [chunk for chunk in found if chunk in self._cold or chunk in self._warm]
