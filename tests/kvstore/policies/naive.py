"""ARC and S3-FIFO as plain lists: slow, short, and easy to compare with their descriptions."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.kvstore.entry import Entry, EntryId
from forebay.kvstore.policies.base import EvictionPolicy, Lineage


class Naive(EvictionPolicy):
    """What both share: `where` has every known entry's list, pinned ones in none."""

    def __init__(self, lineage: Lineage) -> None:
        self.lineage = lineage
        self.lists: dict[tuple[int, str], list[Entry]] = {}
        self.ghosts: dict[tuple[int, str], list[EntryId]] = {}
        self.evictable: set[Entry] = set()

    def of(self, size: int, name: str) -> list[Entry]:
        return self.lists.setdefault((size, name), [])

    def ghosts_of(self, size: int, name: str) -> list[EntryId]:
        return self.ghosts.setdefault((size, name), [])

    def leaf(self, entry: Entry) -> Entry | None:
        below = self.lineage.dependents(entry)
        others = [e for e in below if e.slot_bytes != entry.slot_bytes]
        if not all(e in self.evictable for e in (*below, *self.all_below(others))):
            return None
        same = [e for e in below if e.slot_bytes == entry.slot_bytes]
        return self.leaf(same[0]) if same else entry

    def all_below(self, entries: list[Entry]) -> list[Entry]:
        found = [e for entry in entries for e in self.lineage.dependents(entry)]
        return found + self.all_below(found) if found else []

    def take_out(self, entry: Entry) -> None:
        for entries in self.lists.values():
            if entry in entries:
                entries.remove(entry)

    def __len__(self) -> int:
        return len(self.evictable)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self.evictable))


class NaiveArc(Naive):
    def __init__(self, lineage: Lineage) -> None:
        super().__init__(lineage)
        self.target: dict[int, float] = {}
        self.again: set[Entry] = set()
        self.known: set[Entry] = set()

    def add(self, entry: Entry) -> None:
        size, here = entry.slot_bytes, len(self.of(entry.slot_bytes, "once")) + len(self.of(entry.slot_bytes, "again"))
        once, again = self.ghosts_of(size, "once"), self.ghosts_of(size, "again")
        target = self.target.get(size, 0.0)
        if entry in self.known:
            self.again.add(entry)
        elif entry.id in once:
            self.target[size] = min(target + max(len(again) / len(once), 1), here + 1)
            once.remove(entry.id)
            self.again.add(entry)
        elif entry.id in again:
            self.target[size] = max(target - max(len(once) / len(again), 1), 0)
            again.remove(entry.id)
            self.again.add(entry)
        self.known.add(entry)
        self.of(size, "again" if entry in self.again else "once").append(entry)
        self.evictable.add(entry)

    def remove(self, entry: Entry) -> None:
        self.take_out(entry)
        self.evictable.discard(entry)

    def demote(self, entry: Entry) -> None:
        if entry in self.evictable:
            self.take_out(entry)
            self.of(entry.slot_bytes, "once").insert(0, entry)

    def evicted(self, entry: Entry) -> None:
        size = entry.slot_bytes
        once, again = self.ghosts_of(size, "once"), self.ghosts_of(size, "again")
        (again if entry in self.again else once).append(entry.id)
        in_once, in_again = self.of(size, "once"), self.of(size, "again")
        capacity = len(in_once) + len(in_again)
        staying = [e for e in in_once if e is not entry]
        del once[: max(0, len(once) - max(0, capacity - len(staying)))]
        del again[: max(0, len(again) - max(0, capacity - len(once)))]

    def forget(self, entry: Entry) -> None:
        self.known.discard(entry)
        self.again.discard(entry)

    def victim(self, slot_bytes: int) -> Entry | None:
        once, again = self.of(slot_bytes, "once"), self.of(slot_bytes, "again")
        for _ in range(len(once) + len(again)):
            order = once if once and (len(once) > self.target.get(slot_bytes, 0.0) or not again) else again
            leaf = self.leaf(order[0])
            if leaf is not None:
                return leaf
            again.append(order.pop(0))
        return None


class NaiveS3Fifo(Naive):
    def __init__(self, lineage: Lineage) -> None:
        super().__init__(lineage)
        self.uses: dict[Entry, int] = {}

    def add(self, entry: Entry) -> None:
        size = entry.slot_bytes
        if entry in self.uses:
            self.uses[entry] = min(self.uses[entry] + 1, 3)
            if entry not in self.of(size, "small") and entry not in self.of(size, "main"):
                self.of(size, "main").append(entry)
        else:
            self.uses[entry] = 0
            ghosts = self.ghosts_of(size, "ghosts")
            self.of(size, "main" if entry.id in ghosts else "small").append(entry)
            if entry.id in ghosts:
                ghosts.remove(entry.id)
        self.evictable.add(entry)

    def remove(self, entry: Entry) -> None:
        self.evictable.discard(entry)

    def demote(self, entry: Entry) -> None:
        if entry in self.evictable:
            self.take_out(entry)
            self.uses[entry] = 0
            self.of(entry.slot_bytes, "small").insert(0, entry)

    def evicted(self, entry: Entry) -> None:
        size = entry.slot_bytes
        small, main, ghosts = self.of(size, "small"), self.of(size, "main"), self.ghosts_of(size, "ghosts")
        if entry in small:
            ghosts.append(entry.id)
        del ghosts[: max(0, len(ghosts) - int((len(small) + len(main)) * 0.9))]

    def forget(self, entry: Entry) -> None:
        self.take_out(entry)
        self.uses.pop(entry, None)

    def victim(self, slot_bytes: int) -> Entry | None:
        small, main = self.of(slot_bytes, "small"), self.of(slot_bytes, "main")
        for _ in range(sum(e.slot_bytes == slot_bytes for e in self.evictable)):
            head = self.head(small, main)
            if head is None:
                return None
            leaf = self.leaf(head)
            if leaf is not None:
                return leaf
            self.take_out(head)
            self.uses[head] = 1
            main.append(head)
        return None

    def head(self, small: list[Entry], main: list[Entry]) -> Entry | None:
        while small or main:
            first = small and (len(small) >= max(1, 0.1 * (len(small) + len(main))) or not main)
            entry = (small if first else main)[0]
            if entry not in self.evictable:
                (small if first else main).pop(0)
            elif first and self.uses[entry] >= 2:
                main.append(small.pop(0))
                self.uses[entry] = 0
            elif not first and self.uses[entry]:
                main.append(main.pop(0))
                self.uses[entry] -= 1
            else:
                return entry
        return None
