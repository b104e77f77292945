"""A worker's own stream, and Dynamo: what was on the device of a worker that died isn't believed in any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.kvstore.identity import chain, pack_tokens
from forebay.workers.pool_events import PoolEvents
from tests.events.consumers.environment import needs_consumers
from tests.events.consumers.test_dynamo import PATIENCE_S, Dynamo
from tests.events.support import LOOPBACK, ROOT

PROMPTS = [[1000 * number + place for place in range(64)] for number in (1, 2)]


class Addresses:
    """Where the worker publishes: free ports at its first start, the same ones after that."""

    def __init__(self) -> None:
        self.events = self.replay = LOOPBACK


@contextmanager
def worker(addresses: Addresses, epoch: str, prompts: list[list[int]]) -> Iterator[None]:
    """A worker that lives as long as the block, and computes these prompts first."""
    loop, ready, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def live() -> None:
        events = PoolEvents(addresses.events, addresses.replay, epoch, "kv@127.0.0.1:8000@tiny")
        assert events.endpoint is not None and events.replay_endpoint is not None
        addresses.events, addresses.replay = events.endpoint, events.replay_endpoint
        events.attach(asyncio.get_running_loop())
        for prompt in prompts:
            events.stored(0, None, chain(ROOT, pack_tokens(prompt)), prompt)
            events.flush()
        ready.set()
        await ended.wait()
        events.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(live()))
    thread.start()
    try:
        assert ready.wait(10)
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def believed(dynamo: Dynamo, expected: list[int]) -> None:
    """Wait until it thinks so of the worker's device."""
    until, found = time.monotonic() + PATIENCE_S, [-1]
    while found != expected and time.monotonic() < until:
        found = [dynamo.ask(tokens=prompt).get("1", [0])[0] for prompt in PROMPTS]
        time.sleep(0.05)
    assert found == expected


@needs_consumers
def test_dynamo_forgets_the_device_of_a_worker_that_died(tmp_path: Path) -> None:
    dynamo, addresses = Dynamo(tmp_path / "dynamo.log"), Addresses()
    try:
        with worker(addresses, "aa", [PROMPTS[0]] * 30):
            dynamo.ask(worker=1, events=addresses.events, replay=addresses.replay)
            believed(dynamo, [4, 0])
        # The next one is far from having said as much as its predecessor.
        with worker(addresses, "bb", [PROMPTS[1]]):
            believed(dynamo, [0, 4])
    finally:
        dynamo.process.kill()
        dynamo.process.wait()
