"""vllm-router's kv_aware policy credits what two stores hold, after evictions, restarts, gaps and a late join.

It says which prefix it credits to the worker that it chooses: that in memory at 0.8 or that in files at 0.3, whichever
is worth more.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from forebay.events.projection import HOST_TIER
from forebay.testing.cluster import wait_for
from forebay.testing.ports import free_port
from tests.events.consumers.environment import needs_consumers, program
from tests.events.consumers.fake_worker import FakeWorker
from tests.events.consumers.world import World

PATIENCE_S = 30
DECISION = re.compile(r'KV prefix decision .*worker="([^"]*)".*credited_prefix_tokens=(\d+)')
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Choice(NamedTuple):
    """Which worker a prompt went to, and how many tokens were credited to it."""

    worker: int
    tokens: int


class Router:
    """A vllm-router before two workers; worker i is told of what `worlds[i]` holds."""

    def __init__(self, folder: Path, worlds: list[World], workers: list[FakeWorker]) -> None:
        self.workers, self.log = workers, folder / "router.log"
        self.url = f"http://127.0.0.1:{free_port()}"
        arguments = [
            program("vllm-router"), "--host", "127.0.0.1", "--port", self.url.rpartition(":")[2],
            "--policy", "kv_aware", "--kv-event-model", "tiny",
            "--prometheus-port", str(free_port()), "--log-level", "debug",
            "--worker-urls", *(worker.url for worker in workers),
        ]  # fmt: skip
        for worker, world in zip(workers, worlds, strict=True):
            stream = world.streams["strict"]
            arguments += ["--kv-event-source", f"{worker.url}={stream.endpoint}"]
            arguments += ["--kv-event-replay-source", f"{worker.url}={stream.replay}"]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(arguments, stdout=out, stderr=out)
        wait_for("vllm-router", self._healthy)

    def _healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def choose(self, tokens: list[int]) -> Choice:
        """Send a prompt through the router, and read what it thought."""
        before = len(self._decisions())
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 1}
        assert httpx.post(f"{self.url}/v1/completions", json=body, timeout=30).status_code == 200
        wait_for("a decision in the log", lambda: len(self._decisions()) > before, PATIENCE_S)
        return self._decisions()[-1]

    def _decisions(self) -> list[Choice]:
        urls = [worker.url for worker in self.workers]
        text = COLOURS.sub("", self.log.read_text())
        return [Choice(urls.index(url), int(tokens)) for url, tokens in DECISION.findall(text)]


def credit(world: World, prompt: int) -> int:
    """What the router should credit to the worker of this store, in tokens."""
    memory, files = ([key in world.units(tier) for key in world.keys[prompt]] for tier in (HOST_TIER, "fs"))
    in_memory, in_files = (sum(1 for _ in itertools.takewhile(bool, tier)) for tier in (memory, files))
    return int(16 * max(0.8 * in_memory, 0.3 * in_files) + 1e-6)


@pytest.fixture
def workers() -> Iterator[list[FakeWorker]]:
    with ExitStack() as stack:
        made = [FakeWorker(), FakeWorker()]
        for worker in made:
            stack.callback(worker.close)
        yield made


def agree(router: Router, worlds: list[World]) -> None:
    """Wait until every prompt goes where more of it is, with the right credit; fails with the first difference."""
    until = time.monotonic() + PATIENCE_S
    for number, prompt in enumerate(worlds[0].prompts):
        credits = [credit(world, number) for world in worlds]
        # One more block: a router doesn't credit a prompt's very last one.
        while True:
            choice = router.choose([*prompt, *range(16)])
            right = choice.tokens == max(credits) and choice.tokens == credits[choice.worker]
            if right or time.monotonic() > until:
                break
            for world in worlds:
                world.pump(0.1)
        assert right, (number, choice, credits)


@needs_consumers
@pytest.mark.parametrize("seed", [1, 2])
def test_a_router_credits_what_the_stores_hold_after_a_random_run(
    tmp_path: Path, workers: list[FakeWorker], seed: int
) -> None:
    worlds = [World(seed, ["strict"]), World(seed, ["strict"])]
    try:
        for _ in range(15):
            worlds[0].step()
        router = Router(tmp_path, worlds, workers)
        try:
            worlds[1].rng.seed(seed + 100)
            agree(router, worlds)
            for _ in range(40):
                for world in worlds:
                    world.step()
            agree(router, worlds)
            worlds[0].restart()
            for _ in range(10):
                worlds[1].step()
            agree(router, worlds)
            assert all(world.counts["lost"] for world in worlds)
            assert any(credit(world, number) for world in worlds for number in range(6))
            assert all(worker.completions for worker in workers), "both should have been chosen"
        finally:
            router.process.terminate()
            router.process.wait(30)
    finally:
        for world in worlds:
            world.close()
