"""The chunk table: by key, by parent, by first tokens. Pure, bounded by the pool's slots."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from forebay.kvstore.entry import Entry, EntryId
from forebay.kvstore.header import SlotState
from forebay.kvstore.identity import MATCH_UNIT

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
    """All entries, unfinished ones too. Only committed ones are children of their parents."""

    def __init__(self) -> None:
        self._entries: dict[EntryId, Entry] = {}
        self._children: dict[EntryId, list[Entry]] = {}
        self._first: dict[bytes, dict[tuple[bytes, bytes], int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def page(self, cursor: int, limit: int) -> list[Entry]:
        """Entries [cursor, cursor + limit) in insertion order; skips some if the table changes between pages."""
        return list(islice(self._entries.values(), cursor, cursor + limit))

    def get(self, group: int, key: bytes) -> Entry | None:
        """The entry of exactly this chunk, in whatever state."""
        return self._entries.get(EntryId(group, key))

    def insert(self, entry: Entry) -> None:
        """Take a new entry in."""
        assert entry.id not in self._entries, entry.id
        self._entries[entry.id] = entry
        if entry.state is SlotState.COMMITTED:
            self.commit(entry)

    def commit(self, entry: Entry) -> None:
        """`entry` has become readable: its parent's other users may find it by its tokens."""
        assert entry.state is SlotState.COMMITTED
        self._children.setdefault(EntryId(entry.group, entry.parent), []).append(entry)
        if entry.start == 0:
            roots = self._first.setdefault(entry.tokens[:UNIT_TOKEN_BYTES], {})
            where = (entry.namespace, entry.parent)
            roots[where] = roots.get(where, 0) + 1

    def remove(self, entry: Entry) -> None:
        """Forget an entry."""
        assert self._entries.pop(entry.id) is entry
        siblings = self._children.get(EntryId(entry.group, entry.parent))
        if siblings is None or entry not in siblings:
            return
        siblings.remove(entry)
        if not siblings:
            del self._children[EntryId(entry.group, entry.parent)]
        if entry.start == 0:
            self._forget_first(entry)

    def _forget_first(self, entry: Entry) -> None:
        first, where = entry.tokens[:UNIT_TOKEN_BYTES], (entry.namespace, entry.parent)
        roots = self._first[first]
        roots[where] -= 1
        if not roots[where]:
            del roots[where]
        if not roots:
            del self._first[first]

    def children(self, group: int, parent: bytes) -> list[Entry]:
        """Committed chunks that begin where `parent` ends. Don't mutate."""
        return self._children.get(EntryId(group, parent), [])

    def best_child(self, group: int, parent: bytes, tokens: bytes, extra: bytes) -> tuple[Entry | None, int]:
        """The committed child of `parent` that shares the most units with `tokens`, and how many tokens.

        A child with the same tokens and another `extra` is another chunk.
        """
        best, best_length = None, 0
        for child in self.children(group, parent):
            length = common_units(child.tokens, tokens)
            if length > best_length and child.extra == extra:
                best, best_length = child, length
        return best, best_length

    def roots_of(self, first_tokens: bytes) -> list[tuple[bytes, bytes]]:
        """(namespace, root) of all chains in the pool that begin with this unit of tokens."""
        return list(self._first.get(first_tokens[:UNIT_TOKEN_BYTES], {}))
