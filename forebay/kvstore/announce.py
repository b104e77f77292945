"""From facts to KV events: what the store and its tiers hold, one stream and one sequence a namespace.

Facts of one turn of the loop leave as one batch. Streams exist only where `--events` asks for them; without
it nothing here costs anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.errors import CorruptChunk
from forebay.events.errors import EventError
from forebay.events.projection import HOST_TIER, Projection
from forebay.events.publisher import StreamOptions, restart_safe_seq
from forebay.events.schema import KVEvent
from forebay.events.sockets import Sockets
from forebay.events.streams import NamespaceStreams
from forebay.events.units import UnitChunk
from forebay.kvstore.core import StoreCore
from forebay.kvstore.facts import HostFact
from forebay.kvstore.header import decode_header
from forebay.kvstore.identity import chain, root_key
from forebay.kvstore.layout import needs_all
from forebay.tiers.base import TierChange

log = logging.getLogger(__name__)

POLL_S = 0.02
"""How soon a replay that waits for its reader goes on."""

TICK_S = 1.0
"""How often the clock is looked at when nobody asks for anything."""


@dataclass
class Announcer:
    """Publishes for one store. `core` is set once there is one; all methods run on the daemon's loop.

    `clock` gives the wall time in seconds; `sockets` binds the streams' sockets, None takes ZMQ's.
    """

    boot: bytes
    events: str | None
    replay: str | None
    owner: str
    clock: Callable[[], float] = time.time
    sockets: Sockets | None = None
    core: StoreCore = field(init=False)
    streams: NamespaceStreams | None = None
    projections: dict[bytes, Projection] = field(default_factory=dict)
    _pending: dict[bytes, list[KVEvent]] = field(default_factory=dict)
    _asked_for: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if self.events is not None:
            # Consumers that know no epochs must see numbers that only grow, over restarts too.
            options = StreamOptions(epoch=self.boot.hex(), first_seq=restart_safe_seq(self.clock()))
            self.streams = NamespaceStreams(
                self.events, owner=self.owner, replay=self.replay, options=options, sockets=self.sockets
            )

    def register(self, namespace_id: bytes) -> None:
        """A namespace is known: it gets its stream."""
        if self.streams is None or namespace_id in self.projections:
            return
        # A latent is held and removed as full attention's rows are, a state as a window's.
        groups = self.core.namespaces[namespace_id].groups
        projection = Projection(["full" if needs_all(group) else "window" for group in groups])
        label = self.core.labels.get(namespace_id, "") or namespace_id.hex()[:16]
        try:
            self.streams.open(namespace_id, label, projection.snapshot)
        except EventError as error:
            # The cache is worth more than its events: serve on, and say what isn't told.
            self.core.counters.add("events.streams_refused")
            log.error("no event stream for namespace %s: %s", label, error)
            return
        self.projections[namespace_id] = projection
        self._asked_for.set()  # there is one more socket to listen to

    def forget(self, namespace_id: bytes) -> None:
        """A namespace had to make room for others: its stream ends."""
        self._flush()
        if self.projections.pop(namespace_id, None) is not None and self.streams is not None:
            self.streams.end(namespace_id)

    def host(self, fact: HostFact) -> None:
        """Host memory has gained or lost a chunk."""
        projection = self._projection(fact.entry.namespace)
        if projection is None:
            return
        entry = fact.entry
        if fact.stored:
            try:
                header = entry.header()
            except CorruptChunk as error:  # somebody wrote over it since: it is found out when it is read
                self.core.counters.add("events.untold")
                log.error("a chunk is stored that can't be told of: %s", error)
                return
            chunk = _units(entry.namespace, entry.group, entry.start, entry.parent, header.tokens, header.extra)
            self._queue(entry.namespace, projection.chunk_stored(HOST_TIER, chunk))
        else:
            removed = projection.chunk_removed(HOST_TIER, entry.group, entry.key, fact.reason)
            self._queue(entry.namespace, removed)

    def tier(self, name: str, change: TierChange) -> None:
        """A tier has gained or lost a chunk."""
        if self.streams is None:
            return
        group, key = change.chunk.group, change.chunk.key
        if not change.stored:
            for namespace_id, projection in self.projections.items():
                self._queue(namespace_id, projection.chunk_removed(name, group, key, change.reason))
            return
        try:
            header = decode_header(change.header)
        except CorruptChunk as error:
            log.error("tier %s told of a chunk without saying which: %s", name, error)
            return
        stored_in = self._projection(header.namespace)
        if stored_in is not None:
            chunk = _units(header.namespace, group, header.start, header.parent, header.tokens, header.extra)
            self._queue(header.namespace, stored_in.chunk_stored(name, chunk))

    def _projection(self, namespace_id: bytes) -> Projection | None:
        if self.streams is None:
            return None
        if namespace_id not in self.projections and namespace_id in self.core.namespaces:
            self.register(namespace_id)
        return self.projections.get(namespace_id)

    def _queue(self, namespace_id: bytes, events: Sequence[KVEvent]) -> None:
        if not events:
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.setdefault(namespace_id, []).extend(events)

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        if self.streams is not None:
            for namespace_id, events in pending.items():
                self.streams.publish(namespace_id, events, self.clock())

    async def serve_replays(self) -> None:
        """Answer replay requests and send heartbeats, for as long as the daemon runs."""
        while self.streams is not None:
            more = self.streams.poll()
            self.streams.tick(self.clock())
            if more or self.streams.answering:
                await asyncio.sleep(0 if more else POLL_S)
            else:
                await self._asked(self.streams.descriptors())

    async def _asked(self, descriptors: Sequence[int]) -> None:
        """Until somebody asks for something, or it is time to look at the clock."""
        if not descriptors:
            await asyncio.sleep(POLL_S)
            return
        loop = asyncio.get_running_loop()
        self._asked_for.clear()
        for descriptor in descriptors:
            loop.add_reader(descriptor, self._asked_for.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._asked_for.wait()
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)

    def figures(self) -> dict[str, float]:
        """Counters and gauges of all streams."""
        if self.streams is None:
            return {}
        values: dict[str, float] = {"events.streams": len(self.streams)}
        for stream in self.streams.endpoints():
            for name in stream.stats.__dataclass_fields__:
                key = f"events.{name}"
                values[key] = values.get(key, 0) + float(getattr(stream.stats, name))
        return values

    def places(self) -> dict[str, str]:
        """Where each namespace's stream is, for people."""
        if self.streams is None:
            return {}
        return {
            f"events {stream.topic}": f"{stream.endpoint}, replay {stream.replay_endpoint or 'off'}"
            for stream in self.streams.endpoints()
        }

    def close(self) -> None:
        """Send what is pending and close all streams."""
        self._flush()
        if self.streams is not None:
            self.streams.close()


def _units(namespace_id: bytes, group: int, start: int, parent: bytes, tokens: bytes, extra: bytes) -> UnitChunk:
    keys = tuple(chain(parent, tokens, extra))
    # A salted chain must not look like a plain one to a router that hashes tokens itself.
    salted = start == 0 and parent != root_key(namespace_id)
    extra_keys = ((f"salt:{parent[:8].hex()}",), *[None] * (len(keys) - 1)) if salted else ()
    return UnitChunk(group, parent if start else None, keys, tokens, extra_keys)
