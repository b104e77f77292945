"""What two stores' p2p tiers say to each other: one message a ZMQ message, bytes of chunks in a second frame.

    who dials -> who listens       Hello, Ping, Ask, Open, Read, Close, Offer, Bytes (+ frame), Withdraw, Damaged,
                                   Bye, GetNixl, Clear
    who listens -> who dials       Welcome, Refused, Pong, Nixl, Answer, Opened, NotOpened, Bytes (+ frame), Accepted,
                                   Declined, Taken, Stored, Cleared

`rid` is chosen by who dials; Read, Close, Bytes and Withdraw carry that of the Open or Offer they belong to.
A message of another version, or that isn't one, is answered by Refused or ends the connection; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Union

import msgspec

from forebay.ipc.framing import Codec
from forebay.kvstore.identity import KEY_BYTES
from forebay.tiers.base import ChunkId, ClearScope, LookupResult, Query

VERSION = 2
PIECE_BYTES = 1 << 20
"""Bytes of a chunk in one message."""
WINDOW = 8
"""Pieces that are asked for, or sent, ahead of those that have come."""
MESSAGE_BYTES_MAX = 2 << 20
ASK_QUERIES_MAX = 256
ASK_BYTES_MAX = 1 << 20
TOKENS_BYTES_MAX = 1 << 18
"""Of one query. Longer chunks than these 65,536 tokens are found by nobody."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class's name."""


class Hello(Message, frozen=True):
    """First message. `boot` is new with each process; `nixl` says whether its NIXL may read. Of the connections of one
    `keeper` (empty: none) the last two count, older ones are over, whether or not that could be told here."""

    version: int
    name: str
    boot: bytes
    nixl: bool
    keeper: bytes = b""


class Welcome(Message, frozen=True):
    """Answer to Hello. `ticket` opens streams at `stream_port` (0: none here), which go through TLS if there is the
    `fingerprint` of a certificate; `nixl` is the metadata of an agent that may be read from (empty: none), as of
    `nixl_epoch`."""

    version: int
    name: str
    boot: bytes
    stream_port: int
    ticket: bytes
    nixl: bytes
    nixl_epoch: int
    fingerprint: bytes = b""


class Refused(Message, frozen=True):
    """The message isn't taken. With `rid` 0 the whole connection isn't: say Hello anew, or give up."""

    rid: int
    why: str


class Ping(Message, frozen=True):
    """Are you there? Also says that who dials is."""


class Pong(Message, frozen=True):
    """Yes. A higher `nixl_epoch` than the last one that was seen: its metadata has changed, ask for it."""

    nixl_epoch: int


class GetNixl(Message, frozen=True):
    """Ask for the present metadata. Answered by Nixl."""


class Nixl(Message, frozen=True):
    """As in Welcome."""

    metadata: bytes
    epoch: int


class Ask(Message, frozen=True):
    """What of these is in your memory? It doesn't ask its own peers. Answered by Answer."""

    rid: int
    queries: list[Query]


class Answer(Message, frozen=True):
    """One result a query. What is a hit stays there for a short while."""

    rid: int
    results: list[LookupResult]


class Open(Message, frozen=True):
    """Hold this chunk for me until Close. Answered by Opened or NotOpened."""

    rid: int
    chunk: ChunkId
    capacity: int


class Opened(Message, frozen=True):
    """`header` is its header block, `length` its payload's, `address` where NIXL may read it (0: nowhere)."""

    rid: int
    header: bytes
    length: int
    address: int
    nixl_epoch: int


class NotOpened(Message, frozen=True):
    """It isn't there (`missing`), doesn't fit the capacity (`corrupt`), or there is too much to do (`busy`)."""

    rid: int
    reason: str


class Read(Message, frozen=True):
    """Send [offset, offset + length) of an open chunk's payload. Answered by Bytes."""

    rid: int
    offset: int
    length: int


class Close(Message, frozen=True):
    """An open chunk isn't needed any more. No answer."""

    rid: int


class Bytes(Message, frozen=True):
    """A piece of a payload is in the next frame."""

    rid: int
    offset: int


class Damaged(Message, frozen=True):
    """This chunk's payload came with wrong checksums: look at it. No answer."""

    chunk: ChunkId


class Clear(Message, frozen=True):
    """Forget what this covers, in memory and in your tiers. Answered by Cleared, or Refused."""

    rid: int
    scope: ClearScope


class Cleared(Message, frozen=True):
    """Nothing of it is found there any more; memory lost so many chunks."""

    rid: int
    chunks: int


class Bye(Message, frozen=True):
    """I hang up: nothing that I had open is needed. No answer."""


class Offer(Message, frozen=True):
    """May I push this chunk? `namespace` is the encoding of the one that it belongs to (empty: not known here).
    Answered by Accepted or Declined."""

    rid: int
    header: bytes
    length: int
    namespace: bytes


class Accepted(Message, frozen=True):
    """Send its Bytes, the window's pieces ahead of what is Taken."""

    rid: int


class Declined(Message, frozen=True):
    """`have`: it is here, or on its way; else why not: full, namespace, corrupt, busy, io."""

    rid: int
    reason: str


class Taken(Message, frozen=True):
    """So many bytes of a push have come."""

    rid: int
    received: int


class Stored(Message, frozen=True):
    """End of a push. If `ok` the chunk was verified and can be read there."""

    rid: int
    ok: bool
    reason: str


class Withdraw(Message, frozen=True):
    """The push is given up. No answer."""

    rid: int


ToListener = Union[Hello, Ping, Ask, Open, Read, Close, Offer, Bytes, Withdraw, Damaged, Bye, GetNixl, Clear]
ToDialer = Union[
    Welcome, Refused, Pong, Nixl, Answer, Opened, NotOpened, Bytes, Accepted, Declined, Taken, Stored, Cleared
]  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode
LISTENER: Codec[ToListener] = Codec(ToListener, MESSAGE_BYTES_MAX)
DIALER: Codec[ToDialer] = Codec(ToDialer, MESSAGE_BYTES_MAX)


def exact(chunk: ChunkId) -> Query:
    """The question for this chunk and no other."""
    return Query(chunk.group, chunk.key, bytes(KEY_BYTES), b"", bytes(KEY_BYTES))


def sound(query: Query) -> bool:
    """May a peer ask this?"""
    keys = (query.key, query.parent, query.first or query.key)
    return all(len(key) == KEY_BYTES for key in keys) and len(query.tokens) <= TOKENS_BYTES_MAX and query.group >= 0


def batches(queries: Sequence[Query]) -> Iterator[list[Query]]:
    """Queries in as many as one Ask takes."""
    batch: list[Query] = []
    size = 0
    for query in queries:
        length = len(query.tokens) + 4 * KEY_BYTES
        if batch and (len(batch) == ASK_QUERIES_MAX or size + length > ASK_BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append(query)
        size += length
    if batch:
        yield batch


def encode(message: Message) -> bytes:
    """A message's bytes, without a frame around them: ZMQ has its own."""
    return _encode(message)
