"""Which peers' streams can be used: a port may be shut on the way, though the control connection gets through.

On loopback that is known at once. Elsewhere one connection is made first, again and again while the peer is up; until
it is there, bytes go in frames.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Container

from forebay.tiers.p2p.errors import PeerError
from forebay.tiers.p2p.streams import Streams

log = logging.getLogger("forebay.tier.p2p")

AGAIN_S = 1.0
AGAIN_MAX_S = 60.0


class Reaching:
    """Runs on the engine's loop; `streams`, by a peer's name, are those that can be used, read from any thread."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._known: dict[str, Streams] = {}
        self.streams: dict[str, Streams] = {}
        self.counts: Counter[str] = Counter()

    def known(self, name: str, streams: Streams) -> None:
        """A peer has said where its streams are; those from before are over."""
        self._drop(name)
        self._known[name] = streams
        if not streams.place.fingerprint:
            self.streams[name] = streams

    async def reach(self, name: str, streams: Streams) -> None:
        """Try until it can be used, or isn't the one that is known any more."""
        wait_s = AGAIN_S
        while self._known.get(name) is streams:
            try:
                await asyncio.to_thread(streams.reach, self._stall_s)
            except PeerError as error:
                self.counts["streams_unreached"] += 1
                place = f"{streams.place.host} port {streams.place.port}"
                log.warning("p2p: peer %s: %s: %s; its bytes come in frames, which is slower", name, place, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, AGAIN_MAX_S)
                continue
            if self._known.get(name) is streams:
                self.streams[name] = streams
            return

    def only(self, up: Container[str]) -> None:
        """Forget those of peers that aren't up."""
        for name in [name for name in self._known if name not in up]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self.streams.pop(name, None)
        known = self._known.pop(name, None)
        if known is not None:
            known.close()

    def close(self) -> None:
        """Hang up everywhere."""
        self.only(())

    def figures(self) -> dict[str, float]:
        """Gauges and counters."""
        return {"streams_usable": float(len(self.streams))} | {
            name: float(count) for name, count in self.counts.items()
        }
