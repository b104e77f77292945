"""Which chunk can't serve a hit without which: what eviction policies know of chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState
from forebay.kvstore.identity import Namespace
from forebay.kvstore.index import ChunkTable
from forebay.kvstore.layout import needs_all


class ChunkLineage:
    """The chunk table's view. Chunks of windowed and recurrent groups don't need those before them to stay: what
    their resume points need is what isn't demoted."""

    def __init__(self, table: ChunkTable, namespaces: Mapping[bytes, Namespace]) -> None:
        self._table, self._namespaces = table, namespaces

    def parent(self, entry: Entry) -> Entry | None:
        """The committed chunk that `entry` goes on from, if it is here."""
        parent = self._table.get(entry.group, entry.parent)
        return parent if parent is not None and parent.state is SlotState.COMMITTED else None

    def dependents(self, entry: Entry) -> Sequence[Entry]:
        """The committed chunks right after `entry` that can't serve a hit without it. Don't mutate."""
        namespace = self._namespaces.get(entry.namespace)
        if namespace is None or not needs_all(namespace.groups[entry.group]):
            return ()
        return self._table.children(entry.group, entry.key)
