"""Hosts and masters that die, hang and come back: misses within the deadline, and never a wrong byte."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forebay.errors import ConfigError, TierUnavailable
from forebay.testing.conformance import Driver, InProcess, Made, OwnProcess, Pool, numbered
from forebay.testing.mooncake import Master, Member
from forebay.tiers.base import ClearScope
from forebay.tiers.host import TierHost
from forebay.tiers.mooncake import library, tier, watch
from forebay.tiers.mooncake.options import SEGMENT_BYTES_MIN
from forebay.tiers.mooncake.tier import MooncakeTier
from forebay.tiers.registry import create_tier

LONG_S = 30.0
"""Far more than anything should take here, and far less than the library waits by itself: a minute or more."""
BIG = 2 << 20
"""Granule of a chunk whose transfer takes long enough to be interrupted."""


def options(master: Master, **more: Any) -> dict[str, Any]:
    right = {"master": str(master.address), "trusted_network": True, "segment_bytes": 0, "rpc_timeout_s": 1.0}
    return right | more


@contextmanager
def joined(master: Master, pool: Pool, **more: Any) -> Iterator[Driver]:
    """A tier in this process. It lends nothing by default, so all chunks lie with other hosts."""
    driver = Driver(pool, InProcess(MooncakeTier("tier", options(master, **more), sweep_s=0.1), pool))
    try:
        yield driver
    finally:
        driver.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(64 << 20)
    yield made
    made.close()


def stored(driver: Driver, chunks: list[Made]) -> None:
    for chunk in chunks:
        assert driver.store(chunk).ok
        assert driver.serves(chunk)


def test_a_host_that_dies_takes_its_chunks_with_it_and_nothing_else(master: Master, pool: Pool) -> None:
    """Its keys are there until the master has noticed; loads of them fail at once, or by their deadline."""
    with Member(master) as dying, joined(master, pool) as driver:
        lost = [numbered(i, granule=100_000) for i in range(4)]
        stored(driver, lost)
        with Member(master):
            dying.kill()
            began = time.monotonic()
            assert not any(driver.load(chunk, deadline_s=3.0).result.ok for chunk in lost)
            assert time.monotonic() - began < LONG_S
            driver.until(lambda: not any(driver.has(chunk) for chunk in lost), "the master to notice")
            driver.until(lambda: driver.store(lost[0]).ok and driver.serves(lost[0]), "a place with a living host")


@pytest.fixture
def noticed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library drops a connection without progress after 2 s: a hang is to be seen well before, also by a slow
    machine."""
    monkeypatch.setattr(watch, "HANGS_S", 0.5)


@pytest.mark.usefixtures("noticed_soon")
def test_a_host_that_hangs_costs_a_deadline_once_and_writes_nothing_later(master: Master, pool: Pool) -> None:
    with Member(master) as hanging, joined(master, pool) as driver:
        chunks = [numbered(i, granule=BIG) for i in range(4)]
        stored(driver, chunks)
        hanging.pause()
        jobs = [driver.load_job(chunk, deadline_s=0.5) for chunk in chunks]
        began = time.monotonic()
        results = driver.finish(jobs)
        assert {result.reason for result in results.values()} == {"late"}
        assert time.monotonic() - began < LONG_S, "a job waited for its host"
        driver.until(lambda: driver.value("calls_hung") > 0, "the hang to be noticed")
        assert driver.value("hosts_suspected") == 1 and driver.value("threads_hanging") > 0
        spared = driver.load(chunks[0], deadline_s=10.0)
        assert spared.result.reason in ("io", "missing") and driver.value("loads_late") == len(jobs)
        assert not driver.has(chunks[0]), "nobody should wait for it"
        slots = [driver.pool.memory[job.payload_offset : job.payload_offset + job.capacity] for job in jobs]
        for slot in slots:
            slot[:] = b"\x77" * len(slot)  # they belong to other chunks now
        hanging.resume()
        driver.until(lambda: driver.value("threads_hanging") == 0, "the call to come back")
        time.sleep(0.5)
        assert all(bytes(slot) == b"\x77" * len(slot) for slot in slots), "bytes came after the deadline"


@pytest.mark.usefixtures("noticed_soon")
def test_a_close_ends_loads_whose_call_hangs(
    master: Master, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "CLOSE_S", 0.5)
    chunk = numbered(1)
    with Member(master) as hanging, joined(master, pool) as other, joined(master, pool) as driver:
        stored(other, [chunk])
        hanging.pause()
        job = driver.load_job(chunk, deadline_s=60.0)
        driver.engine.begin([job])
        driver.until(lambda: driver.value("threads_hanging") == 1, "the hang to be noticed")
        began = time.monotonic()
        driver.end()
        assert time.monotonic() - began < LONG_S
        assert [result.reason for result in driver.results] == ["dropped"]
        hanging.resume()


def test_a_host_that_hangs_holds_up_the_stores_that_go_there_and_no_others(master: Master, pool: Pool) -> None:
    """A host that was never spoken to hangs a call for a minute; the master sends stores there until it has noticed."""
    metrics = str(master.metrics)
    with Member(master) as hanging, joined(master, pool, write_threads=1, master_metrics=metrics) as driver:
        hanging.pause()
        held_up = driver.store_job(numbered(1))
        driver.engine.begin([held_up])
        driver.until(lambda: driver.value("threads_hanging") == 1, "the hang to be noticed")
        with Member(master, 64 << 20):
            driver.until(lambda: driver.value("pool_capacity_bytes") == 64 << 20, "the master to have noticed as well")
            assert driver.store(numbered(2)).ok and driver.serves(numbered(2))
            hanging.resume()
            assert not driver.results_of([held_up])[held_up.id].ok or driver.serves(numbered(1))


def test_a_master_that_dies_and_comes_back_has_forgotten_everything(master: Master, pool: Pool) -> None:
    with Member(master), joined(master, pool, quota_bytes=8 << 20) as driver:
        chunks = [numbered(i) for i in range(4)]
        stored(driver, chunks)
        master.kill()
        assert not any(driver.serves(chunk) for chunk in chunks)
        driver.until(lambda: not driver.has(chunks[0]), "a lookup without a master")
        assert not driver.store(numbered(9)).ok
        assert driver.value("chunks") == 4 and all(change.stored for change in driver.changes), "nobody knows better"
        master.start()
        driver.until(lambda: driver.store(numbered(10)).ok, "the pool to be there again")
        assert not any(driver.has(chunk) or driver.serves(chunk) for chunk in chunks)
        driver.until(lambda: driver.value("chunks") == 1, "the account to be put right")
        gone = {change.chunk for change in driver.changes if not change.stored}
        assert gone == {chunk.id for chunk in chunks}
        stored(driver, chunks)


def test_a_master_that_hangs_keeps_nobody_waiting_longer_than_its_deadline(master: Master, pool: Pool) -> None:
    with Member(master), joined(master, pool, rpc_timeout_s=1.0) as driver:
        chunk = numbered(1)
        stored(driver, [chunk])
        master.pause()
        began = time.monotonic()
        assert driver.load(chunk, deadline_s=0.3).result.reason in ("late", "missing", "io")
        driver.engine.forget([numbered(5).id], "cleared")
        assert time.monotonic() - began < LONG_S
        with pytest.raises(TierUnavailable):
            driver.engine.clear_scope(ClearScope())
        master.resume()
        driver.until(lambda: driver.store(chunk).ok and driver.serves(chunk), "the master to go on")
        driver.until(lambda: driver.value("chunks_leaving") == 0, "the removal to be made")


def test_a_tier_whose_process_is_killed_loses_what_it_lent_and_goes_on(master: Master, pool: Pool) -> None:
    lending = options(master, segment_bytes=SEGMENT_BYTES_MIN)
    driver = Driver(pool, OwnProcess(lambda **hooks: TierHost("tier", "mooncake", lending, **hooks), pool))
    try:
        engine = driver.engine
        assert isinstance(engine, OwnProcess) and engine.host.pid is not None
        chunks = [numbered(i) for i in range(6)]
        stored(driver, chunks)
        first = engine.host.pid
        os.kill(first, signal.SIGKILL)
        driver.until(lambda: engine.host.alive and engine.host.pid != first, "another process")
        assert not any(driver.serves(chunk) for chunk in chunks)
        driver.until(lambda: not any(driver.has(chunk) for chunk in chunks), "the master to notice")
        driver.until(lambda: driver.store(chunks[0]).ok and driver.serves(chunks[0]), "the pool to take chunks again")
    finally:
        driver.close()


def test_chunks_of_one_host_are_served_to_another(master: Master, pool: Pool) -> None:
    lending = options(master, segment_bytes=SEGMENT_BYTES_MIN)
    driver = Driver(pool, OwnProcess(lambda **hooks: TierHost("tier", "mooncake", lending, **hooks), pool))
    try:
        chunks = [numbered(i, granule=30_000) for i in range(8)]
        stored(driver, chunks)
        with joined(master, pool) as other:
            assert all(other.has(chunk) and other.serves(chunk) for chunk in chunks)
            assert other.value("chunks") == 0, "they aren't in its account"
            other.engine.forget([chunks[0].id], "cleared")
            driver.until(lambda: not driver.serves(chunks[0]), "a removal by another host")
            assert other.engine.clear_scope(ClearScope(b"n" * 32)) is None
            assert other.engine.clear_scope(ClearScope()) == 7
            assert not any(driver.serves(chunk) for chunk in chunks)
    finally:
        driver.close()


def test_a_full_pool_refuses_and_counts(master: Master, pool: Pool) -> None:
    """Here nothing can be evicted, since all of it was read just now."""
    with Member(master, SEGMENT_BYTES_MIN), joined(master, pool) as driver:
        reasons = []
        for number in range(12):
            chunk = numbered(number, granule=1 << 20)
            reasons.append(driver.store(chunk).reason)
            driver.serves(chunk)
        assert reasons[0] == "" and "full" in reasons
        assert driver.value("pool_full_retries") > 0
        assert driver.value("stores_full") == reasons.count("full")


# --- starting ------------------------------------------------------------------------------------------


def test_without_a_master_the_start_says_so_soon(master: Master) -> None:
    master.kill()
    began = time.monotonic()
    with pytest.raises(TierUnavailable, match=str(master.address)):
        create_tier("mooncake", "tier", options(master))
    assert time.monotonic() - began < LONG_S


def test_without_its_system_library_the_start_names_the_package(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "IBVERBS", "libabsent.so.1")
    with pytest.raises(ConfigError, match="apt-get install libibverbs1"):
        create_tier("mooncake", "tier", options(master))


def test_without_its_package_the_start_names_the_extra(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"forebay\[mooncake\]"):
        create_tier("mooncake", "tier", options(master))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"trusted_network": False}, "trusted_network"), ({"master": "here"}, "master"), ({"master": "h:0"}, "master"),
        ({"segment_bytes": 1 << 20}, "16 MiB"), ({"prefix": "a/b"}, "prefix"), ({"replicas": 0}, "replicas"),
        ({"quota_bytes": 5}, "quota_bytes"), ({"read_threads": 0}, "read_threads"), ({"colour": 1}, "colour"),
        ({"rpc_timeout_s": 0.0}, "rpc_timeout_s"), ({"master_metrics": "x"}, "master_metrics"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(wrong: dict[str, Any], named: str) -> None:
    right = {"master": "127.0.0.1:1", "trusted_network": True}
    with pytest.raises(ConfigError, match=named):
        create_tier("mooncake", "tier", right | wrong)


def test_the_pools_figures_are_told_where_the_masters_metrics_are_named(master: Master, pool: Pool) -> None:
    with Member(master, 64 << 20), joined(master, pool, master_metrics=str(master.metrics)) as driver:
        stored(driver, [numbered(1)])
        driver.until(lambda: driver.value("pool_capacity_bytes") == 64 << 20, "the pool's figures")
        driver.until(lambda: driver.value("pool_keys") == 1 and driver.value("pool_bytes") > 0, "a new look")
