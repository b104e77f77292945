"""What this daemon has stored: manifest, cards, byte account and the objects themselves, kept in step.

    store    note the name, put the object, commit      an object without an entry is found by its note
    remove   commit "leaving", delete the object, bury  a leaving chunk is out of sight, and is deleted later

A segment is one object: it goes as a whole. When one of its chunks must go its neighbours go too; only a chunk that was
merely replaced waits, out of sight, until the others have left.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence

from forebay.kvstore.header import ChunkHeader
from forebay.tiers.base import ChunkId, TierChange
from forebay.tiers.books import Books
from forebay.tiers.chunks import header_block
from forebay.tiers.fs.ledger import Ledger
from forebay.tiers.fs.manifest import Leaving, Record, first_unit, tenant_digest
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.s3.bucket import Bucket
from forebay.tiers.s3.cards import Card, Written
from forebay.tiers.s3.locks import ChunkLocks
from forebay.tiers.s3.names import Names
from forebay.tiers.s3.opening import Memory

PAGE = 256
UNLIMITED = sys.maxsize
REPLACED = "replaced"


def record_of(header: ChunkHeader, block: bytes, disk: int, *, cold: bool) -> Record:
    """The manifest's record of a chunk; `disk` is what it adds to the bucket."""
    return Record(
        parent=header.parent, namespace=header.namespace, start=header.start,
        unit=first_unit(header.parent, header.tokens, header.extra), tokens=header.token_count,
        header=len(block), length=len(block) + header.payload_length, disk=disk, cold=cold,
        tenant=tenant_digest(header.tenant),
    )  # fmt: skip


class Holdings(Books):
    """See the module's text. Methods may be called from any thread; those that take a bucket's time say so."""

    def __init__(
        self, bucket: Bucket, names: Names, memory: Memory, outbox: Outbox, quota: int, chunks_max: int
    ) -> None:
        super().__init__(memory.manifest, Ledger(quota or UNLIMITED))
        self.bucket = bucket
        self.names = names
        self.cards = memory.cards
        self.quota = quota
        self.chunks_max = chunks_max
        self.locks = ChunkLocks()
        self.writing: set[str] = set()
        """Segments that are being put, until they are in the books."""
        self._outbox = outbox
        self._evicting = threading.Lock()
        self._told: set[ChunkId] = set()
        # What this process has told of already, until everything older has been told of as well.
        self._fresh: set[ChunkId] | None = set()
        stored, leaving = self.manifest.totals()
        self.ledger.move(stored=stored, leaving=leaving)

    def owns(self, chunk: ChunkId) -> bool:
        """Has this daemon stored it, and not been told to remove it since?"""
        return self.manifest.get(chunk) is not None

    def owns_segment(self, segment: str) -> bool:
        """Has this daemon stored it, or is it about to?"""
        return segment in self.writing or self.cards.is_segment(segment)  # in this order: it is never in neither

    def left_begun(self) -> list[str]:
        """Names of objects that a crash has left, in the bucket perhaps, but not in the books."""
        left = []
        for note in self.cards.begun():
            name = f"{self.names.prefix}/{note}"
            chunk = self.names.parse_chunk(name)
            chunks = [chunk] if chunk else self.cards.members(name.removeprefix(self.names.segments))
            if any(self.owns(chunk) for chunk in chunks):
                self.cards.end(note)  # only that was still to be done
            else:
                left.append(name)
        return left

    # --- coming ----------------------------------------------------------------------------------------

    def commit(self, written: Sequence[Written], records: Sequence[Record], reserved: int, begun: str) -> None:
        """These chunks' object, noted as `begun`, is in the bucket; what was reserved for it becomes theirs."""
        stored = 0
        with self._changing:
            self.cards.put(written)
            for one, record in zip(written, records, strict=True):
                old = self.manifest.commit(one.chunk, record)
                assert not (old.stored or old.leaving), "the chunk's place was not free"
                stored += record.disk
                self._outbox.change(TierChange(one.chunk, True, "", one.card.header))
                if self._fresh is not None:
                    self._fresh.add(one.chunk)
            self.cards.end(begun)
            self.ledger.move(reserved=-reserved, stored=stored)

    def announce(self) -> Iterator[None]:
        """Tell of everything that an earlier process stored, a little with each step."""
        for first_byte in range(256):
            with self.manifest.reading() as view:
                chunks = view.in_folder(first_byte)
            for chunk in chunks:
                self._announce(chunk)
            yield
        self._fresh = None

    def _announce(self, chunk: ChunkId) -> None:
        with self._changing:  # so that no removal is told before
            if (self._fresh is not None and chunk in self._fresh) or self.manifest.get(chunk) is None:
                return
            card = self.cards.get(chunk)
            if card is not None and card.header:
                self._outbox.change(TierChange(chunk, True, "", card.header))

    def make_room(self, size: int) -> bool:
        """Reserve `size` bytes, evicting for them. False if that can't be had. Blocks on the bucket."""
        if self.manifest.count() >= self.chunks_max and not self._make_entries():
            return False
        for _ in range(8):
            missing = self.ledger.reserve(size)
            if not missing:
                return True
            if not self.evict(missing):
                return False
        return False

    def _make_entries(self) -> bool:
        count = max(1, self.chunks_max // 100)
        if self.quota:
            return self.evict(0, count)
        # Nothing but our memory is full: the objects stay, for the bucket's rules to remove, and are still found.
        with self._evicting:
            self.flush_touches()
            gone = self._leave_coldest(0, count, "evicted")
            self._bury([left.chunk for left in gone])
            self.counts["entries_forgotten"] += len(gone)
            return bool(gone)

    # --- going -----------------------------------------------------------------------------------------

    def evict(self, size: int, count: int = 0, reason: str = "evicted") -> bool:
        """Remove the coldest chunks, `size` bytes or more. False if nothing was freed. Blocks on the bucket."""
        with self._evicting:
            freed = self.reap(size)
            if freed >= size and not count:
                return True
            self.flush_touches()
            gone = self._leave_coldest(size - freed, count, reason)
            self.counts["evicted"] += len(gone)
            return freed + self.reap() > 0

    def vanished(self, chunk: ChunkId) -> None:
        """A chunk's object was not there: forget the chunk, and all others of its segment."""
        card = self.cards.get(chunk)
        chunks = self.cards.members(card.segment) if card and card.segment else [chunk]
        gone = self._leave(chunks, "evicted")
        self.counts["vanished"] += len(gone)

    def reap(self, enough: int | None = None, pages: int | None = None) -> int:
        """Delete the objects of leaving chunks, and tell of it; returns the freed bytes. Stops at `enough` bytes, or
        after so many pages. Blocks on the bucket."""
        freed, seen, last = 0, 0, None
        while self.ledger.leaving and (page := self.manifest.list_leaving(PAGE, last)):
            self._outbox.wait_for_room()
            last = page[-1].chunk
            with self.locks.hold_free([left.chunk for left in page]) as held:
                mine = set(held)
                freed += self._delete([left for left in page if left.chunk in mine])
            seen += 1
            if (enough is not None and freed >= enough) or seen == pages:
                break
        return freed

    def clearing(self) -> bool:
        """Are there objects still to be deleted that were cleared?"""
        last = None
        while self.ledger.leaving and (page := self.manifest.list_leaving(PAGE, last)):
            if any(left.reason == "cleared" for left in page):
                return True
            last = page[-1].chunk
        return False

    def purge(self, chunk: ChunkId) -> bool:
        """Delete what is left of a chunk that is leaving, so that it can be stored again. The caller holds its lock.
        Blocks on the bucket; False if that can't be done now."""
        with self.manifest.reading() as view:
            reason = view.leaving(chunk)
        if reason is None:
            return True
        self._delete([Leaving(chunk, "evicted" if reason == REPLACED else reason, 0)])
        with self.manifest.reading() as view:
            return view.leaving(chunk) is None

    def _delete(self, leaving: Sequence[Leaving]) -> int:
        """Delete the objects of these chunks where they may go; returns the freed bytes."""
        going: dict[str, list[ChunkId]] = {}
        for left in leaving:
            card = self.cards.get(left.chunk)
            if card is None or not card.segment:
                going[self.names.chunk(left.chunk)] = [left.chunk]
                continue
            name = f"{self.names.segments}{card.segment}"
            if name not in going and self._doomed(card.segment, left.reason):
                going[name] = self.cards.members(card.segment)
            elif name not in going:
                self._tell_early(left.chunk, card)
        failed = set(self.bucket.delete(list(going))) if going else set()
        self.counts["delete_errors"] += len(failed)
        return self._bury([chunk for name, chunks in going.items() if name not in failed for chunk in chunks])

    def _doomed(self, segment: str, reason: str) -> bool:
        """Must a segment go that this chunk is leaving? If so, its other chunks leave as well."""
        members = self.cards.members(segment)
        with self.manifest.reading() as view:
            alive = [chunk for chunk in members if view.get(chunk) is not None]
        if alive and reason == REPLACED:
            return False
        gone = self._leave(alive, "evicted")
        self.counts["neighbours_evicted"] += len(gone)
        return True

    def _tell_early(self, chunk: ChunkId, card: Card) -> None:
        """A chunk that was replaced is out of sight for good, though its bytes stay a while."""
        if chunk not in self._told:
            self._told.add(chunk)
            self._outbox.change(TierChange(chunk, False, REPLACED, card.header))

    def _bury(self, chunks: Sequence[ChunkId]) -> int:
        """The objects of these chunks are gone, or aren't ours to remove any more; returns the freed bytes."""
        buried, freed = [], 0
        with self._changing:
            for chunk in chunks:
                with self.manifest.reading() as view:
                    reason = view.leaving(chunk)
                if reason is None:
                    continue  # somebody else was faster, or it has been stored again since
                card = self.cards.get(chunk)
                self.manifest.bury(chunk)
                buried.append(chunk)
                freed += card.disk if card else 0
                if chunk in self._told:
                    self._told.discard(chunk)
                else:
                    self._outbox.change(TierChange(chunk, False, reason, card.header if card else b""))
            self.cards.drop(buried)
            self.ledger.move(leaving=-freed)
        return freed


def card_of(block: bytes, length: int, disk: int, segment: str = "", offset: int = 0) -> Card:
    """A card for a chunk with this header's block that is stored in `length` bytes."""
    return Card(segment, offset, length, disk, header_block(block))
