"""Forgetting on request: all of a namespace, of a tenant, or of what begins with a prefix. Pure, in steps.

A clear covers what is in the pool when it begins; what is stored while it runs is newer, and stays. A prefix covers
the chunks that hold its last tokens and everything that goes on from there. Those before are shared with prompts that
go on otherwise, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.kvstore.chores import REMOVAL
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import ChunkHeader, SlotState

if TYPE_CHECKING:
    from forebay.kvstore.core import StoreCore


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where a prefix ends: behind `tokens` (u32 LE, whole units) of the chunks that follow key `parent`, which is
    at token `start`. `groups` is how many its namespace has."""

    groups: int
    parent: bytes
    start: int
    tokens: bytes
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class Scope:
    """What to forget: of a namespace (all, if empty), of a tenant (None: of all), behind a prefix (None: all).

    A prefix needs its namespace.
    """

    namespace: bytes = b""
    tenant: str | None = None
    prefix: Prefix | None = None

    def covers(self, chunk: Entry | ChunkHeader) -> bool:
        """May this chunk belong to it? Whether a chunk follows a prefix can't be told from the chunk alone: then
        those of the namespace that don't begin before it do."""
        return (
            self.namespace in (b"", chunk.namespace)
            and self.tenant in (None, chunk.tenant)
            and (self.prefix is None or chunk.start >= self.prefix.start)
        )


@dataclass(slots=True, eq=False)
class Clearing:
    """A clear under way. `chunks` counts what is gone; chunks of a later `generation` are newer than it. `then` is
    called at its end, whatever end that is; only if it is `done` all is gone."""

    scope: Scope
    generation: int
    then: Callable[[], None]
    chunks: int = 0
    done: bool = False

    def wants(self, entry: Entry) -> bool:
        """Is this one of its chunks, as far as the chunk alone tells?"""
        old = entry.state is SlotState.COMMITTED and entry.generation <= self.generation
        return old and self.scope.covers(entry)


def clear_steps(core: StoreCore, clearing: Clearing) -> Iterator[int]:
    """Do it, a chunk or a page of the pool a step."""
    prefix = clearing.scope.prefix
    try:
        if prefix is None:
            yield from _everything(core, clearing)
        else:
            yield from _below(core, clearing, prefix.groups, prefix.parent, prefix)
            yield from _orphans(core, clearing, prefix)
        clearing.done = True
    finally:
        clearing.then()


def _retire(core: StoreCore, clearing: Clearing, entry: Entry) -> None:
    core.retire(entry, "cleared")
    clearing.chunks += 1


def _everything(core: StoreCore, clearing: Clearing) -> Iterator[int]:
    for some in core.place.walk():
        for entry in some:
            if clearing.wants(entry):
                _retire(core, clearing, entry)
                yield REMOVAL
        yield 1


def _below(core: StoreCore, clearing: Clearing, groups: int, parent: bytes, prefix: Prefix | None) -> Iterator[int]:
    """All that goes on from a key; with a prefix, only what begins with its tokens. Goes down in all groups at once,
    since a group may lack chunks that another one has."""
    parents = [parent]
    while parents:
        parent = parents.pop()
        for group in range(groups):
            if prefix is None:
                children = list(core.table.children(group, parent))
            else:
                children = list(core.table.beginning(group, parent, prefix.tokens, prefix.extra))
            for child in children:
                if clearing.wants(child):
                    parents.append(child.key)
                    _retire(core, clearing, child)
                    yield REMOVAL
        prefix = None


def _orphans(core: StoreCore, clearing: Clearing, prefix: Prefix) -> Iterator[int]:
    """Chunks whose parents have been evicted: nothing tells what they go on from, so they have to go as well.

    Most can't be read anyway as long as their parents aren't back.
    """
    for some in core.place.walk():
        for entry in some:
            deeper = entry.start > prefix.start and clearing.wants(entry)
            if deeper and all(core.table.get(group, entry.parent) is None for group in range(prefix.groups)):
                _retire(core, clearing, entry)
                yield from _below(core, clearing, prefix.groups, entry.key, None)
        yield 1
