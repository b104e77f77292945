"""A stream and what the router makes of it, end to end over a socket."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import zmq

from forebay.errors import ConfigError
from forebay.events.publisher import EventPublisher, PublisherLimits, StreamOptions
from forebay.events.schema import CPU, LOCAL, BlockRemoved, BlockStored
from forebay.events.subscriber import Received
from forebay.events.threaded import run_in_thread
from forebay.router.listening import Listener
from forebay.router.router import Router
from forebay.router.settings import RouterConfig, backends_of, check, curve_of, moved, stores_of
from forebay.scheduler.feed import Feed, Trust
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.places import Holders
from forebay.tiers.p2p.keys import own_pair
from forebay.workers.pool_events import PoolEvents
from tests.events.support import LOOPBACK

BLOCKS = 48


def event(size: int) -> BlockStored:
    hashes: list[int | bytes] = list(range(1, BLOCKS + 1))
    return BlockStored(hashes, None, list(range(size * BLOCKS)), size, medium=CPU, locality=LOCAL)


def heard(told: int, size: int) -> Feed:
    """What is known after a publisher has told of blocks of `size` tokens, where `told` was expected."""

    async def run() -> Feed:
        publisher = EventPublisher(LOOPBACK, replay=LOOPBACK)
        feed = Feed("w0", "m", PrefixIndex(), Holders(), told)
        listener = Listener(feed, publisher.endpoint, publisher.replay_endpoint, asyncio.get_running_loop())
        publisher.publish([event(size)], 0.0)
        listener.start()
        try:
            async with asyncio.timeout(20):
                while not (feed.counters.stored or feed.counters.unusable):
                    publisher.poll_replay()
                    await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(listener.close)
            publisher.close()
        return feed

    return asyncio.run(run())


def test_blocks_of_the_size_that_was_told_are_known() -> None:
    feed = heard(16, 16)
    assert len(feed.index) == BLOCKS and feed.other_size is None


def test_blocks_of_another_size_are_no_silent_miss(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        feed = heard(16, 32)
    assert len(feed.index) == 0 and feed.counters.unusable == BLOCKS and feed.other_size == 32
    assert len(caplog.records) == 1 and "w0 tells of blocks of 32 tokens" in caplog.text and "16" in caplog.text


def test_a_router_that_joins_late_is_ready_after_the_state_and_not_after_the_history() -> None:
    """However often blocks came and went before, what it takes to be ready is what is held now."""
    chains, each = 40, 64

    def chain(number: int) -> BlockStored:
        hashes: list[int | bytes] = [1 + each * number + at for at in range(each)]
        return BlockStored(hashes, None, [number] * 16 * each, 16, medium=CPU, locality=LOCAL)

    async def run() -> tuple[Feed, int]:
        publisher = EventPublisher(
            LOOPBACK, replay=LOOPBACK, options=StreamOptions(first_seq=1000, limits=PublisherLimits(ring_batches=8)),
            snapshot=lambda: iter([chain(number) for number in range(chains)]),
        )  # fmt: skip
        for number in range(2000):  # what is held now has come and gone fifty times
            event = chain(number % chains)
            gone = BlockRemoved(event.block_hashes, CPU, locality=LOCAL)
            publisher.publish([event if number >= 2000 - chains else gone], 0.0)
        feed = Feed("s0", "m", PrefixIndex(), Holders(), 16)
        listener = Listener(feed, publisher.endpoint, publisher.replay_endpoint, asyncio.get_running_loop())
        applied = 0
        apply = feed.apply

        def counted(received: Received, now: float | None = None) -> None:
            nonlocal applied
            applied += 1
            apply(received, now)

        feed.apply = counted  # type: ignore[method-assign]
        listener.start()
        try:
            async with asyncio.timeout(20):
                while len(feed.index) < chains * each:
                    publisher.poll_replay()
                    await asyncio.sleep(0.001)
        finally:
            await asyncio.to_thread(listener.close)
            publisher.close()
        return feed, applied

    feed, applied = asyncio.run(run())
    assert feed.counters.stored == chains * each, "nothing was told that is not held"
    assert applied <= 8 + chains * each // 1024 + 2, "the ring, and the state in large batches"


def test_a_stream_off_the_machine_is_read_with_keys_and_by_nobody_who_has_others(tmp_path: Path) -> None:
    worker, router, stranger = (tmp_path / name for name in ("worker", "router", "stranger"))
    public = {directory: own_pair(directory).public for directory in (worker, router, stranger)}
    (worker / "router.pub").write_bytes(public[router])
    for directory in (router, stranger):
        (directory / "workers.pub").write_bytes(public[worker])

    async def run(directory: Path) -> Feed:
        loop = asyncio.get_running_loop()
        told = PoolEvents(LOOPBACK, LOOPBACK, "boot", "m", keys=worker)
        told.attach(loop)
        told.stored(0, None, [bytes([number]) * 32 for number in range(4)], range(64))
        told.flush()
        assert told.endpoint is not None
        table = {"url": "http://127.0.0.1:1", "events": told.endpoint, "server": "workers"}
        config = RouterConfig(backends_of({"w0": table}), event_keys=directory)
        check(config)
        feed = Feed("w0", "m", PrefixIndex(), Holders(), 16)
        curve = curve_of(config, config.backends[0].server)
        listener = Listener(feed, told.endpoint, told.replay_endpoint, loop, curve=curve)
        listener.start()
        try:
            for _ in range(1000):
                if feed.counters.stored or told.stats()["events.denied"]:
                    break
                await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(listener.close)
            told.close()
        return feed

    assert asyncio.run(run(router)).counters.stored == 4
    assert asyncio.run(run(stranger)).counters.stored == 0


def test_a_worker_that_is_placed_elsewhere_is_believed_to_have_what_is_there_and_nothing_of_before() -> None:
    told = [run_in_thread(EventPublisher(LOOPBACK, replay=LOOPBACK)) for _ in range(2)]
    for number, publisher in enumerate(told):
        publisher.publish([event(16)][: 1 - number] or [BlockRemoved([999], CPU, locality=LOCAL)])
    streams = [{"events": one.endpoint, "replay": one.replay_endpoint} for one in told]

    async def run() -> None:
        table = {"url": "http://127.0.0.1:9", "store": "s", **streams[0]}
        config = RouterConfig(backends_of({"w0": table}), stores_of({"s": streams[0]}), health_s=60)
        router = Router(config)
        upstream = router.upstreams.all[0]

        def blocks() -> int:
            return len(router._index)

        upstream.models = {"m": None}
        router._listen_to(upstream)
        async with asyncio.timeout(30):
            while blocks() < BLOCKS or len(router.listeners) < 2:
                await asyncio.sleep(0.01)
            new = moved(upstream.backend, {"url": "http://127.0.0.1:10", **streams[1]})
            await router.place(0, new, stores_of({"s": streams[1]})[0])
            assert (blocks(), upstream.backend.port, upstream.models, router.listeners) == (0, 10, {}, {})
            upstream.models = {"m": None}
            router._listen_to(upstream)
            while router.listeners["s"].feed.trust is not Trust.EXACT:
                await asyncio.sleep(0.01)
            assert blocks() == 0
            told[1].publish([event(16)])
            while blocks() < BLOCKS:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(router.close)

    try:
        asyncio.run(run())
    finally:
        for publisher in told:
            publisher.close()


def test_keys_that_cannot_be_had_are_told_at_the_start(tmp_path: Path) -> None:
    table = {"w0": {"url": "http://127.0.0.1:1", "events": "tcp://10.0.0.1:5557", "server": "node"}}
    with pytest.raises(ConfigError, match="--event-keys"):
        check(RouterConfig(backends_of(table)))
    with pytest.raises(ConfigError, match=r"node\.pub"):
        curve_of(RouterConfig(backends_of(table), event_keys=tmp_path), "node")
    assert curve_of(RouterConfig(backends_of(table)), None) is None
    (tmp_path / "node.pub").write_bytes(zmq.curve_keypair()[0])
    assert curve_of(RouterConfig(backends_of(table), event_keys=tmp_path), "node") is not None


def test_a_listener_that_fails_believes_nothing_and_begins_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forebay.router.listening.AGAIN_S", 0.01)

    async def run() -> Listener:
        publisher = EventPublisher(LOOPBACK, replay=LOOPBACK)
        feed = Feed("w0", "m", PrefixIndex(), Holders(), 16)
        listener = Listener(feed, publisher.endpoint, publisher.replay_endpoint, asyncio.get_running_loop())
        publisher.publish([event(16)], 0.0)
        healthy, calls = listener._hand_over, []

        def hand_over(received: Received) -> None:
            healthy(received)
            calls.append(received)
            if len(calls) == 1:
                raise zmq.ZMQError(zmq.ETERM)

        monkeypatch.setattr(listener, "_hand_over", hand_over)
        trusts: list[Trust] = []
        down = feed.down
        monkeypatch.setattr(feed, "down", lambda: (trusts.append(feed.trust), down()))
        listener.start()
        try:
            async with asyncio.timeout(20):
                while len(calls) < 2 or not len(feed.index):
                    publisher.poll_replay()
                    await asyncio.sleep(0.005)
        finally:
            await asyncio.to_thread(listener.close)
            publisher.close()
        assert trusts == [Trust.EXACT] and feed.trust is Trust.EXACT and len(feed.index) == BLOCKS
        assert feed.counters.fences == 1
        return listener

    assert asyncio.run(run()).failures == 1
    assert "w0 can't be listened to" in caplog.text


def test_a_stream_that_should_say_something_and_does_not_is_believed_in_nothing_and_begun_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.router.listening._WAIT_S", 0.01)

    async def run() -> list[int]:
        publisher = EventPublisher(LOOPBACK, replay=LOOPBACK)
        feed = Feed("s", "m", PrefixIndex(), Holders(), 16)
        loop = asyncio.get_running_loop()
        listener = Listener(feed, publisher.endpoint, publisher.replay_endpoint, loop, quiet_s=0.2)
        publisher.publish([event(16)], 0.0)
        believed: list[int] = []
        down = feed.down

        def seen_down() -> None:
            down()
            believed.append(len(feed.index))

        monkeypatch.setattr(feed, "down", seen_down)
        listener.start()
        try:
            async with asyncio.timeout(30):
                while not believed or not len(feed.index):  # silence, and then what it held once more
                    publisher.poll_replay()
                    await asyncio.sleep(0.005)
        finally:
            await asyncio.to_thread(listener.close)
            publisher.close()
        return believed

    assert set(asyncio.run(run())) == {0}
