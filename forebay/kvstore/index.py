"""The chunk table: by key, by parent, by first tokens. Pure, bounded by the pool's slots.

Children of one parent are kept in the order of their tokens. The child that shares the longest prefix with a
prompt is then beside the place where the prompt itself would stand:

    children of a parent     [a b c] [a b d] [a x] [m]
    prompt a b d e                          ^ here: its best child is the neighbour to the left or to the right

so a parent with a hundred thousand children (the root of everyone's first chunks) costs no more than
a few comparisons.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

from forebay.errors import CorruptChunk
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState
from forebay.kvstore.identity import MATCH_UNIT, chain

UNIT_TOKEN_BYTES = 4 * MATCH_UNIT


def common_units(left: bytes, right: bytes) -> int:
    """Tokens, in whole units, that two runs of token ids (u32 LE) share from the start."""
    limit = min(len(left), len(right)) // UNIT_TOKEN_BYTES * UNIT_TOKEN_BYTES
    if left[:limit] == right[:limit]:
        return limit // 4
    low, high = 0, limit // UNIT_TOKEN_BYTES
    while low + 1 < high:  # the prefixes of `low` units agree, those of `high` don't
        middle = (low + high) // 2
        if left[: middle * UNIT_TOKEN_BYTES] == right[: middle * UNIT_TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low * MATCH_UNIT


class ChunkTable:
    """All entries, unfinished ones too. Only committed ones are children of their parents.

    `suspects` are entries whose header in the pool could not be read when it was needed; whoever owns the table
    takes them out.
    """

    def __init__(self) -> None:
        # By group. Questions may name any group; only entries make one.
        self._entries: dict[int, dict[bytes, Entry]] = {}
        # Most parents have one child, which then stands there itself, without a list around it.
        self._children: dict[int, dict[bytes, Entry | list[Entry]]] = {}
        self._first: dict[bytes, dict[tuple[bytes, bytes], int]] = {}
        self._first_of: dict[Entry, bytes] = {}
        self.suspects: list[Entry] = []

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def __iter__(self) -> Iterator[Entry]:
        return iter([entry for group in self._entries.values() for entry in group.values()])

    def get(self, group: int, key: bytes) -> Entry | None:
        """The entry of exactly this chunk, in whatever state."""
        entries = self._entries.get(group)
        return None if entries is None else entries.get(key)

    def of_group(self, group: int) -> dict[bytes, Entry]:
        """All entries of a group by their keys. Don't mutate."""
        return self._entries.get(group, {})

    def insert(self, entry: Entry) -> None:
        """Take a new entry in."""
        entries = self._entries.setdefault(entry.group, {})
        assert entry.key not in entries, entry.id
        entries[entry.key] = entry
        if entry.state is SlotState.COMMITTED:
            self.commit(entry)

    def commit(self, entry: Entry) -> None:
        """`entry` has become readable: its parent's other users may find it by its tokens."""
        assert entry.state is SlotState.COMMITTED
        children = self._children.setdefault(entry.group, {})
        there = children.get(entry.parent)
        if there is None:
            children[entry.parent] = entry
        else:
            siblings = there if isinstance(there, list) else [there]
            siblings.insert(self._place(siblings, self._order(entry)), entry)
            children[entry.parent] = siblings
        if entry.start == 0:
            self._note_first(entry)

    def remove(self, entry: Entry) -> None:
        """Forget an entry."""
        assert self._entries[entry.group].pop(entry.key) is entry
        children = self._children.get(entry.group, {})
        there = children.get(entry.parent)
        if there is entry:
            del children[entry.parent]
        elif isinstance(there, list):
            self._take_out(there, entry)
            if len(there) == 1:
                children[entry.parent] = there[0]
        self._forget_first(entry)

    def _take_out(self, siblings: list[Entry], entry: Entry) -> None:
        at = self._place(siblings, self._order(entry))
        if at < len(siblings) and siblings[at] is entry:
            del siblings[at]
        elif entry in siblings:  # a header that can't be read any more tells no place
            siblings.remove(entry)

    def _note_first(self, entry: Entry) -> None:
        first = self._order(entry)[1][:UNIT_TOKEN_BYTES]
        roots = self._first.setdefault(first, {})
        where = (entry.namespace, entry.parent)
        roots[where] = roots.get(where, 0) + 1
        self._first_of[entry] = first

    def _forget_first(self, entry: Entry) -> None:
        first = self._first_of.pop(entry, None)
        if first is None:
            return
        roots, where = self._first[first], (entry.namespace, entry.parent)
        roots[where] -= 1
        if not roots[where]:
            del roots[where]
        if not roots:
            del self._first[first]

    # --- children --------------------------------------------------------------------------------------

    def _order(self, entry: Entry) -> tuple[bytes, bytes]:
        """What siblings are sorted by: their `extra`, then their tokens."""
        try:
            header = entry.header()
        except CorruptChunk:
            self.suspects.append(entry)
            return (b"", b"")
        return (header.extra, header.tokens)

    def _place(self, siblings: list[Entry], order: tuple[bytes, bytes]) -> int:
        return bisect_left(siblings, order, key=self._order)

    def has_children(self, group: int, parent: bytes) -> bool:
        """Does a committed chunk begin where `parent` ends?"""
        return parent in self._children.get(group, {})

    def children(self, group: int, parent: bytes) -> list[Entry]:
        """Committed chunks that begin where `parent` ends. Don't mutate."""
        there = self._children.get(group, {}).get(parent)
        return [] if there is None else there if isinstance(there, list) else [there]

    def best_child(self, group: int, parent: bytes, tokens: bytes, extra: bytes) -> tuple[Entry | None, int]:
        """The committed child of `parent` that shares the most units with `tokens`, and how many tokens.

        A child with the same tokens and another `extra` is another chunk.
        """
        siblings = self.children(group, parent)
        at = self._place(siblings, (extra, tokens)) if len(siblings) > 1 else 0
        best, best_length = None, 0
        for child in siblings[max(at - 1, 0) : at + 1]:
            its_extra, its_tokens = self._order(child)
            length = common_units(its_tokens, tokens) if its_extra == extra else 0
            if length > best_length:
                best, best_length = child, length
        return best, best_length

    def fronts(self, group: int, parent: bytes, tokens: bytes, extra: bytes) -> list[Entry]:
        """Committed children of `parent` whose tokens are a front of `tokens`, or all of it, shortest first."""
        if not self.has_children(group, parent):
            return []
        entries = self.of_group(group)
        found = (entries.get(key) for key in chain(parent, tokens, extra))
        return [entry for entry in found if entry is not None and entry.state is SlotState.COMMITTED]

    def beginning(self, group: int, parent: bytes, tokens: bytes, extra: bytes) -> Iterator[Entry]:
        """Committed children of `parent` that begin with all of `tokens`. The table must not change meanwhile."""
        siblings = self.children(group, parent)
        for child in islice(siblings, self._place(siblings, (extra, tokens)), None):
            its_extra, its_tokens = self._order(child)
            if its_extra != extra or not its_tokens.startswith(tokens):
                return
            yield child

    def covering(self, group: int, parent: bytes, tokens: bytes, extra: bytes) -> Entry | None:
        """Some committed child of `parent` that begins with all of `tokens`, if there is one."""
        return next(self.beginning(group, parent, tokens, extra), None)

    def shorter(self, entry: Entry, tokens: bytes, extra: bytes) -> list[Entry]:
        """Committed chunks with the same `extra` whose tokens are a proper prefix of this entry's, shortest first."""
        if not isinstance(self._children.get(entry.group, {}).get(entry.parent), list):
            return []  # it is an only child
        entries = self._entries[entry.group]
        found = (entries.get(key) for key in chain(entry.parent, tokens, extra)[:-1])
        return [other for other in found if other is not None and other.state is SlotState.COMMITTED]

    def roots_of(self, first_tokens: bytes) -> list[tuple[bytes, bytes]]:
        """(namespace, root) of all chains in the pool that begin with this unit of tokens."""
        return list(self._first.get(first_tokens[:UNIT_TOKEN_BYTES], {}))
