"""Which namespaces are in use, and by what: connected clients that have registered them, and chunks. Pure.

A namespace that neither holds a chunk nor has a user is idle: it is the one to forget when there are too many.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from forebay.kvstore.entry import Entry


@dataclass(slots=True)
class Use:
    """What keeps one namespace: `chunks` in the pool, with `payload` bytes in all, and connected `users`."""

    chunks: int = 0
    payload: int = 0
    users: int = 0


class NamespaceUse:
    """Counts for every known namespace. Of those that are idle it knows in which order they became so."""

    def __init__(self) -> None:
        self._uses: dict[bytes, Use] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    def of(self, namespace: bytes) -> Use:
        """The present counts; don't mutate."""
        return self._uses.get(namespace) or Use()

    def known(self, namespace: bytes) -> None:
        """A namespace has been registered, or is remembered from before a restart."""
        if namespace not in self._uses:
            self._uses[namespace] = Use()
        self._settle(namespace)

    def joined(self, namespace: bytes) -> None:
        """A client uses it."""
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
        del self._uses[namespace]
        return namespace
