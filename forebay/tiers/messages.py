"""What the daemon and a tier's process say to each other: one frame a message over a socket pair.

    daemon -> tier    Start, Attach (+ descriptors), NoteNamespace, Lookup, Store, Load, Forget, ClearTier,
                      GetTierStats, Stop
    tier -> daemon    Started | StartFailed, LookupDone, Finished, Changes, Cleared, Forgotten, TierStatsReply

Messages are handled in the order in which they were sent. Answers to requests carry their `rid`; results of
jobs their job's id.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from forebay.ipc.framing import Codec
from forebay.tiers.base import (
    ChunkId,
    ClearScope,
    JobResult,
    LoadJob,
    LookupResult,
    Query,
    StoreJob,
    TierChange,
    TierStats,
)

BATCH = 256
"""Jobs, results or changes in one message: with headers of a few KiB far below a frame's cap."""

OptionValue: TypeAlias = str | int | float | bool | None


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class's name."""


class Start(Message, frozen=True):
    """First message: which tier this process is. `kind` is fs, memory, or `module:Class`."""

    kind: str
    name: str
    options: dict[str, OptionValue]


class Attach(Message, frozen=True):
    """Extents that jobs may name from now on; their descriptors come with this frame, in the same order."""

    extents: tuple[int, ...]


class NoteNamespace(Message, frozen=True):
    """What the namespace of this id is, in its canonical encoding."""

    namespace: bytes
    encoded: bytes


class Lookup(Message, frozen=True):
    """Answered by LookupDone, at the latest after `timeout_s`; what isn't known by then is `retry`."""

    rid: int
    queries: list[Query]
    timeout_s: float


class Store(Message, frozen=True):
    """Each job ends in exactly one JobResult."""

    jobs: list[StoreJob]


class Load(Message, frozen=True):
    """Each job ends in exactly one JobResult."""

    jobs: list[LoadJob]


class Forget(Message, frozen=True):
    """Remove these chunks. Answered by Forgotten."""

    rid: int
    chunks: list[ChunkId]
    reason: str


class ClearTier(Message, frozen=True):
    """Remove what a scope covers. Answered by Cleared."""

    rid: int
    scope: ClearScope


class GetTierStats(Message, frozen=True):
    """Answered by TierStatsReply. Also the daemon's question whether the process still answers."""

    rid: int


class Stop(Message, frozen=True):
    """Finish what is being written, then exit."""


class Started(Message, frozen=True):
    """The tier is ready."""

    pid: int


class StartFailed(Message, frozen=True):
    """The tier can't start, and the process exits. `error` names a class of `forebay.errors`."""

    error: str
    message: str


class LookupDone(Message, frozen=True):
    """One result a query, in the queries' order."""

    rid: int
    results: list[LookupResult]


class Finished(Message, frozen=True):
    """The tier doesn't touch these jobs' memory any more."""

    results: list[JobResult]


class Changes(Message, frozen=True):
    """Arrivals and removals in the order in which they became true."""

    changes: list[TierChange]


class Cleared(Message, frozen=True):
    """How many chunks the clear removed from sight; None if the tier can't tell what is meant."""

    rid: int
    count: int | None


class Forgotten(Message, frozen=True):
    """These chunks are out of sight, and won't come back with the next process."""

    rid: int


class TierStatsReply(Message, frozen=True):
    """Present figures of the tier and of its process."""

    rid: int
    stats: TierStats


ToTier: TypeAlias = Start | Attach | NoteNamespace | Lookup | Store | Load | Forget | ClearTier | GetTierStats | Stop
FromTier: TypeAlias = Started | StartFailed | LookupDone | Finished | Changes | Cleared | Forgotten | TierStatsReply


def to_tier_codec() -> Codec[ToTier]:
    """Frames that the daemon sends."""
    return Codec(ToTier)


def from_tier_codec() -> Codec[FromTier]:
    """Frames that a tier's process sends."""
    return Codec(FromTier)
