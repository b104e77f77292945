"""A tier behind the fake store: it has what was pushed out of memory, and brings it as fast as a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.errors import StoreUnavailable
from forebay.kvstore.identity import KEY_BYTES, MATCH_UNIT, Chain, unpack_tokens
from forebay.kvstore.layout import needed_from
from forebay.kvstore.protocol import ChunkRead, Place, Surveyed

if TYPE_CHECKING:
    from tests.workers.fake_store import FakeStore, Stored

TIER = "slow"


@dataclass
class FakeTier:
    """`allowed` chunks come (None: any number), each after `seconds`; then it stalls. `gone` says which chunks it has
    lost, though it still says that it has them, `hangs` which don't come before the others' deadline, and `full` for
    which there is no room in memory: so often that was `refused`."""

    store: FakeStore
    chunks: dict[tuple[int, bytes], Stored] = field(default_factory=dict)
    allowed: int | None = None
    seconds: float = 0.0
    gone: Callable[[Stored], bool] = lambda stored: False
    hangs: Callable[[Stored], bool] = lambda stored: False
    full: Callable[[Stored], bool] = lambda stored: False
    refused: int = 0
    brought: list[tuple[int, int]] = field(default_factory=list)

    def take_all(self) -> None:
        """Memory loses everything to the tier."""
        self.chunks.update(self.store.chunks)
        self.store.chunks.clear()

    def survey(self, root: bytes, tokens: bytes, limit: int) -> Surveyed:
        """How far memory and tier reach together."""
        namespace = self.store.namespace
        assert namespace is not None
        units = Chain(root, unpack_tokens(tokens), chunk_tokens=namespace.chunk_tokens).keys
        groups = range(len(namespace.groups))
        memory = [self.store.units(group, units) for group in groups]
        everything = [self.store.units(group, units, {**self.chunks, **self.store.chunks}) for group in groups]
        for reach in range(limit, 0, -MATCH_UNIT):
            needs = [range(needed_from(geometry, reach) // MATCH_UNIT, reach // MATCH_UNIT)
                     for geometry in namespace.groups]  # fmt: skip
            if all(unit in have for need, have in zip(needs, everything, strict=True) for unit in need):
                break
        else:
            return Surveyed(rid=0, boot=b"", hit=0, reach=0, places=[])
        size = namespace.chunk_tokens // MATCH_UNIT
        lacking = {(group, unit // size): everything[group][unit]
                   for group in groups for unit in needs[group] if unit not in memory[group]}  # fmt: skip
        places = [Place(*place, TIER, len(stored.payload)) for place, stored in sorted(lacking.items())]
        return Surveyed(rid=0, boot=b"", hit=0, reach=reach, places=places)

    async def fetch(
        self, root: bytes, tokens: bytes, tokens_from: int, keys: bytes, wanted: Sequence[tuple[int, int]],
        deadline_ms: int,
    ) -> tuple[list[ChunkRead], list[tuple[int, int]]]:  # fmt: skip
        """Bring places, one after the other, up to the first that doesn't come in time; and which of them nobody has.
        Without time, what memory has."""
        namespace, loop = self.store.namespace, asyncio.get_running_loop()
        assert namespace is not None
        until = loop.time() + deadline_ms / 1000
        size = namespace.chunk_tokens
        parent = keys[(tokens_from // size - 1) * KEY_BYTES :][:KEY_BYTES] if tokens_from else root
        first = tokens_from // MATCH_UNIT
        before = [parent] if first else []
        own = Chain(parent, unpack_tokens(tokens), chunk_tokens=size).keys
        units = [b""] * max(0, first - 1) + before + list(own)
        reads: dict[tuple[int, int], ChunkRead] = {}
        gone: list[tuple[int, int]] = []
        hung: list[tuple[tuple[int, int], Stored]] = []
        for place in wanted:
            stored = self.store.units(place[0], units).get(place[1] * size // MATCH_UNIT)
            if stored is not None:
                reads[place] = _read(stored, "")
            elif deadline_ms:
                stored = self.store.units(place[0], units, self.chunks).get(place[1] * size // MATCH_UNIT)
                if stored is not None and self.hangs(stored):
                    hung.append((place, stored))
                elif stored is None or self.gone(stored):
                    gone.append(place)
                    break
                elif await self._bring(stored, until):
                    reads[place] = _read(stored, TIER)
                else:
                    break
        while hung and loop.time() < until:
            await asyncio.sleep(0.002)
            for place, stored in [one for one in hung if not self.hangs(one[1])]:
                hung.remove((place, stored))
                if await self._bring(stored, until):
                    reads[place] = _read(stored, TIER)
        return list(reads.values()), gone

    async def _bring(self, stored: Stored, until: float) -> bool:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.seconds)
        while self.allowed is not None and self.allowed <= 0:
            if not self.store.up:
                raise StoreUnavailable("the store died meanwhile")
            if loop.time() >= until:
                return False
            await asyncio.sleep(0.002)
        if self.full(stored):
            self.refused += 1
            return False
        if self.allowed is not None:
            self.allowed -= 1
        self.brought.append((stored.chunk.group, stored.chunk.start))
        self.store.chunks[stored.chunk.group, stored.chunk.key] = stored
        return True


def _read(stored: Stored, promoted: str) -> ChunkRead:
    chunk = stored.chunk
    return ChunkRead(
        chunk.group, chunk.start, len(chunk.tokens) // 4, 0, 0, 0, len(stored.payload), stored.generation, chunk.key,
        promoted,
    )  # fmt: skip
