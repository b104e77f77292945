"""Beside the manifest: where each own chunk is, and its header. In LMDB, and as expendable as that.

    cards     key+group -> segment's name (empty: an object of its own), offset, lengths, the header without padding
    members   segment's name -> key+group          (several a segment)
    begun     object's name -> ""                  an object that may exist without an entry after a crash

Headers serve partial matches and tell what has left. One of more than `HEADER_KEPT` bytes isn't kept, nor any where
chunks are encrypted, since tokens are in them: such a chunk is found by its exact key alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import lmdb
import msgspec

from forebay.kvstore.identity import KEY_BYTES
from forebay.tiers.base import ChunkId

HEADER_KEPT = 6 << 10
BYTES_PER_CHUNK = 8 << 10


class Card(msgspec.Struct, frozen=True, array_like=True):
    """Where a chunk's stored bytes begin and how many they are, what they add to the bucket (an index counts with its
    first chunk), and the header's block without padding (empty if it isn't kept)."""

    segment: str
    offset: int
    length: int
    disk: int
    header: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk that an object has been written for."""

    chunk: ChunkId
    card: Card


def _pack(chunk: ChunkId) -> bytes:
    return chunk.key + bytes([chunk.group])


def _unpack(data: bytes) -> ChunkId:
    if len(data) != KEY_BYTES + 1:
        raise lmdb.CorruptedError(f"a name has {len(data)} bytes")
    return ChunkId(data[KEY_BYTES], data[:KEY_BYTES])


class Cards:
    """Methods may be called from any thread; lmdb.Error passes through."""

    def __init__(self, path: Path, chunks_max: int, *, header_bytes_max: int = HEADER_KEPT) -> None:
        self._header_bytes_max = header_bytes_max
        self._env = lmdb.open(
            str(path), map_size=chunks_max * BYTES_PER_CHUNK + (16 << 20), max_dbs=4, max_readers=256, sync=False,
            metasync=False, mode=0o600,
        )  # fmt: skip
        self._cards = self._env.open_db(b"cards")
        self._members = self._env.open_db(b"members", dupsort=True)
        self._begun = self._env.open_db(b"begun")

    def begin(self, name: str) -> None:
        """From now on an object of this name may exist."""
        with self._env.begin(write=True) as txn:
            txn.put(name.encode(), b"", db=self._begun)

    def end(self, name: str) -> None:
        """It doesn't, or is known otherwise."""
        with self._env.begin(write=True) as txn:
            txn.delete(name.encode(), db=self._begun)

    def begun(self) -> list[str]:
        """Names that `begin` was called for without an end."""
        with self._env.begin() as txn:
            return [bytes(name).decode() for name, _ in txn.cursor(db=self._begun)]

    def put(self, written: Iterable[Written]) -> None:
        """Note where chunks are."""
        with self._env.begin(write=True) as txn:
            for chunk, card in ((one.chunk, one.card) for one in written):
                kept = card
                if len(card.header) > self._header_bytes_max:
                    kept = Card(card.segment, card.offset, card.length, card.disk, b"")
                txn.put(_pack(chunk), msgspec.msgpack.encode(kept), db=self._cards)
                if card.segment:
                    txn.put(card.segment.encode(), _pack(chunk), db=self._members)

    def get(self, chunk: ChunkId) -> Card | None:
        """The chunk's card, None if there is none."""
        with self._env.begin() as txn:
            data = txn.get(_pack(chunk), db=self._cards)
        if data is None:
            return None
        try:
            return msgspec.msgpack.decode(data, type=Card)
        except msgspec.DecodeError as error:
            raise lmdb.CorruptedError(f"a card is no card: {error}") from error

    def members(self, segment: str) -> list[ChunkId]:
        """The chunks that have a card in this segment."""
        with self._env.begin() as txn, txn.cursor(db=self._members) as cursor:
            if not cursor.set_key(segment.encode()):
                return []
            return [_unpack(bytes(value)) for value in cursor.iternext_dup()]

    def is_segment(self, name: str) -> bool:
        """Is this one of ours?"""
        with self._env.begin() as txn:
            return txn.get(name.encode(), db=self._members) is not None

    def drop(self, chunks: Iterable[ChunkId]) -> None:
        """Forget where chunks are."""
        with self._env.begin(write=True) as txn:
            for chunk in chunks:
                data = txn.pop(_pack(chunk), db=self._cards)
                if data is None:
                    continue
                segment = msgspec.msgpack.decode(bytes(data), type=Card).segment
                if segment:
                    txn.delete(segment.encode(), _pack(chunk), db=self._members)

    def close(self) -> None:
        """Flush to disk and close."""
        self._env.sync(True)
        self._env.close()
