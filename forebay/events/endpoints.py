"""How a store's events go out at one endpoint: for whom, and so in which form.

    consumer      maps/arrays  hashes   extra keys  topic            orphans    numbers
    forebay       maps         u64      yes         kv@owner@model   told       grow over restarts
    dynamo        as forebay
    llm-d         arrays       u64      no place    kv@owner@model   held back  grow over restarts
    vllm-router   maps         u64      no          (empty)          held back  from 0 at each start, without holes

Each row is what such a consumer was seen to want (docs/events.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.events.publisher import StreamOptions, restart_safe_seq
from forebay.events.schema import WireProfile

Consumer = Literal["forebay", "dynamo", "llm-d", "vllm-router"]
CONSUMERS: tuple[Consumer, ...] = ("forebay", "dynamo", "llm-d", "vllm-router")


@dataclass(frozen=True, slots=True)
class EndpointRule:
    """One endpoint, with its replay socket if it has one. `keys` is a directory of CURVE keys; it must be given off
    loopback. Without `tokens` token ids are withheld, with `whole_keys` hashes are all 32 bytes."""

    endpoint: str
    replay: str | None = None
    consumer: Consumer = "forebay"
    tokens: bool = True
    whole_keys: bool = False
    keys: str | None = None

    @property
    def anchored(self) -> bool:
        """Whether blocks are told after their parents only."""
        return self.consumer in ("llm-d", "vllm-router")

    @property
    def topic(self) -> str | None:
        """The topic of all streams here; None gives each one of its own."""
        return "" if self.consumer == "vllm-router" else None

    def options(self, epoch: str, now: float) -> StreamOptions:
        """Of the streams of a process with this boot id that starts now (wall clock in seconds)."""
        strict = self.consumer == "vllm-router"
        profile = WireProfile(
            encoding="array" if self.consumer == "llm-d" else "map",
            hash_format="bytes32" if self.whole_keys else "u64",
            tokens=self.tokens,
            extensions=not strict,
        )
        # Consumers that know no epochs must see numbers that only grow, over restarts too; those that want every
        # number from the first must see them go back.
        first = 0 if strict else restart_safe_seq(now)
        return StreamOptions(epoch=epoch, first_seq=first, profile=profile, contiguous=strict)
