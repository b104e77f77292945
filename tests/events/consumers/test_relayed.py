"""Dynamo behind the relay: each worker is believed to hold what the store holds, through restarts, without a clear."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.events.schema import AllBlocksCleared
from forebay.events.subscriber import EventSubscriber
from tests.events.consumers.environment import needs_consumers
from tests.events.consumers.test_dynamo import Dynamo, agree, dynamo, truth  # noqa: F401 - a fixture
from tests.events.consumers.world import World
from tests.events.support import LOOPBACK

WORKERS = 3


@needs_consumers
@pytest.mark.parametrize("seed", [1, 2])
def test_dynamo_believes_of_every_worker_what_the_store_holds(dynamo: Dynamo, tmp_path: Path, seed: int) -> None:  # noqa: F811
    world = World(seed, ["maps"])
    stream = world.streams["maps"]
    table = ", ".join(f"w{number} = {{}}" for number in range(WORKERS))
    log = tmp_path / "relay.log"
    with log.open("w") as out:
        relay = subprocess.Popen(
            [sys.executable, "-m", "forebay", "events", "relay", "--events", stream.endpoint, "--replay", stream.replay,
             "--publish", LOOPBACK, "--publish-replay", LOOPBACK, "--workers", f"{{ {table} }}"],
            stderr=out,
        )  # fmt: skip
    try:
        while len(lines := log.read_text().splitlines()) < WORKERS:
            assert relay.poll() is None, log.read_text()
            world.pump(0.1)
        places = [line.partition(": ")[2].split(", replay ") for line in lines]
        heard = EventSubscriber(places[0][0], replay=places[0][1])
        for number, (events, replay) in enumerate(places[:-1], 1):
            dynamo.ask(worker=number, events=events, replay=replay)
        agree(dynamo, world, WORKERS - 1)
        for _ in range(40):
            world.step()
        agree(dynamo, world, WORKERS - 1)
        world.restart()
        for _ in range(10):
            world.step()
        dynamo.ask(worker=WORKERS, events=places[-1][0], replay=places[-1][1])
        agree(dynamo, world, WORKERS)
        assert any(any(row) for row in truth(world)) and world.counts["restarts"] > 0
        told = [event for received in heard.drain(1.0) for event in received.batch.events if not received.replayed]
        assert told and not any(isinstance(event, AllBlocksCleared) for event in told)
        heard.close()
    finally:
        relay.terminate()
        relay.wait(30)
        world.close()
