"""The serving side, towards guests that break the rules, ask too much, or go away: everything has an end and a cap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import msgspec
import pytest

from forebay.kvstore.header import encode_header
from forebay.testing.conformance import Made, make_chunk, numbered
from forebay.tiers.base import ChunkId, Query
from forebay.tiers.p2p import guests, server
from forebay.tiers.p2p.wire import (
    PIECE_BYTES,
    VERSION,
    Accepted,
    Answer,
    Ask,
    Bye,
    Bytes,
    Close,
    Declined,
    Hello,
    Message,
    NotOpened,
    Offer,
    Open,
    Opened,
    Ping,
    Pong,
    Read,
    Refused,
    Stored,
    Taken,
    Welcome,
    Withdraw,
    exact,
)
from tests.tiers.p2p.dialers import Dialer
from tests.tiers.p2p.rig import Host

CHUNK = make_chunk(granule=4096)
BIG = numbered(1, granule=1 << 20)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host("host")
    made.source.put(CHUNK)
    yield made
    made.close()


@pytest.fixture
def guest(host: Host, open_all: ExitStack) -> Dialer:
    return open_all.enter_context(closing(Dialer(host.port)))


def figure(host: Host, name: str) -> float:
    return host.tier.statistics().values.get(name, 0.0)


def offer(rid: int, chunk: Made) -> Offer:
    return Offer(rid, chunk.block, len(chunk.payload), b"")


# --- who is let in -----------------------------------------------------------------------------------------


def test_nothing_is_said_to_who_has_not_said_hello(host: Host, open_all: ExitStack) -> None:
    stranger = open_all.enter_context(closing(Dialer(host.port, hello=False)))
    stranger.say(Ask(1, [exact(CHUNK.id)]))
    assert "Hello" in stranger.hear(Refused).why
    assert host.source.asked == 0


def test_another_version_is_refused_in_words(host: Host, open_all: ExitStack) -> None:
    other = open_all.enter_context(closing(Dialer(host.port, hello=False)))
    other.say(Hello(VERSION + 1, "new", b"n" * 16, False))
    assert f"version {VERSION}" in other.hear(Refused).why


def test_garbage_is_refused_and_costs_nobody_else_anything(host: Host, guest: Dialer) -> None:
    for garbage in (b"", b"\xc1", b"\x80", b"\x00" * 1000, b"\x93\x01\x02\x03"):
        guest.say(garbage)
        assert isinstance(guest.hear_any()[0], Refused)
    guest.say(Ping())
    assert guest.hear(Pong)
    assert figure(host, "serve.not_understood") == 5


def test_guests_have_a_cap(host: Host, open_all: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "GUESTS_MAX", 2)
    for _ in range(2):
        open_all.enter_context(closing(Dialer(host.port)))
    third = open_all.enter_context(closing(Dialer(host.port, hello=False)))
    third.say(Hello(VERSION, "third", b"t" * 16, False))
    assert "too many" in third.hear(Refused).why
    assert (figure(host, "guests"), figure(host, "guests_turned_away")) == (2, 1)


def test_a_guest_that_goes_leaves_nothing_open(host: Host, guest: Dialer) -> None:
    guest.say(Open(1, CHUNK.id, 1 << 20))
    guest.hear(Opened)
    guest.say(offer(2, BIG))
    guest.hear(Accepted)
    assert host.source.lent == 1 and len(host.source.rooms) == 1
    guest.say(Bye())
    guest.say(Ping())
    assert isinstance(guest.hear_any()[0], Refused)
    assert host.source.lent == 0 and not host.source.rooms


def test_a_guest_that_falls_silent_loses_what_it_had_open(
    host: Host, guest: Dialer, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest.say(Open(1, CHUNK.id, 1 << 20))
    guest.hear(Opened)
    monkeypatch.setattr(guests, "SILENT_S", 0.05)
    while host.source.lent:
        pass
    assert figure(host, "guests") == 0


# --- reading -----------------------------------------------------------------------------------------------


def test_an_open_chunk_is_read_in_pieces_until_it_is_closed(host: Host, guest: Dialer) -> None:
    host.source.put(BIG)
    guest.say(Open(1, BIG.id, 1 << 22))
    opened = guest.hear(Opened)
    assert (opened.header, opened.length) == (BIG.block, len(BIG.payload))
    guest.say(Read(1, PIECE_BYTES, 100))
    head, piece = guest.hear_any()
    assert head == Bytes(1, PIECE_BYTES) and piece == BIG.payload[PIECE_BYTES : PIECE_BYTES + 100]
    guest.say(Close(1))
    guest.say(Read(1, 0, 1))
    assert guest.hear(Refused).rid == 1
    assert host.source.lent == 0


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 0), (0, -5), (8192, 1), (8000, 193), (0, PIECE_BYTES + 1)])
def test_only_pieces_of_the_chunk_are_read(guest: Dialer, offset: int, length: int) -> None:
    guest.say(Open(1, CHUNK.id, 1 << 20))
    guest.hear(Opened)
    guest.say(Read(1, offset, length))
    assert guest.hear(Refused).rid == 1


def test_a_chunk_that_is_too_large_for_who_asks_is_not_opened(host: Host, guest: Dialer) -> None:
    guest.say(Open(1, CHUNK.id, 100))
    assert guest.hear(NotOpened).reason == "corrupt"
    assert host.source.lent == 0


def test_open_chunks_of_a_guest_have_a_cap(host: Host, guest: Dialer) -> None:
    for rid in range(1, guests.OPENS_MAX + 2):
        guest.say(Open(rid, CHUNK.id, 1 << 20))
        kind = Opened if rid <= guests.OPENS_MAX else NotOpened
        guest.hear(kind)
    assert host.source.lent == guests.OPENS_MAX == figure(host, "guest_opens")


def test_requests_that_wait_for_our_store_have_a_cap_a_guest(host: Host, guest: Dialer) -> None:
    host.source.gate.clear()
    for rid in range(1, server.BUSY_MAX + 4):
        guest.say(Ask(rid, [exact(CHUNK.id)]))
    refused = [guest.hear(Refused).rid for _ in range(3)]
    assert refused == [server.BUSY_MAX + 1, server.BUSY_MAX + 2, server.BUSY_MAX + 3]
    assert figure(host, "serve.tasks") == server.BUSY_MAX
    host.source.gate.set()
    assert {guest.hear(Answer).rid for _ in range(server.BUSY_MAX)} == set(range(1, server.BUSY_MAX + 1))


def test_questions_that_make_no_sense_are_refused(host: Host, guest: Dialer) -> None:
    key = b"k" * 32
    for query in (Query(0, b"short", key, b""), Query(-1, key, key, b""), Query(0, key, b"", b"")):
        guest.say(Ask(1, [query]))
        assert guest.hear(Refused).rid == 1
    guest.say(Ask(2, [exact(ChunkId(0, b"k" * 32))] * 257))
    assert guest.hear(Refused).rid == 2
    assert host.source.asked == 0


# --- being pushed to ---------------------------------------------------------------------------------------


def push(guest: Dialer, chunk: Made, payload: bytes | None = None) -> Message:
    data = chunk.payload if payload is None else payload
    guest.say(offer(1, chunk))
    guest.hear(Accepted)
    for at in range(0, len(data), PIECE_BYTES):
        guest.say(Bytes(1, at), data[at : at + PIECE_BYTES])
    while isinstance(message := guest.hear_any()[0], Taken):
        pass
    return message


def test_what_is_pushed_is_verified_and_stored(host: Host, guest: Dialer) -> None:
    assert push(guest, BIG) == Stored(1, True, "")
    assert bytes(host.source.chunks[BIG.id].payload) == BIG.payload
    guest.say(offer(2, BIG))
    assert guest.hear(Declined).reason == "have"


def test_a_push_with_one_wrong_bit_is_not_stored(host: Host, guest: Dialer) -> None:
    wrong = BIG.payload[:-1] + bytes([BIG.payload[-1] ^ 1])
    assert push(guest, BIG, wrong) == Stored(1, False, "corrupt")
    assert BIG.id not in host.source.chunks and not host.source.rooms


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (Bytes(1, 16), b"x" * 16), (Bytes(1, 0), b""), (Bytes(1, 0), None), (Bytes(1, 0), b"x" * ((2 << 20) - 100)),
        (Bytes(1, -1), b"x"),
    ],
)  # fmt: skip
def test_pieces_that_do_not_follow_each_other_end_a_push(
    host: Host, guest: Dialer, head: Bytes, piece: bytes | None
) -> None:
    guest.say(offer(1, CHUNK_2))
    guest.hear(Accepted)
    guest.say(head, piece)
    assert guest.hear(Stored).ok is False
    assert not host.source.rooms and CHUNK_2.id not in host.source.chunks


CHUNK_2 = numbered(2, granule=1 << 16)


def test_offers_of_what_is_no_chunk_are_declined(host: Host, guest: Dialer) -> None:
    forged = encode_header(msgspec.structs.replace(CHUNK_2.header, tokens=b"\7" * 128))
    for block, length in ((b"?" * 4096, 8192), (forged, len(CHUNK_2.payload)), (CHUNK_2.block, 16)):
        guest.say(Offer(1, block, length, b""))
        assert guest.hear(Declined).reason == "corrupt"
    assert not host.source.rooms


def test_pushes_of_a_guest_have_a_cap_and_may_be_withdrawn(host: Host, guest: Dialer) -> None:
    for number in range(guests.PUSHES_MAX):
        guest.say(offer(number + 1, numbered(100 + number)))
        guest.hear(Accepted)
    guest.say(offer(99, numbered(99)))
    assert guest.hear(Declined).reason == "busy"
    assert len(host.source.rooms) == guests.PUSHES_MAX == figure(host, "guest_pushes")
    for number in range(guests.PUSHES_MAX):
        guest.say(Withdraw(number + 1))
    guest.say(Ping())
    guest.hear(Pong)
    assert not host.source.rooms


def test_a_store_without_room_declines(host: Host, guest: Dialer) -> None:
    host.source.room_for = 100
    guest.say(offer(1, CHUNK_2))
    assert guest.hear(Declined).reason == "full"


def test_of_one_keepers_connections_the_last_two_count(host: Host, open_all: ExitStack) -> None:
    dialers = []
    for number in range(3):
        dialer = open_all.enter_context(closing(Dialer(host.port, hello=False)))
        dialer.say(Hello(VERSION, "keeper", b"k" * 16, False, b"keeper"))
        dialer.hear(Welcome)
        dialer.say(Open(1, CHUNK.id, 1 << 20))
        dialer.hear(Opened)
        dialers.append(dialer)
        assert host.source.lent == min(number + 1, 2)
    dialers[0].say(Ping())
    assert isinstance(dialers[0].hear_any()[0], Refused)
    dialers[2].say(Ping())
    assert dialers[2].hear(Pong)
