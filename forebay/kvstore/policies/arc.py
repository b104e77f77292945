"""ARC (Megiddo and Modha): what was used once and what was used again compete for room; tails before prefixes.

    once   least recent ... most recent      `target`: how many entries `once` may have; it grows when a key comes
    again  least recent ... most recent      back that was evicted from `once`, and shrinks for one from `again`

It differs from the paper where the store does: room is made before it is known for whom, so a returning key moves
the target after its eviction and not before. Pinned entries are in neither list until they come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import EvictionPolicy, Lineage, NoLineage
from forebay.kvstore.policies.descent import Descent
from forebay.kvstore.policies.ghosts import GHOSTS_MAX, Ghosts
from forebay.kvstore.policies.order import Order


class Seen(Enum):
    """An entry's note: how often it was used."""

    ONCE = 1
    AGAIN = 2


class SizeClass:
    """The lists of one slot size."""

    def __init__(self, ghosts_max: int) -> None:
        self.once: Order[Entry] = Order()
        self.again: Order[Entry] = Order()
        self.ghosts_once, self.ghosts_again = Ghosts(ghosts_max), Ghosts(ghosts_max)
        self.target = 0.0

    def __len__(self) -> int:
        return len(self.once) + len(self.again)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self.once or entry in self.again

    def discard(self, entry: Entry) -> bool:
        """Take an entry out; False if it isn't in."""
        return self.once.discard(entry) or self.again.discard(entry)

    def in_turn(self) -> Order[Entry]:
        """The list that gives up an entry next."""
        return self.once if self.once and (len(self.once) > self.target or not self.again) else self.again

    def came_back(self, entry: Entry) -> bool:
        """Learn from a new entry that was here before; False if it wasn't."""
        # Both are at least 1 while the key is still among them.
        once, again = max(len(self.ghosts_once), 1), max(len(self.ghosts_again), 1)
        if self.ghosts_once.take(entry):
            self.target = min(self.target + max(len(self.ghosts_again) / once, 1.0), float(len(self) + 1))
        elif self.ghosts_again.take(entry):
            self.target = max(self.target - max(len(self.ghosts_once) / again, 1.0), 0.0)
        else:
            return False
        return True

    def remember(self, entry: Entry) -> None:
        """Keep the key of an entry that is being evicted. Together with the entries that are here, no more keys are
        known than twice the entries, and no more of those used once than entries."""
        capacity = len(self)
        (self.ghosts_again if entry.note is Seen.AGAIN else self.ghosts_once).add(entry)
        self.ghosts_once.trim(capacity - len(self.once) + (entry in self.once))
        self.ghosts_again.trim(capacity - len(self.ghosts_once))


class Arc(EvictionPolicy):
    """Adapts between recency and frequency. At most `ghosts_max` keys a list and slot size are remembered."""

    def __init__(self, lineage: Lineage | None = None, *, ghosts_max: int = GHOSTS_MAX) -> None:
        self._ghosts_max = ghosts_max
        self._classes: dict[int, SizeClass] = {}
        self._descent = Descent(lineage or NoLineage(), lambda entry: entry in self._of(entry.slot_bytes))

    def _of(self, slot_bytes: int) -> SizeClass:
        found = self._classes.get(slot_bytes)
        if found is None:
            found = self._classes[slot_bytes] = SizeClass(self._ghosts_max)
        return found

    def add(self, entry: Entry) -> None:
        here = self._of(entry.slot_bytes)
        assert entry not in here
        known = isinstance(entry.note, Seen)
        again = known or here.came_back(entry)
        entry.note = Seen.AGAIN if again else Seen.ONCE
        (here.again if again else here.once).append(entry)

    def demote(self, entry: Entry) -> None:
        here = self._of(entry.slot_bytes)
        if here.discard(entry):
            here.once.push_first(entry)

    def put_back(self, entry: Entry) -> None:
        if not isinstance(entry.note, Seen):
            super().put_back(entry)
            return
        here = self._of(entry.slot_bytes)
        (here.again if entry.note is Seen.AGAIN else here.once).push_first(entry)

    def remove(self, entry: Entry) -> None:
        self._of(entry.slot_bytes).discard(entry)

    def evicted(self, entry: Entry) -> None:
        self._of(entry.slot_bytes).remember(entry)

    def forget(self, entry: Entry) -> None:
        self.remove(entry)
        entry.note = None

    def victim(self, slot_bytes: int) -> Entry | None:
        here = self._of(slot_bytes)
        for _ in range(len(here)):
            order = here.in_turn()
            coldest = order.first
            assert coldest is not None
            leaf = self._descent.leaf(coldest)
            if leaf is not None:
                return leaf
            order.discard(coldest)  # what a pinned entry needs is in use
            here.again.append(coldest)
        return None

    def gauges(self) -> Mapping[str, int]:
        return {"ghosts": sum(len(c.ghosts_once) + len(c.ghosts_again) for c in self._classes.values())}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Entry]:
        return (entry for here in list(self._classes.values()) for entry in [*here.once, *here.again])
