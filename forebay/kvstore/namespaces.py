"""Which namespaces there are, and what uses them: connected clients that have registered them, and chunks. Pure.

A namespace that neither holds a chunk nor has a user is idle: it is the one to forget when there are too many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from forebay.kvstore.entry import Entry
from forebay.kvstore.identity import Namespace


@dataclass(slots=True)
class Use:
    """What keeps one namespace: `chunks` in the pool, with `payload` bytes in all, and connected `users`."""

    chunks: int = 0
    payload: int = 0
    users: int = 0


class Namespaces:
    """All namespaces of a store, at most `limit`: `known` by id, `labels` for people (both for reading), and how much
    each is used. Of those that are idle it knows in which order they became so."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.known: dict[bytes, Namespace] = {}
        self.labels: dict[bytes, str] = {}
        self._uses: dict[bytes, Use] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    def of(self, namespace: bytes) -> Use:
        """The present counts; don't mutate."""
        return self._uses.get(namespace) or Use()

    def remember(self, namespace_id: bytes, namespace: Namespace, label: str = "") -> None:
        """Know a namespace, of an earlier boot perhaps; nobody uses it by that alone."""
        self.known[namespace_id] = namespace
        if label:
            self.labels[namespace_id] = label
        self._uses.setdefault(namespace_id, Use())
        self._settle(namespace_id)

    def make_room(self) -> Iterator[bytes]:
        """Forget what has been idle for longest until there is room for one more; yields what is forgotten.

        Raises ValueError if all are in use.
        """
        while len(self.known) >= self._limit:
            oldest = self.forget_oldest_idle()
            if oldest is None:
                raise ValueError(
                    f"{self._limit} namespaces are registered already, and all have chunks or users: clear some"
                )
            yield oldest

    def joined(self, namespace: bytes, mine: dict[bytes, None]) -> None:
        """A client uses it; `mine` are those that it uses."""
        if namespace not in mine:
            mine[namespace] = None
            self._uses[namespace].users += 1
            self._settle(namespace)

    def left(self, namespace: bytes) -> None:
        """A client that used it is gone."""
        self._uses[namespace].users -= 1
        self._settle(namespace)

    def stored(self, entry: Entry) -> None:
        """An entry has got its slot."""
        use = self._uses.setdefault(entry.namespace, Use())
        use.chunks, use.payload = use.chunks + 1, use.payload + entry.payload_length
        self._settle(entry.namespace)

    def gone(self, entry: Entry) -> None:
        """An entry has left its slot."""
        use = self._uses[entry.namespace]
        use.chunks, use.payload = use.chunks - 1, use.payload - entry.payload_length
        self._settle(entry.namespace)

    def _settle(self, namespace: bytes) -> None:
        use = self._uses[namespace]
        assert use.chunks >= 0 and use.users >= 0, namespace.hex()
        if use.chunks or use.users:
            self._idle.pop(namespace, None)
        else:
            self._idle[namespace] = None
            self._idle.move_to_end(namespace)

    def forget_oldest_idle(self) -> bytes | None:
        """The namespace that has been idle for longest, forgotten; None if all are in use."""
        if not self._idle:
            return None
        namespace, _ = self._idle.popitem(last=False)
        del self._uses[namespace], self.known[namespace]
        self.labels.pop(namespace, None)
        return namespace
