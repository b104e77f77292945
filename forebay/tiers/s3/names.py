"""What objects are called.

    PREFIX/chunks/KEY-GROUP                            one chunk; the name is all that a load has
    PREFIX/segments/TIME-WRITER-NAMESPACE-TENANT       several chunks of one namespace and tenant, behind an index
    PREFIX/probe/RANDOM                                written and removed when a tier starts
    PREFIX/quarantine/FOLDER-NAME                      what a check found damaged and put aside

KEY and GROUP are hexadecimal. Keys are hashes, so chunks spread over a store's partitions as they are. A segment's
TIME (nanoseconds, hexadecimal) makes a listing's order that of their making; NAMESPACE and TENANT are digests, so that
a clear finds what it must remove without reading it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forebay.kvstore.identity import KEY_BYTES
from forebay.tiers.base import ChunkId, ClearScope
from forebay.tiers.fs.manifest import tenant_digest

_CHUNK = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})-([0-9a-f]{{2}})")
_SEGMENT = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{32})-([0-9a-f]{16})")
NAMESPACE_BYTES = 16


@dataclass(frozen=True, slots=True)
class SegmentName:
    """The parts of a segment's name."""

    time_ns: int
    writer: str
    namespace: str
    tenant: str

    def __str__(self) -> str:
        return f"{self.time_ns:016x}-{self.writer}-{self.namespace}-{self.tenant}"

    def covered(self, scope: ClearScope) -> bool:
        """May anything in the segment be the scope's? A scope behind a prefix is never known by name."""
        if scope.namespace and scope.namespace[:NAMESPACE_BYTES].hex() != self.namespace:
            return False
        return scope.tenant is None or tenant_digest(scope.tenant).hex() == self.tenant


def segment_name(time_ns: int, writer: str, namespace: bytes, tenant: str) -> SegmentName:
    """The name of a new segment."""
    return SegmentName(time_ns, writer, namespace[:NAMESPACE_BYTES].hex(), tenant_digest(tenant).hex())


@dataclass(frozen=True, slots=True)
class Names:
    """Names below one prefix."""

    prefix: str

    @property
    def chunks(self) -> str:
        return f"{self.prefix}/chunks/"

    @property
    def segments(self) -> str:
        return f"{self.prefix}/segments/"

    @property
    def quarantine(self) -> str:
        return f"{self.prefix}/quarantine/"

    def chunk(self, chunk: ChunkId) -> str:
        """Where this chunk is if it has an object of its own."""
        return f"{self.prefix}/chunks/{chunk.key.hex()}-{chunk.group:02x}"

    def segment(self, name: SegmentName) -> str:
        """A segment's object."""
        return f"{self.prefix}/segments/{name}"

    def probe(self, random: str) -> str:
        """An object to try things with."""
        return f"{self.prefix}/probe/{random}"

    def parse_chunk(self, name: str) -> ChunkId | None:
        """The inverse of `chunk`; None for anything else."""
        found = _CHUNK.fullmatch(name.removeprefix(self.chunks))
        return ChunkId(int(found[2], 16), bytes.fromhex(found[1])) if found else None

    def parse_segment(self, name: str) -> SegmentName | None:
        """The inverse of `segment`; None for anything else."""
        found = _SEGMENT.fullmatch(name.removeprefix(self.segments))
        return SegmentName(int(found[1], 16), found[2], found[3], found[4]) if found else None
