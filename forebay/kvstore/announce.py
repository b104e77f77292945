"""From facts to KV events."""

from __future__ import annotations

from forebay.kvstore.core import StoreCore
from forebay.kvstore.facts import HostFact
from forebay.tiers.base import TierChange


class Announcer:
    """Publishes what the store holds, one stream a namespace."""

    core: StoreCore

    def __init__(self, boot: bytes, events: str | None, replay: str | None) -> None:
        self._boot, self._events, self._replay = boot, events, replay

    def register(self, namespace_id: bytes) -> None:
        pass

    def host(self, fact: HostFact) -> None:
        pass

    def tier(self, name: str, change: TierChange) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass
