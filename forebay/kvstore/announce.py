"""From facts to KV events: what the store and its tiers hold, one stream and one sequence a namespace and endpoint.

Facts of one turn of the loop leave as one batch. Streams exist only where `--events` or an endpoint of the
configuration asks for them; without these nothing here costs anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.errors import CorruptChunk
from forebay.events.anchored import Anchored
from forebay.events.endpoints import EndpointRule
from forebay.events.errors import EventError
from forebay.events.projection import HOST_TIER, STORE_TIERS, Placement, Projection
from forebay.events.schema import CPU, LOCAL, REMOTE, STORAGE, KVEvent
from forebay.events.sockets import CurveServer, Sockets
from forebay.events.streams import NamespaceStreams
from forebay.events.units import UnitChunk
from forebay.kvstore.core import StoreCore
from forebay.kvstore.facts import HostFact
from forebay.kvstore.header import decode_header
from forebay.kvstore.identity import chain, root_key
from forebay.kvstore.layout import needs_all
from forebay.tiers.base import TierChange
from forebay.tiers.rules import TierRule

log = logging.getLogger(__name__)

POLL_S = 0.02
"""How soon a replay that waits for its reader goes on."""

TICK_S = 1.0
"""How often the clock is looked at when nobody asks for anything."""

PRIMARY = "events"
"""The endpoint of `--events` among the others."""

PLACEMENTS: Mapping[str, Placement] = {
    "fs": Placement(STORAGE, LOCAL),
    "s3": Placement(STORAGE, REMOTE),
    "p2p": Placement(CPU, REMOTE),
    "mooncake": Placement(CPU, REMOTE),
    "memory": Placement(CPU, LOCAL),
}
"""What routers are told of a tier, by its kind. Of somebody else's: the slowest there is."""


def placements(tiers: Mapping[str, TierRule]) -> dict[str, Placement]:
    """Where a store's tiers are, by their names."""
    theirs = Placement(STORAGE, REMOTE)
    return {HOST_TIER: Placement(CPU, LOCAL)} | {
        name: PLACEMENTS.get(rule.kind, theirs) for name, rule in tiers.items()
    }


@dataclass
class Outlet:
    """The streams of one endpoint, and what their consumers have to be spared."""

    name: str
    rule: EndpointRule
    streams: NamespaceStreams
    anchored: dict[bytes, Anchored] = field(default_factory=dict)

    def open(self, namespace_id: bytes, label: str, projection: Projection) -> None:
        """A stream for this namespace. Raises EventError."""
        if not self.rule.anchored:
            self.streams.open(namespace_id, label, projection.snapshot)
            return
        anchored = self.anchored.setdefault(namespace_id, Anchored())
        self.streams.open(namespace_id, label, anchored.snapshot)

    def publish(self, namespace_id: bytes, events: Sequence[KVEvent], ts: float) -> None:
        """Tell them here, as this endpoint's consumers understand them."""
        anchored = self.anchored.get(namespace_id)
        self.streams.publish(namespace_id, events if anchored is None else anchored.take(events), ts)

    def end(self, namespace_id: bytes) -> None:
        """This namespace's stream ends."""
        self.anchored.pop(namespace_id, None)
        self.streams.end(namespace_id)


@dataclass
class Announcer:
    """Publishes for one store. `core` is set once there is one; all methods run on the daemon's loop.

    `clock` gives the wall time in seconds; `sockets` binds the streams' sockets, None takes ZMQ's. `endpoints` are
    those beside `events`, `tiers` says where the store's tiers are; `keys` is the directory of CURVE keys of `events`.
    """

    boot: bytes
    events: str | None
    replay: str | None
    owner: str
    clock: Callable[[], float] = time.time
    sockets: Sockets | None = None
    endpoints: Mapping[str, EndpointRule] = field(default_factory=dict)
    tiers: Mapping[str, Placement] = field(default_factory=lambda: STORE_TIERS)
    keys: Path | None = None
    core: StoreCore = field(init=False)
    outlets: list[Outlet] = field(default_factory=list)
    projections: dict[bytes, Projection] = field(default_factory=dict)
    _pending: dict[bytes, list[KVEvent]] = field(default_factory=dict)
    _asked_for: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if self.events is not None:
            keys = None if self.keys is None else str(self.keys)
            self._add(PRIMARY, EndpointRule(self.events, self.replay, keys=keys), self.sockets)
        for name, rule in self.endpoints.items():
            self._add(name, rule, None)

    def _add(self, name: str, rule: EndpointRule, sockets: Sockets | None) -> None:
        streams = NamespaceStreams(
            rule.endpoint, owner=self.owner, replay=rule.replay, options=rule.options(self.boot.hex(), self.clock()),
            curve=None if rule.keys is None else _curve(Path(rule.keys)), topic=rule.topic, sockets=sockets,
        )  # fmt: skip
        self.outlets.append(Outlet(name, rule, streams))

    @property
    def streams(self) -> NamespaceStreams | None:
        """Those of the first endpoint."""
        return self.outlets[0].streams if self.outlets else None

    def register(self, namespace_id: bytes) -> None:
        """A namespace is known: it gets its stream."""
        if not self.outlets or namespace_id in self.projections:
            return
        # A latent is held and removed as full attention's rows are, a state as a window's.
        groups = self.core.namespaces[namespace_id].groups
        projection = Projection(["full" if needs_all(group) else "window" for group in groups], self.tiers)
        label = self.core.labels.get(namespace_id, "") or namespace_id.hex()[:16]
        opened = [outlet for outlet in self.outlets if self._opened(outlet, namespace_id, label, projection)]
        if not opened:
            return
        self.projections[namespace_id] = projection
        self._asked_for.set()  # there is one more socket to listen to

    def _opened(self, outlet: Outlet, namespace_id: bytes, label: str, projection: Projection) -> bool:
        try:
            outlet.open(namespace_id, label, projection)
        except EventError as error:
            # The cache is worth more than its events: serve on, and say what isn't told.
            self.core.counters.add("events.streams_refused")
            log.error("no event stream for namespace %s at %s: %s", label, outlet.name, error)
            return False
        return True

    def forget(self, namespace_id: bytes) -> None:
        """A namespace had to make room for others: its stream ends."""
        self._flush()
        if self.projections.pop(namespace_id, None) is not None:
            for outlet in self.outlets:
                outlet.end(namespace_id)

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
        if not self.outlets:
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
        if not self.outlets:
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
        for namespace_id, events in pending.items():
            for outlet in self.outlets:
                outlet.publish(namespace_id, events, self.clock())

    async def serve_replays(self) -> None:
        """Answer replay requests and send heartbeats, for as long as the daemon runs."""
        while self.outlets:
            more = False
            for outlet in self.outlets:
                more = outlet.streams.poll() or more
                outlet.streams.tick(self.clock())
            if more or any(outlet.streams.answering for outlet in self.outlets):
                await asyncio.sleep(0 if more else POLL_S)
            else:
                await self._asked([fd for outlet in self.outlets for fd in outlet.streams.descriptors()])

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
        if not self.outlets:
            return {}
        values: dict[str, float] = {"events.streams": sum(len(outlet.streams) for outlet in self.outlets)}
        for stream in (stream for outlet in self.outlets for stream in outlet.streams.endpoints()):
            for name in stream.stats.__dataclass_fields__:
                key = f"events.{name}"
                values[key] = values.get(key, 0) + float(getattr(stream.stats, name))
        views = [view for projection in self.projections.values() for view in projection.stats().values()]
        values["events.units"] = sum(view.units for view in views)
        values["events.units_max"] = sum(view.max_units for view in views)
        values["events.chunks_untold"] = sum(view.refused for view in views)
        filters = [anchored for outlet in self.outlets for anchored in outlet.anchored.values()]
        values["events.anchored"] = sum(len(anchored) for anchored in filters)
        values["events.anchored_refused"] = sum(anchored.refused for anchored in filters)
        return values

    def places(self) -> dict[str, str]:
        """Where each namespace's stream is, for people."""
        found = {}
        for outlet in self.outlets:
            for stream in outlet.streams.endpoints():
                where = "" if outlet.name == PRIMARY else f" at {outlet.name}"
                label = self.core.labels.get(stream.namespace, "") or stream.namespace.hex()[:16]
                topic = stream.topic or label
                found[f"events {topic}{where}"] = f"{stream.endpoint}, replay {stream.replay_endpoint or 'off'}"
        return found

    def close(self) -> None:
        """Send what is pending and close all streams."""
        self._flush()
        for outlet in self.outlets:
            outlet.streams.close()


def _curve(directory: Path) -> CurveServer:
    """The keys there: this host's pair, and those of all that may listen. Raises ConfigError."""
    from forebay.tiers.p2p.keys import allowed, own_pair

    pair = own_pair(directory)
    return CurveServer(pair.secret, frozenset(allowed(directory)))


def _units(namespace_id: bytes, group: int, start: int, parent: bytes, tokens: bytes, extra: bytes) -> UnitChunk:
    keys = tuple(chain(parent, tokens, extra))
    # A salted chain must not look like a plain one to a router that hashes tokens itself.
    salted = start == 0 and parent != root_key(namespace_id)
    extra_keys = ((f"salt:{parent[:8].hex()}",), *[None] * (len(keys) - 1)) if salted else ()
    return UnitChunk(group, parent if start else None, keys, tokens, extra_keys)
