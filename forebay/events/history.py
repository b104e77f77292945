"""What a publisher remembers, so that a consumer that missed something can catch up.

    sequence numbers   0 . . . . . . . . begin ============= next
                       gone from memory  |  the ring, replayed as it was

A request from before `begin` gets a compacted history instead, if there is a snapshot to make it from: the
removals since then that nobody stored again, then the present state, under the sequence numbers that end
right before the ring's next batch. So the consumer's own gap detection goes on working.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

SnapshotSource = Callable[[], Sequence[BlockStored]]


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

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        assert max_batches > 0 and max_bytes > 0, (max_batches, max_bytes)
        self.max_batches, self.max_bytes = max_batches, max_bytes
        self.bytes = 0
        self.next = 0
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
    first sequence number from which on nothing has been forgotten."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.horizon = 0
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
        if start < self.horizon:
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


@dataclass(frozen=True, slots=True)
class _State:
    """The present state as of the batch before `next`."""

    next: int
    made_at: float
    events: list[_Sized]


class History:
    """Ring, tombstones and snapshot of one stream. No I/O; not thread-safe."""

    # A snapshot costs time and memory: it is made at most this often (the ring fills in what came after
    # it), and kept no longer.
    SNAPSHOT_SECONDS = 10.0
    BLOCKS_PER_BATCH = 1024

    def __init__(
        self,
        ring: ReplayRing,
        profile: WireProfile,
        *,
        dp_rank: int | None,
        snapshot: SnapshotSource | None,
        tombstones: int,
    ) -> None:
        self.ring = ring
        self.tombstones = Tombstones(tombstones)
        self.compactions = 0
        self._profile, self._dp_rank, self._snapshot = profile, dp_rank, snapshot
        self._state: _State | None = None

    def append(self, events: Sequence[KVEvent], payload: bytes) -> int:
        """Remember a batch; returns its sequence number."""
        if self._snapshot is not None:
            self.tombstones.note(self.ring.next, events)
        return self.ring.append(payload)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the encoded snapshot that is kept for the next request."""
        return sum(len(event.data) for event in self._state.events) if self._state else 0

    def tick(self, now: float) -> None:
        """Let go of a snapshot that is too old to be used again."""
        if self._state is not None and not 0 <= now - self._state.made_at <= self.SNAPSHOT_SECONDS:
            self._state = None

    def lose(self, count: int) -> None:
        """`count` batches could not be published: leave a gap that consumers see and ask about."""
        if self._snapshot is not None:
            # What they said is unknown, so nobody can be brought up to date by removals alone.
            self.tombstones.horizon = self.ring.next + count
        self.ring.skip(count)

    def replay(self, start: int, ts: float, epoch: str | None) -> Iterator[Batch]:
        """Batches that take a consumer from `start` to now. Lazy: consume it while publishing goes on."""
        until = self.ring.next
        if start >= self.ring.begin or self._snapshot is None:
            return self.ring.since(start, until)
        return self._compacted(start, until, ts, epoch)

    def _compacted(self, start: int, until: int, ts: float, epoch: str | None) -> Iterator[Batch]:
        self.compactions += 1
        state = self._present(start, ts, epoch)
        removals = [] if start == 0 else self.tombstones.since(start)
        known = self._encoded(removals, epoch) + state.events
        payloads = self._pack(known, state.next - start, ts)
        for seq, payload in enumerate(payloads, state.next - len(payloads)):
            yield Batch(seq, payload)
        yield from self.ring.since(state.next, until)

    def _present(self, start: int, ts: float, epoch: str | None) -> _State:
        """The kept snapshot if it fits between `start` and the ring, else a new one."""
        self.tick(ts)
        state = self._state
        if state is not None and state.next > start and state.next >= self.ring.begin:
            return state
        assert self._snapshot is not None
        self._state = _State(self.ring.next, ts, self._encoded(self._snapshot(), epoch))
        return self._state

    def _encoded(self, events: Sequence[KVEvent], epoch: str | None) -> list[_Sized]:
        """Those that this profile can carry; the others were never published either."""
        done: list[_Sized] = []
        for event in events:
            told = msgspec.structs.replace(event, epoch=epoch, reason=SNAPSHOT)
            try:
                done.append(_Sized(encode_event(told, self._profile), _size(event)))
            except EventEncodeError:
                continue
        return done

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


def _size(event: KVEvent) -> int:
    return 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
