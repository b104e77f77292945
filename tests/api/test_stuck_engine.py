"""A worker whose heart beats while its engine's thread stands still: real processes behind a front end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kvstore.identity import pack_tokens
from forebay.testing.standstill import pause, resume
from forebay.workers.api.calls import Call
from forebay.workers.api.link import WorkerLink
from forebay.workers.protocol import Sampling, TokenOut
from tests.api.serving import Front
from tests.workers.processes import Running, start_worker

STUCK, BUSY = 14, 15
"""Tokens on which the fragile model waits for ever, and computes for some seconds."""
NAMES = ("fragile", "sound")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Running]]:
    made = []
    for name in NAMES:
        process, front = start_worker(tmp_path, name, "label=fake", store=False)
        front.connection.close()
        made.append(process)
    yield made
    for process in made:
        process.end(signal.SIGKILL)


def begin(front: Front, first: int, worker: int) -> Call:
    """A call whose prompt begins with that token, at that worker."""
    link = front.fleet.links[worker]

    async def start() -> Call:
        for number in range(1000):
            sampling = Sampling(max_tokens=20, temperature=0, ignore_eos=True)
            call = front.fleet.start(pack_tokens([first, 50 + number % 200]), sampling, b"", "")
            if call.link is link:
                return call
            front.fleet.stop(call)
        raise AssertionError("no prompt of a thousand goes there")

    return front.run(start())


def chosen(front: Front, prompts: int) -> set[WorkerLink | None]:
    """Whom that many prompts, which share nothing, are sent to."""

    async def start() -> set[WorkerLink | None]:
        sampling = Sampling(max_tokens=20, temperature=0, ignore_eos=True)
        return {front.fleet.start(pack_tokens([60 + at, 50]), sampling, b"", "").link for at in range(prompts)}

    return front.run(start())


def tokens_of(front: Front, call: Call) -> list[int]:
    async def read() -> list[int]:
        return [event.token async for event in call.outputs() if isinstance(event, TokenOut)]

    return front.run(read())


def test_its_calls_go_on_at_another_one_and_a_long_step_stays_where_it_is(
    tmp_path: Path, workers: list[Running]
) -> None:
    with Front(tmp_path, sockets=tuple(f"{name}.sock" for name in NAMES)) as front:
        front.wait_until(lambda: all(link.able for link in front.fleet.links))
        fleet, fragile = front.fleet, front.fleet.links[0]
        long = begin(front, BUSY, 0)
        assert len(tokens_of(front, long)) == 20 and long.attempt == 1
        assert fragile.counters.stalls == 0 and fleet.counters.resubmitted == 0

        began = time.monotonic()
        stuck = begin(front, STUCK, 0)
        assert len(tokens_of(front, stuck)) == 20 and stuck.attempt == 2
        took = time.monotonic() - began
        assert fragile.stalled and fragile.counters.stalls == 1 and fragile.counters.hangs == 0
        assert fragile.connected and took > 1, "its heart beats still"
        print(f"went on after {took:.2f} s")
        assert chosen(front, 16) == {fleet.links[1]}, "and it gets nothing new"


def test_a_worker_that_was_stopped_and_wakes_is_used_again(tmp_path: Path, workers: list[Running]) -> None:
    with Front(tmp_path, sockets=tuple(f"{name}.sock" for name in NAMES)) as front:
        front.wait_until(lambda: all(link.able for link in front.fleet.links))
        stopped, link = workers[1].popen.pid, front.fleet.links[1]
        pause(stopped)
        front.wait_until(lambda: not link.able)
        assert link.counters.hangs == 1
        resume(stopped)
        front.wait_until(lambda: link.able)
        call = begin(front, 60, 1)
        assert len(tokens_of(front, call)) == 20
        front.run(asyncio.sleep(0))
        assert not front.fleet.calls and not link.calls
