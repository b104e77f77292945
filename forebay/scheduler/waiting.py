"""The queue of those who hold no blocks: by rank, which is priority and age; with a cap."""

from __future__ import annotations

import bisect
from collections.abc import Hashable

from forebay.scheduler.request import Request


class QueueFull(Exception):
    """As many requests wait as may. The client should come back later."""


class WaitingQueue:
    """Requests in the order of their rank. Those who come back after a preemption are exempt from the cap."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._ranked: list[Request] = []
        self._by_key: dict[Hashable, Request] = {}

    def __len__(self) -> int:
        return len(self._ranked)

    def find(self, key: Hashable) -> Request | None:
        """The request with this key, if it waits here."""
        return self._by_key.get(key)

    def push(self, request: Request) -> None:
        """Add a new request. Raises QueueFull."""
        if len(self._ranked) >= self.cap:
            raise QueueFull(f"{len(self._ranked)} requests are waiting already")
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Add one that was preempted; its rank puts it before all that came later."""
        assert request.key not in self._by_key, request.key
        bisect.insort(self._ranked, request, key=lambda r: r.rank)
        self._by_key[request.key] = request

    def head(self) -> Request | None:
        """Who is next; stays in the queue."""
        return self._ranked[0] if self._ranked else None

    def pop(self) -> Request:
        """Take the head out."""
        request = self._ranked.pop(0)
        del self._by_key[request.key]
        return request

    def remove(self, key: Hashable) -> Request | None:
        """Take one out, wherever it stands."""
        request = self._by_key.pop(key, None)
        if request is not None:
            at = bisect.bisect_left(self._ranked, request.rank, key=lambda r: r.rank)
            assert self._ranked[at] is request
            del self._ranked[at]
        return request
