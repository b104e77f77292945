"""Dynamo's SelectionService believes what the store holds, after evictions, restarts, gaps and late joins."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.events.projection import HOST_TIER
from tests.events.consumers.environment import needs_consumers, program
from tests.events.consumers.world import World

CHILD = Path(__file__).parent / "dynamo_child.py"
PATIENCE_S = 30


class Dynamo:
    """A SelectionService in a process of its own."""

    def __init__(self, log: Path) -> None:
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [program("python"), str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return answer
        raise AssertionError("Dynamo's process ended")

    def join(self, worker: int, world: World) -> None:
        stream = world.streams["maps"]
        self.ask(worker=worker, events=stream.endpoint, replay=stream.replay)

    def beliefs(self, world: World) -> dict[str, list[list[int]]]:
        """For every worker and prompt: how far it reaches on the device, on in memory, on in files."""
        answers = [self.ask(tokens=prompt) for prompt in world.prompts]
        return {worker: [answer.get(worker, [0, 0, 0]) for answer in answers] for worker in answers[0]}


@pytest.fixture
def dynamo(tmp_path: Path) -> Iterator[Dynamo]:
    running = Dynamo(tmp_path / "dynamo.log")
    yield running
    running.process.kill()
    running.process.wait()


def truth(world: World) -> list[list[int]]:
    reaches = [world.reach(prompt) for prompt in range(len(world.prompts))]
    return [[0, reach.memory, reach.memory + reach.files] for reach in reaches]


def agree(dynamo: Dynamo, world: World, workers: int) -> None:
    """Wait until all workers are believed to hold what is true; fails with the difference."""
    expected = {str(worker): truth(world) for worker in range(1, workers + 1)}
    until = time.monotonic() + PATIENCE_S
    while (believed := dynamo.beliefs(world)) != expected and time.monotonic() < until:
        world.pump(0.1)
    assert believed == expected


@needs_consumers
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_dynamo_believes_what_the_store_holds_after_a_random_run(dynamo: Dynamo, seed: int) -> None:
    world = World(seed, ["maps"])
    try:
        dynamo.join(1, world)
        agree(dynamo, world, 1)
        for _ in range(40):
            world.step()
        dynamo.join(2, world)
        agree(dynamo, world, 2)
        for _ in range(40):
            world.step()
        world.restart()
        for _ in range(10):
            world.step()
        dynamo.join(3, world)
        agree(dynamo, world, 3)
        assert world.counts["lost"] > 0 and world.counts["restarts"] > 0 and world.counts["removed"] > 0
        assert any(any(row) for row in truth(world)), "the run should have left something"
    finally:
        world.close()


@needs_consumers
def test_a_store_that_restarts_with_nothing_is_believed_to_hold_nothing(dynamo: Dynamo) -> None:
    world = World(5, ["maps"])
    try:
        dynamo.join(1, world)
        agree(dynamo, world, 1)
        for key in list(world._chunks):
            world.store(HOST_TIER, key)
        agree(dynamo, world, 1)
        world.held = {HOST_TIER: set(), "fs": set()}
        world.restart()
        agree(dynamo, world, 1)
        assert truth(world) == [[0, 0, 0]] * len(world.prompts)
    finally:
        world.close()
