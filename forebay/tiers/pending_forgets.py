"""Chunks that a tier's process has not confirmed to have forgotten: whoever takes its place is asked again.

A removal that a process was told of and died before it did would leave a chunk that was cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.tiers.base import ChunkId
from forebay.tiers.messages import BATCH, Forget


class PendingForgets:
    """At most about `limit` chunks, `overflowed` says when there are more: what they are part of has to go as a whole
    then. `next_rid` gives requests their ids."""

    def __init__(self, limit: int, next_rid: Callable[[], int]) -> None:
        self._limit = limit
        self._next_rid = next_rid
        self._pending: dict[int, Forget] = {}
        self._chunks = 0

    def __len__(self) -> int:
        return self._chunks

    @property
    def overflowed(self) -> bool:
        """Are there more than may be remembered?"""
        return self._chunks > self._limit

    def add(self, chunks: Sequence[ChunkId], reason: str) -> list[Forget]:
        """Take chunks in; returns what a process has to be asked for."""
        asked = [
            Forget(self._next_rid(), list(chunks[at : at + BATCH]), reason) for at in range(0, len(chunks), BATCH)
        ]
        self._pending.update((message.rid, message) for message in asked)
        self._chunks += len(chunks)
        return asked

    def confirmed(self, rid: int) -> None:
        """The process has done it. An id that isn't known belongs to what was dropped."""
        message = self._pending.pop(rid, None)
        if message is not None:
            self._chunks -= len(message.chunks)

    def again(self) -> list[Forget]:
        """What a new process has to be asked for, in as few messages as will do."""
        reasons: dict[str, dict[ChunkId, None]] = {}
        for message in self._pending.values():
            reasons.setdefault(message.reason, {}).update(dict.fromkeys(message.chunks))
        self.drop()
        return [message for reason, chunks in reasons.items() for message in self.add(list(chunks), reason)]

    def drop(self) -> None:
        """They need not be asked for any more."""
        self._pending.clear()
        self._chunks = 0
