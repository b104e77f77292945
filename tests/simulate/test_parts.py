"""What the simulator is made of does what processes, sockets and disks do."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.testing.simulate.disk import SimDisk
from forebay.testing.simulate.loop import Process, SimLoop
from forebay.testing.simulate.net import End, Net, Weather


@pytest.fixture(params=[False, True], ids=["in order", "shuffled"])
def loop(request: pytest.FixtureRequest) -> Iterator[SimLoop]:
    loop = SimLoop(random.Random(1), shuffle=request.param)  # type: ignore[abstract]
    yield loop
    loop.close()


def test_time_passes_only_in_the_simulation(loop: SimLoop) -> None:
    ended: list[float] = []

    async def sleep() -> None:
        await asyncio.sleep(3600)
        ended.append(loop.time())

    Process("sleeper", loop).spawn(sleep())
    loop.run_until(4000)
    assert ended == [3600] and loop.time() == 4000


def test_nothing_of_a_killed_process_runs_any_more_not_even_its_cleanup(loop: SimLoop) -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1)
            seen.append("worked")
        finally:
            seen.append("cleaned")

    process = Process("victim", loop)
    process.at_exit.append(lambda: seen.append("kernel"))
    process.spawn(work())
    loop.run_until(0.5)
    process.kill()
    loop.run_until(2)
    assert seen == ["kernel"]


def test_a_stopped_process_goes_on_where_it_was(loop: SimLoop) -> None:
    seen: list[float] = []

    async def work() -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append(loop.time())

    process = Process("sleeper", loop)
    process.spawn(work())
    loop.run_until(1.5)
    process.stop()
    loop.run_until(10)
    assert seen == [1]
    process.go_on()
    loop.run_until(20)
    assert seen == [1, 10, 11]


def test_what_a_task_raises_ends_the_run(loop: SimLoop) -> None:
    async def work() -> None:
        raise ValueError("broken")

    Process("broken", loop).spawn(work())
    with pytest.raises(ValueError, match="broken"):
        loop.run_until(1)


def pair(loop: SimLoop, weather: Weather) -> tuple[Net, End, End]:
    net = Net(loop, random.Random(2))
    net.weather = weather
    return net, *net.pair(Process("one", loop), Process("other", loop))


def collected(end: End) -> list[bytes]:
    got: list[bytes] = []

    def read() -> None:
        got.append(end.recv(7))

    end.watch_readable(read)
    return got


def test_bytes_arrive_whole_and_in_order_however_they_are_sliced_and_delayed(loop: SimLoop) -> None:
    _, one, other = pair(loop, Weather(slow_share=0.5, slice_share=1.0, buffer_bytes=100))
    got, sent = collected(other), random.Random(3).randbytes(3000)
    left = sent

    def push() -> None:
        nonlocal left
        left = left[one.send(left) :]
        if not left:
            one.close()

    one.watch_writable(push)
    loop.run_until(60, lambda: bool(got) and got[-1] == b"")
    assert b"".join(got) == sent


def test_a_descriptor_travels_and_is_closed_when_nobody_takes_it(loop: SimLoop) -> None:
    net, one, other = pair(loop, Weather())
    mine, theirs = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    one._send(b"take it", [mine])
    assert len(os.listdir("/proc/self/fd")) == before + 1
    net.reset((one, other))
    loop.run_until(1)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(mine)
    os.close(theirs)


def test_both_ends_of_a_broken_connection_get_an_error(loop: SimLoop) -> None:
    net, one, other = pair(loop, Weather())
    one.send(b"lost")
    net.reset((one, other))
    for end in (one, other):
        with pytest.raises(ConnectionResetError):
            end.recv(10)
        with pytest.raises(BrokenPipeError):
            end.send(b"more")


def disk(**faults: float) -> SimDisk:
    def strikes(name: str, share: float, rng: random.Random) -> bool:
        return rng.random() < faults.get(name, 0)

    world: Any = SimpleNamespace(disk_rng=random.Random(4), strikes=strikes)
    return SimDisk(world)


def test_what_was_synced_survives_a_power_loss_and_the_rest_may_be_anything_of_itself() -> None:
    fates = set()
    for seed in range(200):
        device = disk()
        device.write("safe", b"s" * 100)
        device.sync("safe")
        device.write("risky", b"r" * 100)
        device.lose_power(random.Random(seed))
        assert device.read("safe") == b"s" * 100
        data = device.read("risky") if "risky" in device.names() else None
        if data is None:
            fates.add("gone")
        elif data == b"r" * 100:
            fates.add("whole")
        else:
            front = data.rstrip(b"\0")
            assert set(front) <= {ord("r")} and len(data) in (len(front), 100)
            fates.add("zeros" if len(data) == 100 else "torn")
    assert fates == {"gone", "whole", "zeros", "torn"}


def test_a_full_disk_and_a_broken_one_say_so() -> None:
    device = disk()
    with pytest.raises(OSError, match="No space"):
        device.write("big", bytes(device.capacity + 1))
    with pytest.raises(OSError, match="Input/output"):
        disk(disk_error=1.0).write("any", b"x")
