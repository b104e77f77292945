"""Networks on bad days: delay, slices, flipped bits, silence, resets, in the middle of chunks."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from forebay.testing.chaosproxy import CALM, ChaosProxy, Weather
from forebay.testing.conformance import Made, Pool, numbered
from tests.tiers.p2p.rig import Asker, Host, own_folder

ROUNDS = int(os.environ.get("FOREBAY_WEATHER_ROUNDS", "12"))
BIG = numbered(1, granule=1 << 20)
"""2 MiB: two pieces."""
DEADLINE_S = 1.0
Setting = tuple[Asker, Host, ChaosProxy, ChaosProxy]
"""The tier under test, its peer, and the weather on the control connection and on streams."""


@pytest.fixture(params=["frames", "stream", "tls"])
def setting(request: pytest.FixtureRequest, open_all: ExitStack, pool: Pool, tmp_path: Path) -> Setting:
    """A tier, its peer, and the weather between them: on the control connection, and on streams."""
    keys = {"keys": str(own_folder(tmp_path, "peer"))} if request.param == "tls" else {}
    host = open_all.enter_context(closing(Host("peer", bulk=request.param, **keys)))
    control = open_all.enter_context(ChaosProxy(("127.0.0.1", host.port), seed=1))
    streams = control
    server = host.tier._engine._server
    assert server is not None
    if request.param != "frames":
        streams = open_all.enter_context(ChaosProxy(("127.0.0.1", server.stream_port), seed=2))
        server.stream_port = streams.port
    asker = Asker(pool, f"peer=127.0.0.1:{control.port}", bulk=request.param, stall_s=0.3, ask_s=0.5, **keys)
    open_all.enter_context(closing(asker))
    host.source.put(BIG)
    asker.sees("peer")
    if request.param != "frames":
        asker.until(lambda: asker.value("streams_usable") == 1, "its streams")
    assert asker.driver.serves(BIG)
    return asker, host, control, streams


def load(asker: Asker, chunk: Made, deadline_s: float = DEADLINE_S) -> str:
    """Why it failed, "" for a chunk that is there; in time, and with the right bytes."""
    began = time.monotonic()
    loaded = asker.driver.load(chunk, deadline_s=deadline_s)
    took = time.monotonic() - began
    assert took < deadline_s + 10.0, f"a load with a deadline of {deadline_s} s took {took:.2f} s"
    assert not loaded.result.ok or loaded.payload == chunk.payload, "wrong bytes were served"
    return loaded.result.reason if not loaded.result.ok else ""


def serves_again(asker: Asker, chunk: Made) -> None:
    asker.until(lambda: asker.driver.serves(chunk), "the peer to serve again")


def test_delay_and_slices_cost_time_alone(setting: Setting) -> None:
    asker, _, control, streams = setting
    control.weather = Weather(delay_s=0.02, jitter_s=0.02)
    streams.weather = Weather(delay_s=0.02, jitter_s=0.02, slice_bytes=7000)
    # A busy machine stands still for as long as `stall_s` by itself now and then.
    asker.until(lambda: load(asker, BIG, deadline_s=10.0) == "", "a load that takes its time and no harm")


def test_silence_in_the_middle_of_a_chunk_is_a_miss_in_time(setting: Setting) -> None:
    asker, host, _, streams = setting
    streams.weather = Weather(bytes_per_s=12 << 20, slice_bytes=1 << 14, direction="to_client")
    job = asker.driver.load_job(BIG, deadline_s=DEADLINE_S)
    before = streams.counts["bytes"]
    asker.driver.engine.begin([job])
    # Fast enough that no piece takes as long as `stall_s`, slow enough to be caught in the middle.
    asker.until(lambda: streams.counts["bytes"] > before + (1 << 18), "a part of the chunk")
    streams.weather = Weather(silent=True)
    began = time.monotonic()
    result = asker.driver.results_of([job])[job.id]
    assert not result.ok and time.monotonic() - began < DEADLINE_S + 10.0
    at = job.payload_offset
    asker.driver.pool.memory[at : at + job.capacity] = b"\x11" * job.capacity  # the slot is another's now
    passed = streams.counts["bytes"]
    streams.weather = CALM  # and what was held back arrives late
    asker.until(lambda: streams.open == 0 or streams.counts["bytes"] > passed, "that")
    asker.sees("peer")
    assert set(asker.driver.pool.memory[at : at + job.capacity]) == {0x11}, "nothing is written after the result"
    serves_again(asker, BIG)
    asker.until(lambda: host.source.lent == 0, "nothing to be lent any more")


def test_a_reset_in_the_middle_of_a_chunk_is_a_miss_or_another_try(setting: Setting) -> None:
    asker, _, _, streams = setting
    streams.weather = Weather(reset_after=1 << 20, direction="to_client")
    reason = load(asker, BIG)
    assert reason in ("io", "late", "missing")
    streams.weather = CALM
    serves_again(asker, BIG)


def test_flipped_bits_are_never_served(setting: Setting) -> None:
    asker, _, _, streams = setting
    served = 0
    for _ in range(4):
        streams.weather = Weather(flip_every=1 << 19, direction="to_client")
        served += load(asker, BIG) == ""
        streams.weather = CALM
        serves_again(asker, BIG)
    assert streams.counts["flips"] > 0 and served < 4


def test_any_weather_gives_the_right_bytes_or_a_miss_in_time(setting: Setting) -> None:
    asker, _, control, streams = setting
    rng = random.Random(7)
    for _ in range(ROUNDS):
        weather = Weather(
            delay_s=rng.choice((0, 0, 0.01)), jitter_s=rng.choice((0, 0.02)),
            slice_bytes=rng.choice((0, 0, 3000, 60_000)), flip_every=rng.choice((0, 0, 1 << 18, 1 << 22)),
            reset_after=rng.choice((0, 0, 0, 1 << 12, 1 << 20)), end_after=rng.choice((0, 0, 0, 1 << 19)),
            silent=rng.random() < 0.1, refuse=rng.random() < 0.2,
        )  # fmt: skip
        streams.weather = weather
        control.weather = weather if rng.random() < 0.5 else CALM
        asker.driver.engine.lookup_once([BIG.query()])
        load(asker, BIG)
        streams.weather = control.weather = CALM
    serves_again(asker, BIG)
    asker.until(lambda: asker.value("loads_running") == 0 and asker.value("queue_bytes") == 0, "rest")


def test_on_a_slow_link_loads_wait_for_each_other_and_questions_for_none_of_them(
    open_all: ExitStack, pool: Pool
) -> None:
    host = open_all.enter_context(closing(Host("peer", bulk="frames")))
    proxy = open_all.enter_context(ChaosProxy(("127.0.0.1", host.port), seed=1))
    peer = f"peer=127.0.0.1:{proxy.port}"
    asker = open_all.enter_context(closing(Asker(pool, peer, bulk="frames", stall_s=1.0, ask_s=1.0, miss_s=0.0)))
    chunks = [numbered(number, granule=1 << 19) for number in range(4)]
    for chunk in chunks:
        host.source.put(chunk)
    asker.sees("peer")
    proxy.weather = Weather(bytes_per_s=3 << 20, slice_bytes=1 << 15, direction="to_client")
    jobs = [asker.driver.load_job(chunk) for chunk in chunks]
    asker.driver.engine.begin(jobs)
    asked = 0
    while asker.value("queue_bytes") > 0:
        assert asker.driver.lookup(numbered(1000 + asked).query())[0].outcome == "miss"
        asked += 1
    results = asker.driver.results_of(jobs)
    assert all(asker.driver.check_load(job, chunk, results[job.id]) for job, chunk in zip(jobs, chunks, strict=True))
    assert asked > 3 and asker.value("peer.peer.late") == 0 == asker.value("peer.peer.downs")


def test_a_kept_stream_that_the_peer_has_hung_up_is_replaced(open_all: ExitStack, pool: Pool) -> None:
    host = open_all.enter_context(closing(Host("peer")))
    host.source.put(BIG)
    asker = open_all.enter_context(closing(Asker(pool, host.address)))
    asker.sees("peer")
    assert asker.driver.serves(BIG)
    server = host.tier._engine._stream_server
    assert server is not None and server.connections == 1
    for connection in list(server._connections):
        connection.shutdown(2)
    asker.until(lambda: server.connections == 0, "the peer to hang up")
    assert asker.driver.serves(BIG)
    assert asker.value("peer.peer.downs") == 0
    streams = asker.tier._engine._reaching.streams["peer"]
    placed = streams.open(BIG.id, len(BIG.payload), time.monotonic() + 5, 1.0)
    assert placed.block == BIG.block and placed.address == 0
    placed.done()
    for connection in list(server._connections):
        connection.shutdown(2)
    asker.until(lambda: server.connections == 0, "the peer to hang up")
    streams.open(BIG.id, len(BIG.payload), time.monotonic() + 5, 1.0).drop()
    asker.until(lambda: host.source.lent == 0, "nothing to be lent any more")
