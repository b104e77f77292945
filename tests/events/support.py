"""Chains of blocks, raw sockets and a consumer's plain model of what it is told."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import zmq

from forebay.events.codec import decode_batch
from forebay.events.publisher import END, EventPublisher, PublisherLimits, StreamOptions
from forebay.events.schema import (
    CPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
)
from forebay.kvstore.identity import chain, pack_tokens

LOOPBACK = "tcp://127.0.0.1:0"
ROOT = b"r" * 32

Held = set[tuple[str | None, BlockHash]]


def tokens_of(units: int, first: int = 0) -> list[int]:
    return list(range(first, first + 16 * units))


def keys_of(units: int, first: int = 0) -> list[bytes]:
    return chain(ROOT, pack_tokens(tokens_of(units, first)))


def stored(units: int = 1, first: int = 0, medium: str = CPU) -> BlockStored:
    """The first `units` blocks of the chain that begins with token `first`."""
    return BlockStored(list(keys_of(units, first)), None, tokens_of(units, first), 16, medium=medium)


def removed(units: int = 1, first: int = 0, medium: str = CPU) -> BlockRemoved:
    return BlockRemoved(keys_of(units, first), medium, reason="evicted")


def apply(held: Held, events: Iterable[KVEvent]) -> None:
    """What a plain consumer does with events."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            held.clear()
        elif isinstance(event, BlockStored):
            held.update((event.medium, block) for block in event.block_hashes)
        else:
            held.difference_update((event.medium, block) for block in event.block_hashes)


@contextmanager
def publishing(**settings: object) -> Iterator[EventPublisher]:
    """A publisher on free loopback ports. Settings of PublisherLimits go there, the rest to the publisher."""
    names = PublisherLimits.__dataclass_fields__
    limits = PublisherLimits(**{k: settings.pop(k) for k in list(settings) if k in names})  # type: ignore[arg-type]
    options = StreamOptions(epoch=settings.pop("epoch", "e1"), limits=limits)  # type: ignore[arg-type]
    settings = {"topic": "kv@host@model", "replay": LOOPBACK, **settings}
    publisher = EventPublisher(LOOPBACK, options=options, **settings)  # type: ignore[arg-type]
    try:
        yield publisher
    finally:
        publisher.close()


class Raw:
    """A consumer made of bare sockets."""

    def __init__(self) -> None:
        self.context = zmq.Context()

    def subscribe(self, publisher: EventPublisher, **options: int) -> zmq.Socket[bytes]:
        """A SUB whose subscription has arrived: it gets a probe that is no batch and has no number."""
        sub = self.socket(zmq.SUB, publisher.endpoint, **options)
        sub.subscribe(b"")
        deadline = time.monotonic() + 60
        while not sub.poll(10):
            assert time.monotonic() < deadline, "the subscription never arrived"
            publisher._pub.socket.send(b"probe")
            publisher.poll_replay()
        while sub.poll(50):
            assert sub.recv() == b"probe"
        return sub

    def socket(self, kind: int, endpoint: str, **options: int | bytes) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(endpoint)
        return socket

    def dealer(self, publisher: EventPublisher, **options: int) -> zmq.Socket[bytes]:
        assert publisher.replay_endpoint is not None
        return self.socket(zmq.DEALER, publisher.replay_endpoint, **options)

    def ask(self, publisher: EventPublisher, start: int) -> list[list[bytes]]:
        """All messages of one replay, without the end mark; the publisher is polled meanwhile."""
        dealer = self.dealer(publisher)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        messages: list[list[bytes]] = []
        deadline = time.monotonic() + 60
        while not messages or messages[-1] != [b"", b"", END, b""]:
            assert time.monotonic() < deadline, "the replay didn't end"
            publisher.poll_replay()
            while dealer.poll(5):
                messages.append(dealer.recv_multipart())
        dealer.close()
        return messages[:-1]

    def close(self) -> None:
        self.context.destroy(linger=0)


def seqs(messages: Iterable[list[bytes]]) -> list[int]:
    """Sequence numbers of live or replayed messages."""
    return [int.from_bytes(message[-2], "big") for message in messages]


def state(messages: Iterable[list[bytes]]) -> Held:
    """What a consumer that knew nothing believes after these messages."""
    held: Held = set()
    for message in messages:
        apply(held, decode_batch(message[-1]).events)
    return held


def receive_all(sub: zmq.Socket[bytes], wait_ms: int = 500) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    while sub.poll(wait_ms if not messages else 200):
        messages.append(sub.recv_multipart())
    return messages
