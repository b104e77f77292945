"""Which stored chunk serves a query."""

from __future__ import annotations

from forebay.kvstore.header import ChunkHeader
from forebay.kvstore.identity import chain, pack_tokens
from forebay.tiers.base import ChunkId, Query
from forebay.tiers.chunks import best_match

TOKENS = pack_tokens(range(48))
PARENT = b"p" * 32


def stored(extra: bytes) -> tuple[ChunkId, ChunkHeader]:
    key = chain(PARENT, TOKENS, extra)[-1]
    header = ChunkHeader(b"n" * 32, 0, key, PARENT, 0, TOKENS, "", extra, 3072, b"c" * 24)
    return ChunkId(0, key), header


def test_equal_tokens_with_another_extra_are_another_chunk() -> None:
    candidates = dict([stored(b"imgA"), stored(b"imgB")])
    for extra in (b"imgA", b"imgB"):
        keys = chain(PARENT, TOKENS[:128], extra)
        found = best_match(Query(0, keys[-1], PARENT, TOKENS[:128], keys[0]), candidates)
        assert found is not None and found.chunk == stored(extra)[0] and found.matched == 32
    plain = chain(PARENT, TOKENS[:128])
    assert best_match(Query(0, plain[-1], PARENT, TOKENS[:128], plain[0]), candidates) is None
    assert best_match(Query(0, plain[-1], PARENT, TOKENS[:128]), candidates) is None
