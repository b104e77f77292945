"""What the blocking and the async client share: ids, messages, and how replies are read.

No I/O here: a session makes requests and digests replies, the clients carry them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TypeVar

from forebay.errors import ProtocolError, RequestRefused
from forebay.kvstore.client.mapping import PoolMap
from forebay.kvstore.identity import Namespace, encode_namespace
from forebay.kvstore.layout import Shard
from forebay.kvstore.protocol import CLIENT_ID_BYTES, PROTOCOL_VERSION, ChunkRead, Hello, Refused, Register, Welcome

R = TypeVar("R")
SHORT_TOKENS = 4096


@dataclass
class Session:
    """State of one client across reconnects. `client` stays the same, so that the store knows that what it
    wrote before is no longer being written; `lock` says to everyone that this process is alive. Clients of one
    `group` may join each other's leases. With a `tenant` it is a view of what that tenant has."""

    kind: str
    group: bytes = b""
    tenant: str | None = None
    client: bytes = field(default_factory=lambda: os.urandom(CLIENT_ID_BYTES))
    boot: bytes = b""
    pool: PoolMap = field(default_factory=PoolMap)
    lock: int = -1
    _rid: int = 0
    _chunk_tokens: dict[bytes, int] = field(default_factory=dict)

    def rid(self) -> int:
        """A fresh request id."""
        self._rid += 1
        return self._rid

    def hello(self) -> Hello:
        """The first message of a connection. Whoever sends it writes nothing any more under an older one."""
        self.forget_pool()
        return Hello(rid=self.rid(), client=self.client, kind=self.kind, group=self.group, tenant=self.tenant)

    def welcome(self, message: Welcome, descriptors: list[int]) -> None:
        """Digest the store's answer to Hello."""
        if message.version != PROTOCOL_VERSION or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ProtocolError(
                f"the store speaks protocol {message.version}, this client {PROTOCOL_VERSION}: update the older one"
            )
        self.boot, self.lock = message.boot, descriptors[0]
        self.pool = PoolMap(message.extent_bytes)

    def register(self, namespace: Namespace, label: str, shard: Shard | None = None) -> Register:
        """Registration of a namespace."""
        self._chunk_tokens[namespace.id] = namespace.chunk_tokens
        return Register(rid=self.rid(), namespace=encode_namespace(namespace), label=label, shard=shard)

    def last_chunk(self, namespace_id: bytes, tokens: int) -> int:
        """Where the last chunk of a prompt of a registered namespace begins; 0 for a prompt that is soon sent."""
        size = self._chunk_tokens.get(namespace_id, 0)
        return (tokens - 1) // size * size if size and tokens > SHORT_TOKENS else 0

    def payload(self, chunk: ChunkRead) -> memoryview:
        """Whole payload of a pinned chunk, in place. Valid until its lease is released."""
        return self.pool.payload(chunk, chunk.length)

    def forget_pool(self) -> None:
        """The store is gone: so are its mappings and the lock it gave."""
        self.pool.close()
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def expect(reply: object, kind: type[R]) -> R:
    """The reply, if it is of this kind. Raises RequestRefused or ProtocolError."""
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, Refused):
        raise RequestRefused(reply.code, reply.message)
    raise ProtocolError(f"expected {kind.__name__}, the store sent {type(reply).__name__}")
