"""What others' routers and publishers got wrong about recovery, each as a small case of its own."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq

from forebay.events.codec import decode_batch, encode_batch
from forebay.events.holdings import HeldIn, Holdings
from forebay.events.projection import HOST_TIER, Placement, Projection
from forebay.events.publisher import SNAPSHOT_REQUEST
from forebay.events.schema import CPU, LOCAL, STORAGE, BlockRemoved, BlockStored, KVEvent
from forebay.events.subscriber import EventSubscriber
from forebay.events.units import UnitChunk
from forebay.kvstore.announce import placements
from forebay.kvstore.identity import chain, pack_tokens
from forebay.tiers.rules import TierRule
from tests.events.support import ROOT, Raw, publishing, seqs, state, stored, tokens_of
from tests.events.test_subscriber import Answering, Scripted, take


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    publisher = Scripted()
    yield publisher
    publisher.context.destroy(linger=0)


@pytest.fixture
def raw() -> Iterator[Raw]:
    consumer = Raw()
    yield consumer
    consumer.close()


def test_a_restarted_engine_without_replay_keeps_no_block_credited(scripted: Scripted) -> None:
    holdings = Holdings()
    with EventSubscriber(scripted.endpoint) as subscriber:
        scripted.join(subscriber)
        for seq in range(10):
            scripted.say(seq, stored(1, first=1600 * seq))
        for received in take(subscriber, 10):
            holdings.apply(received)
        assert len(holdings) == 10
        scripted.say(0, stored(1, first=99_200))
        [received] = take(subscriber, 1)
        holdings.apply(received)
    assert len(holdings) == 1 and holdings.counters.fences == 1


def test_a_replay_says_which_topic_it_is_of(raw: Raw) -> None:
    with publishing(topic="kv@pod:8000@tiny") as publisher:
        publisher.publish([stored()], 0.0)
        [message] = raw.ask(publisher, 0)
    assert message[1] == b"kv@pod:8000@tiny" and len(message) == 4


def test_a_snapshot_names_the_last_number_so_nothing_is_recovered_twice(scripted: Scripted) -> None:
    parts: list[tuple[int, list[KVEvent]]] = [(41, [stored(3)]), (41, [stored(2, first=800)])]
    with (
        Answering({SNAPSHOT_REQUEST: parts}) as router,
        EventSubscriber(scripted.endpoint, replay=router.endpoint, from_start=True) as subscriber,
    ):
        assert [received.seq for received in take(subscriber, 2)] == [41, 41]
        scripted.join(subscriber)
        scripted.say(42, stored(4))
        assert [received.seq for received in take(subscriber, 1)] == [42]
    assert router.asked == [SNAPSHOT_REQUEST] and subscriber.counters.gaps == 0


def test_a_gap_of_two_costs_two_batches_and_keeps_the_prefix(scripted: Scripted) -> None:
    whole = stored(4)
    missing = [(2, [stored(1, first=800)]), (3, [stored(1, first=1600)])]
    holdings = Holdings()
    with Answering({2: missing}) as router, EventSubscriber(scripted.endpoint, replay=router.endpoint) as subscriber:
        scripted.join(subscriber)
        scripted.say(1, whole)
        scripted.say(4, stored(1, first=2400))
        batches = take(subscriber, 4)
        for received in batches:
            holdings.apply(received)
    assert [(received.seq, received.replayed) for received in batches] == [(1, False), (2, True), (3, True), (4, False)]
    assert router.asked == [2] and holdings.counters.fences == 0
    assert len(holdings.match(tokens_of(4), 16)) == 4 and holdings.trust == "exact"


def test_a_recovery_is_read_to_its_end_before_the_live_batch_that_asked_for_it(raw: Raw) -> None:
    with publishing() as publisher:
        for number in range(300):
            publisher.publish([stored(1, first=16 * number)], 0.0)
        assert seqs(raw.ask(publisher, 0)) == list(range(300)), "more than one frame, to the end mark"


def test_an_undecodable_event_costs_itself_and_not_its_batch() -> None:
    good = [msgspec.msgpack.decode(encode_batch(0.0, [stored(1, first=16 * n)]).payload)[1][0] for n in range(3)]
    payload = msgspec.msgpack.encode([0.0, [good[0], {"type": "Nonsense"}, ["BlockStored"], good[1], 7, good[2]], 0])
    batch = decode_batch(payload)
    assert len(batch.events) == 3 and batch.undecodable == 3


def chunk(units: int, group: int = 0, start: int = 0) -> UnitChunk:
    tokens = tokens_of(units)
    keys = chain(ROOT, pack_tokens(tokens))
    return UnitChunk(
        group, keys[start - 1] if start else None, tuple(keys[start:]), pack_tokens(tokens[16 * start :])
    )


def test_a_chunk_in_two_tiers_is_two_facts_and_each_removal_takes_one() -> None:
    projection = Projection(["full"])
    told = [*projection.chunk_stored(HOST_TIER, chunk(2)), *projection.chunk_stored("fs", chunk(2))]
    assert [(event.medium, event.locality) for event in told] == [(CPU, LOCAL), (STORAGE, LOCAL)]
    [demoted] = projection.chunk_removed(HOST_TIER, 0, chunk(2).keys[-1], "evicted")
    assert (demoted.medium, demoted.reason) == (CPU, "demoted"), "it is still in the other tier"
    [gone] = projection.chunk_removed("fs", 0, chunk(2).keys[-1], "evicted")
    assert (gone.medium, gone.reason) == (STORAGE, "evicted")


def test_a_part_of_a_chunk_that_goes_is_told() -> None:
    projection = Projection(["full", "full"])
    projection.chunk_stored(HOST_TIER, chunk(2, group=0))
    projection.chunk_stored(HOST_TIER, chunk(2, group=1))
    [event] = projection.chunk_removed(HOST_TIER, 1, chunk(2).keys[-1], "corrupt")
    assert isinstance(event, BlockRemoved) and len(event.block_hashes) == 2 and event.reason == "corrupt"


def test_every_kind_of_tier_is_told_with_its_place() -> None:
    kinds = {"disk": "fs", "bucket": "s3", "pool": "mooncake", "peer": "p2p", "theirs": "package.module:Class"}
    places = placements({name: TierRule(kind) for name, kind in kinds.items()})
    assert places == {
        "host": Placement("CPU", "LOCAL"), "disk": Placement("STORAGE", "LOCAL"),
        "bucket": Placement("STORAGE", "REMOTE"), "pool": Placement("CPU", "REMOTE"),
        "peer": Placement("CPU", "REMOTE"), "theirs": Placement("STORAGE", "REMOTE"),
    }  # fmt: skip
    projection = Projection(["full"], places)
    for name, place in places.items():
        [event] = projection.chunk_stored(name, chunk(2)) or [None]
        assert event is None or Placement(str(event.medium), event.locality) == place
    assert len(projection.views) == 4


@pytest.mark.parametrize("locality", [None, "LOCAL", "REMOTE"])
def test_storage_is_never_taken_for_the_device_wherever_it_is(locality: str | None) -> None:
    holdings = Holdings()
    event = stored(2, medium=STORAGE)
    holdings.apply_events([msgspec.structs.replace(event, locality=locality)])
    assert holdings.places() == {HeldIn(STORAGE, locality)}


def test_100_000_removed_blocks_leave_a_stream_as_small_as_it_was(raw: Raw) -> None:
    caps = {"ring_batches": 50, "tombstones": 1000, "heartbeat_seconds": 3600.0}
    with publishing(snapshot=lambda: [stored(2)], **caps) as publisher:
        for number in range(200):
            keys = [b"%032d" % (number * 500 + at) for at in range(500)]
            publisher.publish([BlockRemoved(list(keys), CPU)], 0.0)
        stats = publisher.stats()
        assert stats.ring_batches <= 50 and stats.tombstones <= 1000
        messages = raw.ask(publisher, SNAPSHOT_REQUEST)
        assert len(state(messages)) == 2 and sum(len(message[-1]) for message in messages) < 1 << 20


def test_a_large_snapshot_is_few_messages_and_few_bytes_a_block(raw: Raw) -> None:
    chains = [stored(64, first=1024 * number) for number in range(160)]
    with publishing(snapshot=lambda: iter(chains)) as publisher:
        publisher.publish([stored(1)], 0.0)
        messages = raw.ask(publisher, SNAPSHOT_REQUEST)
        blocks = len(state(messages))
    assert blocks == 160 * 64
    assert len(messages) <= blocks // 960 + 1 and sum(len(message[-1]) for message in messages) < 100 * blocks


def test_a_second_store_with_the_same_tokens_names_blocks_alike() -> None:
    first, second = (Projection(["full"]).chunk_stored(HOST_TIER, chunk(2)) for _ in range(2))
    assert isinstance(first[0], BlockStored) and first == second
    assert chain(b"s" * 32, pack_tokens(tokens_of(2))) != list(chunk(2).keys), "another root is another chain"


def test_a_subscriber_is_told_of_a_socket_that_is_gone_by_silence_not_by_hanging() -> None:
    context = zmq.Context()
    with EventSubscriber("tcp://127.0.0.1:9", replay="tcp://127.0.0.1:9", from_start=True, replay_timeout=0.1) as late:
        assert late.receive(0.2) is None and late.counters.failed_replays == 1
    context.term()
