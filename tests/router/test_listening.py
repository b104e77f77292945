"""A stream and what the router makes of it, end to end over a socket."""

from __future__ import annotations

import asyncio
import logging

import pytest

from forebay.events.publisher import EventPublisher
from forebay.events.schema import CPU, LOCAL, BlockStored
from forebay.router.listening import Listener
from forebay.scheduler.feed import Feed
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.places import Holders
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
