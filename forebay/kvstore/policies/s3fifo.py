"""S3-FIFO (Yang et al.): a small queue filters what is used once; nothing moves on a hit; tails before prefixes.

    stored --> [ small, a tenth ] --used twice--> [ main ]--+   used since: around again, one use less
                     | else                          ^      |   else: gone
                     v                               |      |
               key among ghosts --stored again-------+<-----+

An entry that is pinned when its turn comes leaves its queue, and enters the main one when it is released: it was
used at that very moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import EvictionPolicy, Lineage, NoLineage
from forebay.kvstore.policies.descent import Descent
from forebay.kvstore.policies.ghosts import GHOSTS_MAX, Ghosts
from forebay.kvstore.policies.order import Order

USES_MAX = 3
PROMOTED_AT = 2
SMALL_SHARE = 0.1


class Uses:
    """An entry's note, which is what the queues hold: `count` of its uses since it was stored or went around, and
    whether it may be evicted."""

    __slots__ = ("count", "entry", "evictable", "newer", "older", "order")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.count = 0
        self.evictable = True
        self.order: Any = None
        self.older: Any = None
        self.newer: Any = None


class Queues:
    """The queues of one slot size. Pinned entries stay in them until their turn comes."""

    def __init__(self, ghosts_max: int) -> None:
        self.small: Order[Uses] = Order()
        self.main: Order[Uses] = Order()
        self.ghosts = Ghosts(ghosts_max)
        self.evictable = 0

    def __len__(self) -> int:
        return len(self.small) + len(self.main)

    def head(self) -> Uses | None:
        """What is to be evicted next; moves those before it."""
        while len(self):
            from_small = bool(self.small) and (len(self.small) >= max(1, len(self) * SMALL_SHARE) or not self.main)
            queue = self.small if from_small else self.main
            uses = queue.first
            assert uses is not None
            if not uses.evictable:
                queue.discard(uses)
            elif from_small and uses.count >= PROMOTED_AT:
                uses.count = 0
                queue.discard(uses)
                self.main.append(uses)
            elif not from_small and uses.count:
                uses.count -= 1
                queue.move_last(uses)
            else:
                return uses
        return None

    def used_now(self, uses: Uses) -> None:
        """The head turns out to be in use."""
        self.discard(uses)
        uses.count = 1
        self.main.append(uses)

    def discard(self, uses: Uses) -> None:
        """Take an entry out, if it is in."""
        _ = self.small.discard(uses) or self.main.discard(uses)


class S3Fifo(EvictionPolicy):
    """Three queues without a list operation on hits. At most `ghosts_max` keys a slot size are remembered."""

    def __init__(self, lineage: Lineage | None = None, *, ghosts_max: int = GHOSTS_MAX) -> None:
        self._ghosts_max = ghosts_max
        self._queues: dict[int, Queues] = {}
        self._descent = Descent(
            lineage or NoLineage(), lambda entry: isinstance(entry.note, Uses) and entry.note.evictable
        )

    def _of(self, slot_bytes: int) -> Queues:
        found = self._queues.get(slot_bytes)
        if found is None:
            found = self._queues[slot_bytes] = Queues(self._ghosts_max)
        return found

    def add(self, entry: Entry) -> None:
        queues, uses = self._of(entry.slot_bytes), entry.note
        if isinstance(uses, Uses):
            assert not uses.evictable
            uses.evictable = True
            uses.count = min(uses.count + 1, USES_MAX)
            if uses.order is None:
                queues.main.append(uses)
        else:
            uses = entry.note = Uses(entry)
            (queues.main if queues.ghosts.take(entry) else queues.small).append(uses)
        queues.evictable += 1

    def demote(self, entry: Entry) -> None:
        uses, queues = entry.note, self._of(entry.slot_bytes)
        if isinstance(uses, Uses) and uses.evictable:
            queues.discard(uses)
            uses.count = 0
            queues.small.push_first(uses)

    def remove(self, entry: Entry) -> None:
        uses = entry.note
        if isinstance(uses, Uses) and uses.evictable:
            uses.evictable = False
            self._of(entry.slot_bytes).evictable -= 1

    def evicted(self, entry: Entry) -> None:
        queues = self._of(entry.slot_bytes)
        if isinstance(entry.note, Uses) and entry.note in queues.small:
            queues.ghosts.add(entry)
        queues.ghosts.trim(int(len(queues) * (1 - SMALL_SHARE)))

    def forget(self, entry: Entry) -> None:
        self.remove(entry)
        if isinstance(entry.note, Uses):
            self._of(entry.slot_bytes).discard(entry.note)
            entry.note = None

    def victim(self, slot_bytes: int) -> Entry | None:
        queues = self._of(slot_bytes)
        for _ in range(queues.evictable):
            head = queues.head()
            if head is None:
                return None
            leaf = self._descent.leaf(head.entry)
            if leaf is not None:
                return leaf
            queues.used_now(head)
        return None

    def gauges(self) -> Mapping[str, int]:
        return {"ghosts": sum(len(queues.ghosts) for queues in self._queues.values())}

    def __len__(self) -> int:
        return sum(queues.evictable for queues in self._queues.values())

    def __iter__(self) -> Iterator[Entry]:
        for queues in list(self._queues.values()):
            yield from [uses.entry for uses in (*queues.small, *queues.main) if uses.evictable]
