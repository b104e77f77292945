"""The keys of a request's chunks, computed here from what the request consists of.

An engine's own hashes vary between its processes and versions, and its name of an adapter proves nothing. What KV
bytes depend on beside tokens goes into `extra`, the same for the whole chain of a request:

    nothing              b""
    adapter, inputs      SHA256(domain, adapter's fingerprint, then of each input: content hash, place, length)

So a prompt with an image shares nothing with one that has another image, or the same one elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.kvstore.identity import MATCH_UNIT, Namespace, chunk_key, chunk_keys, pack_tokens, root_key, tenant_salt
from forebay.kvstore.layout import round_down

_EXTRA_DOMAIN = b"forebay/extra/1\0"
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Input:
    """A part of a prompt that isn't text: `content` is the hash of what it is; its tokens are placeholders."""

    content: str
    offset: int
    length: int


def is_digest(name: str) -> bool:
    """Could this be a hash of contents, in hex? What else a client may call an input proves nothing."""
    return len(name) in (64, 128) and set(name) <= _HEX


def extra_of(adapter: bytes, inputs: Sequence[Input]) -> bytes:
    """What a request's KV depends on beside its tokens; empty if that is nothing."""
    if not adapter and not inputs:
        return b""
    digest = hashlib.sha256(_EXTRA_DOMAIN + len(adapter).to_bytes(4, "little") + adapter)
    for item in inputs:
        content = item.content.encode()
        digest.update(len(content).to_bytes(4, "little") + content)
        digest.update(item.offset.to_bytes(8, "little") + item.length.to_bytes(8, "little"))
    return digest.digest()


def salt_of(secret: bytes, tenant: str, cache_salt: str | None) -> bytes:
    """The salt of a request's chain: empty only for who has neither tenant nor salt, as at our own open front end."""
    if not tenant and not cache_salt:
        return b""
    return tenant_salt(secret, f"{len(tenant)}:{tenant}{cache_salt or ''}")


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a lookup is about: the first `limit` tokens, a multiple of the unit."""

    root: bytes
    tokens: bytes
    keys: bytes
    limit: int
    extra: bytes


class RequestKeys:
    """The growing chain of one request. Keys of whole chunks are kept, so that each is computed once."""

    def __init__(self, namespace: Namespace, salt: bytes, extra: bytes) -> None:
        self.extra = extra
        self.chunk_tokens = namespace.chunk_tokens
        self._ends = [root_key(namespace.id, salt)]

    @property
    def root(self) -> bytes:
        return self._ends[0]

    def prefix(self, tokens: Sequence[int], limit: int) -> Prefix:
        """For a lookup of the first `limit` of `tokens`, cut at the unit."""
        limit = round_down(min(limit, len(tokens)), MATCH_UNIT)
        packed = pack_tokens(tokens[:limit])
        keys = chunk_keys(self.root, packed, self.chunk_tokens, self.extra)
        whole = limit // self.chunk_tokens
        if whole >= len(self._ends):
            self._ends = [self.root, *(keys[at : at + 32] for at in range(0, 32 * whole, 32))]
        return Prefix(self.root, packed, keys, limit, self.extra)

    def parent(self, start: int, read: Callable[[int, int], Sequence[int]]) -> bytes:
        """The key at chunk start `start`. `read` gives tokens [first, last) as far as they are needed."""
        size = self.chunk_tokens
        while (done := len(self._ends) - 1) * size < start:
            tokens = pack_tokens(read(done * size, (done + 1) * size))
            self._ends.append(chunk_key(self._ends[-1], tokens, self.extra))
        return self._ends[start // size]

    def key(self, parent: bytes, tokens: bytes) -> bytes:
        """The key of a chunk of packed `tokens` behind `parent`."""
        return chunk_key(parent, tokens, self.extra)
