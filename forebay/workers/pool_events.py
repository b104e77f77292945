"""KV events of the device pool: what the engine's thread saw, published from the server's loop.

A unit is announced once, by the full-attention group: all groups have it when it is computed or loaded, and
what a window group drops later takes nothing from a longer prefix. So one hash never is removed twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from forebay.events.publisher import EventPublisher, StreamOptions, restart_safe_seq
from forebay.events.schema import EVICTED, GPU, LOCAL, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from forebay.events.sockets import CurveServer
from forebay.kvstore.identity import MATCH_UNIT

TICK_S = 0.5
HELD_MAX = 1 << 20
"""Units that the mirror for snapshots remembers at most; a pool of more answers old replays from its ring."""


class PoolEvents:
    """A `PoolListener`. `stored`, `removed` and `flush` belong to the engine's thread, the rest to the loop's.

    Without an endpoint it does nothing; one off loopback takes `keys`, a directory of CURVE keys. Numbers begin at the
    wall clock (`clock`, in seconds), above all that an earlier worker on this endpoint has used: a consumer that knows
    no epochs then finds a gap and asks, instead of passing over what it takes for old.
    """

    def __init__(
        self, endpoint: str | None, replay: str | None, epoch: str, topic: str, clock: Callable[[], float] = time.time,
        keys: Path | None = None, held_max: int = HELD_MAX,
    ) -> None:  # fmt: skip
        self.group, self.held_max, self._untold = 0, held_max, 0
        self._epoch, self._clock = epoch, clock
        self._pending: list[KVEvent] = []
        self._held: dict[bytes, BlockStored] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._publisher: EventPublisher | None = None
        if endpoint is not None:
            self._publisher = EventPublisher(
                endpoint,
                topic=topic,
                replay=replay,
                options=StreamOptions(epoch=epoch, first_seq=restart_safe_seq(clock())),
                snapshot=lambda: list(self._held.values()),
                curve=None if keys is None else _curve(keys),
            )

    @property
    def endpoint(self) -> str | None:
        """Where subscribers connect, with the real port."""
        return self._publisher.endpoint if self._publisher else None

    @property
    def replay_endpoint(self) -> str | None:
        """Where replay requests go, with the real port."""
        return self._publisher.replay_endpoint if self._publisher else None

    # --- from the engine's thread ------------------------------------------------------------------------

    def stored(self, group: int, parent: bytes | None, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        """See `PoolListener`."""
        if self._publisher is not None and group == self.group:
            hashes: list[int | bytes] = list(keys)
            event = BlockStored(hashes, parent, list(tokens), MATCH_UNIT, medium=GPU, locality=LOCAL)
            self._pending.append(event)

    def removed(self, group: int, key: bytes) -> None:
        """See `PoolListener`."""
        if self._publisher is not None and group == self.group:
            self._pending.append(BlockRemoved([key], GPU, locality=LOCAL, reason=EVICTED))

    def flush(self) -> None:
        """Hand over what happened since the last time."""
        if self._pending and self._loop is not None:
            events, self._pending = self._pending, []
            self._loop.call_soon_threadsafe(self._publish, events)

    # --- on the loop -------------------------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to publish. A worker that starts holds nothing, whatever its predecessor had announced."""
        self._loop = loop
        if self._publisher is None:
            return
        self._publisher.publish([AllBlocksCleared()], self._clock())
        for descriptor in self._publisher.fds:
            loop.add_reader(descriptor, self._poll)
        self._ticker = loop.create_task(self._tick(self._publisher))

    def stats(self) -> dict[str, float]:
        """The publisher's counters and gauges, and the units that snapshots have (`untold`: that they lack)."""
        if self._publisher is None:
            return {}
        values = {f"events.{name}": float(value) for name, value in asdict(self._publisher.stats()).items()}
        mine = {"held": len(self._held), "held_max": self.held_max, "untold": self._untold}
        return values | {f"events.{name}": float(value) for name, value in mine.items()}

    def close(self) -> None:
        """Close the sockets."""
        if self._publisher is None:
            return
        if self._ticker is not None:
            self._ticker.cancel()
        if self._loop is not None:
            for descriptor in self._publisher.fds:
                self._loop.remove_reader(descriptor)
        self._publisher.close()

    def _publish(self, events: list[KVEvent]) -> None:
        assert self._publisher is not None
        for event in events:
            self._mirror(event)
        self._publisher.publish(events, self._clock())

    def _mirror(self, event: KVEvent) -> None:
        if isinstance(event, BlockRemoved):
            for key in event.block_hashes:
                assert isinstance(key, bytes)
                self._held.pop(key, None)
        elif isinstance(event, BlockStored):
            if len(self._held) + len(event.block_hashes) > self.held_max:
                self._untold += len(event.block_hashes)
                return
            parent = event.parent_block_hash
            for index, key in enumerate(event.block_hashes):
                assert isinstance(key, bytes)
                tokens = event.token_ids[index * MATCH_UNIT : (index + 1) * MATCH_UNIT]
                self._held[key] = BlockStored([key], parent, tokens, MATCH_UNIT, medium=GPU, locality=LOCAL)
                parent = key

    async def _tick(self, publisher: EventPublisher) -> None:
        while True:
            publisher.tick(self._clock())
            self._poll()
            await asyncio.sleep(TICK_S)

    def _poll(self) -> None:
        # The descriptors are edge-triggered: ask until there is nothing more, a slice at a time.
        if self._publisher is not None and self._publisher.poll_replay() and self._loop is not None:
            self._loop.call_soon(self._poll)


def _curve(directory: Path) -> CurveServer:
    """The keys there: the worker's pair, and those of all that may listen. Raises ConfigError."""
    from forebay.tiers.p2p.keys import allowed, own_pair

    return CurveServer(own_pair(directory).secret, frozenset(allowed(directory)))
