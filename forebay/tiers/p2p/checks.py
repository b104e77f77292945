"""What came from another host is believed only as far as it can be checked."""

from __future__ import annotations

from collections.abc import Container

from forebay.errors import CorruptChunk
from forebay.kvstore.header import ChunkHeader
from forebay.kvstore.identity import chunk_key
from forebay.tiers.base import ChunkId
from forebay.tiers.chunks import stored_header


def checked_header(block: bytes, length: int, namespaces: Container[bytes] | None) -> ChunkHeader:
    """The header in a block that a peer sent with a payload of `length` bytes. Raises CorruptChunk with the reason.

    The key has to follow from the parent and the tokens, and the namespace to be one of `namespaces` (None: any).
    """
    header = stored_header(block)
    if header.owner:
        raise CorruptChunk("the header is that of a slot that is still being written")
    if not header.checksums:
        raise CorruptChunk("the chunk has no checksums")
    if header.payload_length != length:
        raise CorruptChunk(f"{length} bytes are announced, the header says {header.payload_length}")
    if chunk_key(header.parent, header.tokens, header.extra) != header.key:
        raise CorruptChunk("the key doesn't follow from the parent and the tokens")
    if namespaces is not None and header.namespace not in namespaces:
        raise CorruptChunk("the chunk is of a namespace that isn't known here")
    return header


def check_wanted(header: ChunkHeader, chunk: ChunkId, capacity: int) -> None:
    """Raises CorruptChunk unless this is the chunk that was asked for, and fits."""
    if (header.group, header.key) != (chunk.group, chunk.key):
        raise CorruptChunk("the peer sent another chunk than it was asked for")
    if header.payload_length > capacity:
        raise CorruptChunk(f"payload of {header.payload_length} bytes for a slot of {capacity}")
