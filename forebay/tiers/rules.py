"""What a store is told about one of its tiers: its kind and options, and when chunks are copied to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forebay.tiers.messages import OptionValue

WRITE_THROUGH, SECOND_HIT, EVICT, NEVER = "write-through", "second-hit", "evict", "never"
COPY = (WRITE_THROUGH, SECOND_HIT, EVICT, NEVER)


@dataclass(frozen=True, slots=True)
class TierRule:
    """One tier. `copy` is when a chunk goes there:

    write-through   as soon as it is committed, or another tier has brought it
    second-hit      when a lookup has hit it for the second time
    evict           shortly before it would be evicted; what must go sooner is lost to this tier, and counted
    never           a tier that is only read

    `pinned_share` of the pool is what its copies may keep in place at a time (more is dropped and counted); the queues
    bound what its process has in its hands, in bytes.
    """

    kind: str
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    copy: str = WRITE_THROUGH
    pinned_share: float = 0.25
    store_queue: int = 256 << 20
    load_queue: int = 256 << 20
