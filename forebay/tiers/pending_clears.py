"""Clears that a tier's process has not confirmed yet: none is ever lost, and there are never more than so many.

Where one more would be too many, those of one tenant in one namespace become a single clear of all that the tenant has
there, then those of one namespace a clear of it, at last all of them a clear of everything. A tier that is away for
long so forgets more than it was told to, which costs hits, and never less.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forebay.tiers.base import ClearScope

Wider = Callable[[ClearScope], ClearScope]
WIDER: Sequence[Wider] = (
    lambda scope: ClearScope(scope.namespace, scope.tenant),
    lambda scope: ClearScope(scope.namespace),
    lambda scope: ClearScope(),
)


@dataclass(frozen=True)
class AskedClear:
    """What a tier's process is to be asked for, and those who wait for it."""

    rid: int
    scope: ClearScope
    waiters: Sequence[asyncio.Future[int | None]]


class PendingClears:
    """`next_rid` gives requests their ids. `widened` counts how often some have become one."""

    def __init__(self, limit: int, next_rid: Callable[[], int]) -> None:
        assert limit >= 2
        self._limit = limit
        self._next_rid = next_rid
        self._pending: dict[int, AskedClear] = {}
        self.widened = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[AskedClear]:
        """What a new process has to be asked for."""
        return iter(list(self._pending.values()))

    @property
    def everything(self) -> bool:
        """Is all that a tier has to be forgotten?"""
        return any(clear.scope == ClearScope() for clear in self._pending.values())

    def add(self, scope: ClearScope, waiter: asyncio.Future[int | None]) -> list[AskedClear]:
        """Take one in; returns what has to be asked for now."""
        joined = [self._join_some()] if len(self._pending) >= self._limit else []
        return [*joined, self._enter(scope, [waiter])]

    def confirmed(self, rid: int, count: int | None) -> None:
        """The process has carried it out. An id that isn't known was of one that has become part of another."""
        clear = self._pending.pop(rid, None)
        for waiter in clear.waiters if clear else ():
            if not waiter.done():
                waiter.set_result(count)

    def cancel(self) -> None:
        """Nobody will carry them out any more."""
        for clear in self._pending.values():
            for waiter in clear.waiters:
                waiter.cancel()
        self._pending.clear()

    def _enter(self, scope: ClearScope, waiters: Sequence[asyncio.Future[int | None]]) -> AskedClear:
        # Under a new id, also where it joins older ones: a process that carries one of those out right now may have
        # taken in more chunks since it began.
        clear = AskedClear(self._next_rid(), scope, waiters)
        self._pending[clear.rid] = clear
        return clear

    def _join_some(self) -> AskedClear:
        """Make room: those of which there are the most become one, as little wider as will do."""
        for wider in WIDER:
            scope, count = Counter(wider(clear.scope) for clear in self._pending.values()).most_common(1)[0]
            if count >= 2:
                break
        parts = [clear for clear in self._pending.values() if wider(clear.scope) == scope]
        for clear in parts:
            del self._pending[clear.rid]
        self.widened += 1
        return self._enter(scope, [waiter for clear in parts for waiter in clear.waiters if not waiter.done()])
