"""What the scheduler's process tells the ranks, once a step: plain facts that travel with the engine's own messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.kvstore.protocol import ChunkRead

Tables = tuple[tuple[int, ...], ...]
"""Block ids by the engine's group, from the request's first token on."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bring tokens [first, hit) of a request into its blocks. The chunks stay pinned until all ranks have answered."""

    request: str
    boot: bytes
    first: int
    hit: int
    chunks: tuple[ChunkRead, ...]
    tables: Tables


@dataclass(frozen=True, slots=True)
class Span:
    """Store tokens [start, end), one chunk, in those of our `groups` that are whole. `tables` are cut to it: each
    begins with the block that holds token `start`."""

    request: str
    tenant: str
    start: int
    end: int
    key: bytes
    parent: bytes
    tokens: bytes
    extra: bytes
    groups: tuple[int, ...]
    tables: Tables


@dataclass(slots=True)
class Orders:
    """One step's. `spans` are complete when its forward has run; `tails` are of finished requests, whose blocks stay
    until they are reported as sent. `namespace` is an encoded one, given again with every order."""

    namespace: bytes = b""
    loads: list[Load] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    tails: list[Span] = field(default_factory=list)
    idle: bool = False
    """Nothing is computed in this step, so the engine waits for what is ordered here."""
