"""Chunks as workers would commit them, and a pool that shows stray writes."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.kvstore.header import ChunkHeader, SlotState, encode_header, granule_checksums
from forebay.kvstore.identity import MATCH_UNIT, chain, pack_tokens
from forebay.tiers.base import ChunkId, Query

NAMESPACE = b"n" * 32
ROOT = b"r" * 32


@dataclass(frozen=True)
class Made:
    """A chunk as a worker would commit it."""

    header: ChunkHeader
    payload: bytes

    @property
    def id(self) -> ChunkId:
        return ChunkId(self.header.group, self.header.key)

    @property
    def block(self) -> bytes:
        return encode_header(self.header)

    @property
    def length(self) -> int:
        return len(self.block) + len(self.payload)

    def query(self) -> Query:
        """The question whether this very chunk is there."""
        return Query(self.header.group, self.header.key, self.header.parent, self.header.tokens)


def make_chunk(
    tokens: Sequence[int] = range(32),
    *,
    granule: int = 4096,
    parent: bytes = ROOT,
    group: int = 0,
    namespace: bytes = NAMESPACE,
    start: int = 0,
    seed: int | None = None,
    tenant: str = "",
) -> Made:
    """A chunk of these tokens, its payload random but the same for the same arguments."""
    packed = pack_tokens(tokens)
    key = chain(parent, packed)[-1]
    size = len(tokens) // MATCH_UNIT * granule
    payload = random.Random(f"{key.hex()} {group} {seed}").randbytes(size)
    sums = granule_checksums(memoryview(payload), granule)
    return Made(ChunkHeader(namespace, group, key, parent, start, packed, tenant, b"", size, sums), payload)


def numbered(number: int, **arguments: Any) -> Made:
    """A chunk like no other number's."""
    return make_chunk([number * 1000 + i for i in range(32)], **arguments)


class Pool:
    """One extent, and slots cut from it in turn. What surrounds a slot is filled so that a stray write shows."""

    def __init__(self, size: int = 8 << 20) -> None:
        self.descriptor = os.memfd_create("pool")
        os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size)
        self.memory = memoryview(self._map)
        self._at = 4096

    def slot(self, size: int) -> int:
        """Offset of `size` fresh bytes at a page boundary; the next slot begins where this one ends."""
        size = -(-size // 4096) * 4096
        if self._at + size + 4096 > len(self.memory):
            self._at = 4096
        at = self._at
        self._at += size + 4096
        self.memory[at - 4096 : at + size + 4096] = b"\xee" * (size + 8192)
        return at

    def put(self, chunk: Made) -> int:
        """A slot that holds this chunk, as it lies in a real pool: with a generation."""
        at = self.slot(chunk.length)
        block = encode_header(chunk.header, state=SlotState.COMMITTED, generation=77)
        self.memory[at : at + len(block)] = block
        self.memory[at + len(block) : at + chunk.length] = chunk.payload
        return at

    def close(self) -> None:
        """Give the memory back, once nobody has a piece of it any more."""
        os.close(self.descriptor)
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()
