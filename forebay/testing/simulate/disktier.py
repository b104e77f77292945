"""A file tier on the simulated disk: one chunk a file, written beside and renamed, found again by its headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.errors import CorruptChunk
from forebay.kvstore.header import ChunkHeader
from forebay.kvstore.identity import chunk_key
from forebay.testing.simulate.disk import SimDisk
from forebay.testing.simulate.loop import Process
from forebay.testing.simulate.tierbase import SimTier, Trouble, answer, split_blob
from forebay.tiers.base import ChunkId, LookupResult, Query, StoreJob
from forebay.tiers.fs.paths import chunk_name, chunk_of_name

if TYPE_CHECKING:
    from forebay.testing.simulate.world import World


class DiskTier(SimTier):
    """Headers in memory, bytes on the disk, a quota in bytes with the oldest leaving first."""

    def __init__(self, world: World, process: Process, name: str, disk: SimDisk) -> None:
        super().__init__(world, process, name)
        self._disk = disk
        self._headers: dict[ChunkId, ChunkHeader] = {}
        self._lengths: dict[ChunkId, int] = {}
        self._quota = world.disk_quota
        self._serial = 0
        for found in disk.names():
            self._find_again(found)

    def _find_again(self, name: str) -> None:
        chunk = chunk_of_name(name)
        try:
            blob = self._disk.read(name)
            header, block, payload = split_blob(blob)
            right = (header.group, header.key) == (chunk.group, chunk.key) if chunk else False
            key = chunk_key(header.parent, header.tokens, header.extra)
            if not right or key != header.key or len(payload) != header.payload_length:
                raise CorruptChunk("not what its name says")
        except (CorruptChunk, OSError):
            self._unlink(name)
            return
        assert chunk is not None
        self._enter(chunk, header, block, len(blob))

    def _enter(self, chunk: ChunkId, header: ChunkHeader, block: bytes, length: int) -> None:
        self._headers[chunk], self._lengths[chunk] = header, length
        self.changed(chunk, True, "", block)

    def _unlink(self, name: str) -> bool:
        try:
            self._disk.unlink(name)
        except OSError:
            return False
        return True

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        return self.lied([answer(query, self._headers, self._lengths) for query in queries])

    async def keep(self, job: StoreJob, blob: bytes) -> None:
        if len(blob) > self._quota:
            raise Trouble("quota")
        if job.chunk not in self._headers:
            while sum(self._lengths.values()) + len(blob) > self._quota:
                self.lost(next(iter(self._headers)), "evicted")
            await self._write(job, blob)
        if job.replaces:
            self.lost(ChunkId(job.chunk.group, job.replaces), "replaced")

    async def _write(self, job: StoreJob, blob: bytes) -> None:
        header, block, _ = split_blob(blob)
        self._serial += 1
        temporary = f"tmp{self._serial}"
        try:
            self._disk.write(temporary, blob)
            await self.world.sleep(self.rng.choice((0.0, 0.001)))
            if self.world.disk_syncs:
                self._disk.sync(temporary)
            self._disk.rename(temporary, chunk_name(job.chunk))
        except OSError as error:
            self._unlink(temporary)
            raise Trouble("full" if error.errno == 28 else "io") from error
        if job.chunk not in self._headers:
            self._enter(job.chunk, header, block, len(blob))

    async def fetch(self, chunk: ChunkId) -> bytes:
        try:
            return self._disk.read(chunk_name(chunk))
        except FileNotFoundError as error:
            raise Trouble("missing") from error
        except OSError as error:
            raise Trouble("io") from error

    def someone_else(self, chunk: ChunkId) -> ChunkId | None:
        others = [other for other in self._headers if other != chunk]
        return self.rng.choice(others) if others else None

    def lost(self, chunk: ChunkId, reason: str) -> None:
        if self._headers.pop(chunk, None) is not None:
            del self._lengths[chunk]
            for _ in range(20):  # an error of the disk must not bring back what was taken out
                if self._unlink(chunk_name(chunk)):
                    break
            self.changed(chunk, False, reason)

    def clear(self, namespace: bytes) -> int:
        doomed = [c for c, header in self._headers.items() if namespace in (b"", header.namespace)]
        for chunk in doomed:
            self.lost(chunk, "cleared")
        return len(doomed)
