"""What a publisher remembers, so that a consumer that missed something can catch up.

    sequence numbers   0 . . . . . . . . begin ============= next
                       gone from memory  |  the ring, replayed as it was

A request from before `begin` gets a compacted history instead, if there is a snapshot to make it from: the
removals since then that nobody stored again, then the present state, under the sequence numbers that end
right before the ring's next batch. So the consumer's own gap detection goes on working.

There are consumers that refuse an answer in which a number is missing. For them (`contiguous`) the numbers before the
compacted history are filled with empty batches, up to a million of them.

A consumer that knows snapshots asks for one and gets the present state under one number, that of the batch after
which it is true, and then what the ring has from there on. It forgets what it believed; nothing has to fit into
the numbers that it missed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from forebay.events.codec import encode_event
from forebay.events.errors import EventEncodeError
from forebay.events.schema import (
    SNAPSHOT,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    WireProfile,
)

# Gives events for all that is held, parents first. It may be consumed while the state goes on changing: what
# goes meanwhile may be left out, what comes needn't be in it.
SnapshotSource = Callable[[], Iterable[BlockStored]]
_SNAPSHOT_TRIES = 3


class Batch(NamedTuple):
    """A published batch as bytes."""

    seq: int
    payload: bytes


class Place(NamedTuple):
    """Where a removed block was."""

    medium: str | None
    locality: str | None
    group: int | None
    block: BlockHash


class ReplayRing:
    """The last batches, bounded by count and by payload bytes. Sequence numbers in it have no holes."""

    def __init__(self, max_batches: int, max_bytes: int, first: int = 0) -> None:
        assert max_batches > 0 and max_bytes > 0 and first >= 0, (max_batches, max_bytes, first)
        self.max_batches, self.max_bytes = max_batches, max_bytes
        self.bytes = 0
        self.next = first
        self._payloads: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def begin(self) -> int:
        """The oldest sequence number that is still here; `next` if none is."""
        return self.next - len(self._payloads)

    def append(self, payload: bytes) -> int:
        """Keep the batch under the next sequence number, which is returned."""
        seq = self.next
        self.next += 1
        self._payloads.append(payload)
        self.bytes += len(payload)
        while len(self._payloads) > self.max_batches or self.bytes > self.max_bytes:
            self.bytes -= len(self._payloads.popleft())
        return seq

    def skip(self, count: int) -> None:
        """Use up sequence numbers of batches that were lost: what came before can't be replayed as it was."""
        self.next += count
        self.bytes = 0
        self._payloads.clear()

    def since(self, start: int, until: int) -> Iterator[Batch]:
        """Batches from `start` up to, not including, `until`. Those that leave the ring meanwhile are left out."""
        seq = start
        while (seq := max(seq, self.begin)) < min(until, self.next):
            yield Batch(seq, self._payloads[seq - self.begin])
            seq += 1


class Tombstones:
    """Which blocks were removed and not stored again, with the batch that said so. Bounded; `horizon` is the
    first sequence number from which on nothing has been forgotten. With a capacity of 0 everybody is told to clear."""

    def __init__(self, capacity: int, horizon: int = 0) -> None:
        self.capacity = capacity
        self.horizon = horizon
        self._removed: OrderedDict[Place, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._removed)

    def note(self, seq: int, events: Sequence[KVEvent]) -> None:
        """Take the batch `seq` into account."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._forget_before(seq + 1)
                continue
            for block in event.block_hashes:
                place = Place(event.medium, event.locality, event.group_idx, block)
                self._removed.pop(place, None)
                if isinstance(event, BlockRemoved):
                    self._removed[place] = seq
        while len(self._removed) > self.capacity:
            _, seq = self._removed.popitem(last=False)
            self.horizon = max(self.horizon, seq + 1)

    def since(self, start: int) -> list[KVEvent]:
        """Events that bring a consumer which knows all before `start` to a subset of the present state."""
        if start < self.horizon or not self.capacity:
            return [AllBlocksCleared(reason=SNAPSHOT)]
        by_place: dict[Place, list[BlockHash]] = {}
        for place, seq in self._removed.items():
            if seq >= start:
                by_place.setdefault(place._replace(block=0), []).append(place.block)
        return [
            BlockRemoved(blocks, place.medium, place.group, place.locality, reason=SNAPSHOT)
            for place, blocks in by_place.items()
        ]

    def _forget_before(self, seq: int) -> None:
        self._removed.clear()
        self.horizon = seq


class _Sized(NamedTuple):
    """An encoded event and how many blocks it speaks of."""

    data: bytes
    blocks: int


@dataclass(slots=True)
class _Snapshot:
    """The state from the batch `next` on, encoded bit by bit. What changed since then is in the ring."""

    next: int
    made_at: float
    source: Iterator[BlockStored]
    events: list[_Sized] = field(default_factory=list)
    bytes: int = 0
    complete: bool = False


class History:
    """Ring, tombstones and snapshot of one stream. No I/O; not thread-safe."""

    # A snapshot costs time and memory: it is made at most this often (the ring fills in what came after
    # it), and kept no longer.
    SNAPSHOT_SECONDS = 10.0
    BLOCKS_PER_BATCH = 1024
    FILLERS_MAX = 1_000_000

    def __init__(
        self,
        ring: ReplayRing,
        profile: WireProfile,
        *,
        dp_rank: int | None,
        snapshot: SnapshotSource | None,
        tombstones: int,
        contiguous: bool = False,
    ) -> None:
        self.contiguous = contiguous
        self.ring = ring
        self.tombstones = Tombstones(tombstones, horizon=ring.next)
        self.compactions = 0
        self.snapshots = 0
        self._profile, self._dp_rank, self._source = profile, dp_rank, snapshot
        self._kept: _Snapshot | None = None

    def append(self, events: Sequence[KVEvent], payload: bytes) -> int:
        """Remember a batch; returns its sequence number."""
        if self._source is not None and self.tombstones.capacity:
            self.tombstones.note(self.ring.next, events)
        return self.ring.append(payload)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the encoded snapshot that is kept for the next request."""
        return self._kept.bytes if self._kept else 0

    def tick(self, now: float) -> None:
        """Let go of a snapshot that is too old to be used again."""
        if self._kept is not None and not 0 <= now - self._kept.made_at <= self.SNAPSHOT_SECONDS:
            self._kept = None

    def lose(self, count: int) -> None:
        """`count` batches could not be published: leave a gap that consumers see and ask about."""
        if self._source is not None:
            # What they said is unknown, so nobody can be brought up to date by removals alone.
            self.tombstones.horizon = self.ring.next + count
        self.ring.skip(count)

    def replay(self, start: int, ts: float, epoch: str | None) -> Iterator[Batch | None]:
        """Batches that take a consumer from `start` to now. Lazy: publishing may go on meanwhile.

        None among them means that a slice of work was done and nothing is ready yet.
        """
        if start >= self.ring.begin or self._source is None:
            return self.ring.since(start, self.ring.next)
        return self._compacted(self._source, start, ts, epoch)

    def present(self, ts: float, epoch: str | None) -> Iterator[Batch | None]:
        """A snapshot under the number at which it is true, then what came after it. Nothing without a source, or
        before the first batch. Lazy, with None as in `replay`."""
        if self._source is None or self.ring.next == 0:
            return
        self.snapshots += 1
        for _ in range(_SNAPSHOT_TRIES):
            snapshot = self._snapshot(self._source, -1, ts)
            while self._prepare(snapshot, epoch):
                yield None
            if snapshot.next >= self.ring.begin:
                break
        else:
            return
        until = self.ring.next
        for payload in self._pack(snapshot.events, len(snapshot.events) + 1, ts):
            yield Batch(snapshot.next - 1, payload)
        yield from self.ring.since(snapshot.next, until)

    def _compacted(self, source: SnapshotSource, start: int, ts: float, epoch: str | None) -> Iterator[Batch | None]:
        self.compactions += 1
        for _ in range(_SNAPSHOT_TRIES):
            snapshot = self._snapshot(source, start, ts)
            while self._prepare(snapshot, epoch):
                yield None
            if snapshot.next >= self.ring.begin:
                break
        else:
            # So much is published that the ring runs past every snapshot: the consumer keeps its gap.
            return
        removals = [] if start == 0 else self.tombstones.since(start)
        known = [sized for event in removals for sized in self._encoded(event, epoch)] + snapshot.events
        payloads = self._pack(known, snapshot.next - start, ts)
        until = self.ring.next
        first = snapshot.next - len(payloads)
        if self.contiguous:
            yield from self._filled(start, first, ts)
        for seq, payload in enumerate(payloads, first):
            yield Batch(seq, payload)
        yield from self.ring.since(snapshot.next, until)

    def _filled(self, start: int, until: int, ts: float) -> Iterator[Batch | None]:
        """Empty batches from `start` up to, not including, `until`: the last `FILLERS_MAX` of them."""
        nothing = msgspec.msgpack.encode([ts, [], self._dp_rank])
        for seq in range(max(start, until - self.FILLERS_MAX), until):
            yield Batch(seq, nothing)

    def _snapshot(self, source: SnapshotSource, start: int, ts: float) -> _Snapshot:
        """The kept snapshot if it fits between `start` and the ring, else a new one."""
        self.tick(ts)
        kept = self._kept
        if kept is None or kept.next <= start or kept.next < self.ring.begin:
            kept = self._kept = _Snapshot(self.ring.next, ts, iter(source()))
        return kept

    def _prepare(self, snapshot: _Snapshot, epoch: str | None) -> bool:
        """Encode another slice; False once it is complete."""
        blocks = 0
        while not snapshot.complete and blocks < self.BLOCKS_PER_BATCH:
            event = next(snapshot.source, None)
            if event is None:
                snapshot.complete = True
                break
            blocks += len(event.block_hashes)
            for sized in self._encoded(event, epoch):
                snapshot.events.append(sized)
                snapshot.bytes += len(sized.data)
        return not snapshot.complete

    def _encoded(self, event: KVEvent, epoch: str | None) -> list[_Sized]:
        """The event as one of a snapshot; nothing if this profile can't carry it (then it never was published)."""
        told = msgspec.structs.replace(event, epoch=epoch, reason=SNAPSHOT)
        size = 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        try:
            return [_Sized(encode_event(told, self._profile), size)]
        except EventEncodeError:
            return []

    def _pack(self, events: Sequence[_Sized], most: int, ts: float) -> list[bytes]:
        """Payloads of bounded size, but never more than `most` of them; at least one."""
        assert most >= 1, "a compacted history has room for at least one batch"
        total = sum(event.blocks for event in events) + len(events)
        size = max(self.BLOCKS_PER_BATCH, -(-total // most))
        groups: list[list[msgspec.Raw]] = [[]]
        filled = 0
        for event in events:
            if filled and filled + event.blocks + 1 > size and len(groups) < most:
                groups.append([])
                filled = 0
            groups[-1].append(msgspec.Raw(event.data))
            filled += event.blocks + 1
        return [msgspec.msgpack.encode([ts, group, self._dp_rank]) for group in groups]
