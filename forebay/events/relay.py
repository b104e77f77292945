"""The compatibility publisher: a store's stream and its workers' own streams, retold as one stream a worker.

    store's stream  --> Holdings --+--> worker 0's stream: the store's chunks as CPU and STORAGE, its own blocks as GPU
    worker 0's own  --> Holdings --+
    worker 1's own  --> Holdings ------> worker 1's stream: the same chunks, and its own blocks

It runs as a process beside the store (`forebay events relay`), so that the daemon's work doesn't grow with the number
of workers. Consumers take `AllBlocksCleared` for every tier of a worker. So nothing is ever cleared here: when a
worker resets its hot buffer or starts again, or when the store does, what is gone is told as removals, tier by tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from forebay.events.anchored import Anchored
from forebay.events.fanout import WorkerStreams
from forebay.events.history import SnapshotSource
from forebay.events.holdings import Holdings
from forebay.events.schema import CLEARED, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, is_known
from forebay.events.subscriber import EventSubscriber, Received

_BATCHES_A_TURN = 256
_REMOVED_BLOCKS = 1024


@dataclass(slots=True, eq=False)
class Source:
    """A stream that is retold: its subscriber, what it made known, and how its events go on.

    `before` is what was known before a restart, until it is clear what is left of it. `anchored` holds orphans back.
    """

    subscriber: EventSubscriber
    publish: Callable[[list[KVEvent], float], None]
    holdings: Holdings
    before: Holdings | None = None
    anchored: Anchored | None = None

    def told(self) -> Iterator[BlockStored]:
        """What has been retold so far, parents first."""
        return self.anchored.snapshot() if self.anchored is not None else (self.before or self.holdings).snapshot()

    def tell(self, events: list[KVEvent], ts: float) -> None:
        """Retell these."""
        told = self.anchored.take(events) if self.anchored is not None else events
        if told:
            self.publish(told, ts)


class Relay:
    """Retells streams. All methods belong to one thread; `turn` is called again and again.

    `workers` maps each worker's name to the subscriber of its own stream, None if it has none. `make_streams` is given
    what the store is told to hold: the `shared` of WorkerStreams. `anchored` is for consumers that drop blocks whose
    parent they don't know. Closing closes subscribers and streams too.
    """

    def __init__(
        self,
        store: EventSubscriber,
        workers: Mapping[str, EventSubscriber | None],
        make_streams: Callable[[SnapshotSource], WorkerStreams],
        *,
        anchored: bool = False,
        max_blocks: int = 1 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self.cleared = 0
        self._anchored = anchored
        self._store = Source(store, self._publish_shared, Holdings(max_blocks=max_blocks), anchored=self._filter())
        self._own: dict[str, Source] = {}
        self.streams = make_streams(self._store.told)
        for worker, subscriber in workers.items():
            self.attach(worker, subscriber, max_blocks=max_blocks)

    @property
    def store_blocks(self) -> Holdings:
        """What the store is believed to hold."""
        return self._store.holdings

    def attach(self, worker: str, subscriber: EventSubscriber | None, *, max_blocks: int = 1 << 20) -> None:
        """Retell this worker's own stream too. Raises as WorkerStreams.attach."""
        if subscriber is None:
            self.streams.attach(worker)
            return

        def publish(events: list[KVEvent], ts: float) -> None:
            self.streams.publish_own(worker, events, ts)

        own = Source(subscriber, publish, Holdings(max_blocks=max_blocks), anchored=self._filter())
        self.streams.attach(worker, own.told)
        self._own[worker] = own

    def _filter(self) -> Anchored | None:
        return Anchored() if self._anchored else None

    def detach(self, worker: str) -> None:
        """The worker has gone: its stream ends."""
        own = self._own.pop(worker, None)
        if own is not None:
            own.subscriber.close()
        self.streams.detach(worker)

    def turn(self, wait: float = 0.0) -> bool:
        """Retell what has come, at most a few hundred batches a source; waits up to `wait` seconds for the store's
        first. True: there may be more."""
        busy = self._retell(self._store, wait)
        for source in list(self._own.values()):
            busy = self._retell(source, 0.0) or busy
        self.streams.tick(self._clock())
        return self.streams.poll() or busy

    def statistics(self) -> dict[str, float]:
        """Counters and gauges; what is known of sources, with its caps, under `store_` and `own_`."""
        values = self.streams.statistics()
        values["cleared"] = self.cleared
        for prefix, sources in (("store_", [self._store]), ("own_", list(self._own.values()))):
            values[f"{prefix}blocks"] = sum(len(source.holdings) for source in sources)
            values[f"{prefix}blocks_max"] = sum(source.holdings.max_blocks for source in sources)
            values[f"{prefix}parked"] = sum(source.holdings.parked for source in sources)
            values[f"{prefix}refused"] = sum(source.holdings.counters.refused for source in sources)
            values[f"{prefix}unknown_media"] = sum(source.holdings.counters.unknown_media for source in sources)
            values[f"{prefix}missed"] = sum(source.holdings.counters.missed for source in sources)
            values[f"{prefix}fences"] = sum(source.holdings.counters.fences for source in sources)
        return values

    def close(self) -> None:
        """Close everything; may block for 200 ms."""
        for source in (self._store, *self._own.values()):
            source.subscriber.close()
        self.streams.close()

    # --- one source --------------------------------------------------------------------------------------

    def _retell(self, source: Source, wait: float) -> bool:
        for _ in range(_BATCHES_A_TURN):
            received = source.subscriber.receive(wait)
            if received is None:
                self._tell_difference(source)
                return False
            wait = 0.0
            self._take(source, received)
        return True

    def _take(self, source: Source, received: Received) -> None:
        if received.restart is not None and source.before is None:
            # Not told yet: what is gone is known once all of the new state has come.
            source.before = source.holdings
            source.holdings = Holdings(max_blocks=source.before.max_blocks, max_parked=source.before.max_parked)
            source.holdings.counters = source.before.counters
        told = [plain for event in received.batch.events for plain in self._explicit(source, event)]
        source.holdings.apply(received)
        if source.before is None and told:
            source.tell(told, received.batch.ts)

    def _explicit(self, source: Source, event: KVEvent) -> list[KVEvent]:
        """The event as it is retold: a clear as the removals that it means, an unknown medium not at all."""
        if isinstance(event, AllBlocksCleared):
            self.cleared += 1
            return _removals(source.holdings, None, CLEARED)
        return [_unowned(event)] if is_known(event) else []

    def _tell_difference(self, source: Source) -> None:
        """After a restart: what is gone, then what is new."""
        if source.before is None:
            return
        before, source.before = source.before, None
        changes: list[KVEvent] = [*_removals(before, source.holdings), *source.holdings.snapshot(beside=before)]
        if changes:
            source.tell(changes, self._clock())

    def _publish_shared(self, events: list[KVEvent], ts: float) -> None:
        self.streams.publish_shared(events, ts)


def _removals(before: Holdings, now: Holdings | None, reason: str | None = None) -> list[KVEvent]:
    """Removals of what was held before and isn't now, tier by tier."""
    told: list[KVEvent] = []
    for place in sorted(before.places(), key=str):
        gone = sorted(before.held(place) - (now.held(place) if now is not None else set()), key=str)
        told += [
            BlockRemoved(gone[at : at + _REMOVED_BLOCKS], place.medium, locality=place.locality, reason=reason)
            for at in range(0, len(gone), _REMOVED_BLOCKS)
        ]
    return told


def _unowned(event: BlockStored | BlockRemoved) -> KVEvent:
    """Without the epoch of the stream that it comes from: the relay's takes its place."""
    return msgspec.structs.replace(event, epoch=None)
